"""The streaming source of a query: all sources of the pipeline as one, with the work of a batch as its offset.

Spark calls the planner's half in a process beside the driver, and `read` in its tasks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from fordstone.connectors.base import system_clock_us
from fordstone.epochs.manifest import Cut
from fordstone.errors import CheckpointError
from fordstone.runtime.clock import SystemClock
from fordstone.spark.hosted.chains import tick_us
from fordstone.spark.hosted.cuts import CutFiles
from fordstone.spark.hosted.feed import Feed, QuerySetting, opened
from fordstone.spark.hosted.packing import PACKED, Packed, shard_keys
from fordstone.spark.hosted.planner import Planner
from fordstone.spark.hosted.seed import Seed
from fordstone.spark.hosted.stop_mark import StopMark
from fordstone.spark.hosted.work import PartitionRead, Work, first_offset, offset_of, read_work
from fordstone.spark.session.worker_heap import leave_alone_what_stays

SOURCE_NAME: Final = "fordstone-pipeline"
RECORDS_BYTES_MAX: Final = 4 * 1024 * 1024
"""So much goes to Spark at a time."""
_ARROW: Final = pa.schema([("shard", pa.int32()), ("what", pa.int32()), ("tag", pa.int32()), ("data", pa.binary())])


class Share(InputPartition):
    """What one task does."""

    def __init__(
        self, reads: Sequence[PartitionRead], work: Work | None = None, seeds: tuple[int, int] | None = None
    ) -> None:
        """`seeds`: this task brings every n-th run of the checkpoint, beginning with the i-th: `(i, n)`."""
        super().__init__(None)
        self.reads = tuple(reads)
        self.work = work
        self.seeds = seeds


def assign(reads: Sequence[PartitionRead], tasks: int) -> list[list[PartitionRead]]:
    """Reads for so many tasks: large ones first, each to the task with least. There is always one task."""
    hands: list[list[PartitionRead]] = [[] for _ in range(min(tasks, max(1, len(reads))))]
    sizes = [0] * len(hands)
    for read in sorted(reads, key=lambda read: read.position - read.until):
        least = sizes.index(min(sizes))
        hands[least].append(read)
        sizes[least] += read.until - read.position
    return hands


def batches(rows: Iterator[Packed], keys: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Packed rows as Spark takes them."""
    held: list[Packed] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row.data)
        if size >= RECORDS_BYTES_MAX:
            yield _record_batch(held, keys)
            held, size = [], 0
    if held:
        yield _record_batch(held, keys)


def _record_batch(rows: Sequence[Packed], keys: Sequence[int]) -> pa.RecordBatch:
    columns = [
        pa.array([keys[row.shard] for row in rows], pa.int32()),
        pa.array([int(row.what) for row in rows], pa.int32()),
        pa.array([row.tag for row in rows], pa.int32()),
        pa.array([row.data for row in rows], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_ARROW)


class PipelineReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches, and reads them in tasks."""

    def __init__(self, setting: QuerySetting, cuts: CutFiles, seed: Seed | None, *, rows_max: int, tasks: int) -> None:
        self._setting = setting
        self._cuts = cuts
        self._seed = seed
        self._rows_max = rows_max
        self._tasks = tasks
        self._planner: Planner | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Before the first batch."""
        return first_offset(self._seed.epoch if self._seed is not None else 0)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Read what is there now and no more."""
        if not self._setting.bounded:
            self._planned().stop_at_what_is_there()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002, N802 - Spark's
        """The work of the next batch; `start` itself: nothing to do."""
        if StopMark(self._cuts.root).stands():
            return start
        epoch = int(start["epoch"])
        begins = "work" not in start
        work = self._planned().next_work(
            self._before(epoch, begins=begins), epoch + 1, seeds=begins and self._seed is not None
        )
        return start if work is None else offset_of(work)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:  # noqa: ARG002 - the end says all
        """The batch's work, dealt out to tasks: large parts first, each to the task with least."""
        work = read_work(end)
        shares = [
            Share(hand, work if number == 0 else None) for number, hand in enumerate(assign(work.reads, self._tasks))
        ]
        if work.seeds:
            shares += [Share((), None, (number, self._tasks)) for number in range(self._tasks)]
        return shares

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One task's share."""
        if not isinstance(partition, Share):
            raise TypeError(f"{partition!r} is not a share of a batch")
        rows: Iterator[Packed] = iter(())
        if partition.seeds is not None and self._seed is not None:
            rows = self._seed.rows(self._setting, *partition.seeds)
        if partition.reads or partition.work is not None:
            rows = itertools.chain(rows, Feed(self._setting).run(partition.reads, partition.work))
        yield from batches(rows, shard_keys(self._setting.shards))
        leave_alone_what_stays()

    def commit(self, end: dict[str, Any]) -> None:
        """Tell sources whose far ends keep rows for us what will never be asked for again: all up to `end`."""
        if "work" not in end or not self._planned().lets_go:
            return
        try:
            cut = self._cuts.read(int(end["epoch"]))
        except (CheckpointError, OSError):
            return  # the next one will tell
        self._planned().ack(cut)

    def _planned(self) -> Planner:
        if self._planner is None:
            steps = self._setting.stages().sources
            sources = {step.name: opened(step, bounded=self._setting.bounded) for step in steps}
            self._planner = Planner(
                steps,
                sources,
                rows_max=self._rows_max,
                bounded=self._setting.bounded,
                clock_us=system_clock_us,
                wall_us=SystemClock().wall_us,
                tick_us=None if self._setting.bounded else tick_us(self._setting.stages().plan),
            )
        return self._planner

    def _before(self, epoch: int, *, begins: bool) -> Cut | None:
        if begins:
            return None if self._seed is None else self._seed.cut
        return self._cuts.read(epoch)


def pipeline_source(
    setting: QuerySetting, cuts: CutFiles, seed: Seed | None, *, rows_max: int, tasks: int
) -> type[DataSource]:
    """A data source class for one query. Spark sends the class itself to its workers, with what it holds."""

    class PipelineSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return SOURCE_NAME

        def schema(self) -> str:
            return PACKED

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's name
            return PipelineReader(setting, cuts, seed, rows_max=rows_max, tasks=tasks)

    return PipelineSource
