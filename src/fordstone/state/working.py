"""Working files of state: what is on disk because it does not fit into memory. They may be thrown away at any time, and nothing is synced.

What is durable is the checkpoint. `<directory>/working` is emptied when a process begins to use it, except for `kept`: copies of databases
that are named by the runs whose rows they have. A copy is taken by the restart that can use it, or removed.

Invariants: a directory that was handed out belongs to one state, and goes with it; a kept copy has its name only when it is whole.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fordstone.errors import StorageError

_KEPT: Final = "kept"


class WorkingFiles:
    """Hands out directories below one. Called by any thread. Nothing is created before the first is asked for."""

    def __init__(self, directory: Path | None = None) -> None:
        """None: a temporary directory, which goes with this object."""
        self._given = directory
        self._root: Path | None = None
        self._mutex = threading.Lock()
        self._left: set[str] = set()
        """Copies of an earlier process, until the first of this one is kept."""

    def fresh(self, owner: object, before: Callable[[], object] = lambda: None) -> Path:
        """Make a directory that is removed when `owner` is collected; `before` is called first, and must not refer to it."""
        with self._mutex:
            # A name of its own: an earlier run of this process may not have closed what it had open.
            path = Path(tempfile.mkdtemp(prefix="state-", dir=self._begin()))
        # It holds this object, so that what is open is closed before a temporary root goes.
        weakref.finalize(owner, _discard, before, path, self)
        return path

    def keep(self, path: Path, name: str, *, instead_of: str | None) -> None:
        """Keep a directory under this name, and remove the copy that it replaces."""
        with self._mutex:
            kept = self._begin() / _KEPT
            for gone in {*self._left, name, *([] if instead_of is None else [instead_of])}:
                shutil.rmtree(kept / gone, ignore_errors=True)
            self._left.clear()
            path.rename(kept / name)

    def rename(self, old: str, new: str) -> bool:
        """Give a kept copy another name; return whether it was there."""
        with self._mutex:
            kept = self._begin() / _KEPT
            if old == new or not (kept / old).exists():
                return old == new
            shutil.rmtree(kept / new, ignore_errors=True)
            (kept / old).rename(kept / new)
            return True

    def take(self, name: str, into: Path) -> bool:
        """Move the kept copy of this name to `into`, a path that is free; return whether there was one."""
        with self._mutex:
            found = self._begin() / _KEPT / name
            if not found.exists():
                return False
            found.rename(into)
            return True

    def _begin(self) -> Path:
        """The root, which is emptied when it is first used. Called with the mutex."""
        if self._root is None:
            try:
                if self._given is None:
                    self._root = Path(tempfile.mkdtemp(prefix="fordstone-state-"))
                    weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
                else:
                    self._root = self._given
                    self._root.mkdir(parents=True, exist_ok=True)
                    for old in self._root.iterdir():
                        if old.name != _KEPT:
                            shutil.rmtree(old, ignore_errors=True)
                (self._root / _KEPT).mkdir(exist_ok=True)
                self._left = {old.name for old in (self._root / _KEPT).iterdir()}
            except OSError as error:
                raise StorageError(
                    f"state that does not stay in memory needs a directory for its working files, and {self._given or tempfile.gettempdir()} "
                    f"cannot be used: {error}."
                ) from error
        return self._root


def _discard(before: Callable[[], object], path: Path, files: WorkingFiles) -> None:
    del files
    before()
    shutil.rmtree(path, ignore_errors=True)
