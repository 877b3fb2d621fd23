"""Rows into a table of PostgreSQL, exactly once: appended, or merged by their key.

Each epoch is one transaction, which has its rows and, in the table `fordstone_epochs` beside the target, its number. That table has one
row per sink: the newest epoch with the number and a digest of its rows, and who may write (rule 18). A release locks this row first and
looks at it: so of two writers that are both on their way one waits for the other, the one that was replaced is refused in the
transaction that would make its rows visible, and it is found out whether a commit was made whose answer was lost.

Invariants: nothing is visible of an epoch that is not recorded, and nothing is recorded without its rows; an epoch with other rows than
those recorded under its number is an error; rows of several keys are locked in one order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import polars as pl
import psycopg
from psycopg import sql

from fordstone.connectors.base import Sink, SinkDelayedError, SinkStream, judge_claim, later_output, owned_by_newer
from fordstone.connectors.postgres.server import Cursor, Server, problem_of
from fordstone.connectors.postgres.settings import PostgresSettings
from fordstone.connectors.postgres.table import append_rows, merge_rows, open_target, quoted
from fordstone.connectors.released_rows import ID, appended_rows, digest_of, last_changes
from fordstone.errors import SinkError
from fordstone.lang.python_times import shown_row
from fordstone.protocol.claim import SinkWriter

log = logging.getLogger(__name__)

_ROW_CHARS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the database has of a sink: its newest epoch with rows, and who may write."""

    epoch: int
    rows: int
    digest: str
    writer: SinkWriter


class PostgresSink(Sink):
    """Writes one stream into one table, under one name."""

    def __init__(self, settings: PostgresSettings, stream: SinkStream, secrets: Mapping[str, str]) -> None:
        self._settings = settings
        self._where = settings.where
        self._stream = stream
        self._key = _key_of(settings, stream)
        self._app = settings.app or "/".join(name for name in (stream.pipeline, stream.node, stream.step) if name)
        self._server = Server(settings, secrets, name=f"fordstone {self._app}")
        try:
            with self._errors_as("open"), self._server.transaction() as cursor:
                self._target = open_target(cursor, settings, stream, self._key, where=self._where)
                self._take(cursor)
        except BaseException:
            self._server.close()
            raise

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Commit the epoch, unless the database has it. One without rows is not recorded."""
        rows = self._rows(frame)
        digest = digest_of(rows, self._stream.schema, exact=True)
        with self._errors_as("write to", rows, epoch), self._server.transaction() as cursor:
            recorded = self._checked(cursor, lock=not rows.is_empty())
            if rows.is_empty():
                return
            if epoch <= recorded.epoch:
                self._check_released(recorded, epoch, rows.height, digest)
                return
            self._put(cursor, rows, epoch)
            self._record(cursor, replace(recorded, epoch=epoch, rows=rows.height, digest=digest))

    def write(self, frame: pl.DataFrame) -> None:
        """Commit rows now. Appended rows keep their ids in a column `__id`; upserts need none, being merged by their key."""
        rows = self._rows(frame)
        try:
            with self._errors_as("write to", rows), self._server.transaction() as cursor:
                self._checked(cursor, lock=not rows.is_empty())
                if not rows.is_empty():
                    self._put(cursor, rows, None)
        except SinkDelayedError as error:
            # Nothing keeps these rows but the input: the engine goes back to its checkpoint, and waits when it opens the sink.
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        self._server.close()

    # The record.

    def _take(self, cursor: Cursor) -> None:
        """Take the sink over, if this writer may, and look for later epochs than those of its state."""
        insert = "INSERT INTO {} VALUES (%s, %s, 0, 0, '', %s, clock_timestamp()) ON CONFLICT (target, sink) DO NOTHING"
        nobody = msgspec.json.encode(SinkWriter()).decode()
        cursor.execute(sql.SQL(insert).format(self._target.epochs), (self._target.text, self._app, nobody))
        recorded, stream = self._recorded(cursor, lock=True), self._stream
        if stream.owner:
            found = [recorded.writer] if recorded.writer.holder else []
            judge_claim(self._where, stream, found, lambda: self._check_later(recorded))
            recorded = replace(recorded, writer=stream.writer)
        self._check_later(recorded)
        if self._has_later(recorded):
            recorded = self._discard(cursor, recorded)
        self._record(cursor, recorded)

    def _recorded(self, cursor: Cursor, *, lock: bool) -> Recorded:
        query = "SELECT epoch, rows, digest, writer FROM {} WHERE target = %s AND sink = %s"
        asked = sql.SQL(query + " FOR UPDATE" if lock else query).format(self._target.epochs)
        found = cursor.execute(asked, (self._target.text, self._app)).fetchone()
        if found is None:
            raise SinkError(
                f"sink {self._stream.step}: the record of its epochs is gone from {quoted(self._target.schema, 'fordstone_epochs')}, so it is "
                f"not known which of them {self._where} has. Restore it. Nothing was written."
            )
        epoch, rows, digest, writer = found
        return Recorded(
            epoch=epoch, rows=rows, digest=digest, writer=msgspec.json.decode(writer, type=SinkWriter, strict=False)
        )

    def _record(self, cursor: Cursor, recorded: Recorded) -> None:
        change = (
            "UPDATE {} SET epoch = %s, rows = %s, digest = %s, writer = %s, changed = clock_timestamp() "
            "WHERE target = %s AND sink = %s"
        )
        writer = msgspec.json.encode(recorded.writer).decode()
        values = (recorded.epoch, recorded.rows, recorded.digest, writer, self._target.text, self._app)
        cursor.execute(sql.SQL(change).format(self._target.epochs), values)

    def _checked(self, cursor: Cursor, *, lock: bool) -> Recorded:
        """What is recorded; raise `FencedError` if another writer has taken over."""
        recorded = self._recorded(cursor, lock=lock)
        if self._stream.owner and recorded.writer != self._stream.writer:
            raise owned_by_newer(self._where, self._stream, recorded.writer)
        return recorded

    def _check_released(self, recorded: Recorded, epoch: int, rows: int, digest: str) -> None:
        """An epoch that is recorded must be this one."""
        if epoch == recorded.epoch and (rows, digest) == (recorded.rows, recorded.digest):
            return
        other = f"with other rows ({recorded.rows}) than are" if epoch == recorded.epoch else "so this one is not"
        raise SinkError(
            f"sink {self._stream.step}: {self._where} already has epoch {recorded.epoch} of {self._app!r}, {other} released now (epoch {epoch}, "
            f"{rows} rows).\nIt is the output of another run or pipeline. Choose another table, or another name with app=... . Nothing was written."
        )

    # Later epochs than those of the state.

    def _has_later(self, recorded: Recorded) -> bool:
        known = self._stream.resumes_after
        return known is not None and recorded.epoch > known

    def _check_later(self, recorded: Recorded) -> None:
        """Later epochs are an error, unless they are to be set aside."""
        if self._has_later(recorded) and not self._stream.discard_later:
            raise self._later(recorded)

    def _discard(self, cursor: Cursor, recorded: Recorded) -> Recorded:
        """Set them aside: delete appended rows by their epoch. Merged rows stay until those of the same keys come again."""
        known = self._stream.resumes_after or 0
        if self._key is None:
            others = "SELECT count(*) FROM {} WHERE target = %s AND sink <> %s"
            asked = sql.SQL(others).format(self._target.epochs)
            (count,) = cursor.execute(asked, (self._target.text, self._app)).fetchone() or (0,)
            if self._settings.epoch_column is None:
                raise self._later(recorded, because="its rows do not carry their epoch (epoch_column=...)")
            if count:
                raise self._later(recorded, because="other sinks write to the table, and number their epochs too")
            delete = sql.SQL("DELETE FROM {} WHERE {} > %s")
            cursor.execute(delete.format(self._target.id, sql.Identifier(self._settings.epoch_column)), (known,))
        extra = {"step": self._stream.step, "first": known + 1, "last": recorded.epoch}
        log.warning("later output set aside", extra=extra)
        return replace(recorded, epoch=known, rows=0, digest="")

    def _later(self, recorded: Recorded, *, because: str | None = None) -> SinkError:
        known, literal = self._stream.resumes_after or 0, sql.Literal
        mine = f"target = {literal(self._target.text).as_string()} AND sink = {literal(self._app).as_string()}"
        epochs = quoted(self._target.schema, "fordstone_epochs")
        set_back = f"UPDATE {epochs} SET epoch = {known} WHERE {mine};"  # noqa: S608 - shown, not run
        forget = f"DELETE FROM {epochs} WHERE {mine};"  # noqa: S608 - as above
        cannot = "" if because is None else f" (--discard-later-output cannot, because {because})"
        by_hand = f"take their rows out of the table by hand, set its record back, and start again{cannot}: {set_back}"
        merged = (
            "start once with --discard-later-output (in Python: discard_later_output=True): their rows stay until rows of the same keys come "
            "again, and replace them."
        )
        removable = self._key is None and self._settings.epoch_column is not None and because is None
        return later_output(
            self._where,
            self._stream,
            range(known + 1, recorded.epoch + 1),
            problem=merged if self._key is not None else None if removable else by_hand,
            start_over=f"To start over with all input, empty the table, remove its record, and use --fresh: {forget}",
        )

    # Rows.

    def _rows(self, frame: pl.DataFrame) -> pl.DataFrame:
        if self._key is None:
            return appended_rows(frame, self._stream.schema, where=self._where)
        return last_changes(frame, self._stream.schema, self._key, where=self._where)

    def _put(self, cursor: Cursor, rows: pl.DataFrame, epoch: int | None) -> None:
        schema = self._stream.schema
        if self._settings.epoch_column is not None:
            rows = rows.with_columns(pl.lit(epoch, dtype=pl.Int64).alias(self._settings.epoch_column))
        if self._key is not None:
            merge_rows(cursor, self._target, rows, schema, self._key, app=self._app)
            return
        if ID in rows.columns and ID not in self._target.columns:
            add = sql.SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {} text")
            cursor.execute(add.format(self._target.id, sql.Identifier(ID)))
        append_rows(cursor, self._target, rows, schema)

    @contextmanager
    def _errors_as(self, doing: str, rows: pl.DataFrame | None = None, epoch: int | None = None) -> Iterator[None]:
        """Raise errors of the server as errors of this sink."""
        try:
            yield
        except psycopg.Error as error:
            problem = problem_of(error)
            what = f"sink {self._stream.step}: could not {doing} {self._where}: {problem.text}"
            if problem.away:
                raise SinkDelayedError(what) from error
            lines = [". ".join(part.rstrip(".") for part in (what, problem.detail) if part) + "."]
            if rows is not None:
                if problem.line is not None and problem.line <= rows.height:
                    lines.append(f"The row: {str(shown_row(rows, problem.line - 1))[:_ROW_CHARS_MAX]}")
                of = "These rows were not" if epoch is None else f"Nothing of epoch {epoch} was"
                lines.append(
                    f"{of} written. They come again at the next start: change the table so that it takes them."
                )
            raise SinkError("\n".join(lines)) from error


def _key_of(settings: PostgresSettings, stream: SinkStream) -> tuple[str, ...] | None:
    """By which columns rows replace each other; None: they are appended."""
    key = settings.key if stream.upsert_key is None else stream.upsert_key
    if settings.key is not None and set(settings.key) != set(key or ()):
        raise SinkError(
            f"sink {stream.step}: {settings.where} has key={list(settings.key)}, but the rows of the stream replace each other by "
            f"{list(key or ())}. Leave key= out."
        )
    unknown = [name for name in key or () if name not in stream.schema]
    if unknown:
        raise SinkError(f"sink {stream.step}: the key column {unknown[0]!r} is not among {', '.join(stream.schema)}.")
    if settings.epoch_column in stream.schema:
        raise SinkError(
            f"sink {stream.step}: the stream has a column {settings.epoch_column!r}, which epoch_column= names. Choose another name."
        )
    return key
