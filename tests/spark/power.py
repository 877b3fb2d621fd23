"""Power cuts: what of some directories would be left if the machine stopped now.

`Power` records every `os.fsync` of this process, and syncs nothing unless asked to. A file survives with its bytes if it was synced
and its directory was synced after it got its name. What was not synced may survive, be gone, or have its name and no bytes: chance
decides, or the test. Other processes' syncs are not seen: for real Spark, only the checkpoint location, which this process syncs, can be
cut.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from random import Random

Mark = tuple[int, int, int]
"""What tells a file from others, whatever its name is: inode, time of its last write, size."""


class Left(Enum):
    """What becomes of something that was not synced."""

    WHOLE = "whole"
    """It was written back in time."""
    GONE = "gone"
    EMPTY = "empty"
    """The name was written back, the bytes were not. Of a directory nothing is left either."""


class Power:
    """Knows what is durable below the current machine's directories."""

    def __init__(self, *, really: bool = False) -> None:
        """`really`: the disk is synced, too."""
        self.syncs = 0
        self._really = os.fsync if really else None
        self._bytes: set[Mark] = set()
        self._names: dict[int, dict[str, int]] = {}
        """By the inode of a directory, because directories are renamed, too."""

    def fsync(self, fd: int) -> None:
        """Stand in for `os.fsync`."""
        self.syncs += 1
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(fd) as entries:
                self._names[status.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self._bytes.add(_mark(status))
        if self._really is not None:
            self._really(fd)

    def cut(self, *roots: Path, left: Callable[[Path], Left]) -> Counter[str]:
        """Lose what is not durable below these directories; `left` says how. Gives how many files were lost or torn."""
        found: Counter[str] = Counter()
        for root in roots:
            if root.exists():
                self._cut(root, left, found)
        return found

    def _cut(self, directory: Path, left: Callable[[Path], Left], found: Counter[str]) -> None:
        names = self._names.get(directory.stat().st_ino, {})
        for entry in sorted(directory.iterdir()):
            status = entry.lstat()
            named = names.get(entry.name) == status.st_ino
            if stat.S_ISDIR(status.st_mode):
                if named:
                    self._cut(entry, left, found)
                elif left(entry) is not Left.WHOLE:
                    shutil.rmtree(entry)
                    found["directories"] += 1
                continue
            if named and _mark(status) in self._bytes:
                continue
            match left(entry):
                case Left.WHOLE:
                    pass
                case Left.GONE if not named:
                    entry.unlink()
                    found["gone"] += 1
                case _:
                    os.truncate(entry, 0)
                    found["torn"] += 1


def by_chance(rng: Random) -> Callable[[Path], Left]:
    """Lose any of what was not synced."""
    return lambda _: rng.choice(tuple(Left))


def _mark(status: os.stat_result) -> Mark:
    return status.st_ino, status.st_mtime_ns, status.st_size
