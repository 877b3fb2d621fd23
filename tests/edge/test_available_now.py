"""`available_now`: what is there is read, windows stay open, and the next run goes on. A second bounded run never loses input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest
from tests.edge.runs import in_disorder

from fordstone import Pipeline, tumbling
from fordstone.connectors import files, generator, memory
from fordstone.connectors.memory import MemorySink, MemorySource
from fordstone.edge.run import run
from fordstone.errors import CheckpointError, ConfigError
from fordstone.protocol.progress import Progress

SCHEMA = {"device": "string", "ts": "timestamp"}
START = datetime(2026, 1, 1, tzinfo=UTC)


def rows(*seconds: int, device: str = "a") -> list[tuple[str, datetime]]:
    return [(device, START + timedelta(seconds=second)) for second in seconds]


def counted(source: Any, out: MemorySink, name: str = "counted", **options: Any) -> Pipeline:
    pipeline = Pipeline(name)
    stream = pipeline.source("rows", source, schema=SCHEMA, time="ts", **options)
    stream.group_by("device").window(tumbling("10s")).agg(n="count(*)").sink("out", memory(out))
    return pipeline


def found(out: MemorySink) -> list[tuple[str, int, int]]:
    """Device, second at which its window starts, count."""
    return sorted(
        (device, int((start - START).total_seconds()), n)
        for device, start, n in out.rows().select("device", "window_start", "n").iter_rows()
    )


def write_lines(path: Path, given: Sequence[tuple[str, datetime]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({"device": device, "ts": ts.isoformat()}) + "\n" for device, ts in given)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_windows_stay_open_and_the_next_run_goes_on_in_them(tmp_path: Path, parallelism: int):
    out, source = MemorySink(), MemorySource([rows(1, 2, 11, 12), rows(3, 13, device="b")])
    pipeline = counted(memory(source), out)
    options: dict[str, Any] = {"state": tmp_path, "available_now": True, "parallelism": parallelism}
    first = pipeline.run(**options)
    assert (first.outcome, first.progress.rows_in, first.progress.stopping) == ("stopped", 6, False)
    assert found(out) == [("a", 0, 2), ("b", 0, 1)]
    source.append(0, rows(14, 21))
    source.append(1, rows(22, device="b"))
    second = pipeline.run(**options)
    assert (second.progress.rows_in, second.progress.rows_late) == (3, 0)
    assert found(out) == [("a", 0, 2), ("a", 10, 3), ("b", 0, 1), ("b", 10, 1)]
    assert pipeline.run(**options).progress.rows_in == 0, "nothing new, and nothing again"
    assert pipeline.run(state=tmp_path, bounded=True).outcome == "ended"
    assert found(out)[-1] == ("b", 20, 1), "bounded closes what was left open"


@pytest.mark.parametrize("seed", range(6))
def test_in_however_many_runs_the_rows_are_read_the_result_is_the_same(tmp_path: Path, seed: int):
    rng = Random(seed)
    given = [[("a", START + timedelta(seconds=second)) for second in in_disorder(rng, 60)] for _ in range(3)]
    whole, parts, source = MemorySink(), MemorySink(), MemorySource([[] for _ in given])
    once = counted(memory(MemorySource(given)), whole, lateness="3s").run(state=tmp_path / "once", bounded=True)
    pipeline = counted(memory(source), parts, lateness="3s")
    late = 0
    read = [0] * len(given)
    while sum(read) < sum(map(len, given)):
        for partition, part in enumerate(given):
            more = rng.randrange(25)
            source.append(partition, part[read[partition] : read[partition] + more])
            read[partition] = min(read[partition] + more, len(part))
        options: dict[str, Any] = {
            "parallelism": rng.choice((1, 2)),
            "batch_rows": rng.choice((3, 1000)),
            "interval": "5ms",
        }
        late += pipeline.run(state=tmp_path / "parts", available_now=True, **options).progress.rows_late
    late += pipeline.run(state=tmp_path / "parts", bounded=True).progress.rows_late
    assert found(parts) == found(whole)
    assert late == once.progress.rows_late


def test_what_comes_while_it_runs_is_left_to_the_next_run(tmp_path: Path):
    out, source = MemorySink(), MemorySource([rows(1, 11)])
    added = False

    def add(progress: Progress) -> None:
        nonlocal added
        if not added:
            added = True
            source.append(0, rows(12))
            source.append(source.add_partition(), rows(13))

    pipeline = counted(memory(source), out)
    first = run(pipeline.plan(), pipeline.functions, on_progress=add, state=tmp_path, available_now=True)
    assert (added, first.progress.rows_in) == (True, 2)
    assert pipeline.run(state=tmp_path, available_now=True).progress.rows_in == 2


def test_files_that_were_read_may_be_moved_away_and_others_come(tmp_path: Path):
    out, folder = MemorySink(), tmp_path / "in"
    write_lines(folder / "1.jsonl", rows(1, 11))
    pipeline = counted(files(str(folder / "*.jsonl")), out)
    pipeline.run(state=tmp_path / "state", available_now=True)
    (folder / "1.jsonl").rename(tmp_path / "1.jsonl")
    write_lines(folder / "2.jsonl", rows(12, 21))
    second = pipeline.run(state=tmp_path / "state", available_now=True)
    assert (second.progress.rows_in, second.progress.rows_late) == (2, 0)
    assert found(out) == [("a", 0, 1), ("a", 10, 2)]


def test_files_that_never_grow_are_read_once_and_hold_no_window_open_for_good(tmp_path: Path):
    out, folder = MemorySink(), tmp_path / "in"
    folder.mkdir()
    frame = pl.DataFrame(rows(1, 11), schema={"device": pl.String, "ts": pl.Datetime("us", "UTC")}, orient="row")
    frame.write_parquet(folder / "1.parquet")
    frame.with_columns(pl.col("ts") + timedelta(seconds=20)).write_parquet(folder / "2.parquet")
    pipeline = counted(files(str(folder / "*.parquet")), out)
    assert pipeline.run(state=tmp_path / "state", available_now=True).progress.rows_in == 4
    frame.with_columns(pl.col("ts") + timedelta(seconds=40)).write_parquet(folder / "3.parquet")
    assert pipeline.run(state=tmp_path / "state", available_now=True).progress.rows_in == 2
    assert found(out) == [("a", second, 1) for second in (0, 10, 20, 30, 40)]


def test_a_partition_that_was_idle_is_read_again(tmp_path: Path):
    out, source = MemorySink(), MemorySource([rows(1, 11), rows(2, device="b")])
    pipeline = counted(memory(source), out, idle_after="1us")
    pipeline.run(state=tmp_path, available_now=True)
    source.append(1, rows(40, device="b"))
    assert pipeline.run(state=tmp_path, available_now=True).progress.rows_in == 1


def test_at_most_once_time_does_not_end_with_what_is_there(tmp_path: Path):
    folder = tmp_path / "in"
    folder.mkdir()
    frame = pl.DataFrame(rows(1, 11), schema={"device": pl.String, "ts": pl.Datetime("us", "UTC")}, orient="row")
    frame.write_parquet(folder / "1.parquet")
    out = MemorySink()
    pipeline = Pipeline("once", guarantee="at_most_once")
    stream = pipeline.source("rows", files(str(folder / "*.parquet")), schema=SCHEMA, time="ts")
    stream.group_by("device").window(tumbling("10s")).agg(n="count(*)").sink("out", memory(out))
    pipeline.run(state=tmp_path / "state", available_now=True)
    frame.with_columns(pl.col("ts") + timedelta(seconds=20)).write_parquet(folder / "2.parquet")
    second = pipeline.run(state=tmp_path / "state", available_now=True)
    assert (second.progress.rows_in, second.progress.rows_late) == (2, 0)


def test_a_generator_without_end_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="with --available-now a generator needs rows="):
        counted(generator(), MemorySink()).run(state=tmp_path, available_now=True)


def test_bounded_and_available_now_exclude_each_other(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot both be set"):
        counted(generator(rows=1), MemorySink()).run(state=tmp_path, available_now=True, bounded=True)


@pytest.mark.parametrize("how", ["grown", "new partition"])
def test_a_second_bounded_run_with_new_input_is_an_error_that_says_what_to_do(tmp_path: Path, how: str):
    out, source = MemorySink(), MemorySource([rows(1, 11)])
    pipeline = counted(memory(source), out)
    pipeline.run(state=tmp_path, bounded=True)
    assert pipeline.run(state=tmp_path, bounded=True).outcome == "already_ended"
    source.append(0 if how == "grown" else source.add_partition(), rows(21))
    with pytest.raises(CheckpointError, match=r"(?s)Source rows has new input since.*--fresh.*--available-now"):
        pipeline.run(state=tmp_path, bounded=True)


def test_available_now_after_the_end_of_time_names_fresh(tmp_path: Path):
    out, source = MemorySink(), MemorySource([rows(1, 11)])
    pipeline = counted(memory(source), out)
    pipeline.run(state=tmp_path, bounded=True)
    with pytest.raises(CheckpointError, match="--fresh"):
        pipeline.run(state=tmp_path, available_now=True)
