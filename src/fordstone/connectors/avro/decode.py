"""Reads values that a schema of Avro wrote into columns of a stream.

`Decoder` is made once per writer's schema. It matches the columns with the writer's fields by name, and says then what does not go together;
what a single value has wrong is said per value. The rules are those of Avro's schema resolution: a number may be read as a wider one, text
as bytes and bytes as text, a field that the writer lacks has the default of the reader's schema, or is null. What Avro has no column type
for, such as a time of day, is read as the type below its logical type.

Invariants: what becomes of a value does not depend on others; memory and time are bounded by the bytes of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from fordstone.connectors.avro.cursor import PADDING, Cursor, Failures, Longs
from fordstone.connectors.avro.items import Starts, branches, pass_items, pass_value
from fordstone.connectors.avro.schema import NO_DEFAULT, AvroField, AvroType
from fordstone.connectors.registered import DecodedValues, MismatchError
from fordstone.lang.schema import DataType, Schema

Read = Callable[[Cursor], pl.Series]
"""Reads a value at each position, and moves past it. Rows of values that are not valid have anything."""
TOGETHER_BYTES: Final = 8 << 20
TOGETHER_VALUES: Final = 1 << 14
"""The size and the number of values that are decoded together, about."""
_INTEGERS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_PROMOTED: Final = {
    "int": {"tinyint", "smallint", "int", "bigint", "float", "double"},
    "long": {"bigint", "float", "double"},
    "float": {"float", "double"},
    "double": {"double"},
}
_TIMES: Final = {"timestamp-millis": (1000, 1), "timestamp-micros": (1, 1), "timestamp-nanos": (1, 1000)}
_FLOATS: Final = {"float": "<f4", "double": "<f8"}
_DECIMAL_BYTES_MAX: Final = 16
_LOCAL: Final = "local-"


class Decoder:
    """Reads what one schema wrote."""

    def __init__(self, writer: AvroType, schema: Schema, reader: AvroType | None = None) -> None:
        """`reader`: a schema whose aliases and defaults hold for the columns. Raises `MismatchError`."""
        if writer.name != "record":
            raise MismatchError(f"its values are {writer}, and not records")
        self._schema = schema
        self._columns = _Fields(writer, dict(schema.items()), _inner(reader, "record"), "")

    def decode(self, values: Sequence[bytes]) -> DecodedValues:
        parts: list[DecodedValues] = []
        begin, size = 0, 0
        for number, value in enumerate(values):
            size += len(value)
            if size >= TOGETHER_BYTES or number - begin >= TOGETHER_VALUES - 1:
                parts.append(self._decode(values[begin : number + 1], begin))
                begin, size = number + 1, 0
        parts.append(self._decode(values[begin:], begin))
        if len(parts) == 1:
            return parts[0]
        return DecodedValues(
            frame=pl.concat([part.frame for part in parts]),
            good=np.concatenate([part.good for part in parts]),
            failed={number: why for part in parts for number, why in part.failed.items()},
        )

    def _decode(self, values: Sequence[bytes], first: int) -> DecodedValues:
        count = len(values)
        raw = b"".join([*values, PADDING])
        ends = np.cumsum(np.fromiter(map(len, values), dtype=np.int64, count=count))
        starts = np.concatenate((np.zeros(min(1, count), np.int64), ends[:-1]))
        failures = Failures(count)
        cursor = Cursor(raw, np.frombuffer(raw, dtype=np.uint8), np.arange(count), starts, ends.copy(), failures)
        frame = pl.DataFrame(self._columns.read(cursor), schema=self._schema.polars)
        cursor.fail(cursor.pos < cursor.end, "bytes follow the value")
        good = failures.good()
        if not good.all():
            frame = frame.filter(pl.Series(good))
        failed = {first + int(row): failures.reason(int(row)) for row in np.flatnonzero(~good)}
        return DecodedValues(frame=frame, good=np.flatnonzero(good) + first, failed=failed)


class _Fields:
    """Reads the fields of a record, in the writer's order."""

    def __init__(self, writer: AvroType, wanted: dict[str, DataType], reader: AvroType | None, path: str) -> None:
        self._steps: list[tuple[str | None, Read, AvroType]] = []
        self._missing: dict[str, pl.Series] = {}
        self._order = list(wanted)
        sources = _matched(writer, wanted, reader)
        hints = {one.name: one for one in reader.fields} if reader is not None else {}
        columns = {field.name: column for column, field in sources.items()}
        for one in writer.fields:
            column = columns.get(one.name)
            if column is None:
                self._steps.append((None, _nothing, one.kind))
                continue
            hint = hints[column].kind if column in hints else None
            where = f"{path}.{column}" if path else column
            self._steps.append((column, reader_of(one.kind, wanted[column], where, hint), one.kind))
        for column, kind in wanted.items():
            if column not in sources:
                where = f"{path}.{column}" if path else column
                self._missing[column] = _default(hints.get(column), reader, kind, where)

    def read(self, cursor: Cursor) -> dict[str, pl.Series]:
        found: dict[str, pl.Series] = {}
        for column, read, kind in self._steps:
            if column is None:
                pass_value(kind, cursor)
            else:
                found[column] = read(cursor)
        for column, value in self._missing.items():
            found[column] = value.gather(np.zeros(len(cursor), dtype=np.int64))
        return {column: found[column].alias(column) for column in self._order}


def _matched(writer: AvroType, wanted: dict[str, DataType], reader: AvroType | None) -> dict[str, AvroField]:
    """The writer's field of each column: by the name, by an alias that the reader's schema has, or by one that the writer's has."""
    fields = {one.name: one for one in writer.fields}
    others = {} if reader is None else {one.name: one.aliases for one in reader.fields}
    found = {column: fields.pop(column) for column in wanted if column in fields}
    for column in wanted:
        if column in found:
            continue
        name = next((alias for alias in others.get(column, ()) if alias in fields), None)
        name = name or next((one.name for one in fields.values() if column in one.aliases), None)
        if name is not None:
            found[column] = fields.pop(name)
    return found


def reader_of(writer: AvroType, wanted: DataType, path: str, reader: AvroType | None = None) -> Read:
    """Return what reads values of a type as values of a column. Raises `MismatchError` if there are none that could be."""
    if writer.name == "union":
        return _union(writer, wanted, path, reader)
    if writer.name == "null":
        return lambda cursor: _nulls(len(cursor), wanted)
    if wanted.element is not None and writer.name == "array":
        inner = _inner(reader, "array")
        item = reader_of(writer.inner[0], wanted.element, f"{path}[]", None if inner is None else inner.inner[0])
        return lambda cursor: _lists(*_items(writer, cursor, item), len(cursor), wanted)
    if wanted.name == "map" and writer.name == "map" and wanted.field("key").name == "string":
        return _map(writer, wanted, path, reader)
    if wanted.name == "struct" and writer.name == "record":
        fields = _Fields(writer, dict(wanted.fields), _inner(reader, "record"), path)
        return lambda cursor: pl.DataFrame(fields.read(cursor), schema=wanted.polars.to_schema()).to_struct("")  # type: ignore[attr-defined]
    return _plain(writer, wanted, path)


def _plain(writer: AvroType, wanted: DataType, path: str) -> Read:
    logical = writer.logical.removeprefix(_LOCAL)
    if wanted.name == "timestamp" and logical in _TIMES:
        return lambda cursor: _times(cursor, *_TIMES[logical], wanted)
    if wanted.name == "date" and logical == "date":
        return lambda cursor: pl.Series(_whole(cursor, 32, path), dtype=pl.Int32).cast(pl.Date)
    if wanted.name == "decimal" and logical == "decimal":
        return lambda cursor: _decimals(cursor, writer, wanted, path)
    if wanted.name in _PROMOTED.get(writer.name, ()) and wanted.name in _INTEGERS:
        bits = min(_INTEGERS[wanted.name], 32 if writer.name == "int" else 64)
        return lambda cursor: pl.Series(_whole(cursor, bits, path)).cast(wanted.polars)
    if wanted.name in _PROMOTED.get(writer.name, ()):
        if writer.name in _FLOATS:
            return lambda cursor: pl.Series(cursor.fixed(_FLOATS[writer.name])).cast(wanted.polars)
        bits = 32 if writer.name == "int" else 64
        return lambda cursor: pl.Series(_whole(cursor, bits, path)).cast(wanted.polars)
    if wanted.name == "boolean" and writer.name == "boolean":
        return lambda cursor: _booleans(cursor, path)
    if wanted.name in {"string", "binary"} and writer.name in {"string", "bytes", "fixed"} and logical != "decimal":
        if writer.name == "fixed" and wanted.name == "string":
            raise _mismatch(writer, wanted, path)
        return lambda cursor: _bytes(cursor, writer, wanted, path)
    if wanted.name == "string" and writer.name == "enum":
        return lambda cursor: _symbols(cursor, writer, path)
    raise _mismatch(writer, wanted, path)


def _mismatch(writer: AvroType, wanted: DataType, path: str) -> MismatchError:
    return MismatchError(f"{path} is {writer}, which cannot be read as {wanted}")


def _whole(cursor: Cursor, bits: int, path: str) -> Longs:
    found = cursor.long()
    if bits < 64:  # noqa: PLR2004 - those that a long has
        wrong = (found < -(1 << (bits - 1))) | (found >= 1 << (bits - 1))
        cursor.fail(wrong, f"{path} has more than {bits} bits")
        found[wrong] = 0
    return found


def _times(cursor: Cursor, factor: int, divisor: int, wanted: DataType) -> pl.Series:
    found = cursor.long()
    most = np.iinfo(np.int64).max // factor
    wrong = (found > most) | (found < -most)
    cursor.fail(wrong, "a time is out of range")
    found[wrong] = 0
    return pl.Series(found * factor // divisor).cast(wanted.polars)


def _booleans(cursor: Cursor, path: str) -> pl.Series:
    found = cursor.fixed("u1")
    cursor.fail(found > 1, f"{path} is neither true nor false")
    return pl.Series(found == 1)


def _spans(cursor: Cursor, writer: AvroType) -> tuple[Longs, Longs]:
    """Move past bytes; return where they begin, and how many there are."""
    length = np.full(len(cursor), writer.size) if writer.name == "fixed" else cursor.length()
    before = cursor.pos
    cursor.move(length)
    return before, np.maximum(0, np.minimum(length, cursor.end - before))


def _bytes(cursor: Cursor, writer: AvroType, wanted: DataType, path: str) -> pl.Series:
    begin, length = _spans(cursor, writer)
    spans = pl.DataFrame({"begin": begin, "length": length})
    whole = pl.lit(cursor.raw, dtype=pl.Binary)
    found = spans.select(whole.bin.slice(pl.col("begin"), pl.col("length"))).to_series()
    if wanted.name == "binary":
        return found
    try:
        return found.cast(pl.String)
    except pl.exceptions.ComputeError:
        wrong = np.array([not _is_text(one) for one in found.to_list()], dtype=np.bool_)
        cursor.fail(wrong, f"{path} is not valid UTF-8")
        return pl.Series([one.decode(errors="replace") for one in found.to_list()], dtype=pl.String)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _symbols(cursor: Cursor, writer: AvroType, path: str) -> pl.Series:
    found = cursor.long()
    wrong = (found < 0) | (found >= len(writer.symbols))
    cursor.fail(wrong, f"{path} is no symbol of {writer.full_name}")
    found[wrong] = 0
    return pl.Series(writer.symbols, dtype=pl.String).gather(found)


def _decimals(cursor: Cursor, writer: AvroType, wanted: DataType, path: str) -> pl.Series:
    begin, length = _spans(cursor, writer)
    most = 10**wanted.precision
    places = wanted.scale - writer.scale
    found: list[Decimal | None] = []
    wrong = np.zeros(len(cursor), dtype=np.bool_)
    for number, (at, size) in enumerate(zip(begin.tolist(), length.tolist(), strict=True)):
        if writer.name != "fixed" and size > _DECIMAL_BYTES_MAX:
            wrong[number] = True
            found.append(None)
            continue
        value = int.from_bytes(cursor.raw[at : at + size], "big", signed=True)
        scaled, rest = (value * 10**places, 0) if places >= 0 else divmod(value, 10**-places)
        wrong[number] = bool(rest) or not -most < scaled < most
        found.append(None if wrong[number] else Decimal(f"{scaled}E-{wanted.scale}"))
    cursor.fail(wrong, f"{path} does not fit {wanted}")
    return pl.Series(found, dtype=wanted.polars)


def _union(writer: AvroType, wanted: DataType, path: str, reader: AvroType | None) -> Read:
    reads: list[Read | str | None] = []
    problems: list[str] = []
    for branch in writer.inner:
        try:
            reads.append(None if branch.name == "null" else reader_of(branch, wanted, path, reader))
        except MismatchError as error:
            reads.append(str(error))
            problems.append(str(error))
    if problems and len(problems) == sum(branch.name != "null" for branch in writer.inner):
        raise MismatchError("; ".join(problems))

    def read(cursor: Cursor) -> pl.Series:
        order = np.full(len(cursor), -1, dtype=np.int64)
        parts: list[pl.Series] = []
        filled = 0
        for branch, which in branches(cursor, len(reads)):
            made = reads[branch]
            if made is None:
                continue
            if isinstance(made, str):
                wrong = np.zeros(len(cursor), dtype=np.bool_)
                wrong[which] = True
                cursor.fail(wrong, made)
                continue
            if which.size == len(cursor):
                return made(cursor)
            part = cursor.at(which)
            parts.append(made(part))
            cursor.pos[which] = part.pos
            order[which] = filled + np.arange(which.size)
            filled += which.size
        if not parts:
            return _nulls(len(cursor), wanted)
        return _gathered(parts[0] if len(parts) == 1 else pl.concat(parts), order)

    return read


def _items(writer: AvroType, cursor: Cursor, item: Read) -> tuple[pl.Series, Longs]:
    """Read the items of arrays; return them one after another, and to which array each belongs."""
    starts = Starts()
    pass_items(writer, cursor, starts)
    owners, at = starts.sorted()
    return item(cursor.at(owners, at)), owners


def _lists(items: pl.Series, owners: Longs, count: int, wanted: DataType) -> pl.Series:
    """Put items into lists. There is a list for each of `count`, also one that is empty."""
    grouped = pl.DataFrame({"owner": owners, "item": items}).group_by("owner", maintain_order=True).agg("item")
    empty = pl.Series("item", [[]], dtype=pl.List(items.dtype))
    order = np.full(count, grouped.height, dtype=np.int64)
    order[grouped.get_column("owner").to_numpy()] = np.arange(grouped.height)
    return pl.concat([grouped.get_column("item"), empty]).gather(order).cast(wanted.polars)


def _map(writer: AvroType, wanted: DataType, path: str, reader: AvroType | None) -> Read:
    inner = _inner(reader, "map")
    key, text = DataType("string"), AvroType("string")
    read_value = reader_of(
        writer.inner[0], wanted.field("value"), f"{path}{{}}", None if inner is None else inner.inner[0]
    )
    entries = DataType("array", element=DataType("struct", fields=wanted.fields))

    def entry(cursor: Cursor) -> pl.Series:
        keys = _bytes(cursor, text, key, f"{path}: a key")
        return pl.DataFrame({"key": keys, "value": read_value(cursor)}).to_struct("")

    def read(cursor: Cursor) -> pl.Series:
        lists = _lists(*_items(writer, cursor, entry), len(cursor), entries)
        return lists.to_frame("map").select(pl.col("map").list.to_map()).to_series().cast(wanted.polars)

    return read


def _inner(reader: AvroType | None, name: str) -> AvroType | None:
    """The type of this name that a reader's schema has here, if any."""
    if reader is not None and reader.name == "union":
        return next((branch for branch in reader.inner if branch.name == name), None)
    return reader if reader is not None and reader.name == name else None


def _default(field: AvroField | None, reader: AvroType | None, kind: DataType, path: str) -> pl.Series:
    """One value: that of a column which the writer lacks."""
    if field is None or field.default is None:
        return _nulls(1, kind)
    if field.default is NO_DEFAULT:
        name = "" if reader is None else f" of {reader.full_name}"
        raise MismatchError(f"{path} is missing, and the schema{name} given with schema= has no default for it")
    branch = field.kind.inner[0] if field.kind.name == "union" else field.kind
    try:
        return pl.Series([_default_value(field.default, branch, kind)], dtype=kind.polars)
    except (TypeError, ValueError, AttributeError, ArithmeticError, pl.exceptions.PolarsError) as error:
        shown = msgspec.json.encode(field.default).decode()[:200]
        raise MismatchError(f"{path}: its default {shown} in schema= is no {kind}") from error


def _default_value(default: Any, avro: AvroType, kind: DataType) -> Any:
    if default is None:
        return None
    if kind.element is not None:
        return [_default_value(one, avro.inner[0], kind.element) for one in default]
    if kind.name == "map":
        return {key: _default_value(one, avro.inner[0], kind.field("value")) for key, one in default.items()}
    if kind.name == "struct":
        fields = {one.name: one for one in avro.fields}
        return {
            name: _default_value(default[name], fields[name].kind, part) if name in default else None
            for name, part in kind.fields
        }
    if kind.name == "decimal":
        return Decimal(int.from_bytes(default.encode("latin-1"), "big", signed=True)).scaleb(-avro.scale)
    if kind.name == "timestamp":
        factor, divisor = _TIMES[avro.logical.removeprefix(_LOCAL)]
        return default * factor // divisor
    return default.encode("latin-1") if kind.name == "binary" else default


def _nulls(count: int, kind: DataType) -> pl.Series:
    return pl.Series([None], dtype=kind.polars).gather(np.zeros(count, dtype=np.int64))


def _gathered(values: pl.Series, order: Longs) -> pl.Series:
    """The values in an order; null where that is -1."""
    if (order >= 0).all():
        return values.gather(order)
    places = pl.select(place=pl.Series(order)).select(pl.when(pl.col("place") >= 0).then(pl.col("place"))).to_series()
    return values.gather(places)


def _nothing(cursor: Cursor) -> pl.Series:
    raise AssertionError(f"a field that is passed is not read, at {len(cursor)} positions")
