"""Working files of state: what is on disk because it does not fit into memory. They may be thrown away at any time, and nothing is synced.

What is durable is the checkpoint. `<directory>/working` is emptied when a process begins to use it, except for `kept`: copies of databases
that are named by the runs whose rows they have. A copy is taken by the restart that can use it, or removed.

Invariants: a directory that was handed out belongs to one state, and goes with it or with `clear`, whichever is first; a kept copy has its
name only when it is whole; whatever refuses is a `WorkingFileError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import polars as pl

from fordstone.errors import StorageError, describe_refusal

_KEPT: Final = "kept"
_NUMBERS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What Polars and RocksDB say in words alone."""


class WorkingFileError(StorageError):
    """A working file cannot be written or read. What is durable is not touched: a run that starts again from its checkpoint makes it again."""

    while_running = False
    """Whether rows were being processed: a run that had begun waits for the disk."""


@contextlib.contextmanager
def refusals(what: str, path: Path) -> Iterator[None]:
    """Raise `WorkingFileError` for what files, Polars and RocksDB raise. RocksDB's package has no type of its own: it is a plain `Exception`."""
    try:
        yield
    except (OSError, pl.exceptions.PolarsError) as error:
        raise _refusal(error, what, path) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise _refusal(error, what, path) from error


def _refusal(error: Exception, what: str, path: Path) -> WorkingFileError:
    text = str(error)
    number = getattr(error, "errno", None) or next((one for one in _NUMBERS if os.strerror(one) in text), errno.EIO)
    reason = getattr(error, "strerror", None) or text
    return WorkingFileError(describe_refusal(OSError(number, reason), what, path))


class WorkingFiles:
    """Hands out directories below one. Called by any thread. Nothing is created before the first is asked for."""

    def __init__(self, directory: Path | None = None) -> None:
        """None: a temporary directory, which goes with this object."""
        self._given = directory
        self._root: Path | None = None
        self._mutex = threading.Lock()
        self._handed_out: dict[Path, weakref.finalize[..., object]] = {}
        self._left: set[str] = set()
        """Copies of an earlier process, until the first of this one is kept."""

    def fresh(self, owner: object, before: Callable[[], object] = lambda: None) -> Path:
        """Make a directory that is removed when `owner` is collected; `before` is called first, and must not refer to it."""
        with self._mutex:
            root = self._begin()
            with refusals("create a working directory in", root):
                path = Path(tempfile.mkdtemp(prefix="state-", dir=root))
        # It holds this object, so that what is open is closed before a temporary root goes.
        self._handed_out[path] = weakref.finalize(owner, _discard, before, path, self)
        return path

    def clear(self) -> None:
        """Close and remove all that was handed out; copies stay. Called when a run has ended, or could not begin: its states are used no more."""
        for end in list(self._handed_out.values()):
            end()

    def keep(self, path: Path, name: str, *, instead_of: str | None) -> None:
        """Keep a directory under this name, and remove the copy that it replaces."""
        with self._mutex:
            kept = self._begin() / _KEPT
            for gone in {*self._left, name, *([] if instead_of is None else [instead_of])}:
                shutil.rmtree(kept / gone, ignore_errors=True)
            self._left.clear()
            with refusals("rename", path):
                path.rename(kept / name)

    def rename(self, old: str, new: str) -> bool:
        """Give a kept copy another name; return whether it was there."""
        with self._mutex:
            kept = self._begin() / _KEPT
            if old == new or not (kept / old).exists():
                return old == new
            shutil.rmtree(kept / new, ignore_errors=True)
            with refusals("rename", kept / old):
                (kept / old).rename(kept / new)
            return True

    def kept(self) -> frozenset[str]:
        """The names of the copies that are kept."""
        with self._mutex, refusals("list", self._begin() / _KEPT):
            return frozenset(path.name for path in (self._begin() / _KEPT).iterdir())

    def take(self, name: str, into: Path) -> bool:
        """Move the kept copy of this name to `into`, a path that is free; return whether there was one."""
        with self._mutex:
            found = self._begin() / _KEPT / name
            if not found.exists():
                return False
            with refusals("rename", found):
                found.rename(into)
            return True

    def _begin(self) -> Path:
        """The root, which is emptied when it is first used. Called with the mutex."""
        if self._root is None:
            with refusals("create working files in", self._given or Path(tempfile.gettempdir())):
                if self._given is None:
                    root = Path(tempfile.mkdtemp(prefix="fordstone-state-"))
                    weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
                else:
                    root = self._given
                    root.mkdir(parents=True, exist_ok=True)
                    for old in root.iterdir():
                        if old.name != _KEPT:
                            shutil.rmtree(old, ignore_errors=True)
                (root / _KEPT).mkdir(exist_ok=True)
                self._left = {old.name for old in (root / _KEPT).iterdir()}
            self._root = root
        return self._root


def _discard(before: Callable[[], object], path: Path, files: WorkingFiles) -> None:
    # Without the mutex: any thread that collects an owner may be here, also one that has it.
    files._handed_out.pop(path, None)  # noqa: SLF001 - of this module
    before()
    shutil.rmtree(path, ignore_errors=True)
