"""The claim on a directory of output files: which writer may put files there (rule 18).

    .writer-<generation>-<start>/claim      the writer, as JSON

A writer makes each file in its claim's directory, and renames it out of there when it is whole. A writer that takes the directory over
removes the former claims, so a rename by the former writer fails, at whatever moment it comes: its directory is gone. That holds on
shared file systems too, because names are removed and not reused.

Invariants: a claim is durable before the former ones are removed; no file of a former writer appears after `take` has returned.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import Final, assert_never

import msgspec

from fordstone.connectors.base import SinkStream, judge_claim, owned_by_newer
from fordstone.errors import DamagedError, FencedError, SinkError, StorageError
from fordstone.protocol.claim import Keep, SinkWriter, Take
from fordstone.storage.atomic import TEMP_PREFIX, AtomicWriter
from fordstone.storage.disk import Disk, FatalStorageError

CLAIM_PREFIX: Final = ".writer-"
_CONTENT: Final = "claim"
GONE_PREFIX: Final = f"{TEMP_PREFIX}gone-"
_TRIES_MAX: Final = 100


class DirectoryClaim:
    """The right of one start to put files into a directory. Several sinks of that start may share it."""

    def __init__(self, disk: Disk, stream: SinkStream, *, where: str, check_later: Callable[[], None]) -> None:
        """`check_later` raises if the directory has later epochs than the writer's state."""
        self._disk = disk
        self._check_later = check_later
        self._stream = stream
        self._where = where
        self._mine = stream.writer
        hub, local = stream.generation
        self.directory = f"{CLAIM_PREFIX}{hub}.{local}-{stream.start or 'unknown'}"

    def take(self) -> None:
        """Become the one writer. On return no former writer can make a file appear."""
        self._judge()
        self._check_later()  # before anything changes: a run that cannot go on must not stop one that can
        for _ in range(_TRIES_MAX):
            try:
                decision = self._judge()
            except FencedError:
                remove_tree(self._disk, self.directory)  # made by an earlier turn, while another writer took over
                raise
            match decision:
                case Keep():
                    return
                case Take():
                    self._write()
                    for name in self._others():
                        remove_tree(self._disk, name)
                    self._disk.fsync_dir("")
                case other:
                    assert_never(other)
        raise SinkError(
            f"sink {self._stream.step}: {self._where} is claimed again and again by other processes. Let only one run of the pipeline write there."
        )

    def held(self) -> None:
        """Raise `FencedError` if another writer has taken over."""
        if not self._disk.exists(self.directory):
            raise self.lost()

    def lost(self) -> FencedError:
        """The error for a writer whose claim is gone."""
        found = [one for name in self._others() if (one := self._read(name)) is not None]
        newest = max(found, key=lambda one: one.fence, default=None)
        return owned_by_newer(self._where, self._stream, newest)

    def _judge(self) -> Keep | Take:
        names = [name for name in self._disk.list("") if name.startswith(CLAIM_PREFIX)]
        found = [self._read(name) for name in names]
        known = [one for one in found if one is not None]
        decision = judge_claim(self._where, self._stream, known, self._check_later)
        return decision if names == [self.directory] else Take()

    def _others(self) -> list[str]:
        return [name for name in self._disk.list("") if name.startswith(CLAIM_PREFIX) and name != self.directory]

    def _read(self, name: str) -> SinkWriter | None:
        """The writer of a claim; None if it cannot be read, or is not written yet."""
        try:
            return msgspec.json.decode(self._disk.read(f"{name}/{_CONTENT}"), type=SinkWriter)
        except (FileNotFoundError, DamagedError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _write(self) -> None:
        self._disk.make_dirs(self.directory)
        path = f"{self.directory}/{_CONTENT}"
        with contextlib.suppress(FileNotFoundError):  # removed by another writer since: the next turn judges it
            AtomicWriter(self._disk).write(path, msgspec.json.encode(self._mine))


def remove_tree(disk: Disk, name: str) -> None:
    """Remove a directory of files in the root for good, so that no process can rename it or a file in it to another name."""
    gone = f"{GONE_PREFIX}{secrets.token_hex(6)}"
    try:
        disk.rename(name, gone)
    except FileNotFoundError:
        return
    for turn in range(_TRIES_MAX):
        for inner in disk.list(gone):
            disk.remove(f"{gone}/{inner}")
        try:
            disk.remove_dir(gone)
        except FatalStorageError:
            raise
        except StorageError:
            # On a shared file system its writer may still add files for a moment.
            if turn == _TRIES_MAX - 1:
                raise
        else:
            return
