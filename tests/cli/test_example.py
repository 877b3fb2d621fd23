"""`fordstone example`: rows for the first pipeline, the same on every machine."""

from __future__ import annotations

import hashlib
import json
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cli.place import Invoke, finish, start
from tests.waiting import until


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands, with nothing in it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.rglob("*.jsonl")))).hexdigest()[:12]


def test_without_a_name_it_lists_what_there_is(invoke: Invoke):
    listed = invoke("example").output
    assert all(name in listed for name in ("words", "readings", "boxes"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("words", "807f6fcbcdf3"), ("readings", "c377f603344d"), ("boxes", "6d2307bd6266")],
)
def test_the_pages_show_rows_that_every_machine_makes(name: str, wanted: str, invoke: Invoke, empty: Path):
    assert invoke("example", name).exit_code == 0
    assert digest(empty / "in") == wanted


def test_rows_are_divided_among_two_files_in_the_folder_that_is_named(invoke: Invoke, empty: Path):
    result = invoke("example", "readings", "--rows", "10", "--into", "x/y")
    assert result.output == "wrote 5 rows to x/y/a.jsonl\nwrote 5 rows to x/y/b.jsonl\n"
    assert [row["seq"] for row in rows_of(empty / "x" / "y" / "b.jsonl")] == [1, 2, 3, 4, 5]


def test_the_next_seconds_of_boxes_are_appended(invoke: Invoke, empty: Path):
    invoke("example", "boxes", "--devices", "3", "--seconds", "40")
    whole = (empty / "in" / "box-0.jsonl").read_text()
    invoke("example", "boxes", "--devices", "3", "--seconds", "25")
    invoke("example", "boxes", "--devices", "3", "--seconds", "15", "--after", "25")
    assert (empty / "in" / "box-0.jsonl").read_text() == whole


def test_a_number_that_is_none_is_a_usage_error(invoke: Invoke, empty: Path):
    assert invoke("example", "readings", "--rows", "many").exit_code == 2
    assert invoke("example", "boxes", "--devices", "0").exit_code == 2
    assert list(empty.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_plain_error(invoke: Invoke, empty: Path):
    (empty / "taken").write_text("")
    result = invoke("example", "words", "--into", "taken/in")
    assert result.exit_code == 1
    assert (
        result.stderr == "error: cannot write taken/in/a.jsonl: Not a directory. Choose another folder with --into.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_live_boxes_send_with_the_current_time_until_they_are_stopped(empty: Path, number: signal.Signals):
    process = start(empty, "example", "boxes", "--devices", "2", "--live")
    until(lambda: any(file.read_text().count("\n") >= 2 for file in empty.glob("in/*.jsonl")), "the first rows")
    process.send_signal(number)
    code, out, err = finish(process)
    (file,) = empty.glob("in/*.jsonl")
    assert (code, err) == (0, "")
    assert out.startswith(f"writing 2 rows per second to in/{file.name}")
    ago = datetime.now(UTC) - datetime.fromisoformat(rows_of(file)[0]["ts"])
    assert timedelta(0) < ago < timedelta(hours=1)
