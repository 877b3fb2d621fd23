"""Series of files on both engines: rolled files close windows without any option, and files of devices are waited for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.spark.both_engines import Engine, OnEdge, engine_fixture

from fordstone import Pipeline, tumbling
from fordstone.connectors import files, rows
from fordstone.errors import ConfigError
from fordstone.plan.plan import Plan

__all__ = ["engine_fixture"]


def row(second: int) -> dict[str, Any]:
    return {"k": "a", "ts": f"2026-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"}


def add(path: Path, seconds: Iterable[int], *, end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row(second)) for second in seconds)
    if path.suffix == ".csv":
        head = "" if path.exists() else "k,ts\n"
        lines = (",".join(row(second).values()) for second in seconds)
        with path.open("a") as file:
            file.write(head + "\n".join(lines) + end)
        return
    with path.open("a") as file:
        file.write("\n".join(lines) + end)


def write_long_ago(path: Path) -> None:
    """Make a file look as if it had not been written to for longer than an hour."""
    os.utime(path, (0, 0))


def counting(root: Path, pattern: str = "*.jsonl", *, lateness: str = "0s", **options: Any) -> Plan:
    pipeline = Pipeline("rolled")
    source = pipeline.source(
        "src",
        files(str(root / "in" / pattern), **options),
        schema={"k": "string", "ts": "timestamp"},
        time="ts",
        lateness=lateness,
    )
    made = source.group_by("k").window(tumbling("10s")).agg(n="count(*)")
    made.select("window_start", "n").sink("windows", files(str(root / "windows"), format="jsonl"))
    made.late.select("ts").sink("late", files(str(root / "late"), format="jsonl"))
    return pipeline.plan()


def closed(root: Path) -> dict[int, int]:
    """Rows counted per window that has closed, by the second at which it starts."""
    found = rows(root / "windows")
    times = (start.hour * 3600 + start.minute * 60 + start.second for start in found["window_start"])
    return dict(sorted(zip(times, found["n"].to_list(), strict=True)))


def late(root: Path) -> int:
    return rows(root / "late").height


def tens(start: int, end: int) -> dict[int, int]:
    return dict.fromkeys(range(start, end, 10), 10)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_rolled_files_that_are_there_close_all_windows_up_to_the_newest(engine: Engine, tmp_path: Path, ending: str):
    for number in range(3):
        add(tmp_path / "in" / f"h{number:02d}.{ending}", range(60 * number, 60 * number + 60))
    engine.run(counting(tmp_path, f"*.{ending}"))
    assert closed(tmp_path) == tens(0, 170)
    assert late(tmp_path) == 0


def test_rolled_files_that_come_one_by_one_close_windows(engine: Engine, tmp_path: Path):
    plan = counting(tmp_path)
    for number in range(8, 12):  # from one digit to two
        add(tmp_path / "in" / f"part-{number}.jsonl", range(60 * number, 60 * number + 60))
        engine.run(plan)
        # Two files may also be of two devices.
        assert closed(tmp_path) == tens(480, 530 if number == 9 else 60 * number + 50)
        engine.restart()
    assert late(tmp_path) == 0


@pytest.mark.parametrize("pause", [0, 7200])
def test_one_of_two_files_is_finished_when_it_has_not_been_written_to_for_an_hour(
    engine: Engine, tmp_path: Path, pause: int
):
    plan = counting(tmp_path)
    add(tmp_path / "in/h0.jsonl", range(60))
    add(tmp_path / "in/h1.jsonl", range(60 + pause, 120 + pause))
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 50)
    write_long_ago(tmp_path / "in/h0.jsonl")
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 60) | tens(60 + pause, 110 + pause)
    assert late(tmp_path) == 0


LAYOUTS: dict[str, Callable[[int, int], str]] = {
    "a folder for each hour": lambda device, hour: f"2026-01-01/{hour:02d}/rows.jsonl",
    "a folder for each device": lambda device, hour: f"dev-{device}/h{hour}.jsonl",
    "device and date in one name": lambda device, hour: f"dev-{device}_2026-01-01T{hour:02d}.jsonl",
    "date before device": lambda device, hour: f"2026-01-01T{hour:02d}/dev-{device}.jsonl",
    "parts of each hour": lambda device, hour: f"day=01/hour={hour:02d}/part-{device:05d}.jsonl",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_series_are_found_in_usual_layouts(engine: Engine, tmp_path: Path, layout: str):
    devices = 1 if layout == "a folder for each hour" else 2
    for device in range(devices):
        for hour in range(3):
            add(tmp_path / "in" / LAYOUTS[layout](device, hour), range(60 * hour, 60 * hour + 60))
    engine.run(counting(tmp_path, "**/*.jsonl"))
    assert closed(tmp_path) == {start: n * devices for start, n in tens(0, 170).items()}
    assert late(tmp_path) == 0


@pytest.mark.parametrize("lateness", ["0s", "1h"])
def test_a_file_for_each_device_is_waited_for(engine: Engine, tmp_path: Path, lateness: str):
    """Device 1 is offline for an hour: no row of it is late when it is back, although device 2 goes on."""
    plan = counting(tmp_path, lateness=lateness)
    add(tmp_path / "in/dev-1.jsonl", range(60))
    add(tmp_path / "in/dev-2.jsonl", range(60))
    add(tmp_path / "in/dev-3.jsonl", range(30, 60))
    engine.run(plan)
    for hour in range(1, 4):
        add(tmp_path / "in/dev-2.jsonl", range(3600 * hour, 3600 * hour + 60))
        add(tmp_path / "in/dev-3.jsonl", range(3600 * hour, 3600 * hour + 60))
        engine.run(plan)
        engine.restart()
    add(tmp_path / "in/dev-1.jsonl", range(60, 3600 * 3 + 60, 20))
    engine.run(plan)
    assert late(tmp_path) == 0
    assert max(closed(tmp_path)) == 3600 * (3 if lateness == "0s" else 2) + 30


def test_a_replay_does_what_was_decided_although_the_file_was_touched_since(tmp_path: Path):
    engine, plan = OnEdge(tmp_path, 1, keep=1000), counting(tmp_path)
    add(tmp_path / "in/h0.jsonl", range(60))
    add(tmp_path / "in/h1.jsonl", range(60, 120))
    write_long_ago(tmp_path / "in/h0.jsonl")
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 110)
    os.utime(tmp_path / "in/h0.jsonl")
    engine.damage(plan)
    engine.restart()
    add(tmp_path / "in/h1.jsonl", range(120, 180))
    engine.run(plan)
    assert engine.replayed > 0
    assert closed(tmp_path) == tens(0, 170)
    assert late(tmp_path) == 0


@pytest.mark.parametrize(
    "clocks",
    [(0, 60), (0, 50_000), (50_000, 0), (0, 120, 240), (0, 0, 600)],
    ids=lambda clocks: " ".join(map(str, clocks)),
)
def test_devices_make_no_row_of_each_other_late_whatever_their_clocks(
    engine: Engine, tmp_path: Path, clocks: tuple[int, ...]
):
    """Their clocks are ahead by these seconds. At some moment each file ends where the next one begins."""
    plan = counting(tmp_path)
    paths = [tmp_path / "in" / f"dev-{number}.jsonl" for number in range(len(clocks))]
    for path in paths:
        add(path, [], end="")
    for start in range(0, 300, 60):
        for path, ahead in zip(paths, clocks, strict=True):
            add(path, range(ahead + start, ahead + start + 60))
            engine.run(plan)
        if start % 120:
            engine.restart()
    # They have been seen to grow at the same time: being silent for hours makes none of them finished.
    for path in paths:
        write_long_ago(path)
    engine.run(plan)
    for path, ahead in zip(paths, clocks, strict=True):
        add(path, range(ahead + 300, ahead + 360))
        engine.run(plan)
    assert late(tmp_path) == 0


def test_a_device_that_joins_when_another_is_silent_makes_no_row_of_it_late(engine: Engine, tmp_path: Path):
    plan = counting(tmp_path)
    add(tmp_path / "in/dev-1.jsonl", range(60))
    engine.run(plan)
    add(tmp_path / "in/dev-2.jsonl", range(60, 600))
    engine.run(plan)
    add(tmp_path / "in/dev-1.jsonl", range(60, 600))
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 60) | dict.fromkeys(range(60, 590, 10), 20)
    assert late(tmp_path) == 0


def test_the_file_of_a_device_that_has_no_rows_yet_is_waited_for(engine: Engine, tmp_path: Path):
    plan = counting(tmp_path)
    add(tmp_path / "in/dev-2.jsonl", range(60))
    (tmp_path / "in/dev-1.jsonl").touch()
    engine.run(plan)
    add(tmp_path / "in/dev-1.jsonl", range(60))
    engine.run(plan)
    assert closed(tmp_path) == dict.fromkeys(range(0, 50, 10), 20)
    assert late(tmp_path) == 0


def test_files_of_devices_that_overlap_are_read_merged_by_time(engine: Engine, tmp_path: Path):
    for number in range(3):
        add(tmp_path / "in" / f"dev-{number}.jsonl", range(300))
    add(tmp_path / "in/dev-4.jsonl", range(150, 300))
    engine.run(counting(tmp_path))
    assert closed(tmp_path) == {start: 30 if start < 150 else 40 for start in range(0, 290, 10)}
    assert late(tmp_path) == 0


def test_a_rolled_file_that_still_grows_is_read_on(engine: Engine, tmp_path: Path):
    """The writer of h2 flushes its last rows after h3 was begun."""
    plan = counting(tmp_path, lateness="30s")
    for number in range(2):
        add(tmp_path / "in" / f"h{number}.jsonl", range(60 * number, 60 * number + 60))
    add(tmp_path / "in/h2.jsonl", range(120, 170))
    add(tmp_path / "in/h3.jsonl", range(180, 181))
    engine.run(plan)
    add(tmp_path / "in/h2.jsonl", range(170, 180))
    engine.run(plan)
    add(tmp_path / "in/h3.jsonl", range(181, 320))
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 280)
    assert late(tmp_path) == 0


def test_a_file_that_grew_beside_a_later_one_is_finished_when_its_series_is_certain(engine: Engine, tmp_path: Path):
    plan = counting(tmp_path)
    add(tmp_path / "in/h0.jsonl", range(50))
    add(tmp_path / "in/h1.jsonl", range(60, 120))
    engine.run(plan)
    add(tmp_path / "in/h0.jsonl", range(50, 60))
    write_long_ago(tmp_path / "in/h0.jsonl")
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 50)
    for number in (2, 3):
        add(tmp_path / "in" / f"h{number}.jsonl", range(60 * number, 60 * number + 60))
    engine.restart()
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 230)
    assert late(tmp_path) == 0


def test_a_rolled_file_may_be_removed_when_it_was_read(engine: Engine, tmp_path: Path):
    plan = counting(tmp_path)
    for number in range(3):
        add(tmp_path / "in" / f"h{number}.jsonl", range(60 * number, 60 * number + 60))
    engine.run(plan)
    (tmp_path / "in/h0.jsonl").unlink()
    add(tmp_path / "in/h3.jsonl", range(180, 240))
    engine.run(plan)
    (tmp_path / "in/h1.jsonl").unlink()
    (tmp_path / "in/h2.jsonl").unlink()
    engine.restart()
    add(tmp_path / "in/h4.jsonl", range(240, 300))
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 290)


def test_an_hour_without_rows_does_not_stop_time(engine: Engine, tmp_path: Path):
    for number in (0, 1, 2, 4):
        add(tmp_path / "in" / f"h{number}.jsonl", range(60 * number, 60 * number + 60))
    (tmp_path / "in/h3.jsonl").touch()
    engine.run(counting(tmp_path))
    assert closed(tmp_path) == tens(0, 180) | tens(240, 290)


def test_the_last_line_of_a_rolled_file_needs_no_newline(engine: Engine, tmp_path: Path):
    for number in range(3):
        add(tmp_path / "in" / f"h{number}.csv", range(60 * number, 60 * number + 60), end="")
        write_long_ago(tmp_path / "in" / f"h{number}.csv")
    plan = counting(tmp_path, "*.csv")
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 170)
    add(tmp_path / "in/h2.csv", [], end="\n")
    add(tmp_path / "in/h3.csv", range(180, 240))
    engine.restart()
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 230)


def test_a_line_that_is_being_written_is_waited_for(engine: Engine, tmp_path: Path):
    add(tmp_path / "in/h0.jsonl", range(60), end="")
    for number in (1, 2):
        add(tmp_path / "in" / f"h{number}.jsonl", range(60 * number, 60 * number + 60))
    plan = counting(tmp_path)
    engine.run(plan)
    assert late(tmp_path) == 0
    add(tmp_path / "in/h0.jsonl", [], end="\n")
    engine.run(plan)
    assert closed(tmp_path) == tens(0, 170)
    assert late(tmp_path) == 0


def test_time_that_a_step_assigns_finishes_files_too(engine: Engine, tmp_path: Path):
    for number in range(3):
        add(tmp_path / "in" / f"h{number}.csv", range(60 * number, 60 * number + 60))
    pipeline = Pipeline("rolled")
    source = pipeline.source("src", files(str(tmp_path / "in/*.csv")), schema={"k": "string", "ts": "string"})
    made = source.with_time("to_timestamp(ts) AS at").group_by("k").window(tumbling("10s")).agg(n="count(*)")
    made.select("window_start", "n").sink("windows", files(str(tmp_path / "windows"), format="jsonl"))
    engine.run(pipeline.plan())
    assert closed(tmp_path) == tens(0, 170)


def test_series_none_waits_for_each_file(engine: Engine, tmp_path: Path):
    for number in range(3):
        add(tmp_path / "in" / f"h{number}.jsonl", range(60 * number, 60 * number + 60))
    engine.run(counting(tmp_path, series="none"))
    assert closed(tmp_path) == tens(0, 50)


def test_a_declared_series_is_rolled_although_its_files_overlap(engine: Engine, tmp_path: Path):
    for device in "ab":
        for number in range(3):
            add(tmp_path / "in" / f"{device}.{number}.jsonl", range(60 * number, 60 * number + 90))
    add(tmp_path / "in/c.0.jsonl", range(60))
    engine.run(counting(tmp_path, series=r"([ab])\.\d+"))
    assert max(closed(tmp_path)) == 40, "c is in no series: it is waited for"
    add(tmp_path / "in/c.0.jsonl", range(60, 300))
    engine.run(counting(tmp_path, series=r"([ab])\.\d+"))
    assert max(closed(tmp_path)) == 190


@pytest.mark.parametrize("series", ["auto", r"(app)"])
def test_the_file_without_a_number_is_the_newest_of_a_rotated_log(engine: Engine, tmp_path: Path, series: str):
    for age, name in enumerate(["app.log", "app.log.1", "app.log.2", "app.log.10"]):
        add(tmp_path / "in" / name, range(180 - 60 * age, 240 - 60 * age))
    engine.run(counting(tmp_path, "app.log*", format="jsonl", series=series))
    assert closed(tmp_path) == tens(0, 230)


@pytest.mark.parametrize("rotated", ["app.log.1", "app.log-20260101"])
def test_one_rotated_file_beside_its_log_is_finished(engine: Engine, tmp_path: Path, rotated: str):
    add(tmp_path / "in" / rotated, range(60))
    add(tmp_path / "in/app.log", range(60, 120))
    engine.run(counting(tmp_path, "app.log*", format="jsonl"))
    assert closed(tmp_path) == tens(0, 110)


def test_series_is_checked_when_it_is_given():
    with pytest.raises(ConfigError, match=r"series='\(' must be 'auto', 'none' or a regular expression"):
        files("in/*.jsonl", series="(")
