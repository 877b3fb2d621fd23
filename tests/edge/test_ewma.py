"""EWMA on the edge engine: how it is run and worded, and that results do not depend on how it ran."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import polars as pl
import pytest
from tests.edge.runs import LATENESS_S, START, in_disorder, in_time, run_in_parts, same_rows

from fordstone import Pipeline, tumbling
from fordstone.connectors import stdout
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.errors import PlanMismatchError
from fordstone.plan.plan import Plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.explain import explain
from fordstone.planner.graph import build_graph

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double"}
ALPHA = 0.3
Row = tuple[str | None, int, float | None]


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], START + timedelta(seconds=row[1]), row[2])


def some_rows(seed: int, count: int) -> list[Row]:
    """Rows whose time moves on with some disorder; a few are late, many share a time, some have no value."""
    rng, rows = Random(seed), []
    for second in in_disorder(rng, count):
        x = rng.choice((None, 0.0, rng.uniform(-1e3, 1e3), rng.uniform(-1e3, 1e3)))
        rows.append((rng.choice(["a", "b", "é", None]), second, x))
    return rows


def oracle(partitions: list[list[Row]]) -> tuple[pl.DataFrame, int]:
    """Every row in time with its mean, and how many are late."""
    kept, late = in_time(partitions)
    found = []
    for key in {row[0] for row in kept}:
        mine = sorted(
            (row for row in kept if row[0] == key), key=lambda row: (row[1], row[2] is not None, row[2] or 0.0)
        )
        mean: float | None = None
        for row in mine:
            if row[2] is not None:
                mean = row[2] if mean is None else ALPHA * row[2] + (1 - ALPHA) * mean
            found.append((*record(row), mean))
    columns: dict[str, Any] = {"k": pl.String, "ts": pl.Datetime("us", "UTC"), "x": pl.Float64, "s": pl.Float64}
    return pl.DataFrame(found, schema=columns, orient="row"), late


def test_a_restart_with_other_subtasks_goes_on_with_the_rows_that_wait_and_the_means(tmp_path):
    partitions = [some_rows(seed, 90) for seed in (5, 6)]
    out, source = MemorySink(), MemorySource([[], []])
    pipeline = Pipeline("restarts")
    rows = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    rows.group_by("k").ewma(s="x", alpha=ALPHA).sink("out", memory(out))

    def some_wait(part: int) -> None:
        assert part == 2 or 0 < out.rows().height < 60 * (part + 1), "some rows are out, and some wait"

    run_in_parts(pipeline, source, [[record(row) for row in given] for given in partitions], tmp_path, after=some_wait)
    same_rows(out.rows(), oracle(partitions)[0])


def test_windows_over_means_and_means_over_windows(tmp_path):
    out, tops = MemorySink(), MemorySink()
    pipeline = Pipeline("both")
    given = [record(("a", second, float(second))) for second in range(40)]
    rows = pipeline.source("rows", memory([given]), schema=SCHEMA, time="ts")
    means = rows.group_by("k").window(tumbling("10s")).agg(mean="avg(x)")
    means.group_by("k").ewma(s="mean", alpha=0.5).sink("out", memory(out))
    smooth = rows.group_by("k").ewma(s="x", alpha=1, name="as_it_is")
    smooth.group_by("k").window(tumbling("10s")).agg(name="top_means", top="max(s)").sink("tops", memory(tops))
    pipeline.run(state=tmp_path, bounded=True, parallelism=2, batch_rows=3, interval="5ms")
    assert out.rows().sort("window_end")["s"].to_list() == [4.5, 9.5, 17.0, 25.75]
    assert tops.rows().sort("window_end")["top"].to_list() == [9.0, 19.0, 29.0, 39.0]


def test_rows_that_carry_ids_for_another_sink_are_smoothed_without_them(tmp_path):
    out, now = MemorySink(), MemorySink()
    pipeline = Pipeline("ids")
    rows = pipeline.source("rows", memory([[record(("a", 1, 2.0))]]), schema=SCHEMA, time="ts")
    rows.sink("now", memory(now), release="at_once")
    rows.group_by("k").ewma(s="x", alpha=0.5).sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    assert (out.rows().columns, now.rows().height) == (["k", "ts", "x", "s"], 1)


# What runs, and what is said of it.


def smoothing(*, keys: tuple[str, ...] = ("k",), alpha: float = 0.25, schema: dict[str, str] | None = None) -> Plan:
    pipeline = Pipeline("smooth")
    rows = pipeline.source("rows", memory(MemorySource()), schema=schema or SCHEMA, time="ts", lateness="5s")
    smooth = rows.group_by(*keys).ewma(s="x", fast="x * 2", alpha=alpha, name="smooth")
    smooth.sink("out", stdout())
    return pipeline.plan()


EXPLAINED = """\
task smooth x2: 2 steps fused
  smooth: exponentially weighted mean for each k, alpha 0.25
  │  smooths  x AS s, x * 2 AS fast
  │  columns  k string, ts timestamp, x double, s double, fast double
  │  keeps    the rows that wait for time, and one number per key and column
  └─ out: sink stdout(format='jsonl')
        releases  when the epoch is sealed
"""


def test_it_is_explained():
    text = explain(smoothing(), parallelism=2)
    assert EXPLAINED in text
    assert "→ task smooth: rows, shuffled by k\n" in text
    assert "→ task smooth: rows, all to one subtask\n" in explain(smoothing(keys=()), parallelism=2)
    assert '[("smooth<br/>exponentially weighted mean for each k, alpha 0.25")]' in explain(
        smoothing(), format="mermaid"
    )


def test_rows_are_shuffled_by_key_and_never_combined_first():
    for keys, subtasks in ((("k",), 3), ((), 1)):
        graph = build_graph(smoothing(keys=keys), 3)
        (edge,) = graph.into("smooth")
        assert (edge.keys, edge.feeder, graph.vertex("smooth").parallelism) == (keys, False, subtasks)


def test_what_its_state_depends_on_is_in_its_digest():
    wider = SCHEMA | {"more": "bigint"}
    turned = {name: SCHEMA[name] for name in reversed(SCHEMA)}
    plans = [smoothing(), smoothing(alpha=0.5), smoothing(keys=()), smoothing(schema=wider), smoothing(schema=turned)]
    digests = [step_digests(plan, stream_types(plan))["smooth"] for plan in plans]
    assert len(set(digests)) == len(plans)
    assert digests[0] == step_digests(smoothing(), stream_types(smoothing()))["smooth"]


def test_the_state_of_another_alpha_is_refused(tmp_path):
    source = MemorySource([[record(("a", 1, 2.0))]])

    def run(alpha: float) -> None:
        pipeline = Pipeline("changed")
        rows = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts")
        rows.group_by("k").ewma(s="x", alpha=alpha, name="smooth").sink("out", memory(MemorySink()))
        pipeline.run(state=tmp_path, bounded=True)

    run(0.5)
    with pytest.raises(PlanMismatchError, match="changed: smooth"):
        run(0.25)
