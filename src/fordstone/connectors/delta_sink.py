"""Rows into a Delta table: appended, or merged by their key.

Each epoch is one commit, which holds the rows and, as Delta's application transaction, the number of the epoch: an epoch
that the table has is never written again. A digest of the rows in the commit tells an epoch that comes again from another
writer's. Two writers under one name cannot both commit: Delta refuses the later.

Invariants: the transaction is looked up in the very version that the commit builds on; keys match as they do in
pipelines (null is null, NaN is NaN, -0.0 is 0.0); a conflict with another writer is tried again a bounded number of times,
from the look-up on. On a local disk, `release` syncs what a commit is made of, because the package does not: power that is
cut between the two may leave a commit whose data file is short, which is noticed when the epoch comes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import msgspec
import polars as pl
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake import Schema as TableSchema
from deltalake.exceptions import CommitFailedError, DeltaError

from fordstone.connectors.base import Sink, SinkStream
from fordstone.connectors.delta import DeltaSettings
from fordstone.connectors.files.rows import DELETE, OP, UPSERT
from fordstone.errors import SinkError
from fordstone.lang.schema import Schema
from fordstone.state.key_group import row_hashes
from fordstone.storage.disk import Disk, OsDisk

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


ID: Final = "__id"
"""The id of a row that was emitted at once; the table gets this column with the first such row."""


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


COMMIT_TRIES_MAX: Final = 10
"""Maximum tries of a commit while others change the table."""
HISTORY_COMMITS_MAX: Final = 1_000
"""Maximum number of commits searched for an epoch that comes again."""
KEY_PROPERTY: Final = "fordstone.key"
"""In the table's properties: by what its rows are merged, as JSON; null where they are appended."""
_COMMIT_KEY: Final = "fordstone"
_NOT_HASHED: Final = (pl.Float32, pl.Float64, pl.List, pl.Map, pl.Struct)


class ReleasedEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """Stands in the commit of an epoch, as JSON."""

    app: str
    epoch: int
    rows: int
    digest: str
    """Of the rows in any order, less floats, which differ a little when an epoch is computed again."""


class DeltaSink(Sink):
    """Writes one stream into one table, under one name."""

    def __init__(self, settings: DeltaSettings, stream: SinkStream) -> None:
        self._where = f"delta({settings.path!r})"
        self._stream = stream
        self._app = settings.app or f"fordstone/{stream.step}"
        unknown = [name for name in stream.upsert_key or () if name not in stream.schema]
        if unknown:
            raise SinkError(
                f"sink {stream.step}: the key column {unknown[0]!r} is not among {', '.join(stream.schema)}."
            )
        local = "://" not in settings.path
        self._uri = str(Path(settings.path).expanduser().absolute()) if local else settings.path
        self._disk = OsDisk(self._uri) if local else None
        self._synced = -1
        with self._errors_as("open"):
            self._table = self._opened()
        self._check_table()
        self._synced = self._table.version() - 1
        self._sync()

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Commit the epoch, unless the table has it; one without rows makes no commit."""
        rows = self._rows(frame)
        mark = ReleasedEpoch(app=self._app, epoch=epoch, rows=rows.height, digest=self._digest(rows))
        properties = CommitProperties(
            app_transactions=[Transaction(self._app, epoch)],
            custom_metadata={_COMMIT_KEY: msgspec.json.encode(mark).decode()},
        )
        for _ in self._tries():
            with self._errors_as("read"):
                last = self._table.transaction_version(self._app)
            if last is not None and last >= epoch:
                self._check_released(mark, last)
                return
            if rows.is_empty() or self._committed(rows, properties):
                return

    def write(self, frame: pl.DataFrame) -> None:
        """Commit rows now. Appended rows keep their ids; upserts need none, being merged by their key."""
        rows = self._rows(frame)
        if rows.is_empty():
            return
        for _ in self._tries():
            if self._committed(rows, None):
                return

    def close(self) -> None:
        """Nothing is open between commits."""

    def _opened(self) -> DeltaTable:
        schema = delta_schema(self._stream.schema, step=self._stream.step)
        if DeltaTable.is_deltatable(self._uri):
            return DeltaTable(self._uri)
        others = [] if self._disk is None else [name for name in self._disk.list("") if name != LOG]
        if others:
            raise SinkError(
                f"{self._where}: the directory is no Delta table, and not empty (it has {others[0]}). Choose another."
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
        schema = self._stream.schema
        missing = [name for name in schema if name not in frame.columns]
        if missing:
            raise SinkError(
                f"{self._where}: rows come without column {missing[0]!r}; they have {', '.join(frame.columns)}."
            )
        key = self._stream.upsert_key
        columns = [
            _one_zero(name).cast(kind.polars)
            if name in (key or ()) and kind.is_float
            else pl.col(name).cast(kind.polars)
            for name, kind in schema.items()
        ]
        if key is None:
            return frame.select(*columns, *([pl.col(ID).cast(pl.String)] if ID in frame.columns else []))
        rows = frame.select(*columns, pl.col(OP).cast(pl.String) if OP in frame.columns else pl.lit(UPSERT).alias(OP))
        return rows.unique(subset=list(key), keep="last", maintain_order=True) if key else rows.tail(1)

    def _digest(self, rows: pl.DataFrame) -> str:
        hashed = [name for name, kind in rows.schema.items() if not isinstance(kind, _NOT_HASHED) and name != ID]
        return f"{int(row_hashes(rows, hashed).sum(dtype='uint64')):016x}"

    def _tries(self) -> Iterator[int]:
        """Reload the table before each try, and give up after the last."""
        for number in range(COMMIT_TRIES_MAX):
            with self._errors_as("read"):
                self._table.update_incremental()
            self._check_table()
            yield number
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

    def _check_released(self, mark: ReleasedEpoch, last: int) -> None:
        """An epoch that the table has must be this one."""
        with self._errors_as("read the history of"):
            history = self._table.history(HISTORY_COMMITS_MAX)
        for commit in history:
            found = _released(commit.get(_COMMIT_KEY))
            if found is None or (found.app, found.epoch) != (mark.app, mark.epoch):
                continue
            if found == mark:
                self._sync_version(commit["version"])
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
        """Tell what the package says as an error of this sink."""
        try:
            yield
        except (DeltaError, OSError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise SinkError(f"{self._where}: could not {what} the table: {first}") from error


def _released(text: object) -> ReleasedEpoch | None:
    try:
        return msgspec.json.decode(text, type=ReleasedEpoch) if isinstance(text, str) else None
    except msgspec.DecodeError:
        return None  # another writer's


def _one_zero(name: str) -> pl.Expr:
    """A float key column in which equal keys have equal bits."""
    column = pl.col(name)
    return pl.when(column.is_nan()).then(float("nan")).when(column == 0).then(0.0).otherwise(column).alias(name)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _keyed(key: str) -> str:
    return "appended" if key == "null" else f"merged by {key}"
