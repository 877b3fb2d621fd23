"""The folder in which a node keeps its copy of a control table: what changed, version by version.

Each version is one Arrow file, `<version>-<after>-<rows>-<digest>.arrow`: what changed since version `after`. A prefix of
them may be folded into `base-<version>-<rows>-<digest>.arrow`, the whole table. Where versions come from is left to
`edge.control_fetch`, reading them as a source to `connectors.control`.

Invariants: a version is visible to readers only when it is durable; whatever a crash leaves, what is found again is a
prefix of what was added; nothing is given whose bytes are not what its name says; versions grow, and each file says which
one it stands on, so that a missing one is noticed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from fordstone.epochs.run_file import decode_run, encode_run
from fordstone.errors import DamagedError, SourceError, StorageError
from fordstone.lang.schema import Schema
from fordstone.operators.base import DELETE, OP, UPSERT
from fordstone.state.base import RunRef
from fordstone.storage.disk import Disk, FatalStorageError

log = logging.getLogger(__name__)

FOLD_FILES_MIN: Final = 16
"""Fewer versions than this are not worth folding: the whole table is written anew for it."""
FOLD_FILES_MAX: Final = 512
"""So many are folded even if they have few rows beside the table's."""
FOLD_SHARE: Final = 4
"""Else they are folded when they have a row for so many of the table's."""
_TEMPORARY: Final = ".writing"
_CHANGE: Final = re.compile(r"(\d{12})-(\d{12})-(\d{1,12})-([0-9a-f]{64})\.arrow")
_BASE: Final = re.compile(r"base-(\d{12})-(\d{1,12})-([0-9a-f]{64})\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file."""

    version: int
    after: int
    """The version that it stands on; of a base 0."""
    rows: int
    digest: str
    base: bool = False

    @property
    def name(self) -> str:
        """Of the file."""
        if self.base:
            return f"base-{self.version:012}-{self.rows}-{self.digest}.arrow"
        return f"{self.version:012}-{self.after:012}-{self.rows}-{self.digest}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Rows with `__op`, and the version behind each of them."""

    frame: pl.DataFrame
    versions: pl.Series
    position: int


class ControlLog:
    """One control table on one node. May be used from any thread: one adds, others read and fold."""

    def __init__(self, disk: Disk, folder: str, *, schema: Schema, keys: Sequence[str]) -> None:
        """Open the folder, which is made if missing, and take away what is damaged, with all behind it."""
        self.folder = folder
        self.schema = schema
        self.keys = tuple(keys)
        self.columns = pl.Schema(dict(schema.polars) | {OP: pl.String()})
        """Of what is stored."""
        self._disk = disk
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
        """Whole versions behind `position`, about `rows_max` rows of them; None: there are none, or `until` is reached."""
        frames: list[pl.DataFrame] = []
        versions: list[pl.Series] = []
        stands = position
        with self._mutex:
            for entry in self._entries:
                if entry.version <= position or (until is not None and stands >= until):
                    continue
                if frames and sum(frame.height for frame in frames) + entry.rows > rows_max:
                    break
                self._check_follows(entry, stands, until)
                frames.append(self._frame(entry))
                versions.append(pl.Series([entry.version], dtype=pl.Int64).new_from_index(0, entry.rows))
                stands = entry.version
            if until is not None and not frames and position < until:
                raise self._gone(position, f"version {until} is needed again and is not there")
        if not frames:
            return None
        return Changes(frame=pl.concat(frames), versions=pl.concat(versions), position=stands)

    def table(self) -> pl.DataFrame:
        """The table as of the newest version: its columns, and `__op`, always 'upsert'."""
        with self._mutex:
            return self._folded(self._entries)

    def fold(self, version: int) -> None:
        """Put one file in place of all up to `version`, if that is worth it. Nobody will read from before it again."""
        with self._mutex:
            old = [entry for entry in self._entries if entry.version <= version]
            changes = sum(entry.rows for entry in old if not entry.base)
            table = sum(entry.rows for entry in old if entry.base)
            if len(old) < FOLD_FILES_MIN or (len(old) < FOLD_FILES_MAX and changes * FOLD_SHARE < table):
                return
            self._replace(old, self._write(self._folded(old), old[-1].version, after=0, base=True))

    def _replace(self, old: Sequence[Entry], base: Entry) -> None:
        """`old`: the first ones."""
        self._entries = [base, *self._entries[len(old) :]]
        for entry in old:
            # Durable or not: opening takes away what lies under a base.
            self._disk.remove(f"{self.folder}/{entry.name}")

    def _write(self, rows: pl.DataFrame, version: int, *, after: int, base: bool = False) -> Entry:
        ref, data = encode_run(rows.select(list(self.columns)).cast(self.columns), "zstd")
        entry = Entry(version=version, after=after, rows=ref.rows, digest=ref.digest, base=base)
        temporary, place = f"{self.folder}/{_TEMPORARY}", f"{self.folder}/{entry.name}"
        try:
            self._disk.remove(temporary)
            self._disk.create(temporary, data)
            self._disk.fsync(temporary)
            self._disk.rename(temporary, place)
        except FatalStorageError:
            raise
        except StorageError:
            with contextlib.suppress(StorageError):
                self._disk.remove(temporary)
            raise
        self._disk.fsync_dir(self.folder)
        return entry

    def _check_follows(self, entry: Entry, stands: int, until: int | None) -> None:
        """Reading goes from version to version; into the midst of what was folded there is no way."""
        if (entry.base and stands > 0) or (not entry.base and entry.after != stands):
            raise self._gone(stands, f"the next one there is {entry.version}, which stands on {entry.after}")
        if until is not None and entry.version > until:
            raise self._gone(stands, f"version {until} is needed again and lies within what was folded")

    def _gone(self, position: int, what: str) -> SourceError:
        return SourceError(
            f"control table in {self.folder}: what follows version {position} is gone: {what}.\n"
            "Bring the folder back from a copy that is as old as the checkpoint, or start over with an empty state directory."
        )

    def _frame(self, entry: Entry) -> pl.DataFrame:
        data = self._disk.read(f"{self.folder}/{entry.name}")
        return decode_run(data, RunRef(digest=entry.digest, size_bytes=len(data), rows=entry.rows))

    def _folded(self, entries: Sequence[Entry]) -> pl.DataFrame:
        frames = [self._frame(entry) for entry in entries]
        return apply_changes(pl.DataFrame(schema=self.columns), frames, self.keys)

    # Opening.

    def _opened(self) -> list[Entry]:
        found = self._listed()
        bases = [entry for entry in found if entry.base and not self._is_lost(entry)]
        kept = [max(bases, key=lambda entry: entry.version)] if bases else []
        for entry in sorted((entry for entry in found if not entry.base), key=lambda entry: entry.version):
            stands = kept[-1].version if kept else 0
            if entry.version <= stands:
                continue
            if self._is_lost(entry, stands):
                # And what is behind it, which stands on it. The hub has all of it.
                break
            kept.append(entry)
        names = {entry.name for entry in kept}
        for name in self._disk.list(self.folder):
            if name not in names:
                self._disk.remove(f"{self.folder}/{name}")
        # What was removed must not come back beside versions that are fetched again, and what was renamed must stay.
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

    def _is_lost(self, entry: Entry, stands: int = 0) -> bool:
        """Whether a file is of no use: damaged, of another plan, or without what it stands on."""
        try:
            fits = self._frame(entry).schema == self.columns
            problem = None if fits else "it has the columns of another plan"
        except DamagedError as error:
            problem = str(error)
        if entry.after != stands:
            problem = f"it stands on version {entry.after}, and before it is {stands}"
        if problem is not None:
            log.warning("control version lost", extra={"folder": self.folder, "file": entry.name, "problem": problem})
        return problem is not None


def apply_changes(table: pl.DataFrame, changes: Sequence[pl.DataFrame], keys: Sequence[str]) -> pl.DataFrame:
    """A table after changes, in order. All have `__op`; what is left has 'upsert'."""
    rows = pl.concat([table, *changes]).unique(keys, keep="last", maintain_order=True)
    return rows.filter(pl.col(OP) == UPSERT)


def changes_between(before: pl.DataFrame, after: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """What turns one table into another: rows that are new or other ones, and deletes. Both have `__op`, and one row a key."""
    key, others = list(keys), [name for name in after.columns if name not in keys]
    known = before.select(*key, *(pl.col(name).alias(f"__was_{name}") for name in others))
    beside = after.join(known, on=key, how="left", maintain_order="left")
    # A row without a partner has null beside its `__op`.
    other = [
        _told(pl.col(name), kind).ne_missing(_told(pl.col(f"__was_{name}"), kind))
        for name, kind in after.schema.items()
        if name in others
    ]
    changed = beside.filter(pl.any_horizontal(other)).select(after.columns)
    gone = before.join(after.select(key), on=key, how="anti", maintain_order="left")
    return pl.concat([changed, gone.with_columns(pl.lit(DELETE).alias(OP))])


def _told(column: pl.Expr, kind: pl.DataType) -> pl.Expr:
    """What is equal only for the same value: text tells both zeros apart, and every NaN is one."""
    return column.cast(pl.String) if kind.is_float() else column
