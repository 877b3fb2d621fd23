"""Sinks that would write where another sink writes, or where a source reads, are refused when the pipeline is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from fordstone import Pipeline
from fordstone.connectors import files, generator
from fordstone.errors import ConfigError, SinkError


@pytest.mark.parametrize("other", ["out/x", "./out/x/", "out/../out/x", "out//x"])
def test_two_sinks_in_one_directory_are_refused_however_it_is_spelt(other: str) -> None:
    p = Pipeline("p")
    source = p.source("src", generator(rows=10), schema={"n": "bigint"})
    source.sink("a", files("out/x", format="jsonl"))
    with pytest.raises(ConfigError, match="sinks a and b both write to"):
        source.sink("b", files(other, format="parquet"))
    source.sink("b", files("out/y", format="parquet"))


@pytest.mark.parametrize(
    ("pattern", "directory", "ending", "refused"),
    [
        ("in/*.jsonl", "in", "jsonl", True),
        ("in/*.jsonl", "./in/", "jsonl", True),
        ("in/**/*.jsonl", "in/out", "jsonl", True),
        ("*/epoch-*.csv", "out", "csv", True),
        ("in/[d-f]poch*", "in", "csv", True),
        ("in/*.jsonl", "in", "parquet", False),
        ("in/*.jsonl", "in/out", "jsonl", False),
        ("in/*.jsonl", "out", "jsonl", False),
        ("in/data.jsonl", "in", "jsonl", False),
    ],
)
def test_a_sink_whose_files_a_source_would_read_is_refused(
    pattern: str, directory: str, ending: str, refused: bool
) -> None:
    p = Pipeline("p")
    source = p.source("src", files(pattern), schema={"n": "bigint"})
    if not refused:
        source.sink("out", files(directory, format=ending))
        return
    with pytest.raises(ConfigError, match="source src would read what sink out writes"):
        source.sink("out", files(directory, format=ending))


def test_a_directory_with_files_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").touch()
    (tmp_path / "out/mine.csv").write_text("n\n1\n")
    p = Pipeline("p")
    p.source("src", generator(rows=10), schema={"n": "bigint"}).sink("o", files(str(tmp_path / "out"), format="jsonl"))
    with pytest.raises(SinkError, match=r"has files that no sink wrote \(mine\.csv\)"):
        p.run(bounded=True, state=str(tmp_path / "state"))
    (tmp_path / "out/mine.csv").unlink()
    assert p.run(bounded=True, state=str(tmp_path / "state")).progress.rows_out == 10
