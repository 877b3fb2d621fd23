"""The edge part of a split plan on the engine: what crosses is one partial row a key and window, whatever runs it."""

from __future__ import annotations

import signal
from collections import Counter
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import polars as pl
import pytest
from tests.edge.runs import START, in_disorder, run_in_parts, with_watermarks

from fordstone import Pipeline, sliding, tumbling
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.edge.engine import replay
from fordstone.edge.engine.replay import extra_rows, nondeterministic_sinks
from fordstone.plan import plan as p
from fordstone.plan.plan import Plan
from fordstone.planner.check import stream_types
from fordstone.planner.split import split
from fordstone.protocol.progress import Progress

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double"}
SECOND_US = 1_000_000
Row = tuple[str, int, float]


class EdgePart(Pipeline):
    """A pipeline that runs as its edge part, with what crosses going to memory."""

    crossed: MemorySink

    def plan(self) -> Plan:
        edge = split(super().plan()).edge
        steps = [
            msgspec.structs.replace(step, connector=memory(self.crossed))
            if isinstance(step, p.Sink) and step.connector.kind == "center"
            else step
            for step in edge.steps
        ]
        return msgspec.structs.replace(edge, steps=tuple(steps))


def part_of(source: MemorySource, window: Any, **aggregates: Any) -> EdgePart:
    pipeline = EdgePart("fleet")
    pipeline.crossed = MemorySink()
    stream = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts", lateness="3s").to_center(name="cut")
    grouped = stream.group_by("k")
    result = (grouped if window is None else grouped.window(window)).agg(name="step", **aggregates)
    result.sink("out", memory(MemorySink()))
    return pipeline


def row_counts(crossed: pl.DataFrame) -> pl.Series:
    """How many rows each partial row stands for."""
    return crossed.select(pl.selectors.starts_with("__rows_")).to_series()


def some_rows(seed: int, count: int) -> list[Row]:
    rng = Random(seed)
    return [(rng.choice("abc"), second, float(rng.randint(-9, 9))) for second in in_disorder(rng, count)]


def record(row: Row) -> tuple[Any, ...]:
    return (row[0], START + timedelta(seconds=row[1]), row[2])


def last_end(window: Any, second: int) -> int:
    """The second at which the last window closes that a row is in."""
    at = round(START.timestamp())
    match window:
        case p.Tumbling(size_us=size):
            return (second + at) // (size // SECOND_US) * (size // SECOND_US) + size // SECOND_US - at
        case p.Sliding(size_us=size, slide_us=slide):
            return (second + at) // (slide // SECOND_US) * (slide // SECOND_US) + size // SECOND_US - at
    return second + 10**9


@pytest.mark.parametrize("window", [None, tumbling("10s"), sliding("10s", every="4s")])
def test_every_row_in_time_crosses_once_whatever_the_subtasks_and_restarts(window: Any, tmp_path: Path) -> None:
    partitions = [some_rows(seed, 90) for seed in (1, 2)]
    source = MemorySource([[] for _ in partitions])
    pipeline = part_of(source, window, n="count(*)", s="sum(x)")
    run_in_parts(pipeline, source, [[record(row) for row in rows] for rows in partitions], tmp_path, out=False)
    kept = [row for row, watermark in with_watermarks(partitions) if last_end(window, row[1]) > watermark]
    crossed = pipeline.crossed.rows()
    assert row_counts(crossed).sum() == len(kept)
    assert (len(kept) < 180) == (window is not None)
    sums = Counter[str]()
    for k, value in crossed.select("k", "__s0").iter_rows():
        sums[k] += value
    wanted = Counter[str]()
    for k, _, value in kept:
        wanted[k] += value  # type: ignore[assignment]  # whole floats
    assert sums == wanted


def test_an_epoch_has_one_partial_row_a_key_and_window_with_several_subtasks(tmp_path: Path) -> None:
    source = MemorySource([[] for _ in range(4)])
    for partition in range(4):
        source.append(partition, [record(("ab"[at % 2], at % 20, 1.0)) for at in range(20)])
    pipeline = part_of(source, tumbling("10s"), n="count(*)")
    pipeline.run(state=tmp_path, bounded=True, parallelism=3, interval="1h")
    crossed = pipeline.crossed.rows()
    assert sorted(row_counts(crossed).to_list()) == sorted([20, 20, 20, 20])
    assert crossed.select("k", "__end").is_unique().all()


def test_sketches_that_cross_are_compared_by_number_when_an_epoch_is_computed_again() -> None:
    plain = split(Pipeline.plan(part_of(MemorySource(), None, n="count(*)", top="max(x)"))).edge
    assert nondeterministic_sinks(plain, stream_types(plain)) == frozenset()
    for sql in ("count_distinct(k)", "median(x)", "collect(x)"):
        plan = split(Pipeline.plan(part_of(MemorySource(), None, n=sql))).edge
        assert nondeterministic_sinks(plan, stream_types(plan)) == {"cut"}


def test_partial_rows_have_the_columns_that_the_plan_says(tmp_path: Path) -> None:
    source = MemorySource([[] for _ in range(4)])
    source.append(0, [record(("a", 1, 1.0))])
    pipeline = part_of(source, None, mid="median(x)", d="count_distinct(k)")
    plan = pipeline.plan()
    pipeline.run(state=tmp_path, bounded=True)
    crossed: pl.DataFrame = pipeline.crossed.rows()
    wanted = stream_types(plan)[p.Input("cut")].schema.polars
    assert {name: crossed.schema[name] for name in wanted} == dict(wanted)


def test_sealed_epochs_are_computed_again_alike_with_another_number_of_subtasks(tmp_path: Path) -> None:
    rng = Random(7)
    source = MemorySource([[] for _ in range(3)])
    pipeline = part_of(source, tumbling("10s"), n="count(*)", s="sum(x)", last="last(x)")

    def more(parallelism: int, *, bounded: bool = False) -> None:
        """Three epochs at least, each with some rows of every partition."""
        for partition in range(3):
            source.append(partition, [record((rng.choice("abc"), 5 * rng.randint(0, 9), 0.5)) for _ in range(20)])
        started: list[int] = []
        stopped: list[int] = []

        def stop(progress: Progress) -> None:
            started.append(progress.epoch)
            if not stopped and progress.epoch >= started[0] + 3 and progress.rows_in >= 60:
                stopped.append(progress.epoch)
                signal.raise_signal(signal.SIGTERM)

        pipeline.run(
            state=tmp_path,
            bounded=bounded,
            parallelism=parallelism,
            interval="5ms",
            on_progress=None if bounded else stop,
        )

    more(3)
    more(2)
    manifests = sorted((tmp_path / "fleet").glob("*/manifests/*"))
    assert manifests
    before = pipeline.crossed.rows()
    for manifest in manifests:
        manifest.unlink()
    compared: list[int] = []

    def counted(cut: Any, sink: str, sealed: Any, replayed: Any, **options: Any) -> list[pl.DataFrame]:
        compared.append(sum(run.rows for segment in cut.segments for run in segment.runs))
        return extra_rows(cut, sink, sealed, replayed, **options)

    with patch.object(replay, "extra_rows", counted):
        more(1, bounded=True)
    assert sum(compared) > 0  # partial rows that had been sealed were made again
    crossed = pipeline.crossed.rows()
    assert crossed.height > before.height
    kept = row_counts(crossed).sum()
    assert row_counts(before).sum() < kept <= 180
    assert crossed.get_column("__s0").sum() == kept / 2
