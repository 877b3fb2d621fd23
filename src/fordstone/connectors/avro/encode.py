"""Writes columns as values of a schema of Avro: one value per row, all rows of a column together.

`Encoder` is made once for a schema. It matches its fields with the columns by name, and says then what does not go together. A row that the
schema has no value for, such as a null in a field that has none, is a `ValueError`: rows are never dropped or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.connectors.avro.cursor import Longs
from fordstone.connectors.avro.schema import NO_DEFAULT, AvroField, AvroType
from fordstone.connectors.registered import UnfitError
from fordstone.lang.schema import DataType, Schema

Bytes = npt.NDArray[np.uint8]
_LOCAL: Final = "local-"
_VARINT_BYTES_MAX: Final = 10
_INTEGERS: Final = ("tinyint", "smallint", "int", "bigint")
_WIDENS: Final = {
    "int": ("tinyint", "smallint", "int"),
    "long": _INTEGERS,
    "float": ("tinyint", "smallint", "float"),
    "double": ("tinyint", "smallint", "int", "float", "double"),
}
_TIME_DIVISORS: Final = {"timestamp-millis": 1000, "timestamp-micros": 1}


@dataclass(frozen=True, slots=True)
class Pieces:
    """A piece of bytes for each row, one after another."""

    data: Bytes
    sizes: Longs


Write = Callable[[pl.Series], Pieces]
"""Makes a piece of each value."""


class Encoder:
    """Writes rows by one schema."""

    def __init__(self, writer: AvroType, schema: Schema) -> None:
        if writer.name != "record":
            raise UnfitError(f"its values are {writer}, and not records")
        self._write = _record(writer, dict(schema.items()), "")

    def encode(self, frame: pl.DataFrame, before: bytes = b"") -> list[bytes]:
        """Return one value per row, each with these bytes before it."""
        head = np.tile(np.frombuffer(before, dtype=np.uint8), frame.height)
        pieces = _joined([Pieces(head, np.full(frame.height, len(before))), self._write(frame)], frame.height)
        raw, ends = pieces.data.tobytes(), np.cumsum(pieces.sizes)
        return [raw[begin:end] for begin, end in zip((ends - pieces.sizes).tolist(), ends.tolist(), strict=True)]


def _record(writer: AvroType, columns: Mapping[str, DataType], path: str) -> Callable[[pl.DataFrame], Pieces]:
    left = dict(columns)
    writes: list[tuple[str | None, Write]] = []
    for one in writer.fields:
        where = f"{path}.{one.name}" if path else one.name
        column = one.name if one.name in left else next((alias for alias in one.aliases if alias in left), None)
        if column is None:
            writes.append((None, _missing(one, where)))
        else:
            writes.append((column, writer_of(one.kind, left.pop(column), where)))
    if left:
        raise UnfitError(f"{_joined_path(path, next(iter(left)))} has no field in {writer}")

    def write(frame: pl.DataFrame) -> Pieces:
        nothing = pl.Series([None]).gather(np.zeros(frame.height, dtype=np.int64))
        return _joined(
            [made(nothing if column is None else frame.get_column(column)) for column, made in writes], frame.height
        )

    return write


def _joined_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _missing(field: AvroField, path: str) -> Write:
    """Writes a field that no column has: its default, if that is null."""
    branches = [one.name for one in field.kind.inner] if field.kind.name == "union" else [field.kind.name]
    if field.default is NO_DEFAULT or "null" not in branches:
        raise UnfitError(f"field {path} has no column, and may not be null")
    return writer_of(field.kind, DataType("null"), path)


def writer_of(writer: AvroType, given: DataType, path: str) -> Write:
    """Return what writes a column as values of a type. Raises `UnfitError` if there is no value of that type for it."""
    if writer.name == "union":
        return _union(writer, given, path)
    if writer.name == "null":
        if given.name != "null":
            raise _unfit(writer, given, path)
        return lambda values: Pieces(np.zeros(0, np.uint8), np.zeros(len(values), np.int64))
    write = _plain(writer, given, path)

    def checked(values: pl.Series) -> Pieces:
        if values.null_count():
            raise ValueError(f"{path} is null in a row, and {writer} in the schema")
        return write(values)

    return checked


def _plain(writer: AvroType, given: DataType, path: str) -> Write:
    logical = writer.logical.removeprefix(_LOCAL)
    if given.element is not None and writer.name == "array":
        item = writer_of(writer.inner[0], given.element, f"{path}[]")
        return lambda values: _lists(values, item)
    if given.name == "map" and writer.name == "map" and given.field("key").name == "string":
        value = writer_of(writer.inner[0], given.field("value"), f"{path}{{}}")
        return lambda values: _maps(values, value)
    if given.name == "struct" and writer.name == "record":
        record = _record(writer, dict(given.fields), path)
        return lambda values: record(values.struct.unnest())
    if given.name == "timestamp" and logical in _TIME_DIVISORS:
        divisor = _TIME_DIVISORS[logical]
        return lambda values: longs(values.to_physical().to_numpy() // divisor)
    if given.name == "date" and logical == "date":
        return lambda values: longs(values.to_physical().to_numpy().astype(np.int64))
    if given.name == "decimal" and logical == "decimal" and writer.scale >= given.scale:
        return lambda values: _decimals(values, writer, path)
    if given.name in _WIDENS.get(writer.name, ()) and writer.name in {"int", "long"} and not logical:
        return lambda values: longs(values.to_numpy().astype(np.int64))
    if given.name in _WIDENS.get(writer.name, ()):
        kind, size = ("<f4", 4) if writer.name == "float" else ("<f8", 8)
        return lambda values: Pieces(values.to_numpy().astype(kind).view(np.uint8), np.full(len(values), size))
    if given.name == "boolean" and writer.name == "boolean":
        return lambda values: Pieces(values.cast(pl.UInt8).to_numpy(), np.ones(len(values), np.int64))
    if given.name in {"string", "binary"} and writer.name == given.name.replace("binary", "bytes") and not logical:
        return _texts
    if given.name == "string" and writer.name == "enum":
        return lambda values: _symbols(values, writer, path)
    if given.name == "binary" and writer.name == "fixed" and not logical:
        return lambda values: _fixed(values, writer, path)
    raise _unfit(writer, given, path)


def _unfit(writer: AvroType, given: DataType, path: str) -> UnfitError:
    return UnfitError(f"{path} is {writer} in the schema, and the column is {given}")


def _union(writer: AvroType, given: DataType, path: str) -> Write:
    """The first branch that fits has the values, and null the nulls."""
    null = next((number for number, one in enumerate(writer.inner) if one.name == "null"), None)
    problem: UnfitError | None = None
    chosen: tuple[int, Write] | None = None
    for number, one in enumerate(writer.inner):
        if one.name == "null" and given.name != "null":
            continue
        try:
            chosen = number, writer_of(one, given, path)
            break
        except UnfitError as error:
            problem = problem or error
    if chosen is None:
        raise problem or _unfit(writer, given, path)
    branch, write = chosen

    def pieces(values: pl.Series) -> Pieces:
        there = values.is_not_null()
        if given.name == "null" or there.all():
            inner = write(values)
            return _joined([longs(np.full(len(values), branch)), inner], len(values))
        if null is None:
            raise ValueError(f"{path} is null in a row, and {writer} in the schema")
        mask = there.to_numpy()
        inner = write(values.filter(there))
        sizes = np.zeros(len(values), dtype=np.int64)
        sizes[mask] = inner.sizes
        return _joined([longs(np.where(mask, branch, null)), Pieces(inner.data, sizes)], len(values))

    return pieces


def longs(values: Longs) -> Pieces:
    """Write signed numbers in one to ten bytes: the sign is the lowest bit, the lowest seven bits come first."""
    left = ((values << 1) ^ (values >> 63)).view(np.uint64)
    if left.size and int(left.max()) < 0x80:  # noqa: PLR2004 - one byte each
        return Pieces(left.astype(np.uint8), np.ones(len(left), np.int64))
    table = np.zeros((len(left), _VARINT_BYTES_MAX), dtype=np.uint8)
    sizes = np.ones(len(left), dtype=np.int64)
    for number in range(_VARINT_BYTES_MAX):
        table[:, number] = left & np.uint64(0x7F)
        left >>= np.uint64(7)
        more = left > 0
        if not more.any():
            break
        table[more, number] |= 0x80
        sizes += more
    return Pieces(table[np.arange(_VARINT_BYTES_MAX) < sizes[:, None]], sizes)


def _texts(values: pl.Series) -> Pieces:
    found = (values.cast(pl.Binary) if values.dtype == pl.String else values).to_list()
    sizes = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
    return _joined([longs(sizes), Pieces(np.frombuffer(b"".join(found), dtype=np.uint8), sizes)], len(found))


def _symbols(values: pl.Series, writer: AvroType, path: str) -> Pieces:
    found = values.replace_strict(list(writer.symbols), list(range(len(writer.symbols))), default=-1)
    numbers = found.to_numpy().astype(np.int64)
    if (numbers < 0).any():
        wrong = values.filter(pl.Series(numbers < 0))[0]
        raise ValueError(f"{path} is {wrong!r} in a row, which is no symbol of {writer.full_name}")
    return longs(numbers)


def _fixed(values: pl.Series, writer: AvroType, path: str) -> Pieces:
    found: list[bytes] = values.to_list()
    if any(len(one) != writer.size for one in found):
        raise ValueError(f"{path} has another length than {writer.size} bytes in a row, as {writer.full_name} has")
    return Pieces(np.frombuffer(b"".join(found), dtype=np.uint8), np.full(len(found), writer.size))


def _decimals(values: pl.Series, writer: AvroType, path: str) -> Pieces:
    found: list[bytes] = []
    for value in values.to_list():
        sign, digits, exponent = value.as_tuple()
        number = int("".join(map(str, digits))) * 10 ** (writer.scale + exponent) * (-1 if sign else 1)
        if abs(number) >= 10**writer.precision:
            raise ValueError(
                f"{path} is {value} in a row, and decimal({writer.precision},{writer.scale}) in the schema"
            )
        size = writer.size if writer.name == "fixed" else (number if number >= 0 else ~number).bit_length() // 8 + 1
        try:
            found.append(number.to_bytes(size, "big", signed=True))
        except OverflowError as error:
            raise ValueError(f"{path} is {value} in a row, and {writer} has {size} bytes in the schema") from error
    sizes = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
    pieces = Pieces(np.frombuffer(b"".join(found), dtype=np.uint8), sizes)
    return pieces if writer.name == "fixed" else _joined([longs(sizes), pieces], len(found))


def _lists(values: pl.Series, item: Write) -> Pieces:
    """One block with the items, and the end mark. An empty array has the end mark alone."""
    counts = values.list.len().to_numpy().astype(np.int64)
    inner = item(values.filter(pl.Series(counts > 0)).explode())
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(inner.sizes)))
    ends = np.cumsum(counts)
    whole = Pieces(inner.data, before[ends] - before[ends - counts])
    count = longs(counts[counts > 0])
    heads = np.zeros(len(counts), dtype=np.int64)
    heads[counts > 0] = count.sizes
    mark = Pieces(np.zeros(len(counts), np.uint8), np.ones(len(counts), np.int64))
    return _joined([Pieces(count.data, heads), whole, mark], len(counts))


def _maps(values: pl.Series, value: Write) -> Pieces:
    entries = values.to_frame("map").select(pl.col("map").map.entries()).to_series()

    def entry(pairs: pl.Series) -> Pieces:
        return _joined([_texts(pairs.struct.field("key")), value(pairs.struct.field("value"))], len(pairs))

    return _lists(entries, entry)


def _joined(parts: list[Pieces], count: int) -> Pieces:
    """Put the pieces of each row one after another."""
    parts = [part for part in parts if part.data.size]
    if not parts:
        return Pieces(np.zeros(0, np.uint8), np.zeros(count, np.int64))
    if len(parts) == 1:
        return parts[0]
    sizes = np.sum([part.sizes for part in parts], axis=0)
    ends = np.cumsum(sizes)
    begin = ends - sizes
    data = np.empty(int(ends[-1]), dtype=np.uint8)
    for part in parts:
        after = np.cumsum(part.sizes)
        if (part.sizes == 1).all():
            data[begin] = part.data
        else:
            data[np.repeat(begin - after + part.sizes, part.sizes) + np.arange(len(part.data))] = part.data
        begin = begin + part.sizes
    return Pieces(data, sizes)
