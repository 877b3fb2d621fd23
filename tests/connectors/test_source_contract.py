"""Every source keeps the contract of the seam."""

import gzip
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import polars as pl
import pytest

from fordstone.connectors import MemorySource, files, generator, memory
from fordstone.connectors.base import ConnectorSpec
from fordstone.connectors.files.rows import encoded
from fordstone.connectors.files.settings import FileFormat
from fordstone.lang.schema import Schema
from fordstone.testing.contracts.connector import SourceContract

START = datetime(2026, 1, 1, tzinfo=UTC)


def made(schema: Schema, first: int, count: int) -> pl.DataFrame:
    """Rows with nulls, non-ASCII text, extremes and uneven lengths."""
    numbers = range(first, first + count)
    devices = ["d1", "Ünïcödé \U0001f9ca", "", 'quo"te', "comma, and tab\t", None, "x" * 300]
    columns = {
        "device": [devices[number % 7] for number in numbers],
        "ts": [START + timedelta(microseconds=number * 1_234_567) for number in numbers],
        "temp": [None if number % 11 == 3 else number / 7 for number in numbers],
        "n": [(-1) ** number * (9_223_372_036_854_775_807 - number) for number in numbers],
    }
    return pl.DataFrame(columns, schema=schema.polars)


def _mixed(lines: list[bytes], bad: tuple[bytes, ...], newline: bytes) -> bytes:
    """Two lines out of three are followed by a bad one."""
    mixed = []
    for number, line in enumerate(lines):
        mixed += [line, bad[number % len(bad)]] if number % 3 else [line]
    return b"".join(line + newline for line in mixed)


class FilesContract(SourceContract):
    format: FileFormat = "jsonl"
    ending = "jsonl"
    sizes = (50, 0, 15)

    def content(self, frame: pl.DataFrame, *, header: bool = True) -> bytes:
        return encoded(frame, self.format, header=header)

    def fill(self, place: Path) -> ConnectorSpec:
        for number, rows in enumerate(self.expected()):
            (place / f"part-{number}.{self.ending}").write_bytes(self.content(rows))
        return files(f"{place}/part-*.{self.ending}")

    def expected(self) -> Sequence[pl.DataFrame]:
        return [made(self.schema, number * 1000, size) for number, size in enumerate(self.sizes)]

    def grow(self, place: Path) -> pl.DataFrame | None:
        rows = made(self.schema, 5000, 9)
        with (place / f"part-0.{self.ending}").open("ab") as file:
            file.write(self.content(rows, header=False))
        return rows


class TestJsonLines(FilesContract):
    pass


@pytest.mark.slow
class TestJsonLinesWithBadOnesAmong(FilesContract):
    """Rejections, blank lines, a byte order mark and Windows newlines move no good row."""

    bad = (
        b"{",
        b"",
        b'{"temp":"warm"}',
        b'{"device":"\xff"}',
        b"   ",
        b'{"ts":"yesterday"}',
        b'{"n":9223372036854775808}',
        b"null",
    )

    def content(self, frame: pl.DataFrame, *, header: bool = True) -> bytes:
        return b"\xef\xbb\xbf" * header + _mixed(super().content(frame).splitlines(), self.bad, b"\r\n")


class TestJsonLinesWithoutALastNewline(FilesContract):
    def content(self, frame: pl.DataFrame, *, header: bool = True) -> bytes:
        return super().content(frame).rstrip(b"\n")

    def grow(self, place: Path) -> pl.DataFrame | None:
        return None


@pytest.mark.slow
class TestGzippedJsonLines(FilesContract):
    ending = "jsonl.gz"

    def content(self, frame: pl.DataFrame, *, header: bool = True) -> bytes:
        return gzip.compress(super().content(frame))

    def test_input_that_grows_is_read_on(self, tmp_path: Path) -> None:
        """Compressed files are bounded input only; see test_files."""

    test_a_planned_read_stays_the_same_when_input_grows = test_input_that_grows_is_read_on
    test_planned_reads_of_input_that_may_grow_give_what_one_read_gives = test_input_that_grows_is_read_on


class TestJsonLinesAtUrl(FilesContract):
    def fill(self, place: Path) -> ConnectorSpec:
        super().fill(place)
        fsspec.filesystem("memory").put(f"{place}/", f"{place}/", recursive=True)
        return files(f"memory:/{place}/part-*.{self.ending}")

    def grow(self, place: Path) -> pl.DataFrame | None:
        return None


class TestParquetAtUrl(TestJsonLinesAtUrl):
    format: FileFormat = "parquet"
    ending = "parquet"


class TestCsv(FilesContract):
    format: FileFormat = "csv"
    ending = "csv"


@pytest.mark.slow
class TestCsvWithNewlinesInQuotes(FilesContract):
    format: FileFormat = "csv"
    ending = "csv"

    def expected(self) -> Sequence[pl.DataFrame]:
        device = pl.when(pl.col("n") % 3 == 0).then(pl.lit('two\nlines, "quoted"\r\n')).otherwise(pl.col("device"))
        return [rows.with_columns(device=device) for rows in super().expected()]


@pytest.mark.slow
class TestCsvWithBadOnesAmong(FilesContract):
    format: FileFormat = "csv"
    ending = "csv"
    bad = (
        b"a,b",
        b'"open,2026-01-01,1,1',
        b"",
        b"a,2026-01-01,warm,1",
        b"\xff,2026-01-01,1,1",
        b"a,b,c,d,e",
        b'"a"b,2026-01-01,1,1',
    )

    def content(self, frame: pl.DataFrame, *, header: bool = True) -> bytes:
        return _mixed(super().content(frame, header=header).splitlines(), self.bad, b"\n")

    def grow(self, place: Path) -> pl.DataFrame | None:
        """While input may grow, a quote that is open may yet be closed: the rows after it wait."""
        return None


class TestParquet(FilesContract):
    format: FileFormat = "parquet"
    ending = "parquet"

    def grow(self, place: Path) -> pl.DataFrame | None:
        return None


class TestArrow(TestParquet):
    format: FileFormat = "arrow"
    ending = "arrow"


class TestMemory(SourceContract):
    def fill(self, place: Path) -> ConnectorSpec:
        first, second = self.expected()
        self.live = MemorySource([first, second.to_dicts()])
        self.live.append(0, first.to_dicts())
        return memory(self.live)

    def expected(self) -> Sequence[pl.DataFrame]:
        return [made(self.schema, 0, 40), made(self.schema, 1000, 15)]

    def test_what_was_put_in_comes_out(self, tmp_path: Path) -> None:
        """Appended twice: as a frame, and as records; see test_memory."""

    def grow(self, place: Path) -> pl.DataFrame | None:
        rows = made(self.schema, 2000, 5)
        self.live.append(0, rows)
        return rows


class TestGenerator(SourceContract):
    def fill(self, place: Path) -> ConnectorSpec:
        return generator(rows=100, partitions=3, seed=7, keys=20, disorder="50ms")

    def expected(self) -> None:
        return None

    def grow(self, place: Path) -> pl.DataFrame | None:
        return None
