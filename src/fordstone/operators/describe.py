"""Words that several families of operators describe their steps with, for `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fordstone.lang.duration import human_us
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime, Types

_FIRST_OPTIONS: Final = ("path", "url", "topic")
"""Shown without their name: they say which thing of its kind the connector means."""
_SECRETS: Final = ("password", "secret", "token", "credential")


def stream_details(
    step: p.AnyStep, types: Types, *, time: str | None = None, columns: bool = False
) -> Iterator[tuple[str, str]]:
    """What the step changes about its stream: columns, time, and whether rows replace each other.

    `time`: a text in place of the usual one; `columns`: show them even if they are those of the input.
    """
    stream = types[p.Input(step.name)]
    before = types[step.inputs[0]] if step.inputs else None
    if columns or before is None or before.schema != stream.schema:
        yield "columns", columns_text(stream.schema)
    if (before is None or before.time != stream.time) and not stream.table:
        yield "time", time_text(stream.time) if time is None else time
    if stream.upsert_key is not None and (before is None or before.upsert_key != stream.upsert_key):
        key = ", ".join(stream.upsert_key)
        yield "rows", f"replace each other by {key}" if key else "each replaces the one before"


def time_text(time: EventTime | None) -> str:
    """Where rows carry their time."""
    if time is None:
        return "none"
    return f"{time.column} + {human_us(time.shift_us)}" if time.shift_us > 0 else time.column


def columns_text(schema: Schema) -> str:
    """Columns with their types."""
    return ", ".join(f"{name} {kind}" for name, kind in schema.items())


def keys_text(keys: Sequence[str]) -> str:
    """By which columns a step takes rows together."""
    return f"for each {', '.join(keys)}" if keys else "over all rows"


def function_text(path: str) -> str:
    """A user's function by its path."""
    if not path.startswith(p.LOCAL_FUNCTION):
        return path
    return f"{path.split(':')[1]} (written in place: runs in this process only)"


def connector_text(spec: p.ConnectorSpec) -> str:
    """A connector as it would be written, secrets left out."""
    if spec.kind == "inline":
        rows = max((len(column) for column in spec.options.get("columns", {}).values()), default=0)
        return f"{rows} {'row' if rows == 1 else 'rows'} in the plan"
    shown = {
        name: "***" if any(word in name.lower() for word in _SECRETS) else value for name, value in spec.options.items()
    }
    first = [repr(shown.pop(name)) for name in _FIRST_OPTIONS if name in shown]
    return f"{spec.kind}({', '.join([*first, *(f'{name}={value!r}' for name, value in shown.items())])})"
