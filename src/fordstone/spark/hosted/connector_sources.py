"""Read sources with connectors of Spark's own (`SparkConnector`): plan an epoch from what Spark has planned, and run its rows in tasks.

A stream then has several sources in Spark: first `WakeReader`, which reads nothing, and begins a batch where one is due without rows (or brings the
state of a checkpoint); then each connector's. Spark decides what a batch reads, and writes it to its log. Before the batch is executed, the driver
(`ConnectorEpochs`) makes the `Work` of that and the cut before it, and gives it to the tasks as a property of their job.

Invariants: positions in the cut are those in Spark's log, and a batch that begins elsewhere is an error; an epoch that was sealed is executed as it
was recorded; a partition of which a batch has no rows, such as one with marks of transactions alone, keeps its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import polars as pl
import pyarrow as pa
from msgspec.structs import replace

from fordstone.connectors.base import (
    Idleness,
    Reader,
    ReadPlan,
    Source,
    SourceOptions,
    SparkConnector,
    SparkReadSource,
)
from fordstone.connectors.registry import spark_connector
from fordstone.epochs.manifest import Cut, PartitionCut
from fordstone.errors import ConfigError, DamagedError, TaskError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.partitions import partition_watermark_us
from fordstone.spark.hosted.checkpoint import QueryFiles
from fordstone.spark.hosted.packing import Packed, batches, freeze_gc, shard_keys
from fordstone.spark.hosted.plan_batches import PARTITIONS_MAX, PartitionFact, Planner, SourceTimes, Work
from fordstone.spark.hosted.source import Intakes, Share, run_share
from fordstone.spark.hosted.spark_files import spark_files
from fordstone.spark.hosted.stages import QuerySetting, Stages, tick_us
from fordstone.spark.hosted.tables import BatchTables, refreshed_steps
from fordstone.storage.clock import monotonic_clock_us, wall_clock_us

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from fordstone.spark.hosted.state_transfer import Seed

WORK_PROPERTY: Final = "fordstone.work"
HOLD_S: Final = 1.0
"""How long the next batch is held back where the query is to be stopped. The driver looks every `spark.run.LOOK_EVERY_S`."""
BATCH_PROPERTY: Final = "streaming.sql.batchId"
"""As Spark calls it."""
_NOT_FOUND: Final = (
    "DATA_SOURCE_NOT_FOUND",
    "Failed to find data source",
    "NoClassDefFoundError",
    "ClassNotFoundException",
)


def connectors_of(stages: Stages, *, bounded: bool) -> dict[str, SparkConnector]:
    """Return the connectors of Spark's own that read the sources of a plan; none if tasks read them."""
    found: dict[str, SparkConnector] = {}
    for step in stages.sources:
        connector = spark_connector(step.connector, SourceOptions(schema=Schema.stored(step.schema), bounded=bounded))
        if connector is not None:
            connector.check()
            found[step.name] = connector
    others = [step.name for step in stages.sources if step.name not in found]
    if found and others:
        raise ConfigError(
            f"source {next(iter(found))} is to be read by Spark's own connector, and source {others[0]} is not: the sources of one pipeline "
            "are all read in one way. Leave spark_connector out, or divide the pipeline."
        )
    return found


def loaded(spark: SparkSession, connector: SparkConnector, options: Mapping[str, str], *, stream: bool) -> DataFrame:
    """Return the rows of a source as Spark reads them. Raises `ConfigError` if this Spark lacks the connector."""
    reader: Any = spark.readStream if stream else spark.read
    try:
        return reader.format(connector.format).options(**options).load().selectExpr(*connector.columns())  # type: ignore[no-any-return]
    except Exception as error:
        if not any(text in str(error) for text in _NOT_FOUND):
            raise
        raise ConfigError(connector.how_to_install(spark.version)) from error


def spark_read(source: Source) -> SparkReadSource:
    """Return the live source of a spec that has a connector."""
    if not isinstance(source, SparkReadSource):
        raise TypeError(f"{source!r} has a connector of Spark's, and is no SparkReadSource")
    return source


def connector_reads(work: Work, name: str, source: Source) -> dict[PartitionId, tuple[Position, Position]]:
    """Return what a batch job reads of a source: partitions, each from a position to another, without empty ones."""
    live = spark_read(source)
    found = {}
    for read in work.reads:
        if read.source == name:
            partition = PartitionId(read.partition)
            start = Position(read.position) if read.position else live.start_of(partition)
            if start < read.until:
                found[partition] = (start, Position(read.until))
    return found


# In tasks.


def connector_feed(
    setting: QuerySetting, source: str, first_epoch: int
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what a task does with the rows that Spark has read of a source."""

    def feed(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches(_fed(setting, source, _work_of_task(first_epoch), rows), shard_keys(setting.shards))
        freeze_gc()

    return feed


def _fed(setting: QuerySetting, source: str, work: Work, rows: Iterable[pa.RecordBatch]) -> Iterator[Packed]:
    intakes = Intakes(setting, work.tables)
    step = intakes.step(source)
    connector = spark_connector(
        step.connector, SourceOptions(schema=Schema.stored(step.schema), bounded=setting.bounded)
    )
    if connector is None:
        raise AssertionError("rows of a connector of a source that has none")
    reads = {read.partition: read for read in work.reads if read.source == source}
    parts: dict[str, Any] = {}
    with_ids = source in setting.operators.with_ids
    for batch in rows:
        for name, chunk in connector.chunks(pl.DataFrame(pl.from_arrow(batch)), with_positions=with_ids):
            read = reads.get(name)
            part = parts.get(name)
            if part is None and read is not None:
                part = parts[name] = intakes.part(read)
            if part is None or read is None or not part.partition.position < chunk.position <= read.until:
                raise DamagedError(
                    f"source {source}: Spark read {name} up to {chunk.position}, and the plan of epoch {work.epoch} does not have that."
                )
            part.take(chunk)
            yield from intakes.packer.ready()
    times_us = {
        name: partition_watermark_us(part.partition.max_time_us, reads[name].floor_us, step.lateness_us)
        for name, part in parts.items()
        if not reads[name].ended
    }
    yield from intakes.finish(_mark(setting, work, {source: times_us} if times_us else {}), None)


def _mark(setting: QuerySetting, work: Work, after_us: dict[str, dict[str, int]]) -> SourceTimes | None:
    """Return the mark of time of one task. The first task of the stage, whatever it reads, also reports what was before the batch."""
    from pyspark import TaskContext  # noqa: PLC0415 - only tasks have one

    context = TaskContext.get()
    if context is None or context.partitionId() > 0:
        return SourceTimes(by_partition=after_us) if after_us else None
    lateness_us = {step.name: step.lateness_us for step in setting.stages.sources}
    times_us = {source: dict(found) for source, found in after_us.items()}
    for read in work.reads:
        if not read.ended:
            before_us = partition_watermark_us(read.max_time_us, read.floor_us, lateness_us[read.source])
            mine = times_us.setdefault(read.source, {})
            mine[read.partition] = max(before_us, mine.get(read.partition, before_us))
    return SourceTimes(
        clocks=work.clocks, by_partition=times_us, now_us=work.now_us, before_us=work.before_us, tables=work.tables
    )


def _work_of_task(first_epoch: int) -> Work:
    from pyspark import TaskContext  # noqa: PLC0415 - as above

    context = TaskContext.get()
    given = None if context is None else context.getLocalProperty(WORK_PROPERTY)
    if context is None or given is None:
        raise TaskError(
            "the plan of this batch did not come to its tasks. Spark's setting PYSPARK_PIN_THREAD=false prevents that: leave it out."
        )
    work = msgspec.json.decode(given, type=Work)
    batch = context.getLocalProperty(BATCH_PROPERTY)
    if batch is not None and not work.bounded and work.epoch != first_epoch + int(batch):
        raise TaskError(f"the tasks of epoch {first_epoch + int(batch)} were given the plan of epoch {work.epoch}.")
    return work


def run_waking_share(
    setting: QuerySetting, seed: Seed | None, share: Share, first_epoch: int
) -> Iterator[pa.RecordBatch]:
    """Do a share of a batch beside the connectors: bring state, or nothing. Called in the task."""
    if share.seeds is not None:
        yield from run_share(setting, seed, share)
        return
    mark = _mark(setting, _work_of_task(first_epoch), {})
    yield from batches(Intakes(setting, {}).finish(mark, None), shard_keys(setting.shards))


# Where Spark plans.


class WakeReader:
    """Begins the first batch, and batches that are due without rows. Spark calls it through `sent.SentReader`, as `PipelineReader`."""

    def __init__(
        self, setting: QuerySetting, files: QueryFiles, seed: Seed | None, *, first_epoch: int, tasks: int
    ) -> None:
        self._setting = setting
        self._files = files
        self._seed = seed
        self._first_epoch = first_epoch
        self._tasks = tasks
        self._waits = True

    def first_offset(self) -> dict[str, Any]:
        return {"wake": 0}

    def stop_at_what_is_there(self) -> None:
        self._waits = False

    def next_offset(self, start: dict[str, Any]) -> dict[str, Any]:
        if self._files.stop_requested():
            # Spark asks this source first. While it waits for the answer no batch is planned, so the query can be stopped between two.
            self._files.hold()
            time.sleep(HOLD_S)
            return start
        number = int(start["wake"])
        due_us = self._files.due_us() if number and self._waits else None
        return {"wake": number + 1} if not number or (due_us is not None and due_us <= wall_clock_us()) else start

    def shares(self, end: dict[str, Any]) -> list[Share]:
        seeds = self._tasks if int(end["wake"]) == 1 and self._seed is not None else 0
        return [Share(), *(Share(seeds=(number, seeds)) for number in range(seeds))]

    def read(self, share: Share) -> Iterator[pa.RecordBatch]:
        return run_waking_share(self._setting, self._seed, share, self._first_epoch)

    def commit(self, end: dict[str, Any]) -> None:
        """The driver acknowledges."""

    def close(self) -> None:
        """Nothing is open."""


# On the driver.


class ConnectorWork:
    """Gives the work of a batch to its tasks. Of a batch job, it is planned before."""

    def __init__(self, spark: SparkSession, work: Work | None = None) -> None:
        self._spark = spark
        self._given = work

    def work(self, epoch: int) -> Work:
        if self._given is None or self._given.epoch != epoch:
            raise AssertionError(f"no work is given for epoch {epoch}")
        return self._given

    def begin(self, epoch: int) -> Work:
        """Return the work of the batch that is executed next, for which the tasks that this thread starts are given it."""
        work = self.work(epoch)
        self._spark.sparkContext.setLocalProperty(WORK_PROPERTY, msgspec.json.encode(work).decode())
        return work

    def facts(self, work: Work, facts: Sequence[PartitionFact]) -> list[PartitionFact]:
        """Return what tasks reported, with the partitions that had no rows. Raises `DamagedError` if two tasks read one partition."""
        known: dict[tuple[str, str], PartitionFact] = {}
        for fact in facts:
            if (fact.source, fact.partition) in known:
                raise DamagedError(
                    f"source {fact.source}: Spark divided {fact.partition} between two tasks, so that the order of its rows is lost. Remove "
                    "settings of Spark that divide partitions of Kafka."
                )
            known[fact.source, fact.partition] = fact
        for read in work.reads:
            known.setdefault(
                (read.source, read.partition),
                PartitionFact(
                    source=read.source,
                    partition=read.partition,
                    max_time_us=read.max_time_us,
                    first_us=read.first_us,
                    rows=0,
                ),
            )
        return list(known.values())

    def executed(self) -> None:
        """Called when all tasks of a batch are done, before its epoch is sealed."""

    def finished(self, cut: Cut) -> None:
        """Called when an epoch was released, with its cut."""
        del cut


class ConnectorEpochs(ConnectorWork):
    """The epochs of a stream whose batches Spark plans."""

    def __init__(
        self,
        spark: SparkSession,
        setting: QuerySetting,
        connectors: Mapping[str, SparkConnector],
        sources: Mapping[str, Source],
        files: QueryFiles,
        seed: Seed | None,
        *,
        first_epoch: int,
        ticks: bool,
    ) -> None:
        """`sources`: live ones, which the caller closes. `ticks`: a batch may be due without rows."""
        super().__init__(spark)
        self._connectors = dict(connectors)
        self._files = files
        self._seed = seed
        self._first_epoch = first_epoch
        self._newest_record = files.newest_record()
        self._ticks = ticks
        self._woken = False
        self._tables = BatchTables(setting) if refreshed_steps(setting.stages.plan) else None
        self._sources = {name: _PlannedBySpark(spark_read(source)) for name, source in sources.items()}
        self._planner = Planner(
            setting.stages.sources,
            self._sources,
            rows_max=1,
            bounded=False,
            clock_us=monotonic_clock_us,
            wall_us=wall_clock_us,
            tick_us=tick_us(setting.stages.plan) if ticks else None,
        )

    def starts(self) -> dict[str, dict[PartitionId, Position]]:
        """Return where each source begins, if Spark has no log of it. Raises `SourceError` if what follows the newest cut is gone."""
        epochs = self._files.cut_epochs()
        before = self._files.cut(epochs[-1]) if epochs else None if self._seed is None else self._seed.cut
        found: dict[str, dict[PartitionId, Position]] = {}
        for name, planned in self._sources.items():
            source = planned.source
            known = before.sources[name].partitions if before is not None and name in before.sources else {}
            source.check_there(known)
            found[name] = {
                partition: Position(known[partition].position)
                if partition in known and known[partition].position
                else source.start_of(partition)
                for partition in source.partitions()
            }
            if len(found[name]) > PARTITIONS_MAX:
                raise ConfigError(
                    f"source {name} has {len(found[name]):,} partitions, and Spark's own connector reads at most {PARTITIONS_MAX:,} of a source here. "
                    "Leave spark_connector out: the partitions are then read in turn."
                )
        return found

    def work(self, epoch: int) -> Work:
        begins = epoch == self._first_epoch
        before = (None if self._seed is None else self._seed.cut) if begins else self._files.cut(epoch - 1)
        wanted: set[tuple[str, str, int, int]] = set()
        batch = epoch - self._first_epoch
        if self._tables is not None and batch and before is not None:
            spark = spark_files(self._files.root)
            if spark is None or spark.sync_commit(batch - 1):
                self._tables.ack(before.now_us)
        for number, (name, connector) in enumerate(self._connectors.items(), start=1):
            known = before.sources[name].partitions if before is not None and name in before.sources else {}
            logged = self._files.spark_offset(batch, number)
            before_it = self._files.spark_offset(batch - 1, number) if batch else None
            start = connector.positions(before_it or self._files.spark_start(number))
            end = start if logged is None else connector.positions(logged)
            self._check_start(name, epoch, known, start)
            planned = self._sources[name]
            planned.ends = end
            for partition, until in end.items():
                cut = known.get(partition, PartitionCut(position=0))
                if not cut.position:
                    # One that was added to a topic begins with its first message, or Spark fails.
                    planned.source.begun_at(partition, start.get(partition, Position(1)))
                if until > cut.position:
                    wanted.add((name, partition, cut.position, int(until)))
        work = self._recorded(epoch)
        if work is None:
            seeds = begins and self._seed is not None
            work = self._planner.next_work(_without_done(before, wanted), epoch, seeds=seeds, begun=True)
            if work is not None and self._tables is not None:
                work = self._tables.planned(work, before_us=0 if before is None else before.now_us)
        reads = (
            [] if work is None else [(read.source, read.partition, read.position, read.until) for read in work.reads]
        )
        if work is None or set(reads) != wanted:
            said = "its record" if epoch <= self._newest_record else "its plan"
            raise DamagedError(
                f"epoch {epoch}: Spark's batch {batch} does not read what {said} in {self._files.root} says. Nothing of it was released. Restore the "
                "checkpoint location as a whole, or begin with a new one."
            )
        return work

    def executed(self) -> None:
        for planned in self._sources.values():
            planned.source.check_same()

    def finished(self, cut: Cut) -> None:
        if self._tables is not None:
            self._tables.refresh(cut.now_us)
        for name, planned in self._sources.items():
            planned.source.ack(cut.sources[name].partitions)
        due_us = self._planner.due_us(cut) if self._ticks else None
        if due_us is not None or self._woken:
            self._files.put_due(None if due_us is None else wall_clock_us() + due_us - monotonic_clock_us())
        self._woken = due_us is not None

    def _recorded(self, epoch: int) -> Work | None:
        """The work of an epoch that is sealed, which Spark executes again."""
        record = self._files.record(epoch) if epoch <= self._newest_record else None
        if record is not None and record.work.seeds and self._seed is None:
            raise DamagedError(
                f"Spark starts with its first batch again, which brings the state of a checkpoint, but epochs after {epoch} are sealed. "
                f"Restore the checkpoint location {self._files.root} as a whole."
            )
        return None if record is None else record.work

    def _check_start(
        self, name: str, epoch: int, known: Mapping[str, PartitionCut], start: Mapping[PartitionId, Position]
    ) -> None:
        for partition, cut in known.items():
            position = start.get(PartitionId(partition))
            if cut.position and position != cut.position:
                said = "does not say where" if position is None else f"says {position}"
                raise DamagedError(
                    f"source {name}: epoch {epoch} begins with {partition} at {cut.position}, and Spark's log of {self._files.root} {said}. Nothing was "
                    "read. The location is mixed with another one, or files were removed from it: restore it as a whole, or begin with a new one."
                )


def _without_done(before: Cut | None, wanted: Iterable[tuple[str, str, int, int]]) -> Cut | None:
    """The cut, in which partitions that Spark reads on are not done: as those of a bounded run are."""
    if before is None:
        return None
    sources = dict(before.sources)
    for name, partition, _, _ in wanted:
        cut = sources[name].partitions.get(partition) if name in sources else None
        if cut is not None and cut.done:
            partitions = {**sources[name].partitions, partition: replace(cut, done=False)}
            sources[name] = replace(sources[name], partitions=partitions)
    return replace(before, sources=sources)


class _PlannedBySpark(Source):
    """A source as the planner sees it: there is what Spark reads in the current batch."""

    def __init__(self, source: SparkReadSource) -> None:
        self.source = source
        self.ends: Mapping[PartitionId, Position] = {}

    def partitions(self) -> Sequence[PartitionId]:
        return sorted(self.ends)

    def restore(self, cuts: Mapping[str, PartitionCut]) -> None:
        self.source.restore(cuts)

    def identity(self, partition: PartitionId, position: Position) -> str:
        return self.source.identity(partition, position)

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        raise AssertionError(f"Spark reads {partition} from {position}, ids: {with_positions}")

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        del rows_max
        return ReadPlan(position=max(position, self.ends.get(partition, position)))

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:
        return self.source.idleness(partition, position)
