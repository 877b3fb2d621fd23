"""Gather what there is to resume from, carry out what `protocol.recovery` decides, and check it against the plan.

Sealed epochs after the newest whole checkpoint are only found here; `edge.engine.replay` computes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

import msgspec
import polars as pl

from fordstone.epochs.manifest import Cut, Manifest
from fordstone.epochs.store import CheckpointStore, Survey
from fordstone.errors import CheckpointError, PlanMismatchError, StorageError
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.protocol.recovery import CannotResume, Resume, StartEmpty, decide_recovery, match_plan
from fordstone.runtime.partition import has_event_time
from fordstone.storage.disk import FatalStorageError

log = logging.getLogger(__name__)


SealedRows = Mapping[str, list[pl.DataFrame] | None]
"""The rows that a sealed epoch released, by sink; None where they cannot be read any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where to begin."""

    manifest: Manifest | None = None
    """None: from nothing."""
    next_epoch: int = 1
    replay: tuple[Cut, ...] = ()
    """Sealed epochs after the manifest, to be replayed first, in order. After the replay: those that were."""
    sealed: Mapping[int, SealedRows] = field(default_factory=dict)
    """What they had released."""
    resumed_from: int | None = None
    """The epoch of the checkpoint that was whole, before any replay; None: there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoints:
    """Checkpoints elsewhere."""

    survey: Callable[[], Survey]
    fetch: Callable[[int], None]
    """Bring a checkpoint here, with all cuts."""
    fetch_cuts: Callable[[], None]
    """Bring only the cuts here: no checkpoint is whole, and everything is replayed."""


def resume_from(store: CheckpointStore, plan: p.Plan, *, remote: RemoteCheckpoints | None = None) -> Resumption:
    """Find the newest checkpoint that is whole, set damaged ones aside, and return where to begin."""
    # Local runs are read in full when they are loaded; a damaged one found then leads back here.
    _mend_cuts(store)
    survey = store.survey()
    elsewhere = _elsewhere(remote, survey)
    match decide_recovery(survey.checkpoints + elsewhere.checkpoints, survey.cuts | elsewhere.cuts):
        case StartEmpty():
            return Resumption()
        case CannotResume(reason=reason):
            raise CheckpointError(f"pipeline {plan.pipeline} cannot be resumed: {reason}")
        case Resume() as decision:
            return _resume(store, plan, decision, remote)
        case other:
            assert_never(other)


def _elsewhere(remote: RemoteCheckpoints | None, here: Survey) -> Survey:
    """Survey the copies. If they cannot be reached, the local checkpoints will do; but without any, do not start empty."""
    nothing = Survey(checkpoints=(), cuts=frozenset())
    if remote is None:
        return nothing
    try:
        return remote.survey()
    except StorageError as error:
        if not here.checkpoints:
            raise
        log.warning("remote copies not reached", extra={"problem": str(error)})
        return nothing


def _mend_cuts(store: CheckpointStore) -> None:
    """Log damage to the epoch log and repair it. Nothing is lost by it yet: it is needed only when a manifest is damaged too."""
    try:
        problem = store.mend_cuts()
    except FatalStorageError:
        raise
    except StorageError as error:
        problem = f"it could not be mended: {error}"
    if problem is not None:
        log.warning("epoch log damaged", extra={"problem": problem})


def _resume(store: CheckpointStore, plan: p.Plan, decision: Resume, remote: RemoteCheckpoints | None) -> Resumption:
    for fact in decision.damaged:
        if fact.epoch > decision.epoch:
            log.warning(
                "checkpoint damaged", extra={"epoch": fact.epoch, "problem": fact.problem, "using": decision.epoch}
            )
    if decision.where == "remote" and remote is not None:
        # Brings the cuts along.
        remote.fetch(decision.epoch)
    elif remote is not None and not (needed := set(decision.replay)) <= store.cuts(needed).keys():
        remote.fetch_cuts()
    replay = tuple(store.cut(epoch) for epoch in decision.replay) if plan.guarantee == "exactly_once" else ()
    # Read before anything is set aside or collected: this is what the epochs are compared with.
    sealed = {cut.epoch: _read_sealed(store, cut) for cut in replay}
    for fact in decision.damaged:
        if fact.where == "local" and fact.epoch > decision.epoch:
            store.set_aside(fact.epoch, fact.problem or "damaged")
    manifest = store.manifest(decision.epoch) if decision.epoch else None
    return Resumption(
        manifest=manifest,
        next_epoch=decision.next_epoch,
        replay=replay,
        sealed=sealed,
        resumed_from=decision.epoch or None,
    )


def _read_sealed(store: CheckpointStore, cut: Cut) -> SealedRows:
    found: dict[str, list[pl.DataFrame] | None] = {}
    for segment in cut.segments:
        try:
            found[segment.sink] = [store.read_run(run) for run in segment.runs]
        except CheckpointError as error:
            log.warning(
                "sealed output damaged", extra={"epoch": cut.epoch, "sink": segment.sink, "problem": str(error)}
            )
            found[segment.sink] = None
    return found


def without_end(manifest: Manifest | None, plan: p.Plan) -> Manifest | None:
    """Undo the end that a bounded run without event time had come to: there may be more input since."""
    if manifest is None or any(isinstance(step, p.Source) and has_event_time(step) for step in plan.steps):
        return manifest
    sources = {
        name: msgspec.structs.replace(cut, watermark_us=TIME_MIN_US) for name, cut in manifest.cut.sources.items()
    }
    tasks = tuple(
        msgspec.structs.replace(task, watermarks_us={}, watermark_us=TIME_MIN_US, finished=False)
        for task in manifest.tasks
    )
    cut = msgspec.structs.replace(manifest.cut, sources=sources)
    return msgspec.structs.replace(manifest, cut=cut, tasks=tasks)


def check_plan(
    manifest: Manifest, plan_digest: str, step_digests: Mapping[str, str], *, parallelism: int, allow_new_state: bool
) -> frozenset[str]:
    """The steps whose state may be loaded; raises `PlanMismatchError` when that is not all of them and new state is not allowed."""
    match = match_plan(manifest.step_digests, step_digests)
    if not match.whole and not allow_new_state:
        raise PlanMismatchError(
            f"checkpoint {manifest.epoch} of pipeline {manifest.pipeline} was made by another plan.\n{match.explain()}\n"
            "Add --fresh to start from the beginning: it sets aside the state and the outputs. Or --allow-new-state."
        )
    in_flight = any(log_.items for log_ in manifest.channels)
    # A loop runs as one task whatever the parallelism, so rows inside it are in the way only of another plan.
    rescaled = manifest.parallelism != parallelism and manifest.mode == "unaligned"
    changed = manifest.plan_digest != plan_digest
    if (in_flight and rescaled) or ((in_flight or manifest.pending) and changed):
        raise PlanMismatchError(
            f"checkpoint {manifest.epoch} of pipeline {manifest.pipeline} holds rows in flight, so it fits only the "
            f"same plan with parallelism {manifest.parallelism}. Run it so and stop it with SIGTERM: that makes an aligned "
            "checkpoint, which can be rescaled and changed once its loops are empty."
        )
    return frozenset(match.same)
