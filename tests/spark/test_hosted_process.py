"""Keyed functions hosted on Spark: timers by the clock. Results: tests/cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.edge.process_functions import OUT_SCHEMA, SCHEMA, Reminders, Visits, record
from tests.edge.runs import LATENESS_S
from tests.spark.micro import MicroSpark

from fordstone import Pipeline
from fordstone.connectors import MemorySink, files, memory
from fordstone.spark.hosted import source as source_module

pytestmark = pytest.mark.usefixtures("quick_disk")


def write(folder: Path, partitions: list[list[Any]]) -> str:
    folder.mkdir(parents=True)
    for index, rows in enumerate(partitions):
        records = [dict(zip(SCHEMA, record(row), strict=True)) for row in rows]
        lines = [json.dumps(one | {"ts": one["ts"].isoformat()}) + "\n" for one in records]
        (folder / f"{index}.jsonl").write_text("".join(lines))
    return str(folder / "*")


def visits(path: str, function: type[Visits] = Visits) -> tuple[Pipeline, MemorySink, MemorySink]:
    out, late = MemorySink(), MemorySink()
    pipeline = Pipeline("visits")
    rows = pipeline.source("rows", files(path), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    visited = rows.group_by("k").process(function, schema=OUT_SCHEMA)
    visited.sink("out", memory(out))
    visited.late.sink("late", memory(late))
    return pipeline, out, late


@pytest.mark.parametrize("set_us", [0, -864_000_000_000])
def test_timers_by_the_clock_ring_in_batches_that_are_due_although_there_is_nothing_to_read(
    tmp_path, monkeypatch, set_us
):
    """Also if the machine's clock is set back by ten days."""
    out, shift_us = MemorySink(), 864_000_000_000
    pipeline = Pipeline("reminders")
    rows = pipeline.source("rows", files(write(tmp_path / "in", [[("a", 1, 1), ("b", 1, 2)]])), schema=SCHEMA)
    visited = rows.group_by("k").process(Reminders, schema={"k": "string", "n": "bigint", "clock": "timestamp"})
    visited.sink("out", memory(out))
    spark = MicroSpark(3)
    monkeypatch.setattr(source_module, "wall_clock_us", lambda: spark.now_us + shift_us)
    query = spark.start(pipeline.plan(), pipeline.functions, state=tmp_path / "state", shards=2)
    query.run()
    assert out.rows().height == 0
    shift_us += set_us
    reported_in = []
    for _ in range(4):
        spark.now_us += 5_000_000
        assert query.run() == 1
        reported_in.append(sorted(row[:2] for row in out.rows().rows()))
        out.released.clear()
    # At the first tick what is known of the keys is too old as well; so they are reported once more, and that is all.
    assert reported_in == [[("a", 1), ("b", 1)], [("a", None), ("b", None)], [], []]
    assert query.run() == 0
