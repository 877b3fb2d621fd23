"""What a run does beside the engine: send its epochs to the hub, and copy its checkpoints to a URL. Either may be absent.

`HubLink` wires the outbox, the sender and the hub's checkpoints together; `CheckpointCopier` steps an `Uploader`; `Links`
holds both for `edge.run`. Each is stepped on a thread of its own, so a slow network holds up nothing else.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from fordstone.connectors.base import SinkDelayedError
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Environment, Steppable
from fordstone.edge.engine.recovery import RemoteCheckpoints
from fordstone.edge.engine.writer import Writer
from fordstone.edge.link.outbox import Outbox
from fordstone.edge.link.owner import Ownership
from fordstone.edge.link.scrub import Copy, RunScrub
from fordstone.edge.link.sender import Patience, Sender
from fordstone.epochs.copies import Uploader, fetch_checkpoint, fetch_cuts, fetch_run, survey_remote
from fordstone.epochs.store import CheckpointStore, Survey
from fordstone.epochs.untrusted import decode_untrusted, decode_untrusted_manifest
from fordstone.errors import CheckpointError, ConfigError, DamagedError, HubAwayError, HubError, StorageError
from fordstone.hub.messages import Checkpoint, LeaseRequest
from fordstone.plan import plan as p
from fordstone.protocol.progress import Progress
from fordstone.protocol.recovery import CheckpointFact
from fordstone.runtime.clock import Clock

if TYPE_CHECKING:  # a node without a hub loads no HTTP client
    from fordstone.hub.client.client import HubClient

log = logging.getLogger(__name__)

HUB_TIMEOUT_SECONDS: Final = 15.0
"""Timeout of one call: a stop may have to wait this long for a hub that hangs."""
COPY_EVERY_US: Final = 100_000
FINISH_UNITS_MAX: Final = 100_000
"""Maximum number of files that are still copied after the pipeline has ended."""
_CHANCE_STEPS: Final = 1 << 20
_NOTHING = Survey(checkpoints=(), cuts=frozenset())


def hub_checkpoints(
    hub: HubClient, store: CheckpointStore, ownership: Ownership, *, take_over: bool
) -> RemoteCheckpoints:
    """Return the hub's checkpoints, for a machine whose state directory is missing or damaged.

    The hub has the newest checkpoint that a node sent with a commit, and the cuts of no other epoch: a node resumes exactly
    where its rows end, or not at all. A whole state directory never waits for the hub. The hub is asked only if a checkpoint here
    is damaged, or if there is none and `take_over` is set. In that case the former holder is fenced first, so that it adds no epochs.
    In the other case nobody is fenced, so a checkpoint counts only if it is of an epoch that was sealed here: it may be a successor's.
    """

    def survey() -> Survey:
        here = store.survey().checkpoints
        damaged = any(fact.problem is not None for fact in here)
        if not damaged and (here or not take_over):
            return _NOTHING
        try:
            if not here:
                # Checked before the former holder is fenced: if it cannot be taken over from, it should go on.
                _check_head(
                    store, hub.head(store.pipeline, store.node).epoch, hub.checkpoint(store.pipeline, store.node)
                )
            head = _fence_others(hub, store, ownership) if not here else 0
            found = hub.checkpoint(store.pipeline, store.node)
            if here and found is not None and not _is_ours(hub, store, found):
                log.warning("checkpoint at the hub is not of this directory", extra={"epoch": found.epoch})
                found = None
        except (HubError, DamagedError) as error:
            # It does not respond, rejects the request, or its copy is damaged: local checkpoints may be enough.
            raise StorageError(f"{error} Without the hub, its checkpoint cannot be taken over.") from error
        if not here:
            _check_head(store, head, found)
        if found is None:
            return _NOTHING
        return Survey(checkpoints=(CheckpointFact(epoch=found.epoch, where="remote"),), cuts=frozenset({found.epoch}))

    def fetch(epoch: int) -> None:
        found = hub.checkpoint(store.pipeline, store.node)
        if found is None or found.epoch != epoch:
            raise CheckpointError(
                f"the hub had a checkpoint of epoch {epoch} of pipeline {store.pipeline} on node {store.node}, and now it has "
                f"{'none' if found is None else f'that of epoch {found.epoch}'}: another process commits there. Start again."
            )
        data = hub.read_blob(found.manifest)
        manifest = decode_untrusted_manifest(data, pipeline=store.pipeline, node=store.node, epoch=epoch)
        if store.cuts((epoch,)).get(epoch, manifest.cut) != manifest.cut:
            raise CheckpointError(
                f"the hub has another epoch {epoch} of pipeline {store.pipeline} on node {store.node} than was sealed here: another "
                "process commits there."
            )
        for run in dict.fromkeys(manifest.runs()):
            if store.run_fault(run, deep=True) is not None:
                stored = hub.read_blob(run)
                decode_untrusted(stored, run)  # only to see that it can be done: the store does not check what it reads
                store.put_run(run, stored)
        store.commit(manifest, sealed_before=True)

    return RemoteCheckpoints(survey=survey, fetch=fetch, fetch_cuts=lambda: None)


def _is_ours(hub: HubClient, store: CheckpointStore, found: Checkpoint) -> bool:
    """Whether a checkpoint at the hub is that of an epoch as it was sealed here."""
    own = store.cuts((found.epoch,)).get(found.epoch)
    if own is None:
        return False
    data = hub.read_blob(found.manifest)
    return decode_untrusted_manifest(data, pipeline=store.pipeline, node=store.node, epoch=found.epoch).cut == own


def _fence_others(hub: HubClient, store: CheckpointStore, ownership: Ownership) -> int:
    """Take the lease over. Return the newest epoch that the hub has, to which no other process can add any more."""
    owner = ownership.owner
    request = LeaseRequest(holder=owner.holder, local=owner.incarnation, start=owner.start, take_over=True)
    lease = hub.lease(store.pipeline, store.node, request)
    ownership.grant(lease.generation.hub)
    return lease.head


def _check_head(store: CheckpointStore, head: int, found: Checkpoint | None) -> None:
    if not head:
        return
    if found is None:
        raise CheckpointError(
            f"the hub has pipeline {store.pipeline} of node {store.node} up to epoch {head}, but no checkpoint of it: that node sends "
            "none (--no-hub-state). Restore its state directory, or start from the beginning under another node's name."
        )
    # It may be newer: the former holder, not fenced yet, may have committed between the two calls.
    if found.epoch < head:
        raise CheckpointError(
            f"the hub has pipeline {store.pipeline} of node {store.node} up to epoch {head}, but its newest checkpoint is of epoch "
            f"{found.epoch}: that node was lost while it caught up, and the epochs between cannot be recomputed exactly. Restore "
            "its state directory, or start from the beginning under another node's name."
        )


class HubLink:
    """Made once per start, after the state directory is locked. It does not call the hub: a node starts without it, too."""

    def __init__(
        self,
        hub: HubClient,
        plan: p.Plan,
        config: RunConfig,
        environment: Environment,
        store: CheckpointStore,
        ownership: Ownership,
    ) -> None:
        drops = config.outbox_full == "drop_oldest"
        if drops and plan.guarantee != "at_most_once":
            raise ConfigError(
                f"pipeline {plan.pipeline} promises {plan.guarantee}, so its outbox may drop nothing. Leave outbox_full at 'block', or "
                "declare the pipeline with guarantee='at_most_once'."
            )
        choose = environment.choose
        self._ownership = ownership
        self.outbox = Outbox(store, bytes_max=config.outbox_bytes_max, drops=drops)
        self.sender = Sender(
            hub=hub,
            outbox=self.outbox,
            store=store,
            owner=ownership.owner,
            granted=ownership.grant,
            clock=environment.clock,
            chance=random.random if choose is None else lambda: choose(_CHANCE_STEPS) / _CHANCE_STEPS,
            take_over=config.take_over,
            hub_state=config.hub_state,
            failpoints=environment.failpoints,
        )
        self.remote: RemoteCheckpoints | None = None
        if config.hub_state or config.take_over:
            self.remote = hub_checkpoints(hub, store, ownership, take_over=config.take_over)

    def take_lease(self, *, take_over: bool) -> None:
        """Take the lease before sinks are opened, so that they know the new generation.

        `SinkDelayedError` if a take-over has to wait for the hub. Others do not wait for one that is away, nor does a node that was
        granted a generation before.
        """
        try:
            self.sender.take_lease()
        except HubAwayError as error:
            if take_over and not self._ownership.owner.granted:
                raise SinkDelayedError(
                    f"{error} Until the hub has granted the take-over, nothing may be written."
                ) from error
            log.warning("hub not reached", extra={"problem": str(error)})

    def acknowledged(self) -> tuple[int, ...]:
        """Return the newest epoch that the hub has: its checkpoint is kept here until the hub has a newer one."""
        return (self.outbox.sent,)

    def add_progress(self, progress: Progress) -> Progress:
        return msgspec.structs.replace(
            progress,
            outbox_epochs=self.outbox.epochs,
            outbox_bytes=self.outbox.size_bytes,
            sent_epoch=self.outbox.sent,
            sent_bytes=self.sender.sent_bytes,
            hub_problem=self.sender.problem or progress.hub_problem,
        )


class CheckpointCopier:
    """Copies the newest checkpoint to a URL, one file per step."""

    def __init__(self, url: str, store: CheckpointStore, clock: Clock, *, keep: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._store = store
        self._uploader = Uploader(store, url, keep=keep, clock_us=clock.monotonic_us)
        self._logged: str | None = None
        self._at_start = store.epochs()

    @property
    def idle_wait_us(self) -> int | None:
        return COPY_EVERY_US

    def acknowledged(self) -> tuple[int, ...]:
        """Return the newest epoch that is complete at the remote: its checkpoint is kept here until a newer one is.

        Until this process has uploaded one, it is one of those that the process before it had kept.
        """
        uploaded = self._uploader.status.uploaded
        return self._at_start if uploaded is None else (uploaded,)

    def step(self) -> bool:
        epochs = self._store.epochs()
        if epochs:
            self._uploader.offer(epochs[-1])
        did = self._uploader.step()
        problem = self._uploader.status.last_error
        if problem is not None and problem != self._logged:
            log.warning("checkpoint not copied", extra={"problem": problem})
        self._logged = problem
        return did

    def finish(self) -> None:
        """Copy what is left, until a request fails."""
        for _ in range(FINISH_UNITS_MAX):
            if not self.step():
                return


class Links:
    """Made once per start. Neither the hub nor the URL is contacted before recovery needs it."""

    def __init__(self, plan: p.Plan, config: RunConfig, environment: Environment, store: CheckpointStore) -> None:
        self._config, self._clock, self._store = config, environment.clock, store
        self._keeps_state = environment.keeps_state
        self._copier: CheckpointCopier | None = None
        self._scrub: RunScrub | None = None
        self._client: HubClient | None = None
        self._hub: HubLink | None = None
        self.ownership = Ownership(environment.disk, f"{store.pipeline}/{store.node}")
        if config.hub is not None:
            from fordstone.hub.client.client import HubClient  # noqa: PLC0415 - without a hub, no HTTP client is loaded

            self._client = HubClient(config.hub, timeout_s=HUB_TIMEOUT_SECONDS)
            self._hub = HubLink(self._client, plan, config, environment, store, self.ownership)

    @property
    def outbox(self) -> Outbox | None:
        return None if self._hub is None else self._hub.outbox

    def take_lease(self) -> None:
        """Take the lease if this directory never had it, or takes it over. Called after recovery, before a sink is opened.

        A second machine of the same name is stopped here, before it claims the sinks of the first.
        """
        take_over = self._config.take_over
        if self._hub is not None and (take_over or not self.ownership.owner.granted):
            self._hub.take_lease(take_over=take_over)

    def remote(self) -> RemoteCheckpoints | None:
        """Return the checkpoints at the URL or at the hub, to recover from."""
        url, store = self._config.remote, self._store
        if url is not None and not (self._config.take_over and self._hub is not None):

            def fetch(epoch: int) -> None:
                fetch_checkpoint(url, store, epoch)

            return RemoteCheckpoints(
                survey=lambda: survey_remote(url, store), fetch=fetch, fetch_cuts=lambda: fetch_cuts(url, store)
            )
        return None if self._hub is None else self._hub.remote

    def begin(self, writer: Writer) -> list[Steppable]:
        """Return what is stepped beside the engine. Called after recovery."""
        found: list[Steppable] = []
        if self._hub is not None:
            writer.stages.retention.keep_for(self._hub.acknowledged)
            found.append(self._hub.sender)
        if self._config.remote is not None:
            self._copier = CheckpointCopier(self._config.remote, self._store, self._clock, keep=self._config.keep)
            writer.stages.retention.keep_for(self._copier.acknowledged)
            found.append(self._copier)
        if self._keeps_state and not (self._config.bounded or self._config.available_now):
            self._scrub = RunScrub(self._store, self._clock, copies=self._run_copies())
            found.append(self._scrub)
        return found

    def _run_copies(self) -> list[Copy]:
        """Where the bytes of a run that is damaged here may be had."""
        url, client, store = self._config.remote, self._client, self._store
        found: list[Copy] = []
        if url is not None:
            found.append(lambda run: fetch_run(url, store, run))
        if client is not None:
            found.append(client.read_blob)
        return found

    def stopping(self) -> None:
        """Let the last epoch be sealed even if the outbox is full. Called when a stop was requested."""
        if self._hub is not None:
            self._hub.outbox.overrun = True

    def finish(self, patience: Patience, *, wait: Callable[[float], bool], tick: Callable[[], None]) -> None:
        if self._copier is not None:
            self._copier.finish()
        if self._hub is not None:
            self._hub.sender.finish(patience, wait=wait, tick=tick)

    def add_progress(self, progress: Progress) -> Progress:
        if self._scrub is not None:
            progress = msgspec.structs.replace(progress, damaged_runs=self._scrub.damaged)
        return progress if self._hub is None else self._hub.add_progress(progress)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
