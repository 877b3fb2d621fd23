"""Rows into a Delta table: appended, or merged by their key.

Each epoch is one commit, which holds the rows and, as Delta's application transaction, the number of the epoch: an epoch
that the table has is never written again. Digests of the rows in the commit show whether an epoch that comes again is the same; where
only floats differ, the rows are read and compared. Appended rows may come as files that tasks wrote (`parts`). Two writers under
one name cannot both commit: Delta rejects the later.

A writer that opens the table takes it over with a commit without rows (rule 18), which counts up a second transaction, `<app> claim`, and
restates the first: so the commit of a former writer that is under way fails, and at its next try it finds the other number. A third,
`<app> generation`, keeps the number of the hub for as long as the table exists.

Invariants: the transactions are looked up in the very version that the commit builds on; keys match as they do in
pipelines (null is null, NaN is NaN, -0.0 is 0.0); a conflict with another writer is tried again a bounded number of times,
from the look-up on. On a local disk, `release` syncs what a commit is made of, because the package does not: power that is
cut between the two may leave a commit whose data file is short, which is noticed when the epoch comes again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal
from urllib.parse import unquote

import msgspec
import polars as pl
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake import Schema as TableSchema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from fordstone.connectors.base import Part, PartedSink, SinkStream, judge_claim, later_output, owned_by_newer
from fordstone.connectors.compare import same_rows
from fordstone.connectors.delta.kind import DeltaSettings
from fordstone.connectors.delta.parts import PartNote, app_of, local_root, staging_root
from fordstone.connectors.files.rows import DELETE, OP
from fordstone.connectors.files.sink import Staging
from fordstone.connectors.released_rows import ID, add_digests, appended_rows, digest_of, last_changes
from fordstone.errors import SinkError, StorageError
from fordstone.lang.schema import Schema
from fordstone.protocol.claim import SinkWriter
from fordstone.storage.disk import Disk, OsDisk
from fordstone.storage.remote import StoreAwayError, reason

log = logging.getLogger(__name__)

COMMIT_TRIES_MAX: Final = 10
"""Maximum tries of a commit while others change the table."""
HISTORY_COMMITS_MAX: Final = 1_000
"""Maximum number of commits searched for an epoch that comes again."""
KEY_PROPERTY: Final = "fordstone.key"
"""In the table's properties: by what its rows are merged, as JSON; null where they are appended."""
_COMMIT_KEY: Final = "fordstone"
_PLAIN_FEATURES: Final = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "deletionVectors",
        "generatedColumns",
        "identityColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""Features that ask nothing of appended files, or are noticed where a table uses them."""
LOG: Final = "_delta_log"
_WITH_FILES: Final = ("add", "cdc")


def sync_commit(disk: Disk, version: int, *, where: str) -> None:
    """Make one version of the table durable. Files that are gone were replaced since, and are left out."""
    name = f"{LOG}/{version:020d}"
    directories = {"", LOG}
    for path, size_bytes in _files(disk, f"{name}.json"):
        try:
            found_bytes = disk.size(path)
            disk.fsync(path)
        except FileNotFoundError:
            continue
        if found_bytes != size_bytes:
            raise SinkError(
                f"{where} is damaged: {path} has {found_bytes} bytes, and version {version} says {size_bytes}.\n"
                f"Power may have gone while it was written. Restore the table to version {version - 1}, then start again."
            )
        parent = path.rpartition("/")[0]
        while parent:
            directories.add(parent)
            parent = parent.rpartition("/")[0]
    for part in (f"{name}.json", f"{name}.checkpoint.parquet", f"{LOG}/_last_checkpoint"):
        if disk.exists(part):
            disk.fsync(part)
    for directory in sorted(directories, reverse=True):
        disk.fsync_dir(directory)


def _files(disk: Disk, commit: str) -> list[tuple[str, int]]:
    """The data files that a commit adds, below the table's directory."""
    try:
        actions: list[dict[str, Any]] = msgspec.json.Decoder().decode_lines(disk.read(commit))
    except FileNotFoundError:
        return []  # an old one, cleaned away
    added = [action[kind] for action in actions for kind in _WITH_FILES if kind in action]
    return [(unquote(file["path"]), file["size"]) for file in added if "://" not in file["path"]]


def delta_schema(schema: Schema, *, step: str) -> TableSchema:
    """The schema of a new table."""
    folded: dict[str, str] = {}
    for name, kind in schema.items():
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise SinkError(
                f"sink {step}: columns {other!r} and {name!r} differ in case only, which Delta does not tell apart. Rename one."
            )
        if "null" in str(kind):
            raise SinkError(
                f"sink {step}: Delta has no type for column {name!r}, which is {kind}. Cast it, or leave it out."
            )
    return TableSchema.from_arrow(schema.polars)


def schema_difference(table: TableSchema, schema: Schema, *, step: str) -> str | None:
    """Where a table differs from what a sink writes, in words; None if rows fit. Order and nullability do not count."""
    there, wanted = _types(table), _types(delta_schema(schema, step=step))
    for name, kind in wanted.items():
        if name not in there:
            return f"the table has no column {name!r}; it has {', '.join(there)}"
        if there[name] != kind:
            return f"column {name!r} is {_shown(there[name])} in the table, and {_shown(kind)} ({schema[name]}) in the stream"
    extra = [name for name in there if name not in schema and not (name == ID and there[name] == "string")]
    return f"the table has a column {extra[0]!r}, which the stream has not" if extra else None


def _types(table: TableSchema) -> dict[str, Any]:
    """The columns of a table in order, with their types as JSON."""
    return {field["name"]: _plain(field["type"]) for field in msgspec.json.decode(table.to_json())["fields"]}


def _plain(kind: Any) -> Any:
    """A type without what does not count: whether elements may be null, and metadata."""
    if isinstance(kind, dict):
        kept = {name: part for name, part in kind.items() if name not in {"containsNull", "metadata", "nullable"}}
        return {name: _plain(part) for name, part in kept.items()}
    return [_plain(part) for part in kind] if isinstance(kind, list) else kind


def _shown(kind: Any) -> str:
    if isinstance(kind, dict) and kind.get("type") == "array":
        return f"array<{_shown(kind['elementType'])}>"
    if isinstance(kind, dict) and kind.get("type") == "map":
        return f"map<{_shown(kind['keyType'])}, {_shown(kind['valueType'])}>"
    if isinstance(kind, dict) and kind.get("type") == "struct":
        fields = (f"{part['name']}: {_shown(part['type'])}" for part in kind["fields"])
        return f"struct<{', '.join(fields)}>"
    return kind if isinstance(kind, str) else str(kind.get("type", kind))


class CommitMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What each commit of a sink contains, as JSON."""

    app: str
    epoch: int
    """The newest epoch of the app after this commit."""
    what: Literal["epoch", "claim", "discard"] = "epoch"
    """A claim has no rows; a discard takes those of later epochs away."""
    rows: int = 0
    digest: str = ""
    """Of the rows in any order, less floats and nested values: of rows that are computed again these may differ a little."""
    bits: str = ""
    """As `digest`, of all values."""
    writer: SinkWriter = SinkWriter()


def is_plain(table: DeltaTable) -> bool:
    """Whether rows may be appended as files that nothing checks or adds to: no partitions, constraints, or columns that are made."""
    metadata = table.metadata()
    features = set(table.protocol().writer_features or ())
    mapped = metadata.configuration.get("delta.columnMapping.mode", "none") != "none"
    constrained = any(name.startswith("delta.constraints.") for name in metadata.configuration)
    if metadata.partition_columns or mapped or constrained or features - _PLAIN_FEATURES:
        return False
    return _is_free(msgspec.json.decode(table.schema().to_json()))


def _is_free(kind: Any) -> bool:
    """Whether a type, or a part of it, may be null everywhere, and no column has an invariant or an expression of its own."""
    if isinstance(kind, list):
        return all(_is_free(part) for part in kind)
    if not isinstance(kind, dict):
        return True
    if any(kind.get(name) is False for name in ("nullable", "containsNull", "valueContainsNull")):
        return False
    if any(name.startswith("delta.") for name in kind.get("metadata") or ()):
        return False
    return all(_is_free(part) for name, part in kind.items() if name != "metadata")


class DeltaSink(PartedSink):
    """Writes one stream into one table, under one name."""

    def __init__(self, settings: DeltaSettings, stream: SinkStream) -> None:
        self._where = f"delta({settings.path!r})"
        self._stream = stream
        self._app = app_of(settings, stream)
        self._claim_app, self._hub_app = f"{self._app} claim", f"{self._app} generation"
        unknown = [name for name in stream.upsert_key or () if name not in stream.schema]
        if unknown:
            raise SinkError(
                f"sink {stream.step}: the key column {unknown[0]!r} is not among {', '.join(stream.schema)}."
            )
        root = local_root(settings)
        self._uri = settings.path if root is None else str(root)
        self._disk = None if root is None else OsDisk(root)
        self._staged = staging_root(self._app)
        self._staging = (
            None if root is None else Staging(OsDisk(root / self._staged, create_root=False), where=self._where)
        )
        self._synced = -1
        self._claim: int | None = None
        with self._errors_as("open"):
            self._table = self._opened()
        self._check_table()
        self._synced = self._table.version() - 1
        self._sync()
        if stream.owner:
            self._take()
        if self._staging is not None:
            self._staging.sweep(keep=stream.sealed)
        self._check_later(discard=stream.discard_later)

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Commit the epoch, unless the table has it; one without rows makes no commit."""
        rows, schema = self._rows(frame), self._stream.schema
        mark = self._mark(
            epoch, rows=rows.height, digest=digest_of(rows, schema, exact=True), bits=digest_of(rows, schema)
        )
        properties = self._properties(mark)
        for _ in self._tries():
            self._check_claim()
            last = self._transaction(self._app)
            if last is not None and last >= epoch:
                self._check_released(mark, lambda: rows, last)
                return
            if rows.is_empty() or self._committed(rows, properties):
                return

    def takes_parts(self) -> bool:
        """Upserts are merged; other stores than disks, and tables that check or partition rows, are left to the package."""
        with self._errors_as("read"):
            return self._stream.upsert_key is None and self._disk is not None and is_plain(self._table)

    def release_parts(self, epoch: int, attempt: str, parts: Sequence[Part]) -> None:
        """Move the staged files into the table's directory and commit them, unless the table has the epoch."""
        notes = {part.name: msgspec.json.decode(part.note, type=PartNote) for part in parts if part.rows}
        mark = self._mark(
            epoch,
            rows=sum(part.rows for part in parts),
            digest=add_digests(note.digest for note in notes.values()),
            bits=add_digests(note.bits for note in notes.values()),
        )
        properties = self._properties(mark)
        moved: list[str] = []
        for _ in self._tries():
            # After this has raised, moved files stay: the writer that took over may be committing them. Vacuum removes the others.
            self._check_claim()
            last = self._transaction(self._app)
            if last is not None and last >= epoch:
                try:
                    self._check_released(mark, lambda: self._part_rows(epoch, attempt, notes), last)
                finally:
                    self._withdraw(epoch, attempt, moved)
                break
            if not notes:
                break
            if not self.takes_parts():
                # Somebody has altered the table since the parts were written: the package checks their rows.
                if self._committed(self._part_rows(epoch, attempt, notes), properties):
                    self._withdraw(epoch, attempt, notes)
                    break
            else:
                moved += self._moved(epoch, attempt, notes)
                if self._committed_files(notes, properties):
                    break
        if self._staging is not None:
            with suppress(StorageError):  # the epoch is out; what is left over goes when the sink is next opened
                self._staging.sweep(epoch)

    def write(self, frame: pl.DataFrame) -> None:
        """Commit rows now. Appended rows keep their ids; upserts need none, being merged by their key."""
        rows = self._rows(frame)
        if rows.is_empty():
            return
        for _ in self._tries():
            self._check_claim()
            if self._committed(rows, None):
                return

    def close(self) -> None:
        """Nothing is open between commits."""

    # Parts.

    def _sealed_parts(self, epoch: int, attempt: str, names: Collection[str]) -> dict[str, str]:
        """Where the parts of the attempt are that are not in the table's directory yet, below it, by name."""
        if self._disk is None or self._staging is None:
            raise AssertionError("parts of a table at a URL")
        left = [name for name in names if not self._disk.exists(name)]
        try:
            found = self._staging.seal(epoch, attempt, left)
        except (FileNotFoundError, SinkError):
            # Another writer that takes over removes what is staged.
            with self._errors_as("read"):
                self._table.update_incremental()
            self._check_claim()
            raise
        return {name: f"{self._staged}/{path}" for name, path in zip(sorted(left), found, strict=True)}

    def _moved(self, epoch: int, attempt: str, names: Collection[str]) -> list[str]:
        """Move the parts to where commits look for them, durably; gives those that were not there. No reader sees them yet."""
        sealed = self._sealed_parts(epoch, attempt, names)
        if self._disk is None:
            raise AssertionError("parts of a table at a URL")
        for name, path in sealed.items():
            self._disk.rename(path, name)
        self._disk.fsync_dir("")
        return list(sealed)

    def _withdraw(self, epoch: int, attempt: str, names: Collection[str]) -> None:
        """Move parts that no commit has back to where they are removed as leftovers. The table has the epoch, so no writer commits them."""
        if self._disk is None or self._staging is None or not names:
            return
        with self._errors_as("read"):
            committed = {unquote(uri).rpartition("/")[2] for uri in self._table.file_uris()}
        for name in names:
            if name not in committed and self._disk.exists(name):
                try:
                    self._disk.rename(name, f"{self._staged}/{self._staging.sealed_name(epoch, attempt, name)}")
                except FileNotFoundError:
                    self._disk.remove(name)  # the attempt was given up

    def _part_rows(self, epoch: int, attempt: str, names: Collection[str]) -> pl.DataFrame:
        """The rows of all parts, in this process: where a commit must compare them, or cannot take them as files."""
        sealed = self._sealed_parts(epoch, attempt, names)
        with self._errors_as("read parts of"):
            frames = [pl.read_parquet(f"{self._uri}/{sealed.get(name, name)}") for name in names]
        return self._rows(pl.concat(frames, how="diagonal")) if frames else self._stream.schema.empty()

    def _committed_files(self, notes: Mapping[str, PartNote], properties: CommitProperties) -> bool:
        """As `_committed`, for files that are there."""
        with self._errors_as("write"):
            try:
                if any(note.ids for note in notes.values()) and ID not in _types(self._table.schema()):
                    empty = self._stream.schema.empty().with_columns(pl.lit(None, dtype=pl.String).alias(ID))
                    self._append(empty, None)
                self._append_files(notes, properties)
            except CommitFailedError:
                return False
            self._table.update_incremental()
        self._sync()
        return True

    def _append_files(self, notes: Mapping[str, PartNote], properties: CommitProperties) -> None:
        now_ms = time.time_ns() // 1_000_000
        actions: list[Any] = [
            AddAction(
                path=name,
                size=note.size_bytes,
                partition_values={},
                modification_time=now_ms,
                data_change=True,
                stats=note.stats,
            )
            for name, note in notes.items()
        ]
        self._table.create_write_transaction(
            actions, mode="append", schema=self._table.schema(), commit_properties=properties
        )

    # The claim, and later epochs than those of the writer's state.

    def _take(self) -> None:
        """Become the one writer under this name. On return no former writer can commit."""
        for _ in self._tries():
            there = self._writer_there()
            judge_claim(self._where, self._stream, [] if there is None else [there], self._check_later)
            claim = self._transaction(self._claim_app) or 0
            if claim and there == self._stream.writer:
                self._claim = claim
                return
            # Before it is taken: a run that cannot go on must not stop one that can.
            self._check_later()
            mark = self._mark(self._transaction(self._app) or 0, what="claim")
            # 0 is written only in place of another number: of a writer without a hub that took the table over on purpose.
            hub = (
                self._stream.generation.hub if self._transaction(self._hub_app) else self._stream.generation.hub or None
            )
            if self._committed_files({}, self._properties(mark, claim=claim + 1, hub=hub)):
                self._claim = claim + 1
                return

    def _writer_there(self) -> SinkWriter | None:
        """The writer that has the table under this name now; None: none ever had."""
        found = next((mark.writer for _, mark in self._marks() if mark.writer.holder), None)
        hub = self._transaction(self._hub_app)
        if found is None and hub:
            # Its commits are too long ago. Its generation is in the table for as long as the table exists.
            return SinkWriter(pipeline=self._stream.pipeline, node=self._stream.node, hub=hub)
        return found

    def _check_claim(self) -> None:
        """Raise `FencedError` if another writer has taken over, in the version that the next commit builds on."""
        if self._claim is not None and self._transaction(self._claim_app) != self._claim:
            raise owned_by_newer(self._where, self._stream, self._writer_there())

    def _check_later(self, *, discard: bool = False) -> None:
        """Find later epochs than those of the writer's state. They are an error, unless they are taken out of the table."""
        after = self._stream.resumes_after
        last = self._transaction(self._app)
        if after is None or last is None or last <= after or (self._stream.discard_later and not discard):
            return
        later = [mark.epoch for _, mark in self._marks() if mark.what == "epoch" and mark.epoch > after] or [last]
        if not discard:
            raise later_output(self._where, self._stream, later)
        self._discard(after, later)
        log.warning("later output set aside", extra={"step": self._stream.step, "epochs": sorted(later)})

    def _discard(self, after: int, later: Sequence[int]) -> None:
        """Restore the version before the first later epoch, if no other writer has changed the table since."""
        for _ in self._tries():
            first, others = None, False
            for version, mark in self._history():
                mine = mark is not None and mark.app == self._app
                if mine and mark is not None and mark.what == "discard":
                    break
                others = others or not (mine or (mark is not None and mark.what == "claim"))
                if mine and mark is not None and mark.what == "epoch":
                    if mark.epoch <= after:
                        break
                    first = (version, others)
            if first is None or first[1]:
                why = (
                    "other writers have changed the table since" if first else "their commits are no longer in its log"
                )
                raise later_output(
                    self._where,
                    self._stream,
                    later,
                    problem=f"take their rows out of the table by hand ({why}, so --discard-later-output cannot), and give the sink "
                    "another name with app=... .",
                )
            properties = self._properties(self._mark(after, what="discard"))
            with self._errors_as("restore"):
                try:
                    self._table.restore(first[0] - 1, commit_properties=properties)
                except CommitFailedError:
                    continue
                self._table.update_incremental()
            self._sync()
            return

    def _mark(
        self,
        epoch: int,
        *,
        what: Literal["epoch", "claim", "discard"] = "epoch",
        rows: int = 0,
        digest: str = "",
        bits: str = "",
    ) -> CommitMark:
        return CommitMark(
            app=self._app, epoch=epoch, what=what, rows=rows, digest=digest, bits=bits, writer=self._stream.writer
        )

    def _properties(self, mark: CommitMark, *, claim: int | None = None, hub: int | None = None) -> CommitProperties:
        """What a commit of the app has: epoch and claim, restated where they stay, so that commits of others under this name fail."""
        claim = self._claim if claim is None else claim
        transactions = [Transaction(self._app, mark.epoch)]
        transactions += [Transaction(self._claim_app, claim)] if claim is not None else []
        transactions += [Transaction(self._hub_app, hub)] if hub is not None else []
        return CommitProperties(
            app_transactions=transactions, custom_metadata={_COMMIT_KEY: msgspec.json.encode(mark).decode()}
        )

    def _transaction(self, app: str) -> int | None:
        with self._errors_as("read"):
            return self._table.transaction_version(app)

    def _history(self) -> list[tuple[int, CommitMark | None]]:
        """The newest commits, the newest first, with the marks of those that sinks made."""
        with self._errors_as("read the history of"):
            history = self._table.history(HISTORY_COMMITS_MAX)
        return [(commit["version"], _mark_in(commit.get(_COMMIT_KEY))) for commit in history]

    def _marks(self) -> Iterator[tuple[int, CommitMark]]:
        """The commits of this app with their marks, the newest first; those of epochs that were taken away are left out."""
        kept: int | None = None
        for version, mark in self._history():
            if mark is None or mark.app != self._app:
                continue
            if mark.what == "discard":
                kept = mark.epoch if kept is None else min(kept, mark.epoch)
            if mark.what != "epoch" or kept is None or mark.epoch <= kept:
                yield version, mark

    # The table.

    def _opened(self) -> DeltaTable:
        schema = delta_schema(self._stream.schema, step=self._stream.step)
        if DeltaTable.is_deltatable(self._uri):
            return DeltaTable(self._uri)
        others = [] if self._disk is None else [name for name in self._disk.list("") if name != LOG]
        if others:
            raise SinkError(
                f"{self._where}: the directory is not empty (it has {others[0]}), and is not a Delta table. Choose another."
            )
        try:
            return DeltaTable.create(
                self._uri,
                schema=schema,
                configuration={KEY_PROPERTY: msgspec.json.encode(self._stream.upsert_key).decode()},
                raise_if_key_not_exists=False,
            )
        except DeltaError:
            if not DeltaTable.is_deltatable(self._uri):
                raise
            return DeltaTable(self._uri)  # another sink of this table was quicker

    def _check_table(self) -> None:
        difference = schema_difference(self._table.schema(), self._stream.schema, step=self._stream.step)
        if difference is None:
            mine = msgspec.json.encode(self._stream.upsert_key).decode()
            theirs = self._table.metadata().configuration.get(KEY_PROPERTY, mine)
            if theirs != mine:
                difference = f"its rows are {_keyed(theirs)}, and those of the stream {_keyed(mine)}"
        if difference is not None:
            raise SinkError(
                f"{self._where} cannot take the rows of sink {self._stream.step}: {difference}.\n"
                f"Choose another table, or change this one or the pipeline so that they agree."
            )

    def _rows(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows as the table takes them; of upserts the last of each key."""
        schema, key = self._stream.schema, self._stream.upsert_key
        if key is None:
            return appended_rows(frame, schema, where=self._where)
        return last_changes(frame, schema, key, where=self._where)

    def _tries(self) -> Iterator[None]:
        """Reload the table before each try, and give up after the last."""
        for _ in range(COMMIT_TRIES_MAX):
            with self._errors_as("read"):
                self._table.update_incremental()
            self._check_table()
            yield
        raise SinkError(
            f"{self._where}: {COMMIT_TRIES_MAX} commits in a row met with changes by others. Nothing was committed.\n"
            f"Let fewer writers change the table at once."
        )

    def _committed(self, rows: pl.DataFrame, properties: CommitProperties | None) -> bool:
        """Try to commit; False if another writer was quicker and it must be tried from the start."""
        with self._errors_as("write"):
            try:
                if self._stream.upsert_key is None:
                    self._append(rows, properties)
                else:
                    self._merge(rows, self._stream.upsert_key, properties)
            except CommitFailedError:
                return False
        self._sync()
        return True

    def _append(self, rows: pl.DataFrame, properties: CommitProperties | None) -> None:
        there = list(_types(self._table.schema()))
        if ID in rows.columns and ID not in there:
            write_deltalake(self._table, rows, mode="append", schema_mode="merge", commit_properties=properties)
            return
        if ID in there and ID not in rows.columns:
            rows = rows.with_columns(pl.lit(None, dtype=pl.String).alias(ID))
        write_deltalake(self._table, rows.select(there), mode="append", commit_properties=properties)

    def _merge(self, rows: pl.DataFrame, key: tuple[str, ...], properties: CommitProperties | None) -> None:
        # In brackets: without them AND binds tighter than this operator.
        same = [f"(t.{_quoted(name)} IS NOT DISTINCT FROM s.{_quoted(name)})" for name in key]
        every = {_quoted(name): f"s.{_quoted(name)}" for name in self._stream.schema}
        merger = self._table.merge(
            rows,
            " AND ".join(same) or "true",
            source_alias="s",
            target_alias="t",
            commit_properties=properties,
        )
        merger = merger.when_matched_delete(predicate=f"s.{_quoted(OP)} = '{DELETE}'")
        merger = merger.when_matched_update(updates=every)
        merger.when_not_matched_insert(updates=every, predicate=f"s.{_quoted(OP)} <> '{DELETE}'").execute()

    def _check_released(self, mark: CommitMark, rows: Callable[[], pl.DataFrame], last: int) -> None:
        """An epoch that the table has must be this one. `rows` are asked for only where digests of floats differ."""
        for version, found in self._marks():
            if found.what != "epoch" or found.epoch != mark.epoch:
                continue
            same = (found.rows, found.digest) == (mark.rows, mark.digest)
            if same and (found.bits == mark.bits or self._same_rows(version, rows())):
                self._sync_version(version)
                return
            raise SinkError(
                f"{self._where} already has epoch {mark.epoch} of {self._app!r}, with other rows ({found.rows}) than are "
                f"released now ({mark.rows}).\n"
                f"It is the output of another run or pipeline. Choose another table, or another name with app=..., or start over with "
                f"--fresh, which sets the state and this table aside. Nothing was overwritten."
            )
        if mark.rows and mark.epoch < last:
            raise SinkError(
                f"{self._where} already has epoch {last} of {self._app!r}, so the rows of epoch {mark.epoch} were not written.\n"
                f"Another run or pipeline writes under that name. Choose another table, or another name with app=..."
            )

    def _same_rows(self, version: int, rows: pl.DataFrame) -> bool:
        """Whether the commit of this version wrote these rows, where floats may differ a little (`connectors.compare`)."""
        with self._errors_as("read an earlier version of"):
            before = set(DeltaTable(self._uri, version=version - 1).file_uris())
            added = [uri for uri in DeltaTable(self._uri, version=version).file_uris() if uri not in before]
            frames = [pl.read_parquet(uri.removeprefix("file://")) for uri in added]
        columns = [pl.col(name).cast(kind.polars) for name, kind in self._stream.schema.items()]
        there = pl.concat([frame.select(columns) for frame in frames]) if frames else self._stream.schema.empty()
        key = self._stream.upsert_key
        if key is not None:
            # A merge writes its files again, with the rows of other keys in them.
            touched = rows.select(key) if key else pl.DataFrame()
            there = there.join(touched, on=list(key), how="semi", nulls_equal=True) if key else there
            rows = rows.filter(pl.col(OP) != DELETE)
        return same_rows(there, rows.select(columns))

    def _sync(self) -> None:
        """Make durable what was committed since the last time, by others too: the log has no holes."""
        for version in range(self._synced + 1, self._table.version() + 1):
            self._sync_version(version)
            self._synced = version

    def _sync_version(self, version: int) -> None:
        if self._disk is not None:
            sync_commit(self._disk, version, where=self._where)

    @contextmanager
    def _errors_as(self, what: str) -> Iterator[None]:
        """Raise errors of the package as errors of this sink, which may pass where the table is in a store at a URL."""
        try:
            yield
        except (DeltaError, OSError, ValueError, pl.exceptions.PolarsError) as error:
            if self._disk is None and isinstance(error, OSError):
                raise StoreAwayError(f"{self._where}: could not {what} the table: {reason(error)}") from error
            first = str(error).strip().partition("\n")[0]
            raise SinkError(f"{self._where}: could not {what} the table: {first}") from error


def _mark_in(text: object) -> CommitMark | None:
    try:
        return msgspec.json.decode(text, type=CommitMark) if isinstance(text, str) else None
    except msgspec.DecodeError:
        return None  # another writer's


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _keyed(key: str) -> str:
    return "appended" if key == "null" else f"merged by {key}"
