"""Spark as far as a hosted query uses it, in this process: no JVM, so that hundreds of runs take seconds.

What Spark promises is kept, and what it does not promise is drawn at random: rows come to a shard in any order, a batch that
was not committed is run again from the offset that was logged, state goes back to the version before it, and a process may
die at any step. The code that runs is the one that runs on Spark, from `query.hosted_query` to the sinks; only pyspark's
classes are stood in for. Offsets and commits are files below the checkpoint location, as Spark has them.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Row
from tests.spark.micro_state import Fate, Handle, Location, Shards, SparkRefuses, StateReader

from fordstone.operators.base import Functions
from fordstone.plan.plan import Plan
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted import query as query_module
from fordstone.spark.hosted import source as source_module
from fordstone.spark.hosted.checkpoint import DriverMark
from fordstone.spark.hosted.commit import BatchOutcome, Committer
from fordstone.spark.hosted.packing import spark_hashes
from fordstone.spark.hosted.query import HostedQuery, hosted_query
from fordstone.spark.hosted.sent import HostProcessor

Batches = list[pa.RecordBatch]
Partitions = list[Batches]
"""Record batches by partition."""
BATCHES_MAX = 2000


# Frames.


def _rows(partitions: Partitions) -> list[dict[str, Any]]:
    return [row for batches in partitions for batch in batches for row in batch.to_pylist()]


def _packed(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    columns = {"shard": pa.int32(), "what": pa.int32(), "tag": pa.int32(), "data": pa.binary()}
    arrays = [pa.array([row[name] for row in rows], kind) for name, kind in columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _cut_at_random(rows: Sequence[Mapping[str, Any]], rng: Random) -> Batches:
    batches, start = [], 0
    while start < len(rows):
        size = rng.randint(1, len(rows))
        batches.append(_packed(rows[start : start + size]))
        start += size
    return batches


_TRIES = itertools.count()


@contextmanager
def _task() -> Iterator[None]:
    """What tasks ask pyspark for."""
    TaskContext._getOrCreate()._taskAttemptId = next(_TRIES)
    try:
        yield
    finally:
        TaskContext._setTaskContext(None)


class Frame:
    """A `DataFrame` whose rows are computed on request, each time again."""

    def __init__(self, spark: MicroSpark, make: Callable[[], Partitions]) -> None:
        self._spark = spark
        self._make = make

    def mapInArrow(self, function: Callable[..., Iterable[pa.RecordBatch]], schema: str) -> Frame:  # noqa: N802 - Spark's
        def made() -> Partitions:
            out = []
            for batches in self._make():
                with _task():
                    out.append(list(self._spark.stepped("task", function(iter(batches)))))
            return out

        return Frame(self._spark, made)

    def repartitionByRange(self, count: int, column: str) -> Frame:  # noqa: N802 - Spark's name
        def made() -> Partitions:
            rows = sorted(_rows(self._make()), key=lambda row: row[column])
            assert len(rows) == count
            return [[pa.RecordBatch.from_pylist([row], schema=_SHARES)] for row in rows]

        return Frame(self._spark, made)

    def groupBy(self, column: str) -> _Grouped:  # noqa: N802 - Spark's name
        assert column == "shard"
        return _Grouped(self._spark, self._make)

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        batches = [batch for partition in self._make() for batch in partition]
        return pa.Table.from_batches(batches, schema=_packed([]).schema)


_SHARES = pa.schema([("place", pa.int64()), ("share", pa.binary())])


class _Grouped:
    def __init__(self, spark: MicroSpark, make: Callable[[], Partitions]) -> None:
        self._spark = spark
        self._make = make

    def applyInArrow(self, function: Callable[..., Iterable[pa.RecordBatch]], schema: str) -> Frame:  # noqa: N802 - Spark's
        def made() -> Partitions:
            shuffled = self._spark.shuffled(self._make())
            return [
                list(self._spark.stepped("task", function((pa.scalar(key, pa.int32()),), iter(batches))))
                for key, batches in shuffled.items()
            ]

        return Frame(self._spark, made)


# Streams.


@dataclass(frozen=True)
class StreamFrame:
    """A `DataFrame` on a stream: the source, and the stages after it."""

    spark: MicroSpark
    source: type
    stages: tuple[HostProcessor, ...] = ()

    def groupBy(self, column: str) -> StreamFrame:  # noqa: N802 - Spark's name
        assert column == "shard"
        return self

    def transformWithState(  # noqa: N802 - Spark's name
        self,
        processor: HostProcessor,
        schema: str,
        outputMode: str,  # noqa: N803 - Spark's name
        timeMode: str,  # noqa: N803 - Spark's name
    ) -> StreamFrame:
        assert (outputMode, timeMode) == ("Append", "None")
        return StreamFrame(self.spark, self.source, (*self.stages, processor))

    @property
    def writeStream(self) -> _Writer:  # noqa: N802 - Spark's name
        return _Writer(self)


class _Writer:
    """A `DataStreamWriter`: every call is noted until `start`."""

    def __init__(self, frame: StreamFrame) -> None:
        self._frame = frame
        self._given: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., _Writer]:
        def note(*args: Any, **options: Any) -> _Writer:
            self._given[name] = options or args
            return self

        return note

    def start(self) -> MicroQuery:
        given = self._given
        (committer,), (name, location) = given["foreachBatch"], given["option"]
        assert (given["outputMode"], name) == (("append",), "checkpointLocation")
        return MicroQuery(self._frame, location, committer, available_now=given["trigger"].get("availableNow", False))


class MicroQuery:
    """A streaming query. Nothing happens but by `step`."""

    def __init__(self, frame: StreamFrame, location: str, committer: Committer, *, available_now: bool) -> None:
        self.spark = frame.spark
        self.location = self.spark.location(location)
        self.committer = committer
        self._stages = frame.stages
        reader = frame.source({}).streamReader(None)
        self.reader = reader
        self.location.path.mkdir(parents=True, exist_ok=True)
        (self.location.path / "metadata").write_text("{}")
        with self.spark.clock():
            if available_now:
                reader.prepareForTriggerAvailableNow()

    @property
    def epoch(self) -> int:
        """Of the newest batch that was committed."""
        return self.committer.first_epoch + max(self.location.batches("commits"))

    def step(self) -> bool:
        """Run the next batch; False: there is nothing to do now.

        As Spark decides it: the newest batch that was planned is executed again, unless it is the newest that was committed.
        """
        latest = max(self.location.batches("offsets"), default=-1)
        done = max(self.location.batches("commits"), default=-1)
        if latest == done:
            if done >= 0:
                self.reader.commit(json.loads(self.location.offset(done)))
            text = self._plan(done)
            if text is None:
                return False
            latest = done + 1
            self.spark.fate.step("log")
            self.location.write("offsets", latest, text)
        elif latest < done:
            raise SparkRefuses(f"CONCURRENT_STREAM_LOG_UPDATE: batch {latest} was committed")
        self._run(latest)
        return True

    def run(self) -> int:
        """Run batches until there is nothing to do; gives how many."""
        for number in range(BATCHES_MAX):
            if not self.step():
                return number
        raise AssertionError(f"there is still something to do after {BATCHES_MAX} batches")

    def _plan(self, done: int) -> str | None:
        with self.spark.clock():
            start = self.reader.initialOffset() if done < 0 else json.loads(self.location.offset(done))
            end = self.reader.latestOffset(json.loads(json.dumps(start)), None)
        self.spark.fate.step("plan")
        text = json.dumps(end)
        return None if text == json.dumps(start) else text

    def _run(self, number: int) -> None:
        fate = self.spark.fate
        fate.step("run")
        state = self.location.state_before(number)
        executed: list[str] = []

        def made() -> Partitions:
            end = json.loads(self.location.offset(number))
            start = json.loads(self.location.offset(number - 1)) if number else self.reader.initialOffset()
            partitions: Partitions = []
            for share in self.reader.partitions(start, end):
                # Spark sends shares to its workers.
                partitions.append(list(self.spark.stepped("read", self.reader.read(copy.deepcopy(share)))))
            for depth, processor in enumerate(self._stages, 1):
                partitions = self._hosted(depth, processor, partitions, state)
            executed.append(self.location.store(number, state))
            return partitions

        # Spark gives a frame that is worked out each time it is asked: more than once would be a mistake, not at all too.
        self.committer(Frame(self.spark, made), number)  # type: ignore[arg-type]  # as far as it is used
        assert len(executed) == 1, f"batch {number} was executed {len(executed)} times"
        fate.step("commit")
        self.location.commit(number, executed[0])

    def _hosted(self, depth: int, processor: HostProcessor, partitions: Partitions, state: Shards) -> Partitions:
        handle = Handle(self.spark.fate)
        processor.init(handle)  # type: ignore[arg-type]  # as far as it is used
        out = []
        for key, batches in self.spark.shuffled(partitions).items():
            handle.shard = state.setdefault((depth, key), {})
            rows = (Row(**row) for batch in batches for row in batch.to_pylist())
            given = [row.asDict() for row in processor.handleInputRows((key,), rows, None)]
            self.spark.fate.step("stage")
            out.append(_cut_at_random(given, self.spark.rng))
        processor.close()
        return out


# Spark.


class MicroSpark:
    """A `SparkSession`, and all that outlives the processes that use it."""

    def __init__(self, seed: int = 0, *, cores: int = 2) -> None:
        self.rng = Random(seed)
        self.cores = cores
        self.fate = Fate()
        self.now_us = 1_000_000
        self.conf = SimpleNamespace(set=lambda key, value: None)
        self.sparkContext = SimpleNamespace(master=f"local[{cores}]")  # driver and executors are one process
        self.dataSource = SimpleNamespace(register=self._register)
        self._sources: dict[str, type] = {}
        self._locations: dict[str, Location] = {}

    def query(
        self,
        plan: Plan,
        functions: Functions | None = None,
        *,
        batch: bool = False,
        driver: DriverMark | None = None,
        **options: Any,
    ) -> HostedQuery:
        """A hosted query of a plan, as a process that has just been started lays it out."""
        with (
            mock.patch.object(query_module, "prepared", lambda spark: spark),
            mock.patch.object(query_module, "parallelism", return_value=self.cores),
        ):
            config = SparkConfig(**options)
            return hosted_query(plan, functions or {}, config, self, batch=batch, driver=driver)  # type: ignore[arg-type]

    def start(
        self,
        plan: Plan,
        functions: Functions | None = None,
        *,
        on_batch: Callable[[BatchOutcome], None] = lambda _: None,
        **options: Any,
    ) -> MicroQuery:
        """Start a process with a query."""
        self.fate.log.clear()
        query = self.query(plan, functions, **options)
        with mock.patch.object(query_module, "failpoints_of_process", return_value=SimpleNamespace(hit=self.fate.step)):
            started = query.start(on_batch)
        assert isinstance(started, MicroQuery)
        return started

    def run_batch(self, plan: Plan, functions: Functions | None = None, **options: Any) -> list[BatchOutcome]:
        """Run a plan as a batch job."""
        outcomes: list[BatchOutcome] = []
        self.query(plan, functions, batch=True, bounded=True, **options).run_batch(outcomes.append)
        return outcomes

    def location(self, path: str) -> Location:
        return self._locations.setdefault(path, Location(Path(path)))

    @contextmanager
    def clock(self) -> Iterator[None]:
        """What is planned meanwhile is planned by this clock."""
        with mock.patch.object(source_module, "monotonic_clock_us", self._clock_us):
            yield

    def _clock_us(self) -> int:
        return self.now_us

    def shuffled(self, partitions: Partitions) -> dict[int, Batches]:
        """Rows by shard, those of each shard in any order and in any batches."""
        rows = _rows(partitions)
        self.rng.shuffle(rows)
        found: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            found.setdefault(row["shard"], []).append(row)
        count = len(found)
        places = set((spark_hashes(list(found)) % max(1, count)).tolist())
        assert len(places) == count, f"{count} shards share {len(places)} of Spark's partitions"
        return {key: _cut_at_random(found[key], self.rng) for key in sorted(found, key=lambda _: self.rng.random())}

    def stepped(self, what: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches, each of which is a step."""
        for batch in batches:
            self.fate.step(what)
            yield batch
        self.fate.step(what)

    # What `hosted` and `export` call.

    @property
    def readStream(self) -> Any:  # noqa: N802 - Spark's name
        return SimpleNamespace(format=lambda name: SimpleNamespace(load=lambda: StreamFrame(self, self._sources[name])))

    def createDataFrame(self, table: pa.Table) -> Frame:  # noqa: N802 - Spark's name
        return Frame(self, lambda: [table.to_batches()])

    @property
    def read(self) -> Any:
        return SimpleNamespace(format=lambda name: StateReader(self.location, name, {}))

    def _register(self, source: type) -> None:
        self._sources[source.name()] = source  # type: ignore[attr-defined]
