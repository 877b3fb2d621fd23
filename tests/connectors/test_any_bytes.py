"""Whatever bytes a text file holds, reading never fails, and never depends on how the file is cut."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests.examples import examples

from fordstone.connectors import files
from fordstone.connectors.base import SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.lang.schema import Schema
from fordstone.testing.contracts.connector import ReadBack, read_all

SCHEMA = Schema.of(
    {
        "a": "string",
        "b": "int",
        "c": "double",
        "d": "timestamp",
        "e": "boolean",
        "f": "decimal(10,2)",
        "g": "tinyint",
        "h": "array<int>",
    }
)
FLAT = Schema(SCHEMA.columns[:-1])

VALUES = [
    "1", "-0", "1.5", "1e3", "1e39", "1e400", "2147483648", "9223372036854775808", "123456789012345678901234567890123456789012345",
    "null", "true", "false", "NaN", "-Infinity", "INF", '"NaN"', '"+INF"', '"inf"', "01", '""', '"x"', '"\\u00e9"', '"\\ud800"', '"\\u0000"', '"2026-01-01T00:00:00Z"',
    '"2026-02-30"', '"é\U0001f9ca"', "[]", "[1]", "[1,null]", '["x"]', "[[1]]", "{}", '{"a":1}', '"1.25"', '"', "[", "{", "\x00", "\x0b", "\\",
]  # fmt: skip
NAMES = ["a", "b", "c", "d", "e", "f", "g", "h", "other", "é", "\\u0061", ""]
JSON_FIELD = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)).map(lambda field: f'"{field[0]}":{field[1]}')
JSON_OBJECT = st.lists(JSON_FIELD, max_size=4).map(lambda fields: ("{" + ",".join(fields) + "}").encode())
JSON_LINE = st.one_of(
    JSON_OBJECT,
    JSON_OBJECT,
    st.sampled_from([b"", b"  ", b"\t\r", b"null", b"{", b"}", b"{}{}", b"\xff", b"[1]"]),
    st.binary(max_size=12),
)

CSV_VALUES = ["", "x", "1", "-1.5", "1e39", "1e999", "inf", "NaN", "true", "2026-01-01", "1.255", " 1", "é", "3000000000", '""', '"x"', '"a,b"', '"a""b"', '"a\nb"', '"\r\n"', '"', 'x"y', '"x"y', "\x00"]  # fmt: skip
CSV_RECORD = st.lists(st.sampled_from(CSV_VALUES), min_size=6, max_size=8).map(lambda fields: ",".join(fields).encode())
CSV_GOOD = st.lists(st.sampled_from(CSV_VALUES[:20]), min_size=7, max_size=7).map(
    lambda fields: ",".join(fields).encode()
)
CSV_LINE = st.one_of(
    CSV_GOOD, CSV_GOOD, CSV_RECORD, st.sampled_from([b"", b"\r", b" ", b"\xff"]), st.binary(max_size=12)
)
NEWLINE = st.sampled_from([b"\n", b"\n", b"\r\n"])

SETTINGS = examples(150, HealthCheck.function_scoped_fixture)


def read(
    path: Path, schema: Schema, *, rows_max: int = 100_000, position: int = 0, line_bytes_max: int = 1 << 20
) -> ReadBack:
    source = open_source(
        files(str(path), line_bytes_max=line_bytes_max, missing="null"), SourceOptions(schema=schema, bounded=True)
    )
    return read_all(source, source.partitions()[0], schema, rows_max=rows_max, position=position)


def check(path: Path, schema: Schema, line_bytes_max: int) -> None:
    whole = read(path, schema, line_bytes_max=line_bytes_max)
    assert whole.ended
    assert whole.positions[-1] == path.stat().st_size
    assert whole.rows.schema == schema.polars
    for rows_max in (1, 3):
        cut = read(path, schema, rows_max=rows_max, line_bytes_max=line_bytes_max)
        assert_frame_equal(cut.rows, whole.rows)
        assert cut.row_positions == whole.row_positions
        assert cut.rejected == whole.rejected
        for position in cut.positions[:: max(1, len(cut.positions) // 3)]:
            rest = read(path, schema, position=position, line_bytes_max=line_bytes_max)
            assert_frame_equal(rest.rows, whole.rows.tail(rest.rows.height))
            assert rest.row_positions == [place for place in whole.row_positions if place >= position]
            assert rest.rejected == [one for one in whole.rejected if one.position >= position]


@SETTINGS
@given(
    lines=st.lists(st.tuples(JSON_LINE, NEWLINE), max_size=12),
    torn=st.one_of(st.just(b""), JSON_LINE),
    line_bytes_max=st.sampled_from([20, 1 << 20]),
)
def test_json_lines_of_any_bytes(
    tmp_path: Path, lines: list[tuple[bytes, bytes]], torn: bytes, line_bytes_max: int
) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(b"".join(line + newline for line, newline in lines) + torn)
    check(path, SCHEMA, line_bytes_max)


@SETTINGS
@given(
    lines=st.lists(st.tuples(CSV_LINE, NEWLINE), max_size=12),
    torn=st.one_of(st.just(b""), CSV_LINE),
    line_bytes_max=st.sampled_from([20, 1 << 20]),
)
def test_csv_of_any_bytes(tmp_path: Path, lines: list[tuple[bytes, bytes]], torn: bytes, line_bytes_max: int) -> None:
    path = tmp_path / "any.csv"
    path.write_bytes(b"a,b,c,d,e,f,g\n" + b"".join(line + newline for line, newline in lines) + torn)
    check(path, FLAT, line_bytes_max)


@SETTINGS
@given(
    lines=st.lists(
        st.tuples(st.sampled_from([b"", b" ", b"x", b'""', b'"', b"\r", b"a,b", b'"a\nb"', b"\xff", b"\x00"]), NEWLINE),
        max_size=12,
    )
)
def test_csv_of_one_column(tmp_path: Path, lines: list[tuple[bytes, bytes]]) -> None:
    path = tmp_path / "one.csv"
    path.write_bytes(b"a\n" + b"".join(line + newline for line, newline in lines))
    check(path, Schema.of({"a": "string"}), 1 << 20)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_good_row_is_the_same_alone_and_among_bad_ones(tmp_path: Path, ending: str) -> None:
    good = (
        b'{"a":"x","b":5,"c":0.1,"d":"2026-01-01T00:00:00.5Z","f":1.25}\n'
        if ending == "jsonl"
        else b"x,5,0.1,2026-01-01T00:00:00.5Z,,1.25,\n"
    )
    head = b"" if ending == "jsonl" else b"a,b,c,d,e,f,g\n"
    frames: list[pl.DataFrame] = []
    for name, content in {"alone": head + good, "among": head + (b"bad\n" + good) * 3}.items():
        (tmp_path / f"{name}.{ending}").write_bytes(content)
        frames.append(read(tmp_path / f"{name}.{ending}", FLAT).rows)
    assert frames[0].height == 1
    assert_frame_equal(frames[1], pl.concat([frames[0]] * 3))
