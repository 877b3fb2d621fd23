"""Event time that a step assigns: rows are judged as if the source had the column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fordstone import Pipeline
from fordstone.connectors import MemorySink, files, memory, rows
from fordstone.errors import SourceError
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.runtime.partition import has_event_time, limit_us

SCHEMA = {"id": "bigint", "t": "string"}


def at(second: int) -> str:
    return f"01.01.2026 00:00:{second:02}"


def pipeline_over(given: list[tuple[Any, ...]], **options: Any) -> tuple[Pipeline, Any]:
    pipeline = Pipeline("timed")
    return pipeline, pipeline.source("rows", memory([given]), schema=SCHEMA, **options)


READ = "CAST(concat(substr(t, 7, 4), '-', substr(t, 4, 2), '-', substr(t, 1, 2), substr(t, 11)) AS TIMESTAMP) AS ts"


@pytest.mark.parametrize("batch_rows", [1, 2, 1000])
def test_rows_that_a_step_before_drops_move_no_time_on(tmp_path: Path, batch_rows: int):
    given = [(1, at(1)), (0, at(50)), (2, at(2)), (3, at(9)), (4, at(8)), (0, at(59)), (5, at(3))]
    pipeline, stream = pipeline_over(given)
    means = stream.filter("id > 0").with_time(READ, lateness="2s").group_by().ewma(mean="id", alpha=0.5)
    kept, late = MemorySink(), MemorySink()
    means.sink("kept", memory(kept))
    means.late.sink("late", memory(late))
    report = pipeline.run(state=tmp_path, bounded=True, batch_rows=batch_rows)
    assert kept.rows()["id"].to_list() == [1, 2, 4, 3]
    assert late.rows()["id"].to_list() == [5]
    assert (report.progress.rows_in, report.progress.rows_late) == (7, 1)


def test_each_row_that_is_made_of_one_row_is_judged_by_its_own_time(tmp_path: Path):
    given = [(1, f"{at(1)},{at(9)}"), (2, f"{at(8)},{at(2)}")]
    pipeline, stream = pipeline_over(given)
    means = stream.flat_map("split(t, ',') AS t").with_time(READ, lateness="2s").group_by().ewma(mean="id", alpha=0.5)
    kept, late = MemorySink(), MemorySink()
    means.select("id", "second(ts) AS s").sink("kept", memory(kept))
    means.late.select("id", "second(ts) AS s").sink("late", memory(late))
    pipeline.run(state=tmp_path, bounded=True)
    assert kept.rows().rows() == [(1, 1), (2, 8), (1, 9)]
    assert late.rows().rows() == [(2, 2)]


def test_a_row_whose_time_cannot_be_read_is_a_dead_letter_and_still_reaches_other_readers(tmp_path: Path):
    pipeline, stream = pipeline_over([(1, at(1)), (2, "yesterday"), (3, None), (4, at(4))])
    timed, counted = MemorySink(), MemorySink()
    stream.with_time(READ, name="read_time").select("id").sink("timed", memory(timed))
    stream.select("id").sink("all", memory(counted))
    report = pipeline.run(state=tmp_path, bounded=True)
    assert timed.rows()["id"].to_list() == [1, 4]
    assert counted.rows()["id"].to_list() == [1, 2, 3, 4]
    assert report.progress.rows_rejected == 2
    letters = rows(next(tmp_path.glob("timed/*/dead-letters/rows")))
    assert letters["reason"].unique().to_list() == ["column ts (read_time) is null or out of range"]
    assert [json.loads(text)["id"] for text in letters["text"]] == [2, 3]


def test_on_error_fail_stops_at_a_time_that_cannot_be_read(tmp_path: Path):
    pipeline, stream = pipeline_over([(1, at(1)), (2, "yesterday")], on_error="fail")
    stream.with_time(READ).sink("timed", memory(MemorySink()))
    with pytest.raises(SourceError, match=r"column ts .with_time. is null or out of range"):
        pipeline.run(state=tmp_path, bounded=True)


def test_ids_of_rows_released_at_once_are_those_of_their_positions(tmp_path: Path):
    pipeline, stream = pipeline_over([(1, at(1)), (0, at(2)), (2, at(3))])
    out = MemorySink()
    stream.filter("id > 0").with_time(READ).sink("out", memory(out), release="at_once")
    pipeline.run(state=tmp_path, bounded=True)
    plain, ids = MemorySink(), Pipeline("timed")
    source = ids.source("rows", memory([[(1, at(1)), (0, at(2)), (2, at(3))]]), schema=SCHEMA)
    source.filter("id > 0").sink("out", memory(plain), release="at_once")
    ids.run(state=tmp_path / "other", bounded=True)
    assert out.rows()["__id"].to_list() == plain.rows()["__id"].to_list()
    assert out.rows()["__id"].n_unique() == 2


def test_a_source_whose_time_is_assigned_has_event_time_and_a_limit():
    step = p.Source(name="s", connector=p.ConnectorSpec("memory"), schema=SCHEMA, timed_by="with_time", max_ahead_us=5)
    assert has_event_time(step)
    assert limit_us(step, wall_us=100, clock_us=100, watermark_us=TIME_MIN_US, bounded=False) == 105


# Units.

MILLIS = [1767225606000, 1767225607000]


def in_file(folder: Path, times: list[int], name: str = "in.jsonl") -> str:
    path = folder / name
    lines = [json.dumps({"ts": time}) for time in times] if name.endswith("jsonl") else ["ts", *map(str, times)]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("factor", "read_as", "problem"),
    [
        (1, "us", r"column ts: 1767225606000, read as microseconds, is 1970-01-21T10:53:45.606000Z; as milliseconds it is 2026-01-01T00:00:06Z. Use time_unit=\"ms\""),
        (0.001, "us", r"1767225606, read as microseconds, .*; as seconds it is 2026-01-01T00:00:06Z. Use time_unit=\"s\""),
        (0.001, "ms", r"1767225606, read as milliseconds, is 1970-01-21T10:53:45.606000Z; .* Use time_unit=\"s\""),
        (1_000_000, "us", "is not a timestamp: 1767225606000000000, read as microseconds, is in the year 57,971; as nanoseconds it is 2026-01-01T00:00:06Z. Convert"),
        (1_000, "ms", r"is not a timestamp: 1767225606000000, read as milliseconds, .* Use time_unit=\"us\""),
        (1, "s", r"is not a timestamp: 1767225606000, read as seconds, .* Use time_unit=\"ms\""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_numbers_in_a_wrong_unit_stop_the_pipeline(
    tmp_path: Path, factor: float, read_as: Any, problem: str, name: str
):
    pipeline = Pipeline("units")
    path = in_file(tmp_path, [int(time * factor) for time in MILLIS], name)
    source = pipeline.source(
        "rows", files(path, time_unit=read_as), schema={"ts": "timestamp"}, time="ts", on_error="fail"
    )
    source.sink("out", memory(MemorySink()))
    with pytest.raises(SourceError, match=problem):
        pipeline.run(state=tmp_path / "state", bounded=True)


def test_times_that_are_meant_and_the_zero_of_a_device_without_a_clock_are_taken(tmp_path: Path):
    for number, (times, options) in enumerate([(MILLIS, {"check_time_unit": False}), ([0, 1767225606000000], {})]):
        pipeline, out = Pipeline(f"units{number}"), MemorySink()
        connector = files(in_file(tmp_path, times))
        pipeline.source("rows", connector, schema={"ts": "timestamp"}, time="ts", **options).sink("out", memory(out))  # type: ignore[arg-type]  # one option
        pipeline.run(state=tmp_path / "state", bounded=True)
        assert out.rows()["ts"].cast(pl.Int64).to_list() == times


def test_an_expression_in_a_wrong_unit_stops_the_pipeline(tmp_path: Path):
    def run(**options: Any) -> MemorySink:
        pipeline, out = Pipeline("units"), MemorySink()
        source = pipeline.source("rows", memory([[(time,) for time in MILLIS]]), schema={"ms": "bigint"})
        source.with_time("timestamp_micros(ms) AS ts", **options).sink("out", memory(out))
        pipeline.run(state=tmp_path / str(options), bounded=True)
        return out

    with pytest.raises(
        SourceError, match=r"1970-01-21T10:53:45.606000Z. .* 1,000 times as much is 2026-01-01T00:00:06Z"
    ):
        run()
    assert run(check_time_unit=False).rows().height == 2
