"""Cut a plan for two tiers into two ordinary plans: one for every node, one for the center (rule 9). Pure.

Names of steps stay, since state belongs to them. Row-wise, deterministic steps right after the cut move below it as far as less
crosses. If an aggregate comes next whose partial rows merge, all of them move, and partial rows cross. Each family judges its
own steps. Columns that no step reads do not cross. Both plans are checked by `stream_types`.

Savings are estimated from the types of columns, before compression, for text and arrays by assumption. How many rows share a key
and an epoch is unknown, so the estimate says from how many on partial rows are smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from fordstone.connectors.base import Capability
from fordstone.connectors.registry import capabilities
from fordstone.hub.client.address import FROM_EARLIEST, HubAddress
from fordstone.lang.dialect import quoted_name
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.partial import END
from fordstone.operators.base import Combines, Moves, Stays
from fordstone.operators.registry import family_of
from fordstone.plan import plan as p
from fordstone.plan.ids import free_name
from fordstone.plan.stream_type import StreamType, Types
from fordstone.planner.check import stream_types


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDown:
    """What goes below one cut."""

    steps: tuple[p.Step, ...]
    """As they were written, nearest to the cut first."""
    aggregate: p.Aggregate | None = None
    """Whose partial rows are made below, after the steps."""
    partial: Schema | None = None
    """The columns of these."""
    reason: str
    """Why not more, as a clause."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(step.name for step in self.steps)


NOTHING: Final = PushDown(steps=(), reason="push-down is switched off")


def push_down(plan: p.Plan, types: Types, cut: p.ToCenter) -> PushDown:
    """Judge what comes after a cut of a checked plan."""
    passed: list[tuple[p.Step, Moves]] = []
    at = cut.name
    while True:
        readers = plan.consumers(at)
        if not readers:
            kept = f"nothing of this pipeline reads {at} at the center: the rows are kept at the hub as they are"
            return _trimmed(types, cut, passed, kept)
        if len(readers) > 1:
            names = ", ".join(step.name for step, _ in readers)
            return _trimmed(types, cut, passed, f"{at} is read by {names}, and each needs the rows")
        step = readers[0][0]
        match family_of(step).push_down(step, plan, types):
            case Moves() as moves:
                passed.append((step, moves))
                at = step.name
            case Combines(schema=schema, step=aggregate):
                done = f"{step.name} aggregates the rows of all nodes, so it and the steps after it run at the center"
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
_WATERMARK_BYTES: Final = 1
"""Rows carry their watermark, if they are below it: mostly a null."""
_HLL, _KLL, _ALL = "__hll", "__kll", "__all"
"""How columns of sketches and of lists of all values begin (`operators.aggregate.sketches`, `operators.aggregate.part`)."""


def column_bytes(kind: DataType) -> int:
    """About how wide a value is."""
    if kind.is_nested:
        elements = 1 if kind.name == "struct" else ARRAY_ELEMENTS
        return elements * sum(map(column_bytes, kind.parts))
    return _BYTES[kind.name]


def row_bytes(schema: Schema) -> int:
    """About how wide a row is that crosses."""
    return sum(map(column_bytes, schema.values())) + _WATERMARK_BYTES


def partial_bytes(schema: Schema) -> int:
    """About how wide a partial row is, its sketches full."""
    return sum(_part_bytes(name, kind) for name, kind in schema.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What crosses for a row as it was written, and for what crosses in its place."""

    row: int
    crosses: int
    partial: bool
    """One for all rows of an epoch that share a key and window; else one per row."""
    collects: bool
    """Every value is in the partial rows all the same."""

    @property
    def pays_from(self) -> int:
        """Least number of rows per key, window and epoch at which partial rows are fewer bytes than rows."""
        return self.crosses // self.row + 1

    def share(self, rows: int) -> float:
        """The part of the bytes that does not cross, when this number of rows shares a key, window and epoch; may be negative."""
        return 1 - self.crosses / (self.row * (rows if self.partial else 1))


def saving(before: Schema, crosses: Schema, *, partial: bool) -> Saving:
    """`before`: the columns at the cut as it was written."""
    return Saving(
        row=row_bytes(before),
        crosses=partial_bytes(crosses) if partial else row_bytes(crosses),
        partial=partial,
        collects=partial and any(name.startswith(_ALL) and kind.element is not None for name, kind in crosses.items()),
    )


def describe_saving(found: Saving, crosses: Schema, *, filters: bool, explodes: bool) -> Iterator[str]:
    """Lines for `explain`: the figures, and what they assume. `explodes`: a `flat_map` below the cut makes several rows of one."""
    if found.partial:
        sketches = any(name.startswith((_HLL, _KLL)) for name in crosses)
        yield f"a row is about {found.row} bytes, a partial row {'at most ' if sketches else ''}about {found.crosses:,}"
        if found.collects:
            yield "partial rows hold every value, so they save little"
            return
        if explodes:
            yield "the number of rows that flat_map makes of one is unknown, so the saving cannot be estimated"
            return
        each = "key, window and epoch" if END in crosses else "key and epoch"
        less = _percent(found.share(SHARING_ROWS))
        if found.pays_from == 1:
            yield f"always fewer bytes; with {SHARING_ROWS} rows per {each}, {less}"
        else:
            latest = " at the latest" if sketches else ""
            yield f"fewer bytes from {found.pays_from:,} rows per {each} on{latest}; with {SHARING_ROWS} of them, {less}"
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
    has_text = any(part.name in {"string", "binary"} for kind in kinds for part in kind.within())
    guessed = [f"text as {TEXT_BYTES} bytes"] if has_text else []
    if any(kind.contains("array") or kind.contains("map") for kind in kinds):
        guessed.append(f"arrays and maps as {ARRAY_ELEMENTS} elements")
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


def columns_read(plan: p.Plan, types: Types, stream: p.Input) -> tuple[str, ...]:
    """The columns of a stream that its readers need, in their order: never none, and the time is always among them."""
    given = types[stream]
    needed = _needed(plan, types, stream)
    if given.time is not None:
        needed = needed | {given.time.column}
    return tuple(name for name in given.schema if name in needed) or given.schema.names()[:1]


def _needed(plan: p.Plan, types: Types, stream: p.Input) -> frozenset[str]:
    readers = [step for step, read in plan.consumers(stream.step) if read.port == stream.port]
    schema = types[stream].schema
    if not readers or any(plan.has_late_reader(step.name) for step in readers):
        return frozenset(schema)  # other readers of the hub's stream, and of late rows, may need any column

    def read(step: p.Step) -> frozenset[str]:
        return family_of(step).columns_read(step, schema, lambda: _needed(plan, types, p.Input(step.name)))

    return frozenset[str]().union(*map(read, readers))


STEM_MAX: Final = 80
"""Maximum number of characters of a step's name in the name of a step made for it: names have a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The two halves of a plan."""

    edge: p.Plan
    center: p.Plan | None
    """None: nothing of the pipeline runs at the center."""
    crossings: tuple[Crossing, ...]


def split(plan: p.Plan, *, push_down: bool = True) -> Tiers:
    """Cut a plan. One that is not for two tiers is all edge. Raises `PipelineError` as `stream_types` does.

    Without `push_down` the cut is where it was written, and rows cross with all their columns: to see what they are, and what
    push-down saves. Edge and center have to be cut alike.
    """
    types = stream_types(plan)
    if not plan.tiered:
        return Tiers(edge=plan, center=None, crossings=())
    taken = {step.name for step in plan.steps}
    cuts = [
        Crossing.of(plan, types, step, taken if push_down else None)
        for step in plan.steps
        if isinstance(step, p.ToCenter)
    ]
    edge = _edge(plan, types, {cut.step.name: cut for cut in cuts})
    center = _center(plan, types, {cut.step.name: cut for cut in cuts})
    for half in (edge, center):
        if half is not None:
            stream_types(half)
    return Tiers(edge=edge, center=center, crossings=tuple(cuts))


def _new_name(stem: str, what: str, taken: set[str]) -> str:
    name = free_name(f"{stem[:STEM_MAX]}_{what}", taken)
    taken.add(name)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One cut, with all that is decided about it. The hub's stream has the name of the `to_center` step."""

    step: p.ToCenter
    pushed: PushDown
    before: Schema
    """The columns at the cut, as it was written."""
    crosses: StreamType
    """Rows as they cross, or those that partial rows are made of."""
    below: tuple[p.Step, ...]
    """The steps between the cut's input and its sink, in their order."""

    @classmethod
    def of(cls, plan: p.Plan, types: Types, step: p.ToCenter, taken: set[str] | None) -> Crossing:
        """`taken`: names that the steps made by push-down cannot have; None: nothing is pushed down."""
        if taken is None:
            here = types[p.Input(step.name)]
            return cls(step=step, pushed=NOTHING, before=here.schema, crosses=here, below=())
        pushed = push_down(plan, types, step)
        last = p.Input(pushed.steps[-1].name if pushed.steps else step.name)
        rows = types[last]
        # The first that moves reads what the cut read; the others read each other, as before.
        below: list[p.Step] = [
            msgspec.structs.replace(moved, input=step.input) if not at else moved
            for at, moved in enumerate(pushed.steps)
        ]
        last_below = p.Input(below[-1].name) if below else step.input
        if pushed.aggregate is not None and pushed.partial is not None:
            made = pushed.aggregate
            below.append(
                p.Combine(
                    name=_new_name(made.name, "partials", taken),
                    input=last_below,
                    keys=made.keys,
                    window=made.window,
                    aggregates=made.aggregates,
                    schema=pushed.partial.to_dict(),
                    allowed_lateness_us=made.allowed_lateness_us,
                )
            )
        else:
            columns = columns_read(plan, types, last)
            if len(columns) < len(rows.schema):
                listed = tuple(quoted_name(name) for name in columns)
                below.append(p.Select(name=_new_name(step.name, "columns", taken), input=last_below, columns=listed))
                kept = Schema(tuple((name, rows.schema[name]) for name in columns))
                rows = StreamType(schema=kept, time=rows.time)
        return cls(step=step, pushed=pushed, before=types[p.Input(step.name)].schema, crosses=rows, below=tuple(below))

    @property
    def partial(self) -> bool:
        """Partial rows cross, not rows."""
        return self.pushed.partial is not None

    @property
    def pruned(self) -> tuple[str, ...]:
        """The columns that do not cross as they stood at the cut, because no step above reads them."""
        return () if self.partial else tuple(name for name in self.before if name not in self.schema)

    @property
    def schema(self) -> Schema:
        """The columns that cross; beside them rows carry their watermark, if they are below it."""
        return self.crosses.schema if self.pushed.partial is None else self.pushed.partial

    def sink(self) -> p.Sink:
        end = p.Input(self.below[-1].name) if self.below else self.step.input
        connector = p.ConnectorSpec("center", {"stream": self.step.name, "offline_us": self.step.offline_us})
        return p.Sink(name=self.step.name, input=end, connector=connector, tier="center")

    def source(self, pipeline: str) -> p.Source:
        time = None if self.pushed.partial is not None else self.crosses.time
        connector = p.ConnectorSpec("hub", {"pipeline": pipeline, "stream": self.step.name})
        return p.Source(
            name=self.step.name,
            connector=connector,
            schema=self.schema.to_dict(),
            time=None if time is None else time.column,
            shift_us=0 if time is None else time.shift_us,
            lateness_us=0,
            idle_after_us=self.step.offline_us,
            declares_time=Capability.DECLARES_TIME in capabilities(connector),
        )

    def merging(self) -> p.Aggregate | None:
        """The aggregate that merges what crosses, if partial rows do."""
        found, rows = self.pushed.aggregate, self.crosses
        if found is None:
            return None
        time = rows.time
        below = p.RowsBelow(
            schema=rows.schema.to_dict(),
            time=None if time is None else time.column,
            shift_us=0 if time is None else time.shift_us,
        )
        return msgspec.structs.replace(found, input=p.Input(self.step.name), merges=below)


def _edge(plan: p.Plan, types: Types, cuts: Mapping[str, Crossing]) -> p.Plan:
    steps: list[p.Step] = []
    for step in plan.steps:
        if isinstance(step, p.ToCenter):
            steps += [*cuts[step.name].below, cuts[step.name].sink()]
        elif isinstance(step, p.Control):
            if plan.consumers(step.name):  # else no node need have a copy
                steps.append(_control_source(step))
        elif not types[p.Input(step.name)].central:
            steps.append(step)
    return msgspec.structs.replace(plan, steps=tuple(steps))


def _control_source(step: p.Control) -> p.Source:
    return p.Source(
        name=step.name,
        connector=p.ConnectorSpec("control", {"control": step.name, "keys": list(step.keys)}),
        schema=step.schema,
        replaces=step.keys,
    )


def _center(plan: p.Plan, types: Types, cuts: Mapping[str, Crossing]) -> p.Plan | None:
    moved = {step.name: cut.step.name for cut in cuts.values() for step in cut.pushed.steps}
    merging = {found.name: found for cut in cuts.values() if (found := cut.merging()) is not None}
    keys = {step.name: step.keys for step in plan.steps if isinstance(step, p.Control)}
    steps: list[p.Step] = []
    for step in plan.steps:
        if not types[p.Input(step.name)].central or step.name in moved:
            continue
        if isinstance(step, p.ToCenter):
            if plan.consumers(step.name):  # else it ends at the hub
                steps.append(cuts[step.name].source(plan.pipeline))
        elif isinstance(step, p.ToEdges):
            options = {"pipeline": plan.pipeline, "control": step.control, "keys": list(keys[step.control])}
            at = _read_from(step.input, moved)
            connector = p.ConnectorSpec("control", options)
            steps.append(p.Sink(name=step.name, input=at, connector=connector, tier="edges"))
        else:
            steps.append(merging[step.name] if step.name in merging else _rewired(step, moved))
    return msgspec.structs.replace(plan, steps=tuple(steps)) if steps else None


def _read_from(stream: p.Input, moved: Mapping[str, str]) -> p.Input:
    """What stands below now crosses in the place of the cut."""
    return p.Input(moved[stream.step], stream.port) if stream.step in moved else stream


def _rewired(step: p.Step, moved: Mapping[str, str]) -> p.Step:
    changed: dict[str, object] = {}
    for field in step.__struct_fields__:
        value = getattr(step, field)
        if isinstance(value, p.Input):
            changed[field] = _read_from(value, moved)
        elif isinstance(step, p.Union) and field == "streams":
            changed[field] = tuple(_read_from(stream, moved) for stream in step.streams)
    return msgspec.structs.replace(step, **changed)


def placed(plan: p.Plan, hub: HubAddress, *, from_earliest: bool = False) -> p.Plan:
    """The plan with the hub's address in every connector that goes there. Called once, right before a run.

    `from_earliest`: sources of which nothing was read begin with the earliest epochs that the hub keeps.
    """
    at = hub.at() | ({FROM_EARLIEST: "true"} if from_earliest else {})
    return msgspec.structs.replace(plan, steps=tuple(_placed(step, at) for step in plan.steps))


def _placed(step: p.Step, at: dict[str, str]) -> p.Step:
    if not isinstance(step, p.Source | p.Sink) or Capability.AT_HUB not in capabilities(step.connector):
        return step
    return msgspec.structs.replace(step, connector=msgspec.structs.replace(step.connector, at=at))
