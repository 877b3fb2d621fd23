"""About how many bytes cross: an estimate from the types of columns, with what it assumes said in words.

Nothing is measured here. Widths are those of values in memory, before compression; of text, bytes and arrays only an
assumption is possible. How many rows share a key and an epoch is unknown, so what is given is from how many on it pays.

What may run below the cut although it was written above it, and why no more may (rule 9).

From the cut upwards: row-wise steps that give the same for the same row go below, as far as that makes less cross. Where an
aggregate comes next whose partial rows merge, they all go below, and rows become partial rows. Pure; `split` carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fordstone.errors import SchemaError
from fordstone.lang.expression import Expression, parse_predicate
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.combine import crossing_schema
from fordstone.operators.aggregate.partial import END
from fordstone.operators.base import OperatorContext
from fordstone.operators.rowwise import exploded_columns, projection
from fordstone.operators.window.registry import combines, partials_of
from fordstone.plan import plan as p
from fordstone.plan import windows as w
from fordstone.plan.stream_type import Types

Movable = p.Filter | p.Select | p.WithColumns | p.Explode


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDown:
    """What goes below one cut."""

    steps: tuple[Movable, ...]
    """As they were written, nearest to the cut first."""
    aggregate: p.Aggregate | None = None
    """Whose partial rows are made below, behind the steps."""
    partial: Schema | None = None
    """The columns of these."""
    reason: str
    """Why not more, as a clause."""


NOTHING: Final = PushDown(steps=(), reason="push-down is switched off")


def push_down(plan: p.Plan, types: Types, cut: p.ToCenter) -> PushDown:
    """Judge what stands above a cut of a checked plan."""
    passed: list[Movable] = []
    at = cut.name
    while True:
        readers = plan.consumers(at)
        if len(readers) != 1:
            return _trimmed(types, cut, passed, _several(at, [step.name for step, _ in readers]))
        step = readers[0][0]
        if isinstance(step, p.Aggregate):
            found = _partial(plan, types, step)
            if isinstance(found, Schema):
                done = f"{step.name} is over the rows of all nodes, so its results, and what is made of them, are the center's"
                return PushDown(steps=tuple(passed), aggregate=step, partial=found, reason=done)
            return _trimmed(types, cut, passed, found)
        if not isinstance(step, Movable):
            return _trimmed(types, cut, passed, _stays(step))
        if not all(column.deterministic for column in _expressions(step, types)):
            return _trimmed(types, cut, passed, f"{step.name} may give something else for the same row")
        passed.append(step)
        at = step.name


def _expressions(step: Movable, types: Types) -> list[Expression]:
    schema = types[step.input].schema
    match step:
        case p.Filter():
            return [parse_predicate(step.predicate, schema)]
        case p.Explode():
            return [exploded_columns(step, schema)[0]]
        case _:
            return projection(step, schema)


def _trimmed(types: Types, cut: p.ToCenter, passed: list[Movable], reason: str) -> PushDown:
    """Without an aggregate at their end, steps go below only as far as they make rows fewer, or narrower."""
    kept, width = 0, row_bytes(types[p.Input(cut.name)].schema)
    for count, step in enumerate(passed, start=1):
        if isinstance(step, p.Explode):
            reason = f"{step.name} makes several rows of one, and {reason}"
            break
        found = row_bytes(types[p.Input(step.name)].schema)
        if isinstance(step, p.Filter) or found <= width:
            kept, width = count, found
    else:
        if kept < len(passed):
            reason = f"{passed[kept].name} would only make rows wider, and {reason}"
    return PushDown(steps=tuple(passed[:kept]), reason=reason)


def _several(at: str, readers: list[str]) -> str:
    if not readers:
        return f"nothing of this pipeline reads {at} at the center: the rows are kept at the hub as they are"
    return f"{at} is read by {', '.join(readers)}, and each needs the rows"


def _partial(plan: p.Plan, types: Types, step: p.Aggregate) -> Schema | str:
    """The columns of an aggregate's partial rows, or why there may be none."""
    match step.window:
        case w.Session():
            return f"the sessions of {step.name} need the rows themselves: where one ends is known only over all nodes"
        case w.Count():
            return f"the windows of {step.name} count rows in order of time, over all nodes"
        case _:
            pass
    if not combines(step, plan):
        return f"late rows of {step.name} are wanted as they came"
    try:
        return crossing_schema(partials_of(step, OperatorContext(plan=plan, types=types)))
    except SchemaError as error:
        return f"partial rows of {step.name} cannot cross: {error}"


def _stays(step: p.Step) -> str:  # noqa: PLR0912 - one line a kind of step
    """Why a step stays where it was written."""
    match step:
        case p.Function():
            return f"{step.name} is a function of yours: who wrote it above the cut may count on running there"
        case p.Process():
            return f"{step.name} is a function of yours with state by key, over the rows of all nodes"
        case p.Ewma():
            return f"{step.name} takes rows in order of time, over all nodes"
        case p.Match():
            return f"the pattern {step.name} takes rows in order of time, over all nodes"
        case p.Deduplicate():
            return f"{step.name} drops what another node may have sent before"
        case p.Join():
            return f"{step.name} joins rows that other nodes may have"
        case p.Lookup():
            return f"{step.name} reads a table at the center"
        case p.LookupLatest():
            return f"{step.name} looks rows up in a stream at the center"
        case p.Union():
            return f"{step.name} unites it with other streams"
        case p.Loop():
            return f"{step.name} begins a loop at the center"
        case p.Sink():
            return f"{step.name} writes the rows themselves"
        case p.ToEdges():
            return f"{step.name} publishes the rows themselves"
        case _:
            return f"{step.name} stands at the center"


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
