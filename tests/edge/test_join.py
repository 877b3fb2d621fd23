"""Joins and lookups on the edge engine: against DuckDB however they ran, across restarts, and how they are worded."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from random import Random

import polars as pl
import pytest
from tests.edge.joining import SCHEMA, START, Input, Joined, record, source
from tests.edge.runs import in_windows, same_rows
from tests.spark.runs import EdgeSide

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, files, memory, stdout
from fordstone.connectors.base import (
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Reader,
    Source,
    SourceOptions,
)
from fordstone.connectors.lookup_table import read_table
from fordstone.connectors.registry import register
from fordstone.errors import FordstoneError, SourceError, TaskError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.plan.plan import Plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.explain import explain
from fordstone.protocol.retry import RestartPolicy


@pytest.mark.slow
@pytest.mark.parametrize(("how", "from_s", "to_s"), [("left", -2, 3), ("full", -3, 3)])
def test_restarts_with_other_numbers_of_subtasks_change_nothing(tmp_path, how, from_s, to_s):
    given = Input.of(3, 80)
    given.write(tmp_path)
    joined = Joined.over(tmp_path, how, from_s, to_s)
    edge = EdgeSide(joined.pipeline.plan(), joined.pipeline.functions)
    rng = Random(1)
    for parallelism in (1, 3, 2, 2, 1):
        edge.run(bounded=False, parallelism=parallelism, batch_rows=3, stop_after=rng.randint(20, 60), rng=rng)
    assert 0 < joined.out.rows().height < given.joined(how, from_s, to_s).height, "the restarts were in between"
    edge.run(parallelism=2, batch_rows=3, rng=rng)
    joined.check(given, how, from_s, to_s)


def test_it_runs_on_threads_as_well_and_a_stream_joins_itself(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("itself")
    rows = [record(("a", second, second)) for second in range(5)]
    readings = pipeline.source("rows", memory([rows]), schema=SCHEMA, time="ts")
    readings.join(readings, on="k", between=("1s", "1s"), name="next").select("x", "x_right").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True, parallelism=2, batch_rows=2, interval="5ms")
    assert sorted(out.rows().rows()) == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_windows_are_joined_and_windows_stand_after_that(tmp_path, parallelism):
    given = Input.of(4)
    given.write(tmp_path)
    out, late = MemorySink(), MemorySink()
    pipeline = Pipeline("windows")
    left, right = (
        source(pipeline, name, tmp_path).group_by("k").window(tumbling("5s")).agg(n="count(*)", name=f"per_{name}")
        for name in ("l", "r")
    )
    joined = left.join(right, on="k", between=("0s", "5s"))
    counted = joined.group_by("k").window(tumbling("20s")).agg(pairs="count(*)", n="sum(n_right)")
    counted.sink("out", memory(out))
    counted.late.sink("late", memory(late))
    EdgeSide(pipeline.plan(), {}).run(parallelism=parallelism, batch_rows=4, rng=Random(parallelism))

    windows = [
        Counter((k, second // 5) for k, second, _ in in_windows(partitions, 5, START)[0])
        for partitions in (given.left, given.right)
    ]
    wanted: dict[tuple[str | None, int], tuple[int, int]] = {}
    for k, at in windows[0]:
        for later in (at, at + 1):
            if k is not None and (n := windows[1][k, later]):
                pairs, rows = wanted.get((k, later * 5 // 20), (0, 0))
                wanted[k, later * 5 // 20] = (pairs + 1, rows + n)
    found = {
        (row["k"], int((row["window_start"] - START).total_seconds()) // 20): (row["pairs"], row["n"])
        for row in out.rows().iter_rows(named=True)
    }
    assert found == wanted
    assert late.rows().height == 0


# Lookups.


def test_a_table_in_a_file_is_looked_up_and_windows_go_on_after_it(tmp_path):
    (tmp_path / "sites.csv").write_text("id,site\na,north\nb,south\n")
    given = Input.of(1)
    given.write(tmp_path)
    out = MemorySink()
    pipeline = Pipeline("sites")
    table = files(str(tmp_path / "sites.csv"))
    found = source(pipeline, "l", tmp_path).lookup(table, on={"k": "id"}, schema={"id": "string", "site": "string"})
    found.group_by("site").window(tumbling("1h")).agg(n="count(*)").sink("out", memory(out))
    EdgeSide(pipeline.plan(), {}).run(parallelism=2, batch_rows=7)
    sites = {"a": "north", "b": "south"}
    wanted = Counter(sites.get(str(k)) for k, _, _ in in_windows(given.left, 3600, START)[0])
    assert dict(out.rows().group_by("site").agg(pl.col("n").sum()).rows()) == wanted


def lookup_in(path: Path, tmp_path: Path) -> None:
    pipeline = Pipeline("broken")
    rows = pipeline.source("rows", memory([[record(("a", 1, 1))]]), schema=SCHEMA, time="ts")
    rows.lookup(files(str(path)), on="k", schema={"k": "string", "n": "int"}, name="names").sink(
        "out", memory(MemorySink())
    )
    pipeline.run(state=tmp_path / "state", bounded=True)


def test_a_table_that_is_not_there_or_not_whole_is_an_error_with_the_steps_name(tmp_path):
    with pytest.raises(FordstoneError, match=r"step names: the table of the lookup cannot be read: no file matches"):
        lookup_in(tmp_path / "gone.csv", tmp_path)
    bad = tmp_path / "bad.csv"
    bad.write_text("k,n\na,1\nb,x\n")
    with pytest.raises(FordstoneError, match=r"(?s)step names: .*bad.csv at .*A table must be whole"):
        lookup_in(bad, tmp_path)


class FailingTable(Source):
    """A table that another system has: reading it raises each time."""

    error: Exception = ValueError()
    reads = 0

    def partitions(self) -> list[PartitionId]:
        return [PartitionId("all")]

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        type(self).reads += 1
        raise type(self.error)(*self.error.args)


class FailingKind(ConnectorKind):
    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        return FailingTable()


@pytest.mark.parametrize(
    ("error", "says", "reads"),
    [
        (ValueError("no"), "step names: the table of the lookup cannot be read: ValueError: no.", 1),
        (
            ConnectionError("away"),
            r"pipeline p failed 3 times in a row; the last time: ConnectionError('away'), in step names, while the table of the lookup was read.",
            3,
        ),
    ],
)
def test_a_table_whose_connector_raises_is_one_error_with_one_traceback_of_the_connector(
    error: Exception, says: str, reads: int
):
    register("failing_table", FailingKind)
    FailingTable.error, FailingTable.reads = error, 0
    rows = Pipeline("p").source("rows", memory([{"k": "a"}]))
    table = ConnectorSpec(kind="failing_table", options={})
    rows.lookup(table, on="k", schema={"k": "string", "n": "int"}, name="names").sink("out", memory(MemorySink()))
    with pytest.raises(TaskError) as caught:
        rows.pipeline.run(bounded=True, restart=RestartPolicy(failures_max=2, wait_first_us=1_000, wait_max_us=1_000))
    assert str(caught.value) == says
    assert FailingTable.reads == reads
    cause = caught.value.__cause__
    assert repr(cause) == repr(error)
    assert cause is not None
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["open"]


def test_a_table_in_a_file_is_read_once_a_process_until_the_file_changes(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("k,n\na,1\n")
    spec, schema = files(str(path)), Schema.of({"k": "string", "n": "int"})
    first = read_table(spec, schema)
    assert read_table(spec, schema) is first
    path.write_text("k,n\na,1\nb,2\n")
    assert read_table(spec, schema).rows() == [("a", 1), ("b", 2)]
    path.unlink()
    with pytest.raises(SourceError, match="no file matches"):
        read_table(spec, schema)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_rows_of_a_bounded_run_in_one_epoch_see_all_control_rows(tmp_path, parallelism):
    out = MemorySink()
    pipeline = Pipeline("limits")
    rows = [record((k, second, second)) for second, k in enumerate(["a", "b", "c", "a"])]
    limits = [{"k": "a", "limit": 1.0, "at": 1}, {"k": "b", "limit": 5.0, "at": 1}, {"k": "a", "limit": 2.0, "at": 2}]
    readings = pipeline.source("rows", memory([rows]), schema=SCHEMA, time="ts")
    control = pipeline.source("limits", memory([limits]), schema={"k": "string", "at": "int", "limit": "double"})
    readings.join_latest(control, on="k").select("k", "x", "limit").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True, parallelism=parallelism, interval="1h")
    same_rows(out.rows(), pl.DataFrame({"k": ["a", "b", "c", "a"], "x": [0, 1, 2, 3], "limit": [2.0, 5.0, None, 2.0]}))


def test_the_newest_control_rows_outlive_a_restart(tmp_path):
    out, rows, limits = MemorySink(), MemorySource([[]]), MemorySource([[]])
    pipeline = Pipeline("limits")
    readings = pipeline.source("rows", memory(rows), schema={"k": "string", "x": "bigint"})
    control = pipeline.source("limits", memory(limits), schema={"k": "string", "limit": "double"})
    readings.join_latest(control, on="k", how="inner").sink("out", memory(out))
    limits.append(0, [("a", 1.0), ("b", 2.0)])
    pipeline.run(state=tmp_path, bounded=True, parallelism=1)
    rows.append(0, [("a", 1), ("b", 2), ("c", 3)])
    limits.append(0, [("a", 0.5)])
    pipeline.run(state=tmp_path, bounded=True, parallelism=2, interval="1h")
    assert sorted(out.rows().rows()) == [("a", 1, 0.5), ("b", 2, 2.0)]


def test_windows_stand_after_rows_that_do_not_wait(tmp_path):
    given = Input.of(2)
    given.write(tmp_path)
    out, late = MemorySink(), MemorySink()
    pipeline = Pipeline("limits")
    left, right = (source(pipeline, name, tmp_path) for name in ("l", "r"))
    counted = left.join_latest(right, on="k", wait=False).group_by("k").window(tumbling("10s")).agg(n="count(*)")
    counted.sink("out", memory(out))
    counted.late.sink("late", memory(late))
    EdgeSide(pipeline.plan(), {}).run(parallelism=2, batch_rows=5)
    assert out.rows()["n"].sum() + late.rows().height == sum(map(len, given.left))


# What is said of them.


def plan_of(how: str = "left", between: tuple[str, str] = ("-5s", "10s"), on: object = "k") -> Plan:
    pipeline = Pipeline("joins")
    left, right = (
        pipeline.source(name, memory(MemorySource()), schema=SCHEMA, time="ts", lateness="5s") for name in "lr"
    )
    joined = left.join(right, on=on, between=between, how=how)  # type: ignore[arg-type]  # as given
    named = joined.lookup([{"k": "a", "site": "n"}], on="k")
    named.join_latest(right, on="k", how="inner", suffix="_now").sink("out", stdout())
    return pipeline.plan()


EXPLAINED = """\
  join: left join of l and r, right time - left time from -5s to 10s
  │  on              k
  │  unmatched rows  of the left side: emitted with nulls once the watermark has passed them
  │  columns         k string, ts timestamp, x bigint, ts_right timestamp, x_right bigint
  │  time            ts + 10s
  │  keeps           rows of both sides, as long as a partner may come, and which keys and times have matched
  └─ lookup: look up in 1 row in the plan
     │  on              k
     │  unmatched rows  emitted with nulls
"""
EXPLAINED_LATEST = """\
  join_latest: look up in the newest rows of r
  │  on              k
  │  unmatched rows  dropped
  │  rows            wait for the end of their epoch, and see its control rows
"""


def test_they_are_explained():
    text = explain(plan_of(), parallelism=2)
    assert EXPLAINED in text
    assert EXPLAINED_LATEST in text
    assert "→ task join: rows, shuffled by k\n" in text
    assert "time            none: rows may lack that of either side" in explain(plan_of("full"))
    assert "join of l and r, of one time" in explain(plan_of(between=("0s", "0s")))


def test_what_the_state_of_a_join_depends_on_is_in_its_digest():
    plans = [plan_of(), plan_of("full"), plan_of(between=("-5s", "11s")), plan_of(on=["k", "x"])]
    digests = [step_digests(plan, stream_types(plan))["join"] for plan in plans]
    assert len(set(digests)) == len(plans)
