"""Which files a source has, and what happens to them while they are read."""

import gzip
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fordstone.connectors import files
from fordstone.connectors.base import Reader, Source, SourceOptions
from fordstone.connectors.files.lines import BLOCK_BYTES_MAX
from fordstone.connectors.files.source import FileSource
from fordstone.connectors.registry import open_source
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.testing.contracts.connector import read_all

SCHEMA = Schema.of({"n": "bigint", "s": "string"})


def source(path: Path | str, *, bounded: bool = True, schema: Schema = SCHEMA, **options: Any) -> Source:
    return open_source(
        files(str(path), **{"missing": "null", **options}), SourceOptions(schema=schema, bounded=bounded)
    )


def reader(path: Path, *, bounded: bool = False, **options: Any) -> Reader:
    made = source(path, bounded=bounded, **options)
    return made.open(made.partitions()[0], Position(0), with_positions=False)


def lines(*numbers: int) -> str:
    return "".join(f'{{"n":{number}}}\n' for number in numbers)


def numbers(given: Any) -> list[int]:
    assert given is not None
    found: list[int] = given.frame["n"].to_list()
    return found


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


# Which files there are.


def test_partitions_are_named_by_their_path_below_the_fixed_part_of_the_pattern(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a/1.jsonl", "a/x/3.jsonl", "a/.hidden.jsonl", "a/_stream.jsonl", "a/other.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(lines(1))
    (tmp_path / "a" / "directory.jsonl").mkdir()
    assert list(source(tmp_path / "*" / "*.jsonl").partitions()) == ["a/1.jsonl", "b/2.jsonl"]
    assert list(source(tmp_path / "**" / "*.jsonl").partitions()) == ["a/1.jsonl", "a/x/3.jsonl", "b/2.jsonl"]
    assert list(source(tmp_path / "a" / "1.jsonl").partitions()) == ["1.jsonl"]
    assert list(source(tmp_path / "a" / "_*.jsonl").partitions()) == ["_stream.jsonl"]


def test_one_file_is_opened_and_planned_without_looking_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.jsonl").write_text(lines(1, 2))
    monkeypatch.setattr(FileSource, "partitions", lambda _: pytest.fail("looked for files"))
    monkeypatch.setattr(FileSource, "_matching", lambda _: pytest.fail("looked for files"))
    made = source(tmp_path / "*.jsonl")
    reach = made.plan_read(PartitionId("1.jsonl"), Position(0), 1)
    opened = made.open(PartitionId("1.jsonl"), Position(0), with_positions=False)
    assert numbers(opened.read(10, reach.position)) == [1]
    opened.close()


def test_the_names_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.jsonl").write_text(lines(1))
    monkeypatch.chdir(tmp_path)
    relative = source("in/*.jsonl")
    monkeypatch.chdir("/")
    assert list(relative.partitions()) == ["1.jsonl"] == list(source(tmp_path / "in" / "*.jsonl").partitions())
    assert read_all(relative, relative.partitions()[0], SCHEMA).rows["n"].to_list() == [1]


def test_files_that_come_later_are_found_by_unbounded_input_only(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(lines(1))
    bounded, unbounded = source(tmp_path / "*.jsonl"), source(tmp_path / "*.jsonl", bounded=False)
    assert list(bounded.partitions()) == list(unbounded.partitions()) == ["b.jsonl"]
    (tmp_path / "a.jsonl").write_text(lines(2))
    assert list(bounded.partitions()) == ["b.jsonl"]
    assert list(unbounded.partitions()) == ["a.jsonl", "b.jsonl"]


def test_a_pattern_without_a_match_is_an_error_when_bounded_and_waits_when_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as error:
        source("in/*.jsonl").partitions()
    assert "'in/*.jsonl'" in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert list(source("in/*.jsonl", bounded=False).partitions()) == []


def test_a_directory_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"is a directory.*\*\.jsonl"):
        source(tmp_path).partitions()


def test_the_format_comes_from_the_ending_unless_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_text(lines(1))
    with pytest.raises(SourceError, match="ending does not tell"):
        source(tmp_path / "1.log").open(PartitionId("1.log"), Position(0), with_positions=False)
    for name, content in {
        "1.log": lines(1),
        "2.NDJSON": lines(1),
        "3.csv": "n,s\n1,\n",
        "4.tsv": "n\ts\n1\t\n",
    }.items():
        (tmp_path / name).write_text(content)
        options = {"format": "ndjson"} if name.endswith("log") else {}
        assert numbers(reader(tmp_path / name, bounded=True, **options).read(10)) == [1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ""}, "give a file"),
        ({"path": "x.csv", "delimiter": ";;"}, "delimiter"),
        ({"path": "x.csv", "delimiter": '"'}, "delimiter"),
        ({"path": "x.csv", "delimiter": "é"}, "delimiter"),
        ({"path": "x.jsonl", "format": "xml"}, "xml"),
        ({"path": "x.jsonl", "time_unit": "ns"}, "ns"),
        ({"path": "x.jsonl", "colour": "red"}, "colour"),
        ({"path": "x.jsonl", "line_bytes_max": 0}, "line_bytes_max"),
        ({"path": "x.jsonl", "header": "yes"}, "header"),
    ],
)
def test_options_that_make_no_sense_are_errors_while_the_pipeline_is_built(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        files(**options)


def test_the_size_is_that_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text(lines(1))
    (tmp_path / "2.jsonl").write_text(lines(10))
    assert source(tmp_path / "*.jsonl").size_bytes() == len(lines(1, 10))


# Files that change.


def test_an_unfinished_line_waits_for_its_newline(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(lines(1) + '{"n":')
    read = reader(path)
    assert numbers(read.read(10)) == [1]
    assert read.read(10) is None
    append(path, "2}")
    assert read.read(10) is None
    append(path, '\n{"n":3}\n{"n')
    assert numbers(read.read(10)) == [2, 3]
    assert read.read(10) is None


def test_an_unfinished_line_counts_when_input_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(lines(1) + '{"n":2}')
    chunk = reader(path, bounded=True).read(10)
    assert chunk is not None
    assert (numbers(chunk), chunk.position, chunk.ended) == ([1, 2], path.stat().st_size, True)


def test_bounded_input_is_what_was_there_when_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(lines(1))
    read = reader(path, bounded=True)
    append(path, lines(2))
    chunk = read.read(10)
    assert chunk is not None
    assert chunk.ended
    assert numbers(chunk) == [1]


def test_bytes_that_arrive_one_by_one_give_every_line_once(tmp_path: Path) -> None:
    content = "\ufeff" + lines(1) + "\r\n" + '{"n":2,"s":"é\U0001f9ca"}\r\n' + "bad\n" + lines(3)
    for ending, whole in {
        "jsonl": content.encode(),
        "csv": '\ufeffn,s\r\n1,\r\n\r\n2,"é\n\U0001f9ca"\nbad\n3,x\n'.encode(),
    }.items():
        path = tmp_path / f"1.{ending}"
        path.write_bytes(b"")
        read = reader(path)
        found, rejected = [], []
        for place in range(len(whole)):
            append(path, whole[place : place + 1])
            chunk = read.read(10)
            if chunk is not None:
                found += numbers(chunk)
                rejected += [one.text for one in chunk.rejected]
        assert (found, rejected) == ([1, 2, 3], ["bad"])


@pytest.mark.parametrize("bounded", [True, False])
def test_a_file_that_shrank_is_an_error_that_says_so(tmp_path: Path, bounded: bool) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(lines(1, 2, 3))
    made = source(path, bounded=bounded)
    read = made.open(PartitionId("1.jsonl"), Position(0), with_positions=False)
    read.read(2)
    os.truncate(path, 3)
    with pytest.raises(SourceError, match=r"shrank: it has 3 bytes"):
        read.read(10)
    with pytest.raises(SourceError, match=r"shrank: it has 3 bytes, and 16 had been read"):
        made.open(PartitionId("1.jsonl"), Position(16), with_positions=False)


def test_a_file_that_vanished_or_was_replaced_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(lines(1))
    read = reader(path)
    read.read(10)
    (tmp_path / "new").write_text(lines(7, 8, 9))
    (tmp_path / "new").replace(path)
    with pytest.raises(SourceError, match=r"1\.jsonl is another file than the one that was read up to byte 8"):
        read.read(10)
    read = reader(path)
    read.read(10)
    path.unlink()
    with pytest.raises(SourceError, match="vanished"):
        read.read(10)
    with pytest.raises(SourceError, match="vanished"):
        source(tmp_path / "*.jsonl", bounded=False).open(PartitionId("1.jsonl"), Position(3), with_positions=False)


def test_a_file_that_may_not_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(SourceError, match=r"loop\.jsonl cannot be read"):
        source(tmp_path / "*.jsonl").open(PartitionId("loop.jsonl"), Position(0), with_positions=False)


# Long lines, large files, compressed files.


def test_a_line_beyond_the_bound_is_rejected_and_the_next_is_read(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    long = '{"n":2,"s":"' + "x" * 100_000 + '"}'
    path.write_text(lines(1) + long + "\n" + lines(3))
    for rows_max in (1, 1000):
        made = source(path, line_bytes_max=1000)
        read = read_all(made, made.partitions()[0], SCHEMA, rows_max=rows_max)
        assert read.rows["n"].to_list() == [1, 3]
        assert [(one.position, one.text) for one in read.rejected] == [(8, long[:4096])]
        assert "line_bytes_max" in read.rejected[0].reason
    made = source(path, line_bytes_max=len(long))
    assert read_all(made, made.partitions()[0], SCHEMA).rows["n"].to_list() == [1, 2, 3]
    made = source(path, line_bytes_max=len(long) - 1)
    assert read_all(made, made.partitions()[0], SCHEMA).rows["n"].to_list() == [1, 3]


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_line_without_end_takes_no_memory_and_is_rejected_when_it_ends(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"1.{ending}"
    path.write_text(lines(1) if ending == "jsonl" else "n,s\n1,\n")
    read = reader(path, line_bytes_max=5000)
    assert numbers(read.read(10)) == [1]
    for _ in range(20):
        append(path, b"x" * 1000)
        assert read.read(10) is None
    append(path, "y\n" + (lines(2) if ending == "jsonl" else "2,\n"))
    chunk = read.read(10)
    assert chunk is not None
    assert [len(one.text) for one in chunk.rejected] == [4096]
    assert numbers(read.read(10)) == [2]


def test_a_line_without_end_is_rejected_at_the_end_of_bounded_input(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(b"x" * 50_000)
    made = source(path, line_bytes_max=1000)
    read = read_all(made, made.partitions()[0], SCHEMA)
    assert (read.rows.height, len(read.rejected), read.ended, read.positions[-1]) == (0, 1, True, 50_000)


def test_a_file_of_many_blocks_is_read_whole(tmp_path: Path) -> None:
    count = 120_000
    wide = pl.select(n=pl.int_range(count), s=pl.lit("x" * 200))
    wide.write_ndjson(tmp_path / "1.jsonl")
    assert (tmp_path / "1.jsonl").stat().st_size > 1.5 * BLOCK_BYTES_MAX
    made = source(tmp_path / "1.jsonl")
    for rows_max in (10_000, 1_000_000):
        read = read_all(made, made.partitions()[0], SCHEMA, rows_max=rows_max)
        assert (read.rows["n"] == wide["n"]).all()
        assert read.rows.height == count


def test_one_bad_line_in_a_large_file_moves_nothing_else(tmp_path: Path) -> None:
    count = 50_000
    content = pl.select(n=pl.int_range(count)).write_ndjson().splitlines()
    for place in (0, 20_000, 49_999):
        content[place] = '{"n":"bad"}'
    (tmp_path / "1.jsonl").write_text("\n".join(content))
    made = source(tmp_path / "1.jsonl")
    read = read_all(made, made.partitions()[0], SCHEMA)
    assert read.rows["n"].to_list() == [number for number in range(count) if number not in {0, 20_000, 49_999}]
    assert [one.reason for one in read.rejected] == ["column n: 'bad' is not a bigint"] * 3
    assert sorted(read.row_positions) == read.row_positions


def test_a_file_of_bad_lines_alone_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text("bad\n" * 10_000)
    made = source(tmp_path / "1.jsonl")
    read = read_all(made, made.partitions()[0], SCHEMA)
    assert [one.position for one in read.rejected] == list(range(0, 40_000, 4))
    assert max(b - a for a, b in zip([0, *read.positions], read.positions, strict=False)) <= 4 * 4096


def test_compressed_files_are_bounded_input_only(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(lines(1).encode()))
    (tmp_path / "1.parquet.gz").write_bytes(b"")
    assert numbers(reader(tmp_path / "1.jsonl.gz", bounded=True).read(10)) == [1]
    with pytest.raises(SourceError, match="bounded"):
        reader(tmp_path / "1.jsonl.gz", bounded=False)
    with pytest.raises(SourceError, match="Unpack"):
        reader(tmp_path / "1.parquet.gz", bounded=True)


def test_a_damaged_compressed_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = gzip.compress(lines(*range(10_000)).encode())
    for content in (whole[:-20], b"not gzip", whole[:1000] + bytes(100) + whole[1100:]):
        (tmp_path / "1.jsonl.gz").write_bytes(content)
        made = source(tmp_path / "1.jsonl.gz")
        with pytest.raises(SourceError, match=r"1\.jsonl\.gz is damaged"):
            read_all(made, made.partitions()[0], SCHEMA)


def test_a_large_compressed_file_is_read_on_from_any_position(tmp_path: Path) -> None:
    (tmp_path / "1.csv.gz").write_bytes(
        gzip.compress(b"n,s\n" + b"".join(f"{number},{number}\n".encode() for number in range(300_000)))
    )
    made = source(tmp_path / "1.csv.gz")
    whole = read_all(made, made.partitions()[0], SCHEMA, rows_max=50_000)
    assert whole.rows["n"].to_list() == list(range(300_000))
    rest = read_all(made, made.partitions()[0], SCHEMA, position=whole.positions[-2], rows_max=1000)
    assert rest.row_positions == whole.row_positions[-rest.rows.height :]
    assert rest.rows["n"][-1] == 299_999


def test_a_zstandard_file_without_its_package_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "1.jsonl.zst").write_bytes(b"")
    with pytest.raises(SourceError, match="zstandard"):
        reader(tmp_path / "1.jsonl.zst", bounded=True)


def test_bad_lines_that_only_the_parser_can_tell_are_found_a_bounded_number_at_a_time(tmp_path: Path) -> None:
    bad = b'{"n":1,"s":"\\ud800}\n'
    (tmp_path / "1.jsonl").write_bytes((bad + b'{"n":1}\n') * 400)
    made = source(tmp_path / "1.jsonl")
    read = read_all(made, made.partitions()[0], SCHEMA)
    assert read.rows.height == 400
    assert [one.position for one in read.rejected] == list(range(0, 400 * 28, 28))
    assert len(read.positions) > 1
