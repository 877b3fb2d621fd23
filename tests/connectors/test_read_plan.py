"""Reads of text files are planned by their newlines, and a planned position is one that a reader passes."""

import gzip
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests.examples import examples

from fordstone.connectors import base as connector
from fordstone.connectors import files
from fordstone.connectors.base import ReadPlan, Source, SourceOptions
from fordstone.connectors.files import lines as lines_module
from fordstone.connectors.files import source as source_module
from fordstone.connectors.files.bytes import HeldBytes, PlainFile
from fordstone.connectors.files.formats import CsvRows, JsonLines
from fordstone.connectors.files.lines import LineReader
from fordstone.connectors.registry import open_source
from fordstone.errors import SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.testing.contracts.connector import ALL_ROWS, ReadBack, read_all

SCHEMA = Schema.of({"n": "bigint", "s": "string"})
SETTINGS = examples(200, HealthCheck.function_scoped_fixture)
SMALL = {"PLAN_BYTES_MIN": 4, "PLAN_BYTES_MAX": 32, "PLAN_ROWS_MIN": 1, "PLAN_ROWS_MAX": 3}

JSON_LINES = [
    b'{"n":1,"s":"a"}', b'{"n":22}', b'{"s":"\xc3\xa9\xf0\x9f\xa7\x8a"}', b'{"s":"\\n"}', b'{"s":"' + b"x" * 40 + b'"}',
    b"", b" ", b"\r", b"{", b"\xff", b'"',
]  # fmt: skip
CSV_LINES = [
    b"1,a", b"22,\xc3\xa9\xf0\x9f\xa7\x8a", b'3,"q"', b'4,"a\nb"', b'5,"a\r\n\n""b"', b'"6","', b'7,x"y', b'8,"a"b',
    b"9,", b",", b"", b"\r", b"1", b"1,2,3", b'"', b'""', b"\xff,", b"1," + b"x" * 40,
]  # fmt: skip
NEWLINE = st.sampled_from([b"\n", b"\n", b"\r\n"])


def text(lines: list[bytes]) -> st.SearchStrategy[bytes]:
    line = st.sampled_from(lines)
    whole = st.lists(st.tuples(line, NEWLINE).map(b"".join), max_size=14).map(b"".join)
    return st.tuples(whole, st.one_of(st.just(b""), line)).map(b"".join)


def source(path: Path, *, bounded: bool, **options: Any) -> Source:
    return open_source(files(str(path), **options), SourceOptions(schema=SCHEMA, bounded=bounded))


def plan_read(path: Path, position: int, rows_max: int, *, bounded: bool) -> ReadPlan:
    return source(path, bounded=bounded).plan_read(PartitionId(path.name), Position(position), rows_max)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@contextmanager
def small_looks() -> Iterator[None]:
    """So that a few lines are many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(lines_module, name, value)
        yield


class CountedBytes(HeldBytes):
    looked = 0

    def at(self, offset: int, length: int) -> bytes:
        data = super().at(offset, length)
        self.looked += len(data)
        return data


def planned(planner: Source, path: Path, position: int, sizes: random.Random, **options: Any) -> list[ReadBack]:
    """Read on from reach to reach, each with a source of its own."""
    pieces: list[ReadBack] = []
    while True:
        found = planner.plan_read(PartitionId(path.name), Position(position), sizes.choice([1, 2, 3, 7, ALL_ROWS]))
        assert found.position >= position
        if found.position == position:
            return pieces
        piece = read_all(
            source(path, **options),
            PartitionId(path.name),
            SCHEMA,
            position=position,
            rows_max=sizes.randint(1, 4),
            until=int(found.position),
        )
        assert piece.positions[-1] == found.position
        pieces.append(piece)
        position = int(found.position)


def check(path: Path, content: bytes, grown: bytes, seed: int, **options: Any) -> None:
    """What is planned is what one reader reads, which finds the file first without and then with what it grows by."""
    path.write_bytes(content)
    sizes = random.Random(seed)
    planner = source(path, **options)
    partition = PartitionId(path.name)
    with small_looks():
        pieces = planned(planner, path, 0, sizes, **options)
    whole = read_all(source(path, **options), partition, SCHEMA)
    steps = read_all(source(path, **options), partition, SCHEMA, rows_max=1).positions
    assert {piece.positions[-1] for piece in pieces} <= set(steps)
    assert pieces[-1:] == [] or pieces[-1].positions[-1] == whole.positions[-1]
    append(path, grown)
    if options["bounded"]:
        assert planner.plan_read(partition, Position(whole.positions[-1]), 5) == ReadPlan(
            position=Position(whole.positions[-1]), ended=True
        )
    else:
        with small_looks():
            pieces += planned(planner, path, pieces[-1].positions[-1] if pieces else 0, sizes, **options)
        whole = read_all(source(path, **options), partition, SCHEMA)
    assert_frame_equal(pl.concat([SCHEMA.empty(), *(piece.rows for piece in pieces)]), whole.rows)
    assert [place for piece in pieces for place in piece.row_positions] == whole.row_positions
    assert [(one.position, one.text) for piece in pieces for one in piece.rejected] == [
        (one.position, one.text) for one in whole.rejected
    ]


ANY = {
    "cut": st.integers(0, 200),
    "seed": st.integers(0, 2**32),
    "bounded": st.booleans(),
    "line_bytes_max": st.sampled_from([20, 1 << 20]),
}


@SETTINGS
@given(content=text(JSON_LINES), bom=st.booleans(), **ANY)
def test_json_lines_of_any_bytes_are_planned_as_they_are_read(
    tmp_path: Path, content: bytes, bom: bool, cut: int, seed: int, **options: Any
) -> None:
    content = b"\xef\xbb\xbf" * bom + content
    check(tmp_path / "any.jsonl", content[:cut], content[cut:], seed, **options)


@SETTINGS
@given(content=text(CSV_LINES), header=st.sampled_from([b"n,s\n", b"n,s\r\n", b'"n","s"\n', None]), **ANY)
def test_csv_of_any_bytes_is_planned_as_it_is_read(
    tmp_path: Path, content: bytes, header: bytes | None, cut: int, seed: int, **options: Any
) -> None:
    content = (header or b"") + content
    if options["bounded"]:
        cut = max(cut, len(header or b""))  # a header that is cut off is an error
    check(tmp_path / "any.csv", content[:cut], content[cut:], seed, header=header is not None, **options)


# How much is looked at.


def look(content: bytes, rows_max: int, *, bounded: bool = False, ending: str = "jsonl") -> tuple[int, int]:
    """How many lines lie before what was found, and how many bytes were looked at."""
    data = CountedBytes(content)
    found = LineReader(
        data,
        JsonLines(SCHEMA, time_unit="us")
        if ending == "jsonl"
        else CsvRows(Path("x"), SCHEMA, delimiter=",", header=False, time_unit="us"),
        SCHEMA,
        0,
        bounded=bounded,
        with_positions=False,
        line_bytes_max=1 << 20,
    ).plan(rows_max, len(content))
    assert found is not None
    assert content[found - 1 : found] == b"\n"
    return content[:found].count(b"\n"), data.looked


@pytest.mark.parametrize(("ending", "line"), [("jsonl", b'{"n":%d,"s":"%s"}\n'), ("csv", b'%d,"%s"\n')])
def test_a_plan_has_exactly_the_wanted_lines_and_looks_little_further(ending: str, line: bytes) -> None:
    content = b"".join(line % (number, b"x" * (number % 90)) for number in range(100_000))
    for rows_max in (1, 100, 50_000):
        lines, looked = look(content, rows_max, ending=ending)
        assert lines == rows_max
        assert looked <= 2 * len(content) * rows_max / 100_000 + (1 << 20)
    assert look(content, ALL_ROWS, ending=ending)[0] == 100_000


@pytest.mark.parametrize("long_first", [False, True])
def test_lines_that_change_their_length_do_not_make_a_plan_too_large(long_first: bool) -> None:
    parts = [b'{"s":"' + b"x" * 5000 + b'"}\n'] * 2000, [b'{"n":1}\n'] * 500_000
    content = b"".join(parts[0] + parts[1] if long_first else parts[1] + parts[0])
    for rows_max in (1000, 10_000, 100_000):
        assert look(content, rows_max)[0] == rows_max


def test_lines_longer_than_what_is_looked_at_are_found() -> None:
    content = (b'{"s":"' + b"x" * 400_000 + b'"}\n') * 10 + b'{"s":"'
    for rows_max in (1, 3, ALL_ROWS):
        assert look(content, rows_max)[0] == min(rows_max, 10)


@pytest.mark.parametrize(("ending", "record"), [("csv", b'1,"a\nb"\n'), ("jsonl", b'{"n":1}\n\n')])
def test_bounded_input_that_is_wanted_whole_is_not_searched(ending: str, record: bytes) -> None:
    lines, looked = look(record * 200_000, ALL_ROWS, ending=ending, bounded=True)
    assert lines == 400_000
    assert looked < 1 << 20


def test_an_unfinished_line_is_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(b'{"n":1}\n' + b"x" * 3_000_000)
    planner = source(path, bounded=False)
    looked: list[int] = []
    at = PlainFile.at

    def counted(data: PlainFile, offset: int, length: int) -> bytes:
        looked.append(length)
        return at(data, offset, length)

    monkeypatch.setattr(PlainFile, "at", counted)
    assert planner.plan_read(PartitionId("1.jsonl"), Position(8), ALL_ROWS).position == 8
    assert sum(looked) > 3_000_000
    looked.clear()
    append(path, b"y" * 1000)
    assert planner.plan_read(PartitionId("1.jsonl"), Position(8), ALL_ROWS).position == 8
    assert sum(looked) < 1_000_000
    append(path, b"\n{")
    assert planner.plan_read(PartitionId("1.jsonl"), Position(8), ALL_ROWS).position == 3_001_009


def test_a_file_without_news_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "1.csv"
    path.write_bytes(b"n,s\n1,a\n")
    planner = source(path, bounded=False)
    assert planner.plan_read(PartitionId("1.csv"), Position(0), 5).position == 8
    monkeypatch.setattr(source_module, "open_bytes", lambda _: pytest.fail("opened"))
    assert planner.plan_read(PartitionId("1.csv"), Position(8), 5) == ReadPlan(position=Position(8))


# Where files begin and end.


@pytest.mark.parametrize(
    ("name", "content", "begin"), [("1.jsonl", b"", 0), ("1.jsonl", b"\xef\xbb\xbf", 3), ("1.csv", b"n,s\n", 4)]
)
def test_a_file_without_records_ends_after_its_head_if_it_is_bounded(
    tmp_path: Path, name: str, content: bytes, begin: int
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert plan_read(path, 0, 5, bounded=False) == ReadPlan(position=Position(0))
    assert plan_read(path, 0, 5, bounded=True) == ReadPlan(position=Position(begin), ended=True)


def test_a_plan_that_holds_the_header_alone_is_read_although_the_file_has_grown(tmp_path: Path) -> None:
    path = tmp_path / "1.csv"
    path.write_bytes(b"n,s\n")
    found = plan_read(path, 0, 5, bounded=True)
    append(path, b"1,a\n")
    read = read_all(source(path, bounded=True), PartitionId("1.csv"), SCHEMA, until=int(found.position))
    assert (read.positions, read.rows.height) == ([4], 0)


def test_a_line_without_a_newline_counts_where_the_file_cannot_grow(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}')
    assert plan_read(path, 0, 5, bounded=False) == ReadPlan(position=Position(8))
    assert plan_read(path, 8, 5, bounded=False) == ReadPlan(position=Position(8))
    assert plan_read(path, 8, 5, bounded=True) == ReadPlan(position=Position(15), ended=True)


def test_bounded_input_ends_where_it_ended_when_it_was_first_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}')
    planner = source(path, bounded=True)
    assert planner.plan_read(PartitionId("1.jsonl"), Position(0), 1) == ReadPlan(position=Position(8))
    append(path, b'0}\n{"n":3}\n')
    assert planner.plan_read(PartitionId("1.jsonl"), Position(8), 9) == ReadPlan(position=Position(15), ended=True)


@pytest.mark.parametrize("bounded", [False, True])
def test_a_file_that_shrank_or_vanished_is_an_error_where_it_is_planned_and_where_it_is_read(
    tmp_path: Path, bounded: bool
) -> None:
    path = tmp_path / "1.csv"
    path.write_bytes(b"n,s\n1,a\n2,b\n")
    planner = source(path, bounded=bounded)
    partition = PartitionId("1.csv")
    until = planner.plan_read(partition, Position(0), 5).position
    for rest in (b"n,s\n1,a\n", b"n"):
        path.write_bytes(rest)
        with pytest.raises(SourceError, match=r"1\.csv shrank"):
            planner.plan_read(partition, until, 5)
        with pytest.raises(SourceError, match=r"1\.csv shrank"):
            read_all(source(path, bounded=bounded), partition, SCHEMA, until=int(until))
    path.unlink()
    with pytest.raises(SourceError, match=r"1\.csv vanished"):
        planner.plan_read(partition, until, 5)


def test_compressed_files_are_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "1.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"n":1}\n' * 1000))
    monkeypatch.setattr(connector, "PLAN_READ_ROWS", 16)
    assert plan_read(path, 0, 50, bounded=True) == ReadPlan(position=Position(400))
    assert plan_read(path, 80, ALL_ROWS, bounded=True) == ReadPlan(position=Position(8000), ended=True)
    assert plan_read(path, 8000, 1, bounded=True) == ReadPlan(position=Position(8000), ended=True)
