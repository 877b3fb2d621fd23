"""Read a share of the sources' partitions, take the rows through the fused steps, and pack what comes out.

Runs in Spark's tasks. The edge engine's own parts do the work: readers, judging of late rows, dead letters, chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import polars as pl

from fordstone.connectors.base import Chunk, Source, SourceOptions
from fordstone.connectors.lookup_table import read_table
from fordstone.connectors.registry import open_source
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import SourceError
from fordstone.lang.schema import Schema
from fordstone.operators.base import OperatorContext
from fordstone.plan import plan as p
from fordstone.plan.ids import PartitionId, Position
from fordstone.planner.check import stream_types
from fordstone.planner.graph import steps_with_ids
from fordstone.runtime.chain import Chain
from fordstone.runtime.dead_letters import DEAD_LETTERS, DeadLetters
from fordstone.runtime.partition import Partition, row_ids
from fordstone.spark.hosted.chains import Stages, build_stages, make_chain
from fordstone.spark.hosted.packing import Packed, Packer, What
from fordstone.spark.hosted.work import (
    Clock,
    PartitionFact,
    PartitionRead,
    TaskFacts,
    Work,
    partition_watermark_us,
    waits_for,
)


@dataclass(frozen=True, kw_only=True)
class QuerySetting:
    """What every task of a query is told. Sent by Spark to its workers, functions included."""

    plan_json: bytes
    shards: int
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    batch_rows: int = 65_536
    bounded: bool = False

    def stages(self) -> Stages:
        """The plan, cut."""
        return build_stages(p.read_plan(self.plan_json))

    def operators(self, stages: Stages) -> OperatorContext:
        """How the operators are made: running results come once a batch, as on the edge once an epoch."""
        plan = stages.plan
        return OperatorContext(
            plan=msgspec.structs.replace(plan, guarantee="exactly_once"),
            types=stream_types(plan),
            functions=self.functions,
            read_table=read_table,
            with_ids=steps_with_ids(plan),
        )


def opened(step: p.Source, *, bounded: bool) -> Source:
    """The live source of a step."""
    return open_source(step.connector, SourceOptions(schema=Schema.stored(step.schema), bounded=bounded))


@dataclass(frozen=True, slots=True)
class _DeadEnd:
    packer: Packer
    tag: int

    def take(self, frame: pl.DataFrame) -> None:
        self.packer.out(self.tag, frame)


class Feed:
    """One task's reading. Used once."""

    def __init__(self, setting: QuerySetting) -> None:
        self._setting = setting
        self._stages = setting.stages()
        self._operators = setting.operators(self._stages)
        self._packer = Packer(setting.shards)
        self._chains: dict[str, Chain] = {}

    def run(self, reads: Sequence[PartitionRead], work: Work | None) -> Iterator[Packed]:
        """Everything that comes of these reads. One task of each batch is given the work too, and tells of it."""
        facts: list[PartitionFact] = []
        least_us: dict[str, int] = {}
        for read in reads:
            partition = Partition.restored(
                read.partition,
                PartitionCut(
                    position=read.position,
                    max_time_us=read.max_time_us,
                    floor_us=read.floor_us,
                    limit_us=read.limit_us,
                ),
                now_us=0,
            )
            rows, rejected = 0, 0
            for taken, refused in self._read(read, partition):
                rows, rejected = rows + taken, rejected + refused
                yield from self._packer.ready()
            facts.append(
                PartitionFact(
                    source=read.source,
                    partition=read.partition,
                    max_time_us=partition.max_time_us,
                    rows=rows,
                    rejected=rejected,
                )
            )
            if waits_for(read, bounded=self._setting.bounded):
                us = partition_watermark_us(partition.cut(), self._step(read.source).lateness_us)
                least_us[read.source] = min(least_us.get(read.source, us), us)
        told = TaskFacts(
            partitions=tuple(facts), rows_late=sum(chain.late_rows for chain in self._chains.values()), work=work
        )
        self._packer.add(Packed(0, What.FACTS, 0, told.to_json()))
        if self._stages.depth and (least_us or work is not None):
            mark = Clock(least_us=least_us)
            if work is not None:
                mark = msgspec.structs.replace(mark, clocks=work.clocks, now_us=work.now_us, before_us=work.before_us)
            self._packer.to_all(What.CLOCK, 0, mark.to_json())
        yield from self._packer.taken()

    def _step(self, name: str) -> p.Source:
        return next(step for step in self._stages.sources if step.name == name)

    def _read(self, read: PartitionRead, partition: Partition) -> Iterator[tuple[int, int]]:
        """Read up to the end of the part; gives the rows and rejects of each chunk."""
        step = self._step(read.source)
        with_ids = step.name in self._operators.with_ids
        letters = DeadLetters(step, _DeadEnd(self._packer, self._stages.sinks.index(DEAD_LETTERS + step.name)))
        source = opened(step, bounded=self._setting.bounded)
        reader = source.open(PartitionId(read.partition), Position(read.position), with_positions=with_ids)
        try:
            while partition.position < read.until:
                chunk = reader.read(self._setting.batch_rows, Position(read.until))
                if chunk is None or int(chunk.position) <= partition.position:
                    raise SourceError(
                        f"source {step.name}: {read.partition} ends at {partition.position}, but it was there up to "
                        f"{read.until} when this batch was planned. Files may grow, but not shrink or go."
                    )
                partition.position = int(chunk.position)
                before = letters.rows
                letters.take(partition.name, chunk.rejected)
                frame = chunk.frame
                if with_ids and chunk.row_positions is not None:
                    frame = frame.with_columns(row_ids(step.name, partition.name, chunk.row_positions))
                if frame.height or step.declares_time:
                    self._push(step, partition, letters, chunk, frame)
                yield chunk.frame.height, letters.rows - before
        finally:
            reader.close()

    def _push(
        self, step: p.Source, partition: Partition, letters: DeadLetters, chunk: Chunk, frame: pl.DataFrame
    ) -> None:
        chain = self._chain(step.name)
        judged = partition.judged(step, chunk, frame)
        if judged.untimed is not None:
            letters.take_timeless(partition.name, partition.position, judged.untimed)
        if judged.in_time.height:
            chain.push(judged.in_time, late=False)
        if judged.late is not None:
            chain.push(judged.late, late=True)

    def _chain(self, source: str) -> Chain:
        if source not in self._chains:
            host = self._stages.hosts[source]
            self._chains[source] = make_chain(self._stages, host, self._operators, self._packer)
        return self._chains[source]
