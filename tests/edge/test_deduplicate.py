"""Deduplication and means by half-life on the edge engine: windows after them, and how they are described. Results: tests/cases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.edge.runs import START

from fordstone import Pipeline, tumbling
from fordstone.connectors import stdout
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.plan.plan import Plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.explain import explain

SCHEMA = {"id": "string", "ts": "timestamp", "x": "double"}
Row = tuple[str | None, int, float]


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], START + timedelta(seconds=row[1]), row[2])


def test_windows_count_rows_once_after_a_deduplication(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("twice")
    given = [record((f"{second}", second, 1.0)) for second in range(20) for _ in range(2)]
    rows = pipeline.source("rows", memory([given]), schema=SCHEMA, time="ts")
    rows.deduplicate("id", within="1h").group_by().window(tumbling("10s")).agg(n="count(*)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True, parallelism=2, batch_rows=3)
    assert out.rows()["n"].to_list() == [10, 10]


# What is said of it.


def planned(*, within: str = "90s", keys: tuple[str, ...] = ("id",), half_life: str = "30s") -> Plan:
    pipeline = Pipeline("events")
    rows = pipeline.source("rows", memory(MemorySource()), schema=SCHEMA, time="ts", lateness="5s")
    once = rows.deduplicate(*keys, within=within, name="once")
    once.group_by("id").ewma(s="x", half_life=half_life, name="slow").sink("out", stdout())
    return pipeline.plan()


def test_it_is_explained():
    text = explain(planned(), parallelism=2)
    assert "once: first of each id within 1m30s\n" in text
    assert "keeps  the rows that wait for time, and each key for 1m30s\n" in text
    assert "slow: exponentially weighted mean for each id, half-life 30s\n" in text
    assert "keeps    the rows that wait for time, and three numbers per key and column\n" in text


def test_what_their_state_depends_on_is_in_their_digests():
    plans = [planned(), planned(within="1m"), planned(keys=("id", "x")), planned(half_life="1m")]
    digests = [step_digests(plan, stream_types(plan)) for plan in plans]
    assert len({found["once"] for found in digests}) == 3
    assert digests[0]["slow"] != digests[3]["slow"]
