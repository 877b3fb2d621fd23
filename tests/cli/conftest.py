"""A place to run commands in, as a person would: a working directory with a pipeline and some input."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fordstone.cli.main import cli

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

Invoke = Callable[..., Result]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `flow.py` and 100 rows of input."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in" / "a.jsonl", range(100))
    (tmp_path / "flow.py").write_text(PIPELINE)
    return tmp_path


@pytest.fixture
def invoke(place: Path) -> Iterator[Invoke]:
    """Run a command line in this process."""
    modules, path = set(sys.modules), list(sys.path)
    logger = logging.getLogger("fordstone")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level

    def run(*args: str) -> Result:
        for name in set(sys.modules) - modules:
            # What an earlier command loaded from the working directory would be taken for the file of this one.
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(place)):
                del sys.modules[name]
        return CliRunner().invoke(cli, list(args), prog_name="fordstone")

    yield run
    sys.path[:] = path
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def write_rows(file: Path, numbers: range) -> None:
    file.parent.mkdir(exist_ok=True)
    rows = [
        {"device": f"d{number % 3}", "ts": f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z", "temp": number / 2}
        for number in numbers
    ]
    with file.open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
