"""The text formats of input files: where records begin and end, and what their columns hold.

Polars parses. The formats only say which records it would refuse and why, so that one bad record does not take others with it.
"""

from __future__ import annotations

import csv
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.connectors.files.bytes import FileBytes
from fordstone.connectors.files.cells import (
    WORDS,
    Cells,
    check_flat,
    from_json,
    from_text,
    from_words,
    json_types,
    reason,
)
from fordstone.errors import SourceError
from fordstone.lang.schema import DataType, Schema

Offsets = npt.NDArray[np.int64]
NEWLINE: Final = 10
BOM: Final = b"\xef\xbb\xbf"
PARSER_ERRORS: Final = (pl.exceptions.PolarsError, pl.exceptions.PanicException)


class MalformedError(Exception):
    """At least one record of a block cannot be parsed; a closer look will show which. Never leaves the reader."""


class LineFormat(ABC):
    """The records of one file. What becomes of a record may not depend on the records around it."""

    spans_lines: ClassVar[bool]
    """Whether a record may hold newlines."""

    @abstractmethod
    def begin(self, data: FileBytes, limit: int | None, *, complete: bool) -> int | None:
        """Where the first record starts; None if the file does not say yet. Called before each read until it answers.

        `limit` is where the file ends, if it does; `complete`: it will not grow.
        """

    @abstractmethod
    def ends(self, data: bytes) -> Offsets:
        """Where the records end: the offsets of those newlines that are not part of a value. `data` starts a record."""

    @abstractmethod
    def blank(self, record: bytes) -> bool:
        """Whether to skip this record. One without bytes, or with a carriage return alone, always is."""

    @abstractmethod
    def parse(self, data: bytes, records: int) -> pl.DataFrame:
        """Parse whole records, all at once; one row each. Raises `MalformedError` if any one is not as it should be."""

    @abstractmethod
    def judge(self, record: bytes) -> str | None:
        """Why `parse` would surely refuse this record, if that is cheap to find out; None leaves it to `parse`."""

    @abstractmethod
    def finish(self, frame: pl.DataFrame) -> Cells:
        """Give parsed columns their declared types."""


def newlines(data: bytes) -> Offsets:
    """The offset of every newline."""
    return np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == NEWLINE)


_WHITE: Final = b" \t\r"
_INTEGER_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_TYPED: Final = frozenset({*_INTEGER_BITS, "boolean", "float", "double", "array", "map", "struct"})
"""Types that the parser checks; all others are text to it."""


class JsonLines(LineFormat):
    """The format `jsonl`: one object per line.

    Missing columns are null, others are ignored, of a repeated name the first counts. Whatever stands in a string column is
    taken as its text. `NaN`, `Infinity` and `-Infinity` may stand for numbers, in quotes or without, as in Spark.
    """

    spans_lines = False

    def __init__(self, schema: Schema, *, time_unit: str) -> None:
        self._schema = schema
        self._types = json_types(schema)
        self._types_of_words = json_types(schema, words=True)
        self._floats = {name: kind for name, kind in schema.items() if any(part.is_float for part in kind.within())}
        self._time_unit = time_unit
        self._typed = {
            name: kind for name, kind in schema.items() if any(part.name in _TYPED for part in kind.within())
        }

    def begin(self, data: FileBytes, limit: int | None, *, complete: bool) -> int | None:
        """At the start, after the byte-order mark that some editors write."""
        if limit is not None and limit < len(BOM):
            return 0
        head = data.at(0, len(BOM))
        if len(head) < len(BOM) and BOM.startswith(head) and not complete:
            return None
        return len(BOM) if head == BOM else 0

    def ends(self, data: bytes) -> Offsets:
        return newlines(data)

    def blank(self, record: bytes) -> bool:
        return not record.strip(_WHITE)

    def parse(self, data: bytes, records: int) -> pl.DataFrame:
        try:
            return _read(data, self._types, records)
        except MalformedError:
            if _HAS_WORDS.search(data) is None:
                raise
        return self._parse_words(data, records)

    def _parse_words(self, data: bytes, records: int) -> pl.DataFrame:
        """Parse records of which some have words for numbers, which the parser does not know."""
        lines = [_quoted(line) for line in data.split(b"\n") if not self.blank(line)]
        if len(lines) != records:
            raise MalformedError("not one JSON object")
        words = [number for number, line in enumerate(lines) if self._has_words(line)]
        with_words = set(words)
        plain = [number for number in range(records) if number not in with_words]
        frames = []
        if plain:
            frames.append(_read(b"\n".join(lines[number] for number in plain), self._types, len(plain)))
        if words:
            texts = _read(b"\n".join(lines[number] for number in words), self._types_of_words, len(words))
            made = from_words(texts, self._schema)
            if made is None:
                raise MalformedError("a value is neither a number nor a word for one")
            frames.append(made)
        return pl.concat(frames)[np.argsort([*plain, *words])]

    def _has_words(self, line: bytes) -> bool:
        """Whether a word stands for a number in the record, and no other text does."""
        if _HAS_WORDS.search(line) is None:
            return False
        try:
            decoded = msgspec.json.decode(line)
        except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
            return False  # left to the parser
        if not isinstance(decoded, dict):
            return False
        texts = [text for name, kind in self._floats.items() for text in _texts_in(decoded.get(name), kind)]
        return bool(texts) and all(text in WORDS for text in texts)

    def judge(self, record: bytes) -> str | None:
        """Find what is surely wrong. Where decoders may disagree (surrogates, huge numbers, deep nesting), say nothing."""
        record = _quoted(record)
        try:
            decoded = msgspec.json.decode(record)
        except UnicodeDecodeError as error:
            return f"invalid UTF-8 at byte {error.start} of a text"
        except msgspec.ValidationError:
            return None
        except msgspec.DecodeError as error:
            return None if b"\\ud" in record.lower() else str(error)  # halves of surrogate pairs
        except RecursionError:
            return None
        if not isinstance(decoded, dict):
            return "not a JSON object"
        for name, kind in self._typed.items():
            value = decoded.get(name)
            if value is None or _fits(value, kind):
                continue
            if record.count(msgspec.json.encode(name)) == 1:  # of a repeated name another value may count
                return reason(name, value, kind)
        return None

    def finish(self, frame: pl.DataFrame) -> Cells:
        return from_json(frame, self._schema, time_unit=self._time_unit)


_HAS_WORDS: Final = re.compile(rb"NaN|Infinity|INF")
_TEXT_OR_WORD: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|NaN\b|[+-]?Infinity\b|[+-]INF\b')


def _quoted(line: bytes) -> bytes:
    """A record with its bare words in quotes."""
    if _HAS_WORDS.search(line) is None:
        return line
    return _TEXT_OR_WORD.sub(lambda found: found[0] if found[0].startswith(_QUOTE) else b'"%b"' % found[0], line)


def _read(data: bytes, types: pl.Schema, records: int) -> pl.DataFrame:
    try:
        frame = pl.read_ndjson(data, schema=types)
    except PARSER_ERRORS as error:
        raise MalformedError(str(error).partition("\n")[0]) from error
    if frame.height != records:
        raise MalformedError("not one JSON object")
    return frame


def _texts_in(value: object, kind: DataType) -> Iterator[str]:
    """The texts that stand where the type has a float."""
    if kind.is_float and isinstance(value, str):
        yield value
    elif kind.element is not None and isinstance(value, list):
        for one in value:
            yield from _texts_in(one, kind.element)
    elif kind.name == "map" and isinstance(value, dict):
        for one in value.values():
            yield from _texts_in(one, kind.field("value"))
    elif kind.name == "struct" and isinstance(value, dict):
        for name, inner in kind.fields:
            yield from _texts_in(value.get(name), inner)


def _fits(value: object, kind: DataType) -> bool:
    if kind.is_nested:
        return _parts_fit(value, kind)
    if kind.name not in _TYPED:
        return True
    if kind.name == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind.is_float:
        return isinstance(value, int | float) or (isinstance(value, str) and value in WORDS)
    bits = _INTEGER_BITS[kind.name]
    return isinstance(value, int) and -(1 << (bits - 1)) <= value < 1 << (bits - 1)


def _parts_fit(value: object, kind: DataType) -> bool:
    if kind.element is not None:
        element = kind.element
        return isinstance(value, list) and all(one is None or _fits(one, element) for one in value)
    if not isinstance(value, dict):
        return False
    if kind.name == "map":
        inner = kind.field("value")
        return all(one is None or _fits(one, inner) for one in value.values())
    return all(value.get(name) is None or _fits(value[name], inner) for name, inner in kind.fields)


HEADER_BYTES_MAX: Final = 1 << 20
_HEADER_BLOCK_BYTES: Final = 1 << 14
_QUOTE: Final = b'"'


class CsvRows(LineFormat):
    """The format `csv`: a header, then one record per line; a quoted field may hold delimiters and newlines.

    Quotes are `"`, doubled inside a quoted field. An empty field is null; `""` is the empty text. Each record has as many
    fields as the header. A record that is malformed is rejected up to its first newline only, so that one quote
    too many does not swallow the rest of the file. Blank lines are skipped.
    """

    spans_lines = True

    def __init__(self, path: Path, schema: Schema, *, delimiter: str, header: bool, time_unit: str) -> None:
        check_flat(schema, where=str(path), instead="Declare it as string, and read JSON in it with from_json(...).")
        self._path = path
        self._schema = schema
        self._delimiter = delimiter
        self._delimiter_byte = delimiter.encode()
        self._header = header
        self._time_unit = time_unit
        self._names: list[str] = [] if header else list(schema)
        self._places: dict[str, int] = {} if header else {name: place for place, name in enumerate(schema)}

    def begin(self, data: FileBytes, limit: int | None, *, complete: bool) -> int | None:
        """The position after the header, which is read here, whatever the position."""
        length = _HEADER_BLOCK_BYTES
        while True:
            head = data.at(0, length if limit is None else min(length, limit))
            ended = len(head) < length
            skipped = len(BOM) if head.startswith(BOM) else 0
            if not self._header:
                return None if ended and not complete and BOM.startswith(head) else skipped
            ends = self.ends(head[skipped:])
            if ends.size:
                end = skipped + int(ends[0])
                self._learn(head[skipped:end])
                return end + 1
            if ended:
                break
            if length > HEADER_BYTES_MAX:
                raise SourceError(
                    f"{self._path}: the first line is longer than {HEADER_BYTES_MAX} bytes: this is no CSV header."
                )
            length *= 4
        if not complete:
            return None
        if head[skipped:]:
            self._learn(head[skipped:])
        return len(head)

    def ends(self, data: bytes) -> Offsets:
        return record_ends(data)

    def blank(self, record: bytes) -> bool:
        return record in {b"", b"\r"}

    def parse(self, data: bytes, records: int) -> pl.DataFrame:
        self._check_fields(data, records)
        header = self._delimiter.join(str(place) for place in range(len(self._names)))
        try:
            frame = pl.read_csv(
                header.encode() + b"\n" + data,
                schema={str(place): pl.String() for place in range(len(self._names))},
                columns=[str(place) for place in self._places.values()],
                separator=self._delimiter,
                raise_if_empty=False,
            )
        except PARSER_ERRORS as error:
            raise MalformedError(_first_sentence(error)) from error
        if frame.height != records:
            raise MalformedError("not one CSV record")
        return frame.rename({str(place): name for name, place in self._places.items()})

    def judge(self, record: bytes) -> str | None:
        outside = record.split(_QUOTE)
        if len(outside) % 2 == 0:
            return "a quote is not closed"
        if len(outside) > 1 and not _quotes_stand_right(record, self._delimiter_byte):
            return "a quote stands inside a field that is not quoted"
        fields = 1 + sum(part.count(self._delimiter_byte) for part in outside[::2])
        if fields != len(self._names):
            return f"{fields} fields, where {len(self._names)} are expected"
        try:
            record.decode()
        except UnicodeDecodeError as error:
            return f"invalid UTF-8 at byte {error.start}"
        return None

    def finish(self, frame: pl.DataFrame) -> Cells:
        return from_text(frame, self._schema, time_unit=self._time_unit)

    def _check_fields(self, data: bytes, records: int) -> None:
        """Polars fills short records with nulls. It refuses long ones, so the right total means that none is short."""
        quotes = data.count(_QUOTE)
        if quotes % 2:
            raise MalformedError("a quote is not closed")
        if quotes and not _quotes_stand_right(data, self._delimiter_byte):
            raise MalformedError("a quote stands inside a field that is not quoted")
        if quotes:
            delimiters = _places_of(data, self._delimiter_byte)
            total = int(np.count_nonzero(np.searchsorted(_places_of(data, _QUOTE), delimiters) % 2 == 0))
        else:
            total = data.count(self._delimiter_byte)
        if total != records * (len(self._names) - 1):
            raise MalformedError(f"not {len(self._names)} fields")

    def _learn(self, line: bytes) -> None:
        try:
            text = line.decode().removesuffix("\r")
            self._names = next(csv.reader([text], delimiter=self._delimiter), [])
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{self._path}: the header is not UTF-8 ({error.reason} at byte {error.start})."
            ) from error
        except csv.Error as error:
            raise SourceError(f"{self._path}: the header cannot be read ({error}).") from error
        wanted = [name for name in self._schema if name in self._names]
        twice = [name for name in wanted if self._names.count(name) > 1]
        if twice:
            raise SourceError(f"{self._path}: the header names {twice[0]!r} twice.")
        if not wanted:
            raise SourceError(
                f"{self._path}: the header is {text[:200]!r}, with none of the declared columns ({', '.join(self._schema)}).\n"
                f"Without a header, say header=False; with another delimiter than {self._delimiter!r}, say delimiter=."
            )
        self._places = {name: self._names.index(name) for name in wanted}


def record_ends(data: bytes) -> Offsets:
    """The offsets of the newlines that end a record: those after an even number of quotes."""
    found = newlines(data)
    if _QUOTE not in data:
        return found
    outside: Offsets = found[np.searchsorted(_places_of(data, _QUOTE), found) % 2 == 0]
    return outside


def _quotes_stand_right(data: bytes, delimiter: bytes) -> bool:
    """Whether quotes open at the beginning of a field and close at its end, doubled ones inside apart.

    Parsers disagree about others, and one parser may disagree with itself about where they end when it is given more.
    """
    quotes = _places_of(data, _QUOTE)
    padded = np.frombuffer(b"\n" + data + b"\n", dtype=np.uint8)
    before, after = padded[quotes[0::2]], padded[quotes[1::2] + 2]
    opens = np.isin(before, np.frombuffer(b'\n"' + delimiter, dtype=np.uint8))
    closes = np.isin(after, np.frombuffer(b'\r\n"' + delimiter, dtype=np.uint8))
    return bool(opens.all() and closes.all())


def _places_of(data: bytes, byte: bytes) -> Offsets:
    return np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == byte[0])


def _first_sentence(error: BaseException) -> str:
    return str(error).partition("\n")[0] or "cannot be parsed"
