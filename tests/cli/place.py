"""What the tests of commands share: a pipeline, its input, and how a command is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from fordstone.cli.main import cli

Invoke = Callable[..., Result]
SECONDS_MAX = 600
PIPELINE = """
from fordstone import Pipeline, tumbling
from fordstone.connectors import files

p = Pipeline("cold-chain")
readings = p.source(
    "readings", files("in/*.jsonl"),
    schema={"device": "string", "ts": "timestamp", "temp": "double"}, time="ts", lateness="5s",
)
readings.filter("temp > 20").sink("hot", files("out/hot", format="jsonl"))
readings.group_by("device").window(tumbling("10s")).agg(n="count(*)").sink("per_device", files("out/per_device", format="jsonl"))
"""
LIVE = """
from fordstone import Pipeline, tumbling
from fordstone.connectors import files, generator

p = Pipeline("live")
rows = p.source("rows", generator(rate=20_000, step="50us"), schema={"device": "string", "ts": "timestamp"}, time="ts")
rows.group_by("device").window(tumbling("10s")).agg(n="count(*)").sink("out", files("out/live", format="jsonl"))
"""


def write_rows(file: Path, numbers: range) -> None:
    """Add rows, one a second of event time."""
    file.parent.mkdir(exist_ok=True)
    rows = [
        {
            "device": f"d{number % 3}",
            "ts": f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}Z",
            "temp": number / 2,
        }
        for number in numbers
    ]
    with file.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(directory: Path) -> list[dict[str, object]]:
    """What a sink has released."""
    return [
        json.loads(line) for file in sorted(directory.glob("[!._]*.jsonl")) for line in file.read_text().splitlines()
    ]


def event_with(process: subprocess.Popen[str], name: str, least: int) -> dict[str, Any]:
    """Read progress, a line a second, until that number has been reached."""
    assert process.stdout is not None
    for _ in range(SECONDS_MAX):
        event: dict[str, Any] = json.loads(process.stdout.readline())
        if event[name] >= least:
            return event
    raise AssertionError(f"{name} did not reach {least} within {SECONDS_MAX} s")


@contextmanager
def commands(place: Path, **environment: str) -> Iterator[Invoke]:
    """Run command lines in this process; what they change in it is put back."""
    path = list(sys.path)

    def forget() -> None:
        # What a command loaded from the working directory would be taken for the file of the next.
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(place)):
                del sys.modules[name]
        sys.path[:] = path

    def run(*args: str) -> Result:
        forget()
        return CliRunner(env=environment).invoke(cli, list(args), prog_name="fordstone")

    try:
        yield run
    finally:
        forget()


def start(place: Path, *args: str, stdin: Any = None, **more: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own, below `place`. `stdin`: a file descriptor; `more`: environment variables."""
    environment = {name: value for name, value in os.environ.items() if name != "POLARS_MAX_THREADS"} | more
    command = [sys.executable, "-c", "from fordstone.cli.main import main; main()", *args]
    return subprocess.Popen(
        command,
        cwd=place,
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for its end: exit code, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end within {SECONDS_MAX} s.\n{out}\n{err}") from None
    return process.returncode, out, err
