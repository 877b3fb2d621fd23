"""The place for what is damaged: nothing that might still tell something is deleted.

Each checkpoint set aside gets a note, `<epoch>-<n>.json`, written before anything is moved. The note is also the
durable word that the epoch was sealed, so the order matters: note first, then the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fordstone.checkpoint.disk import Disk
from fordstone.checkpoint.sealed_json import EPOCH_DIGITS, encode_note
from fordstone.errors import StorageError


class Aside:
    """Moves files into one directory. Called by one thread at a time."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory

    def take(self, epoch: int, reason: str, paths: Sequence[str]) -> None:
        """Note down why, durably, then move the files here. The directories they came from are the caller's to sync."""
        names = set(self._disk.list(self._directory))
        number = 1
        while f"{epoch:0{EPOCH_DIGITS}}-{number}.json" in names:
            number += 1
        stem = f"{epoch:0{EPOCH_DIGITS}}-{number}"
        moves = [(path, f"{stem}.{path.rpartition('/')[2].removesuffix('.json')}") for path in paths]
        note = {"epoch": epoch, "reason": reason, "files": {new: old for old, new in moves}}
        self._disk.create(f"{self._directory}/{stem}.json", encode_note(note))
        self._disk.fsync(f"{self._directory}/{stem}.json")
        self._disk.fsync_dir(self._directory)
        for old, new in moves:
            self._disk.rename(old, f"{self._directory}/{new}")
        self._disk.fsync_dir(self._directory)

    def copy(self, path: str) -> None:
        """Keep the bytes of a file as they are now, durably; the file stays where it is."""
        names = set(self._disk.list(self._directory))
        stem, _, ending = path.rpartition("/")[2].rpartition(".")
        number = 1
        while f"{stem}-{number}.{ending}" in names:
            number += 1
        kept = f"{self._directory}/{stem}-{number}.{ending}"
        try:
            self._disk.create(kept, self._disk.read(path))
        except StorageError:
            with contextlib.suppress(StorageError):
                self._disk.remove(kept)
            raise
        self._disk.fsync(kept)
        self._disk.fsync_dir(self._directory)

    def epochs(self) -> set[int]:
        """The epochs of which anything was ever set aside."""
        stems = (
            name[:EPOCH_DIGITS]
            for name in self.files()
            if name.endswith(".json") and name[EPOCH_DIGITS : EPOCH_DIGITS + 1] == "-"
        )
        return {int(stem) for stem in stems if stem.isascii() and stem.isdigit()}

    def files(self) -> tuple[str, ...]:
        """The names of all that lies here."""
        return tuple(self._disk.list(self._directory))
