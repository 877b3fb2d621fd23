"""Spark's own files below a checkpoint location on a local disk: make them durable, and clear away what a power cut tore.

Spark writes its logs (`offsets/`, `commits/`), its state (`state/`), where sources began (`sources/`) and `metadata` and syncs none of them. Stores at a URL, such as
HDFS and S3, are durable by themselves, so their files are left alone.

- `sync` is called when a batch has been executed, before its epoch is sealed. It covers what the batch wrote, and the commit of the
  batch before. The hidden checksums of Hadoop are left out: Hadoop ignores one that is missing or empty.
- `repair` is called before Spark starts. A file that was not synced may be empty after a power cut, and Spark would refuse to start
  with some of those. None of Spark's files is ever empty otherwise.

Invariants: what a sealed epoch needs of Spark is durable before the epoch is sealed; nothing is removed, but set aside, and only if
every batch that Spark then executes again can be planned as it was (`protocol.micro_batch`).
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from fordstone.errors import DamagedError
from fordstone.protocol.micro_batch import LogRepair, NextPlan, decide_log_repair, decide_plan
from fordstone.storage.disk import OsDisk
from fordstone.storage.remote import local_path

log = logging.getLogger(__name__)

OURS: Final = "fordstone"
SET_ASIDE: Final = f"{OURS}/set-aside"
SYNC_THREADS: Final = 8
"""Number of files that are synced at once: the file system then writes its journal once for several of them."""
PARSED_ENTRIES: Final = 8
"""Number of entries of a log, the newest, that are read as a whole. Those before were synced, and may be large."""
_OFFSETS: Final = "offsets"
_COMMITS: Final = "commits"
_METADATA: Final = "metadata"
_STATE: Final = "state"
_SOURCES: Final = "sources"
_WRITTEN_IN_PLACE: Final = "SSTs"
"""The only directories in which files grow under their last name. All others are written under another name and renamed."""
_VERSION: Final = re.compile(r"v\d+")
_NO_OFFSET: Final = "-"
"""What Spark writes for a source that has no offset yet."""


def spark_files(location: str) -> SparkFiles | None:
    """Open Spark's files at a checkpoint location; None if it is not on a local disk."""
    path = local_path(location)
    return None if path is None else SparkFiles(path)


class SparkFiles:
    """Spark's files below one directory. Used by one thread."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        self._disk = OsDisk(self._root, create_root=False)
        self._synced: dict[str, tuple[int, int]] = {}
        """By path, what distinguishes a file from others of that name."""
        self._directories: set[str] = set()
        """Those whose names are durable."""

    def sync(self) -> int:
        """Make everything durable that is there and was not yet synced by this object; return the number of files.

        Raises `FatalStorageError` if the disk refuses.
        """
        marks: dict[str, tuple[int, int]] = {}
        directories: set[str] = set()
        for directory, names in self._walk():
            directories.add(directory)
            marks |= {_join(directory, name): mark for name, mark in names.items()}
        new = [path for path, mark in marks.items() if self._synced.get(path) != mark]
        self._each(self._disk.fsync, new)
        # The names after the bytes: a name that is durable has its bytes.
        named = [*new, *(directories - self._directories - {""})]
        self._each(self._disk.fsync_dir, sorted({_parent(path) for path in named}))
        self._synced, self._directories = marks, directories
        return len(new)

    def sync_commit(self, batch: int) -> bool:
        """Make the commit of a batch durable; False: it is not there."""
        try:
            self._disk.fsync(f"{_COMMITS}/{batch}")
        except FileNotFoundError:
            return False
        self._disk.fsync_dir(_COMMITS)
        return True

    def repair(self, *, first_epoch: int, recorded: Callable[[int], bool], newest: int) -> tuple[str, ...]:
        """Set aside what Spark cannot start with, and return the paths.

        `first_epoch`: that of batch 0. `recorded`: whether there is a record of an epoch; `newest`: the newest that has one. Raises
        `DamagedError`, and changes nothing, if Spark would have to plan a batch of which no record is kept.
        """
        offsets, commits = self._entries(_OFFSETS), self._entries(_COMMITS)
        decided = decide_log_repair(offsets, commits)
        empty = tuple(self._empty())
        # State of a first batch of which nothing else is left.
        orphaned = not (offsets or commits) and self._disk.exists(_STATE)
        if not (decided.offsets or decided.commits or empty or orphaned):
            return ()
        aside = self._to_set_aside(decided, empty)
        planned = {batch for batch in offsets if f"{_OFFSETS}/{batch}" not in aside and _OFFSETS not in aside}
        batch = decided.committed + 1
        epoch = first_epoch + batch
        if batch not in planned and decide_plan(epoch, recorded=recorded(epoch), newest=newest) is NextPlan.LOST:
            raise DamagedError(
                f"{self._root}: Spark's logs can be read up to batch {decided.committed} only, but epochs up to {newest} are sealed, and how "
                f"epoch {epoch} was planned is no longer recorded. Restore the checkpoint location as a whole, or begin with a new one."
            )
        self._set_aside(aside)
        log.warning(
            "files of Spark set aside",
            extra={"location": str(self._root), "files": len(aside), "first": aside[0], "resumes_with_batch": batch},
        )
        return aside

    def _walk(self) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
        """Each directory with its files, by name, and what distinguishes each from others of that name."""
        waiting = [""]
        while waiting:
            directory = waiting.pop()
            files: dict[str, tuple[int, int]] = {}
            in_place = directory.endswith(_WRITTEN_IN_PLACE)
            with suppress(FileNotFoundError), os.scandir(self._root / directory) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or (not directory and entry.name == OURS):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(_join(directory, entry.name))
                        continue
                    with suppress(FileNotFoundError):
                        files[entry.name] = (entry.inode(), entry.stat().st_size if in_place else 0)
            yield directory, files

    def _each(self, call: Callable[[str], None], paths: list[str]) -> None:
        def quietly(path: str) -> None:
            with suppress(FileNotFoundError):  # Spark removes old files at any time
                call(path)

        if len(paths) <= 1:
            for path in paths:
                quietly(path)
            return
        with ThreadPoolExecutor(min(SYNC_THREADS, len(paths)), "sync-spark-files") as threads:
            for _ in threads.map(quietly, paths):
                pass

    def _entries(self, directory: str) -> dict[int, bool]:
        """The entries of a log, by batch, and whether each can be read."""
        batches = sorted(int(name) for name in self._disk.list(directory) if name.isdigit())
        newest = set(batches[-PARSED_ENTRIES:])

        def can_be_read(batch: int) -> bool:
            path = f"{directory}/{batch}"
            return _is_readable(self._disk.read(path)) if batch in newest else self._disk.size(path) > 0

        return {batch: can_be_read(batch) for batch in batches}

    def _empty(self) -> Iterator[str]:
        """The empty files of the state, and of where sources began. Spark does not continue its logs without `metadata`, which was synced with
        the first batch.
        """
        for directory, names in self._walk():
            if directory.partition("/")[0] not in {_STATE, _SOURCES}:
                continue
            for name in names:
                path = _join(directory, name)
                with suppress(FileNotFoundError):
                    if not self._disk.size(path):
                        yield path

    def _to_set_aside(self, decided: LogRepair, empty: Iterable[str]) -> tuple[str, ...]:
        if decided.committed < 0:
            # Spark starts with its first batch, and has no state.
            started = tuple(name for name in (_OFFSETS, _COMMITS, _STATE, _METADATA) if self._disk.exists(name))
            return (*started, *(path for path in empty if path.partition("/")[0] == _SOURCES))
        return (
            *(f"{_OFFSETS}/{batch}" for batch in decided.offsets),
            *(f"{_COMMITS}/{batch}" for batch in decided.commits),
            *empty,
        )

    def _set_aside(self, paths: Sequence[str]) -> None:
        number = max((int(name) for name in self._disk.list(SET_ASIDE) if name.isdigit()), default=0) + 1
        for path in paths:
            parent, name = _parent(path), path.rpartition("/")[2]
            place = _join(f"{SET_ASIDE}/{number}", parent).rstrip("/")
            self._disk.make_dirs(place)
            # With the checksum of Hadoop, which would not fit to the next file of that name.
            for one in (f".{name}.crc", name):
                with suppress(FileNotFoundError):
                    self._disk.rename(_join(parent, one), f"{place}/{one}")
        for parent in sorted({_parent(path) for path in paths}):
            self._disk.fsync_dir(parent)


def _is_readable(data: bytes) -> bool:
    """Whether an entry of a log has all its lines: a version, and JSON."""
    version, *lines = data.decode("utf-8", "replace").splitlines() or [""]
    if _VERSION.fullmatch(version) is None or not lines:
        return False
    try:
        for line in lines:
            if line != _NO_OFFSET:
                json.loads(line)
    except ValueError:
        return False
    return True


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
