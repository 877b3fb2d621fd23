from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from importlib import import_module
from pathlib import Path
from select import select
from termios import TIOCSWINSZ
from typing import Any

import polars as pl
import pytest
from click.testing import Result
from tests.cli.place import SECONDS_MAX, Invoke, start, write_rows

from fordstone.cli.sql.output import cells
from fordstone.edge.run import run
from fordstone.plan.plan import Plan
from fordstone.protocol.progress import Report
from fordstone.spark.config import SparkConfig

SOURCE = "readings=in/*.jsonl"
WINDOWED = "SELECT device, window_start, count(*) AS n, max(temp) AS top FROM readings GROUP BY device, TUMBLE(ts, INTERVAL '1' MINUTE)"


def lines(result: Result) -> list[str]:
    return result.stdout.splitlines()


# Results


def test_a_windowed_query_over_files_is_answered_as_a_table(invoke: Invoke):
    result = invoke("sql", WINDOWED, "--source", SOURCE)
    assert result.exit_code == 0, result.stderr
    assert lines(result) == [
        "device  window_start           n   top",
        "──────  ────────────────────  ──  ────",
        "d0      2026-01-01 00:00:00Z  20  28.5",
        "d1      2026-01-01 00:00:00Z  20  29.0",
        "d2      2026-01-01 00:00:00Z  20  29.5",
        "d0      2026-01-01 00:01:00Z  14  49.5",
        "d1      2026-01-01 00:01:00Z  13  48.5",
        "d2      2026-01-01 00:01:00Z  13  49.0",
    ]
    assert "readings: 1 file: device string, ts timestamp (event time), temp double" in result.stderr
    assert "6 rows from 100 input rows in" in result.stderr


def test_json_is_one_object_a_row_and_nothing_else(invoke: Invoke):
    result = invoke("sql", "SELECT device, temp FROM readings WHERE temp > 49", "--source", SOURCE, "--json", "--quiet")
    assert [json.loads(line) for line in lines(result)] == [{"device": "d0", "temp": 49.5}]
    assert result.stderr == ""


@pytest.mark.parametrize("shape", [pl.col("at"), pl.concat_list("at"), pl.struct("at")])
def test_a_time_that_python_has_not_is_shown(shape: pl.Expr):
    frame = pl.DataFrame({"at": [253_402_300_800_000_000]}).cast(pl.Datetime("us", "UTC")).select(x=shape)
    ((text,),) = cells(frame).rows()
    assert "10000-01-01" in text or "253402300800000000" in text


def test_a_running_result_is_its_last_state(invoke: Invoke):
    query = "SELECT device, count(*) AS n FROM readings GROUP BY device HAVING count(*) < 34"
    result = invoke("sql", query, "-s", SOURCE, "--json")
    assert sorted(lines(result)) == ['{"device":"d1","n":33}', '{"device":"d2","n":33}']
    plain = invoke("sql", query, "-s", SOURCE)
    assert lines(plain) == ["device   n", "──────  ──", "d1      33", "d2      33"]


def test_a_result_without_rows_is_its_names(invoke: Invoke):
    result = invoke("sql", "SELECT device FROM readings WHERE temp > 1000", "-s", SOURCE)
    assert (result.exit_code, lines(result)) == (0, ["device", "──────"])
    assert "0 rows from 100" in result.stderr
    assert invoke("sql", "SELECT device FROM readings WHERE temp > 1000", "-s", SOURCE, "--json").stdout == ""


def test_several_sources_are_joined(invoke: Invoke, place: Path):
    (place / "names.csv").write_text("id,seen,name\nd1,2026-01-01T00:00:00Z,north\nd2,2026-01-01T00:00:10Z,south\n")
    query = "SELECT n.name, count(*) AS c FROM readings r JOIN names n ON r.device = n.id AND r.ts BETWEEN n.seen AND n.seen + INTERVAL '9' SECOND GROUP BY n.name"
    result = invoke("sql", query, "-s", SOURCE, "-s", "names=names.csv", "--json")
    assert sorted(lines(result)) == ['{"name":"north","c":3}', '{"name":"south","c":3}'], result.stderr


def test_a_stream_is_joined_with_a_table(invoke: Invoke, place: Path):
    (place / "devices.csv").write_text("id,site\nd0,north\nd1,south\n")
    query = "SELECT d.site, count(*) AS n FROM readings r JOIN devices d ON r.device = d.id GROUP BY d.site"
    result = invoke("sql", query, "--source", SOURCE, "--table", "devices=devices.csv", "--json")
    assert result.exit_code == 0, result.stderr
    assert sorted(lines(result)) == ['{"site":"north","n":34}', '{"site":"south","n":33}']
    assert "devices: 1 file: id string, site string" in result.stderr


def test_the_query_may_come_from_a_file_or_from_standard_input(invoke: Invoke, place: Path):
    (place / "q.sql").write_text("-- the hottest\nSELECT device\nFROM readings\nWHERE temp > 49;\n")
    assert lines(invoke("sql", "--file", "q.sql", "-s", SOURCE))[2:] == ["d0"]
    command = [
        sys.executable,
        "-c",
        "from fordstone.cli.main import main; main()",
        "sql",
        "-",
        "-s",
        SOURCE,
        "--json",
        "-q",
    ]
    query = "SELECT device FROM readings WHERE temp > 49"
    done = subprocess.run(
        command, cwd=place, input=query, capture_output=True, text=True, timeout=SECONDS_MAX, check=True
    )
    assert done.stdout == '{"device":"d0"}\n'


def test_explain_shows_the_plan_and_runs_nothing(invoke: Invoke):
    result = invoke("sql", WINDOWED, "-s", SOURCE, "--explain")
    assert "agg_device" in result.stdout
    assert "readings → result" in result.stdout
    on_spark = invoke("sql", WINDOWED, "-s", SOURCE, "--explain", "--on", "spark")
    assert "spark" in on_spark.stdout.lower()


# State


def test_nothing_is_left_behind_unless_asked_for(invoke: Invoke, place: Path, monkeypatch: pytest.MonkeyPatch):
    folder = place / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = sorted(place.rglob("*"))
    assert invoke("sql", WINDOWED, "-s", SOURCE).exit_code == 0
    assert invoke("sql", "SELECT nope FROM readings", "-s", SOURCE).exit_code == 2
    assert sorted(place.rglob("*")) == before
    assert invoke("sql", WINDOWED, "-s", SOURCE, "--state", "kept").exit_code == 0
    assert (place / "kept" / "sql").is_dir()
    again = invoke("sql", WINDOWED, "-s", SOURCE, "--state", "kept")
    assert "had ended already" in again.stderr
    file = next((place / "in").iterdir())
    (file.parent / f"more-{file.name}").write_bytes(file.read_bytes())
    more = invoke("sql", WINDOWED, "-s", SOURCE, "--state", "kept")
    assert (more.exit_code, "there is new input since. Use another --state, or none." in more.stderr) == (1, True), (
        more.stderr
    )


# What is found in the files


def infer(invoke: Invoke, pattern: str, *options: str) -> str:
    result = invoke("sql", "SELECT * FROM t", "-s", f"t={pattern}", *options)
    assert result.exit_code == 0, result.stderr
    return result.stderr.splitlines()[0].partition("file: ")[2] or result.stderr


def test_types_are_found_in_json_lines(invoke: Invoke, place: Path):
    rows = [
        {"i": 1, "f": 1, "s": "x", "b": True, "t": "2026-01-01T00:00:00Z", "d": "2026-01-01", "l": [1], "n": None, "big": 2**70},
        {"i": None, "f": 1.5, "s": "2026-01-01T00:00:00Z", "t": "2026-01-01 10:00:00.5+02:00", "d": "2026-02-28", "l": []},
    ]  # fmt: skip
    (place / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert infer(invoke, "a.jsonl") == (
        "i bigint, f double, s string, b boolean, t timestamp (event time), d date, l array<bigint>, n string, big double"
    )


def test_types_are_found_in_csv(invoke: Invoke, place: Path):
    (place / "a.csv").write_text(
        'id,zip,x,ok,at,note\n1,01234,1,true,2026-01-01T00:00:00Z,"a, b"\n-2,99999,2.5e3,false,2026-01-02T00:00:00Z,\n'
    )
    found = "id bigint, zip string, x double, ok boolean, at timestamp (event time), note string"
    assert infer(invoke, "a.csv") == found
    (place / "a.tsv").write_text("id\tname\n1\tx\n")
    assert infer(invoke, "a.tsv") == "id bigint, name string"
    (place / "b.csv").write_text("id;name\n1;x\n")
    assert infer(invoke, "b.csv", "--delimiter", ";") == "id bigint, name string"


def test_types_are_those_of_parquet_and_arrow(invoke: Invoke, place: Path):
    frame = pl.DataFrame(
        {"u": [1], "c": ["x"], "t": [0], "s": [{"a": 1}], "i": [1]},
        schema={
            "u": pl.UInt32,
            "c": pl.Categorical,
            "t": pl.Datetime("ns"),
            "s": pl.Struct({"a": pl.Int64}),
            "i": pl.Int16,
        },
    )
    frame.write_parquet(place / "a.parquet")
    frame.write_ipc(place / "a.arrow")
    for name in ("a.parquet", "a.arrow"):
        assert infer(invoke, name) == "u bigint, c string, t timestamp (event time), s struct<a: bigint>, i smallint"


def test_columns_that_cannot_be_read_are_said(invoke: Invoke, place: Path):
    (place / "a.jsonl").write_text('{"a": 1, "o": {}, "__id": 3}\n')
    result = invoke("sql", "SELECT * FROM t", "-s", "t=a.jsonl")
    assert "'o' is ignored: it contains objects without names" in result.stderr
    assert "'__id' is ignored" in result.stderr
    assert lines(result)[0] == "a"


def test_a_schema_given_counts_more_than_what_is_found(invoke: Invoke, place: Path):
    (place / "a.jsonl").write_text('{"at": 1767225600, "x": 1, "o": {}}\n')
    found = infer(invoke, "a.jsonl", "--schema", "at timestamp, x decimal(10,2), `odd name` string", "--time-unit", "s")
    assert found == "at timestamp (event time), x decimal(10,2), odd name string"
    result = invoke("sql", "SELECT at FROM t", "-s", "t=a.jsonl", "--schema", "t=at timestamp", "--time-unit", "s")
    assert lines(result)[2:] == ["2026-01-01 00:00:00Z"]


def test_of_several_times_one_must_be_chosen(invoke: Invoke, place: Path):
    (place / "a.jsonl").write_text('{"made": "2026-01-01T00:00:00Z", "sent": "2026-01-01T00:00:01Z"}\n')
    query = "SELECT count(*) AS n FROM t GROUP BY TUMBLE(sent, INTERVAL '1' SECOND)"
    result = invoke("sql", query, "-s", "t=a.jsonl")
    assert result.exit_code == 2
    assert "choose the event time: --time made" in result.stderr
    assert "a window needs event time" in result.stderr
    for time_option in ("sent", "t=sent"):
        assert lines(invoke("sql", query, "-s", "t=a.jsonl", "--time", time_option))[2:] == ["1"]


def test_rows_that_do_not_fit_or_come_late_are_counted_and_said(invoke: Invoke, place: Path):
    with (place / "in" / "a.jsonl").open("a") as file:
        file.write('{"device": "d9", "ts": "2026-01-01T00:00:00Z", "temp": 1.0}\nnot json\n')
    result = invoke("sql", WINDOWED, "-s", SOURCE, "--lateness", "5s")
    assert result.exit_code == 0
    late = "note: 1 late row is not in the result: up to 35s too late; --lateness 40s would have counted them."
    assert late in result.stderr
    assert "note: 1 row could not be read; the first in a.jsonl: JSON is malformed" in result.stderr
    fine = invoke("sql", WINDOWED, "-s", SOURCE)
    assert "late row" not in fine.stderr
    assert any(line.startswith("d9") for line in lines(fine))


# Mistakes


def test_times_in_a_wrong_unit_name_the_option_that_mends_it(invoke: Invoke, place: Path):
    (place / "a.jsonl").write_text('{"ts": 1767225606000}\n')
    result = invoke("sql", "SELECT ts FROM t", "-s", "t=a.jsonl", "--schema", "ts timestamp", "--time-unit", "us")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "error: source t, a.jsonl, column ts: 1767225606000, read as microseconds, is 1970-01-21T10:53:45.606000Z; as milliseconds it is "
        "2026-01-01T00:00:06Z. Use --time-unit ms, or give the column another type with --schema if such times are meant."
    )
    far = invoke("sql", "SELECT ts FROM t", "-s", "t=a.jsonl", "--schema", "ts timestamp", "--time-unit", "s")
    assert "as milliseconds it is 2026-01-01T00:00:06Z. Use --time-unit ms. If a column's type" in far.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["SELECT tmp FROM readings", "-s", SOURCE], "there is no column 'tmp'. Did you mean 'temp'?\n  SELECT tmp FROM readings\n         ^"),
        (["SELECT device FROM readings ORDER BY device", "-s", SOURCE], "ORDER BY is not supported"),
        (["SELECT 1 AS x FROM readings", "-s", SOURCE, "-t", "devices"], "as in --table devices=devices.csv"),
        (["SELECT 1 AS x FROM readings", "-s", SOURCE, "-t", SOURCE], "there is a source of that name"),
        (["SELECT 1 FROM nothing", "-s", SOURCE], "there is no stream 'nothing'. There are: readings."),
        (["SELECT 1 FROM readings"], "no source was given"),
        ([], "give a query, or --file"),
        (["SELECT 1", "--file", "q.sql"], "give a query, or --file"),
        (["--file", "missing.sql", "-s", SOURCE], "--file missing.sql: No such file"),
        (["SELECT 1 FROM r", "-s", "in/*.jsonl"], "write NAME=PATTERN"),
        (["SELECT 1 FROM r", "-s", "r=in/*.jsonl", "-s", "r=x"], "is given twice"),
        (["SELECT 1 FROM r", "-s", "r=in/*.jsonl", "--schema", "x"], "'x' is not a column with its type"),
        (["SELECT 1 FROM r", "-s", "r=in/*.jsonl", "--schema", "x what"], "unknown type 'what'"),
        (["SELECT 1 FROM r", "-s", "r=in/*.jsonl", "--time", "q=ts"], "there is no source 'q'"),
        (["SELECT 1 FROM r", "-s", "r=in/*.jsonl", "--follow", "-s", "q=none/*.csv"], "no file matches 'none/*.csv' yet"),
    ],
)  # fmt: skip
def test_misuse_is_text_and_ends_with_2(invoke: Invoke, args: list[str], said: str):
    result = invoke("sql", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-s", "r=none/*.jsonl"], "no file matches 'none/*.jsonl'"),
        (["-s", "r=flow.py"], "the format cannot be inferred from the suffix. Give it: --format"),
        (["-s", "r=flow.py", "--format", "parquet"], "cannot be read as parquet"),
        (["-s", "r=in/*.jsonl", "--time", "temp"], "event time needs a timestamp"),
        (["-s", "r=in/*.jsonl", "--lateness", "soon"], "'soon' is not a span of time"),
        (["-s", "a b=in/*.jsonl"], "source 'a b': a name has"),
    ],
)
def test_what_is_wrong_with_files_is_text(invoke: Invoke, args: list[str], said: str):
    result = invoke("sql", "SELECT 1 AS one FROM r", *args)
    assert result.exit_code in {1, 2}
    assert result.stdout == ""
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_help_teaches_with_an_example(invoke: Invoke):
    result = invoke("sql", "--help")
    assert "TUMBLE(ts, INTERVAL '10' SECOND)" in result.stdout
    assert "--source readings='in/*.jsonl'" in result.stdout


# On Spark


def test_on_spark_the_same_plan_runs_as_a_batch_job(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}

    @contextmanager
    def application(**given: Any) -> Iterator[str]:
        asked.update(given)
        yield "a session"

    def run_plan(plan: Plan, functions: Any, config: SparkConfig, *, spark: str, on_progress: Any) -> Report:
        asked.update(bounded=config.bounded, spark=spark)
        return run(plan, functions, state=config.state, bounded=True, on_progress=on_progress)

    monkeypatch.setattr(import_module("fordstone.spark.session.application"), "application", application)
    monkeypatch.setattr(import_module("fordstone.spark.run"), "run_plan", run_plan)
    result = invoke("sql", "SELECT device FROM readings WHERE temp > 49", "-s", SOURCE, "--on", "spark", "--json")
    assert (result.exit_code, result.stdout) == (0, '{"device":"d0"}\n'), result.stderr
    assert asked == {"name": "fordstone sql", "bounded": True, "spark": "a session"}


# As a process


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(place: Path):
    write_rows(place / "in" / "b.jsonl", range(20_000))
    process = start(place, "sql", "SELECT * FROM readings", "-s", SOURCE, "--json", "-q")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
def test_changes_of_a_running_result_come_as_they_are_while_following(place: Path):
    query = "SELECT device, count(*) AS n FROM readings GROUP BY device HAVING count(*) < 40"
    process = start(place, "sql", query, "-s", SOURCE, "--follow", "--json", "-q")
    assert process.stdout is not None
    first = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert [(row["n"], row["__op"]) for row in first] == [(34, "upsert"), (33, "upsert"), (33, "upsert")]
    write_rows(place / "in" / "a.jsonl", range(102, 123, 3))
    assert json.loads(process.stdout.readline()) == {"device": "d0", "n": 41, "__op": "delete"}
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=SECONDS_MAX) == 0
    process.communicate()


class Terminal:
    """What a person would see: a process in a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], side: int) -> None:
        self._process = process
        self._side = side
        self.text = ""

    def wait_for(self, what: str) -> None:
        self._read_until(lambda: what in self.seen())

    def end(self) -> int:
        self._read_until(lambda: False)
        return self._process.wait()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def seen(self) -> str:
        """All that was written, without what colours it and moves the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text).replace("\r", "")

    def _read_until(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS_MAX
        while not done():
            ready, _, _ = select([self._side], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise AssertionError(f"nothing more came within {SECONDS_MAX} s:\n{self.seen()}")
            try:
                data = os.read(self._side, 1 << 16)
            except OSError:
                return
            if not data:
                return
            self.text += data.decode(errors="replace")


@contextmanager
def terminal(place: Path, *args: str, width: int = 100, height: int = 24, **more: str) -> Iterator[Terminal]:
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", **more}
    environment = {name: value for name, value in environment.items() if value or name not in {"COLUMNS", "LINES"}}
    command = [sys.executable, "-c", "from fordstone.cli.main import main; main()", *args]
    side, inner = os.openpty()
    ioctl(side, TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    # Not by `pty.fork`: this process has threads, and what they hold when it is forked is held for ever in the child.
    process = subprocess.Popen(
        command, cwd=place, env=environment, stdin=inner, stdout=inner, stderr=inner, start_new_session=True
    )
    os.close(inner)
    try:
        yield Terminal(process, side)
    finally:
        os.close(side)


@pytest.mark.slow
def test_a_terminal_shows_a_table_that_stays_and_says_how_many_rows_there_are(place: Path):
    with terminal(place, "sql", "SELECT device, ts, temp FROM readings", "-s", SOURCE, "--rows", "3") as screen:
        assert screen.end() == 0
    last = screen.seen().splitlines()
    assert last[-5:-2] == [
        "d1      2026-01-01 00:01:37Z  48.5",
        "d2      2026-01-01 00:01:38Z  49.0",
        "d0      2026-01-01 00:01:39Z  49.5",
    ]
    assert last[-2] == "the last 3 of 100 rows; --rows N shows more, --json all"
    assert last[-1].startswith("100 rows from 100 input rows in")
    assert "\x1b[?25h" in screen.text.rpartition("\x1b[?25l")[2], "the cursor is hidden"


@pytest.mark.slow
def test_rows_appear_while_files_grow_until_ctrl_c(place: Path):
    query = "SELECT device, window_start, count(*) AS n FROM readings GROUP BY device, TUMBLE(ts, INTERVAL '1' MINUTE)"
    with terminal(place, "sql", query, "-s", SOURCE, "--follow", NO_COLOR="1") as screen:
        screen.wait_for("d0      2026-01-01 00:00:00Z  20")
        write_rows(place / "in" / "a.jsonl", range(100, 200))
        screen.wait_for("d0      2026-01-01 00:02:00Z  20")
        screen.interrupt()
        assert screen.end() == 0
    assert "Ctrl-C to stop" in screen.seen()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", screen.text), "there is colour"


@pytest.mark.slow
def test_a_narrow_terminal_shows_what_fits_and_says_what_does_not(place: Path):
    rows = [{"city": "東京タワー" * 3, "evil": "a\x1b[31mb\nc", "x": 1, "y": 2, "z": 3, "longer": "q" * 90}]
    (place / "wide.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    with terminal(place, "sql", "SELECT * FROM t", "-s", "t=wide.jsonl", "-q", width=30) as screen:
        assert screen.end() == 0
    table = screen.seen().splitlines()
    shown = next(line for line in reversed(table) if line.startswith("東京"))
    assert "…" in shown
    assert "\\x1b[" in shown
    assert any("do not fit" in line for line in table)
    assert "\x1b[31m" not in screen.text, "a text of the data reached the terminal as a command"
