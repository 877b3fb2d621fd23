"""Column types and schemas, by Spark's names.

A schema is an ordered mapping of column names to types. Both engines get their own types from here and nowhere else.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
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
}
_INTEGERS: Final = ("tinyint", "smallint", "int", "bigint")
_DECIMAL = re.compile(r"decimal\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?")
DECIMAL_DIGITS_MAX: Final = 38


@dataclass(frozen=True, slots=True)
class DataType:
    """One column type. `str(t)` is its name, and `DataType.parse(str(t)) == t`."""

    name: str
    precision: int = 0
    scale: int = 0
    element: DataType | None = None

    @classmethod
    def parse(cls, text: str) -> DataType:
        """Read a type by name: `"double"`, `"decimal(10,2)"`, `"array<string>"`."""
        name = " ".join(text.strip().lower().split())
        if name.startswith("array<") and name.endswith(">"):
            return cls("array", element=cls.parse(name[6:-1]))
        if (decimal := _DECIMAL.fullmatch(name)) is not None:
            precision = int(decimal[1]) if decimal[1] else 10
            scale = int(decimal[2]) if decimal[2] else 0
            if not (1 <= precision <= DECIMAL_DIGITS_MAX and 0 <= scale <= precision):
                raise SchemaError(f"type {text!r}: a decimal has 1 to 38 digits, at most all of them after the point.")
            return cls("decimal", precision=precision, scale=scale)
        name = _ALIASES.get(name, name)
        if name not in _POLARS:
            known = ", ".join([*_POLARS, "decimal(p,s)", "array<type>"])
            raise SchemaError(f"unknown type {text!r}. Types are: {known}.")
        return cls(name)

    @classmethod
    def from_polars(cls, dtype: pl.DataType | type[pl.DataType]) -> DataType:
        """The type of a Polars column, where there is one of the same meaning."""
        if isinstance(dtype, pl.List | pl.Array):
            return cls("array", element=cls.from_polars(dtype.inner))  # type: ignore[arg-type]
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
        if self.name == "decimal":
            return pl.Decimal(self.precision, self.scale)
        return _POLARS[self.name]

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
        return f"decimal({self.precision},{self.scale})" if self.name == "decimal" else self.name


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
    def of(cls, columns: Mapping[str, str | DataType]) -> Schema:
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
            if not isinstance(kind, str | DataType):
                raise SchemaError(f"column {name!r}: {_type_advice(kind)}")
            fields.append((name, kind if isinstance(kind, DataType) else DataType.parse(kind)))
        if not fields:
            raise SchemaError("a schema has at least one column.")
        return cls(tuple(fields))

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
