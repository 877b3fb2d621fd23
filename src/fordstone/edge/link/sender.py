"""Sending: the outbox to the hub, a steppable of its own, so that no network holds up anybody.

Each step makes one call at most. First the lease, then a look at where the hub stands, then for each range of epochs the
blobs that the hub lacks, the commit, and the mark in the outbox. What to send and what an answer means is judged in
`protocol.sending`; a commit whose answer was lost is followed by another look, never by a guess.

Invariants: nothing is committed before all its blobs are there; nothing leaves the outbox that the hub has not acknowledged;
trouble with the network or the hub never ends the pipeline, but a newer generation, another holder, and disagreement about
what was sealed do.

A parcel: the epochs of one commit, the checkpoint that goes with them, and the blobs that are still to be sent before it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, assert_never

from fordstone.edge.link.outbox import Outbox
from fordstone.edge.link.owner import Owner
from fordstone.epochs.run_file import run_problem, short
from fordstone.epochs.sealed import encode_manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import (
    CheckpointError,
    DamagedError,
    FencedError,
    HubAwayError,
    HubError,
    HubRefusedError,
    StorageError,
)
from fordstone.hub.messages import (
    BLOB_BYTES_MAX,
    EPOCHS_A_COMMIT_MAX,
    RUNS_A_COMMIT_MAX,
    Checkpoint,
    Commit,
    Committed,
    EpochEntry,
    Generation,
    Head,
    Lease,
    LeaseRequest,
    Refusal,
)
from fordstone.protocol import sending as judge
from fordstone.runtime.clock import Clock
from fordstone.state.base import RunRef
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.failpoint import Failpoints, NoFailpoints

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


LOOK_EVERY_US: Final = 1_000_000
"""New entries wake the sender; this is in case that one was missed."""
ASK_ABOVE_BLOBS: Final = 8
"""For more blobs than these, the hub is asked first which of them it lacks."""
STOP_SECONDS: Final = 5.0
"""So long a pipeline that was told to stop goes on sending."""
REST_SECONDS: Final = 0.05
REFUSALS_MAX: Final = 3
"""So often in a row the hub may say no at the end of a bounded run before that is an error."""


class Hub(Protocol):
    """What the sender asks of `hub.client.HubClient`."""

    def lease(self, pipeline: str, node: str, request: LeaseRequest) -> Lease:
        """Take or renew the right to commit."""
        ...

    def head(self, pipeline: str, node: str) -> Head:
        """Where the node stands at the hub."""
        ...

    def missing(self, digests: Iterable[str]) -> set[str]:
        """Which blobs the hub lacks."""
        ...

    def put_blob(self, digest: str, data: bytes) -> None:
        """Store a blob."""
        ...

    def commit(self, pipeline: str, node: str, commit: Commit) -> Committed:
        """Commit a range."""
        ...


class Sender:
    """Steps on a thread of its own. `problem` and the counts may be read by any."""

    def __init__(
        self,
        *,
        hub: Hub,
        outbox: Outbox,
        store: CheckpointStore,
        owner: Owner,
        clock: Clock,
        choose: Callable[[int], int],
        take_over: bool = False,
        hub_state: bool = True,
        failpoints: Failpoints | None = None,
    ) -> None:
        """`choose(n)` gives a number from 0 to n - 1, for waits that no two nodes share."""
        self.wake: Callable[[], None] = lambda: None
        self.problem: str | None = None
        """Why nothing could be sent the last time."""
        self.sent_bytes = 0
        self._hub, self._outbox, self._store, self._clock = hub, outbox, store, clock
        self._owner, self._choose = owner, choose
        self._take_over, self._hub_state = take_over, hub_state
        self._failpoints = failpoints or NoFailpoints()
        self._generation: Generation | None = None
        self._met = False
        self._parcel: Parcel | None = None
        self._acknowledged = 0
        self._at_hub: set[str] = set()
        """Blobs of the newest checkpoint there, which are not sent again."""
        self._epochs_max = EPOCHS_A_COMMIT_MAX
        self._failures = 0
        self._refusals = 0
        self._refusal: HubRefusedError | CheckpointError | None = None
        self._retry_at_us: int | None = None
        outbox.wake = self._woken

    def _woken(self) -> None:
        # The scheduler sets `wake` later: look it up when it is needed.
        self.wake()

    @property
    def idle_wait_us(self) -> int | None:
        """Until the next try, or until something new is there."""
        if self._retry_at_us is None:
            return LOOK_EVERY_US
        return max(self._retry_at_us - self._clock.monotonic_us(), 1_000)

    @property
    def failing(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    def step(self) -> bool:
        """Make one call; says whether there may be more to do now."""
        if self._retry_at_us is not None and self._clock.monotonic_us() < self._retry_at_us:
            return False
        self._retry_at_us = None
        try:
            did = self._advance()
        except HubAwayError as error:
            self._later(error, None if error.retry_after_s is None else int(error.retry_after_s * 1e6))
        except HubRefusedError as error:
            self._refused(error)
        except FatalStorageError:
            raise
        except (StorageError, CheckpointError) as error:
            # The disk is full, or a run that waits is damaged. Everything is kept; people are told.
            self._put_down()
            if isinstance(error, CheckpointError):
                self._refusal, self._refusals = error, self._refusals + 1
            self._later(error)
        else:
            return did
        return False

    def finish(self, *, patient: bool, wait: Callable[[float], bool], tick: Callable[[], None] = lambda: None) -> None:
        """Send what is left. Called when the pipeline is over, instead of `step`.

        `patient`: until all is sent or `wait` says to stop; else for some seconds, and not at all if the hub is away.
        `wait(seconds)` rests, and says whether to stop. `tick` is called between.
        """
        until_us = self._clock.monotonic_us() + int(STOP_SECONDS * 1e6)
        while self._outbox.epochs or self._acknowledged:
            if not patient and (self.failing or self._clock.monotonic_us() >= until_us):
                break
            if self._refusals >= REFUSALS_MAX and self._refusal is not None and patient:
                raise self._refusal
            did = self.step()
            if wait(0.0 if did else min((self.idle_wait_us or 0) / 1e6, REST_SECONDS)) and patient:
                break
            tick()
        self._put_down()
        if self._outbox.epochs:
            log.warning("epochs not sent yet", extra={"epochs": self._outbox.epochs, "problem": self.problem})

    # One step.

    def _advance(self) -> bool:
        if self._acknowledged:
            self._mark(self._acknowledged)
        if self._generation is None:
            self._take_lease()
        elif not self._met:
            self._meet(self._generation)
        elif self._parcel is None:
            if not self._outbox.epochs:
                self._worked()
                return False
            self._parcel = self._next_parcel()
        elif self._parcel.unsent:
            self._send_blob(self._parcel)
        else:
            self._commit(self._parcel, self._generation)
        return True

    def _take_lease(self) -> None:
        request = LeaseRequest(holder=self._owner.holder, local=self._owner.incarnation, take_over=self._take_over)
        lease = self._hub.lease(self._store.pipeline, self._store.node, request)
        self._generation = lease.generation
        log.info("lease taken", extra={"generation": lease.generation.hub, "head": lease.head})

    def _meet(self, generation: Generation) -> None:
        """Look where the hub stands, and let go what it has."""
        head = self._hub.head(self._store.pipeline, self._store.node)
        if head.generation is not None and head.generation > generation:
            # Before anything is compared: what a successor has sent differs, and is not for this process to judge.
            self._put_down()
            raise FencedError(
                f"The hub has given generation {head.generation.hub}.{head.generation.local} out since. {self._fenced()}"
            )
        known = self._outbox.digest(head.epoch)
        standing = judge.Standing(
            head=head.epoch,
            sent=self._outbox.sent,
            newest=self._outbox.newest,
            same=None if known is None else known == head.digest,
            unsent_before=self._outbox.unsent_before,
        )
        match judge.meet(standing):
            case judge.GoOn(done=done):
                self._met = True
                if self._parcel is not None and done >= self._parcel.epochs[0].epoch:
                    self._put_down()
                self._mark(done)
            case judge.FillUp(first=first, last=last):
                last = min(last, first + self._epochs_max - 1)
                epochs = tuple(EpochEntry(epoch=e, streams={}, created_us=0) for e in range(first, last + 1))
                self._hub.commit(self._store.pipeline, self._store.node, Commit(generation=generation, epochs=epochs))
            case judge.OtherContent(epoch=epoch):
                raise HubError(self._disagree(f"epoch {epoch} has other content there than here"))
            case judge.OlderHere(head=there, newest=newest):
                raise HubError(self._disagree(
                    f"the hub has epoch {there}, and the newest that was sealed here is {newest}: this state directory is older, as "
                    "after a restored backup"
                ))  # fmt: skip
            case judge.OlderThere(head=there, sent=sent):
                raise HubError(
                    f"the hub has pipeline {self._store.pipeline} of node {self._store.node} only up to epoch {there}, but it had "
                    f"acknowledged {sent}, and what lies between is gone here: the hub's data is older than this state directory, or "
                    "this is another hub. Bring the hub's data back, or send to the right hub; or give this node another name, and "
                    "so begin anew there."
                )
            case other:
                assert_never(other)

    def _disagree(self, what: str) -> str:
        return (
            f"this state directory and the hub disagree about pipeline {self._store.pipeline} on node {self._store.node}: {what}. "
            "Nothing more is sent, and everything is kept. --take-over does not help with this directory. To go on from where the "
            "hub is, start with an empty state directory and --take-over: the node then takes up the hub's checkpoint. To keep "
            "what is here apart, give the node another name."
        )

    def _next_parcel(self) -> Parcel:
        count = judge.range_length(self._outbox.weights(), epochs_max=self._epochs_max)
        parcel = Parcel(self._store, self._outbox.oldest(count), with_checkpoint=self._hub_state)
        parcel.send(digest for digest in parcel.blobs() if digest not in self._at_hub)
        return parcel

    def _send_blob(self, parcel: Parcel) -> None:
        if not parcel.asked and len(parcel.unsent) > ASK_ABOVE_BLOBS:
            parcel.send(self._hub.missing(parcel.unsent))
            parcel.asked = True
            return
        digest = parcel.unsent[0]
        data = parcel.read(digest)
        if data is None:
            return
        self._hub.put_blob(digest, data)
        self._failpoints.hit("outbox.blob-sent")
        parcel.unsent.popleft()
        self.sent_bytes += len(data)
        self._failures = 0

    def _commit(self, parcel: Parcel, generation: Generation) -> None:
        commit = Commit(generation=generation, epochs=parcel.epochs, checkpoint=parcel.checkpoint)
        # Until the answer is here, nobody knows: whatever happens, look before anything else is sent.
        self._met = False
        self._failpoints.hit("outbox.before-commit")
        answer = self._hub.commit(self._store.pipeline, self._store.node, commit)
        self._failpoints.hit("outbox.committed")
        if answer.head < parcel.last:
            raise HubAwayError(f"the hub took epoch {parcel.last} and says that its newest is {answer.head}.")
        self._met = True
        self._epochs_max = EPOCHS_A_COMMIT_MAX
        if parcel.checkpoint is not None:
            self._at_hub = {run.digest for run in parcel.checkpoint.state}
        self._put_down()
        self._worked()
        self._mark(parcel.last)

    def _mark(self, epoch: int) -> None:
        self._acknowledged = epoch
        self._outbox.mark(epoch)
        self._acknowledged = 0

    def _put_down(self) -> None:
        parcel, self._parcel = self._parcel, None
        if parcel is not None:
            parcel.close()

    def _worked(self) -> None:
        self._failures = self._refusals = 0
        self.problem = self._refusal = None

    # When it does not work.

    def _refused(self, error: HubRefusedError) -> None:
        self._refusal = error
        self._refusals += 1
        refusal = error.refusal if isinstance(error.refusal, Refusal) else None
        match judge.meaning_of(error.code):
            case judge.Fenced():
                self._put_down()
                raise FencedError(f"{error} {self._fenced()}") from error
            case judge.Held():
                raise HubRefusedError(
                    f"{error} If it is gone for good, or was this machine with another state directory, start with --take-over.",
                    status=error.status,
                    code=error.code,
                    refusal=error.refusal,
                ) from error
            case judge.LeaseAgain():
                self._generation, self._met = None, False
            case judge.MeetAgain():
                self._met = False
                self._put_down()
            case judge.SendBlobs():
                self._met = True
                self._at_hub = set()
                if self._parcel is not None and refusal is not None and self._refusals == 1:
                    self._parcel.send(refusal.missing)
                    if self._parcel.unsent:
                        return
                self._put_down()
            case judge.TryLater():
                if error.code == "too_large" and self._parcel is not None:
                    if self._parcel.sends_state():
                        log.warning("checkpoint not sent", extra={"epoch": self._parcel.last, "problem": str(error)})
                        self._parcel.leave_state()
                        return
                    self._epochs_max = max(1, len(self._parcel.epochs) // 2)
                    self._put_down()
            case other:
                assert_never(other)
        self._later(error)

    def _fenced(self) -> str:
        if self._generation is None:
            return (
                "So this state directory is an old copy, or another process runs from a copy of it. To go on from where the hub is, start "
                "with an empty state directory and --take-over."
            )
        return (
            f"Pipeline {self._store.pipeline} on node {self._store.node} was taken over by somebody else. This process stops; what it had "
            "sealed and not sent stays in its state directory."
        )

    def _later(self, error: Exception, retry_after_us: int | None = None) -> None:
        self._failures += 1
        waits_us = judge.wait_us(self._failures, retry_after_us=retry_after_us, choose=self._choose)
        self._retry_at_us = self._clock.monotonic_us() + waits_us
        if str(error) != self.problem:
            log.warning("hub not reached", extra={"problem": str(error), "waits_us": waits_us})
        self.problem = str(error)
