"""State of an edge checkpoint for the first batch of a query: its runs, dealt out to the shards that own their keys.

The runs come through the source like rows do, in the batch that reads the first of them: a query that is begun again
brings them again, until that batch is committed, and never after. Read by tasks, each some of the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import polars as pl

from fordstone.edge.engine.recovery import check_plan
from fordstone.epochs.manifest import Cut, Manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.registry import make_operator
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.planner.digest import step_digests
from fordstone.protocol.recovery import Resume, decide_recovery
from fordstone.runtime.dead_letters import DEAD_LETTERS
from fordstone.runtime.partition import has_event_time
from fordstone.spark.hosted.feed import QuerySetting
from fordstone.spark.hosted.host import SeedHeader, pack_seed
from fordstone.spark.hosted.packing import Packed, What, sliced, split_state
from fordstone.storage.disk import OsDisk


@dataclass(frozen=True, kw_only=True)
class Seed:
    """An edge checkpoint that a query goes on from. Sent to tasks: holds no rows."""

    root: str
    """The edge's state directory; every executor must see it."""
    manifest: Manifest
    steps: frozenset[str]
    """Whose state is taken over."""

    @property
    def epoch(self) -> int:
        """The epoch behind which the query begins."""
        return self.manifest.epoch

    @property
    def cut(self) -> Cut:
        """Where the sources stood."""
        sources = {name: cut for name, cut in self.manifest.cut.sources.items() if name in self.steps}
        return msgspec.structs.replace(self.manifest.cut, sources=sources)

    def segments(self) -> dict[str, list[pl.DataFrame]]:
        """What the checkpoint's epoch had sealed for each sink. The edge may have died before it was let out."""
        store = self._store()
        return {
            segment.sink: [store.read_run(run) for run in segment.runs]
            for segment in self.manifest.segments
            # Dead letters are in the edge's own directory, where it lets them out itself.
            if not segment.sink.startswith(DEAD_LETTERS)
        }

    def rows(self, setting: QuerySetting, first: int, every: int) -> Iterator[Packed]:
        """Every so many-th run, as seeds for the shards; the first task also tells how far time had come."""
        stages = setting.stages()
        operators = setting.operators(stages)
        times = step_times_us(self.manifest)
        if first == 0:
            for tag, step in enumerate(stages.keyed):
                header = SeedHeader(state="", order=0, watermark_us=times.get(step.name, TIME_MIN_US))
                for shard in range(setting.shards):
                    yield Packed(shard, What.SEED, tag, pack_seed(header, None))
        store = self._store()
        number = 0
        for tag, step in enumerate(stages.keyed):
            if step.name not in self.steps:
                continue
            states = make_operator(step, operators).states()
            order = 0
            for runs in sorted(self.manifest.states, key=lambda runs: runs.subtask):
                if runs.step != step.name or runs.state not in states:
                    continue
                for ref in runs.runs:
                    if number % every == first:
                        frame = store.read_run(ref)
                        header = SeedHeader(state=runs.state, order=order, watermark_us=times[step.name])
                        key = states[runs.state].key
                        for shard, mine in split_state(
                            frame, key, keyed=all(step.shuffles or ()), shards=setting.shards
                        ):
                            # Slices of one run may come in any order: its rows are of different keys, or go by time.
                            for part in sliced(mine):
                                yield Packed(shard, What.SEED, tag, pack_seed(header, part))
                    number, order = number + 1, order + 1

    def _store(self) -> CheckpointStore:
        manifest = self.manifest
        return CheckpointStore(OsDisk(self.root), pipeline=manifest.pipeline, node=manifest.node, read_only=True)


def step_times_us(manifest: Manifest) -> Mapping[str, int]:
    """How far time had come at each step that begins a task: the least over its subtasks."""
    found: dict[str, int] = {}
    for task in manifest.tasks:
        name = task.task.rpartition("/")[0]
        found[name] = min(found.get(name, TIME_MAX_US), task.watermark_us)
    return found


def newest_epoch(plan: p.Plan, root: str, *, node: str) -> int:
    """The newest checkpoint there; 0 if there is none."""
    return max(CheckpointStore(OsDisk(root), pipeline=plan.pipeline, node=node, read_only=True).epochs(), default=0)


def _check_at_rest(store: CheckpointStore, disk: OsDisk, newest: int) -> None:
    """Refuse a checkpoint that its own edge would not simply go on from: one that runs, or that has something to mend."""
    disk.lock()
    disk.close()
    survey = store.survey()
    match decide_recovery(survey.checkpoints, survey.cuts):
        case Resume(epoch=epoch, next_epoch=following) if epoch == newest and following == epoch + 1:
            return
        case decision:
            raise CheckpointError(
                f"the newest checkpoint of pipeline {store.pipeline} on node {store.node} is not all that was sealed ({decision}). "
                "Run it on the edge once more, which mends that, and stop it with SIGTERM."
            )


def edge_seed(
    plan: p.Plan, root: str, *, node: str = "node", epoch: int | None = None, allow_new_state: bool = False
) -> Seed:
    """The newest checkpoint of the pipeline in an edge's state directory, or that of an epoch, checked against the plan."""
    disk = OsDisk(root)
    store = CheckpointStore(disk, pipeline=plan.pipeline, node=node, read_only=True)
    epochs = store.epochs()
    if not epochs or (epoch is not None and epoch not in epochs):
        there = (
            f"There are {', '.join(map(str, epochs))}."
            if epochs
            else "There is none. Is it the right directory and --node?"
        )
        wanted = "no checkpoint" if epoch is None else f"no checkpoint {epoch}"
        raise CheckpointError(f"{root} has {wanted} of pipeline {plan.pipeline} on node {node}. {there}")
    if epoch is None:
        _check_at_rest(store, disk, epochs[-1])
    manifest = store.manifest(epochs[-1] if epoch is None else epoch)
    digests = step_digests(plan, stream_types(plan))
    steps = check_plan(manifest, plan.digest(), digests, parallelism=0, allow_new_state=allow_new_state)
    if manifest.pending or any(log.items for log in manifest.channels):
        raise CheckpointError(
            f"checkpoint {manifest.epoch} of pipeline {plan.pipeline} holds rows in flight between its tasks, which Spark has no place "
            "for. Run it on the edge once more and stop it with SIGTERM: that makes an aligned checkpoint."
        )
    if manifest.cut.ended and any(isinstance(step, p.Source) and has_event_time(step) for step in plan.steps):
        raise CheckpointError(
            f"pipeline {plan.pipeline} has ended: with epoch {manifest.epoch} its bounded input was read to the end and all its windows "
            "were closed, so every further row would be late. Begin without --from-checkpoint."
        )
    return Seed(root=root, manifest=manifest, steps=steps)
