"""Send the outbox to the hub. The sender is stepped on a thread of its own, so a slow network holds up nothing else.

Each step makes at most one call. First the sender looks at the hub's head and takes the lease, which names that head; then it compares
its epochs with the hub's; then, for each range of epochs, it sends the blobs that the hub lacks, commits, and marks the epochs as sent
in the outbox.
`protocol.delivery` decides what to send and what a rejection means. After a commit without a response, the sender
compares again; it never guesses.

Invariants: nothing is committed before all its blobs are at the hub; nothing leaves the outbox that the hub has not
acknowledged; a failure of the network or the hub never ends the pipeline, but a newer generation, another holder,
disagreement about what was sealed, and a hub that has forgotten the node do.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Final, assert_never

from fordstone.edge.link.outbox import Outbox, empty_entry
from fordstone.edge.link.owner import Owner
from fordstone.epochs.manifest import encode_manifest
from fordstone.epochs.run_file import digest_of, run_problem, short
from fordstone.epochs.store import CheckpointStore
from fordstone.epochs.untrusted import MANIFEST_BYTES_MAX
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
    EPOCHS_PER_COMMIT_MAX,
    RUNBOOK,
    RUNS_PER_COMMIT_MAX,
    Checkpoint,
    Commit,
    EpochEntry,
    Generation,
    Head,
    LeaseRequest,
    Refusal,
)
from fordstone.protocol.chain import CHAIN_START, chained
from fordstone.protocol.delivery import (
    SEND_BACKOFF,
    ContentDiffers,
    HubIsOlder,
    InSync,
    NodeIsOlder,
    OfferAgain,
    Reaction,
    Reconciliation,
    SendEmpty,
    SyncState,
    range_length,
    reaction_to,
    reconcile,
)
from fordstone.protocol.lease import Position
from fordstone.protocol.restored import is_former
from fordstone.runtime.clock import Clock
from fordstone.state.base import RunRef
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.failpoint import Failpoints, NoFailpoints

if TYPE_CHECKING:  # a node without a hub loads no HTTP client
    from fordstone.hub.client.client import HubClient

log = logging.getLogger(__name__)

STATE_RUNS_MAX: Final = RUNS_PER_COMMIT_MAX // 2
"""Maximum number of runs of state in a commit, which also names the runs of rows."""


class CommitBatch:
    """The epochs of one commit, the checkpoint that is sent with them, and the blobs to send before it.

    Only the sender's thread uses it. It pins the checkpoint until it is closed.
    """

    def __init__(self, store: CheckpointStore, epochs: tuple[EpochEntry, ...], *, with_checkpoint: bool) -> None:
        self.epochs = epochs
        self.checkpoint: Checkpoint | None = None
        self.unsent: deque[str] = deque()
        self.missing_known = False
        """The hub has said which of the blobs it lacks, so it is not asked again."""
        self._store = store
        self._manifest = b""
        self._pinned: int | None = None
        runs = [run for entry in epochs for segment in entry.streams.values() for run in segment.runs]
        self._segments = {run.digest: run for run in runs}
        if with_checkpoint:
            self._add_checkpoint()

    @property
    def last(self) -> int:
        return self.epochs[-1].epoch

    def blobs(self) -> dict[str, RunRef]:
        """Return all blobs that the commit names, those of rows first."""
        checkpoint = self.checkpoint
        state = () if checkpoint is None else (*checkpoint.state, checkpoint.manifest)
        return self._segments | {run.digest: run for run in state}

    def send(self, digests: Iterable[str]) -> None:
        """Send these blobs, as far as they belong to the batch."""
        wanted = set(digests)
        self.unsent = deque(digest for digest in self.blobs() if digest in wanted)

    def read(self, digest: str) -> bytes | None:
        """Return the checked bytes of a blob; None if it is no longer needed. `DamagedError` if it holds rows and is damaged."""
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
                f"run {short(digest)}, which waits for the hub, is damaged: it {problem}. Its epoch and all later ones stay in the "
                "outbox. Restore the file from a copy of the state directory."
            )
        log.warning("checkpoint not sent", extra={"epoch": self.last, "run": short(digest), "problem": problem})
        self.drop_state()
        return None

    def drop_state(self) -> None:
        """Send only the rows: they do not wait for state that cannot be read or sent. A later checkpoint brings it."""
        self.checkpoint = None
        self.send(self.unsent)

    def is_sending_state(self) -> bool:
        """Whether the next request would be smaller without the checkpoint: it is one of its blobs, or a commit of one epoch."""
        if self.checkpoint is None:
            return False
        return self.unsent[0] not in self._segments if self.unsent else len(self.epochs) == 1

    def close(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._store.unpin(pinned)

    def _add_checkpoint(self) -> None:
        """Add the checkpoint of the last epoch, if it is still kept. Earlier ones are not needed."""
        try:
            self._store.pin(self.last)
            self._pinned = self.last
            manifest = self._store.manifest(self.last)
        except CheckpointError:
            return
        data = encode_manifest(manifest)
        state = tuple(dict.fromkeys(manifest.runs()))
        largest = max((run.size_bytes for run in state), default=0)
        if len(data) > MANIFEST_BYTES_MAX or largest > BLOB_BYTES_MAX or len(state) > STATE_RUNS_MAX:
            log.warning(
                "checkpoint too large for the hub",
                extra={"epoch": self.last, "runs": len(state), "largest_bytes": largest},
            )
            return
        self._manifest = data
        ref = RunRef(digest_of(data), len(data), 0)
        self.checkpoint = Checkpoint(epoch=self.last, manifest=ref, state=state)


LOOK_EVERY_US: Final = 1_000_000
"""New entries wake the sender. This interval covers a wake-up that was missed."""
ASK_ABOVE_BLOBS: Final = 8
"""With more blobs than this, the sender first asks the hub which of them it lacks."""
STOP_SECONDS: Final = 5.0
"""Maximum time to go on sending after a stop was requested."""
POLL_SECONDS: Final = 0.05
REJECTIONS_MAX: Final = 3
"""Maximum number of rejections in a row at the end of a bounded run; then the last one is raised."""


class Patience(Enum):
    """How long the sender goes on after the pipeline has ended."""

    UNTIL_SENT = "until_sent"
    """Until the hub has everything: no later run would send it."""
    WHILE_IT_ANSWERS = "while_it_answers"
    """Until the hub has everything or does not respond: the next run sends the rest."""
    BRIEF = "brief"
    """For at most `STOP_SECONDS`, and not at all if the hub does not respond."""


class Sender:
    """Stepped by one thread. Any thread may read `problem` and the counts."""

    def __init__(
        self,
        *,
        hub: HubClient,
        outbox: Outbox,
        store: CheckpointStore,
        owner: Owner,
        granted: Callable[[int], None] = lambda hub: None,  # noqa: ARG005 - see below
        clock: Clock,
        chance: Callable[[], float],
        take_over: bool = False,
        hub_state: bool = True,
        failpoints: Failpoints | None = None,
    ) -> None:
        """`granted(hub)` keeps the generation of a lease, durably. `chance()` returns a random number from 0 to 1, for the jitter of waits."""
        self.wake: Callable[[], None] = lambda: None
        self.problem: str | None = None
        """Why the last attempt to send failed."""
        self.sent_bytes = 0
        self._hub, self._outbox, self._store, self._clock = hub, outbox, store, clock
        self._owner, self._granted, self._chance = owner, granted, chance
        self._last_granted = owner.granted
        self._take_over, self._hub_state = take_over, hub_state
        self._failpoints = failpoints or NoFailpoints()
        self._generation: Generation | None = None
        self._head: Head | None = None
        """The hub's newest epoch, as it was when the sender looked last; None: look again."""
        self._log_id = ""
        self._in_sync = False
        self._compared = False
        """The hub was found to have what it acknowledged, or was offered it again, since this start."""
        self._batch: CommitBatch | None = None
        self._acknowledged: Position | None = None
        """What the hub has, as long as the mark of it is not durable."""
        self._at_hub: set[str] = set()
        """Blobs of the newest checkpoint at the hub, which are not sent again."""
        self._epochs_max = EPOCHS_PER_COMMIT_MAX
        self._failures = 0
        self._rejections = 0
        self._rejection: HubRefusedError | CheckpointError | None = None
        self._retry_at_us: int | None = None
        # The scheduler sets `wake` later, so it is looked up at each call.
        outbox.wake = lambda: self.wake()  # noqa: PLW0108 - see above

    @property
    def idle_wait_us(self) -> int | None:
        """The time until the next attempt, or until the next look for new entries."""
        if self._retry_at_us is None:
            return LOOK_EVERY_US
        return max(self._retry_at_us - self._clock.monotonic_us(), 1_000)

    @property
    def failing(self) -> bool:
        return self._failures > 0

    @property
    def unfinished(self) -> bool:
        """Whether the hub may lack something: epochs wait, or it has acknowledged all, and may have been restored from a backup since."""
        waits = self._outbox.epochs > 0 or self._acknowledged is not None
        return waits or (not self._compared and self._outbox.log_id != "")

    def step(self) -> bool:
        """Make at most one call. Return whether there may be more to do now."""
        if self._retry_at_us is not None and self._clock.monotonic_us() < self._retry_at_us:
            return False
        self._retry_at_us = None
        try:
            did = self._advance()
        except HubAwayError as error:
            self._retry_later(error, None if error.retry_after_s is None else int(error.retry_after_s * 1e6))
        except HubRefusedError as error:
            self._rejected(error)
        except FatalStorageError:
            raise
        except (StorageError, CheckpointError) as error:
            # The disk is full, or a run that waits is damaged. Everything is kept, and `problem` says why.
            self._drop_batch()
            if isinstance(error, CheckpointError):
                self._rejection, self._rejections = error, self._rejections + 1
            self._retry_later(error)
        else:
            return did
        return False

    def take_lease(self) -> None:
        """Take the lease now. Called before the first `step`, if sinks should not be opened without it. `HubAwayError` if it has to be tried again."""
        try:
            self._take_lease(self._look())
        except HubRefusedError as error:
            self._rejected(error)
            raise HubAwayError(str(error)) from error

    def finish(
        self, patience: Patience, *, wait: Callable[[float], bool], tick: Callable[[], None] = lambda: None
    ) -> None:
        """Send what is left. Called instead of `step` when the pipeline has ended.

        `wait(seconds)` pauses and returns whether to stop, which only the brief one does not heed. `tick` is called after each step.
        """
        brief = patience is Patience.BRIEF
        until_us = self._clock.monotonic_us() + int(STOP_SECONDS * 1e6)
        while self._outbox.epochs or self._acknowledged is not None or (self.unfinished and not brief):
            # What was acknowledged is compared only with a hub that answers.
            if self.failing and (patience is not Patience.UNTIL_SENT or not self._outbox.epochs):
                break
            if brief and self._clock.monotonic_us() >= until_us:
                break
            if self._rejections >= REJECTIONS_MAX and self._rejection is not None and not brief:
                raise self._rejection
            did = self.step()
            if wait(0.0 if did else min((self.idle_wait_us or 0) / 1e6, POLL_SECONDS)) and not brief:
                break
            tick()
        self._drop_batch()
        if self._outbox.epochs:
            log.warning("epochs not sent yet", extra={"epochs": self._outbox.epochs, "problem": self.problem})

    def _advance(self) -> bool:
        if self._acknowledged is not None:
            self._mark(self._acknowledged)
        if self._generation is None and self._head is None:
            self._head = self._look()
        elif self._generation is None and self._head is not None:
            self._take_lease(self._head)
        elif self._generation is None:
            raise AssertionError("without a lease, the sender looks or requests one")
        elif not self._in_sync:
            self._reconcile(self._generation)
        elif self._batch is None:
            if not self._outbox.epochs:
                self._succeeded()
                return False
            self._batch = self._next_batch()
        elif self._batch.unsent:
            self._send_blob(self._batch)
        else:
            self._commit(self._batch, self._generation)
        return True

    def _look(self) -> Head:
        head = self._hub.head(self._store.pipeline, self._store.node)
        self._log_id = head.log_id
        return head

    def _compare(self, head: Head) -> Reconciliation:
        """Compare the epochs here with what the hub has according to `head`."""
        known = self._outbox.chain_at(head.epoch) if head.epoch <= self._outbox.newest else None
        # Generations grow with every restore that was marked: an older one is that of a log that was set back and not marked.
        set_back = head.generation is not None and head.generation.hub < self._last_granted
        restored = is_former(self._outbox.log_id, head.log_id) and not set_back
        return reconcile(
            SyncState(
                head=head.epoch,
                sent=self._outbox.sent,
                newest=self._outbox.newest,
                same=None if known is None else known == head.chain,
                restored=restored or (self._take_over and head.resync),
                unsent_before=self._outbox.unsent_before,
            )
        )

    def _take_lease(self, head: Head) -> None:
        """Request the lease as the owner of the hub's newest epoch, which a copy of this directory from before does not have."""
        self._head = None
        found = self._compare(head)
        if self._take_over:
            # Checked before the former holder is fenced: if this directory cannot go on from there, the other one should.
            self._check(found)
        epoch = self._outbox.sent if isinstance(found, OfferAgain) else head.epoch
        chain = self._outbox.chain_at(epoch) if epoch <= self._outbox.newest else None
        if chain is None and epoch <= self._outbox.unsent_before:
            chain = self._outbox.chain_of_empty(epoch)
        request = LeaseRequest(
            holder=self._owner.holder,
            local=self._owner.incarnation,
            start=self._owner.start,
            head=0 if chain is None else epoch,
            chain=chain or CHAIN_START,
            log_id=self._outbox.log_id,
            granted=self._last_granted,
            take_over=self._take_over,
        )
        try:
            lease = self._hub.lease(self._store.pipeline, self._store.node, request)
        except HubRefusedError as error:
            if error.code == "not_head":
                self._check(found)
                if chain is None:
                    raise HubError(
                        f"{error}\nThis state directory no longer knows what it has sent: {self._store.log.path} was lost. If no other "
                        "copy of the directory is in use, start once with --take-over."
                    ) from error
            raise
        self._granted(lease.generation.hub)
        self._last_granted = lease.generation.hub
        self._generation, self._log_id = lease.generation, lease.log_id
        log.info("lease taken", extra={"generation": lease.generation.hub, "head": lease.head})

    def _reconcile(self, generation: Generation) -> None:
        head = self._look()
        if head.generation is not None and head.generation > generation:
            # Checked first: a successor's epochs may differ from ours, and that is no disagreement.
            self._drop_batch()
            raise FencedError(
                f"The hub has since granted generation {head.generation.hub}.{head.generation.local}. {self._fenced_advice()}"
            )
        found = self._compare(head)
        self._check(found)
        match found:
            case InSync(done=done):
                self._in_sync = self._compared = True
                if self._batch is not None and done >= self._batch.epochs[0].epoch:
                    self._drop_batch()
                self._mark(Position(done, head.chain))
            case SendEmpty(first=first, last=last):
                last = min(last, first + self._epochs_max - 1)
                epochs = tuple(empty_entry(epoch) for epoch in range(first, last + 1))
                commit = Commit(generation=generation, epochs=epochs, after=head.chain)
                self._hub.commit(self._store.pipeline, self._store.node, commit)
            case OfferAgain(head=there):
                self._drop_batch()
                first = self._outbox.offer_again(there)
                lost = f"{there + 1}-{first - 1}" if first > there + 1 else "none"
                log.warning("hub restored from a backup", extra={"head": there, "sent_again_from": first, "lost": lost})
                self._in_sync = self._compared = True

    def _check(self, found: Reconciliation) -> None:
        """Raise if this directory cannot go on from where the hub is."""
        match found:
            case InSync() | SendEmpty() | OfferAgain():
                return
            case ContentDiffers(epoch=epoch):
                raise HubError(self._disagreement(f"the epochs up to {epoch} have other content there than here"))
            case NodeIsOlder(head=there, newest=newest):
                raise HubError(self._disagreement(
                    f"the hub has epoch {there}, and the newest that was sealed here is {newest}: this state directory is older, as "
                    "after a restored backup, or is a copy of one that is in use"
                ))  # fmt: skip
            case HubIsOlder(head=there, sent=sent):
                raise HubError(
                    f"the hub has pipeline {self._store.pipeline} of node {self._store.node} only up to epoch {there}, but a hub had "
                    f"acknowledged {sent}. Nothing is sent, and everything is kept.\nIf the hub's data was restored from a backup, stop the "
                    f"hub, run `fordstone hub restore --data DIR` there, and start it again ({RUNBOOK}): "
                    "the node then sends again what it still has. If this is another hub, send to the right one; or give this "
                    "node another name, to start from the beginning there."
                )
            case other:
                assert_never(other)

    def _disagreement(self, what: str) -> str:
        return (
            f"this state directory and the hub disagree about pipeline {self._store.pipeline} on node {self._store.node}: {what}. "
            "Nothing more is sent, and everything is kept. --take-over does not help with this directory. To go on from where the "
            "hub is, start with an empty state directory and --take-over: the node then resumes from the hub's checkpoint. To keep "
            "what is here apart, give the node another name."
        )

    def _next_batch(self) -> CommitBatch:
        count = range_length(self._outbox.weights(), epochs_max=self._epochs_max)
        batch = CommitBatch(self._store, self._outbox.oldest(count), with_checkpoint=self._hub_state)
        batch.send(digest for digest in batch.blobs() if digest not in self._at_hub)
        return batch

    def _send_blob(self, batch: CommitBatch) -> None:
        if not batch.missing_known and len(batch.unsent) > ASK_ABOVE_BLOBS:
            batch.send(self._hub.missing(batch.unsent))
            batch.missing_known = True
            return
        digest = batch.unsent[0]
        data = batch.read(digest)
        if data is None:
            return
        self._hub.put_blob(digest, data)
        self._failpoints.hit("outbox.blob-sent")
        batch.unsent.popleft()
        self.sent_bytes += len(data)
        self._failures = 0

    def _commit(self, batch: CommitBatch, generation: Generation) -> None:
        after = self._outbox.chain_at(self._outbox.sent)
        commit = Commit(generation=generation, epochs=batch.epochs, checkpoint=batch.checkpoint, after=after)
        # Until the response is here, the outcome is unknown: whatever happens, compare before anything else is sent.
        self._in_sync = False
        self._failpoints.hit("outbox.before-commit")
        response = self._hub.commit(self._store.pipeline, self._store.node, commit)
        self._failpoints.hit("outbox.committed")
        if response.head < batch.last:
            raise HubAwayError(f"the hub accepted epoch {batch.last}, but says that its newest is {response.head}.")
        if response.head > batch.last:
            # Another process commits under the same generation.
            self._drop_batch()
            return
        self._in_sync = True
        self._epochs_max = EPOCHS_PER_COMMIT_MAX
        if batch.checkpoint is not None:
            self._at_hub = {run.digest for run in batch.checkpoint.state}
        self._drop_batch()
        self._succeeded()
        chain = response.chain
        if after is not None:
            chain = functools.reduce(chained, (entry.digest() for entry in batch.epochs), after)
        self._mark(Position(batch.last, chain))

    def _mark(self, done: Position) -> None:
        self._acknowledged = done
        self._outbox.mark(done.epoch, chain=done.chain, log_id=self._log_id)
        self._acknowledged = None

    def _drop_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()

    def _succeeded(self) -> None:
        self._failures = self._rejections = 0
        self.problem = self._rejection = None

    def _rejected(self, error: HubRefusedError) -> None:
        self._rejection = error
        self._rejections += 1
        refusal = error.refusal if isinstance(error.refusal, Refusal) else None
        match reaction_to(error.code):
            case Reaction.STOP_FENCED:
                self._drop_batch()
                raise FencedError(f"{error} {self._fenced_advice()}") from error
            case Reaction.STOP_HELD:
                raise _with_advice(
                    error,
                    "If that holder no longer exists, or was this machine with another state directory, start with --take-over.",
                ) from error
            case Reaction.STOP_FORGOTTEN:
                self._drop_batch()
                raise _with_advice(
                    error,
                    f"Nothing more is sent. What was sealed here and not sent ({self._outbox.epochs} epochs) stays in the state directory.",
                ) from error
            case Reaction.RENEW_LEASE:
                self._generation, self._head, self._in_sync = None, None, False
            case Reaction.RECONCILE:
                self._in_sync = False
                self._drop_batch()
            case Reaction.SEND_BLOBS:
                self._in_sync = True
                self._at_hub = set()
                if self._batch is not None and refusal is not None and self._rejections == 1:
                    self._batch.send(refusal.missing)
                    if self._batch.unsent:
                        return
                self._drop_batch()
            case Reaction.RETRY:
                if error.code == "too_large" and self._batch is not None:
                    if self._batch.is_sending_state():
                        log.warning("checkpoint not sent", extra={"epoch": self._batch.last, "problem": str(error)})
                        self._batch.drop_state()
                        return
                    self._epochs_max = max(1, len(self._batch.epochs) // 2)
                    self._drop_batch()
            case other:
                assert_never(other)
        self._retry_later(error)

    def _fenced_advice(self) -> str:
        if self._generation is None:
            return (
                "This state directory is an old copy, or another process runs from a copy of it. To go on from where the hub is, start "
                "with an empty state directory and --take-over."
            )
        return (
            f"Pipeline {self._store.pipeline} on node {self._store.node} was taken over by another process. This one stops; what it had "
            "sealed and not sent stays in its state directory."
        )

    def _retry_later(self, error: Exception, retry_after_us: int | None = None) -> None:
        self._failures += 1
        wait_us = SEND_BACKOFF.wait_us(self._failures, chance=self._chance(), retry_after_us=retry_after_us)
        self._retry_at_us = self._clock.monotonic_us() + wait_us
        if str(error) != self.problem:
            event = "hub not reached" if isinstance(error, HubAwayError) else "epochs not sent"
            log.warning(event, extra={"problem": str(error), "wait_us": wait_us})
        self.problem = str(error)


def _with_advice(error: HubRefusedError, advice: str) -> HubRefusedError:
    return HubRefusedError(f"{error} {advice}", status=error.status, code=error.code, refusal=error.refusal)
