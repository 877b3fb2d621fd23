"""A place to run commands in, as a person would: a working directory with a pipeline and some input."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.cli.place import PIPELINE, Invoke, write_rows

from fordstone.cli.main import cli


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `flow.py` and 100 rows of input."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLARS_MAX_THREADS", "1")
    write_rows(tmp_path / "in" / "a.jsonl", range(100))
    (tmp_path / "flow.py").write_text(PIPELINE)
    return tmp_path


@pytest.fixture
def invoke(place: Path) -> Iterator[Invoke]:
    """Run a command line in this process."""
    path = list(sys.path)
    logger = logging.getLogger("fordstone")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level

    def forget() -> None:
        # What a command loaded from the working directory would be taken for the file of the next.
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(place)):
                del sys.modules[name]
        sys.path[:] = path

    def run(*args: str) -> Result:
        forget()
        return CliRunner().invoke(cli, list(args), prog_name="fordstone")

    yield run
    forget()
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
