"""Patterns on the edge engine: how they are run and worded, and that results do not depend on how they ran."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fordstone import Pattern, Pipeline, tumbling
from fordstone.connectors import stdout
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.planner.explain import explain

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double"}
START = datetime(2026, 3, 29, 0, 59, tzinfo=UTC)
LATENESS_S = 3
RISE = (
    Pattern("rise")
    .start("a", "x > 5")
    .then("b", "x > a.x", times=(1, 3), greedy=True)
    .next("c", "x < b.x")
    .within("20s")
)
MEASURES = {"since": "first(a.ts)", "n": "count(b.*)", "peak": "max(b.x)", "low": "c.x"}


def some_rows(seed: int, count: int) -> list[tuple[str | None, datetime, float | None]]:
    """Rows whose time moves on with some disorder; a few are late, many share a time."""
    rng, now, rows = random.Random(seed), 0, []
    for _ in range(count):
        now += rng.choice((0, 0, 1))
        back = rng.choice((0, 0, 1, LATENESS_S, LATENESS_S + 2))
        x = rng.choice((None, float(rng.randrange(12)), rng.uniform(0, 12)))
        rows.append((rng.choice(["a", "b", "é", None]), START + timedelta(seconds=now - back), x))
    return rows


def made(partitions: list[list[Any]], mode: Any = "aligned", **options: Any) -> tuple[Pipeline, dict[str, MemorySink]]:
    sinks = {name: MemorySink() for name in ("out", "late", "over")}
    pipeline = Pipeline("patterns", mode=mode)
    rows = pipeline.source(
        "rows", memory(MemorySource(partitions)), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s"
    )
    found = rows.group_by("k").match(RISE, MEASURES, **options)
    found.sink("out", memory(sinks["out"]))
    found.late.sink("late", memory(sinks["late"]))
    found.timeouts.sink("over", memory(sinks["over"]))
    return pipeline, sinks


def shown(sinks: dict[str, MemorySink]) -> dict[str, Counter[Any]]:
    return {name: Counter(row for frame in sink.frames() for row in frame.rows()) for name, sink in sinks.items()}


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["past_last", "none"])
def test_results_do_not_depend_on_batches_tasks_barriers_and_modes(tmp_path, skip):
    partitions = [some_rows(seed, 120) for seed in range(3)]
    results = []
    for number, (parallelism, mode, batch_rows) in enumerate(
        [(1, "aligned", 1000), (1, "aligned", 1), (3, "aligned", 7), (2, "unaligned", 3), (2, "blocking", 20)]
    ):
        pipeline, sinks = made(partitions, mode, skip=skip)
        pipeline.run(
            state=tmp_path / str(number), bounded=True, parallelism=parallelism, batch_rows=batch_rows, interval="5ms"
        )
        results.append(shown(sinks))
    assert all(result == results[0] for result in results)
    assert all(sum(found.values()) > 3 for found in results[0].values())


def test_windows_over_matches_count_them_by_when_they_were_decided(tmp_path):
    out, pipeline = MemorySink(), Pipeline("hours")
    given = [("a", START + timedelta(seconds=second), float(second % 5)) for second in range(60)]
    rows = pipeline.source("rows", memory([given]), schema=SCHEMA, time="ts")
    up = Pattern("up").start("low", "x = 0").next("high", "x = 1").within("1m")
    ups = rows.group_by("k").match(up, {"at": "match_time()"})
    ups.group_by("k").window(tumbling("20s")).agg(n="count(*)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True, parallelism=2, batch_rows=3, interval="5ms")
    assert out.rows().sort("window_end")["n"].to_list() == [4, 4, 4]


def test_explain_says_what_is_looked_for_and_what_is_kept():
    pipeline = Pipeline("explained")
    rows = pipeline.source("rows", memory([[]]), schema=SCHEMA, time="ts")
    rows.group_by("k").match(RISE, MEASURES).sink("out", stdout())
    text = explain(pipeline.plan())
    assert "pattern rise for each k" in text
    assert "a (x > 5), then b 1 to 3 times, greedy (x > a.x), next c (x < b.x), within 20s" in text
    assert "open candidates, at most" in text
