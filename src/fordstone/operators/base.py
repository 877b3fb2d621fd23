"""The seams of operators: `Operator` runs one step on one subtask, `Family` is all that is known about one kind of step.

An operator is a columnar function of batches, watermarks and its own state. It has no access to tasks, threads, files or
engines: the same object runs in an edge task and inside Spark.

Invariants that every operator keeps: the rows emitted up to a barrier are a function of the rows received up to it (as a
multiset, whatever the batches), and of the watermark; an operator that loads the state frozen at a barrier continues as if
nothing had happened.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar

import msgspec
import numpy as np
import polars as pl

from fordstone.errors import PlanError
from fordstone.lang.duration import human_us
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Derived, EventTime, StreamType, Types
from fordstone.state.base import State, StateBackend
from fordstone.state.memory import IN_MEMORY

MAIN: Final = "main"
LATE: Final = "late"
FINAL: Final = "final"
"""Of windows with early results: the last result of each."""
ROW_ID: Final = "__id"
"""The id that a row carries on its way to a sink that releases at once: the same on every replay (rule 13)."""
ROW_WATERMARK: Final = "__watermark"
"""On rows that are below the watermark of their source partition: how far that had come when the row was read, Int64 (rule 6)."""
OP: Final = "__op"
"""On streams whose rows replace each other by key: what a row does to the one before it."""
UPSERT: Final = "upsert"
DELETE: Final = "delete"
IN_STEP: Final = "in step "
"""Begins the note to an exception that was raised in a step: engines take it for one that another try may not help."""


@dataclass(frozen=True, slots=True)
class Emit:
    """A batch that an operator emits, on one of its ports. `late`: as in `Operator.on_batch`."""

    frame: pl.DataFrame
    port: str = MAIN
    late: bool = False
    late_by_us: int = 0
    """On the late port: how much longer the lateness of the source would have had to be for all of these rows to count."""


Emits = list[Emit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The time by the clock at a barrier: the same for all steps of a pipeline, and recorded, so that a replay sees it again.

    Between barriers the clock stands still for operators. It never goes back.
    """

    now_us: int
    before_us: int
    """At the end of the epoch before; 0 in the first."""

    def passes(self, period_us: int) -> bool:
        """Whether a multiple of the period lies in this epoch: used to do something about once per period."""
        return self.now_us // period_us > self.before_us // period_us


class Operator(ABC):
    """One step on one subtask. Called by one thread at a time, in the order of the stream.

    The end of the input is no call of its own: the last watermark, `TIME_MAX_US`, and the last barrier come as any other.
    """

    @abstractmethod
    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Take a non-empty batch with the input schema's columns.

        `late`: all of its rows are below the watermark of their source partition, which `ROW_WATERMARK` holds for each. A
        window may still be open for them; steps that need rows in order emit them on the late port.
        """

    @abstractmethod
    def on_watermark(self, watermark_us: int) -> Emits:
        """No row below this time will follow, except in batches of `late` rows, whose own watermark is not below this either.

        Called only when it has grown; the last is `TIME_MAX_US`.
        """

    @abstractmethod
    def on_barrier(self, moment: Moment) -> Emits:
        """An epoch ends here: emit what is due once per epoch, or by the clock. State is frozen right after."""

    def clock_due_us(self) -> int | None:
        """From when on, by the clock, `on_barrier` has something to do although no row and no watermark came. Called after it.

        None, as it is for operators that do nothing by the clock: never. A pipeline in which nothing else happens has no barrier before.
        """
        return None

    @abstractmethod
    def states(self) -> Mapping[str, State]:
        """The states by name, always the same objects; empty for a stateless operator."""


class Stateless(Operator):
    """An operator whose output for a batch depends on that batch alone: `apply` gives the rows that come of rows, late ones as well."""

    def __init__(self, apply: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
        self._apply = apply

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        out = self._apply(frame)
        return [Emit(out, late=late)] if out.height else []

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - nothing waits for time here
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - nothing waits for the clock here
        return []

    def states(self) -> Mapping[str, State]:
        return {}


_AHEAD_US: Final = 2**62
"""Rows that are too far ahead of the clock have the last watermark of all: no lateness would be long enough for them."""


def late_emit(frame: pl.DataFrame, by_us: pl.Series) -> Emit:
    """Emit rows on the late port as they came. `by_us`: by how much each is too late; null for a row without a time."""
    known = by_us.filter(by_us < _AHEAD_US)
    return Emit(frame.drop(ROW_WATERMARK, strict=False), port=LATE, late_by_us=max(0, int(known.max() or 0)))  # type: ignore[arg-type]  # an Int64


def by_watermark(function: Callable[[pl.DataFrame], pl.DataFrame]) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Make a function of batches keep `ROW_WATERMARK`: it is called for the rows of each watermark apart.

    For functions that need not keep the number or the order of rows. Rows in time have no such column, and cost nothing more.
    """

    def apply(frame: pl.DataFrame) -> pl.DataFrame:
        if ROW_WATERMARK not in frame.columns:
            return function(frame)
        parts = frame.partition_by(ROW_WATERMARK, maintain_order=True, include_key=False, as_dict=True)
        made = [function(part) for part in parts.values()]
        # The column is added once for all parts: a query for each would cost more than most functions.
        watermarks = np.repeat([us for (us,) in parts], [rows.height for rows in made])
        return pl.concat(made).with_columns(pl.Series(ROW_WATERMARK, watermarks, dtype=pl.Int64))

    return apply


def pass_on(frame: pl.DataFrame) -> pl.DataFrame:
    """Give rows on as they are."""
    return frame


Functions = Mapping[str, Callable[..., Any]]
ReadTable = Callable[[p.ConnectorSpec, Schema], pl.DataFrame]
"""Gives all rows that a connector has, as bounded input."""


class RefreshedTable(Protocol):
    """The table of a lookup that is read again while the pipeline runs."""

    def at(self, now_us: int) -> pl.DataFrame:
        """Return its rows at the barrier of this time, and until the next: the same ones each time, on every subtask."""

    def refresh(self, now_us: int) -> None:
        """Begin to read it, if it is time, on another thread. Called at barriers."""

    def due_us(self) -> int | None:
        """Return when it is time again; None: it is not read again."""


OpenTable = Callable[[p.Lookup, Callable[[pl.DataFrame], pl.DataFrame]], RefreshedTable]
"""Gives the refreshed table of a step. The function checks what was read, and puts it in order."""


def no_tables(spec: p.ConnectorSpec, schema: Schema) -> pl.DataFrame:
    """Raises: for contexts in which operators are described but not run."""
    raise PlanError(f"nothing here can read {spec.kind} with columns {', '.join(schema)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorContext:
    """What beside the step itself decides how it runs."""

    plan: p.Plan
    types: Mapping[p.Input, StreamType]
    functions: Functions = field(default_factory=dict)
    read_table: ReadTable = no_tables
    """How lookups read their tables: connectors are a layer above operators, so the engine hands this in."""
    open_table: OpenTable | None = None
    """How lookups read the tables that are refreshed; None: that is not possible here."""
    began_us: int = 0
    """The time at the barrier from whose checkpoint operators begin; 0: from none."""
    state: StateBackend = IN_MEMORY
    """Makes the states of operators."""
    backends: Mapping[p.StateKind, StateBackend] = field(default_factory=dict)
    """By where a step keeps its state; what is missing is made by `state`."""
    with_ids: frozenset[str] = frozenset()
    """Steps whose rows must carry ids, because a sink releases them at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The step may run below the cut. `rows`: whether it makes as many rows as it reads, fewer, or more."""

    rows: Literal["same", "fewer", "more"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combines:
    """Partial rows of the step may be made below the cut, with these columns; the step itself merges them at the center."""

    step: p.Aggregate
    schema: Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays:
    """The step runs where it was written. `reason`: why, as a clause."""

    reason: str


S = TypeVar("S", bound=p.AnyStep)


class Family(ABC, Generic[S]):
    """All that is known about one kind of plan step: check, make, describe, digest and push-down.

    One instance serves all steps of its kinds, in every pipeline; it has no state of its own. `registry.FAMILIES` lists the
    families, and `planner`, the edge engine and the Spark host ask `registry.family_of`.
    """

    steps: ClassVar[tuple[type[p.AnyStep], ...]]
    """The classes of steps that this family serves."""
    fed: ClassVar[bool] = False
    """Whether an operator runs before the shuffle into every step of the family."""
    stays: ClassVar[str]
    """Why its steps never run below the cut, as a clause about `{step}`; a family whose steps may overrides `push_down`."""

    @abstractmethod
    def check(self, step: S, types: Types) -> Derived:
        """Return the streams of the step by port; raise `PipelineError` or `SchemaError` if it cannot read its inputs.

        Called for every step when the pipeline is built and when a plan is read, after the steps that it reads from.
        """

    def check_plan(self, step: S, plan: p.Plan, types: Types) -> None:
        """Raise `PipelineError` for what depends on more than the inputs: mode, guarantee, other steps."""

    @abstractmethod
    def make(self, step: S, context: OperatorContext) -> Operator:
        """Make a fresh operator for one subtask of a checked step."""

    def has_feeder(self, step: S, plan: p.Plan) -> bool:  # noqa: ARG002 - as most steps
        """Whether an operator runs before the shuffle into the step."""
        return self.fed

    def make_feeder(self, step: S, index: int, context: OperatorContext) -> Operator | None:  # noqa: ARG002 - as most steps
        """Make the stateless operator that runs before the shuffle into input `index`; None: rows are sent as they are."""
        return None

    @abstractmethod
    def title(self, step: S) -> str:
        """Describe in a few words what the step does, for `explain`."""

    def describe(self, step: S, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - as most steps
        """Describe the step for `explain`: labels and texts. By default only what it changes about its stream."""
        return stream_details(step, types)

    def digest(self, step: S, types: Types) -> object:
        """Return what the state of the step depends on, as plain values; None: it keeps none.

        Stored state is refused if this changes. By default it is all of a keyed step but names, and the columns it reads:
        rows that wait have all columns, and their order decides which of equal time comes first.
        """
        if step.shuffles is None:
            return None
        read = [(list(types[at].schema.to_dict().items()), types[at].time) for at in step.inputs]
        # What becomes of rows that fail changes no state.
        names = [name for name in step.__struct_fields__ if name not in {"name", "on_error"}]
        fields = {name: getattr(step, name) for name in names}
        own = {name: msgspec.to_builtins(value) for name, value in fields.items() if not isinstance(value, p.Input)}
        return [{"op": step.__struct_config__.tag, **own}, read]

    def push_down(self, step: S, plan: p.Plan, types: Types) -> Moves | Combines | Stays:  # noqa: ARG002 - as most steps
        """Judge whether the step, written right above the cut between edge and center, may run below it (rule 9)."""
        return Stays(reason=self.stays.format(step=step.name))

    def columns_read(self, step: S, schema: Schema, needed: Callable[[], frozenset[str]]) -> frozenset[str]:  # noqa: ARG002 - as most steps
        """Return the columns of its input that the step needs: the others need not cross. By default all.

        `needed` returns the columns of the step's output that are read. A step that keeps whole rows needs all columns.
        """
        return frozenset(schema)


def resolve_function(path: str, known: Functions) -> Callable[..., Any]:
    """The function of that path: as this process knows it, or imported."""
    if path in known:
        return known[path]
    if path.startswith(p.LOCAL_FUNCTION):
        raise PlanError(
            f"function {path.split(':')[1]} was written in place (a lambda, or inside another function or the main script), "
            "so only the process that built the pipeline has it. Move it to the top level of a module to deploy it."
        )
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"function {path} cannot be imported: {error}. Put its module on the path of this process."
        ) from error
    if not callable(found):
        raise PlanError(f"{path} is not a function. Check what the module has under that name.")
    return found  # type: ignore[no-any-return]  # callable, checked above


_FIRST_OPTIONS: Final = ("path", "url", "topic", "table")
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
        yield "columns", ", ".join(f"{name} {kind}" for name, kind in stream.schema.items())
    if (before is None or before.time != stream.time) and not stream.table:
        yield "time", time_text(stream.time) if time is None else time
    if stream.upsert_key is not None and (before is None or before.upsert_key != stream.upsert_key):
        key = ", ".join(stream.upsert_key)
        yield "rows", f"replace each other by {key}" if key else "each replaces the one before"


def time_text(time: EventTime | None) -> str:
    """Where rows carry their time."""
    if time is None:
        return "none"
    # The result of a window counts as its last instant: a microsecond, which is not shown.
    shift_us = time.shift_us + (time.shift_us % 1000 == 999)  # noqa: PLR2004 - as above
    return f"{time.column} + {human_us(shift_us)}" if shift_us > 0 else time.column


def keys_text(keys: Sequence[str]) -> str:
    """By which columns a step takes rows together."""
    return f"for each {', '.join(keys)}" if keys else "over all rows"


def function_text(path: str) -> str:
    """A user's function by its path."""
    if not path.startswith(p.LOCAL_FUNCTION):
        return path
    return f"{path.split(':')[1]} (defined in place: cannot be found from another program)"


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
