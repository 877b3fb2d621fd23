"""What the driver and the tasks do about sources that Spark reads, without Spark: when a batch begins, and what is made of facts and marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests.spark.test_plan_batches import Plans

from fordstone.errors import DamagedError
from fordstone.protocol.partitions import SourceState
from fordstone.spark.hosted import connector_sources
from fordstone.spark.hosted.checkpoint import QueryFiles
from fordstone.spark.hosted.connector_sources import ConnectorWork, WakeReader
from fordstone.spark.hosted.plan_batches import (
    PartitionFact,
    PartitionRead,
    SourceClock,
    SourceTime,
    SourceTimes,
    Work,
    read_clock,
    source_times,
)
from fordstone.spark.hosted.spark_files import SparkFiles
from fordstone.storage.clock import wall_clock_us

FUTURE_US = 1 << 60


def waking(files: QueryFiles) -> WakeReader:
    return WakeReader(cast("Any", None), files, None, first_epoch=1, tasks=2)


def test_the_first_batch_and_batches_that_are_due_begin_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_sources, "HOLD_S", 0.0)
    files = QueryFiles(str(tmp_path))
    reader = waking(files)
    first = reader.first_offset()
    one = reader.next_offset(first)
    assert one != first
    assert reader.next_offset(one) == one
    files.put_due(FUTURE_US)
    assert reader.next_offset(one) == one
    files.put_due(wall_clock_us() - 1)
    assert reader.next_offset(one) not in (first, one)
    files.request_stop()
    assert reader.next_offset(one) == one
    assert files.held()
    files.clear_stop()
    reader.stop_at_what_is_there()
    assert reader.next_offset(one) == one
    assert reader.next_offset(first) == one


def test_a_batch_is_due_when_the_first_partition_has_been_silent_for_long_enough() -> None:
    plans = Plans({"a": 3, "b": 4}, idle_after_us=100)
    plans.step()
    plans.now_us = 30
    plans.source.tables["b"].rows = 9
    plans.step()
    assert plans.cut is not None
    assert plans.planner.due_us(plans.cut) == 100
    plans.now_us = 100
    work = plans.planner.next_work(plans.cut, plans.epoch + 1, begun=True)
    assert work is not None
    assert {name for name, cut in work.changed["s"].items() if cut.idle} == {"a"}


def test_a_batch_that_has_begun_has_work_although_there_is_nothing_to_do() -> None:
    plans = Plans({"a": 3})
    plans.step()
    assert plans.plan() is None
    work = plans.plan(begun=True)
    assert work is not None
    assert not work.reads
    assert plans.cut is not None
    assert plans.planner.due_us(plans.cut) is None


READS = tuple(
    PartitionRead(source="s", partition=name, position=1, until=9, max_time_us=us) for name, us in (("a", 5), ("b", 7))
)


def fact(name: str, us: int, rows: int) -> PartitionFact:
    return PartitionFact(source="s", partition=name, max_time_us=us, rows=rows)


def test_a_partition_without_rows_keeps_its_time() -> None:
    work = ConnectorWork(cast("Any", None))
    found = work.facts(Work(epoch=1, reads=READS), [fact("a", 50, 3)])
    assert {one.partition: (one.max_time_us, one.rows) for one in found} == {"a": (50, 3), "b": (7, 0)}


def test_a_partition_that_two_tasks_have_read_is_refused() -> None:
    with pytest.raises(DamagedError, match="divided a between two tasks"):
        ConnectorWork(cast("Any", None)).facts(Work(epoch=1, reads=READS), [fact("a", 50, 3), fact("a", 60, 3)])


def test_marks_of_tasks_give_the_same_time_in_any_order() -> None:
    clock = SourceClock(watermark_us=2, state=SourceState.OPEN)
    marks = [
        SourceTimes(clocks={"s": clock}, by_partition={"s": {"a": 5, "b": 7}}, now_us=1),
        SourceTimes(by_partition={"s": {"a": 50}}),
    ]
    data = [msgspec.json.encode(mark) for mark in marks]
    for some in (data, data[::-1], [msgspec.json.encode(read_clock(data))]):
        assert source_times(read_clock(some)) == {"s": SourceTime(7)}


def test_a_power_cut_may_empty_what_spark_kept_of_where_sources_began(tmp_path: Path) -> None:
    for name in ("metadata", "offsets/0", "sources/1/0"):
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("v1\n{}\n")
    (tmp_path / "sources/1/0").write_bytes(b"")
    aside = SparkFiles(tmp_path).repair(first_epoch=1, recorded=lambda epoch: False, newest=0)
    assert not (tmp_path / "sources/1/0").exists(), aside
