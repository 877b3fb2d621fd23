"""Aggregates in whole pipelines on the edge engine: in windows and running, whatever the batches, tasks and restarts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, ClassVar

import polars as pl
import pytest
from tests.edge.runs import START, run_in_parts

from fordstone import Aggregator, Pipeline, by_count, session, sliding, tumbling
from fordstone.connectors.memory import MemorySink, MemorySource, memory

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double", "s": "string"}
TEXTS = {
    "first": "first(x)", "last": "last(s)", "var": "variance(x)", "dev": "stddev_pop(x)", "different": "count_distinct(s)",
    "mid": "median(x)", "high": "quantile(x, 0.9)", "all": "collect(x)",
}  # fmt: skip
Row = tuple[str, int, float | None, str | None]


class Longest(Aggregator):
    """The longest text, the least of several; and how many rows there were."""

    state: ClassVar = {"text": "string", "rows": "bigint"}
    result = "string"

    def add(self, *values: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"text": self._longest(values[0]), "rows": pl.len().cast(pl.Int64)}

    def merge(self, *state: pl.Expr) -> Mapping[str, pl.Expr]:
        return {"text": self._longest(state[0]), "rows": state[1].sum()}

    def finish(self, *state: pl.Expr) -> pl.Expr:
        return pl.format("{}/{}", state[0].fill_null("-"), state[1])

    def _longest(self, text: pl.Expr) -> pl.Expr:
        return text.sort_by([-text.str.len_bytes().cast(pl.Int64), text], nulls_last=True).first()


def some_rows(seed: int, count: int) -> list[Row]:
    rng = random.Random(seed)
    return [
        (rng.choice("ab"), second // 2, rng.choice((None, round(rng.uniform(-9, 9), 3))), rng.choice((None, "é", "", "long")))
        for second in range(count)
    ]  # fmt: skip


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], START + timedelta(seconds=row[1]), row[2], row[3])


def wanted(rows: list[Row]) -> dict[str, Any]:
    """The results over some rows, in plain Python."""

    def in_order(at: int) -> list[Any]:
        return [row[at] for row in sorted(rows, key=lambda row: (row[1], () if row[at] is None else (row[at],)))]

    values = sorted(row[2] for row in rows if row[2] is not None)
    mean = math.fsum(values) / len(values) if values else 0.0
    squares = math.fsum((value - mean) ** 2 for value in values)
    texts = [row[3] for row in rows if row[3] is not None]
    longest = min(texts, key=lambda text: (-len(text.encode()), text)) if texts else "-"
    return {
        "first": in_order(2)[0],
        "last": in_order(3)[-1],
        "var": squares / (len(values) - 1) if len(values) > 1 else None,
        "dev": math.sqrt(squares / len(values)) if values else None,
        "different": len(set(texts)),
        "mid": values[math.ceil(len(values) / 2) - 1] if values else None,
        "high": values[math.ceil(len(values) * 9 / 10) - 1] if values else None,
        "all": [value for value in in_order(2) if value is not None],
        "own": f"{longest}/{len(rows)}",
    }


def check(found: Mapping[str, Any], rows: list[Row]) -> None:
    for name, value in wanted(rows).items():
        assert found[name] == (pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value), name


def seconds(moment: datetime) -> int:
    return (moment - START) // timedelta(seconds=1)


@pytest.mark.parametrize(("parallelism", "batch_rows"), [(1, 1), (1, 1000), (2, 3), (3, 20)])
def test_results_are_those_of_the_rows_of_each_window(tmp_path, parallelism, batch_rows):
    partitions = [some_rows(seed, 80) for seed in (1, 2)]
    everything = [row for rows in partitions for row in rows]
    kinds = {"tumbling": tumbling("10s"), "sliding": sliding("10s", every="5s"), "running": None}
    sinks = {name: MemorySink() for name in kinds}
    pipeline = Pipeline("kinds")
    source = MemorySource([[record(row) for row in rows] for rows in partitions])
    stream = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts")
    for name, window in kinds.items():
        grouped = stream.group_by("k") if window is None else stream.group_by("k").window(window)
        grouped.agg(name=name, own=Longest.of("s"), **TEXTS).sink(f"to_{name}", memory(sinks[name]))
    pipeline.run(state=tmp_path, bounded=True, parallelism=parallelism, batch_rows=batch_rows, interval="5ms")
    for name in ("tumbling", "sliding"):
        found = sinks[name].rows().to_dicts()
        assert len(found) >= 8
        for row in found:
            start, end = seconds(row["window_start"]), seconds(row["window_end"])
            check(row, [one for one in everything if one[0] == row["k"] and start <= one[1] < end])
    latest = {row["k"]: row for row in sinks["running"].rows().to_dicts()}
    assert set(latest) == {"a", "b"}
    for key, row in latest.items():
        check(row, [one for one in everything if one[0] == key])


def test_sessions_and_counts_have_them_too(tmp_path):
    rows = [row for row in some_rows(4, 120) if row[1] % 20 < 14]
    sinks = {name: MemorySink() for name in ("session", "count")}
    pipeline = Pipeline("stretches")
    stream = pipeline.source("rows", memory(MemorySource([[record(row) for row in rows]])), schema=SCHEMA, time="ts")
    stream.group_by("k").window(session("5s")).agg(own=Longest.of("s"), **TEXTS).sink(
        "sessions", memory(sinks["session"])
    )
    stream.group_by().window(by_count(30)).agg(own=Longest.of("s"), **TEXTS).sink("counts", memory(sinks["count"]))
    pipeline.run(state=tmp_path, bounded=True, batch_rows=7)
    found = sinks["session"].rows().to_dicts()
    assert len(found) >= 4
    for row in found:
        start, end = seconds(row["window_start"]), seconds(row["window_end"])
        check(row, [one for one in rows if one[0] == row["k"] and start <= one[1] < end])
    assert [len(row["all"]) > 0 and row["own"].endswith("/30") for row in sinks["count"].rows().to_dicts()] == [
        True
    ] * (len(rows) // 30)


def test_an_aggregator_that_cannot_be_imported_runs_in_the_process_that_built_the_pipeline(tmp_path):
    class Local(Longest):
        """Known here only."""

    out = MemorySink()
    pipeline = Pipeline("local")
    source = MemorySource([[record(row) for row in some_rows(3, 20)]])
    stream = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts")
    stream.group_by().window(session("1m")).agg(own=Local.of("s")).sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    assert out.rows()["own"].to_list() == ["long/20"]


def test_a_restart_with_other_subtasks_goes_on_with_every_kind_of_part(tmp_path):
    rows = some_rows(9, 90)
    windows, running, source = MemorySink(), MemorySink(), MemorySource([[]])
    pipeline = Pipeline("restarts")
    stream = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts")
    stream.group_by("k").window(tumbling("30s")).agg(own=Longest.of("s"), **TEXTS).sink("windows", memory(windows))
    stream.group_by("k").agg(own=Longest.of("s"), **TEXTS).sink("running", memory(running))
    run_in_parts(pipeline, source, [[record(row) for row in rows]], tmp_path, out=False)
    assert windows.rows().height >= 4
    for row in windows.rows().to_dicts():
        start, end = seconds(row["window_start"]), seconds(row["window_end"])
        check(row, [one for one in rows if one[0] == row["k"] and start <= one[1] < end])
    for key, row in {row["k"]: row for row in running.rows().to_dicts()}.items():
        check(row, [one for one in rows if one[0] == key])
