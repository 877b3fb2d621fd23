"""The folder in which a node keeps its copy of a control table: what changed, version by version.

Each version is one Arrow file, `<version>-<after>-<rows>-<digest>.arrow`: what changed since version `after`. A prefix of
them may be compacted into `base-<version>-<rows>-<digest>.arrow`, the whole table. Fetching versions is left to
`edge.link.control`, reading them as a source to `connectors.control`.

Invariants: a version is visible to readers only when it is durable; after a crash a prefix of the added versions is found;
rows have the digest in the file's name; versions grow, and each file names its predecessor, so that a missing one is noticed.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.epochs.run_file import decode_run, encode_run
from fordstone.errors import DamagedError, SourceError
from fordstone.hub.client.publisher import apply_changes
from fordstone.lang.schema import Schema
from fordstone.operators.base import DELETE, OP
from fordstone.state.base import RunRef
from fordstone.storage.atomic import AtomicWriter
from fordstone.storage.disk import Disk

log = logging.getLogger(__name__)

COMPACT_FILES_MIN: Final = 16
"""Fewer files are not compacted, since the whole table is rewritten for it."""
COMPACT_FILES_MAX: Final = 512
"""This many files are compacted even if they have few rows compared with the table."""
COMPACT_SHARE: Final = 4
"""Fewer files are compacted when they have at least one row per this many rows of the table."""
_CHANGE: Final = re.compile(r"(\d{12})-(\d{12})-(\d{1,12})-([0-9a-f]{64})\.arrow")
_BASE: Final = re.compile(r"base-(\d{12})-(\d{1,12})-([0-9a-f]{64})\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file."""

    version: int
    after: int
    """The version before it; of a base 0."""
    rows: int
    digest: str
    base: bool = False

    @property
    def name(self) -> str:
        """The file's name."""
        if self.base:
            return f"base-{self.version:012}-{self.rows}-{self.digest}.arrow"
        return f"{self.version:012}-{self.after:012}-{self.rows}-{self.digest}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Rows with `__op`, and the version of each row."""

    frame: pl.DataFrame
    versions: pl.Series
    position: int


class ControlLog:
    """One control table on one node. May be used from any thread: one adds, others read and compact."""

    def __init__(self, disk: Disk, folder: str, *, schema: Schema, keys: Sequence[str]) -> None:
        """Open the folder, creating it if missing, and remove damaged files with all versions after them."""
        self.folder = folder
        self.schema = schema
        self.keys = tuple(keys)
        self.columns = pl.Schema(dict(schema.polars) | {OP: pl.String()})
        """The stored columns."""
        self._disk = disk
        self._writer = AtomicWriter(disk)
        self._mutex = threading.RLock()
        disk.make_dirs(folder)
        self._entries = self._opened()

    @property
    def newest(self) -> int:
        """The newest version that is here; 0: none."""
        entries = self._entries
        return entries[-1].version if entries else 0

    @property
    def files(self) -> int:
        """How many files there are."""
        return len(self._entries)

    def add(self, version: int, changes: pl.DataFrame) -> None:
        """Store what changed since the newest version here. Durable on return; `StorageError` leaves all as it was."""
        with self._mutex:
            if version <= self.newest:
                raise ValueError(f"version {version} does not follow {self.newest}")
            entry = self._write(changes, version, after=self.newest)
            self._entries = [*self._entries, entry]

    def begin_at(self, version: int, table: pl.DataFrame) -> None:
        """Put the whole table as of a later version in place of all that is here."""
        with self._mutex:
            if version <= self.newest:
                raise ValueError(f"version {version} does not follow {self.newest}")
            self._replace(self._entries, self._write(table, version, after=0, base=True))

    def read(self, position: int, rows_max: int, until: int | None = None) -> Changes | None:
        """Whole versions after `position`, about `rows_max` rows of them; None: there are none, or `until` is reached."""
        frames: list[pl.DataFrame] = []
        versions: list[pl.Series] = []
        newest = position
        with self._mutex:
            for entry in self._entries:
                if entry.version <= position or (until is not None and newest >= until):
                    continue
                if frames and sum(frame.height for frame in frames) + entry.rows > rows_max:
                    break
                self._check_follows(entry, newest, until)
                frames.append(self._frame(entry))
                versions.append(pl.Series([entry.version], dtype=pl.Int64).new_from_index(0, entry.rows))
                newest = entry.version
            if until is not None and not frames and position < until:
                raise self._gone(position, f"version {until} is needed again and is not there")
        if not frames:
            return None
        return Changes(frame=pl.concat(frames), versions=pl.concat(versions), position=newest)

    def table(self) -> pl.DataFrame:
        """The table as of the newest version: its columns, and `__op`, always 'upsert'."""
        with self._mutex:
            return self._table_of(self._entries)

    def compact(self, version: int) -> None:
        """Replace all files up to `version` with one, if that is worth it. No reader may start before it any more."""
        with self._mutex:
            old = [entry for entry in self._entries if entry.version <= version]
            changes = sum(entry.rows for entry in old if not entry.base)
            table = sum(entry.rows for entry in old if entry.base)
            if len(old) < COMPACT_FILES_MIN or (len(old) < COMPACT_FILES_MAX and changes * COMPACT_SHARE < table):
                return
            self._replace(old, self._write(self._table_of(old), old[-1].version, after=0, base=True))

    def _replace(self, old: Sequence[Entry], base: Entry) -> None:
        """`old`: the first ones."""
        self._entries = [base, *self._entries[len(old) :]]
        for entry in old:
            # Need not be durable: opening removes files that are older than a base.
            self._disk.remove(f"{self.folder}/{entry.name}")

    def _write(self, rows: pl.DataFrame, version: int, *, after: int, base: bool = False) -> Entry:
        ref, data = encode_run(rows.select(list(self.columns)).cast(self.columns), "zstd")
        entry = Entry(version=version, after=after, rows=ref.rows, digest=ref.digest, base=base)
        self._writer.write(f"{self.folder}/{entry.name}", data)
        return entry

    def _check_follows(self, entry: Entry, newest: int, until: int | None) -> None:
        """Raise unless the entry is the next one to read: what was compacted cannot be read in parts."""
        if (entry.base and newest > 0) or (not entry.base and entry.after != newest):
            raise self._gone(newest, f"the next one there is {entry.version}, which follows {entry.after}")
        if until is not None and entry.version > until:
            raise self._gone(newest, f"version {until} is needed again and was compacted")

    def _gone(self, position: int, what: str) -> SourceError:
        return SourceError(
            f"control table in {self.folder}: what follows version {position} is gone: {what}.\n"
            "Bring the folder back from a copy that is as old as the checkpoint, or start over with an empty state directory."
        )

    def _frame(self, entry: Entry) -> pl.DataFrame:
        data = self._disk.read(f"{self.folder}/{entry.name}")
        return decode_run(data, RunRef(digest=entry.digest, size_bytes=len(data), rows=entry.rows))

    def _table_of(self, entries: Sequence[Entry]) -> pl.DataFrame:
        frames = [self._frame(entry) for entry in entries]
        return apply_changes(pl.DataFrame(schema=self.columns), frames, self.keys)

    # Opening.

    def _opened(self) -> list[Entry]:
        found = self._listed()
        bases = [entry for entry in found if entry.base and not self._is_lost(entry)]
        kept = [max(bases, key=lambda entry: entry.version)] if bases else []
        for entry in sorted((entry for entry in found if not entry.base), key=lambda entry: entry.version):
            newest = kept[-1].version if kept else 0
            if entry.version <= newest:
                continue
            if self._is_lost(entry, newest):
                # Later versions need it. The hub has all of them.
                break
            kept.append(entry)
        names = {entry.name for entry in kept}
        for name in self._disk.list(self.folder):
            if name not in names:
                self._disk.remove(f"{self.folder}/{name}")
        # Removed files must not come back beside versions that are fetched again, and renamed ones must stay.
        self._disk.fsync_dir(self.folder)
        return kept

    def _listed(self) -> list[Entry]:
        found = []
        for name in self._disk.list(self.folder):
            if (change := _CHANGE.fullmatch(name)) is not None:
                version, after, rows, digest = change.groups()
                found.append(Entry(version=int(version), after=int(after), rows=int(rows), digest=digest))
            elif (base := _BASE.fullmatch(name)) is not None:
                version, rows, digest = base.groups()
                found.append(Entry(version=int(version), after=0, rows=int(rows), digest=digest, base=True))
        return found

    def _is_lost(self, entry: Entry, newest: int = 0) -> bool:
        """Whether a file is of no use: damaged, of another plan, or without its predecessor."""
        try:
            fits = self._frame(entry).schema == self.columns
            problem = None if fits else "it has the columns of another plan"
        except DamagedError as error:
            problem = str(error)
        if entry.after != newest:
            problem = f"it follows version {entry.after}, and the one before it is {newest}"
        if problem is not None:
            log.warning("control version lost", extra={"folder": self.folder, "file": entry.name, "problem": problem})
        return problem is not None


def changes_between(before: pl.DataFrame, after: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """What turns one table into another: new and changed rows, and deletes. Both have `__op`, and one row per key."""
    key, others = list(keys), [name for name in after.columns if name not in keys]
    known = before.select(*key, *(pl.col(name).alias(f"__was_{name}") for name in others))
    joined = after.join(known, on=key, how="left", maintain_order="left")
    # A row without a partner has null beside its `__op`.
    other = [
        _comparable(pl.col(name), kind).ne_missing(_comparable(pl.col(f"__was_{name}"), kind))
        for name, kind in after.schema.items()
        if name in others
    ]
    changed = joined.filter(pl.any_horizontal(other)).select(after.columns)
    gone = before.join(after.select(key), on=key, how="anti", maintain_order="left")
    return pl.concat([changed, gone.with_columns(pl.lit(DELETE).alias(OP))])


def _comparable(column: pl.Expr, kind: pl.DataType) -> pl.Expr:
    """A value that is equal only for the same value: as text the zeros differ, and all NaNs are equal."""
    return column.cast(pl.String) if kind.is_float() else column
