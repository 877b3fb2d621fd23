"""Our column types as Delta's, in the JSON form that stands in a table's log."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fordstone.errors import SinkError
from fordstone.model.schema import DataType, Schema

ID: Final = "__id"
"""The id of a row that was let out at once; a table has such a column once there was one."""
_NAMES: Final = {
    "boolean": "boolean",
    "tinyint": "byte",
    "smallint": "short",
    "int": "integer",
    "bigint": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamp",
}


def delta_schema(schema: Schema, *, step: str) -> str:
    """The schema of a new table."""
    folded: dict[str, str] = {}
    for name in schema:
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise SinkError(
                f"sink {step}: columns {other!r} and {name!r} differ in case only, which Delta does not tell apart. Rename one."
            )
    fields = [
        {"name": name, "type": _type(kind, name, step), "nullable": True, "metadata": {}}
        for name, kind in schema.items()
    ]
    return msgspec.json.encode({"type": "struct", "fields": fields}).decode()


def column_names(table_schema: str) -> list[str]:
    """The columns of a table, in order."""
    return [field["name"] for field in msgspec.json.decode(table_schema)["fields"]]


def schema_difference(table_schema: str, schema: Schema, *, step: str) -> str | None:
    """Where a table differs from what a sink writes, in words; None if rows fit. Order and nullability do not count."""
    there = {field["name"]: _plain(field["type"]) for field in msgspec.json.decode(table_schema)["fields"]}
    for name, kind in schema.items():
        wanted = _plain(_type(kind, name, step))
        if name not in there:
            return f"the table has no column {name!r}; it has {', '.join(there)}"
        if there[name] != wanted:
            return f"column {name!r} is {_shown(there[name])} in the table, and {_shown(wanted)} ({kind}) in the stream"
    extra = [name for name in there if name not in schema and not (name == ID and there[name] == "string")]
    return f"the table has a column {extra[0]!r}, which the stream has not" if extra else None


def _type(kind: DataType, column: str, step: str) -> Any:
    if kind.element is not None:
        return {"type": "array", "elementType": _type(kind.element, column, step), "containsNull": True}
    if kind.name == "decimal":
        return f"decimal({kind.precision},{kind.scale})"
    if kind.name not in _NAMES:
        raise SinkError(
            f"sink {step}: Delta has no type for column {column!r}, which is {kind}. Cast it, or leave it out."
        )
    return _NAMES[kind.name]


def _plain(kind: Any) -> Any:
    """A type without what does not count: whether elements may be null, and metadata."""
    if isinstance(kind, dict):
        kept = {name: part for name, part in kind.items() if name not in {"containsNull", "metadata", "nullable"}}
        return {name: _plain(part) for name, part in kept.items()}
    return [_plain(part) for part in kind] if isinstance(kind, list) else kind


def _shown(kind: Any) -> str:
    if isinstance(kind, dict) and kind.get("type") == "array":
        return f"array<{_shown(kind['elementType'])}>"
    return kind if isinstance(kind, str) else str(kind.get("type", kind))
