"""Values of messages in Protobuf, by schemas of a registry: the place of their message in its file, then its bytes.

The package `protobuf` reads and writes the bytes; it is safe with those that are not valid. Fields are matched with columns by their names
in the writer's schema; or, if a schema is given, by their numbers in that one. A field that is not set is null where the schema can tell
that, and else the default of its type.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any, Final

import numpy as np
import polars as pl
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from fordstone.connectors.protobuf.text import ProtoError, file_of
from fordstone.connectors.registered import Codec, DecodedValues, MismatchError, ReadValues, UnfitError, WriteValues
from fordstone.connectors.schema_registry import RegisteredSchema, SchemaKind
from fordstone.errors import ConfigError
from fordstone.lang.schema import DataType, Schema

Get = Callable[[Any], Any]
"""Makes the value of a column of what a message has. Raises `ValueError` or `OverflowError` if it has none."""
INDEX_MAX: Final = 32
"""How deep a message may stand in its file."""
ITEMS_MAX: Final = 1 << 17
"""Messages in one field of a message: an empty one takes two bytes, and is a Python object here."""
READINGS_MAX: Final = 1_000
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_F: Final = FieldDescriptor
_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_NARROW: Final = frozenset({_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32})
_LONG: Final = frozenset({_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64})
_UNSIGNED: Final = frozenset({_F.TYPE_UINT32, _F.TYPE_FIXED32})
_UNSIGNED_LONG: Final = frozenset({_F.TYPE_UINT64, _F.TYPE_FIXED64})
_WHOLE: Final = _NARROW | _LONG | _UNSIGNED | _UNSIGNED_LONG
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_DATE: Final = "google.type.Date"
_DECIMAL: Final = "confluent.type.Decimal"
_WRAPPER: Final = re.compile(r"google\.protobuf\.\w+Value")
_READ_AS: Final[Mapping[int, frozenset[int]]] = {
    _F.TYPE_INT32: frozenset({_F.TYPE_INT64}),
    _F.TYPE_UINT32: frozenset({_F.TYPE_INT64, _F.TYPE_UINT64}),
    _F.TYPE_ENUM: frozenset({_F.TYPE_INT32, _F.TYPE_INT64}),
    _F.TYPE_BOOL: frozenset({_F.TYPE_INT32, _F.TYPE_INT64}),
    _F.TYPE_SINT32: frozenset({_F.TYPE_SINT64}),
    _F.TYPE_STRING: frozenset({_F.TYPE_BYTES}),
    _F.TYPE_BYTES: frozenset({_F.TYPE_STRING}),
}
"""As which other types the bytes of a field can be read, so that every value stays the same."""
_WRITTEN: Final = {
    "boolean": "bool",
    "tinyint": "int32",
    "smallint": "int32",
    "int": "int32",
    "bigint": "int64",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "bytes",
    "timestamp": _TIMESTAMP,
    "date": _DATE,
    "decimal": _DECIMAL,
}
_IMPORTS: Final = {
    _TIMESTAMP: "google/protobuf/timestamp.proto",
    _DATE: "google/type/date.proto",
    _DECIMAL: "confluent/type/decimal.proto",
}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ProtobufCodec(Codec):
    """Values of some columns."""

    kind: SchemaKind = "PROTOBUF"

    def __init__(self, schema: Schema, text: str | None, *, message: str | None, where: str) -> None:
        """`text`: the schema that rows are read as, and written by; `message`: which of its messages they are."""
        self._schema = schema
        self._text = text
        self._message = message
        try:
            self._own = None if text is None else _message_of(file_of(text, {}), message)
        except ProtoError as error:
            raise ConfigError(f"{where}: schema=...: {error}.") from error

    def reader(self, schema: RegisteredSchema) -> ReadValues:
        file = file_of(schema.text, schema.references)
        readings: dict[tuple[int, ...], _Reading | str] = {}

        def reading(path: tuple[int, ...]) -> _Reading | str:
            if path not in readings:
                if len(readings) >= READINGS_MAX:
                    readings.clear()
                try:
                    readings[path] = _Reading(_message_at(file, path), self._own, self._schema)
                except MismatchError as error:
                    readings[path] = str(error)
            return readings[path]

        if not _messages(file):
            raise MismatchError("it has no message")
        return lambda values: _decoded(values, reading, self._schema)

    def schema_text(self, subject: str, latest: RegisteredSchema | None) -> str:
        if self._text is not None:
            return self._text
        before: Descriptor | None = None
        if latest is not None and latest.kind == self.kind:
            before = _message_of(file_of(latest.text, latest.references), self._message)
        name = "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", subject))
        return schema_of(self._schema, self._message or (name if _NAME.fullmatch(name) else f"M{name}"), before)

    def writer(self, schema: RegisteredSchema) -> WriteValues:
        message = _message_of(file_of(schema.text, schema.references), self._message)
        head = _index(message)
        write = _writer(message, dict(self._schema.items()), "")
        made = GetMessageClass(message)

        def encode(frame: pl.DataFrame, before: bytes) -> list[bytes]:
            first = before + head
            return [
                first + made(**write(row)).SerializeToString(deterministic=True) for row in frame.iter_rows(named=True)
            ]

        return encode


# Messages in files.


def _messages(outer: FileDescriptor | Descriptor) -> list[Descriptor]:
    """The messages in a file or in another message, in order. Those of the entries of maps stand in no text, and have no place."""
    inner = outer.message_types_by_name.values() if isinstance(outer, FileDescriptor) else outer.nested_types
    return [one for one in inner if not one.GetOptions().map_entry]


def _message_at(file: FileDescriptor, path: tuple[int, ...]) -> Descriptor:
    inner, found = _messages(file), None
    for number in path:
        if number >= len(inner):
            raise MismatchError("it has no message at the place that the value names")
        found = inner[number]
        inner = _messages(found)
    if found is None:
        raise MismatchError("the value names no message")
    return found


def _message_of(file: FileDescriptor, name: str | None) -> Descriptor:
    """The message of this name, with or without its package; the first one by default."""
    if not _messages(file):
        raise ProtoError("it has no message")
    if name is None:
        return _messages(file)[0]
    full = name if not file.package or name.startswith(f"{file.package}.") else f"{file.package}.{name}"
    try:
        return file.pool.FindMessageTypeByName(full)
    except KeyError as error:
        raise ProtoError(f"it has no message {name!r}") from error


def _index(message: Descriptor) -> bytes:
    """The place of a message in its file, as it stands in front of values. The first message is a zero."""
    path: list[int] = []
    one: Descriptor | None = message
    while one is not None:
        names = [other.name for other in _messages(one.containing_type or one.file)]
        path.insert(0, names.index(one.name))
        one = one.containing_type
    return b"\0" if path == [0] else bytes([2 * number for number in (len(path), *path)])


def _path(value: bytes) -> tuple[tuple[int, ...], int]:
    """Read the place of a message; return it, and where its bytes begin."""
    if value[:1] == b"\0":
        return (0,), 1
    count, at = _number(value, 0)
    if count > INDEX_MAX:
        raise ValueError("it names no message of its schema")
    path = []
    for _ in range(count):
        number, at = _number(value, at)
        path.append(number)
    return tuple(path) or (0,), at


def _number(value: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        if at >= len(value) or shift > 28:  # noqa: PLR2004 - a number of 32 bits has at most five bytes
            raise ValueError("it names no message of its schema")
        found |= (value[at] & 0x7F) << shift
        at += 1
        if value[at - 1] < 0x80:  # noqa: PLR2004 - the bit that says that another byte follows
            break
        shift += 7
    if found & 1:
        raise ValueError("it names no message of its schema")
    return found >> 1, at


# Reading.


class _Reading:
    """Reads the values of one message."""

    def __init__(self, writer: Descriptor, own: Descriptor | None, schema: Schema) -> None:
        message = writer
        if own is not None:
            _check_same(writer, own, "", set())
            message = own
        self.parse = GetMessageClass(message).FromString
        self.gets = {column: _column(message, column, kind) for column, kind in schema.items()}


def _column(message: Descriptor, column: str, kind: DataType) -> Get:
    """What reads a column: times as microseconds, which is quicker than as Python's."""
    field = message.fields_by_name.get(column)
    if field is None:
        return _nothing
    get = get_of(field, kind, column)
    if kind.name != "timestamp":
        return get
    return lambda message: _micros(getattr(message, column)) if message.HasField(column) else None


def _micros(value: Any) -> int:
    found: int = value.seconds * 1_000_000 + value.nanos // 1000
    if abs(found) >= 1 << 63:
        raise ValueError("a time is out of range")
    return found


def _decoded(
    values: Sequence[bytes], reading: Callable[[tuple[int, ...]], _Reading | str], schema: Schema
) -> DecodedValues:
    failed: dict[int, str] = {}
    parsed: list[Any] = []
    readers: list[_Reading] = []
    numbers: list[int] = []
    for number, value in enumerate(values):
        try:
            path, at = _path(value)
            reader = reading(path)
            if isinstance(reader, str):
                failed[number] = reader
                continue
            parsed.append(reader.parse(value[at:]))
        except (DecodeError, ValueError) as error:
            failed[number] = f"the value is not valid: {error}" if isinstance(error, DecodeError) else str(error)
            continue
        readers.append(reader)
        numbers.append(number)
    one = readers[0] if len(set(map(id, readers))) == 1 else None
    series = [_series(name, kind, parsed, readers, numbers, failed, one) for name, kind in schema.items()]
    frame = pl.DataFrame(series, schema=schema.polars)
    good = np.array(numbers, dtype=np.int64)
    if failed:
        fit = np.array([number not in failed for number in numbers], dtype=np.bool_)
        frame, good = frame.filter(pl.Series(fit)), good[fit]
    return DecodedValues(frame=frame, good=good, failed=failed)


def _series(
    name: str,
    kind: DataType,
    parsed: list[Any],
    readers: list[_Reading],
    numbers: list[int],
    failed: dict[int, str],
    one: _Reading | None,
) -> pl.Series:
    """A column. `one`: the reader of all of them, if there is just one."""
    dtype = pl.Int64() if kind.name == "timestamp" else kind.polars
    try:
        if one is not None:
            get = one.gets[name]
            return pl.Series(name, [get(message) for message in parsed], dtype=dtype).cast(kind.polars)
    except (ValueError, OverflowError):
        pass  # one of them has no value: see which
    found: list[Any] = []
    for number, reader, message in zip(numbers, readers, parsed, strict=True):
        try:
            found.append(reader.gets[name](message))
        except (ValueError, OverflowError) as error:
            failed.setdefault(number, str(error) or f"{name} is out of range")
            found.append(None)
    return pl.Series(name, found, dtype=dtype).cast(kind.polars)


def get_of(field: FieldDescriptor, kind: DataType, path: str) -> Get:
    """Return what reads a field of a message as a column. Raises `MismatchError` if they do not go together."""
    name = field.name
    if _is_map(field):
        if kind.name != "map":
            raise _mismatch(field, kind, path)
        entry = field.message_type.fields_by_name
        key = value_of(entry["key"], kind.field("key"), f"{path}{{}}")
        value = value_of(entry["value"], kind.field("value"), f"{path}{{}}")
        return lambda message: {
            key(one): value(other) for one, other in sorted(_some(getattr(message, name), path).items(), key=_first)
        }
    if field.is_repeated:
        if kind.element is None:
            raise _mismatch(field, kind, path)
        item = value_of(field, kind.element, f"{path}[]")
        if field.type != _F.TYPE_MESSAGE:
            return lambda message: [item(one) for one in getattr(message, name)]
        return lambda message: [item(one) for one in _some(getattr(message, name), path)]
    made = value_of(field, kind, path)
    if field.has_presence and made is _same:
        return lambda message: getattr(message, name) if message.HasField(name) else None
    if field.has_presence:
        return lambda message: made(getattr(message, name)) if message.HasField(name) else None
    if made is _same:
        return attrgetter(name)
    return lambda message: made(getattr(message, name))


def value_of(field: FieldDescriptor, kind: DataType, path: str) -> Get:
    """As `get_of`, for one value of a field."""
    if field.type == _F.TYPE_MESSAGE:
        return _message_value(field, kind, path)
    if field.type == _F.TYPE_ENUM and kind.name == "string":
        names = {one.number: one.name for one in field.enum_type.values}
        return lambda value: _symbol(names, value, path)
    whole = field.type in _WHOLE or field.type == _F.TYPE_ENUM
    bits = 64 if field.type in _LONG | _UNSIGNED | _UNSIGNED_LONG else 32
    if whole and kind.name in _BITS and (_BITS[kind.name] >= bits or bits == 32):  # noqa: PLR2004 - those of an int
        if _BITS[kind.name] >= bits and field.type not in _UNSIGNED_LONG:
            return _same
        return lambda value: _in_bits(value, _BITS[kind.name], path)
    fits = {
        "boolean": field.type == _F.TYPE_BOOL,
        "float": field.type == _F.TYPE_FLOAT,
        "double": field.type in {_F.TYPE_FLOAT, _F.TYPE_DOUBLE} or whole,
        "string": field.type == _F.TYPE_STRING,
        "binary": field.type == _F.TYPE_BYTES,
    }
    if not fits.get(kind.name, False):
        raise _mismatch(field, kind, path)
    return float if kind.name == "double" and whole else _same


def _message_value(field: FieldDescriptor, kind: DataType, path: str) -> Get:
    message = field.message_type
    if message.full_name == _TIMESTAMP and kind.name == "timestamp":
        return lambda value: _EPOCH + dt.timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)
    if message.full_name == _DATE and kind.name == "date":
        return lambda value: dt.date(value.year, value.month, value.day)
    if message.full_name == _DECIMAL and kind.name == "decimal":
        return lambda value: _decimal(value, kind, path)
    if _WRAPPER.fullmatch(message.full_name) and kind.name != "struct" and "value" in message.fields_by_name:
        inner = value_of(message.fields_by_name["value"], kind, path)
        return lambda value: inner(value.value)
    if kind.name != "struct":
        raise _mismatch(field, kind, path)
    gets = {
        name: get_of(message.fields_by_name[name], part, f"{path}.{name}")
        if name in message.fields_by_name
        else _nothing
        for name, part in kind.fields
    }
    return lambda value: {name: get(value) for name, get in gets.items()}


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _mismatch(field: FieldDescriptor, kind: DataType, path: str) -> MismatchError:
    text = _one_text(field) if path.endswith(("[]", "{}")) else _type_text(field)
    return MismatchError(f"{path} is {text}, which cannot be read as {kind}")


def _type_text(field: FieldDescriptor) -> str:
    if _is_map(field):
        entry = field.message_type.fields_by_name
        return f"map<{_type_text(entry['key'])}, {_type_text(entry['value'])}>"
    return f"repeated {_one_text(field)}" if field.is_repeated else _one_text(field)


def _one_text(field: FieldDescriptor) -> str:
    named = field.message_type or field.enum_type
    return str(named.full_name if named is not None else _TYPE_NAMES[field.type])


_TYPE_NAMES: Final = {
    value: name.removeprefix("TYPE_").lower() for name, value in vars(_F).items() if name.startswith("TYPE_")
}


def _first(entry: tuple[Any, Any]) -> Any:
    """Maps have no order: every process reads them in that of their keys."""
    return entry[0]


def _nothing(message: Any) -> None:
    del message


def _same(value: Any) -> Any:
    return value


def _some(items: Any, path: str) -> Any:
    if len(items) > ITEMS_MAX:
        raise ValueError(f"{path} has more than {ITEMS_MAX:,} items")
    return items


def _symbol(names: Mapping[int, str], value: int, path: str) -> str:
    if value not in names:
        raise ValueError(f"{path} is {value}, which has no name in the schema")
    return names[value]


def _in_bits(value: int, bits: int, path: str) -> int:
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ValueError(f"{path} has more than {bits} bits")
    return value


def _decimal(value: Any, kind: DataType, path: str) -> Decimal:
    if len(value.value) > 16 or not 0 <= value.scale <= kind.scale:  # noqa: PLR2004 - the bytes of 38 digits
        raise ValueError(f"{path} does not fit {kind}")
    number = int.from_bytes(value.value, "big", signed=True) * 10 ** (kind.scale - value.scale)
    if abs(number) >= 10**kind.precision:
        raise ValueError(f"{path} does not fit {kind}")
    return Decimal(f"{number}E-{kind.scale}")


def _check_same(writer: Descriptor, own: Descriptor, path: str, seen: set[tuple[str, str]]) -> None:
    """Raise if a field of a schema of one's own would read other values than the writer's of the same number."""
    if (writer.full_name, own.full_name) in seen:
        return
    seen.add((writer.full_name, own.full_name))
    for field in own.fields:
        theirs = writer.fields_by_number.get(field.number)
        if theirs is None:
            continue
        where = f"{path}.{field.name}" if path else field.name
        same = theirs.type == field.type or field.type in _READ_AS.get(theirs.type, ())
        if not same or theirs.is_repeated != field.is_repeated or _is_map(theirs) != _is_map(field):
            raise MismatchError(
                f"{where} is {_type_text(theirs)}, and {_type_text(field)} in the schema given with schema="
            )
        if theirs.message_type is not None and field.message_type is not None:
            _check_same(theirs.message_type, field.message_type, where, seen)


# Writing.


def schema_of(columns: Schema, name: str, before: Descriptor | None = None) -> str:
    """Return the .proto text of rows with these columns. `before`: an earlier schema; its names and numbers of fields stay."""
    imports: set[str] = set()
    package = "" if before is None or not before.file.package else f"package {before.file.package};\n"
    body = _message_text(before.name if before is not None else name, dict(columns.items()), before, imports, "")
    head = 'syntax = "proto3";\n' + package + "".join(f'import "{one}";\n' for one in sorted(imports))
    return head + "\n".join(body) + "\n"


def _message_text(
    name: str, columns: Mapping[str, DataType], before: Descriptor | None, imports: set[str], path: str
) -> list[str]:
    known = {} if before is None else {field.name: field for field in before.fields}
    free = max((field.number for field in known.values()), default=0) + 1
    lines = [f"message {name} {{"]
    for column, kind in columns.items():
        where = f"{path}.{column}" if path else column
        if not _NAME.fullmatch(column):
            raise UnfitError(f"{where} is no name for a field of Protobuf, which has letters, digits and '_'")
        field = known.get(column)
        number = field.number if field is not None else free
        free += field is None
        plain = kind.element or (kind.field("value") if kind.name == "map" else kind)
        if plain.element is not None or plain.name == "map":
            raise UnfitError(f"{where} is {kind}, and Protobuf has no lists or maps inside of lists and maps")
        inner = "".join(part.capitalize() for part in column.split("_")) + "Value"
        if plain.name == "struct":
            message = None if field is None or field.message_type is None else field.message_type
            if message is not None and kind.name == "map":
                message = message.fields_by_name["value"].message_type
            inner = inner if message is None else message.name
            lines += [f"  {line}" for line in _message_text(inner, dict(plain.fields), message, imports, where)]
        elif plain.name not in _WRITTEN:
            raise UnfitError(f"{where} is {kind}, which Protobuf has no type for")
        text = inner if plain.name == "struct" else _WRITTEN[plain.name]
        imports |= {_IMPORTS[text]} if text in _IMPORTS else set()
        label = "" if plain.name == "struct" or text in _IMPORTS else "optional "
        if kind.name == "map":
            key = _WRITTEN.get(kind.field("key").name, "")
            if key not in {"string", "int32", "int64", "bool"}:
                raise UnfitError(f"{where} is {kind}, and keys of Protobuf's maps are text, whole numbers or booleans")
            text, label = f"map<{key}, {text}>", ""
        lines.append(f"  {'repeated ' if kind.element is not None else label}{text} {column} = {number};")
    return [*lines, "}"]


Make = Callable[[Any], Any]


def _writer(message: Descriptor, columns: Mapping[str, DataType], path: str) -> Make:
    makes: dict[str, Make] = {}
    for column, kind in columns.items():
        where = f"{path}.{column}" if path else column
        field = message.fields_by_name.get(column)
        if field is None:
            raise UnfitError(f"{where} has no field in {message.full_name}")
        makes[column] = _make_of(field, kind, where)
    for field in message.fields:
        if field.is_required and field.name not in columns:
            raise UnfitError(f"field {field.name} of {message.full_name} is required, and has no column")
    return lambda row: {column: make(row[column]) for column, make in makes.items()}


def _make_of(field: FieldDescriptor, kind: DataType, path: str) -> Make:
    if _is_map(field) and kind.name == "map":
        entry = field.message_type.fields_by_name
        key, value = _one_of(entry["key"], kind.field("key"), path), _one_of(entry["value"], kind.field("value"), path)
        make = _map_value(entry["value"])
        return lambda given: None if given is None else {key(one): make(value(_there(two, path))) for one, two in given.items()}  # fmt: skip
    if field.is_repeated and not _is_map(field) and kind.element is not None:
        item = _one_of(field, kind.element, path)
        return lambda given: None if given is None else [item(_there(one, path)) for one in given]
    if field.is_repeated or (kind.is_nested and kind.name != "struct"):
        raise _unfit(field, kind, path)
    one = _one_of(field, kind, path)
    if field.has_presence:
        return lambda given: None if given is None else one(given)
    return lambda given: one(_there(given, path))


def _map_value(field: FieldDescriptor) -> Make:
    """Messages in maps cannot be given as dicts."""
    if field.message_type is None:
        return _same
    made = GetMessageClass(field.message_type)
    return lambda given: made(**given)


def _there(value: Any, path: str) -> Any:
    if value is None:
        raise ValueError(f"{path} is null in a row, or has a null in it, and the schema cannot say that")
    return value


def _one_of(field: FieldDescriptor, kind: DataType, path: str) -> Make:
    if field.type == _F.TYPE_MESSAGE:
        message = field.message_type
        if message.full_name == _TIMESTAMP and kind.name == "timestamp":
            return _timestamp
        if message.full_name == _DATE and kind.name == "date":
            return lambda value: {"year": value.year, "month": value.month, "day": value.day}
        if message.full_name == _DECIMAL and kind.name == "decimal":
            return lambda value: _decimal_parts(value, kind)
        if kind.name == "struct":
            return _writer(message, dict(kind.fields), path)
        if _WRAPPER.fullmatch(message.full_name) and "value" in message.fields_by_name:
            inner = _one_of(message.fields_by_name["value"], kind, path)
            return lambda value: {"value": inner(value)}
        raise _unfit(field, kind, path)
    if field.type == _F.TYPE_ENUM and kind.name == "string":
        names = frozenset(one.name for one in field.enum_type.values)
        return lambda value: _known(names, value, path)
    fits = {
        "boolean": field.type == _F.TYPE_BOOL,
        "float": field.type in {_F.TYPE_FLOAT, _F.TYPE_DOUBLE},
        "double": field.type == _F.TYPE_DOUBLE,
        "string": field.type == _F.TYPE_STRING,
        "binary": field.type == _F.TYPE_BYTES,
        "bigint": field.type in _LONG,
    }
    if not fits.get(kind.name, kind.is_integer and field.type in _NARROW | _LONG):
        raise _unfit(field, kind, path)
    return _same


def _unfit(field: FieldDescriptor, kind: DataType, path: str) -> UnfitError:
    return UnfitError(f"{path} is {_type_text(field)} in the schema, and the column is {kind}")


def _known(names: frozenset[str], value: str, path: str) -> str:
    if value not in names:
        raise ValueError(f"{path} is {value!r} in a row, which is no name of its enum")
    return value


def _timestamp(value: dt.datetime) -> dict[str, int]:
    micros = (value - _EPOCH) // dt.timedelta(microseconds=1)
    return {"seconds": micros // 1_000_000, "nanos": micros % 1_000_000 * 1_000}


def _decimal_parts(value: Decimal, kind: DataType) -> dict[str, Any]:
    number = int(value.scaleb(kind.scale))
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return {"value": number.to_bytes(size, "big", signed=True), "precision": kind.precision, "scale": kind.scale}
