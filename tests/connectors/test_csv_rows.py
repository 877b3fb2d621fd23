"""What a CSV record becomes: a row, or a rejection that says why."""

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fordstone.connectors import files
from fordstone.connectors.base import SourceOptions
from fordstone.connectors.registry import open_source
from fordstone.errors import SchemaError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.testing.contracts.connector import ReadBack, read_all

KINDS = {"a": "string", "b": "int"}


def read(path: Path, content: bytes | str, kinds: dict[str, str], **options: Any) -> ReadBack:
    (path / "1.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    schema = Schema.of(kinds)
    made = open_source(
        files(str(path / "1.csv"), **{"missing": "null", **options}), SourceOptions(schema=schema, bounded=True)
    )
    return read_all(made, made.partitions()[0], schema)


def test_columns_are_found_by_the_header_in_any_order(tmp_path: Path) -> None:
    found = read(tmp_path, "z,b,other,a\n9,1,x,p\n9,2,y,q\n", {"a": "string", "b": "int", "missing": "double"})
    assert found.rows.rows() == [("p", 1, None), ("q", 2, None)]


def test_without_a_header_columns_are_those_of_the_schema_in_order(tmp_path: Path) -> None:
    found = read(tmp_path, b"\xef\xbb\xbfp,1\nq,2\n", KINDS, header=False)
    assert found.rows.rows() == [("p", 1), ("q", 2)]
    assert found.row_positions == [3, 7]


def test_quoted_fields_hold_delimiters_quotes_and_newlines(tmp_path: Path) -> None:
    found = read(tmp_path, 'a,b\n"x, y",1\n"say ""hi""",2\n"two\nlines",3\n"win\r\ndows",4\r\n"",5\n,6\n', KINDS)
    assert found.rows.rows() == [
        ("x, y", 1),
        ('say "hi"', 2),
        ("two\nlines", 3),
        ("win\r\ndows", 4),
        ("", 5),
        (None, 6),
    ]
    assert not found.rejected


def test_a_newline_in_quotes_is_never_cut_in_two(tmp_path: Path) -> None:
    content = b"a,b\n" + b"".join(b'"' + b"line\n" * (number % 5) + b'",%d\n' % number for number in range(200))
    schema = Schema.of(KINDS)
    (tmp_path / "1.csv").write_bytes(content)
    made = open_source(files(str(tmp_path / "1.csv")), SourceOptions(schema=schema, bounded=True))
    for rows_max in (1, 2, 3, 17):
        found = read_all(made, made.partitions()[0], schema, rows_max=rows_max)
        assert found.rows["b"].to_list() == list(range(200))
        assert [text.count("\n") for text in found.rows["a"].to_list()] == [number % 5 for number in range(200)]


def test_other_delimiters(tmp_path: Path) -> None:
    assert read(tmp_path, 'a;b\n"x;y";1\n1,5;2\n', KINDS, delimiter=";").rows.rows() == [("x;y", 1), ("1,5", 2)]
    assert read(tmp_path, "a\tb\nx\t1\n", KINDS, delimiter="\t").rows.rows() == [("x", 1)]


def test_header_names_may_be_quoted_and_after_a_byte_order_mark(tmp_path: Path) -> None:
    assert read(tmp_path, b'\xef\xbb\xbf"a","b"\r\nx,1\r\n', KINDS).rows.rows() == [("x", 1)]


@pytest.mark.parametrize("content", ["", "a,b", "a,b\n", "a,b\r\n", "a,b\n\n\n"])
def test_a_file_with_a_header_at_most_has_no_rows(tmp_path: Path, content: str) -> None:
    found = read(tmp_path, content, KINDS)
    assert found.rows.is_empty()
    assert not found.rejected
    assert found.ended
    assert found.positions[-1] == len(content)


def test_a_header_without_any_declared_column_is_an_error_that_suggests_why(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"header=False.*delimiter="):
        read(tmp_path, "x,1\n", KINDS)
    with pytest.raises(SourceError, match="'a' twice"):
        read(tmp_path, "a,a,b\n", KINDS)
    with pytest.raises(SourceError, match="not UTF-8"):
        read(tmp_path, b"a,b\xff\n", KINDS)
    with pytest.raises(SourceError, match="no CSV header"):
        read(tmp_path, b"x" * (1 << 23), KINDS)


@pytest.mark.parametrize(("header", "says"), [(b"p\xee,n", "is not UTF-8"), (b"p\rq,n", "cannot be read")])
def test_a_header_that_cannot_be_read_is_an_error_that_names_the_file(tmp_path: Path, header: bytes, says: str) -> None:
    with pytest.raises(SourceError, match=rf"\.csv: the header {says}"):
        read(tmp_path, header + b"\nq,2\n", KINDS)


def test_the_header_waits_for_its_newline_and_is_read_again_on_resuming(tmp_path: Path) -> None:
    path = tmp_path / "1.csv"
    path.write_text("b,a")
    schema = Schema.of(KINDS)
    made = open_source(files(str(path)), SourceOptions(schema=schema, bounded=False))
    reader = made.open(made.partitions()[0], Position(0), with_positions=False)
    assert reader.read(10) is None
    with path.open("a") as file:
        file.write("\n1,x\n2,y\n")
    chunk = reader.read(1)
    assert chunk is not None
    assert chunk.frame.rows() == [("x", 1)]
    rest = read_all(made, made.partitions()[0], schema, position=int(chunk.position))
    assert rest.rows.rows() == [("y", 2)]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (b"x", "1 fields, where 2"),
        (b"x,1,2", "3 fields, where 2"),
        (b"\xff,1", "UTF-8"),
        (b'"x"y,1', "stands inside a field"),
        (b"x,one", "column b: 'one' is not a int"),
        (b"x,1.0", "is not a int"),
        (b"x, 1", "is not a int"),
        (b"x,2147483648", "is not a int"),
        (b'x,"1', "quote is not closed"),
    ],
)
def test_a_bad_record_is_rejected_and_its_neighbours_stay(tmp_path: Path, record: bytes, says: str) -> None:
    found = read(tmp_path, b"a,b\np,1\n" + record + b"\nq,2\n", KINDS)
    assert found.rows.rows() == [("p", 1), ("q", 2)]
    (rejected,) = found.rejected
    assert (rejected.position, rejected.text) == (8, record.decode(errors="replace"))
    assert says in rejected.reason


def test_a_stray_quote_costs_one_line_not_the_rest_of_the_file(tmp_path: Path) -> None:
    rows = b"".join(b"r%d,%d\n" % (number, number) for number in range(1000))
    found = read(tmp_path, b'a,b\n"open,1\n' + rows + b'5" pipe,2\n' + rows, KINDS)
    assert found.rows["b"].to_list() == [*range(1000), *range(1000)]
    assert [one.text for one in found.rejected] == ['"open,1', '5" pipe,2']


def test_a_good_record_over_two_lines_with_a_bad_value_is_rejected_whole(tmp_path: Path) -> None:
    found = read(tmp_path, 'a,b\n"two\nlines",one\nq,2\n', KINDS)
    assert found.rows.rows() == [("q", 2)]
    assert [one.text for one in found.rejected] == ['"two\nlines",one']


def test_types_are_read_from_text(tmp_path: Path) -> None:
    kinds = {
        "a": "boolean",
        "b": "bigint",
        "c": "double",
        "d": "decimal(5,2)",
        "e": "date",
        "f": "timestamp",
        "g": "binary",
        "h": "float",
    }
    good = (
        "True,-5,1e3,1.25,2026-01-01,2026-01-01T00:00:00Z,AP8=,inf\n0,+5,NaN,-1,2026-01-01,0,,1e38\n,,,,,,,\n"
        '"","","","","","","",""\n'
    )
    found = read(tmp_path, "a,b,c,d,e,f,g,h\n" + good, kinds)
    assert not found.rejected
    rows = found.rows.rows()
    first = (
        True,
        -5,
        1000.0,
        Decimal("1.25"),
        date(2026, 1, 1),
        datetime(2026, 1, 1, tzinfo=UTC),
        b"\x00\xff",
        float("inf"),
    )
    assert rows[0] == first
    assert rows[1][0] is False
    assert rows[1][1] == 5
    assert rows[1][2] != rows[1][2]
    assert rows[2] == (None,) * 8
    assert rows[3] == (None, None, None, None, None, None, b"", None)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("boolean", "yes"),
        ("tinyint", "200"),
        ("double", "1,5"),
        ("double", "1e999"),
        ("float", "1e39"),
        ("decimal(4,2)", "100"),
        ("decimal(4,2)", "99.995"),
        ("date", "1.1.2026"),
    ],
)
def test_text_that_does_not_fit_is_rejected(tmp_path: Path, kind: str, text: str) -> None:
    found = read(tmp_path, f'k,x\nk,"{text}"\n', {"k": "string", "x": kind})
    assert found.rows.is_empty()
    assert [one.reason for one in found.rejected] == [f"column x: {text!r} is not a {kind}"]


def test_blank_lines_are_skipped_but_blanks_are_a_value(tmp_path: Path) -> None:
    found = read(tmp_path, "a\nx\n\n \n\r\ny\n", {"a": "string"})
    assert found.rows["a"].to_list() == ["x", " ", "y"]


def test_nul_bytes_do_no_harm(tmp_path: Path) -> None:
    assert read(tmp_path, b"a,b\nx\x00y,1\n", KINDS).rows.rows() == [("x\x00y", 1)]


def test_lists_are_an_error_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="a cell of CSV is one value"):
        read(tmp_path, "a\n", {"a": "array<int>"})


def test_what_polars_writes_is_read_back(tmp_path: Path) -> None:
    written = pl.DataFrame(
        {"a": ["x", 'q"q', "l\nl", "", None, "c,d"] * 100, "b": [1, 2, None, 4, 5, 6] * 100},
        schema_overrides={"b": pl.Int32},
    )
    written.write_csv(tmp_path / "w.csv")
    assert read(tmp_path, (tmp_path / "w.csv").read_bytes(), KINDS).rows.equals(written)


def test_a_quote_inside_a_plain_field_is_rejected_and_does_not_swallow_what_follows(tmp_path: Path) -> None:
    found = read(tmp_path, 'a,b\nx,1\n"y",2\nx"y,3\nz,4\n"p,q",5\n', KINDS)
    assert found.rows.rows() == [("x", 1), ("y", 2), ("z", 4), ("p,q", 5)]
    assert [(one.position, one.text) for one in found.rejected] == [(14, 'x"y,3')]
