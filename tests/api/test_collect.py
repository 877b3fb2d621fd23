"""The rows of a stream as a frame."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fordstone import Pipeline, Stream, tumbling
from fordstone.connectors import MemorySink, MemorySource, files, generator, memory
from fordstone.errors import ConfigError, TaskError

ROWS = [{"device": "ab"[n % 2], "ts": f"2026-01-01T00:00:{n:02d}Z", "temp": float(n)} for n in range(20)]
SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double"}


@pytest.fixture
def readings() -> Stream:
    return Pipeline("rooms").source("readings", memory(ROWS), schema=SCHEMA, time="ts")


def test_a_stream_is_collected_without_a_sink_and_leaves_nothing(
    readings: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert readings.filter("temp >= 18").collect()["temp"].to_list() == [18.0, 19.0]
    assert readings.collect().height == 20
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Exception, match="has no sink"):
        readings.pipeline.plan()


def test_other_sinks_and_other_sources_are_left_alone(readings: Stream, tmp_path: Path):
    kept = MemorySink()
    readings.sink("kept", memory(kept))
    readings.pipeline.source("missing", files(str(tmp_path / "none.csv")), schema=SCHEMA).sink(
        "out", files(str(tmp_path / "out"), format="jsonl")
    )
    assert readings.collect().height == 20
    assert kept.rows().is_empty()
    assert not (tmp_path / "out").exists()


def test_windows_late_rows_and_upserts(readings: Stream):
    windows = readings.group_by("device").window(tumbling("10s")).agg(n="count(*)")
    assert sorted(windows.select("device", "n").collect().rows()) == [("a", 5), ("a", 5), ("b", 5), ("b", 5)]
    assert windows.late.collect().is_empty()
    running = readings.group_by("device").agg(top="max(temp)")
    assert sorted(running.collect().rows()) == [("a", 18.0), ("b", 19.0)]
    assert running.collect().columns == ["device", "top"]


def test_a_loop_is_collected_whole():
    numbers = Pipeline("halves").source("numbers", memory([{"n": 8}]))

    def body(stream: Stream) -> tuple[Stream, Stream]:
        return stream.filter("n > 1").select("cast(n / 2 AS bigint) AS n"), stream

    assert sorted(numbers.iterate(body).collect()["n"]) == [1, 2, 4, 8]


def test_both_tiers_are_collected_and_control_tables_are_part_of_it():
    pipeline = Pipeline("fleet")
    limits = pipeline.control("limits", schema={"device": "string", "top": "double"}, key="device")
    readings = pipeline.source("readings", memory([ROWS[::2], ROWS[1::2]]), schema=SCHEMA)
    tops = readings.to_center().group_by("device").agg(top="max(temp)")
    tops.to_edges(limits)
    assert sorted(tops.collect(nodes=2).rows()) == [("a", 18.0), ("b", 19.0)]
    assert readings.join_control(limits, on="device").collect(nodes=2).height == 20
    assert readings.collect().height == 20, "without the center"


def test_the_first_rows_of_much_input_do_not_read_all_of_it():
    stream = Pipeline("much").source("rows", generator(rows=10**12), schema=SCHEMA)
    assert stream.head(3).height == 3


def test_an_interrupt_gives_no_rows_rather_than_some():
    def interrupt(record: dict[str, Any]) -> dict[str, Any]:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return record

    sent: list[bool] = []
    stream = Pipeline("much").source("rows", generator(rows=10**12), schema=SCHEMA).map(interrupt)
    with pytest.raises(KeyboardInterrupt):
        stream.collect()


@pytest.mark.parametrize("n", [-1, "3", True])
def test_a_number_of_rows_is_one(readings: Stream, n: Any):
    with pytest.raises(ConfigError, match="is not a number of rows"):
        readings.head(n)


def test_rows_are_shown_as_a_table(readings: Stream, capsys: pytest.CaptureFixture[str]):
    readings.select("device", "temp").show(2)
    readings.filter("temp > 100").show()
    assert capsys.readouterr().out.splitlines() == [
        "┌────────┬──────┐",
        "│ device ┆ temp │",
        "╞════════╪══════╡",
        "│ a      ┆ 0.0  │",
        "│ b      ┆ 1.0  │",
        "└────────┴──────┘",
        "filter: no rows",
    ]


def test_pandas_gets_the_rows(readings: Stream):
    frame = readings.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert frame["temp"].to_list() == [row["temp"] for row in ROWS]


def test_an_error_of_a_function_comes_out(readings: Stream):
    def boom(record: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError(record["temp"])

    with pytest.raises(TaskError):
        readings.map(boom).collect()


def test_rows_that_are_not_in_the_result_are_named_in_a_warning():
    source = MemorySource()
    readings = Pipeline("rooms").source("readings", memory(source), schema=SCHEMA, time="ts")
    source.append(
        source.add_partition(), [*ROWS, {"device": "a", "ts": "2026-01-01T00:00:01Z", "temp": "warm"}, ROWS[2]]
    )
    counts = readings.group_by("device").window(tumbling("5s")).agg(n="count(*)")
    unread = r"^1 row could not be read \(column temp: 'warm' is not a number\)\."
    with pytest.warns(UserWarning, match=unread + r" 1 row did not count \(up to 15s too late") as warned:
        assert counts.collect().get_column("n").sum() == 20
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=unread + "$"):
        assert counts.late.collect().height == 1
