"""The work of a batch and the cut after it: facts that do not fit are refused, and time does not depend on how it was reported.

What the next batch reads: how much of which partition, what joins, falls idle, comes back and ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fordstone.connectors import files
from fordstone.connectors.base import ConnectorSpec, Reader, ReadPlan, Source
from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.errors import DamagedError, SourceError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.partitions import SourceState
from fordstone.spark.hosted import plan_batches as planner_module
from fordstone.spark.hosted.plan_batches import (
    PartitionFact,
    PartitionRead,
    Planner,
    SourceClock,
    SourceTime,
    SourceTimes,
    Work,
    cut_after,
    first_offset,
    offset_of,
    partition_watermark_us,
    read_clock,
    read_work,
    shortens,
    source_times,
    time_of,
)
from fordstone.spark.hosted.source import opened

LATENESS_US = 10


@dataclass
class Table:
    """A partition: how many rows it has, and whether it can grow."""

    rows: int
    whole: bool = False


@dataclass
class FakeSource(Source):
    """Partitions of a test, whose positions are row numbers."""

    tables: dict[str, Table] = field(default_factory=dict)
    bounded: bool = False
    asked: list[str] = field(default_factory=list)

    def partitions(self) -> Sequence[PartitionId]:
        return [PartitionId(name) for name in sorted(self.tables)]

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        raise AssertionError("a planner reads nothing")

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        self.asked.append(partition)
        table = self.tables[partition]
        found = max(int(position), min(table.rows, position + rows_max))
        return ReadPlan(position=Position(found), ended=found >= table.rows and (self.bounded or table.whole))


@dataclass
class Plans:
    """A planner beside a source, with a clock; facts are made up: rows of partition x at position n have time n."""

    rows: dict[str, int]
    bounded: bool = False
    rows_max: int = 100
    idle_after_us: int | None = None
    time: str | None = "ts"
    now_us: int = 0
    cut: Cut | None = None
    epoch: int = 0
    ahead_us: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = FakeSource({name: Table(rows) for name, rows in self.rows.items()}, self.bounded)
        self.restart()

    def restart(self) -> None:
        step = p.Source(
            name="s",
            connector=ConnectorSpec(kind="fake"),
            schema={"ts": "timestamp"},
            time=self.time,
            lateness_us=LATENESS_US,
            idle_after_us=self.idle_after_us,
        )
        self.planner = Planner(
            (step,), {"s": self.source}, rows_max=self.rows_max, bounded=self.bounded, clock_us=lambda: self.now_us
        )

    def plan(self, **more: Any) -> Work | None:
        return self.planner.next_work(self.cut, self.epoch + 1, **more)

    def step(self) -> Work | None:
        """Plan a batch and carry it out."""
        work = self.plan()
        if work is None:
            return None
        facts = [
            PartitionFact(
                source="s",
                partition=read.partition,
                max_time_us=max(read.max_time_us, read.until + self.ahead_us.get(read.partition, 0))
                if read.until > read.position
                else read.max_time_us,
                rows=read.until - read.position,
            )
            for read in work.reads
        ]
        self.cut = cut_after(self.cut, work, facts, {"s": LATENESS_US})
        self.epoch = work.epoch
        return work

    def steps(self, most: int = 50) -> list[Work]:
        found = []
        while (work := self.step()) is not None:
            found.append(work)
            assert len(found) <= most, "there is no end to it"
        return found

    @property
    def partitions(self) -> dict[str, PartitionCut]:
        return {} if self.cut is None else self.cut.sources["s"].partitions

    @property
    def watermark_us(self) -> int:
        assert self.cut is not None
        return self.cut.sources["s"].watermark_us


def spans(work: Work | None) -> dict[str, tuple[int, int]]:
    assert work is not None
    return {read.partition: (read.position, read.until) for read in work.reads}


# How much.


def test_the_rows_of_a_batch_are_shared_out_fairly() -> None:
    plans = Plans({"a": 1000, "b": 1000, "c": 1000, "d": 0}, rows_max=90)
    assert spans(plans.step()) == {"a": (0, 30), "b": (0, 30), "c": (0, 30)}
    assert spans(plans.step()) == {"a": (30, 60), "b": (30, 60), "c": (30, 60)}


def test_of_more_partitions_than_rows_each_gives_one() -> None:
    assert spans(Plans({"a": 9, "b": 9, "c": 9}, rows_max=2).step()) == {"a": (0, 1), "b": (0, 1), "c": (0, 1)}


def test_what_has_nothing_new_is_not_read() -> None:
    plans = Plans({"a": 5, "b": 0})
    assert spans(plans.step()) == {"a": (0, 5)}
    assert plans.step() is None
    plans.source.tables["b"].rows = 3
    assert spans(plans.step()) == {"b": (0, 3)}
    assert plans.step() is None


def test_of_more_partitions_than_a_batch_takes_those_furthest_behind_in_time_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner_module, "PARTITIONS_MAX", 2)
    plans = Plans({"a": 30, "b": 30, "c": 30}, rows_max=20, ahead_us={"a": 1000})
    assert list(spans(plans.step())) == ["a", "b"]
    # c has not been read at all, and b is far behind a.
    assert list(spans(plans.step())) == ["c", "b"]
    # What waits for its turn holds time back.
    assert plans.watermark_us == 10 - LATENESS_US


def test_every_row_is_read_once_whatever_the_shares() -> None:
    for rows_max in (1, 3, 7, 1000):
        plans = Plans({"a": 20, "b": 3, "c": 11}, rows_max=rows_max, bounded=True)
        ends = dict.fromkeys("abc", 0)
        for work in plans.steps():
            for name, (start, until) in spans(work).items():
                assert start == ends[name]
                ends[name] = until
        assert ends == {"a": 20, "b": 3, "c": 11}


# Time.


def test_time_is_that_of_the_partition_furthest_behind() -> None:
    plans = Plans({"a": 100, "b": 40}, rows_max=1000)
    plans.steps()
    assert plans.watermark_us == 40 - LATENESS_US


def test_an_empty_partition_that_is_waited_for_holds_time_back() -> None:
    plans = Plans({"a": 100, "b": 0}, rows_max=1000)
    plans.steps()
    assert plans.watermark_us == TIME_MIN_US


def test_a_partition_that_joins_begins_where_time_stands() -> None:
    plans = Plans({"a": 100}, rows_max=1000)
    plans.steps()
    plans.source.tables["b"] = Table(5)
    work = plans.step()
    assert work is not None
    assert work.changed == {"s": {"b": PartitionCut(position=0, floor_us=90)}}
    assert [(read.partition, read.floor_us) for read in work.reads] == [("b", 90)]
    assert plans.watermark_us == 90


def test_a_source_without_partitions_holds_nobody_back() -> None:
    """As on the edge. It was waited for before its first file came."""
    work = Plans({}).plan(seeds=True)
    assert work is not None
    assert work.clocks["s"].state == "idle"


def test_a_source_without_time_tells_none() -> None:
    plans = Plans({"a": 5, "b": 0}, time=None)
    plans.steps()
    assert plans.watermark_us == TIME_MIN_US


# Idleness.


def test_a_silent_partition_falls_idle_and_no_longer_holds_time_back() -> None:
    plans = Plans({"a": 100, "b": 20}, idle_after_us=1000, rows_max=1000)
    plans.steps()
    assert plans.watermark_us == 20 - LATENESS_US
    plans.now_us = 999
    assert plans.step() is None
    plans.now_us = 1000
    plans.source.tables["a"].rows = 200
    work = plans.step()
    assert work is not None
    assert list(work.changed["s"]) == ["b"]
    assert plans.partitions["b"] == PartitionCut(position=20, max_time_us=20, idle=True)
    assert plans.watermark_us == 200 - LATENESS_US


def test_a_partition_that_comes_back_is_late_below_the_time_that_went_on_without_it() -> None:
    plans = Plans({"a": 100, "b": 20}, idle_after_us=1000, rows_max=1000)
    plans.steps()
    plans.now_us, plans.source.tables["a"].rows = 1000, 200
    plans.steps()
    plans.source.tables["b"].rows = 25
    work = plans.step()
    assert work is not None
    assert work.changed["s"]["b"] == PartitionCut(position=20, max_time_us=20, floor_us=190)
    assert spans(work) == {"b": (20, 25)}
    assert plans.watermark_us == 190
    # It is waited for again.
    plans.source.tables["a"].rows = 300
    plans.step()
    assert plans.watermark_us == 190


def test_when_all_are_idle_time_stands_still_and_nobody_waits_for_it() -> None:
    plans = Plans({"a": 100, "b": 20}, idle_after_us=1000, rows_max=1000)
    plans.steps()
    plans.now_us = 1000
    work = plans.step()
    assert work is not None
    assert work.clocks["s"].state == "idle"
    assert plans.watermark_us == 20 - LATENESS_US
    plans.now_us = 5000
    assert plans.step() is None


def test_silence_is_counted_again_by_another_process() -> None:
    plans = Plans({"a": 100, "b": 20}, idle_after_us=1000, rows_max=1000)
    plans.steps()
    plans.now_us = 900
    plans.restart()
    assert plans.step() is None
    plans.now_us = 1500
    assert plans.step() is None
    plans.now_us = 1900
    assert plans.step() is not None
    assert plans.partitions["a"].idle


def test_a_partition_that_was_read_and_is_gone_has_ended() -> None:
    """It would have held time back for ever."""
    plans = Plans({"a": 100, "b": 20}, rows_max=1000)
    plans.steps()
    del plans.source.tables["b"]
    plans.steps()
    assert plans.partitions["b"].done
    assert plans.watermark_us == 90


def test_a_partition_that_is_gone_with_rows_that_were_never_read_is_an_error() -> None:
    plans = Plans({"a": 100, "b": 20}, rows_max=10)
    plans.step()
    del plans.source.tables["b"]
    with pytest.raises(SourceError, match="b is gone, and was read only up to 5"):
        plans.step()


def test_an_empty_file_that_is_gone_is_no_loss() -> None:
    """A writer made it, and gave it another name when it had something to write."""
    plans = Plans({"a": 100, "b": 0}, rows_max=1000)
    plans.steps()
    plans.source.tables["c"] = plans.source.tables.pop("b")
    plans.steps()
    assert plans.partitions["b"].done


def test_a_file_that_another_process_knew_and_never_read_is_missed() -> None:
    plans = Plans({"a": 100, "b": 0}, rows_max=1000)
    plans.steps()
    plans.restart()
    del plans.source.tables["b"]
    with pytest.raises(SourceError, match="b is gone, and was read only up to 0"):
        plans.step()


# Ends.


def test_bounded_input_ends_when_all_of_it_is_read() -> None:
    plans = Plans({"a": 30, "b": 5, "c": 0}, bounded=True, rows_max=20)
    works = plans.steps()
    assert [work.clocks["s"].state for work in works] == ["open"] * (len(works) - 1) + ["ended"]
    assert plans.cut is not None
    assert plans.cut.ended
    assert plans.watermark_us == TIME_MAX_US
    assert all(cut.done for cut in plans.partitions.values())


def test_bounded_input_with_nothing_in_it_ends_too() -> None:
    plans = Plans({}, bounded=True)
    (work,) = plans.steps()
    assert work.clocks["s"].state == "ended"
    assert plans.cut is not None
    assert plans.cut.ended


def test_bounded_input_that_no_file_matches_is_an_error(tmp_path: Path) -> None:
    step = p.Source(name="s", connector=files(str(tmp_path / "*.jsonl")), schema={"n": "bigint"})
    planner = Planner((step,), {"s": opened(step, bounded=True)}, rows_max=9, bounded=True, clock_us=lambda: 0)
    with pytest.raises(SourceError, match="no file matches"):
        planner.next_work(None, 1)


def test_bounded_input_is_what_was_there_at_first() -> None:
    plans = Plans({"a": 5}, bounded=True)
    first = plans.plan()
    plans.source.tables["b"] = Table(5)
    assert plans.plan() == first


def test_what_was_idle_on_the_edge_is_read_to_its_end_where_input_is_bounded() -> None:
    """A bounded query that began from a checkpoint with an idle partition never ended, and closed no window."""
    plans = Plans({"a": 100, "b": 20}, bounded=True)
    plans.cut = Cut(
        epoch=4,
        sources={
            "s": SourceCut(
                partitions={
                    "a": PartitionCut(position=100, max_time_us=100),
                    "b": PartitionCut(position=20, max_time_us=20, idle=True),
                },
                watermark_us=90,
            )
        },
    )
    plans.epoch = 4
    (work,) = plans.steps()
    assert work.changed["s"] == {"b": PartitionCut(position=20, max_time_us=20, floor_us=90)}
    assert plans.cut.ended


def test_bounded_input_of_which_a_file_is_gone_has_no_end() -> None:
    """It came to no end, and was released as if it had."""
    plans = Plans({"a": 5, "b": 9}, bounded=True, rows_max=4)
    plans.step()
    del plans.source.tables["b"]
    plans.restart()
    with pytest.raises(SourceError, match="b is gone, and had been read up to 2"):
        plans.step()


def test_a_file_that_never_grows_is_read_once_although_input_has_no_end() -> None:
    """It was read again, with no rows, by one batch after the other."""
    plans = Plans({"a": 30, "b": 7}, rows_max=20)
    for table in plans.source.tables.values():
        table.whole = True
    works = plans.steps()
    assert sum(until - start for work in works for start, until in spans(work).values()) == 37
    assert all(cut.done and not cut.idle for cut in plans.partitions.values())
    assert plans.cut is not None
    assert not plans.cut.ended
    # Those that ended hold nobody back: a file that comes later decides alone.
    assert plans.watermark_us == 30 - LATENESS_US
    plans.source.tables["c"] = Table(100, whole=True)
    plans.steps()
    assert plans.watermark_us == 100 - LATENESS_US


def test_what_has_ended_never_falls_idle_and_is_asked_about_once_a_process() -> None:
    plans = Plans({"a": 5}, idle_after_us=1000)
    plans.source.tables["a"].whole = True
    plans.steps()
    plans.now_us = 5000
    plans.source.asked.clear()
    assert plans.step() is None
    assert plans.source.asked == []
    plans.restart()
    assert plans.step() is None
    assert plans.step() is None
    assert plans.source.asked == ["a"]
    assert plans.partitions["a"].done


def test_a_file_that_had_ended_and_has_grown_comes_back_with_the_next_process() -> None:
    plans = Plans({"a": 5}, bounded=True, time=None)
    plans.steps()
    plans.source.tables["a"].rows = 8
    plans.restart()
    assert spans(plans.step()) == {"a": (5, 8)}


# What is there now.


def test_a_run_over_what_is_there_now_stops_there() -> None:
    plans = Plans({"a": 30, "b": 5}, rows_max=20)
    plans.planner.stop_at_what_is_there()
    plans.source.tables["a"].rows = 1000
    plans.source.tables["c"] = Table(5)
    plans.steps()
    assert {name: cut.position for name, cut in plans.partitions.items()} == {"a": 30, "b": 5}
    # The next run goes on.
    plans.restart()
    plans.planner.stop_at_what_is_there()
    plans.steps(100)
    assert {name: cut.position for name, cut in plans.partitions.items()} == {"a": 1000, "b": 5, "c": 5}


def test_a_run_over_what_is_there_now_ends_with_files_that_never_grow() -> None:
    plans = Plans({"a": 30, "b": 0})
    for table in plans.source.tables.values():
        table.whole = True
    plans.planner.stop_at_what_is_there()
    assert len(plans.steps()) == 1


def test_a_seed_is_work_although_there_is_nothing_to_read() -> None:
    plans = Plans({"a": 0})
    plans.steps()
    assert plans.plan() is None
    work = plans.plan(seeds=True)
    assert work is not None
    assert work.seeds
    assert work.reads == ()


@pytest.mark.parametrize("bounded", [False, True])
def test_each_batch_believes_what_its_own_clock_says_and_bounded_ones_all(bounded):
    """A jump forward and back leaves the limit as it was; operators have a clock that goes on."""
    plans = Plans({"a": 5}, bounded=bounded, rows_max=2)
    step = p.Source(
        name="s", connector=ConnectorSpec(kind="fake"), schema={"ts": "timestamp"}, time="ts", max_ahead_us=60
    )
    wall_us, monotonic_us = iter((1_000, 9_000, 1_020)), iter((0, *range(7, 100)))
    plans.planner = Planner(
        (step,),
        {"s": plans.source},
        rows_max=2,
        bounded=bounded,
        clock_us=lambda: next(monotonic_us),
        wall_us=lambda: next(wall_us),
    )
    found, clock_us = [], []
    for _ in range(3):
        work = plans.step()
        assert work is not None
        found += [read.limit_us for read in work.reads]
        clock_us.append(work.now_us)
    assert found == ([TIME_MAX_US] * 3 if bounded else [1_060, 9_060, 1_080])
    assert clock_us[:2] == [1_000, 9_000]
    assert 9_000 < clock_us[2] < 9_010


LATENESS = {"s": 10, "t": 0}


def read(partition: str, position: int = 0, until: int = 5, *, source: str = "s", ended: bool = False) -> PartitionRead:
    return PartitionRead(source=source, partition=partition, position=position, until=until, ended=ended)


def fact(partition: str, us: int, *, source: str = "s", rows: int = 1) -> PartitionFact:
    return PartitionFact(source=source, partition=partition, max_time_us=us, rows=rows)


def clock(us: int = TIME_MIN_US, state: SourceState = SourceState.OPEN, least_us: int | None = None) -> SourceClock:
    return SourceClock(watermark_us=us, state=state, least_us=least_us)


def work(*reads: PartitionRead, epoch: int = 1, clocks: dict[str, SourceClock] | None = None, **more: object) -> Work:
    return Work(epoch=epoch, reads=reads, clocks=clocks or {"s": clock()}, **more)  # type: ignore[arg-type]  # as given


def before(epoch: int = 1, **partitions: PartitionCut) -> Cut:
    return Cut(epoch=epoch, sources={"s": SourceCut(partitions=partitions, watermark_us=7)})


# The cut after a batch.


def test_the_cut_has_what_was_read_and_what_was_not() -> None:
    cut = cut_after(
        before(a=PartitionCut(position=3, max_time_us=50), b=PartitionCut(position=9, max_time_us=30)),
        work(read("a", 3, 8), epoch=2, clocks={"s": clock(7, least_us=20)}),
        [fact("a", 90)],
        LATENESS,
    )
    assert cut == Cut(
        epoch=2,
        sources={
            "s": SourceCut(
                partitions={
                    "a": PartitionCut(position=8, max_time_us=90),
                    "b": PartitionCut(position=9, max_time_us=30),
                },
                watermark_us=20,
            )
        },
    )


def test_work_and_facts_give_the_same_cut_in_any_order() -> None:
    done = work(read("a"), read("b"), read("c"))
    facts = [fact("a", 30), fact("b", 20), fact("c", 40)]
    assert len({msgspec.json.encode(cut_after(None, done, some, LATENESS)) for some in permutations(facts)}) == 1


def test_a_fact_that_is_missing_is_refused() -> None:
    with pytest.raises(DamagedError, match="no task reported the position of s b"):
        cut_after(None, work(read("a"), read("b")), [fact("a", 1)], LATENESS)


def test_a_fact_that_the_work_does_not_say_is_refused() -> None:
    with pytest.raises(DamagedError, match=r"a task read s b, which was not planned"):
        cut_after(None, work(read("a")), [fact("a", 1), fact("b", 1)], LATENESS)


def test_a_fact_of_a_source_that_is_called_otherwise_is_refused() -> None:
    with pytest.raises(DamagedError, match="no task reported the position of s a"):
        cut_after(None, work(read("a")), [fact("a", 1, source="t")], LATENESS)


@pytest.mark.parametrize("epoch", [1, 3, 9])
def test_a_cut_that_is_not_the_one_before_is_refused(epoch: int) -> None:
    with pytest.raises(DamagedError, match=f"the cut before it is that of {epoch}"):
        cut_after(before(epoch), work(epoch=3 if epoch != 3 else 2), [], LATENESS)


def test_a_partition_that_ended_counts_no_longer_where_input_is_bounded() -> None:
    done = work(read("a", ended=True), read("b"), bounded=True)
    cut = cut_after(None, done, [fact("a", 5), fact("b", 100)], LATENESS)
    assert cut.sources["s"].watermark_us == 90
    assert cut.sources["s"].partitions["a"].done
    assert not cut.ended


def test_a_file_that_never_grows_counts_with_the_batch_in_which_it_ends() -> None:
    """Time stood still where each new file was read to its end by one batch."""
    cut = cut_after(None, work(read("a", ended=True)), [fact("a", 100)], LATENESS)
    assert cut.sources["s"].watermark_us == 90
    assert cut.sources["s"].partitions["a"].done
    assert not cut.ended


def test_the_end_of_every_source_is_the_end() -> None:
    clocks = {"s": clock(state=SourceState.ENDED), "t": clock(state=SourceState.ENDED)}
    done = work(read("a", ended=True), clocks=clocks, bounded=True)
    cut = cut_after(None, done, [fact("a", 5)], LATENESS)
    assert cut.ended
    assert {source.watermark_us for source in cut.sources.values()} == {TIME_MAX_US}
    assert not cut_after(
        None, work(clocks={"s": clock(state=SourceState.ENDED), "t": clock()}, bounded=True), [], LATENESS
    ).ended


def test_an_idle_source_keeps_its_time() -> None:
    changed = {"s": {"a": PartitionCut(position=3, max_time_us=50, idle=True)}}
    cut = cut_after(
        before(a=PartitionCut(position=3)),
        work(epoch=2, clocks={"s": clock(7, SourceState.IDLE)}, changed=changed),
        [],
        LATENESS,
    )
    assert cut.sources["s"] == SourceCut(partitions=changed["s"], watermark_us=7)


def test_a_partition_that_comes_back_is_no_longer_idle_and_keeps_its_floor() -> None:
    back = PartitionRead(source="s", partition="a", position=3, until=4, max_time_us=50, floor_us=70)
    known = before(a=PartitionCut(position=3, max_time_us=50, idle=True))
    done = work(
        back,
        epoch=2,
        clocks={"s": clock(70)},
        changed={"s": {"a": PartitionCut(position=3, max_time_us=50, floor_us=70)}},
    )
    cut = cut_after(known, done, [fact("a", 60)], LATENESS)
    assert cut.sources["s"].partitions["a"] == PartitionCut(position=4, max_time_us=60, floor_us=70)
    assert cut.sources["s"].watermark_us == 70


def test_time_never_goes_back() -> None:
    cut = cut_after(None, work(read("a"), clocks={"s": clock(1000)}), [fact("a", 5)], LATENESS)
    assert cut.sources["s"].watermark_us == 1000


# Marks of time.


def test_marks_count_together_in_any_order() -> None:
    marks = [
        msgspec.json.encode(SourceTimes(clocks={"s": clock(5, least_us=40), "t": clock(1)})),
        msgspec.json.encode(SourceTimes(least_us={"s": 30})),
        msgspec.json.encode(SourceTimes(least_us={"s": 35, "t": 50})),
    ]
    for some in permutations(marks):
        assert source_times(read_clock(some)) == {"s": SourceTime(30), "t": SourceTime(50)}


@pytest.mark.parametrize(
    ("known", "least_us", "wanted"),
    [
        (clock(5), None, 5),
        (clock(5, least_us=9), None, 9),
        (clock(5, least_us=9), 7, 7),
        (clock(5, least_us=2), 7, 5),
        (clock(), None, TIME_MIN_US),
        (clock(5, SourceState.IDLE), None, 5),
        (clock(5, SourceState.IDLE), 7, 5),
        (clock(5, SourceState.ENDED), None, TIME_MAX_US),
    ],
)
def test_a_source_is_as_far_as_the_furthest_behind_of_its_partitions(
    known: SourceClock, least_us: int | None, wanted: int
) -> None:
    least = {} if least_us is None else {"s": least_us}
    found = source_times(SourceTimes(clocks={"s": known}, least_us=least))
    assert found == {"s": SourceTime(wanted, idle=known.state is SourceState.IDLE)}


def test_where_rows_of_several_sources_meet_the_last_one_that_is_waited_for_counts() -> None:
    idle, five, nine = SourceTime(7, idle=True), SourceTime(5), SourceTime(9)
    assert time_of(["s", "t"], {"s": five, "t": nine}, TIME_MIN_US) == 5
    assert time_of(["s", "t"], {"s": idle, "t": nine}, TIME_MIN_US) == 9
    assert time_of(["s", "t"], {"s": idle, "t": idle}, 4) == 4
    assert time_of(["s"], {"s": five, "t": nine}, 8) == 8
    assert time_of(["s", "t"], {"s": idle, "t": SourceTime(8, idle=True, ended_us=8)}, 4) == 8
    assert time_of(["s", "t"], {"s": five, "t": SourceTime(8, idle=True, ended_us=8)}, 4) == 5


def test_a_partition_is_as_far_as_its_largest_time_less_the_lateness_but_not_before_it_joined() -> None:
    assert partition_watermark_us(PartitionCut(position=0), 10) == TIME_MIN_US
    assert partition_watermark_us(PartitionCut(position=0, floor_us=3), 10) == 3
    assert partition_watermark_us(PartitionCut(position=0, max_time_us=20, floor_us=3), 10) == 10
    assert partition_watermark_us(PartitionCut(position=0, max_time_us=20, floor_us=15), 10) == 15


# Offsets.


def test_an_offset_comes_back_as_the_work_that_it_was() -> None:
    done = work(
        PartitionRead(
            source="s",
            partition='日本 "x".jsonl',
            position=2**53 + 1,
            until=2**62,
            max_time_us=-(2**62),
            floor_us=TIME_MIN_US,
        ),
        epoch=7,
        clocks={"s": clock(TIME_MIN_US, SourceState.OPEN, TIME_MAX_US)},
        changed={"s": {"b": PartitionCut(position=0, idle=True)}},
        seeds=True,
        bounded=True,
    )
    text = json.dumps(offset_of(done))
    assert read_work(json.loads(text)) == done
    assert json.dumps(offset_of(read_work(json.loads(text)))) == text


@pytest.mark.parametrize(
    "offset", [first_offset(3), {}, {"work": "{}"}, {"work": "not json"}, {"work": '{"epoch": 1, "unknown": 2}'}]
)
def test_an_offset_of_another_source_is_refused(offset: dict[str, object]) -> None:
    with pytest.raises(DamagedError, match="not an offset of a fordstone query"):
        read_work(offset)


# Input that turned out to be unreadable.


@dataclass
class Stopped(FakeSource):
    """Its partitions can be read only up to some positions, as nodes in quarantine."""

    ends: dict[str, int] = field(default_factory=dict)

    def still_planned(self, partition: PartitionId, position: Position, until: Position) -> Position:
        return Position(max(position, min(until, self.ends.get(partition, until))))


def test_a_batch_that_is_not_sealed_is_executed_without_what_turned_out_to_be_unreadable() -> None:
    plans = Plans({"a": 4, "b": 4, "c": 4}, rows_max=30)
    plans.source = Stopped(plans.source.tables, False)
    plans.restart()
    work = plans.plan()
    assert work is not None
    assert plans.planner.still_planned(work, lambda: None) == work
    plans.source.ends |= {"a": 2, "b": 0}
    short = plans.planner.still_planned(work, lambda: None)
    assert spans(short) == {"a": (0, 2), "c": (0, 4)}
    assert short.changed["s"]["b"].idle, "it is judged when it comes back"
    assert shortens(short, work)
    assert shortens(work, work)
    assert not shortens(work, short), "a record of more than was planned is an error (rule 23)"
    facts = [PartitionFact(source="s", partition=one.partition, max_time_us=1, rows=1) for one in short.reads]
    cut = cut_after(None, short, facts, {"s": LATENESS_US}).sources["s"].partitions
    assert {name: (one.position, one.idle) for name, one in cut.items()} == {
        "a": (2, False),
        "b": (0, True),
        "c": (4, False),
    }
