"""Make an edge checkpoint of a query's state: what Spark's state store holds, as runs, and the cut, as a manifest.

Spark's own reader of state stores gives the pieces. Only a query whose last batch is committed can be taken: otherwise
sinks may hold rows of a batch that the edge would compute anew, with another cut.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import fsspec
import msgspec

from fordstone.epochs.manifest import Cut, Manifest, StateRuns, TaskCut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan.plan import Plan, Source, read_plan
from fordstone.planner.graph import Graph, VertexKind, build_graph
from fordstone.spark.hosted.cuts import CutFiles
from fordstone.spark.hosted.host import ShardMemo
from fordstone.spark.hosted.identity import QueryFile, QueryIdentity
from fordstone.spark.hosted.packing import decode, shard_keys
from fordstone.spark.hosted.processor import MEMO
from fordstone.spark.hosted.work import partition_watermark_us, time_of
from fordstone.storage.disk import OsDisk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    identity = QueryFile(checkpoint).read()
    if identity is None:
        raise CheckpointError(
            f"{checkpoint} is not the checkpoint location of a fordstone query: it has no fordstone/query.json. "
            "It is <state>/<pipeline>/_spark below the --state that the query ran with."
        )
    batch_id = _committed(checkpoint)
    epoch = identity.first_epoch + batch_id
    cut = CutFiles(checkpoint).read(epoch)
    pieces, times = _state(spark, checkpoint, identity, batch_id)
    disk = OsDisk(state)
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
    fs, path = fsspec.core.url_to_fs(f"{checkpoint.rstrip('/')}/{log}")
    if not fs.exists(path):
        return []
    names = [str(name).rpartition("/")[2] for name in fs.ls(path, detail=False)]
    return [int(name) for name in names if name.isdigit()]


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
        created_us=time.time_ns() // 1000,
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
            us = times.get(vertex.name, time_of(graph.sources_of(vertex.name), sources, TIME_MIN_US))
            found.append(TaskCut(f"{vertex.name}/0", {}, us, cut.ended))
    return tuple(found)
