"""A table, or the rows of a query, read whole: what a lookup reads.

All rows are of one snapshot of the database, that of the one statement that selects them. The statement before it has locked the tables against TRUNCATE and
the like, which older snapshots, such as that of a whole transaction, would show as empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import polars as pl
import psycopg
from psycopg import sql

from fordstone.connectors.base import Chunk, Reader, Source, SourceOptions
from fordstone.connectors.postgres.columns import cast_to, shown_columns
from fordstone.connectors.postgres.server import Cursor, Row, Server, problem_of
from fordstone.connectors.postgres.settings import PostgresSettings
from fordstone.connectors.postgres.table import quoted
from fordstone.errors import SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position

PARTITION: Final = PartitionId("rows")
_FETCH_ROWS: Final = 1 << 14
_TYPES: Final = (
    "SELECT CASE WHEN t.typtype = 'd' THEN b.typname WHEN t.typtype = 'e' THEN 'enum' ELSE t.typname END, format_type(t.oid, NULL) FROM unnest(%s::oid[]) "
    "WITH ORDINALITY AS o (id, place) JOIN pg_type t ON t.oid = o.id LEFT JOIN pg_type b ON b.oid = t.typbasetype ORDER BY o.place"
)


class PostgresSource(Source):
    """Has one partition. A position is a number of rows, which means nothing to another read: the kind declares that."""

    def __init__(self, settings: PostgresSettings, options: SourceOptions, secrets: Mapping[str, str]) -> None:
        self._settings = settings
        self._schema = options.schema
        self._secrets = secrets

    def partitions(self) -> Sequence[PartitionId]:
        return [PARTITION]

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        del partition
        server = Server(self._settings, self._secrets, name="fordstone lookup")
        return PostgresReader(self._settings, self._schema, server, position, with_positions=with_positions)

    def ended(self) -> bool:
        return True


class PostgresReader(Reader):
    """Reads in one transaction, which begins with the first read."""

    def __init__(
        self, settings: PostgresSettings, schema: Schema, server: Server, position: Position, *, with_positions: bool
    ) -> None:
        self._settings, self._where = settings, settings.where
        self._schema = schema
        self._server = server
        self._position = int(position)
        self._with_positions = with_positions
        self._stack = ExitStack()
        self._rows: psycopg.ServerCursor[Row] | None = None
        self._ended = False

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        limit = rows_max if until is None else min(rows_max, int(until) - self._position)
        if limit <= 0:
            return None
        with self._errors():
            if self._rows is None and not self._ended:
                cursor = self._stack.enter_context(self._server.transaction(reads=True))
                self._rows = self._stack.enter_context(self._selected(cursor))
                self._rows.itersize = _FETCH_ROWS
                if self._position:
                    self._rows.scroll(self._position)
            found = [] if self._rows is None else self._rows.fetchmany(limit)
            if len(found) < limit and not self._ended:
                self._ended = True
                self._finish()
        frame = self._frame(found)
        first, self._position = self._position, self._position + frame.height
        places = pl.Series(range(first, self._position), dtype=pl.Int64) if self._with_positions else None
        return Chunk(frame=frame, position=Position(self._position), row_positions=places, ended=self._ended)

    def close(self) -> None:
        self._rows = None
        with suppress(psycopg.Error):  # what was read is read
            self._stack.close()
        self._server.close()

    def _finish(self) -> None:
        self._rows = None
        self._stack.close()
        self._server.close()

    def _selected(self, cursor: Cursor) -> psycopg.ServerCursor[Row]:
        """A cursor over the rows, whose columns are cast to what the schema says."""
        if self._settings.query is not None:
            rows = f"({self._settings.query.strip().rstrip(';')}\n) AS q"
        else:
            parts = cursor.execute("SELECT parse_ident(%s)", (self._settings.table,)).fetchone()
            rows = quoted(*(parts or [[]])[0])
        described = cursor.execute(sql.SQL(f"SELECT * FROM {rows} LIMIT 0")).description or []  # noqa: S608 - a quoted name, or the user's own query
        kinds = cursor.execute(_TYPES, ([column.type_code for column in described],)).fetchall()
        there = {column.name: (kind, shown) for column, (kind, shown) in zip(described, kinds, strict=True)}
        casts = [self._cast(name, there) for name in self._schema]
        selected = cursor.connection.cursor("fordstone_rows", binary=True)
        return selected.execute(sql.SQL(f"SELECT {', '.join(casts)} FROM {rows}"))  # noqa: S608 - as above

    def _cast(self, name: str, there: Mapping[str, tuple[str, str]]) -> str:
        kind = self._schema[name]
        cast = cast_to(kind, quoted(name), there[name][0]) if name in there else None
        if cast is not None:
            return f"{cast} AS {quoted(name)}"
        problem = (
            f"column {name!r} is {kind} in the pipeline, and {there[name][1]} in the database, which cannot be read as that"
            if name in there
            else f"it has no column {name!r}"
        )
        raise SourceError(
            f"{self._where} does not fit: {problem}.\n"
            f"  pipeline: {shown_columns(self._schema)}\n"
            f"  database: {', '.join(f'{column} {shown}' for column, (_, shown) in there.items())}\n"
            "Change the schema in the pipeline, or cast the column in query=."
        )

    def _frame(self, rows: Sequence[Row]) -> pl.DataFrame:
        try:
            return pl.DataFrame(rows, schema=self._schema.polars, orient="row", strict=True)
        except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
            first = str(error).partition("\n")[0]
            raise SourceError(f"{self._where}: a value does not fit the schema of the pipeline: {first}") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the server as those of a source; those that go by as errors of the network, after which the engine tries again."""
        try:
            yield
        except psycopg.Error as error:
            problem = problem_of(error)
            text = f"{self._where} cannot be read: {problem.text}. {problem.detail}".strip()
            # That the transaction may only read is our doing, and not that of a standby.
            if problem.away and not isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                raise ConnectionError(text) from error
            raise SourceError(text) from error
