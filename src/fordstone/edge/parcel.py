"""A parcel: the epochs of one commit, the checkpoint that goes with them, and the blobs that are still to be sent before it."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Iterable
from typing import Final

from fordstone.checkpoint.run_file import run_problem, short
from fordstone.checkpoint.sealed_json import encode_manifest
from fordstone.checkpoint.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError
from fordstone.hub.messages import BLOB_BYTES_MAX, RUNS_A_COMMIT_MAX, Checkpoint, EpochEntry
from fordstone.model.manifest import RunRef

log = logging.getLogger(__name__)

STATE_RUNS_MAX: Final = RUNS_A_COMMIT_MAX // 2
"""A commit has room for so many runs of state beside those of rows."""


class Parcel:
    """Used by the sender's thread only. Pins the checkpoint that it brings along until it is closed."""

    def __init__(self, store: CheckpointStore, epochs: tuple[EpochEntry, ...], *, with_checkpoint: bool) -> None:
        self.epochs = epochs
        self.checkpoint: Checkpoint | None = None
        self.unsent: deque[str] = deque()
        self.asked = False
        """The hub has said which of the blobs it lacks."""
        self._store = store
        self._manifest = b""
        self._pinned: int | None = None
        runs = [run for entry in epochs for segment in entry.streams.values() for run in segment.runs]
        self._segments = {run.digest: run for run in runs}
        if with_checkpoint:
            self._add_checkpoint()

    @property
    def last(self) -> int:
        """The newest epoch."""
        return self.epochs[-1].epoch

    def blobs(self) -> dict[str, RunRef]:
        """Everything that the commit names; rows first."""
        checkpoint = self.checkpoint
        state = () if checkpoint is None else (*checkpoint.state, checkpoint.manifest)
        return self._segments | {run.digest: run for run in state}

    def send(self, digests: Iterable[str]) -> None:
        """These are to be sent, as far as they belong to it."""
        wanted = set(digests)
        self.unsent = deque(digest for digest in self.blobs() if digest in wanted)

    def read(self, digest: str) -> bytes | None:
        """The bytes of a blob, checked. None: it is not needed any more. `DamagedError` if rows cannot be had."""
        checkpoint = self.checkpoint
        if checkpoint is not None and digest == checkpoint.manifest.digest:
            return self._manifest
        ref = self.blobs()[digest]
        try:
            data = self._store.read_run_bytes(ref)
            problem = run_problem(data, ref)
        except DamagedError as error:
            data, problem = b"", str(error)
        if problem is None:
            return data
        if digest in self._segments:
            raise DamagedError(
                f"run {short(digest)}, which waits for the hub, is damaged: it {problem}. It and all that is behind it stay in the "
                "outbox. Bring the file back from a copy of the state directory."
            )
        log.warning("checkpoint not sent", extra={"epoch": self.last, "run": short(digest), "problem": problem})
        self.leave_state()
        return None

    def leave_state(self) -> None:
        """Send the rows alone: they do not wait for a state that cannot be had or sent, and a later checkpoint will do."""
        self.checkpoint = None
        self.send(self.unsent)

    def sends_state(self) -> bool:
        """Whether what is sent next is for the checkpoint's sake: one of its blobs, or a commit that could do with less of it."""
        if self.checkpoint is None:
            return False
        return self.unsent[0] not in self._segments if self.unsent else len(self.epochs) == 1

    def close(self) -> None:
        """Let go of the checkpoint."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._store.unpin(pinned)

    def _add_checkpoint(self) -> None:
        """Bring the state along if the checkpoint of the last epoch is still kept; of those before, nobody needs it."""
        try:
            self._store.pin(self.last)
            self._pinned = self.last
            manifest = self._store.manifest(self.last)
        except CheckpointError:
            return
        data = encode_manifest(manifest)
        state = tuple(dict.fromkeys(manifest.runs()))
        largest = max((run.size_bytes for run in state), default=0)
        if max(len(data), largest) > BLOB_BYTES_MAX or len(state) > STATE_RUNS_MAX:
            log.warning(
                "checkpoint too large for the hub",
                extra={"epoch": self.last, "runs": len(state), "largest_bytes": largest},
            )
            return
        self._manifest = data
        ref = RunRef(hashlib.sha256(data).hexdigest(), len(data), 0)
        self.checkpoint = Checkpoint(epoch=self.last, manifest=ref, state=state)
