"""What may run below the cut although it was written above it, and how many bytes that saves (rule 9). Pure.

Row-wise, deterministic steps right after the cut move below it as far as less crosses. If an aggregate comes next whose
partial rows merge, all of them move, and partial rows cross. Each family judges its own steps; `split` carries it out.

Savings are estimated from the types of columns, before compression, for text and arrays by assumption. How many rows share a
key and an epoch is unknown, so the estimate says from how many on partial rows are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.partial import END
from fordstone.operators.base import Combines, Moves, Stays
from fordstone.operators.registry import family_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Types


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDown:
    """What goes below one cut."""

    steps: tuple[p.Step, ...]
    """As they were written, nearest to the cut first."""
    aggregate: p.Aggregate | None = None
    """Whose partial rows are made below, behind the steps."""
    partial: Schema | None = None
    """The columns of these."""
    reason: str
    """Why not more, as a clause."""


NOTHING: Final = PushDown(steps=(), reason="push-down is switched off")


def push_down(plan: p.Plan, types: Types, cut: p.ToCenter) -> PushDown:
    """Judge what comes after a cut of a checked plan."""
    passed: list[tuple[p.Step, Moves]] = []
    at = cut.name
    while True:
        readers = plan.consumers(at)
        if len(readers) != 1:
            return _trimmed(types, cut, passed, _several(at, [step.name for step, _ in readers]))
        step = readers[0][0]
        match family_of(step).push_down(step, plan, types):
            case Moves() as moves:
                passed.append((step, moves))
                at = step.name
            case Combines(schema=schema, step=aggregate):
                done = f"{step.name} is over the rows of all nodes, so its results, and what is made of them, are the center's"
                return PushDown(
                    steps=tuple(step for step, _ in passed), aggregate=aggregate, partial=schema, reason=done
                )
            case Stays(reason=reason):
                return _trimmed(types, cut, passed, reason)


def _trimmed(types: Types, cut: p.ToCenter, passed: list[tuple[p.Step, Moves]], reason: str) -> PushDown:
    """Without an aggregate at their end, steps move below the cut only as far as they make rows fewer, or narrower."""
    kept, width = 0, row_bytes(types[p.Input(cut.name)].schema)
    for count, (step, moves) in enumerate(passed, start=1):
        if moves.rows == "more":
            reason = f"{step.name} makes several rows of one, and {reason}"
            break
        found = row_bytes(types[p.Input(step.name)].schema)
        if moves.rows == "fewer" or found <= width:
            kept, width = count, found
    else:
        if kept < len(passed):
            reason = f"{passed[kept][0].name} would only make rows wider, and {reason}"
    return PushDown(steps=tuple(step for step, _ in passed[:kept]), reason=reason)


def _several(at: str, readers: list[str]) -> str:
    if not readers:
        return f"nothing of this pipeline reads {at} at the center: the rows are kept at the hub as they are"
    return f"{at} is read by {', '.join(readers)}, and each needs the rows"


TEXT_BYTES: Final = 16
ARRAY_ELEMENTS: Final = 8
SHARING_ROWS: Final = 100
"""An example of how many rows of an epoch share a key and window."""
_BYTES: Final = {
    "boolean": 1,
    "tinyint": 1,
    "smallint": 2,
    "int": 4,
    "bigint": 8,
    "float": 4,
    "double": 8,
    "string": TEXT_BYTES,
    "binary": TEXT_BYTES,
    "date": 4,
    "timestamp": 8,
    "null": 0,
    "decimal": 16,
}
_LATE_BYTES: Final = 1
"""Rows carry whether they are late."""
_HLL, _KLL, _ALL = "__hll", "__kll", "__all"
"""How columns of sketches and of lists of all values begin (`operators.distinct_part`, `quantile_part`, `order_parts`)."""


def column_bytes(kind: DataType) -> int:
    """About how wide a value is."""
    return ARRAY_ELEMENTS * column_bytes(kind.element) if kind.element is not None else _BYTES[kind.name]


def row_bytes(schema: Schema) -> int:
    """About how wide a row is that crosses."""
    return sum(map(column_bytes, schema.values())) + _LATE_BYTES


def partial_bytes(schema: Schema) -> int:
    """About how wide a partial row is, its sketches full."""
    return sum(_part_bytes(name, kind) for name, kind in schema.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What crosses for a row as it was written, and for what crosses in its place."""

    row: int
    crosses: int
    partial: bool
    """One for all rows of an epoch that share a key and window; else one a row."""
    collects: bool
    """Every value is in the partial rows all the same."""

    @property
    def pays_from(self) -> int:
        """From so many rows a key, window and epoch on, partial rows are fewer bytes than rows."""
        return self.crosses // self.row + 1

    def share(self, rows: int) -> float:
        """The part of the bytes that does not cross, when so many rows share a key, window and epoch; may be negative."""
        return 1 - self.crosses / (self.row * (rows if self.partial else 1))


def saving(before: Schema, crosses: Schema, *, partial: bool) -> Saving:
    """`before`: the columns at the cut as it was written."""
    return Saving(
        row=row_bytes(before),
        crosses=partial_bytes(crosses) if partial else row_bytes(crosses),
        partial=partial,
        collects=partial and any(name.startswith(_ALL) and kind.element is not None for name, kind in crosses.items()),
    )


def saving_words(found: Saving, crosses: Schema, *, filters: bool, explodes: bool) -> Iterator[str]:
    """Lines for a person: the figures, and what they assume. `explodes`: below the cut several rows are made of one."""
    if found.partial:
        sketches = any(name.startswith((_HLL, _KLL)) for name in crosses)
        yield f"a row is about {found.row} bytes, a partial row {'at most ' if sketches else ''}about {found.crosses:,}"
        if found.collects:
            yield "partial rows hold every value, so they save little: collecting is not summing up"
            return
        if explodes:
            yield "how many rows are made of one is not known here, so neither is from how many on that is less"
            return
        each = "key, window and epoch" if END in crosses else "key and epoch"
        less = _percent(found.share(SHARING_ROWS))
        if found.pays_from == 1:
            yield f"always fewer bytes; with {SHARING_ROWS} rows a {each}, {less}"
        else:
            latest = " at the latest" if sketches else ""
            yield f"fewer bytes from {found.pays_from:,} rows a {each} on{latest}; with {SHARING_ROWS} of them, {less}"
        return
    left_out = "the rows that filters below the cut leave out: how many is not known here"
    if found.crosses < found.row:
        yield f"a row is about {found.crosses} bytes instead of {found.row}: {_percent(found.share(1))}"
        if filters:
            yield f"and {left_out}"
    else:
        yield left_out if filters else f"nothing: a row is about {found.row} bytes"


def assumptions(schemas: list[Schema]) -> str:
    """What the figures rest on, in one line."""
    kinds = [kind for schema in schemas for kind in schema.values()]
    guessed = [f"text as {TEXT_BYTES} bytes"] if any(kind.name in {"string", "binary"} for kind in kinds) else []
    if any(kind.element is not None for kind in kinds):
        guessed.append(f"arrays as {ARRAY_ELEMENTS} elements")
    return f"estimated from the types of columns, before compression{''.join(f', {text}' for text in guessed)}"


def _part_bytes(name: str, kind: DataType) -> int:
    if name.startswith(_HLL):
        return 1 << int(name.removeprefix(_HLL).partition("_")[0])
    if name.startswith(_KLL) and kind.element is not None:
        # Levels have room for k, and two thirds of the level above: three k in all.
        return 3 * int(name.removeprefix(_KLL).partition("_")[0]) * column_bytes(kind.element)
    return column_bytes(kind)


def _percent(share: float) -> str:
    """Rounded down, so as not to promise."""
    return f"{math.floor(share * 100)} % less" if share >= 0 else f"{math.ceil(-share * 100)} % more"
