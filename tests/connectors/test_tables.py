"""Parquet and Arrow files: read in slices, matched by name, and never guessed at."""

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fordstone.connectors import files
from fordstone.connectors.base import Source, SourceOptions
from fordstone.connectors.files.tables import SLICE_BYTES_MAX, SLICE_ROWS, TableReader
from fordstone.connectors.registry import open_source
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.testing.contracts.connector import ReadBack, read_all

FORMATS = ["parquet", "arrow"]


def save(frame: pl.DataFrame, path: Path, **options: Any) -> None:
    if path.suffix == ".parquet":
        frame.write_parquet(path, **options)
    else:
        frame.write_ipc(path)


def source(path: Path, schema: Schema, *, bounded: bool = True) -> Source:
    return open_source(files(str(path), missing="null"), SourceOptions(schema=schema, bounded=bounded))


def read(path: Path, kinds: dict[str, str], **options: Any) -> ReadBack:
    schema = Schema.of(kinds)
    made = source(path, schema)
    return read_all(made, made.partitions()[0], schema, **options)


@pytest.mark.parametrize("ending", FORMATS)
def test_columns_are_matched_by_name_missing_ones_are_null_and_others_not_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    save(pl.DataFrame({"x": [1], "other": ["o"], "y": ["a"]}), path)
    assert read(path, {"y": "string", "missing": "timestamp", "x": "bigint"}).rows.rows() == [("a", None, 1)]


@pytest.mark.parametrize("ending", FORMATS)
def test_types_that_mean_the_same_are_converted(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    noon = datetime(2026, 1, 1, 12)
    frame = pl.DataFrame(
        {
            "small": pl.Series([1], dtype=pl.Int8),
            "unsigned": pl.Series([2**63 - 1], dtype=pl.UInt64),
            "float": pl.Series([1.5], dtype=pl.Float32),
            "whole": [3],
            "naive": pl.Series([noon], dtype=pl.Datetime("ms")),
            "berlin": pl.Series([noon], dtype=pl.Datetime("ns")).dt.replace_time_zone("Europe/Berlin"),
            "day": [date(2026, 1, 1)],
            "category": pl.Series(["c"], dtype=pl.Categorical),
            "nothing": pl.Series([None], dtype=pl.Null),
            "list": pl.Series([[1, 2]], dtype=pl.List(pl.Int16)),
        }
    )
    save(frame, path)
    kinds = {
        "small": "bigint", "unsigned": "bigint", "float": "double", "whole": "double", "naive": "timestamp", "berlin": "timestamp",
        "day": "timestamp", "category": "string", "nothing": "int", "list": "array<bigint>",
    }  # fmt: skip
    utc = noon.replace(tzinfo=UTC)
    wanted = (1, 2**63 - 1, 1.5, 3.0, utc, utc.replace(hour=11), utc.replace(hour=0), "c", None, [1, 2])
    assert read(path, kinds).rows.rows() == [wanted]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pl.Series(["1.5"]), "double"),
        (pl.Series([1.5]), "bigint"),
        (pl.Series([1]), "string"),
        (pl.Series([1]), "timestamp"),
        (pl.Series([True]), "int"),
        (pl.Series([[1]]), "bigint"),
        (pl.Series([1]), "array<bigint>"),
    ],
)
def test_a_column_of_another_kind_is_an_error_that_names_file_column_and_types(
    tmp_path: Path, column: pl.Series, kind: str
) -> None:
    path = tmp_path / "1.parquet"
    save(pl.DataFrame({"x": column}), path)
    with pytest.raises(SourceError, match=rf"1\.parquet: column 'x' is .* cannot be read as {kind}"):
        read(path, {"x": kind})


@pytest.mark.parametrize("ending", FORMATS)
def test_a_number_too_large_for_the_declared_type_rejects_its_row_alone(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    save(pl.DataFrame({"x": [1, 300, None, 4], "y": [1.0, 2.0, 3.0, 1e300]}), path)
    found = read(path, {"x": "tinyint", "y": "float"})
    assert found.rows.rows() == [(1, 1.0), (None, 3.0)]
    assert found.row_positions == [0, 2]
    assert [one.position for one in found.rejected] == [1, 3]
    assert "300" in found.rejected[0].text


@pytest.mark.parametrize("ending", FORMATS)
def test_a_row_that_is_rejected_is_shown_with_a_time_that_python_has_not(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    save(pl.DataFrame({"x": [300], "t": [253_402_300_800_000_000]}).cast({"t": pl.Datetime("us", "UTC")}), path)
    (rejected,) = read(path, {"x": "tinyint", "t": "timestamp"}).rejected
    assert rejected.text == "{'x': 300, 't': 253402300800000000}"


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_without_any_declared_column_is_an_error(tmp_path: Path, ending: str) -> None:
    save(pl.DataFrame({"a": [1]}), tmp_path / f"1.{ending}")
    with pytest.raises(SourceError, match=r"columns a, and none of those declared \(x\)"):
        read(tmp_path / f"1.{ending}", {"x": "int"})


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_that_is_still_being_written_waits_for_its_footer_or_is_an_error_when_bounded(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"1.{ending}"
    save(pl.DataFrame({"x": [1, 2]}), path)
    whole = path.read_bytes()
    schema = Schema.of({"x": "bigint"})
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError, match="lacks the footer"):
            read(path, {"x": "bigint"})
    reader = source(path, schema, bounded=False).open(PartitionId(path.name), Position(0), with_positions=False)
    assert reader.read(10) is None
    path.write_bytes(whole)
    chunk = reader.read(10)
    assert chunk is not None
    assert chunk.frame["x"].to_list() == [1, 2]
    assert chunk.ended


@pytest.mark.parametrize("ending", FORMATS)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    save(pl.DataFrame({"x": range(10_000)}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + b"\xff" * (len(whole) - 40) + whole[-20:])
    with pytest.raises(SourceError, match=rf"1\.{ending} cannot be read as {ending}"):
        read(path, {"x": "bigint"})


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_that_shrank_or_vanished_is_an_error(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    save(pl.DataFrame({"x": [1, 2, 3]}), path)
    made = source(path, Schema.of({"x": "bigint"}))
    made.partitions()
    with pytest.raises(SourceError, match="shrank: it has 3 rows, and 5 had been read"):
        made.open(PartitionId(path.name), Position(5), with_positions=False).read(10)
    path.unlink()
    with pytest.raises(SourceError, match="vanished"):
        made.open(PartitionId(path.name), Position(1), with_positions=False).read(10)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_large_file_is_read_in_slices_that_join_without_a_seam(tmp_path: Path, ending: str) -> None:
    count = SLICE_ROWS + 100_000
    path = tmp_path / f"1.{ending}"
    save(pl.select(x=pl.int_range(count)), path, row_group_size=70_001)
    for rows_max in (60_000, count):
        found = read(path, {"x": "bigint"}, rows_max=rows_max)
        assert (found.rows["x"] == pl.int_range(count, eager=True)).all()
        assert found.positions[-1] == count


def test_wide_rows_make_smaller_slices(tmp_path: Path) -> None:
    path = tmp_path / "1.parquet"
    save(pl.select(n=pl.int_range(200_000)).with_columns(x=pl.lit("x" * 1000)), path)
    schema = Schema.of({"x": "string", "n": "bigint"})
    reader = source(path, schema).open(PartitionId(path.name), Position(0), with_positions=False)
    seen, largest = [], 0
    while (chunk := reader.read(1000)) is not None:
        seen.append(chunk.frame["n"])
        largest = max(largest, reader._slice.estimated_size())  # type: ignore[attr-defined]
        if chunk.ended:
            break
    assert (pl.concat(seen) == pl.int_range(200_000, eager=True)).all()
    assert 0 < largest <= SLICE_BYTES_MAX * 1.1


def test_names_with_pattern_characters_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "odd [1]{a}.parquet"
    save(pl.DataFrame({"x": [1]}), path)
    made = source(tmp_path / "*.parquet", Schema.of({"x": "bigint"}))
    assert read_all(made, made.partitions()[0], Schema.of({"x": "bigint"})).rows["x"].to_list() == [1]


# How far a read would come.


def plan_read(made: Source, path: Path, position: int, rows_max: int) -> tuple[int, bool]:
    found = made.plan_read(PartitionId(path.name), Position(position), rows_max)
    return int(found.position), found.ended


@pytest.mark.parametrize("ending", FORMATS)
def test_a_plan_goes_by_the_number_of_rows_which_is_looked_up_once(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"1.{ending}"
    save(pl.DataFrame({"x": range(10)}), path)
    made = source(path, Schema.of({"x": "bigint"}), bounded=False)
    assert plan_read(made, path, 0, 4) == (4, False)
    with monkeypatch.context() as patch:
        patch.setattr(TableReader, "count", lambda _: pytest.fail("counted again"))
        assert plan_read(made, path, 4, 2**62) == (10, True)
        assert plan_read(made, path, 10, 4) == (10, True)
    save(pl.DataFrame({"x": range(20)}), path)
    assert plan_read(made, path, 10, 2**62) == (20, True)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_that_is_still_being_written_is_not_planned_yet(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    save(pl.DataFrame({"x": [1, 2]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    schema = Schema.of({"x": "bigint"})
    waiting = source(path, schema, bounded=False)
    assert plan_read(waiting, path, 0, 5) == (0, False)
    with pytest.raises(SourceError, match="lacks the footer"):
        plan_read(source(path, schema), path, 0, 5)
    path.write_bytes(whole)
    assert plan_read(waiting, path, 0, 5) == (2, True)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_with_fewer_rows_than_were_planned_is_an_error(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    schema = Schema.of({"x": "bigint"})
    save(pl.DataFrame({"x": [1, 2, 3]}), path)
    planner = source(path, schema, bounded=False)
    until, _ = plan_read(planner, path, 0, 5)
    save(pl.DataFrame({"x": [1, 2]}), path)
    for made in (planner, source(path, schema)):
        with pytest.raises(SourceError, match="shrank: it has 2 rows"):
            plan_read(made, path, until, 5)
    with pytest.raises(SourceError, match="shrank: it has 2 rows, and 3"):
        read_all(source(path, schema), PartitionId(path.name), schema, until=until)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SourceError, match="lacks its footer"):
        read_all(source(path, schema, bounded=False), PartitionId(path.name), schema, until=until)


def test_how_much_was_read_is_known_where_reads_are_only_planned(tmp_path: Path) -> None:
    path = tmp_path / "1.parquet"
    save(pl.DataFrame({"x": range(100)}), path)
    made = source(path, Schema.of({"x": "bigint"}))
    plan_read(made, path, 0, 25)
    assert made.share_read({path.name: PartitionCut(position=Position(25))}) == pytest.approx(0.25)
