"""Read a share of the sources' partitions, run the rows through the fused steps, and pack what comes out.

`PipelineReader` plans the batches of a stream beside the driver and reads them in tasks; `batch_feed` does the reading of a batch
job. Readers, the judging of late rows, dead letters and chains are those of the edge engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl
import pyarrow as pa

from fordstone.connectors.base import Chunk, Source, SourceOptions, close_sources
from fordstone.connectors.registry import open_source
from fordstone.epochs.manifest import Cut, PartitionCut
from fordstone.errors import CheckpointError, DamagedError, SourceError
from fordstone.lang.schema import Schema
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.plan import plan as p
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.micro_batch import NextPlan, decide_plan
from fordstone.runtime.assignment import balance
from fordstone.runtime.chain import Chain
from fordstone.runtime.intake import Intake
from fordstone.runtime.partition import DeadLetters, Partition, read_from, row_ids
from fordstone.spark.hosted.checkpoint import QueryFiles
from fordstone.spark.hosted.packing import Packed, Packer, What, batches, freeze_gc, shard_keys
from fordstone.spark.hosted.plan_batches import (
    PartitionFact,
    PartitionRead,
    Planner,
    ReadTimes,
    SourceTimes,
    TaskFacts,
    Work,
    first_offset,
    offset_of,
    read_work,
    shortens,
)
from fordstone.spark.hosted.spark_files import spark_files
from fordstone.spark.hosted.stages import QuerySetting, make_chain, tick_us
from fordstone.spark.hosted.tables import BatchTables, refreshed_steps
from fordstone.storage.clock import monotonic_clock_us, wall_clock_us

if TYPE_CHECKING:
    from fordstone.spark.hosted.state_transfer import Seed


def opened(step: p.Source, *, bounded: bool) -> Source:
    """The live source of a step."""
    return open_source(step.connector, SourceOptions(schema=Schema.stored(step.schema), bounded=bounded))


@dataclass(frozen=True, slots=True)
class _DeadEnd:
    packer: Packer
    tag: int

    def take(self, frame: pl.DataFrame) -> None:
        self.packer.out(self.tag, frame)


class Intakes:
    """The way of one task's rows: judged, run through the fused steps, packed. Used once."""

    def __init__(self, setting: QuerySetting, tables: Mapping[str, str]) -> None:
        """`tables`: of the batch (`Work.tables`)."""
        self.setting = setting
        self.stages = setting.stages
        self._operators = setting.operators_with(tables)
        self.packer = Packer(setting.shards)
        self._chains: dict[str, Chain] = {}
        self._parts: list[PartIntake] = []

    def part(self, read: PartitionRead) -> PartIntake:
        """Begin with a part of a partition."""
        self._parts.append(PartIntake(self, read))
        return self._parts[-1]

    def finish(self, times: SourceTimes | None, work: Work | None) -> Iterator[Packed]:
        """Yield what is left, with the facts and, if a later stage needs it, the mark of time."""
        report = TaskFacts(
            partitions=tuple(part.fact() for part in self._parts),
            rows_late=sum(chain.late_rows for chain in self._chains.values()),
            late_by_us=max((chain.late_by_us for chain in self._chains.values()), default=0),
            rows_failed=sum(chain.failed_rows for chain in self._chains.values()),
            work=work,
        )
        self.packer.add(Packed(0, What.FACTS, 0, msgspec.json.encode(report)))
        if self.stages.depth and times is not None:
            self.packer.to_all(What.CLOCK, 0, msgspec.json.encode(times))
        yield from self.packer.taken()

    def step(self, name: str) -> p.Source:
        return next(step for step in self.stages.sources if step.name == name)

    def chain(self, source: str) -> Chain:
        if source not in self._chains:
            host = self.stages.hosts[source]
            self._chains[source] = make_chain(self.stages, host, self._operators, self.packer)
        return self._chains[source]


class PartIntake:
    """The way of the rows of one part of a partition."""

    def __init__(self, intakes: Intakes, read: PartitionRead) -> None:
        self._read = read
        self._step = step = intakes.step(read.source)
        self._with_ids = step.name in intakes.setting.operators.with_ids
        dead_end = _DeadEnd(intakes.packer, intakes.stages.sinks.index(DEAD_LETTERS + step.name))
        self._letters = DeadLetters(step, dead_end)
        self._intake = Intake(step, intakes.chain(step.name), self._letters)
        self._rows = self._rejected = 0
        self.partition = Partition.restored(
            read.partition,
            PartitionCut(
                position=read.position,
                max_time_us=read.max_time_us,
                first_us=read.first_us,
                floor_us=read.floor_us,
                limit_us=read.limit_us,
            ),
            now_us=0,
        )

    def take(self, chunk: Chunk) -> None:
        """Take the rows that follow."""
        partition, letters, step = self.partition, self._letters, self._step
        start, partition.position = partition.position, int(chunk.position)
        before = letters.rows
        letters.take(partition.name, chunk.rejected)
        unread = letters.rows
        frame = chunk.frame
        if self._with_ids and chunk.row_positions is not None:
            frame = frame.with_columns(row_ids(step.name, partition.name, chunk.row_positions))
        if frame.height or step.declares_time:
            with read_from(step.name, partition.name, start, partition.position):
                self._intake.take(partition, chunk, frame)
        # A row without a time is rejected, and is not counted as read as well.
        self._rows += max(0, chunk.frame.height - (letters.rows - unread))
        self._rejected += letters.rows - before

    def fact(self) -> PartitionFact:
        return PartitionFact(
            source=self._read.source,
            partition=self._read.partition,
            max_time_us=self.partition.max_time_us,
            first_us=self.partition.first_us,
            rows=self._rows,
            rejected=self._rejected,
        )


class Feed:
    """One task's reading. Used once."""

    def __init__(self, setting: QuerySetting, tables: Mapping[str, str]) -> None:
        self._setting = setting
        self._intakes = Intakes(setting, tables)
        self._sources: dict[str, Source] = {}

    def run(self, reads: Sequence[PartitionRead], work: Work | None) -> Iterator[Packed]:
        """Yield everything that comes of these reads. One task of each batch is also given the work, and reports it."""
        try:
            yield from self._run(reads, work)
        finally:
            close_sources(self._sources.values())

    def _run(self, reads: Sequence[PartitionRead], work: Work | None) -> Iterator[Packed]:
        times = ReadTimes()
        self._open(reads)
        for read in reads:
            part = self._intakes.part(read)
            for chunk in self._chunks(read):
                part.take(chunk)
                yield from self._intakes.packer.ready()
            lateness_us = self._intakes.step(read.source).lateness_us
            times.add(read, part.partition.cut(), lateness_us, bounded=self._setting.bounded)
        mark = None
        if times.least_us or times.ended_us or work is not None:
            mark = SourceTimes(least_us=times.least_us, ended_us=times.ended_us)
            if work is not None:
                mark = msgspec.structs.replace(
                    mark, clocks=work.clocks, now_us=work.now_us, before_us=work.before_us, tables=work.tables
                )
        yield from self._intakes.finish(mark, work)

    def _open(self, reads: Sequence[PartitionRead]) -> None:
        for name in dict.fromkeys(read.source for read in reads):
            mine = {PartitionId(read.partition): read for read in reads if read.source == name}
            source = self._sources[name] = opened(self._intakes.step(name), bounded=self._setting.bounded)
            source.restore({at: PartitionCut(position=one.until, identity=one.identity) for at, one in mine.items()})
            source.expect_reads({at: (Position(one.position), Position(one.until)) for at, one in mine.items()})

    def _chunks(self, read: PartitionRead) -> Iterator[Chunk]:
        """Read up to the end of the part."""
        with_ids = read.source in self._setting.operators.with_ids
        reader = self._sources[read.source].open(
            PartitionId(read.partition), Position(read.position), with_positions=with_ids
        )
        position = read.position
        try:
            while position < read.until:
                chunk = reader.read(self._setting.batch_rows, Position(read.until))
                if chunk is None or int(chunk.position) <= position:
                    raise SourceError(
                        f"source {read.source}: {read.partition} ends at {position}, but it was there up to "
                        f"{read.until} when this batch was planned. Files may grow, but not shrink or go."
                    )
                position = int(chunk.position)
                yield chunk
        finally:
            reader.close()


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one task of a batch does."""

    reads: tuple[PartitionRead, ...] = ()
    tables: dict[str, str] = {}
    """Of the batch."""
    work: Work | None = None
    seeds: tuple[int, int] | None = None
    """This task brings every n-th run of the checkpoint, beginning with the i-th: `(i, n)`."""


def shares_of(work: Work, tasks: int) -> list[Share]:
    """Spread a batch evenly over at most `tasks` tasks, but at least one, and the state of a checkpoint over as many more."""
    assigned = balance(work.reads, tasks, lambda read: read.until - read.position) or [[]]
    shares = [
        Share(reads=tuple(reads), tables=work.tables, work=None if number else work)
        for number, reads in enumerate(assigned)
    ]
    return shares + [Share(seeds=(number, tasks)) for number in range(tasks if work.seeds else 0)]


def run_share(setting: QuerySetting, seed: Seed | None, share: Share) -> Iterator[pa.RecordBatch]:
    """Do a task's share. Called in the task."""
    if share.seeds is not None and seed is not None:
        rows = seed.rows(setting, *share.seeds)
    else:
        rows = Feed(setting, share.tables).run(share.reads, share.work)
    yield from batches(rows, shard_keys(setting.shards))
    freeze_gc()


class PipelineReader:
    """Plans the batches of a stream, and reads them in tasks. Spark calls it through `sent.SentReader`."""

    def __init__(
        self,
        setting: QuerySetting,
        files: QueryFiles,
        seed: Seed | None,
        *,
        first_epoch: int,
        rows_max: int,
        tasks: int,
    ) -> None:
        """`first_epoch`: that of Spark's batch 0."""
        self._setting = setting
        self._files = files
        self._seed = seed
        self._first_epoch = first_epoch
        self._rows_max = rows_max
        self._tasks = tasks
        self._planner: Planner | None = None
        self._tables: BatchTables | None = None
        self._newest_record: int | None = None

    def first_offset(self) -> dict[str, Any]:
        return first_offset(self._first_epoch - 1)

    def stop_at_what_is_there(self) -> None:
        if not self._setting.bounded:
            epochs = self._files.cut_epochs()
            before = self._files.cut(epochs[-1]) if epochs else None if self._seed is None else self._seed.cut
            self._planned().stop_at_what_is_there(before)

    def next_offset(self, start: dict[str, Any]) -> dict[str, Any]:
        """The work of the next batch; `start` itself: nothing to do."""
        if self._files.stop_requested():
            return start
        epoch = int(start["epoch"])
        recorded = self._recorded(epoch + 1)
        if recorded is not None:
            return offset_of(recorded)
        begins = "work" not in start
        before = self._before(epoch, begins=begins)
        work = self._planned().next_work(before, epoch + 1, seeds=begins and self._seed is not None)
        if self._tables is not None:
            if work is not None:
                work = self._tables.planned(work, before_us=0 if before is None else before.now_us)
            self._tables.refresh(wall_clock_us() if work is None else work.now_us)
        return start if work is None else offset_of(work)

    def shares(self, end: dict[str, Any]) -> list[Share]:
        work = read_work(end)
        if work.seeds and self._seed is None:
            raise DamagedError(
                f"Spark starts with its first batch again, which brings the state of a checkpoint, but epochs after {work.epoch} are sealed. "
                f"Restore the checkpoint location {self._files.root} as a whole."
            )
        return shares_of(self._executable(work), self._tasks)

    def read(self, share: Share) -> Iterator[pa.RecordBatch]:
        return run_share(self._setting, self._seed, share)

    def commit(self, end: dict[str, Any]) -> None:
        """Acknowledge everything up to `end` to sources that keep rows for us."""
        if "work" not in end or not (self._planned().acks or self._tables):
            return
        epoch = int(end["epoch"])
        try:
            cut = self._files.cut(epoch)
        except (CheckpointError, OSError):
            return  # the next commit acknowledges it, too
        # A batch whose commit Spark loses is executed again, and needs its input.
        spark = spark_files(self._files.root)
        if spark is None or spark.sync_commit(epoch - self._first_epoch):
            self._planned().ack(cut)
            if self._tables is not None:
                self._tables.ack(cut.now_us)

    def close(self) -> None:
        """Close what planning has opened."""
        if self._tables is not None:
            self._tables.close()
            self._tables = None
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _planned(self) -> Planner:
        if self._planner is None:
            steps = self._setting.stages.sources
            if refreshed_steps(self._setting.stages.plan):
                self._tables = BatchTables(self._setting)
            sources = {step.name: opened(step, bounded=self._setting.bounded) for step in steps}
            self._planner = Planner(
                steps,
                sources,
                rows_max=self._rows_max,
                bounded=self._setting.bounded,
                clock_us=monotonic_clock_us,
                wall_us=wall_clock_us,
                tick_us=None if self._setting.bounded else tick_us(self._setting.stages.plan),
            )
        return self._planner

    def _recorded(self, epoch: int) -> Work | None:
        """The work of an epoch that was sealed before this process started, and that Spark no longer has in its log."""
        if self._newest_record is None:
            self._newest_record = self._files.newest_record()
        if epoch > self._newest_record:
            return None
        record = self._files.record(epoch)
        match decide_plan(epoch, recorded=record is not None, newest=self._newest_record):
            case NextPlan.RECORDED if record is not None:
                return record.work
            case NextPlan.NEW:
                return None
            case _:
                raise DamagedError(
                    f"Spark asks for epoch {epoch}, which was released before: epochs up to {self._newest_record} are sealed in "
                    f"{self._files.root}, and how this one was planned is no longer recorded. Restore the checkpoint location as a whole, or "
                    "begin with a new one."
                )

    def _executable(self, work: Work) -> Work:
        """The work of a batch as it is executed: as it was sealed (rule 23), else as planned, without nodes in quarantine since then."""
        if self._newest_record is None:
            self._newest_record = self._files.newest_record()
        if work.epoch <= self._newest_record:
            record = self._files.record(work.epoch)
            # A record of anything else is found, and refused, when the batch has been executed.
            return record.work if record is not None and shortens(record.work, work) else work
        if self._setting.bounded:
            return work
        begins = work.epoch == self._first_epoch
        return self._planned().still_planned(work, lambda: self._before(work.epoch - 1, begins=begins))

    def _before(self, epoch: int, *, begins: bool) -> Cut | None:
        if begins:
            return None if self._seed is None else self._seed.cut
        return self._files.cut(epoch)


def batch_feed(
    setting: QuerySetting, seed: Seed | None
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What reader tasks of a batch job do: a row is a share of the work, or of the checkpoint to begin from."""

    def feed(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in rows:
            for data in batch["share"].to_pylist():
                yield from run_share(setting, seed, msgspec.json.decode(data, type=Share))

    return feed
