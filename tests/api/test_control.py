"""Declaring two tiers: what may cross, and in which words it is refused what may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fordstone import FordstoneError, Pipeline, Stream, tumbling
from fordstone.api.table import ControlTable
from fordstone.connectors import files
from fordstone.plan.plan import Mode
from fordstone.planner.split import split

SCHEMA = {"k": "string", "ts": "timestamp", "x": "bigint", "y": "double"}
OUT = files("out")
Declare = Callable[[Pipeline, Stream, ControlTable], object]


def declared(mode: Mode = "aligned") -> tuple[Pipeline, Stream, ControlTable]:
    pipeline = Pipeline("fleet", mode=mode)
    rows = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA, time="ts", lateness="5s")
    return pipeline, rows, pipeline.control("limits", schema={"k": "string", "v": "double"}, key="k")


REFUSED: dict[str, Declare] = {
    r"rows_to_center is at the center already\. Leave \.to_center\(\) out": lambda _, rows, __: (
        rows.to_center().to_center()
    ),
    r"rows_to_center is at the center and rows at the edge\. Take the latter to the center too": lambda _, rows, __: (
        rows.to_center().union(rows)
    ),
    r"limits is a control table, which nodes have\. Join it before \.to_center\(\)": lambda _, rows, limits: (
        rows.to_center().join_control(limits, on="k")
    ),
    r"limits is a table, which rows of a stream are joined with": lambda p, _, __: p.sql("SELECT * FROM limits WHERE v > 1"),
    r"is not a stream.*\.join_control\(table, on=": lambda _, rows, limits: rows.join_latest(limits, on="k"),  # type: ignore[arg-type]
    r"union: .* is not a stream": lambda _, rows, limits: rows.union(limits),  # type: ignore[arg-type]
    r"on='x' does not name the key of limits, which is \(k\)": lambda _, rows, limits: rows.join_control(
        limits, on="x"
    ),
    r"select is at the edge itself": lambda _, rows, limits: rows.select(
        "k", "y AS v"
    ).to_edges(limits),
    r"there is no such control table.*Declared are: limits": lambda _, rows, __: (
        rows.to_center().select("k", "y AS v").to_edges("limit")
    ),
    r"given:  k string, v bigint\n  wanted: k string, v double": lambda _, rows, limits: (
        rows.to_center().select("k", "x AS v").to_edges(limits)
    ),
    r"must keep window_start, window_end unchanged\. After a window, \.final\(\) gives the last result": (
        lambda _, rows, limits: (
            rows.to_center()
            .group_by("k")
            .window(tumbling("5s"))
            .agg(v="avg(y)")
            .select("k", "v")
            .to_edges(limits)
        )
    ),
    r"to_center cannot take rows that replace each other by key \(k\)": lambda _, rows, __: (
        rows.group_by("k").agg(n="count(*)").to_center()
    ),
    r"release='at_once' is for the edge": lambda _, rows, __: rows.to_center().sink("out", OUT, release="at_once"),
    r"offline: '0s' must be longer than zero": lambda _, rows, __: rows.to_center(offline="0s"),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_may_not_cross_is_refused_where_it_is_declared(words: str) -> None:
    with pytest.raises(FordstoneError, match=f"(?s){words}"):
        REFUSED[words](*declared())


def test_in_flight_rows_and_time_would_part_in_unaligned_mode() -> None:
    _, rows, _ = declared("unaligned")
    with pytest.raises(FordstoneError, match="Use mode='aligned'"):
        rows.to_center()


def test_a_cut_that_no_step_reads_is_an_end_but_results_that_nobody_reads_are_none() -> None:
    pipeline, rows, _ = declared()
    cut = rows.to_center(name="cut")
    assert split(pipeline.plan()).center is None
    cut.group_by("k").agg(n="count(*)")
    with pytest.raises(FordstoneError, match="has no sink"):
        pipeline.plan()


def test_a_query_above_the_cut_gives_each_window_once_as_one_below_does() -> None:
    pipeline, rows, _ = declared()
    query = (
        "SELECT k, count(*) AS n, max(window_end) AS till FROM ({}) GROUP BY k, TUMBLE(window_end, INTERVAL '1' MINUTE)"
    )
    small = "SELECT k, window_end, count(*) AS n FROM {} GROUP BY k, TUMBLE(ts, INTERVAL '10' SECOND)"
    pipeline.sql(query.format(small.format("rows")), name="below").sink("a", OUT)
    rows.to_center(name="cut")
    pipeline.sql(query.format(small.format("cut")), name="above").sink("b", files("out_b"))
    (crossing,) = split(pipeline.plan()).crossings
    assert crossing.partial
