"""Column types and schemas, by Spark's names.

A schema is an ordered mapping of column names to types. Both engines get their own types from here and nowhere else. Types are
read from text as Spark writes them: `struct<a: double, b: array<string>>` and `map<string, double>` too.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Final

import polars as pl

from fordstone.errors import SchemaError

RESERVED_PREFIX: Final = "__"
"""Columns that begin so are ours (ids, partial aggregates)."""

_POLARS: Final[dict[str, pl.DataType]] = {
    "boolean": pl.Boolean(),
    "tinyint": pl.Int8(),
    "smallint": pl.Int16(),
    "int": pl.Int32(),
    "bigint": pl.Int64(),
    "float": pl.Float32(),
    "double": pl.Float64(),
    "string": pl.String(),
    "binary": pl.Binary(),
    "date": pl.Date(),
    "timestamp": pl.Datetime("us", "UTC"),
    "null": pl.Null(),
}
_ALIASES: Final = {
    "bool": "boolean",
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "str": "string",
    "text": "string",
    "varchar": "string",
    "bytes": "binary",
    "datetime": "timestamp",
}
_PYTHON_TYPES: Final[dict[type, str]] = {
    bool: "boolean",
    int: "bigint",
    float: "double",
    str: "string",
    bytes: "binary",
    dt.date: "date",
    dt.datetime: "timestamp",
    Decimal: "decimal(10,2)",
    dict: "map<string, string>",
    list: "array<double>",
}
_INTEGERS: Final = ("tinyint", "smallint", "int", "bigint")
DECIMAL_DIGITS_MAX: Final = 38
TYPE_DEPTH_MAX: Final = 32
"""Maximum number of types inside each other."""
_KNOWN: Final = ", ".join([*_POLARS, "decimal(p,s)", "array<type>", "map<type, type>", "struct<name: type, ...>"])
_WORD: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)")
_FIELD: Final = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^\s:,<>()`]+))\s*(:?)")
_DIGITS: Final = re.compile(r"\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)")
_PLAIN_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class DataType:
    """One column type. `str(t)` is its name, and `DataType.parse(str(t)) == t`."""

    name: str
    precision: int = 0
    scale: int = 0
    element: DataType | None = None
    """Of an array."""
    fields: tuple[tuple[str, DataType], ...] = ()
    """Of a struct; a map has the two fields `key` and `value`."""

    @classmethod
    def parse(cls, text: str) -> DataType:
        """Read a type: `"double"`, `"decimal(10,2)"`, `"array<string>"`, `"struct<a: double, b: map<string, int>>"`."""
        reader = _TypeText(text)
        found = reader.type()
        reader.expect_end()
        return found

    @classmethod
    def of(cls, given: TypeLike | object) -> DataType:
        """A type from its text, or from a dict of the fields of a struct. Raises `SchemaError` for anything else."""
        if isinstance(given, DataType):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, Mapping):
            return struct_of({name: cls.of(kind) for name, kind in given.items()})
        raise SchemaError(_type_advice(given))

    @classmethod
    def from_polars(cls, dtype: pl.DataType | type[pl.DataType]) -> DataType:
        """The type of a Polars column, where there is one of the same meaning."""
        if isinstance(dtype, pl.List | pl.Array):
            return cls("array", element=cls.from_polars(dtype.inner))  # type: ignore[arg-type]
        if isinstance(dtype, pl.Map):
            return map_of(cls.from_polars(dtype.key), cls.from_polars(dtype.value))  # type: ignore[arg-type]
        if isinstance(dtype, pl.Struct):
            return struct_of({field.name: cls.from_polars(field.dtype) for field in dtype.fields})  # type: ignore[arg-type]
        if isinstance(dtype, pl.Decimal):
            return cls("decimal", precision=dtype.precision or DECIMAL_DIGITS_MAX, scale=dtype.scale)
        if isinstance(dtype, pl.Datetime):
            return cls("timestamp")
        for name, known in _POLARS.items():
            if dtype == known:
                return cls(name)
        raise SchemaError(
            f"Polars type {dtype} has no counterpart here; cast the column to one of {', '.join(_POLARS)}."
        )

    @property
    def polars(self) -> pl.DataType:
        """The Polars type that columns of this type have on the edge."""
        if self.element is not None:
            return pl.List(self.element.polars)
        if self.name == "map":
            return pl.Map(self.field("key").polars, self.field("value").polars)
        if self.name == "struct":
            return pl.Struct({name: kind.polars for name, kind in self.fields})
        if self.name == "decimal":
            return pl.Decimal(self.precision, self.scale)
        return _POLARS[self.name]

    def field(self, name: str) -> DataType:
        """The type of a field. Raises `KeyError` if there is none of this name."""
        return dict(self.fields)[name]

    @property
    def is_nested(self) -> bool:
        """Whether values have parts: arrays, maps and structs."""
        return self.element is not None or bool(self.fields)

    @property
    def parts(self) -> tuple[DataType, ...]:
        """The types directly inside this one."""
        return tuple(kind for _, kind in self.fields) if self.element is None else (self.element,)

    def within(self) -> Iterator[DataType]:
        """This type, and all types inside it."""
        yield self
        for part in self.parts:
            yield from part.within()

    def contains(self, name: str) -> bool:
        """Whether this is a type of this name, or has one inside."""
        return any(kind.name == name for kind in self.within())

    @property
    def is_integer(self) -> bool:
        return self.name in _INTEGERS

    @property
    def is_float(self) -> bool:
        return self.name in {"float", "double"}

    @property
    def is_numeric(self) -> bool:
        return self.is_integer or self.is_float or self.name == "decimal"

    def __str__(self) -> str:
        if self.element is not None:
            return f"array<{self.element}>"
        if self.name == "map":
            return f"map<{self.field('key')}, {self.field('value')}>"
        if self.name == "struct":
            return f"struct<{', '.join(f'{_field_text(name)}: {kind}' for name, kind in self.fields)}>"
        return f"decimal({self.precision},{self.scale})" if self.name == "decimal" else self.name


TypeLike = str | DataType | Mapping[str, "TypeLike"]
"""How a type is given: by its text, or a struct by a dict of its fields."""


def struct_of(fields: Mapping[str, DataType]) -> DataType:
    """A struct with these fields. Raises `SchemaError` for what no engine could name."""
    if not fields:
        raise SchemaError("a struct has at least one field: struct<name: type>.")
    for name in fields:
        if not isinstance(name, str) or not name:
            raise SchemaError(f"field {name!r}: a name is a non-empty string.")
    return DataType("struct", fields=tuple(fields.items()))


def map_of(key: DataType, value: DataType) -> DataType:
    """A map. Raises `SchemaError` if keys of this type have no order or no equality that engines agree on."""
    if key.is_nested or key.name == "null":
        raise SchemaError(f"the keys of a map are plain values, such as text or numbers, and not {key}.")
    return DataType("map", fields=(("key", key), ("value", value)))


def _field_text(name: str) -> str:
    return name if _PLAIN_FIELD.fullmatch(name) else "`" + name.replace("`", "``") + "`"


class _TypeText:
    """Reads types from text, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def type(self, depth: int = 1) -> DataType:
        found = _WORD.match(self._text, self._at)
        if found is None or depth > TYPE_DEPTH_MAX:
            raise self._fail("types are nested too deeply" if found else "a type is missing")
        self._at = found.end()
        word = found[1].lower()
        if word == "array" and self._take("<"):
            return self._closed(DataType("array", element=self.type(depth + 1)))
        if word == "map" and self._take("<"):
            key = self.type(depth + 1)
            if not self._take(","):
                raise self._fail("a map has a key and a value: map<string, double>")
            return self._closed(map_of(key, self.type(depth + 1)))
        if word == "struct" and self._take("<"):
            return self._closed(struct_of(self.columns(depth + 1)))
        if word in {"decimal", "dec", "numeric"}:
            return self._decimal()
        name = _ALIASES.get(word, word)
        if name not in _POLARS:
            near = get_close_matches(word, [*_POLARS, *_ALIASES, "decimal", "array", "map", "struct"], n=1, cutoff=0.7)
            hint = f"Did you mean {near[0]}? " if near and near[0] != word else ""
            raise SchemaError(f"unknown type {found[1]!r}{self._where(found[1])}. {hint}Types are: {_KNOWN}.")
        return DataType(name)

    def columns(self, depth: int = 1) -> dict[str, DataType]:
        """Names with their types, separated by commas."""
        found: dict[str, DataType] = {}
        while True:
            field = _FIELD.match(self._text, self._at)
            if field is None:
                raise self._fail("a name with its type is missing, such as a: double")
            self._at = field.end()
            name = field[2] or field[1].replace("``", "`")
            if name in found:
                raise self._fail(f"two are named {name!r}")
            found[name] = self.type(depth)
            if not self._take(","):
                return found

    def expect_end(self) -> None:
        if rest := self._text[self._at :].strip():
            raise self._fail(f"{rest!r} was not expected")

    def _decimal(self) -> DataType:
        precision, scale = 10, 0
        if (digits := _DIGITS.match(self._text, self._at)) is not None:
            self._at = digits.end()
            precision, scale = int(digits[1]), int(digits[2] or 0)
        if not (1 <= precision <= DECIMAL_DIGITS_MAX and 0 <= scale <= precision):
            raise self._fail("a decimal has 1 to 38 digits, at most all of them after the point")
        return DataType("decimal", precision=precision, scale=scale)

    def _closed(self, kind: DataType) -> DataType:
        if not self._take(">"):
            raise self._fail("'>' is missing")
        return kind

    def _take(self, mark: str) -> bool:
        rest = self._text[self._at :].lstrip()
        if not rest.startswith(mark):
            return False
        self._at = len(self._text) - len(rest) + len(mark)
        return True

    def _where(self, word: str) -> str:
        return f" in {self._text!r}" if self._text.strip() != word else ""

    def _fail(self, message: str) -> SchemaError:
        return SchemaError(f"type {self._text!r}: {message}.")


BOOLEAN: Final = DataType("boolean")
INT: Final = DataType("int")
BIGINT: Final = DataType("bigint")
DOUBLE: Final = DataType("double")
STRING: Final = DataType("string")
BINARY: Final = DataType("binary")
DATE: Final = DataType("date")
TIMESTAMP: Final = DataType("timestamp")
NULL: Final = DataType("null")


class ClashError(Exception):
    """Types that do not go together. `argument` is which one is at fault, if it is one."""

    def __init__(self, message: str, argument: int | None = None) -> None:
        self.message = message
        self.argument = argument
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Schema(Mapping[str, DataType]):
    """An ordered mapping of column name to type."""

    columns: tuple[tuple[str, DataType], ...]

    @classmethod
    def of(cls, columns: Mapping[str, TypeLike]) -> Schema:
        """Check and build a schema from names and types."""
        if not isinstance(columns, Mapping):
            raise SchemaError(
                f"{columns!r} is not a schema. Give names and types: {{'device': 'string', 'temp': 'double'}}."
            )
        fields = []
        for name, kind in columns.items():
            if not isinstance(name, str) or not name:
                raise SchemaError(f"column {name!r}: a column name is a non-empty string.")
            if name.startswith(RESERVED_PREFIX):
                raise SchemaError(f"column {name!r}: names that begin with {RESERVED_PREFIX!r} are reserved.")
            if name == "*" or (name.startswith("^") and name.endswith("$")):
                raise SchemaError(
                    f"column {name!r}: Polars would take this name for a pattern of names. Choose another."
                )
            try:
                fields.append((name, DataType.of(kind)))
            except SchemaError as error:
                raise SchemaError(f"column {name!r}: {error}") from None
        if not fields:
            raise SchemaError("a schema has at least one column.")
        return cls(tuple(fields))

    @classmethod
    def parse(cls, text: str) -> Schema:
        """Read columns as Spark writes them: `device string, sensor struct<name: string, temp: double>`."""
        reader = _TypeText(text)
        columns = reader.columns()
        reader.expect_end()
        return cls.of(columns)

    @classmethod
    def stored(cls, columns: Mapping[str, str]) -> Schema:
        """Read a schema back that may have columns of our own: partial aggregates have."""
        return cls(tuple((name, DataType.parse(kind)) for name, kind in columns.items()))

    @property
    def polars(self) -> pl.Schema:
        """The same as a Polars schema."""
        return pl.Schema({name: kind.polars for name, kind in self.columns})

    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.columns)

    def to_dict(self) -> dict[str, str]:
        """Names to type names: what stands in a plan."""
        return {name: str(kind) for name, kind in self.columns}

    def empty(self) -> pl.DataFrame:
        return pl.DataFrame(schema=self.polars)

    def __repr__(self) -> str:
        return f"Schema({', '.join(f'{name} {kind}' for name, kind in self.columns)})"

    def __getitem__(self, name: str) -> DataType:
        for column, kind in self.columns:
            if column == name:
                return kind
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.columns)


def _type_advice(given: object) -> str:
    """What to write in place of something that is no type by name."""
    if isinstance(given, type) and given in _PYTHON_TYPES:
        return f"write the type by its name in Spark: {_PYTHON_TYPES[given]!r} for {given.__name__}."
    if isinstance(given, pl.DataType) or (isinstance(given, type) and issubclass(given, pl.DataType)):
        return f"write the type by its name in Spark: {str(DataType.from_polars(given))!r} for {given}."
    return (
        f"{given!r} is not a type. Types are written by their name in Spark, such as 'string', 'double' or 'timestamp'."
    )
