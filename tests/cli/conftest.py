"""A place to run commands in, as a person would: a working directory with a pipeline and some input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.place import PIPELINE, Invoke, commands, write_rows


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
    with commands(place) as run:
        yield run
