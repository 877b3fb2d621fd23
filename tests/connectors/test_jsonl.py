"""What a JSON line becomes: a row, or a rejection that says why."""

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fordstone.connectors import files
from fordstone.connectors.base import SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.errors import SchemaError
from fordstone.lang.schema import Schema
from fordstone.testing.contracts.connector import ReadBack, read_all


def read(path: Path, content: bytes | str, kinds: dict[str, str], **options: Any) -> ReadBack:
    (path / "1.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    schema = Schema.of(kinds)
    made = open_source(
        files(str(path / "1.jsonl"), **{"missing": "null", **options}), SourceOptions(schema=schema, bounded=True)
    )
    return read_all(made, made.partitions()[0], schema)


def value(path: Path, kind: str, text: str, **options: Any) -> Any:
    """What one JSON value becomes, or the reason why it is rejected."""
    found = read(path, f'{{"x":{text}}}\n', {"x": kind}, **options)
    assert found.rows.height + len(found.rejected) == 1
    return found.rejected[0].reason if found.rejected else found.rows["x"].to_list()[0]


GOOD = [
    ("boolean", "true", True),
    ("tinyint", "-128", -128),
    ("int", "2147483647", 2**31 - 1),
    ("bigint", "-9223372036854775808", -(2**63)),
    ("bigint", "null", None),
    ("double", "1", 1.0),
    ("double", "1e3", 1000.0),
    ("double", "-0.0", -0.0),
    ("double", "5e-324", 5e-324),
    ("float", "0.1", 0.10000000149011612),
    ("double", '"Infinity"', math.inf),
    ("double", '"+Infinity"', math.inf),
    ("double", '"-Infinity"', -math.inf),
    ("double", '"+INF"', math.inf),
    ("float", '"-INF"', -math.inf),
    ("double", "Infinity", math.inf),
    ("float", "-Infinity", -math.inf),
    ("double", " +INF ", math.inf),
    ("string", '"NaN"', "NaN"),
    ("string", "-Infinity", "-Infinity"),
    ("array<double>", '["-Infinity",Infinity,1e3,null]', [-math.inf, math.inf, 1000.0, None]),
    (
        "struct<a: float, t: timestamp>",
        '{"a":-INF,"t":"1970-01-01"}',
        {"a": -math.inf, "t": datetime(1970, 1, 1, tzinfo=UTC)},
    ),
    ("string", '"a\\u0000b\\u00e9\\n"', "a\x00bé\n"),
    ("string", "5", "5"),
    ("string", "true", "true"),
    ("string", '{"a": [1, null]}', '{"a": [1, null]}'),
    ("string", '""', ""),
    ("binary", '"AP8="', b"\x00\xff"),
    ("date", '"2026-02-28"', date(2026, 2, 28)),
    ("timestamp", '"2026-01-01T02:00:00.5+02:00"', datetime(2026, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC)),
    ("timestamp", '"2026-01-01 00:00:00"', datetime(2026, 1, 1, tzinfo=UTC)),
    ("timestamp", "1767225600000000", datetime(2026, 1, 1, tzinfo=UTC)),
    ("timestamp", '"1767225600000000"', datetime(2026, 1, 1, tzinfo=UTC)),
    ("timestamp", "0", datetime(1970, 1, 1, tzinfo=UTC)),
    ("decimal(10,2)", "1.25", Decimal("1.25")),
    ("decimal(10,2)", "12.345", Decimal("12.35")),
    ("decimal(10,2)", '"-12.345"', Decimal("-12.35")),
    ("decimal(10,2)", "1e2", Decimal("100.00")),
    ("decimal(2,2)", "0.994", Decimal("0.99")),
    ("decimal(10,2)", '"-99999999.99"', Decimal("-99999999.99")),
    ("decimal(38,0)", "12345678901234567890123456789012345678", Decimal(12345678901234567890123456789012345678)),
]


@pytest.mark.parametrize(("kind", "text", "wanted"), GOOD)
def test_a_value_that_fits_becomes_a_value(tmp_path: Path, kind: str, text: str, wanted: Any) -> None:
    assert value(tmp_path, kind, text) == wanted


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("boolean", "1"),
        ("boolean", '"true"'),
        ("tinyint", "128"),
        ("smallint", "40000"),
        ("int", "2147483648"),
        ("int", "5.0"),
        ("int", '"5"'),
        ("int", "true"),
        ("bigint", "9223372036854775808"),
        ("bigint", "1e3"),
        ("bigint", "[1]"),
        ("double", '"1.5"'),
        ("double", '"warm"'),
        ("double", "false"),
        ("double", '{"a":1}'),
        ("double", "[1.5]"),
        ("double", '"INF"'),
        ("double", '"inf"'),
        ("double", '"nan"'),
        ("double", '"-NaN"'),
        ("double", '""'),
        ("int", '"NaN"'),
        ("bigint", "Infinity"),
        ("array<double>", '["NaN","1.5"]'),
        ("timestamp", "NaN"),
        ("decimal(10,2)", '"Infinity"'),
        ("float", "1e39"),
        ("binary", '"not base64!"'),
        ("date", '"2026-02-29"'),
        ("date", '"2026-01-01T00:00:00"'),
        ("date", "20454"),
        ("timestamp", '"yesterday"'),
        ("timestamp", '"2026-13-01T00:00:00Z"'),
        ("timestamp", '""'),
        ("timestamp", "true"),
        ("timestamp", "[1]"),
        ("timestamp", "9223372036854775807"),
        ("timestamp", "1e300"),
        ("timestamp", "-200000000000000000"),
        ("timestamp", '"9999-12-31T23:59:59-05:00"'),
        ("timestamp", '"0001-01-01T00:00:00+05:00"'),
        ("decimal(10,2)", "123456789.5"),
        ("decimal(10,2)", "99999999.995"),
        ("decimal(10,2)", '"x"'),
        ("decimal(10,2)", "true"),
    ],
)
def test_a_value_that_does_not_fit_is_rejected_with_the_column_and_the_type(
    tmp_path: Path, kind: str, text: str
) -> None:
    assert str(value(tmp_path, kind, text)).startswith("column x: ")
    assert str(value(tmp_path, kind, text)).endswith(f" is not a {kind}")


@pytest.mark.parametrize("text", ['"NaN"', "NaN"])
def test_nan_may_stand_for_a_number_in_quotes_or_without(tmp_path: Path, text: str) -> None:
    lines = (
        f'{{"x":1.7976931348623157e308,"s":"NaN"}}\n{{"x":{text},"s":"a"}}\n{{"x":-0.0,"s":{text}}}\n{{"x":"1.5"}}\n'
    )
    found = read(tmp_path, lines, {"x": "double", "s": "string"})
    assert [str(one) for one in found.rows["x"].to_list()] == ["1.7976931348623157e+308", "nan", "-0.0"]
    assert found.rows["s"].to_list() == ["NaN", "a", "NaN"]
    assert [one.reason for one in found.rejected] == ["column x: '1.5' is not a double"]


@pytest.mark.parametrize(
    "text", ["-NaN", "INF", "1Infinity", "Infinity5", "1e999", "01", "+1", ".5", "tru", "", "'x'", '"\x01"', "1}{"]
)
def test_what_is_no_json_is_rejected_whatever_the_type(tmp_path: Path, text: str) -> None:
    for kind in ("double", "string", "timestamp"):
        assert isinstance(value(tmp_path, kind, text), str)
        assert read(tmp_path, f'{{"x":{text}}}\n{{"x":null}}\n', {"x": kind}).rows.height == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"[1]", "not a JSON object"),
        (b"5", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"{", "truncated"),
        (b'{"x":1}{"x":2}', "trailing"),
        (b'{"x":1} x', "trailing"),
        (b'{"s":"\xff\xfe"}', "UTF-8"),
        (b'{"s":"\xed\xa0\x80"}', "UTF-8"),
        (b'{"x":1}\x00', "trailing"),
        (b"\x00\x00\x00", "malformed"),
        (b'{"x":' + b"[" * 2000 + b"]" * 2000 + b"}", ""),
        (b"\xef\xbb\xbf" * 2 + b'{"x":1}', ""),
    ],
)
def test_a_line_that_is_no_object_is_rejected_and_its_neighbours_stay(tmp_path: Path, line: bytes, says: str) -> None:
    found = read(tmp_path, b'{"x":1}\n' + line + b'\n{"x":3}\n', {"x": "int", "s": "string"})
    assert found.rows["x"].to_list() == [1, 3]
    (rejected,) = found.rejected
    assert rejected.position == 8
    assert rejected.text == line.decode(errors="replace")[:4096]
    assert says in rejected.reason


def test_missing_columns_are_null_and_others_are_ignored(tmp_path: Path) -> None:
    found = read(tmp_path, '{}\n{"y":{"x":1},"x":2}\n{"X":3}\n', {"x": "int", "z": "array<string>"})
    assert found.rows.rows() == [(None, None), (2, None), (None, None)]


def test_of_a_repeated_name_the_first_counts(tmp_path: Path) -> None:
    found = read(tmp_path, '{"x":1,"x":2}\n{"x":1,"x":"bad"}\n{"x":"bad","x":1}\n', {"x": "int"})
    assert found.rows["x"].to_list() == [1, 1]
    assert [one.position for one in found.rejected] == [32]


def test_a_byte_order_mark_blank_lines_and_windows_newlines_are_no_rows(tmp_path: Path) -> None:
    found = read(tmp_path, b'\xef\xbb\xbf{"x":1}\r\n\r\n  \t\r\n\n{"x":2}\r\n', {"x": "int"})
    assert found.rows["x"].to_list() == [1, 2]
    assert not found.rejected
    assert found.row_positions == [3, 20]


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n  \n", b"\xef\xbb\xbf", b"\xef\xbb"])
def test_a_file_without_rows_ends_at_once(tmp_path: Path, content: bytes) -> None:
    found = read(tmp_path, content, {"x": "int"})
    assert found.rows.is_empty()
    assert found.ended
    assert found.positions[-1] == len(content)


def test_lists_are_read_and_their_elements_checked(tmp_path: Path) -> None:
    content = '{"l":[1,null]}\n{"l":[]}\n{"l":null}\n{"l":["x"]}\n{"l":5}\n'
    found = read(tmp_path, content, {"l": "array<int>"})
    assert found.rows["l"].to_list() == [[1, None], [], None]
    assert [one.text for one in found.rejected] == ['{"l":["x"]}', '{"l":5}']


def test_objects_are_read_and_their_parts_checked(tmp_path: Path) -> None:
    good = [
        '{"s":{"a":1,"b":"x","more":0},"m":{"k":1.5},"l":[{"d":"1.25","t":"2026-01-01T00:00:00Z"},null]}',
        '{"s":{"b":{"q":[1]}},"m":{},"l":[]}',
        '{"s":null,"m":null}',
        '{"s":{},"m":{"k":null},"l":[{}]}',
    ]
    bad = [
        '{"s":{"a":"1"}}',
        '{"s":5}',
        '{"m":{"k":"x"}}',
        '{"m":[1]}',
        '{"l":[{"d":"x"}]}',
        '{"l":[{},{"t":"soon"}]}',
        '{"s":{"a":3000000000}}',
    ]
    kinds = {
        "s": "struct<a: int, b: string>",
        "m": "map<string, double>",
        "l": "array<struct<d: decimal(4,2), t: timestamp>>",
    }
    found = read(
        tmp_path, "".join(f"{line}\n" for pair in zip(bad, [*good, "", "", ""], strict=True) for line in pair), kinds
    )
    assert found.rows["s"].to_list() == [
        {"a": 1, "b": "x"},
        {"a": None, "b": '{"q": [1]}'},
        None,
        {"a": None, "b": None},
    ]
    assert found.rows["m"].to_list() == [{"k": 1.5}, {}, None, {"k": None}]
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    nothing = {"d": None, "t": None}
    assert found.rows["l"].to_list() == [[{"d": Decimal("1.25"), "t": moment}, None], [], None, [nothing]]
    assert [one.text for one in found.rejected] == bad
    assert all(kind in found.rejected[0].reason for kind in ("column s", "struct<a: int, b: string>"))


@pytest.mark.parametrize("kind", ["array<null>", "array<array<binary>>", "map<int, int>"])
def test_a_type_that_json_lines_cannot_hold_is_an_error_before_anything_is_read(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SchemaError, match="JSON lines cannot hold"):
        read(tmp_path, "{}\n", {"x": kind})


@pytest.mark.parametrize(
    ("unit", "number"),
    [("s", "1767225600"), ("ms", "1767225600000"), ("us", "1767225600000000"), ("s", "1767225600.0")],
)
def test_numbers_in_timestamps_count_the_unit(tmp_path: Path, unit: str, number: str) -> None:
    assert value(tmp_path, "timestamp", number, time_unit=unit) == datetime(2026, 1, 1, tzinfo=UTC)


def test_fractions_of_a_unit_are_kept_to_the_microsecond(tmp_path: Path) -> None:
    assert value(tmp_path, "timestamp", "1767225600.123456", time_unit="s") == datetime(
        2026, 1, 1, 0, 0, 0, 123456, tzinfo=UTC
    )
    assert value(tmp_path, "timestamp", "-0.5", time_unit="s") == datetime(
        1969, 12, 31, 23, 59, 59, 500_000, tzinfo=UTC
    )


def test_times_as_text_and_as_numbers_may_be_mixed(tmp_path: Path) -> None:
    content = '{"x":"2026-01-01"}\n{"x":1767225600}\n{"x":"2026-01-01T00:00:00.000Z"}\n{"x":null}\n{"x":1767225600.0}\n{"x":"?"}\n'
    found = read(tmp_path, content, {"x": "timestamp"}, time_unit="s")
    assert found.rows["x"].unique().to_list() in (
        [None, datetime(2026, 1, 1, tzinfo=UTC)],
        [datetime(2026, 1, 1, tzinfo=UTC), None],
    )
    assert found.rows.height == 5
    assert [one.text for one in found.rejected] == ['{"x":"?"}']


def test_a_column_of_nulls_may_be_declared(tmp_path: Path) -> None:
    assert read(tmp_path, '{"x":1,"y":5}\n', {"x": "int", "y": "null"}).rows.rows() == [(1, None)]


def test_a_long_rejected_line_is_kept_in_part(tmp_path: Path) -> None:
    (rejected,) = read(tmp_path, '{"x":"' + "é" * 100_000 + '"', {"x": "int"}).rejected
    assert len(rejected.text) == 4096
