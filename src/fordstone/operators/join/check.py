"""What joins and lookups give: the columns of both sides, and the time of a pair.

Keys are compared in one type: equal types, or whole numbers of any width. A key column that has the same name on both
sides is one column of the result, in that type; every other column of the right side follows the left's, with a suffix
where the left has its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.duration import UNIT_US, human_us
from fordstone.lang.schema import DataType, Schema
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Derived, EventTime, StreamType, Types, append_only, needs_time, plain_keys

BOUND_MAX_US: Final = 1_000_000 * UNIT_US["d"]
"""Bounds of a join lie within so much of zero, about 2,700 years: what is added to a time must stay a time."""
_WIDTHS: Final = ("tinyint", "smallint", "int", "bigint")
_HOWS: Final = ("inner", "left", "right", "full")
_LOOKUP_HOWS: Final = ("inner", "left")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinColumns:
    """The columns of a join or a lookup."""

    schema: Schema
    """Of the result: the left columns, then the right ones."""
    key_types: tuple[DataType, ...]
    """In which keys are compared."""
    right: dict[str, str]
    """From the names of right columns to theirs in the result; those in `merged` are left out."""
    merged: dict[str, str]
    """Right key columns that are one with a left column: from their names to its."""


def join_columns(
    left: Schema, right: Schema, left_keys: Sequence[str], right_keys: Sequence[str], *, suffix: str
) -> JoinColumns:
    """Work out the columns. Raises `SchemaError` for keys that cannot be compared and names that clash."""
    if not left_keys:
        raise SchemaError('on= names no column. Name those that must be equal: on="device", or on={"device": "id"}.')
    if not isinstance(suffix, str):
        raise SchemaError(f"suffix={suffix!r} is not text.")
    for side, keys, schema in (("left", left_keys, left), ("right", right_keys, right)):
        plain_keys(keys, schema, what=f"on (the {side} side)")
    pairs = dict(zip(right_keys, left_keys, strict=True))
    types = tuple(_common(a, left[a], b, right[b]) for b, a in pairs.items())
    merged = {b: a for b, a in pairs.items() if a == b}
    columns = dict(left.items())
    columns |= {name: kind for name, kind in zip(left_keys, types, strict=True) if name in merged}
    taken: dict[str, str] = {}
    for name, kind in right.items():
        if name in merged:
            continue
        out = name if name not in left else name + suffix
        if out in columns:
            raise SchemaError(
                f"the right column {name!r} would become {out!r}, which is there already. "
                "Give another suffix=, or rename it with select first."
            )
        columns[out] = kind
        taken[name] = out
    return JoinColumns(schema=Schema.of(columns), key_types=types, right=taken, merged=merged)


def _common(left: str, one: DataType, right: str, other: DataType) -> DataType:
    """The type in which two keys are compared."""
    if one == other:
        return one
    if one.is_integer and other.is_integer:
        return max(one, other, key=lambda kind: _WIDTHS.index(kind.name))
    raise SchemaError(
        f"on: {left!r} has type {one} on the left and {right!r} has type {other} on the right. "
        f"Cast one of them first: .with_columns({f'CAST({right} AS {one}) AS {right}'!r})."
    )


def holds_us(step: p.Join) -> tuple[int, int]:
    """How long behind its own time a row of each side is kept: so long a partner may come, or a pair may."""
    return max(step.to_us, 0), max(-step.from_us, 0)


def derive_join(step: p.Join, types: Types) -> Derived:
    """The streams of an interval join, by port."""
    left, right = types[step.left], types[step.right]
    _check_how(step, _HOWS)
    for given, stream in ((step.left, left), (step.right, right)):
        append_only(step, stream, "a join")
        needs_time(step, stream, "a join", given=given)
    if step.from_us > step.to_us:
        raise PipelineError(
            f"step {step.name}: between=({human_us(step.from_us)!r}, {human_us(step.to_us)!r}) begins after it ends. "
            "The first is the least that may be added to the left time, the second the most."
        )
    if max(abs(step.from_us), abs(step.to_us)) > BOUND_MAX_US:
        raise PipelineError(
            f"step {step.name}: between reaches beyond {human_us(BOUND_MAX_US)}, further than times go. Use less."
        )
    columns = join_columns(left.schema, right.schema, step.left_keys, step.right_keys, suffix=step.suffix)
    main = StreamType(schema=columns.schema, time=pair_time(step, columns, left, right), row_wise=False)
    late = StreamType(schema=columns.schema, row_wise=False)
    return {p.Input(step.name): main, p.Input(step.name, "late"): late}


def pair_time(step: p.Join, columns: JoinColumns, left: StreamType, right: StreamType) -> EventTime | None:
    """The time of what a join gives: never below the watermark at which it is given out.

    A pair comes with the later of its rows. Where the bounds say which that is, its time is the pair's. Else it is the left
    time (in a right join: the right one) and as much as the other row may be later. A full join has none: either side of
    its rows may be missing.
    """
    if left.time is None or right.time is None or step.how == "full":
        return None
    left_hold_us, right_hold_us = holds_us(step)
    right_column = (columns.right | columns.merged)[right.time.column]
    if step.how == "right" or (step.how == "inner" and left_hold_us and not right_hold_us):
        return EventTime(column=right_column, shift_us=right.time.shift_us + right_hold_us)
    return EventTime(column=left.time.column, shift_us=left.time.shift_us + left_hold_us)


def derive_lookup(step: p.Lookup | p.LookupLatest, types: Types) -> Derived:
    """The streams of a lookup, by port."""
    stream = types[step.input]
    _check_how(step, _LOOKUP_HOWS)
    append_only(step, stream, "a lookup")
    if isinstance(step, p.Lookup):
        return {p.Input(step.name): _looked_up(step, stream)}
    control = types[step.control]
    if not control.table:
        append_only(step, control, "the control stream of join_latest")
    if stream.looped or control.looped:
        raise PipelineError(f"step {step.name}: join_latest cannot stand inside or below a loop.")
    columns = join_columns(stream.schema, control.schema, step.keys, step.control_keys, suffix=step.suffix)
    # Rows that wait for a barrier may be passed by the watermark meanwhile; and without a time of its own the control
    # stream holds the watermark back until it ends.
    # A control table has none either, but holds nobody back: a row of it counts from the barrier on at which it came.
    timed = not step.waits and (control.time is not None or control.table)
    return {
        p.Input(step.name): StreamType(
            schema=columns.schema,
            time=stream.time if timed else None,
            row_wise=control.table and stream.row_wise,
            looped=False,
        )
    }


def lookup_columns(step: p.Lookup, schema: Schema) -> JoinColumns:
    """The columns of a lookup in a table."""
    return join_columns(schema, Schema.of(step.schema), step.keys, step.table_keys, suffix=step.suffix)


def _looked_up(step: p.Lookup, stream: StreamType) -> StreamType:
    return StreamType(
        schema=lookup_columns(step, stream.schema).schema,
        time=stream.time,
        row_wise=stream.row_wise,
        windowed=stream.windowed,
        id_step=stream.id_step,
        looped=stream.looped,
    )


def _check_how(step: p.Join | p.Lookup | p.LookupLatest, known: Sequence[str]) -> None:
    if step.how not in known:
        raise PipelineError(f"step {step.name}: how={step.how!r}: it is {', '.join(map(repr, known))}.")
