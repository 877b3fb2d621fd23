"""Deduplication, means by half-life and rates on the edge engine: results do not depend on how it ran; and how it is worded."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from scipy import special  # type: ignore[import-untyped]  # it ships no types
from tests.edge.runs import LATENESS_S, START, in_disorder, in_time

from fordstone import Pipeline, beta_high, beta_low, col, sliding, tumbling
from fordstone.connectors import stdout
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.plan.plan import Plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.explain import explain

SCHEMA = {"id": "string", "ts": "timestamp", "x": "double"}
WITHIN_S, HALF_LIFE_S = 6, 4
Row = tuple[str | None, int, float]
RUNS = [(1, "aligned", 1), (1, "aligned", 1000), (2, "aligned", 7), (2, "unaligned", 3), (3, "blocking", 20)]


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], START + timedelta(seconds=row[1]), row[2])


def some_rows(seed: int, count: int) -> list[Row]:
    """Rows whose time moves on with some disorder; a few are late, and ids come again soon or later."""
    rng = Random(seed)
    return [(rng.choice(["a", "b", "é", None]), second, rng.uniform(-9, 9)) for second in in_disorder(rng, count)]


def without_duplicates(rows: list[Row]) -> pl.DataFrame:
    found: list[tuple[Any, ...]] = []
    kept_s: dict[str | None, int] = {}
    for row in sorted(rows, key=lambda row: (row[1], row[0] or "", row[2])):
        if row[0] not in kept_s or row[1] - kept_s[row[0]] >= WITHIN_S:
            kept_s[row[0]] = row[1]
            found.append(record(row))
    columns: dict[str, Any] = {"id": pl.String, "ts": pl.Datetime("us", "UTC"), "x": pl.Float64}
    return pl.DataFrame(found, schema=columns, orient="row")


def smoothed(rows: list[Row]) -> pl.DataFrame:
    """Every row with the mean of all before it by age, summed anew for each."""
    found = []
    for at, row in enumerate(given := sorted(rows, key=lambda row: (row[1], row[2]))):
        mine = [(2 ** ((other[1] - row[1]) / HALF_LIFE_S), other[2]) for other in given[: at + 1] if other[0] == row[0]]
        found.append((*record(row), sum(w * x for w, x in mine) / sum(w for w, _ in mine)))
    columns: dict[str, Any] = {"id": pl.String, "ts": pl.Datetime("us", "UTC"), "x": pl.Float64, "s": pl.Float64}
    return pl.DataFrame(found, schema=columns, orient="row")


def same_rows(got: pl.DataFrame, wanted: pl.DataFrame, *, exact: bool) -> None:
    order = ["id", "ts", "x"]
    assert_frame_equal(got.select(wanted.columns).sort(order), wanted.sort(order), check_exact=exact)


@pytest.mark.parametrize(("parallelism", "mode", "batch_rows"), RUNS)
def test_results_equal_plain_loops_whatever_the_batches_tasks_and_barriers(tmp_path, parallelism, mode, batch_rows):
    partitions = [some_rows(seed, 120) for seed in range(3)]
    once, late, means = MemorySink(), MemorySink(), MemorySink()
    pipeline = Pipeline("events", mode=mode)
    source = MemorySource([[record(row) for row in rows] for rows in partitions])
    rows = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    kept = rows.deduplicate("id", within=f"{WITHIN_S}s")
    kept.sink("once", memory(once))
    kept.late.sink("late", memory(late))
    rows.group_by("id").ewma(s="x", half_life=f"{HALF_LIFE_S}s").sink("means", memory(means))
    pipeline.run(state=tmp_path, bounded=True, parallelism=parallelism, batch_rows=batch_rows, interval="5ms")
    wanted, late_rows = in_time(partitions)
    same_rows(once.rows(), without_duplicates(wanted), exact=True)
    assert late.rows().height == late_rows > 0
    same_rows(means.rows(), smoothed(wanted), exact=False)


def test_windows_count_rows_once_behind_a_deduplication(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("twice")
    given = [record((f"{second}", second, 1.0)) for second in range(20) for _ in range(2)]
    rows = pipeline.source("rows", memory([given]), schema=SCHEMA, time="ts")
    rows.deduplicate("id", within="1h").group_by().window(tumbling("10s")).agg(n="count(*)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True, parallelism=2, batch_rows=3)
    assert out.rows()["n"].to_list() == [10, 10]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_rates_with_their_intervals_in_windows_and_running(tmp_path, parallelism):
    tumbled, slid, running = MemorySink(), MemorySink(), MemorySink()
    pipeline = Pipeline("rates")
    given = [record(("ab"[second % 2], second, float(second % 7))) for second in range(40)]
    rows = pipeline.source("rows", memory([given]), schema=SCHEMA, time="ts")
    ok = col("x") > 2
    by_id = rows.group_by("id")
    estimates: dict[str, Any] = {
        "mean": "beta_mean(x > 2)",
        "low": beta_low(ok, 0.9),
        "high": beta_high(ok, 0.9, prior=(2, 0.5)),
    }
    by_id.window(tumbling("10s")).agg(good="sum(CASE WHEN x > 2 THEN 1 ELSE 0 END)", n="count(*)", **estimates).sink(
        "tumbled", memory(tumbled)
    )
    by_id.window(sliding("20s", every="10s")).agg(
        good="sum(CASE WHEN x > 2 THEN 1 ELSE 0 END)", n="count(*)", **estimates
    ).sink("slid", memory(slid))
    by_id.agg(good="sum(CASE WHEN x > 2 THEN 1 ELSE 0 END)", n="count(*)", **estimates).sink("running", memory(running))
    pipeline.run(state=tmp_path, bounded=True, parallelism=parallelism, batch_rows=3)
    for sink in (tumbled, slid, running):
        assert sink.rows().height > 1
        for good, n, mean, low, high in sink.rows().select("good", "n", "mean", "low", "high").iter_rows():
            assert mean == pytest.approx((1 + good) / (2 + n), rel=1e-12)
            assert low == pytest.approx(special.betaincinv(1 + good, 1 + n - good, 0.05), rel=1e-9)
            assert high == pytest.approx(special.betainccinv(2 + good, 0.5 + n - good, 0.05), rel=1e-9)


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
