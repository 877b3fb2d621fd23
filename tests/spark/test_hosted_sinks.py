"""What comes out of a hosted query: when, in which parts, once, and what is reported of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died

from fordstone import Pipeline, tumbling
from fordstone.api.stream import Stream
from fordstone.connectors import MemorySink, delta, files, latest, memory, rows
from fordstone.errors import SourceError
from fordstone.spark.hosted import commit
from fordstone.spark.hosted.commit import BatchOutcome
from fordstone.storage.failpoint import SPARK_FAILPOINTS

pytestmark = pytest.mark.usefixtures("quick_disk")

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double"}


def written(directory: Path, *parts: Sequence[tuple[str | None, int, float]]) -> None:
    """A file for each, of key, second and value."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, records in enumerate(parts):
        lines = [
            json.dumps({"k": k, "ts": f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}Z", "x": x})
            for k, second, x in records
        ]
        (directory / f"{number}.jsonl").write_text("".join(line + "\n" for line in lines))


def source(root: Path, **options: Any) -> tuple[Pipeline, Stream]:
    pipeline = Pipeline("p")
    stream = pipeline.source("s", files(str(root / "in" / "*.jsonl")), schema=SCHEMA, time="ts", **options)
    return pipeline, stream


def out(root: Path, name: str = "out", file_format: str = "parquet") -> Any:
    return files(str(root / name), format=file_format)


def died_once(spark: MicroSpark, pipeline: Pipeline, root: Path, at: str, **options: Any) -> None:
    """Run to the end, in two processes: the first dies when it is about to do that for the first time."""
    options = {"state": root / "state", "bounded": True, **options}
    query = spark.start(pipeline.plan(), pipeline.functions, **options)
    spark.fate.dies_before = at
    with pytest.raises(Died):
        query.run()
    spark.start(pipeline.plan(), pipeline.functions, **options).run()


# When.


def test_sinks_come_after_all_tasks_and_the_record_and_the_cut_after_all_sinks(tmp_path: Path) -> None:
    written(tmp_path / "in", [("a", 1, 1.0)] * 20, [("b", 2, 2.0)] * 20)
    pipeline, stream = source(tmp_path)
    stream.sink("out", out(tmp_path))
    stream.group_by("k").agg(n="count(*)").sink("totals", out(tmp_path, "totals"))
    spark = MicroSpark(cores=2)
    assert spark.start(pipeline.plan(), state=tmp_path / "state", bounded=True, shards=2).step()
    log = spark.fate.log
    first, last = log.index("batch.sealed"), len(log) - 1 - log[::-1].index("task")
    assert first > last
    assert log[first - 1 :] == [
        "batch.executed",
        "batch.sealed",
        *["sink.released"] * 3,
        "batch.released",
        "batch.kept",
        "commit",
    ]


def test_an_epoch_without_rows_leaves_nothing_and_the_next_is_out(tmp_path: Path) -> None:
    written(tmp_path / "in", [("a", 1, 1.0)])
    pipeline, stream = source(tmp_path)
    stream.filter("x > 5").sink("out", out(tmp_path))
    spark = MicroSpark()
    query = spark.start(pipeline.plan(), state=tmp_path / "state")
    query.run()
    assert [file.name for file in (tmp_path / "out").iterdir() if not file.name.startswith((".", "_"))] == []
    with (tmp_path / "in" / "0.jsonl").open("a") as file:
        file.write(json.dumps({"k": "b", "ts": "2026-01-01T00:00:09Z", "x": 9.0}) + "\n")
    query.run()
    assert rows(tmp_path / "out")["k"].to_list() == ["b"]


# In parts.


def test_many_rows_are_written_in_several_parts_by_several_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "PART_BYTES_MAX", 2000)
    written(tmp_path / "in", *([(f"k{n}", n % 60, n + number / 8) for n in range(60)] for number in range(4)))
    pipeline, stream = source(tmp_path)
    stream.sink("out", out(tmp_path))
    MicroSpark(cores=3).start(
        pipeline.plan(), state=tmp_path / "state", bounded=True, shards=2, batch_rows=7, rows_max=1000
    ).run()
    (epoch,) = [path for path in (tmp_path / "out").iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert len(list(epoch.iterdir())) > 3
    found = rows(tmp_path / "out")
    assert sorted(found["x"].to_list()) == sorted(n + number / 8 for n in range(60) for number in range(4))


def test_parts_of_a_process_that_died_are_not_seen_and_go(tmp_path: Path) -> None:
    written(tmp_path / "in", [("a", 1, float(n)) for n in range(30)])
    pipeline, stream = source(tmp_path)
    stream.sink("out", out(tmp_path))
    died_once(MicroSpark(), pipeline, tmp_path, "batch.sealed")
    assert sorted(rows(tmp_path / "out")["x"].to_list()) == [float(n) for n in range(30)]
    left = [file.name for file in (tmp_path / "out").iterdir() if file.name.startswith(".tmp")]
    assert left == []


@pytest.mark.parametrize("at", ["plan", "log", "run", "read", "stage", "task", *SPARK_FAILPOINTS, "commit"])
def test_whatever_it_was_about_to_do_when_it_died_every_row_is_out_once(at: str, tmp_path: Path) -> None:
    written(tmp_path / "in", [("a", n, 1.0) for n in range(40)], [("b", n, 2.0) for n in range(40)])
    pipeline, stream = source(tmp_path)
    stream.sink("out", out(tmp_path))
    stream.group_by("k").window(tumbling("10s")).agg(n="count(*)").sink("windows", out(tmp_path, "windows", "csv"))
    stream.group_by("k").agg(n="count(*)").sink("totals", out(tmp_path, "totals", "jsonl"))
    died_once(MicroSpark(3), pipeline, tmp_path, at, shards=2, rows_max=20)
    assert rows(tmp_path / "out").group_by("k").len().sort("k").rows() == [("a", 40), ("b", 40)]
    windows = rows(tmp_path / "windows")
    assert windows.group_by("k").len().sort("k").rows() == [("a", 4), ("b", 4)]
    assert windows["n"].to_list() == [10] * 8
    assert latest(tmp_path / "totals").sort("k").rows() == [("a", 40), ("b", 40)]


# Computed again in another order.

CANCELLING = [("a", 1, 1e16), ("a", 1, 1.0), ("a", 1, -1e16), ("a", 1, 0.1), ("a", 1, 0.7), ("a", 1, 3.3)]


def test_sums_of_doubles_that_differ_a_little_are_the_same_epoch(tmp_path: Path) -> None:
    written(tmp_path / "in", *([("a", 1, x)] for x in (0.1, 0.7, 3.3, 1e-3, 12.34, 5.6)))
    for seed in range(8):
        pipeline, stream = source(tmp_path)
        windows = stream.group_by("k").window(tumbling("10s")).agg(total="sum(x)")
        windows.sink("out", out(tmp_path, f"out{seed}"))
        died_once(MicroSpark(seed, cores=6), pipeline, tmp_path / str(seed), "batch.released", shards=1)
        assert rows(tmp_path / f"out{seed}").height == 1


def test_sums_of_doubles_that_cancel_out_do_not_stop_the_query(tmp_path: Path) -> None:
    """Computed again in another order they were other rows than had been released, and the query could never go on."""
    written(tmp_path / "in", *([record] for record in CANCELLING))
    for seed in range(8):
        pipeline, stream = source(tmp_path)
        windows = stream.group_by("k").window(tumbling("10s")).agg(total="sum(x)")
        windows.sink("out", out(tmp_path, f"out{seed}"))
        died_once(MicroSpark(seed, cores=6), pipeline, tmp_path / str(seed), "batch.released", shards=1)


def test_rows_of_doubles_alone_that_differ_a_little_are_the_same_epoch(tmp_path: Path) -> None:
    """Without a column to match them by they were other rows than had been released."""
    written(tmp_path / "in", *([("a", 1, x)] for x in (0.1, 0.7, 3.3, 1e-3, 12.34, 5.6)))
    for seed in range(8):
        pipeline, stream = source(tmp_path)
        windows = stream.group_by("k").window(tumbling("10s")).agg(total="sum(x)").select("total")
        windows.sink("out", out(tmp_path, f"out{seed}"))
        died_once(MicroSpark(seed, cores=6), pipeline, tmp_path / str(seed), "batch.released", shards=1)


def test_the_latest_of_a_running_total_without_a_key_can_be_read(tmp_path: Path) -> None:
    written(tmp_path / "in", [("a", 1, 1.0)] * 30)
    pipeline, stream = source(tmp_path)
    stream.group_by().agg(n="count(*)").sink("out", out(tmp_path))
    MicroSpark().start(pipeline.plan(), state=tmp_path / "state", rows_max=10).run()
    assert latest(tmp_path / "out").rows() == [(30,)]


# What is reported.


def test_a_batch_reports_what_it_did(tmp_path: Path) -> None:
    written(tmp_path / "in", [("a", 30, 1.0), ("a", 1, 1.0), ("b", 31, 1.0)], [("a", 32, 1.0)])
    with (tmp_path / "in" / "1.jsonl").open("a") as file:
        file.write("this is no row\n" + json.dumps({"k": "a", "ts": None, "x": 1.0}) + "\n")
    pipeline, stream = source(tmp_path, lateness="5s")
    kept = MemorySink()
    stream.group_by("k").window(tumbling("10s")).agg(n="count(*)").sink("out", memory(kept))
    outcomes: list[BatchOutcome] = []
    spark = MicroSpark(cores=2)
    spark.start(pipeline.plan(), state=tmp_path / "state", bounded=True, shards=2, on_batch=outcomes.append).run()
    (outcome,) = outcomes
    assert outcome.epoch == 1
    # The row without a time is rejected, and not counted as read as well.
    assert (outcome.rows_in, outcome.rows_rejected, outcome.rows_late) == (4, 2, 1)
    assert outcome.rows_out == kept.rows().height, "dead letters are not counted"
    assert outcome.cut is not None
    assert outcome.cut.ended
    assert outcome.state_bytes == 0


def test_a_file_that_shrank_since_the_batch_was_planned_stops_it(tmp_path: Path) -> None:
    written(tmp_path / "in", [("a", n, 1.0) for n in range(30)])
    pipeline, stream = source(tmp_path)
    stream.sink("out", out(tmp_path))
    spark = MicroSpark()
    query = spark.start(pipeline.plan(), state=tmp_path / "state")
    text = query._plan(-1)
    assert text is not None
    query.location.write("offsets", 0, text)
    (tmp_path / "in" / "0.jsonl").write_text("")
    with pytest.raises(SourceError, match=r"shrank|shrink"):
        query.step()
    assert rows(tmp_path / "out").height == 0


def test_a_stream_united_with_itself_gives_every_row_twice_and_ids_that_differ(tmp_path: Path) -> None:
    written(tmp_path / "in", [("a", n, 1.0) for n in range(5)])
    pipeline, stream = source(tmp_path)
    kept = MemorySink()
    stream.union(stream, stream.filter("x > 0")).sink("out", memory(kept), release="at_once")
    MicroSpark().start(pipeline.plan(), state=tmp_path / "state", bounded=True).run()
    found = kept.rows()
    assert found.height == 15
    assert found["__id"].n_unique() == 15


@pytest.mark.parametrize("bounded", [True, False])
def test_a_function_is_called_at_the_driver_once_per_batch_with_its_epoch(tmp_path: Path, bounded: bool):
    written(tmp_path / "in", [("a", 1, 1.0), ("b", 2, 2.0)], [("a", 3, 3.0)])
    pipeline, stream = source(tmp_path)
    calls: list[tuple[int, list[float]]] = []
    stream.sink("called", lambda frame, epoch: calls.append((epoch, sorted(frame["x"]))))
    MicroSpark().start(pipeline.plan(), state=tmp_path / "state", bounded=bounded).run()
    assert [x for _, rows in calls for x in rows] == [1.0, 2.0, 3.0]
    assert [epoch for epoch, _ in calls] == sorted({epoch for epoch, _ in calls})


@pytest.mark.parametrize("at", ["batch.executed", "batch.sealed", "sink.released", "batch.released"])
def test_a_delta_table_that_tasks_write_has_each_row_once_after_a_crash_and_no_other_file(
    tmp_path: Path, at: str
) -> None:
    written(tmp_path / "in", [("a", 1, float(n)) for n in range(30)], [("b", 2, float(n)) for n in range(30, 40)])
    pipeline, stream = source(tmp_path)
    stream.sink("out", delta(str(tmp_path / "table")))
    died_once(MicroSpark(cores=2), pipeline, tmp_path, at)
    table = pl.read_delta(str(tmp_path / "table"))
    assert sorted(table["x"].to_list()) == [float(n) for n in range(40)]
    data = {file.name for file in (tmp_path / "table").rglob("part-*")}
    named = {uri.rpartition("/")[2] for uri in DeltaTable(tmp_path / "table").file_uris()}
    assert data == named
    assert all(re.match(r"part-\d{6,}-[0-9a-f]{32}-", name) for name in named)
