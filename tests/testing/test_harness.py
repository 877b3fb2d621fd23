"""The harness for tests of pipelines."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fordstone import KeyedFunction, Pipeline, ValueState, tumbling
from fordstone.connectors import files, memory, stdout
from fordstone.errors import ConfigError, SchemaError
from fordstone.testing import run_pipeline

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double"}
ROWS = [{"device": "abc"[n % 3], "ts": f"2026-01-01T00:00:{n:02d}Z", "temp": n / 7} for n in range(60)]

FRAME = pl.DataFrame(ROWS[1::2]).with_columns(pl.col("ts").str.to_datetime(time_zone="UTC"))


class Rising(KeyedFunction):
    """Emits a row that is warmer than the one before it."""

    last = ValueState("double")

    def process(self, record: dict[str, Any], ctx: Any) -> Any:
        before = self.last.get()
        self.last.set(record["temp"])
        if before is not None and record["temp"] > before:
            yield record


def built(folder: str = "in") -> Pipeline:
    pipeline = Pipeline("rooms")
    readings = pipeline.source("readings", files(f"{folder}/*.jsonl"), schema=SCHEMA, time="ts", lateness="2s")
    windows = readings.group_by("device").window(tumbling("10s")).agg(n="count(*)", mean="avg(temp)")
    windows.sink("windows", files("windows", format="parquet"))
    windows.late.sink("late", stdout())
    readings.group_by("device").agg(top="max(temp)").sink("tops", files("tops", format="jsonl"))
    readings.group_by("device").process(Rising).sink("rising", files("rising", format="jsonl"))
    readings.filter("temp > 8").sink("hot", files("hot", format="jsonl"), release="at_once")
    return pipeline


def test_rows_go_in_and_frames_come_out_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    out = run_pipeline(built, {"readings": ROWS})
    assert sorted(out) == ["hot", "late", "rising", "tops", "windows"]
    assert out["windows"]["n"].sum() == 60
    assert sorted(out["tops"].rows()) == [("a", 57 / 7), ("b", 58 / 7), ("c", 59 / 7)]
    assert out["hot"].height == 3
    assert out["rising"].height == 57
    assert (out.crashes, out.dead_letters) == (0, {})
    assert out.epochs > 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(8))
def test_crashes_change_nothing(seed: int):
    out = run_pipeline(built, {"readings": [ROWS[::2], FRAME]}, crashes=3, seed=seed, parallelism=2)
    assert out.crashes == 3
    assert out["windows"]["n"].sum() == 60


def test_a_pipeline_that_is_not_repeatable_is_found_out():
    numbers = itertools.count()

    def counted() -> Pipeline:
        pipeline = Pipeline("counts")
        source = pipeline.source("rows", memory([{"n": 0}]), schema={"n": "bigint"})
        source.map(lambda record: {"n": next(numbers)}).sink("out", stdout())
        return pipeline

    with pytest.raises(AssertionError, match=r"sink out: after 2 crashes \(seed 0\) its rows are not those of the run"):
        run_pipeline(counted, {"rows": [{"n": n} for n in range(20)]}, crashes=2)


def test_rows_that_cannot_be_read_are_dead_letters_also_after_crashes():
    pipeline = Pipeline("bad")
    pipeline.source("rows", files("in/*.csv"), schema={"n": "bigint"}).sink("out", stdout())
    rows = [{"n": 1}, {"n": "one"}, {"n": 2}]
    for crashes in (0, 2):
        out = run_pipeline(pipeline, {"rows": rows}, crashes=crashes)
        assert out["out"]["n"].to_list() == [1, 2]
        assert out.dead_letters["rows"].height == 1


def test_two_tiers_run_with_nodes():
    pipeline = Pipeline("fleet")
    readings = pipeline.source("readings", files("in/*.jsonl"), schema=SCHEMA)
    readings.to_center().group_by("device").agg(n="count(*)").sink("counts", files("counts", format="jsonl"))
    readings.filter("temp > 8").sink("hot", files("hot", format="jsonl"))
    out = run_pipeline(pipeline, {"readings": [ROWS[:30], ROWS[30:]]}, nodes=2)
    assert sorted(out["counts"].rows()) == [("a", 20), ("b", 20), ("c", 20)]
    assert out["hot"].height == 3
    with pytest.raises(ConfigError, match="without crashes"):
        run_pipeline(pipeline, {"readings": ROWS}, crashes=1)


def test_mistakes_are_errors():
    with pytest.raises(ConfigError, match=r"no source 'reading'. Did you mean 'readings'\?"):
        run_pipeline(built, {"reading": ROWS})
    with pytest.raises(SchemaError, match=r"source readings: no row has the column 'temp'. Did you mean 'tmp'\?"):
        run_pipeline(built, {"readings": [{"device": "a", "ts": None, "tmp": 1.0}]})
    with pytest.raises(ConfigError, match="a generator can be read once"):
        run_pipeline(built, {"readings": iter(ROWS)})
    with pytest.raises(ConfigError, match="one tier"):
        run_pipeline(built, {"readings": ROWS}, nodes=2)
    with pytest.raises(KeyError, match="Did you mean 'windows'"):
        run_pipeline(built, {"readings": ROWS})["window"]
