"""Schemas of Apache Avro: read from their JSON, and made of the columns of a stream.

Types may contain themselves, through a union, an array or a map. What is not a schema is an `AvroSchemaError`, whose text says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from fordstone.lang.schema import DataType, Schema

PRIMITIVES: Final = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
SCHEMA_CHARS_MAX: Final = 1 << 20
SCHEMA_DEPTH_MAX: Final = 64
SCHEMA_TYPES_MAX: Final = 100_000
FIXED_BYTES_MAX: Final = 1 << 20
_SIZES: Final = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FULL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
NO_DEFAULT: Final = msgspec.UNSET


class AvroSchemaError(ValueError):
    """A text that is no schema of Avro, or columns that Avro has no types for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AvroField:
    """A field of a record."""

    name: str
    kind: AvroType
    aliases: tuple[str, ...] = ()
    default: Any = NO_DEFAULT
    """As in the JSON of the schema."""


@dataclass(slots=True, eq=False, repr=False)
class AvroType:
    """A type. Not frozen, because a record is known by its name before its fields are."""

    name: str
    """`record`, `union` and so on, or the name of a primitive type."""
    full_name: str = ""
    """Of a record, an enum or a fixed."""
    logical: str = ""
    precision: int = 0
    scale: int = 0
    size: int = -1
    """The bytes of a fixed, and of a record if it always has as many."""
    symbols: tuple[str, ...] = ()
    fields: tuple[AvroField, ...] = ()
    inner: tuple[AvroType, ...] = field(default=())
    """The items of an array, the values of a map, the branches of a union."""

    def __str__(self) -> str:
        if self.name == "union":
            return " | ".join(map(str, self.inner))
        what = self.full_name or self.name
        return f"{what} ({self.logical})" if self.logical else what

    def fixed_size(self) -> int | None:
        """How many bytes every value has; None: that depends on the value."""
        if self.name in {"fixed", "record"}:
            return None if self.size < 0 else self.size
        return _SIZES.get(self.name)


def parse(text: str, references: Iterable[str] = ()) -> AvroType:
    """Read a schema from its JSON. `references`: schemas with the types that it uses without declaring them, in order."""
    reader = _SchemaReader()
    try:
        for other in references:
            reader.type(_json(other), "", 0)
        found = reader.type(_json(text), "", 0)
        _weigh(found, {}, {})
    except RecursionError as error:
        raise AvroSchemaError("the schema is nested too deeply") from error
    return found


def _json(text: str) -> Any:
    if len(text) > SCHEMA_CHARS_MAX:
        raise AvroSchemaError(f"the schema has {len(text):,} characters, and may have {SCHEMA_CHARS_MAX:,}")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise AvroSchemaError(f"the schema is not JSON: {error}") from error


def _weigh(kind: AvroType, open_records: dict[int, bool], known: dict[int, int]) -> int:
    """Return how many types a value passes, with those of inner records again each time; raise if that is infinite, or too many.

    `open_records`: those that this type is inside of, and whether a choice lies between.
    """
    if id(kind) in known:
        return known[id(kind)]
    if id(kind) in open_records:
        if not open_records[id(kind)]:
            raise AvroSchemaError(f"record {kind.full_name} contains itself, so it has no values")
        return 1
    if kind.name == "record":
        inner, around = [one.kind for one in kind.fields], {**open_records, id(kind): False}
    else:
        inner, around = list(kind.inner), dict.fromkeys(open_records, True)
    weight = 1 + sum(_weigh(one, around, known) for one in inner)
    if weight > SCHEMA_TYPES_MAX:
        raise AvroSchemaError(f"a value has more than {SCHEMA_TYPES_MAX:,} parts")
    if kind.name == "record":
        known[id(kind)] = weight
        sizes = [one.fixed_size() for one in inner]
        kind.size = -1 if None in sizes else sum(size for size in sizes if size is not None)
    return weight


class _SchemaReader:
    def __init__(self) -> None:
        self._named: dict[str, AvroType] = {}

    def type(self, given: Any, space: str, depth: int) -> AvroType:
        if depth > SCHEMA_DEPTH_MAX:
            raise AvroSchemaError(f"the schema is nested more than {SCHEMA_DEPTH_MAX} deep")
        if isinstance(given, str):
            return self._by_name(given, space)
        if isinstance(given, list):
            branches = tuple(self.type(one, space, depth + 1) for one in given)
            if not branches or any(one.name == "union" for one in branches):
                raise AvroSchemaError("a union has branches, and none of them is a union")
            return AvroType("union", inner=branches)
        if not isinstance(given, dict) or "type" not in given:
            raise AvroSchemaError(f"a type is missing in {_shown(given)}")
        name = given["type"]
        if isinstance(name, dict | list):
            return self.type(name, space, depth + 1)
        if name in {"record", "error", "enum", "fixed"}:
            return self._declared(given, space, depth)
        if name == "array":
            return AvroType("array", inner=(self.type(given.get("items"), space, depth + 1),))
        if name == "map":
            return AvroType("map", inner=(self.type(given.get("values"), space, depth + 1),))
        found = self._by_name(name, space)
        return self._logical(AvroType(name), given) if name in PRIMITIVES else found

    def _by_name(self, name: Any, space: str) -> AvroType:
        if not isinstance(name, str):
            raise AvroSchemaError(f"a type is missing in {_shown(name)}")
        if name in PRIMITIVES:
            return AvroType(name)
        for full in (name if "." in name or not space else f"{space}.{name}", name):
            if full in self._named:
                return self._named[full]
        raise AvroSchemaError(f"there is no type {name[:200]!r}")

    def _declared(self, given: Mapping[str, Any], space: str, depth: int) -> AvroType:
        name, own_space = given.get("name"), given.get("namespace")
        if not isinstance(name, str) or not _FULL_NAME.fullmatch(name):
            raise AvroSchemaError(f"{_shown(name)} is no name")
        if "." in name:
            full = name
        else:
            space = own_space if isinstance(own_space, str) else space
            full = f"{space}.{name}" if space else name
        if full in self._named:
            raise AvroSchemaError(f"type {full} is declared twice")
        space = full.rpartition(".")[0]
        kind = "record" if given["type"] == "error" else given["type"]
        found = self._named[full] = AvroType(kind, full_name=full)
        if kind == "enum":
            symbols = given.get("symbols")
            if not isinstance(symbols, list) or not symbols or not all(isinstance(one, str) for one in symbols):
                raise AvroSchemaError(f"enum {full} has no symbols")
            found.symbols = tuple(symbols)
        elif kind == "fixed":
            size = given.get("size")
            if not isinstance(size, int) or not 0 <= size <= FIXED_BYTES_MAX:
                raise AvroSchemaError(f"fixed {full} has no size, or a size over {FIXED_BYTES_MAX:,}")
            found.size = size
            self._logical(found, given)
        else:
            found.fields = self._fields(given.get("fields"), full, space, depth)
        return found

    def _fields(self, given: Any, record: str, space: str, depth: int) -> tuple[AvroField, ...]:
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise AvroSchemaError(f"record {record} has no fields")
        found: list[AvroField] = []
        for one in given:
            name, aliases = one.get("name"), one.get("aliases", [])
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise AvroSchemaError(f"record {record}: {_shown(name)} is no name of a field")
            if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
                raise AvroSchemaError(f"record {record}: the aliases of field {name} are no list of names")
            found.append(
                AvroField(
                    name=name,
                    kind=self.type(one.get("type"), space, depth + 1),
                    aliases=tuple(aliases),
                    default=one.get("default", NO_DEFAULT),
                )
            )
        if len({one.name for one in found}) < len(found):
            raise AvroSchemaError(f"record {record} has two fields of one name")
        return tuple(found)

    @staticmethod
    def _logical(found: AvroType, given: Mapping[str, Any]) -> AvroType:
        """Logical types that are not valid are ignored, as Avro says."""
        logical = given.get("logicalType")
        if logical == "decimal" and found.name in {"bytes", "fixed"}:
            precision, scale = given.get("precision"), given.get("scale", 0)
            if isinstance(precision, int) and isinstance(scale, int) and 0 <= scale <= precision and precision:
                found.logical, found.precision, found.scale = "decimal", precision, scale
        elif (found.name, logical) in _LOGICAL:
            found.logical = str(logical)
        return found


_LOGICAL: Final = {
    ("int", "date"),
    ("int", "time-millis"),
    ("long", "time-micros"),
    ("string", "uuid"),
    *(("long", f"{local}timestamp-{unit}") for local in ("", "local-") for unit in ("millis", "micros", "nanos")),
}
_PLAIN: Final = {
    "boolean": "boolean",
    "tinyint": "int",
    "smallint": "int",
    "int": "int",
    "bigint": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "bytes",
    "null": "null",
}


def schema_of(columns: Schema, name: str) -> str:
    """Return the JSON of the schema of rows with these columns. Every column may be null, and is so by default.

    `name`: of the record, with its namespace if it has one.
    """
    return msgspec.json.encode(_record(dict(columns.items()), name, "")).decode()


def record_name(text: str) -> str:
    """Return a name that Avro allows."""
    found = re.sub(r"[^A-Za-z0-9_]", "_", text)
    return found if _NAME.fullmatch(found) else f"_{found}"


def _record(columns: Mapping[str, DataType], name: str, path: str) -> dict[str, Any]:
    for column in columns:
        if not _NAME.fullmatch(column):
            raise AvroSchemaError(
                f"{f'{path}.' if path else ''}{column} is no name for a field of Avro, which has letters, digits and '_'. Rename it"
            )
    fields = [
        {"name": column, "type": _nullable(kind, f"{name}_{column}", f"{path}.{column}".strip(".")), "default": None}
        for column, kind in columns.items()
    ]
    return {"type": "record", "name": name, "fields": fields}


def _nullable(kind: DataType, name: str, path: str) -> Any:
    found = _json_type(kind, name, path)
    return found if found == "null" else ["null", found]


def _json_type(kind: DataType, name: str, path: str) -> Any:
    if kind.element is not None:
        return {"type": "array", "items": _nullable(kind.element, f"{name}_item", path)}
    if kind.name == "map":
        if kind.field("key").name != "string":
            raise AvroSchemaError(f"{path} is a {kind}, and the keys of a map of Avro are text")
        return {"type": "map", "values": _nullable(kind.field("value"), f"{name}_value", path)}
    if kind.name == "struct":
        return _record(dict(kind.fields), name, path)
    if kind.name == "decimal":
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if kind.name == "timestamp":
        return {"type": "long", "logicalType": "timestamp-micros"}
    if kind.name == "date":
        return {"type": "int", "logicalType": "date"}
    return _PLAIN[kind.name]


def _shown(given: Any) -> str:
    return repr(given)[:200]
