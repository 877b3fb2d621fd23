"""Rows ahead of the clock (rule 7): they are late, move no time on, and are judged the same when an epoch is computed again."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import polars as pl
import pytest
from tests.simulation.simulator import NoDeadLetters, SimClock

from fordstone import FordstoneError, Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.connectors.base import Chunk, ConnectorSpec, SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.engine.replay import Recorded, ReplaySourceTask
from fordstone.edge.engine.source_task import SourceSetup, SourceTask
from fordstone.edge.engine.task import TaskParts
from fordstone.edge.run import recovered_engine
from fordstone.epochs.manifest import PartitionCut
from fordstone.epochs.store import CheckpointStore
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import ROW_WATERMARK
from fordstone.plan import plan as p
from fordstone.plan.ids import Attempt, PartitionId, Position, TaskId
from fordstone.plan.plan import Guarantee
from fordstone.runtime.chain import Chain, Outlet
from fordstone.runtime.partition import Partition, Share, limit_us
from fordstone.runtime.snapshot import Barrier
from fordstone.testing.memory_disk import MemoryDisk

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
NOW_US = int(NOW.timestamp()) * 1_000_000
HOUR_US = 3_600_000_000
MINUTE_US = 60_000_000
SCHEMA = {"id": "bigint", "ts": "timestamp"}
STEP = p.Source(name="s", connector=ConnectorSpec("memory"), schema=SCHEMA, time="ts", lateness_us=10)


def frame_of(times: list[int | None]) -> pl.DataFrame:
    return pl.DataFrame({"ts": pl.Series(times, dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))})


def judged(partition: Partition, *times: int | None, step: p.Source = STEP) -> tuple[list[int], list[int], int]:
    """The times that are in time, those that are late, and how many of these are ahead."""
    frame = frame_of(list(times))
    found = partition.judged(step, Chunk(frame=frame, position=Position(1)), frame)
    late = [] if found.late is None else found.late["ts"].cast(pl.Int64).to_list()
    return found.in_time["ts"].cast(pl.Int64).to_list(), late, found.ahead


# One partition.


@pytest.mark.parametrize(
    ("times", "in_time", "late", "newest"),
    [
        pytest.param([50, 100], [50, 100], [], 100, id="a tie with the limit is in time"),
        pytest.param([50, 101], [50], [101], 50, id="one more is not"),
        pytest.param([50, 60, 70, 999], [50, 60, 70], [999], 70, id="rows in order are looked at too"),
        pytest.param([999, 50], [50], [999], 50, id="what comes after it is not late for it"),
        pytest.param([50, 999, 40, 39], [50, 40], [999, 39], 50, id="but for what was before it"),
        pytest.param([999, 1_000], [], [999, 1_000], TIME_MIN_US, id="all of them"),
        pytest.param([101, 95, 90, 85, 84, 102], [95, 90, 85], [101, 84, 102], 95, id="late rows keep their order"),
        pytest.param([70, None, 999], [70], [999], 70, id="rows without a time are neither"),
        pytest.param([None], [], [], TIME_MIN_US, id="no row with a time"),
    ],
)
def test_rows_above_the_limit_are_late_and_move_no_time_on(times, in_time, late, newest):
    partition = Partition(name="a", limit_us=100)
    assert judged(partition, *times) == (in_time, late, sum(one is not None and one > 100 for one in times))
    assert partition.max_time_us == newest


def test_the_floor_counts_below_the_limit():
    partition = Partition(name="a", floor_us=60, limit_us=100)
    assert judged(partition, 59, 60, 101, 100) == ([60, 100], [59, 101], 1)


def test_a_partition_whose_time_is_above_the_limit_gives_late_rows_only():
    # Its time came there when nobody minded, in a bounded run for instance.
    partition = Partition(name="a", max_time_us=500, limit_us=100)
    assert judged(partition, 90, 495) == ([], [90, 495], 1)
    assert partition.max_time_us == 500


@pytest.mark.parametrize("seed", range(30))
def test_how_rows_are_cut_into_chunks_makes_no_difference(seed):
    rng = Random(seed)
    times = [rng.choice((rng.randrange(60, 140), rng.randrange(95, 106))) for _ in range(40)]
    expected: tuple[list[int], list[int]] = ([], [])
    newest = TIME_MIN_US
    for one in times:
        expected[one > 100 or one < newest - 10].append(one)
        newest = max(newest, one) if one <= 100 else newest
    partition, at, found = Partition(name="a", limit_us=100), 0, ([], [])  # type: ignore[var-annotated]
    while at < len(times):
        size = rng.choice((1, 2, 5, 40))
        in_time, late, _ = judged(partition, *times[at : at + size])
        found[0].extend(in_time)
        found[1].extend(late)
        at += size
    assert found == expected
    assert partition.max_time_us == newest


@pytest.mark.parametrize("seed", range(10))
def test_each_row_carries_the_watermark_of_its_partition_as_it_was_then(seed):
    rng = Random(seed)
    times = [rng.randrange(60, 110) for _ in range(40)]
    wanted, newest, floor_us = [], TIME_MIN_US, 65
    for one in times:
        watermark_us = max(newest - 10, floor_us)
        if one > 100 or one < watermark_us:
            wanted.append((one, TIME_MAX_US if one > 100 else watermark_us))
        newest = max(newest, one) if one <= 100 else newest
    partition, at, found = Partition(name="a", limit_us=100, floor_us=floor_us), 0, []
    while at < len(times):
        size = rng.choice((1, 2, 5, 40))
        frame = frame_of(list(times[at : at + size]))
        late = partition.judged(STEP, Chunk(frame=frame, position=Position(1)), frame).late
        found += [] if late is None else late.select(pl.col("ts").cast(pl.Int64), ROW_WATERMARK).rows()
        at += size
    assert found == wanted


def test_what_is_reserved_for_at_most_once_is_a_time_that_counts():
    partition = Partition(name="a", limit_us=100)
    frame = frame_of([70, 999, None, 2**62 + 1])
    assert partition.newest_us(STEP, Chunk(frame=frame, position=Position(1))) == 70
    ahead = frame_of([999])
    assert partition.newest_us(STEP, Chunk(frame=ahead, position=Position(1))) == TIME_MIN_US
    endless = Partition(name="a", max_time_us=5)
    assert endless.newest_us(STEP, Chunk(frame=frame, position=Position(1))) == 999


@pytest.mark.parametrize(
    ("changes", "bounded", "limit"),
    [
        ({"max_ahead_us": 7}, False, 1_007),
        ({"max_ahead_us": None}, False, TIME_MAX_US),
        ({"max_ahead_us": 7}, True, TIME_MAX_US),
        ({"max_ahead_us": 7, "time": None}, False, TIME_MAX_US),
        ({"max_ahead_us": 7, "declares_time": True}, False, TIME_MAX_US),
        ({"max_ahead_us": TIME_MAX_US}, False, TIME_MAX_US),
    ],
)
def test_there_is_a_limit_only_where_the_clock_says_something_about_the_rows(changes, bounded, limit):
    step = msgspec.structs.replace(STEP, **changes)
    assert limit_us(step, wall_us=1_000, clock_us=2_000, watermark_us=1_007, bounded=bounded) == limit


def test_a_cut_of_an_older_version_has_no_limit():
    assert msgspec.json.decode(b'{"position": 3}', type=PartitionCut).limit_us == TIME_MAX_US


def test_each_stage_of_an_epoch_has_its_own_limit_when_it_is_replayed():
    share = Share({}, now_us=0)
    share.start([PartitionId("memory-000000")], bounded=False, watermark_us=TIME_MIN_US, limit_us=100, now_us=0)
    share.partitions["memory-000000"].position = 3
    share.limit(200)
    share.freeze_stages(Attempt(1), Attempt(0))  # an attempt that is given up
    share.partitions["memory-000000"].position = 5
    share.limit(300)
    cuts, stages = share.cuts(), share.freeze_stages(Attempt(2), Attempt(0))

    source = MemorySource([[(number, NOW) for number in range(9)]])
    parts = TaskParts(
        id=TaskId("s/0"),
        chain=Chain([], [], subtask=0),
        outputs=[],
        pending=deque(),
        reports=cast("Any", SimpleNamespace(acknowledge=lambda _: None)),
        clock=SimClock(),
    )
    opened = open_source(memory(source), SourceOptions(schema=Schema.of(SCHEMA), bounded=False))
    setup = SourceSetup(step=STEP, source=opened, batch_rows=1, with_ids=False, dead_letters=Outlet("unread"))
    again = ReplaySourceTask(parts, setup)
    again.begin(Recorded(stages=stages, end=cuts, bounded=False))
    seen = set()
    while not again.reached:
        again.step()
        seen |= {(cut.position, cut.limit_us) for cut in again.cuts().values()}
    assert sorted(seen) == [(0, 100), (1, 100), (2, 100), (3, 100), (3, 200), (4, 200), (5, 200)]
    assert not again.step(), "it reads no further than the cut"
    again.pass_barrier(Barrier(attempt=Attempt(3), committed=Attempt(0)))
    assert {cut.limit_us for cut in again.cuts().values()} == {300}


# What users say.


@pytest.mark.parametrize(
    ("options", "max_ahead_us"),
    [
        ({"time": "ts"}, HOUR_US),
        ({"time": "ts", "max_ahead": "5s"}, 5_000_000),
        ({"time": "ts", "max_ahead": timedelta(minutes=1)}, MINUTE_US),
        ({"time": "ts", "max_ahead": None}, None),
        ({}, None),
    ],
)
def test_an_hour_is_believed_unless_set_otherwise(options, max_ahead_us):
    pipeline = Pipeline("p")
    pipeline.source("s", memory([]), schema=SCHEMA, **options).sink("out", memory([]))
    (step, _) = pipeline.plan().steps
    assert isinstance(step, p.Source)
    assert step.max_ahead_us == max_ahead_us


def test_what_is_believed_must_be_more_than_nothing():
    with pytest.raises(FordstoneError, match="source s: max_ahead"):
        Pipeline("p").source("s", memory([]), schema=SCHEMA, time="ts", max_ahead="0s")


# The engine.


def at(us: int) -> datetime:
    return NOW + timedelta(microseconds=us)


@dataclass
class Node:
    """An engine over one source, stepped by hand."""

    guarantee: Guarantee = "exactly_once"
    max_ahead: str | None = "1h"
    idle_after: str | None = None
    parallelism: int = 1
    bounded: bool = False
    state_bytes_max: int | None = None
    checkpoint_timeout: str = "10ms"
    source: MemorySource = field(default_factory=lambda: MemorySource([[]]))
    clock: SimClock = field(default_factory=lambda: SimClock(NOW_US))
    disk: MemoryDisk = field(default_factory=MemoryDisk)

    def __post_init__(self) -> None:
        self.windows, self.late = MemorySink(), MemorySink()
        pipeline = Pipeline("ahead", guarantee=self.guarantee)
        rows = pipeline.source(
            "rows", memory(self.source), schema=SCHEMA, time="ts", max_ahead=self.max_ahead, idle_after=self.idle_after
        )
        made = rows.group_by().window(tumbling("1m")).agg(ids="collect(id)")
        made.sink("windows", memory(self.windows))
        made.late.sink("late", memory(self.late))
        self.plan = pipeline.plan()
        self.start()

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.disk, pipeline="ahead", node="n", compression="none", keep=3)

    def start(self) -> None:
        config = RunConfig(
            node="n", bounded=self.bounded, parallelism=self.parallelism, interval="2ms",
            checkpoint_timeout=self.checkpoint_timeout, state_bytes_max=self.state_bytes_max,
        )  # fmt: skip
        environment = Environment(
            clock=self.clock, disk=self.disk, choose=lambda _: 0, dead_letters=lambda _: NoDeadLetters()
        )
        self.engine: Engine = recovered_engine(self.plan, {}, config, environment, self.store, None)

    def kill(self) -> None:
        self.disk.kill()

    def step(self, *, rounds: int = 300, sources_only: bool = False) -> None:
        for _ in range(rounds):
            self.clock.now_us += 100
            for one in self.engine.steppables():
                if not sources_only or isinstance(one, SourceTask) or one is self.engine.coordinator:
                    one.step()

    def seal(self) -> int:
        """Step until the next epoch has been sealed and released; return its number."""
        epoch = self.engine.writer.epoch
        while self.engine.writer.epoch == epoch or self.engine.coordinator.running:
            self.step(rounds=1)
        return self.engine.writer.epoch

    def damage(self, *epochs: int) -> None:
        for epoch in epochs:
            self.disk.damage(f"ahead/n/manifests/{epoch:012}.json", b"not a manifest")

    def found(self) -> tuple[list[list[int]], list[int]]:
        """The ids in windows, and those that are late."""
        windows = [row for frame in self.windows.frames() for row in frame.select("window_start", "ids").rows()]
        late = [one for frame in self.late.frames() for one in frame["id"]]
        return [sorted(ids) for _, ids in sorted(windows)], sorted(late)


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
def test_a_row_one_year_ahead_closes_no_window_and_is_late(guarantee, parallelism):
    node = Node(guarantee=guarantee, parallelism=parallelism)
    node.source.add_partition()
    node.source.append(0, [(1, at(0)), (2, at(365 * 24 * HOUR_US)), (3, at(1_000_000))])
    node.source.append(1, [(4, at(2_000_000))])
    node.step()
    assert node.found() == ([], [2])
    assert node.engine.progress().rows_late == 1
    node.source.append(0, [(5, at(61_000_000))])
    node.source.append(1, [(6, at(62_000_000))])
    node.step()
    assert node.found() == ([[1, 3, 4]], [2])


def test_a_row_that_is_ahead_by_less_closes_windows_as_ever():
    node = Node()
    node.source.append(0, [(1, at(0)), (2, at(HOUR_US)), (3, at(1_000_000))])
    node.step()
    assert node.found() == ([[1]], [3])


@pytest.mark.parametrize("node_of", [{"max_ahead": None}, {"bounded": True}])
def test_every_row_is_believed_without_a_limit_and_in_bounded_runs(node_of: dict[str, Any]):
    source = MemorySource([[(1, at(0)), (2, at(365 * 24 * HOUR_US)), (3, at(1_000_000))]])
    node = Node(source=source, **node_of)
    node.step()
    assert node.found()[0][0] == [1]
    assert node.found()[1] == [3]


def test_the_limit_moves_on_with_the_clock_at_barriers():
    node = Node()
    node.source.append(0, [(1, at(0)), (2, at(2 * HOUR_US))])
    node.step()
    node.clock.now_us += HOUR_US
    node.step()
    node.source.append(0, [(3, at(2 * HOUR_US))])
    node.step()
    assert node.found() == ([[1]], [2])


def test_a_clock_that_is_set_back_makes_no_row_late():
    node = Node()
    node.source.append(0, [(1, at(0))])
    node.step()
    node.kill()
    node.clock.set_us = -NOW_US
    node.start()
    node.source.append(0, [(2, at(MINUTE_US))])
    node.step()
    node.source.append(0, [(3, at(2 * MINUTE_US))])
    node.step()
    assert node.found() == ([[1], [2]], [])


@pytest.mark.parametrize("killed", [False, True])
def test_a_clock_that_jumped_forward_and_was_set_right_protects_again(killed):
    node = Node()
    node.source.append(0, [(1, at(0))])
    node.step()
    node.clock.set_us = 365 * 24 * HOUR_US
    node.seal()
    node.clock.set_us = 0
    if killed:
        node.kill()
        node.start()
    node.seal()
    node.source.append(0, [(2, at(30 * 24 * HOUR_US)), (3, at(MINUTE_US)), (4, at(2 * MINUTE_US))])
    node.step()
    assert node.found() == ([[1], [3]], [2])


def test_the_clock_of_operators_goes_on_while_that_of_the_machine_is_set_back():
    node = Node()
    node.source.append(0, [(1, at(0))])
    first = node.seal()
    node.clock.set_us = -24 * HOUR_US
    node.clock.now_us += MINUTE_US
    second = node.seal()
    node.clock.now_us += MINUTE_US
    third = node.seal()
    clock_us = [node.store.cut(epoch).now_us for epoch in (first, second, third)]
    assert clock_us[0] >= NOW_US
    assert MINUTE_US <= clock_us[1] - clock_us[0] < 2 * MINUTE_US
    assert MINUTE_US <= clock_us[2] - clock_us[1] < 2 * MINUTE_US


@pytest.mark.parametrize("parallelism", [1, 2])
def test_an_epoch_computed_again_much_later_believes_what_it_believed(parallelism):
    node = Node(parallelism=parallelism)
    node.source.append(0, [(1, at(0))])
    node.seal()
    node.source.append(0, [(2, at(2 * HOUR_US)), (3, at(MINUTE_US)), (4, at(3 * HOUR_US))])
    sealed = [node.seal(), node.seal()]
    assert node.found() == ([[1]], [2, 4])
    node.kill()
    node.damage(*sealed)
    node.clock.now_us += 24 * HOUR_US
    node.start()
    assert [cut.epoch for cut in node.engine.resumption.replay] == sealed
    node.step()
    node.source.append(0, [(5, at(4 * HOUR_US))])
    node.step()
    # By now the clock has passed them: the newest is believed, and those of before stay late.
    assert node.found() == ([[1], [3]], [2, 4])


def test_an_attempt_that_was_given_up_moves_the_limit_within_the_epoch_and_that_is_repeated_too():
    node = Node()
    node.source.append(0, [(1, at(0))])
    before = node.seal()
    node.source.append(0, [(2, at(90 * MINUTE_US))])
    node.step(rounds=3, sources_only=True)
    node.clock.set_us += HOUR_US
    while not node.engine.coordinator.given_up:
        node.step(rounds=1, sources_only=True)
    node.source.append(0, [(3, at(91 * MINUTE_US))])
    node.step(rounds=3, sources_only=True)
    assert node.seal() == before + 1, "all of this is one epoch"
    assert node.found() == ([[1]], [2])
    limits = [stage["memory-000000"].limit_us for stage in node.store.cut(before + 1).sources["rows"].stages]
    assert min(limits) >= NOW_US + 2 * HOUR_US, "row 2 came before the first of them"
    node.kill()
    node.damage(before + 1)
    node.clock.now_us += 24 * HOUR_US
    node.start()
    assert [cut.epoch for cut in node.engine.resumption.replay] == [before + 1]
    node.source.append(0, [(4, at(93 * MINUTE_US))])
    node.step()
    assert node.found() == ([[1], [3]], [2])


def test_a_row_ahead_does_not_move_the_time_that_is_reserved_for_at_most_once():
    node = Node(guarantee="at_most_once")
    node.source.append(0, [(1, at(0)), (2, at(365 * 24 * HOUR_US))])
    node.step()
    node.kill()
    node.start()
    node.source.append(0, [(3, at(1_000_000)), (4, at(MINUTE_US))])
    node.step()
    windows, late = node.found()
    assert late == [2]
    assert Counter(one for ids in windows for one in ids)[3] == 1


def test_a_partition_whose_clock_is_wrong_is_as_good_as_silent():
    node = Node(idle_after="10s")
    node.source.add_partition()
    node.source.append(0, [(1, at(0))])
    node.source.append(1, [(2, at(0))])
    node.step()
    for number in range(8):
        node.source.append(0, [(10 + number, at((number + 1) * MINUTE_US))])
        node.source.append(1, [(100 + number, at(365 * 24 * HOUR_US))])
        node.clock.now_us += 6_000_000
        node.step(rounds=100)
    windows, late = node.found()
    assert late == list(range(100, 108))
    assert windows[:2] == [[1, 2], [10]]
