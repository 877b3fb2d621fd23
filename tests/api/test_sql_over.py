"""OVER in SQL: aggregates over a frame of rows, and LAG."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import duckdb
import polars as pl
import pytest
from tests.api.sql_runs import answer, pipeline, refused, rows_of, same_plan

from fordstone import Pipeline, Stream
from fordstone.connectors import memory
from fordstone.plan import plan as p

BY_DEVICE = "PARTITION BY device ORDER BY ts"


def _readings(made: Pipeline) -> Stream:
    return Stream(made._graph, p.Input("readings"))


def test_a_frame_of_rows_is_written_by_hand_with_over():
    same_plan(
        f"SELECT *, avg(temp) OVER ({BY_DEVICE} ROWS BETWEEN 2 PRECEDING AND CURRENT ROW) AS mean FROM readings",
        lambda made: _readings(made).group_by("device").over(rows=3, mean="avg(temp)"),
    )
    same_plan(
        f"SELECT *, sum(temp) OVER ({BY_DEVICE} ROWS UNBOUNDED PRECEDING) AS total FROM readings",
        lambda made: _readings(made).group_by("device").over(total="sum(temp)"),
    )
    same_plan(
        "SELECT *, max(temp) OVER (ORDER BY ts, device RANGE BETWEEN INTERVAL '10' SECOND PRECEDING AND CURRENT ROW) AS top FROM readings",
        lambda made: _readings(made).group_by().over(range="10s", order="device", top="max(temp)"),
    )


def test_functions_of_one_frame_are_one_step():
    made = pipeline()
    made.sql(
        f"SELECT temp - LAG(temp) OVER ({BY_DEVICE}) AS up, count(*) OVER ({BY_DEVICE} ROWS 1 PRECEDING) AS n, "
        f"LAG(temp) OVER ({BY_DEVICE}) AS before, sum(temp) OVER ({BY_DEVICE}) AS total FROM readings"
    )
    assert [len(step.aggregates) for step in made._graph.steps if isinstance(step, p.Over)] == [2, 1]


def test_rows_keep_their_time_and_late_rows_leave():
    query = f"""
        SELECT device, window_start, max(up) AS up FROM (
            SELECT device, ts, temp - LAG(temp) OVER ({BY_DEVICE}) AS up FROM readings)
        GROUP BY device, TUMBLE(ts, INTERVAL '10' SECOND)
    """
    assert answer(query) == [
        ("A", "00:00:10", None),
        ("a", "00:00:00", 2.0),
        ("a", "00:00:10", 2.0),
        ("b", "00:00:00", None),
        ("b", "00:00:20", None),
    ]


def test_a_condition_after_an_aggregate_chooses_its_rows():
    query = f"SELECT device, count(*) FILTER (WHERE temp > 2) OVER ({BY_DEVICE}) AS n FROM readings WHERE device = 'a'"
    assert answer(query) == [("a", 0), ("a", 1), ("a", 2)]


@pytest.mark.parametrize("seed", range(4))
def test_random_frames_are_those_of_duckdb(seed: int):
    rng = random.Random(seed)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        (rng.choice("abc"), start + timedelta(seconds=second), rng.choice([None, *range(9)]), number)
        for number, second in enumerate(sorted(rng.randrange(60) for _ in range(80)))
    ]
    frames = [
        "ROWS BETWEEN 3 PRECEDING AND CURRENT ROW",
        "ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW",
        "ROWS CURRENT ROW",
        "RANGE BETWEEN INTERVAL '7' SECOND PRECEDING AND CURRENT ROW",
        "",
    ]
    columns = []
    for at, frame in enumerate(frames):
        order = "ts" if "RANGE" in frame or not frame else "ts, number"
        over = f"OVER (PARTITION BY k ORDER BY {order} {frame})"
        columns += [
            f"{call} {over} AS {name}{at}"
            for name, call in [("n", "count(x)"), ("s", "sum(x)"), ("lo", "min(x)"), ("hi", "max(x)"), ("mean", "avg(x)"), ("var", "var_samp(x)")]
        ]  # fmt: skip
    columns.append("lag(x, 2) OVER (PARTITION BY k ORDER BY ts, number) AS before")
    query = f"SELECT number, {', '.join(columns)} FROM t"
    made = Pipeline("p")
    schema = {"k": "string", "ts": "timestamp", "x": "bigint", "number": "bigint"}
    made.source("t", memory([rows[:30], rows[30:]]), schema=schema, time="ts", lateness="1m")
    found = rows_of(made.sql(query))
    with duckdb.connect(config={"threads": 1}) as base:
        given = pl.DataFrame(rows, schema={"k": pl.String, "ts": pl.Datetime("us"), "x": pl.Int64, "number": pl.Int64}, orient="row")  # fmt: skip
        base.register("t", given.to_arrow())
        wanted = base.execute(f"{query} ORDER BY number").fetchall()
    assert len(found) == len(wanted) == 80
    for mine, theirs in zip(found, wanted, strict=True):
        assert [None if value is None else pytest.approx(value) for value in theirs] == list(mine)


REFUSED = [
    ("SELECT sum(temp) OVER (PARTITION BY device) AS s FROM readings", "OVER needs ORDER BY ts", "sum"),
    ("SELECT sum(temp) OVER (ORDER BY temp) AS s FROM readings", "OVER needs ORDER BY ts", "sum"),
    ("SELECT sum(temp) OVER (ORDER BY ts DESC) AS s FROM readings", "in ascending order", "ts"),
    ("SELECT sum(temp) OVER (ORDER BY ts ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING) AS s FROM readings", "a frame ends at its row", "sum"),
    ("SELECT sum(temp) OVER (ORDER BY ts GROUPS 2 PRECEDING) AS s FROM readings", "a frame ends at its row", "sum"),
    ("SELECT sum(temp) OVER (ORDER BY ts RANGE 10 PRECEDING) AS s FROM readings", "an interval is needed here", "10"),
    ("SELECT sum(temp) OVER (ORDER BY ts ROWS temp PRECEDING) AS s FROM readings", "ROWS counts rows", "sum"),
    ("SELECT median(temp) OVER (ORDER BY ts) AS s FROM readings", "median is not supported with OVER", "median"),
    ("SELECT LEAD(temp) OVER (ORDER BY ts) AS s FROM readings", "lead is not supported with OVER", "LEAD"),
    ("SELECT last_value(temp) IGNORE NULLS OVER (ORDER BY ts) AS s FROM readings", "IGNORE NULLS is not supported with OVER", "last_value"),
    ("SELECT sum(tmp) OVER (ORDER BY ts) AS s FROM readings", "there is no column 'tmp'", "tmp"),
    ("SELECT lag(temp) OVER (ORDER BY ts ROWS 3 PRECEDING) AS s FROM readings", "LAG counts rows by itself", "lag"),
    ("SELECT lag(temp, 0) OVER (ORDER BY ts) AS s FROM readings", "no whole number from 1", "0"),
    ("SELECT lag(temp) AS s FROM readings", "lag is an aggregate", "lag"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "message", "under"), REFUSED)
def test_what_is_not_supported_with_over_is_refused_with_its_place(query: str, message: str, under: str):
    refused(query, message, under)


def test_over_needs_event_time():
    made = Pipeline("p")
    made.source("t", memory([]), schema={"ts": "timestamp", "x": "double"})
    with pytest.raises(Exception, match="OVER needs event time"):
        made.sql("SELECT sum(x) OVER (ORDER BY ts) AS s FROM t")
