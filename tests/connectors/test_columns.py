"""Columns of files: those that are missing are an error, and those that there are can be inferred."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fordstone import Pipeline
from fordstone.connectors import MemorySink, files, memory
from fordstone.connectors.base import SourceOptions
from fordstone.connectors.files.columns import infer
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.registry import first_look, open_source
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.schema import Schema

WANTED = {"device": "string", "temperature": "double"}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        pl.DataFrame(rows).write_csv(path)
    else:
        frame = pl.DataFrame(rows)
        frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_ipc(path)


def partitions(pattern: Path, *, bounded: bool = True, **options: Any) -> int:
    source = open_source(files(str(pattern), **options), SourceOptions(schema=Schema.of(WANTED), bounded=bounded))
    return len(source.partitions())


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "arrow"])
@pytest.mark.parametrize("bounded", [True, False])
def test_a_column_that_the_first_file_lacks_is_an_error_with_the_names_it_has(
    tmp_path: Path, ending: str, *, bounded: bool
) -> None:
    write(tmp_path / f"a.{ending}", [{"device": "a", "temp": 1.5}])
    write(tmp_path / f"b.{ending}", [{"device": "a", "temperature": 1.5}])
    with pytest.raises(SourceError) as caught:
        partitions(tmp_path / f"*.{ending}", bounded=bounded)
    assert "no row has column 'temperature', which the schema declares. Did you mean 'temp'?" in str(caught.value)
    assert "The data has: device, temp." in str(caught.value)
    assert 'missing="null"' in str(caught.value)
    assert partitions(tmp_path / f"*.{ending}", bounded=bounded, missing="null") == 2


def test_one_row_that_has_the_column_is_enough_and_later_files_may_lack_it(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"device": "a"}, {"device": "b", "temperature": None}])
    write(tmp_path / "b.jsonl", [{"device": "a"}])
    assert partitions(tmp_path / "*.jsonl") == 2


def test_a_file_without_rows_is_compared_when_it_has_some(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("not JSON\n")
    source = open_source(files(str(path)), SourceOptions(schema=Schema.of(WANTED), bounded=False))
    assert source.partitions()
    write(path, [{"temp": 1}])
    with pytest.raises(SourceError, match="no row has column 'device'"):
        source.partitions()


def test_a_csv_file_without_a_header_has_the_columns_of_the_schema(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,1\n")
    assert partitions(tmp_path / "*.csv", header=False) == 1


def test_a_run_stops_with_the_names(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"device": "a", "temp": 1.5}])
    pipeline = Pipeline("missing")
    pipeline.source("r", files(str(tmp_path / "*.jsonl")), schema=WANTED).sink("out", memory(MemorySink()))
    with pytest.raises(SourceError, match="no row has column 'temperature'"):
        pipeline.run(bounded=True)


def test_nested_columns_and_times_are_inferred(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "ts": 1767225600000, "at": "2026-01-01T00:00:00Z", "s": {"x": 1, "l": [{"p": None}]}, "count_at": 5},
        {"id": 2, "ts": 1767225601000, "at": None, "s": {"y": "é"}, "l": [[1], [2.5]], "mixed": {}},
    ]
    write(tmp_path / "a.jsonl", rows)
    found = infer([tmp_path / "a.jsonl"], FileSettings(path="*.jsonl"))
    assert found.columns == {
        "id": "bigint",
        "ts": "timestamp",
        "at": "timestamp",
        "s": "struct<x: bigint, l: array<struct<p: string>>, y: string>",
        "count_at": "bigint",
        "l": "array<array<double>>",
    }
    assert found.time_unit == "ms"
    assert found.left_out == {"mixed": "contains objects without names"}


def test_a_source_without_a_schema_shows_the_one_to_paste(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"device": "a", "s": {"x": 1}}])
    spec = files(str(tmp_path / "*.jsonl"))
    text = first_look(spec)
    assert text == 'schema={\n    "device": "string",\n    "s": "struct<x: bigint>",\n},'
    with pytest.raises(ConfigError) as caught:
        Pipeline("first_look").source("r", spec)
    assert '        "s": "struct<x: bigint>",\n' in str(caught.value)
    assert first_look(files(str(tmp_path / "none*.jsonl"))) is None
    with pytest.raises(ConfigError, match="it needs its columns: schema="):
        Pipeline("first_look").source("r", files(str(tmp_path / "none*.jsonl")))
