"""What is known of a stream before a row has moved, and what several kinds of steps ask of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.choices import did_you_mean
from fordstone.lang.schema import DataType, Schema
from fordstone.plan import plan as p

TIMESTAMP: Final = DataType("timestamp")
WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"
"""Columns that windows add to their results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTime:
    """Where a stream's rows carry their time: a column, and what to add to it."""

    column: str
    shift_us: int = 0
    also: EventTime | None = field(default=None, compare=False)
    """Another column that gives the same time: of windows of one length, their start. Two times are equal without regard to it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns each of which gives the time."""
        return (self.column,) if self.also is None else (self.column, self.also.column)

    @property
    def alone(self) -> EventTime:
        """The time without the other column."""
        return EventTime(column=self.column, shift_us=self.shift_us)

    def passed(self, names: Mapping[str, str]) -> EventTime | None:
        """Return the time after a projection that passes columns on under these names; None: none of its columns is."""
        also = None if self.also is None else self.also.passed(names)
        if self.column not in names:
            return also
        return EventTime(column=names[self.column], shift_us=self.shift_us, also=also)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamType:
    """What is known of a stream before a row has moved."""

    schema: Schema
    time: EventTime | None = None
    upsert_key: tuple[str, ...] | None = None
    """None: an append stream. Else rows replace each other by this key."""
    row_wise: bool = True
    """Every row comes of one input row, by position: it can be given an id that a replay gives again."""
    windowed: bool = False
    """Every row is the result of one key and window, which identify it: it has the same id on a replay."""
    looped: bool = False
    """Inside or below a loop: there is no event time here."""
    central: bool = False
    """Above the cut: at the center."""
    table: bool = False
    """A control table: only lookups may read it."""
    late: bool = False
    """Rows that were late for a step: time has passed them, so they have no event time any more."""


Types = Mapping[p.Input, StreamType]
Derived = dict[p.Input, StreamType]


def key_columns(keys: Sequence[str], schema: Schema, *, what: str = "group_by") -> dict[str, str | DataType]:
    """The key columns with their types, once it is clear that they exist."""
    for key in keys:
        if key not in schema:
            hint = did_you_mean(key, schema) or f"Columns are: {', '.join(schema)}."
            made = "" if key.isidentifier() else " Make a column of an expression first, with with_columns(...)."
            raise SchemaError(f"{what}: there is no column {key!r}. {hint}{made}")
    if len(set(keys)) < len(keys):
        raise SchemaError(f"{what} names a column twice: {', '.join(keys)}. Name each once.")
    return {key: schema[key] for key in keys}


def plain_keys(keys: Sequence[str], schema: Schema, *, what: str = "group_by") -> None:
    """Refuse keys that do not exist, or that no table can be kept by."""
    for key in key_columns(keys, schema, what=what):
        if schema[key].is_nested:
            kind = schema[key]
            hint = {
                "struct": f" Use its fields: {key}.{kind.fields[0][0] if kind.fields else ''}",
                "map": " Use a value of it",
            }
            raise SchemaError(
                f"{what}: column {key!r} is {kind}, which cannot be a key.{hint.get(kind.name, ' Use an element')}, in a column of its own."
            )


def late_rows(step: p.Step, stream: StreamType) -> Derived:
    """The late port of a step: rows as they came."""
    return {p.Input(step.name, "late"): replace(stream, time=None, row_wise=False, windowed=False, late=True)}


def needs_time(step: p.Step, stream: StreamType, what: str, *, given: p.Input | None = None) -> EventTime:
    """The time of a step's input (`given`: which one, if there are several)."""
    given = step.inputs[0] if given is None else given
    if stream.looped:
        raise PipelineError(f"step {step.name}: {what} needs event time, and there is none inside or below a loop.")
    if stream.time is None and stream.late:
        raise PipelineError(
            f"step {step.name}: {what} needs event time, and {given} has late rows, which have none any more: time has passed them, so "
            "it would be too late for them here as well. Write them to a sink, or aggregate them without a window. To have fewer of them, "
            "raise lateness= at the source."
        )
    if stream.time is None:
        raise PipelineError(
            f"step {step.name}: {what} needs event time, and {given} has none. "
            'Declare it at the source (time="ts") and keep that column on the way, or assign it with .with_time(expression).'
        )
    return stream.time


def append_only(step: p.Step, stream: StreamType, what: str) -> None:
    """Refuse rows that replace each other (rule 8)."""
    if stream.upsert_key is not None:
        raise PipelineError(
            f"step {step.name}: {what} cannot take rows that replace each other by key "
            f"({', '.join(stream.upsert_key)}), as running results do. "
            "Filters, selects that keep the key, and sinks can. "
            "After a window with early= or allowed_lateness=, .final() has only the last result of each; other windows have no others."
        )


def shown(schema: Schema) -> str:
    """A schema in an error or a description."""
    return ", ".join(f"{name} {kind}" for name, kind in schema.items())
