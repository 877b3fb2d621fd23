"""What joins and lookups give: the columns of both sides, and the time of a pair.

Keys are compared in one type: equal types, or whole numbers of any width. A key column that has the same name on both
sides is one column of the result, in that type; every other column of the right side follows the left's, with a suffix
where the left has its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fordstone.errors import PipelineError, SchemaError
from fordstone.lang.duration import UNIT_US
from fordstone.lang.schema import DataType, Schema
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime, StreamType, plain_keys

BOUND_MAX_US: Final = 1_000_000 * UNIT_US["d"]
"""Bounds of a join lie within so much of zero, about 2,700 years: what is added to a time must stay a time."""
_WIDTHS: Final = ("tinyint", "smallint", "int", "bigint")
HOWS: Final = ("inner", "left", "right", "full")
LOOKUP_HOWS: Final = ("inner", "left")


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


def lookup_columns(step: p.Lookup, schema: Schema) -> JoinColumns:
    """The columns of a lookup in a table."""
    return join_columns(schema, Schema.of(step.schema), step.keys, step.table_keys, suffix=step.suffix)


def check_how(step: p.Join | p.Lookup | p.LookupLatest, known: Sequence[str]) -> None:
    """Reject other ways to join than these."""
    if step.how not in known:
        raise PipelineError(f"step {step.name}: how={step.how!r}: it is {', '.join(map(repr, known))}.")


def keys_details(left: Sequence[str], right: Sequence[str], unmatched: str) -> Iterator[tuple[str, str]]:
    """Describe which columns must be equal, and what becomes of rows without a partner."""
    yield "on", ", ".join(one if one == other else f"{one} = {other}" for one, other in zip(left, right, strict=True))
    yield "unmet rows", unmatched
