"""Move state between the engines: an edge checkpoint begins a query, and a query's state becomes an edge checkpoint.

To Spark (`Seed`): the checkpoint's runs come through the source like rows, in the first batch, split by the shards that own their
keys. A query that is started again brings them again until that batch is committed, and never after. To the edge
(`import_spark`): Spark's own reader of state stores gives the pieces. Only a query whose last batch is committed can be taken,
because otherwise sinks may hold rows of a batch that the edge would compute again with another cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from fordstone.edge.engine.recovery import check_plan
from fordstone.edge.link.owner import granted_to
from fordstone.epochs.manifest import Cut, Manifest, StateRuns, TaskCut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.operators.registry import make_operator
from fordstone.plan import plan as p
from fordstone.plan.plan import Plan, Source, read_plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.graph import Graph, VertexKind, build_graph
from fordstone.protocol.recovery import CannotResume, Resume, decide_recovery
from fordstone.runtime.partition import has_event_time
from fordstone.spark.hosted.checkpoint import QueryFiles, QueryIdentity
from fordstone.spark.hosted.operator_host import SeedPiece, ShardMemo
from fordstone.spark.hosted.packing import Packed, What, decode, encode, shard_keys, sliced, split_state
from fordstone.spark.hosted.plan_batches import partition_watermark_us
from fordstone.spark.hosted.sent import MEMO
from fordstone.spark.hosted.stages import QuerySetting
from fordstone.storage.clock import wall_clock_us
from fordstone.storage.disk import OsDisk
from fordstone.storage.remote import open_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, kw_only=True)
class Seed:
    """An edge checkpoint from which a query resumes. Sent to tasks: holds no rows."""

    root: str
    """The edge's state directory; every executor must see it."""
    manifest: Manifest
    steps: frozenset[str]
    """The steps whose state is taken over."""
    granted: int = 0
    """The generation that the edge had from its hub: the query writes to its sinks in its place."""

    @property
    def epoch(self) -> int:
        return self.manifest.epoch

    @property
    def cut(self) -> Cut:
        sources = {name: cut for name, cut in self.manifest.cut.sources.items() if name in self.steps}
        return msgspec.structs.replace(self.manifest.cut, sources=sources)

    def segments(self) -> dict[str, list[pl.DataFrame]]:
        """What the checkpoint's epoch had sealed for each sink. The edge may have died before it was released."""
        store = self._store()
        return {
            segment.sink: [store.read_run(run) for run in segment.runs]
            for segment in self.manifest.segments
            # Dead letters are in the edge's own directory, where it releases them itself.
            if not segment.sink.startswith(DEAD_LETTERS)
        }

    def rows(self, setting: QuerySetting, first: int, every: int) -> Iterator[Packed]:
        """Yield every `every`-th run as seeds for the shards; the first task also sends the watermarks."""
        stages = setting.stages
        times = step_times_us(self.manifest)
        if first == 0:
            for tag, step in enumerate(stages.keyed):
                time_only = SeedPiece(watermark_us=times.get(step.name, TIME_MIN_US))
                for shard in range(setting.shards):
                    yield Packed(shard, What.SEED, tag, msgspec.msgpack.encode(time_only))
        store = self._store()
        number = 0
        for tag, step in enumerate(stages.keyed):
            if step.name not in self.steps:
                continue
            states = make_operator(step, setting.operators).states()
            order = 0
            for runs in sorted(self.manifest.states, key=lambda runs: runs.subtask):
                if runs.step != step.name or runs.state not in states:
                    continue
                for ref in runs.runs:
                    if number % every == first:
                        frame = store.read_run(ref)
                        key = states[runs.state].key
                        for shard, mine in split_state(
                            frame, key, keyed=all(step.shuffles or ()), shards=setting.shards
                        ):
                            # Slices of one run may come in any order: its rows are of different keys, or go by time.
                            for part in sliced(mine):
                                seed = SeedPiece(
                                    state=runs.state, order=order, watermark_us=times[step.name], rows=encode(part)
                                )
                                yield Packed(shard, What.SEED, tag, msgspec.msgpack.encode(seed))
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


def _check_nothing_to_replay(store: CheckpointStore, disk: OsDisk, newest: int) -> None:
    """Refuse a directory that a process uses, and a checkpoint after which its own edge would replay epochs or not start."""
    disk.lock()
    disk.close()
    survey = store.survey()
    match decide_recovery(survey.checkpoints, survey.cuts):
        case Resume(epoch=epoch, next_epoch=following) if epoch == newest and following == epoch + 1:
            return
        case CannotResume(reason=reason):
            raise CheckpointError(f"pipeline {store.pipeline} on node {store.node}: {reason}")
        case _:
            raise CheckpointError(
                f"pipeline {store.pipeline} on node {store.node} has sealed epochs after its newest whole checkpoint. "
                "Run it once on the edge, which replays them, and stop it with SIGTERM."
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
        _check_nothing_to_replay(store, disk, epochs[-1])
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
    granted = granted_to(disk, f"{plan.pipeline}/{node}")
    return Seed(root=root, manifest=manifest, steps=steps, granted=granted)


Pieces = dict[str, list[bytes]]
"""The pieces of each state, oldest first, shard by shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of a query's state."""

    pipeline: str
    epoch: int
    runs: int
    size_bytes: int
    rows: int


def import_spark(spark: SparkSession, checkpoint: str, state: str, *, node: str = "node") -> Imported:
    """Write the state of the query at `checkpoint` as a checkpoint of `node` into the edge's state directory."""
    files = QueryFiles(checkpoint)
    identity = files.identity()
    if identity is None:
        raise CheckpointError(
            f"{checkpoint} is not the checkpoint location of a fordstone query: it has no fordstone/query.json. "
            "It is <state>/<pipeline>/_spark below the --state that the query ran with."
        )
    batch_id = _committed(checkpoint)
    epoch = identity.first_epoch + batch_id
    cut = files.cut(epoch)
    pieces, times = _state(spark, checkpoint, identity, batch_id)
    disk = OsDisk(state, private=True)
    disk.lock()
    try:
        store = CheckpointStore(disk, pipeline=identity.pipeline, node=node)
        if store.epochs():
            raise CheckpointError(
                f"{state} has checkpoints of pipeline {identity.pipeline} on node {node} already. Choose a new --state."
            )
        return _written(store, identity, cut, pieces, times)
    finally:
        disk.close()


def _committed(checkpoint: str) -> int:
    """The newest batch, which must be committed."""
    planned, committed = _batches(checkpoint, "offsets"), _batches(checkpoint, "commits")
    if not committed:
        raise CheckpointError(f"the query at {checkpoint} has not committed a batch yet: there is no state to take.")
    if planned and max(planned) > max(committed):
        raise CheckpointError(
            f"the query at {checkpoint} was stopped in the middle of batch {max(planned)}, of which sinks may have rows already. "
            "Run it once more with --available-now, which finishes that batch."
        )
    return max(committed)


def _batches(checkpoint: str, log: str) -> list[int]:
    return [int(name) for name in open_remote(checkpoint).sizes(log) if name.isdigit()]


def _state(
    spark: SparkSession, checkpoint: str, identity: QueryIdentity, batch_id: int
) -> tuple[Pieces, dict[str, int]]:
    """The pieces of every state, and how far time had come at each keyed step."""
    found: Pieces = {}
    times: dict[str, int] = {}
    operators = spark.read.format("state-metadata").load(checkpoint).collect()
    for operator in operators:
        names = [one["stateName"] for one in json.loads(operator.operatorProperties)["stateVariables"]]

        def read(name: str, number: int = operator.operatorId) -> list[Mapping[str, object]]:
            reader = spark.read.format("statestore").option("operatorId", number).option("batchId", batch_id)
            return [
                row.asDict(recursive=True) for row in reader.option("stateVarName", name).load(checkpoint).collect()
            ]

        memos = {
            row["key"]["shard"]: msgspec.json.decode(row["value"]["json"], type=ShardMemo)  # type: ignore[index]
            for row in read(MEMO)
        }
        for memo in memos.values():
            for step, us in memo.watermarks_us.items():
                times[step] = min(times.get(step, us), us)
        for name in names:
            if name == MEMO:
                continue
            stored = {
                (row["key"]["shard"], row["user_map_key"]["number"]): bytes(row["user_map_value"]["data"])  # type: ignore[index]
                for row in read(name)
            }
            found[name] = [
                b"".join(_piece(stored, name, key, number) for number in one.values)
                for key in shard_keys(identity.shards)
                if key in memos
                for one in memos[key].pieces.get(name, ())
            ]
    return found, times


def _piece(stored: Mapping[tuple[int, int], bytes], name: str, key: int, number: int) -> bytes:
    try:
        return stored[key, number]
    except KeyError:
        raise DamagedError(f"piece {number} of {name} is missing from the query's state.") from None


def _written(
    store: CheckpointStore, identity: QueryIdentity, cut: Cut, pieces: Pieces, times: Mapping[str, int]
) -> Imported:
    plan = read_plan(bytes(identity.plan))
    states = []
    for name, stored in sorted(pieces.items()):
        step, _, state = name.rpartition(":")
        runs = tuple(store.write_run(decode(data)) for data in stored)
        states.append(StateRuns(step=step, state=state, subtask=0, runs=runs))
    manifest = Manifest(
        pipeline=store.pipeline,
        node=store.node,
        epoch=cut.epoch,
        attempt=cut.epoch,
        mode="aligned",
        parallelism=1,
        plan_digest=plan.digest(),
        step_digests=identity.step_digests,
        created_us=wall_clock_us(),
        cut=cut,
        tasks=_tasks(plan, build_graph(plan, 1), cut, times),
        states=tuple(states),
    )
    store.commit(manifest)
    refs = [ref for runs in states for ref in runs.runs]
    return Imported(
        pipeline=store.pipeline,
        epoch=cut.epoch,
        runs=len(refs),
        size_bytes=sum(ref.size_bytes for ref in refs),
        rows=sum(ref.rows for ref in refs),
    )


def _tasks(plan: Plan, graph: Graph, cut: Cut, times: Mapping[str, int]) -> tuple[TaskCut, ...]:
    """How far time had come in each task that the edge will have."""
    sources = {name: known.watermark_us for name, known in cut.sources.items()}
    found = []
    for vertex in graph.vertices:
        if vertex.kind is VertexKind.SOURCE:
            step = plan.step(vertex.name)
            lateness_us = step.lateness_us if isinstance(step, Source) else 0
            partitions = cut.sources[vertex.name].partitions
            inputs = {name: partition_watermark_us(one, lateness_us) for name, one in partitions.items()}
            found.append(TaskCut(f"{vertex.name}/0", inputs, sources[vertex.name], cut.ended))
        else:
            above = [sources[source.name] for source in plan.sources_of(vertex.name) if source.name in sources]
            us = times.get(vertex.name, min(above, default=TIME_MIN_US))
            found.append(TaskCut(f"{vertex.name}/0", {}, us, cut.ended))
    return tuple(found)
