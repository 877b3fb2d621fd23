"""The plan: the checked, serialisable form of a pipeline. JSON, with no code inside.

A plan is a list of steps, each after its inputs (except a loop's feedback). Expressions are canonical SQL text; functions are
import paths. `planner.check` derives the stream of each step and rejects what cannot run. The steps between edge and center are
replaced by `planner.split`: no engine ever runs one.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final, Literal

import msgspec

from fordstone.errors import PlanError

Port = Literal["main", "late", "timeout", "final"]


class ConnectorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which system, and how: what a plan states of the external end of a source or a sink."""

    kind: str
    options: dict[str, Any] = {}
    at: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Where this run finds it, and what opens it: addresses, tokens. No part of what a plan means: neither stored nor compared."""

    def __repr__(self) -> str:
        # Without what opens it: this comes into logs and tracebacks.
        at = "" if self.at is msgspec.UNSET else f", at={self.at.get('url', '...')!r}"
        return f"ConnectorSpec(kind={self.kind!r}, options={self.options!r}{at})"


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream that a step reads: a step's output, or another of its ports.

    `late`: rows that came too late. `timeout`: candidates of patterns that timed out. `final`: of a window with early
    results, the last result of each.
    """

    step: str
    port: Port = "main"

    def __str__(self) -> str:
        return self.step if self.port == "main" else f"{self.step}.{self.port}"


class AnyStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", kw_only=True):
    """A named node of the graph."""

    name: str

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The streams this step reads, feedback left out."""
        found = getattr(self, "input", None)
        return () if found is None else (found,)

    @property
    def shuffles(self) -> tuple[tuple[str, ...], ...] | None:
        """For each input the columns by which its rows are brought together; None: this step takes rows where they are.

        Where a feeder runs before the shuffle (`operators.registry.make_feeder`), these are columns that it makes.
        """
        return None

    @property
    def has_dead_letters(self) -> bool:
        """Whether the step may set rows aside as dead letters."""
        return False

    @property
    def keyed_by(self) -> tuple[tuple[str, ...], ...]:
        """For each input the columns by which its rows are brought together, as the user named them."""
        return self.shuffles or ((),) * len(self.inputs)

    @property
    def table_inputs(self) -> tuple[Input, ...]:
        """The inputs that may be control tables."""
        return ()


class KeyedByColumns(AnyStep, frozen=True, kw_only=True):
    """A step with state by key: all rows of a key come to one subtask. Without keys there is one subtask."""

    keys: tuple[str, ...]

    @property
    def shuffles(self) -> tuple[tuple[str, ...], ...] | None:
        return (self.keys,)


def join_keys(count: int) -> tuple[str, ...]:
    """The key columns on the way to a step that joins two streams, whatever they are called in each."""
    return tuple(f"__k{index}" for index in range(count))


# Windows by time are closed-open; tumbling and sliding ones are aligned to the UTC epoch.


class Tumbling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tumbling"):
    """Windows [s, s + size), s a multiple of size from the UTC epoch, shifted by offset."""

    size_us: int
    offset_us: int = 0


class Sliding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sliding"):
    """Windows [s, s + size), s a multiple of slide from the UTC epoch, shifted by offset. A slide above the size leaves gaps."""

    size_us: int
    slide_us: int
    offset_us: int = 0


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="session"):
    """Rows of a key that follow each other by less than the gap. The window is [first, last + gap)."""

    gap_us: int


class Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="count"):
    """`size` rows of a key in order of time; the next window begins `slide` rows later. From first row to last, both included."""

    size: int
    slide: int


Window = Tumbling | Sliding | Session | Count


def panes(window: Sliding) -> Tumbling:
    """The pieces of time that rows of sliding windows are kept by: each window is a whole number of them.

    Windows that do not overlap are one piece each, with the gap after them.
    """
    overlap = window.slide_us < window.size_us
    size_us = math.gcd(window.size_us, window.slide_us) if overlap else window.slide_us
    return Tumbling(size_us=size_us, offset_us=window.offset_us % size_us)


class UserAggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of a user by its import path, what it is over, what it keeps and what it gives."""

    path: str
    arguments: tuple[str, ...]
    state: dict[str, str]
    result: str


class NamedAggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output column of an aggregate step: an aggregate expression, or a user's own aggregate over expressions."""

    name: str
    sql: str
    """For a user's own only what is shown."""
    user: UserAggregate | None = None


OFFLINE_US: Final = 24 * 3600 * 1_000_000
CENTER_EARLY_US: Final = 1_000_000
"""Default interval of provisional results of windows above the cut."""


class ToCenter(AnyStep, frozen=True, tag="to_center", kw_only=True):
    """The cut: rows on their way from the edge to the center."""

    input: Input
    offline_us: int = OFFLINE_US
    """A node that has been away for longer no longer holds time back at the center."""


class Control(AnyStep, frozen=True, tag="control", kw_only=True):
    """A table that the center keeps and every node has a copy of: rows replace each other by key."""

    schema: dict[str, str]
    keys: tuple[str, ...]


class ToEdges(AnyStep, frozen=True, tag="to_edges", kw_only=True):
    """Rows of the center that become rows of a control table."""

    input: Input
    control: str


class RowsBelow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What rows looked like before partial rows were made of them: aggregates are about their columns."""

    schema: dict[str, str]
    time: str | None = None
    shift_us: int = 0
    """What is added to the time column."""


class Combine(KeyedByColumns, frozen=True, tag="combine", kw_only=True):
    """Below the cut: at each barrier one partial row for each key and window (or pane) that changed in the epoch (rule 9).

    All rows of a key come to one subtask, so that an epoch has the same partial rows when it is computed again (rule 1).
    """

    input: Input
    window: Window | None
    aggregates: tuple[NamedAggregate, ...]
    schema: dict[str, str]
    """Of the partial rows."""
    allowed_lateness_us: int = 0
    """As in the aggregate at the center."""


PLAN_VERSION: Final = 1
Guarantee = Literal["exactly_once", "at_least_once", "at_most_once"]
Mode = Literal["aligned", "unaligned", "blocking"]
Release = Literal["commit", "at_once"]
StateKind = Literal["memory", "file", "rocksdb"]
"""Where the edge engine keeps the state of a step: all of it in memory; what waits for time in files; or tables in RocksDB as well."""
OnError = Literal["keep", "fail"]
OnFunctionError = Literal["fail", "dead_letter"]
"""What becomes of a row for which a user's function raises: it stops the pipeline, or goes to the dead letters."""

JoinHow = Literal["inner", "left", "right", "full"]
Contiguity = Literal["next", "then", "any"]
"""How a row follows one before it: at once; with others between; or with others between, even those that would fit."""

LOCAL_FUNCTION: Final = "<local>"
"""Begins the path of a function that cannot be imported: it runs in the process that built the pipeline only."""


class Source(AnyStep, frozen=True, tag="source", kw_only=True):
    """Rows from outside."""

    connector: ConnectorSpec
    schema: dict[str, str]
    time: str | None = None
    shift_us: int = 0
    """What is added to the time column: rows of windows, when they cross, count as the last instant of theirs."""
    timed_by: str | None = None
    """The `with_time` step that gives the rows their time, if `time` does not; the next four are about its time then."""
    lateness_us: int = 0
    max_ahead_us: int | None = None
    """Rows further ahead of the clock than this are late, and move no time on (rule 7); None: no row is."""
    idle_after_us: int | None = None
    checks_time_unit: bool = False
    """Times that make sense only in another unit stop the pipeline (`protocol.time_unit`)."""
    on_error: OnError = "keep"
    declares_time: bool = False
    """The external end declares the watermark and by which watermark rows are judged; then `time` may be None although the watermark advances."""
    replaces: tuple[str, ...] = ()
    """Rows replace each other by these columns, and carry what they do (`__op`)."""

    @property
    def has_dead_letters(self) -> bool:
        return True


class Filter(AnyStep, frozen=True, tag="filter", kw_only=True):
    """The rows for which a condition is true."""

    input: Input
    predicate: str


class Select(AnyStep, frozen=True, tag="select", kw_only=True):
    """New columns in place of the old."""

    input: Input
    columns: tuple[str, ...]


class WithColumns(AnyStep, frozen=True, tag="with_columns", kw_only=True):
    """New columns beside the old; one of the same name is replaced."""

    input: Input
    columns: tuple[str, ...]


class WithTime(AnyStep, frozen=True, tag="with_time", kw_only=True):
    """A column that is the event time of the rows from here on. Their source names this step: `Source.timed_by`."""

    input: Input
    expression: str


class Explode(AnyStep, frozen=True, tag="explode", kw_only=True):
    """A row for each element of an array expression, beside the other columns."""

    input: Input
    expression: str


class Function(AnyStep, frozen=True, tag="function", kw_only=True):
    """A user's function: of one record (`map`), of one to many (`flat_map`), or of a batch (`map_batches`)."""

    input: Input
    kind: Literal["map", "flat_map", "map_batches"]
    path: str
    schema: dict[str, str]
    on_error: OnFunctionError = "fail"

    @property
    def has_dead_letters(self) -> bool:
        return self.on_error == "dead_letter"


class Union(AnyStep, frozen=True, tag="union", kw_only=True):
    """The rows of several streams of one schema."""

    streams: tuple[Input, ...]

    @property
    def inputs(self) -> tuple[Input, ...]:
        return self.streams


class Aggregate(KeyedByColumns, frozen=True, tag="aggregate", kw_only=True):
    """One row per key and window, or without a window one row per key, kept up to date."""

    input: Input
    window: Window | None = None
    aggregates: tuple[NamedAggregate, ...]
    early_us: int | None = None
    """Interval of provisional results by the clock; then rows replace each other by key and window."""
    allowed_lateness_us: int = 0
    """How long after its end a window is kept for late rows; then, too, rows replace each other by key and window."""
    ttl_us: int | None = None
    """Without a window: a key without a row for this long, in event time, is forgotten. None: never."""
    merges: RowsBelow | None = None
    """The input is partial rows, which a `Combine` made of such rows; None: it is rows."""

    @property
    def needs_rows(self) -> bool:
        """Whether partial rows are not enough: which rows belong together depends on the rows between them."""
        return isinstance(self.window, Session | Count) or self.ttl_us is not None


class Ewma(KeyedByColumns, frozen=True, tag="ewma", kw_only=True):
    """The rows of each key in order of time, each with exponentially weighted means of all up to it."""

    input: Input
    alpha: float | None = None
    half_life_us: int | None = None
    """Exactly one of the two is given: the weight of the newest value, or after how long a value counts half."""
    columns: tuple[str, ...]


class Deduplicate(KeyedByColumns, frozen=True, tag="deduplicate", kw_only=True):
    """Rows of each key in order of time, without those that follow one that was kept by less than `within`."""

    input: Input
    within_us: int


class Distinct(KeyedByColumns, frozen=True, tag="distinct", kw_only=True):
    """Each row once. The keys are all columns."""

    input: Input


class Over(KeyedByColumns, frozen=True, tag="over", kw_only=True):
    """The rows of each key in order of time, each with aggregates over a frame of rows up to it."""

    input: Input
    frame: Literal["rows", "range"] = "rows"
    """Whether a frame is counted in rows, or in time; by time, the rows of its last time belong to it."""
    preceding: int | None = None
    """From how many rows, or microseconds, before a row its frame begins; None: at the first row."""
    aggregates: tuple[NamedAggregate, ...]
    order: tuple[str, ...] = ()
    """Columns, after the time, that rows are ordered by before all others."""


class SortKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An expression that rows are sorted by, in SQL, and how."""

    sql: str
    descending: bool = False
    nulls_first: bool = True


Numbering = Literal["row_number", "rank", "dense_rank"]


class Top(KeyedByColumns, frozen=True, tag="top", kw_only=True):
    """The first rows of each key in an order, each with its number: of each window, or of all rows so far.

    If the keys have the window of the rows (a column that gives the event time), the numbers are final when the window has closed.
    """

    input: Input
    n: int | None
    """None: all rows are numbered."""
    by: tuple[SortKey, ...]
    numbering: Numbering = "row_number"
    """What rows that are equal in `by` get: different numbers, one number with a gap after it, or one number without."""
    column: str = "rank"
    """The column of the numbers."""


class Join(AnyStep, frozen=True, tag="join", kw_only=True):
    """Pairs of rows of equal keys with right time between left time + from and left time + to, both included."""

    left: Input
    right: Input
    left_keys: tuple[str, ...]
    right_keys: tuple[str, ...]
    from_us: int
    to_us: int
    how: JoinHow = "inner"
    suffix: str = "_right"
    """What is added to the names of right columns that the left has too."""

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.left, self.right)

    @property
    def shuffles(self) -> tuple[tuple[str, ...], ...] | None:
        return (join_keys(len(self.left_keys)),) * 2

    @property
    def keyed_by(self) -> tuple[tuple[str, ...], ...]:
        return (self.left_keys, self.right_keys)


class Lookup(AnyStep, frozen=True, tag="lookup", kw_only=True):
    """Rows with the columns of the row of a table that has their key. The table is read when the pipeline starts."""

    input: Input
    table: ConnectorSpec
    schema: dict[str, str]
    """The table's columns."""
    keys: tuple[str, ...]
    """Columns of the stream."""
    table_keys: tuple[str, ...]
    how: Literal["inner", "left"] = "left"
    suffix: str = "_right"
    refresh_us: int | None = None
    """The table is read again at a barrier after this time. None: it is read once."""


class LookupLatest(AnyStep, frozen=True, tag="lookup_latest", kw_only=True):
    """Rows with the columns of the newest row of a control stream that has their key."""

    input: Input
    control: Input
    keys: tuple[str, ...]
    control_keys: tuple[str, ...]
    how: Literal["inner", "left"] = "left"
    suffix: str = "_right"
    waits: bool = True
    """Rows wait for the end of their epoch and see its control rows; else they go on at once, and see those of epochs before."""

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.input, self.control)

    @property
    def shuffles(self) -> tuple[tuple[str, ...], ...] | None:
        return (join_keys(len(self.keys)),) * 2

    @property
    def keyed_by(self) -> tuple[tuple[str, ...], ...]:
        return (self.keys, self.control_keys)

    @property
    def table_inputs(self) -> tuple[Input, ...]:
        return (self.control,)


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One part of a pattern: rows that fulfil a condition, and how they follow the rows before."""

    name: str
    predicate: str | None = None
    """SQL. `b.x` is column x of the last row taken by stage b; aggregates of a stage, such as `avg(b.x)`, too. None: any row."""
    follows: Contiguity = "then"
    """How the first row of this stage follows the row taken before it. Of a negated stage: next or then."""
    times_min: int = 1
    """At least 1; whether the stage may be left out altogether is `optional`."""
    times_max: int | None = 1
    """None: without bound."""
    optional: bool = False
    repeats: Contiguity = "then"
    """How the rows of this stage follow each other."""
    quantifier: Literal["each", "greedy", "reluctant"] = "each"
    """Every number of rows that fits is a match; or as many rows as can be; or as few."""
    negated: bool = False
    """No such row may come before the next stage; as the last stage: until the pattern's time is over."""
    until: str | None = None
    """The stage takes no more rows from the first on that fulfils this."""


class Match(KeyedByColumns, frozen=True, tag="match", kw_only=True):
    """Sequences of rows of a key, in order of time, that fulfil a pattern."""

    input: Input
    pattern: str
    """Its name."""
    stages: tuple[Stage, ...]
    within_us: int | None = None
    """From the first row of a match to its last: less than this."""
    skip: Literal["none", "next", "past_last", "first", "last"] = "past_last"
    """Where to go on after a match: everywhere, after its first row, after its last, or at the first or last of a stage."""
    skip_to: str | None = None
    choose: Literal["earliest", "preferred"] = "earliest"
    """Which match of one first row counts, unless all do: the one that is complete first, or the one that SQL prefers."""
    own_row: bool = False
    """Whether, in its own stage's predicate, the row that is looked at counts as taken already, as in SQL's DEFINE."""
    measures: tuple[str, ...] = ()
    """SQL with AS. Columns of stages are written `b.x`; `first(b.x)`, `last(b.x)` and aggregates of them are known."""
    all_rows: bool = False
    """A row for each row of a match, instead of one a match."""
    partial_matches_max: int = 10_000
    """Maximum number of open candidates, and of rows that may begin others, per key; the oldest are dropped and counted."""
    order: tuple[str, ...] = ()
    """Columns, after the time, that rows are ordered by before all others."""


class KeyedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a keyed function remembers of each key under a name."""

    name: str
    kind: Literal["value", "list", "map"]
    type: str
    """Of the value, of the elements, or of a map's values."""
    key_type: str | None = None
    """Of a map's keys."""
    ttl_us: int | None = None
    """Time to live after the last write: by event time if the stream has it, else by the clock."""


class Process(KeyedByColumns, frozen=True, tag="process", kw_only=True):
    """A user's function of the rows of a key, with state and timers."""

    input: Input
    path: str
    schema: dict[str, str]
    ordered: bool = True
    """Rows come in order of time, once the watermark has passed them; else as they arrive."""
    states: tuple[KeyedState, ...] = ()
    on_error: OnFunctionError = "fail"

    @property
    def has_dead_letters(self) -> bool:
        return self.on_error == "dead_letter"


class Loop(AnyStep, frozen=True, tag="loop", kw_only=True):
    """The head of a loop: the rows of its input, and those that come back along `feedback`."""

    input: Input
    feedback: Input


class Sink(AnyStep, frozen=True, tag="sink", kw_only=True):
    """Rows to the outside."""

    input: Input
    connector: ConnectorSpec
    release: Release = "commit"
    tier: Literal["center", "edges"] | None = None
    """The other tier, if that is what reads the rows: then they are released when the epoch is sealed, those below their watermark with it."""


KeyedStep = Aggregate | Combine | Ewma | Deduplicate | Distinct | Over | Top | Join | LookupLatest | Match | Process
"""Steps whose rows are shuffled: those with `shuffles`."""
TierStep = ToCenter | Control | ToEdges
"""Where the tiers meet: `planner.split` makes two plans without them, each for one engine."""
Step = (
    Source
    | Filter
    | Select
    | WithColumns
    | WithTime
    | Explode
    | Function
    | Union
    | Lookup
    | KeyedStep
    | Loop
    | Sink
    | TierStep
)


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pipeline, ready to be stored, compared and run."""

    version: int = PLAN_VERSION
    pipeline: str
    guarantee: Guarantee = "exactly_once"
    mode: Mode = "aligned"
    steps: tuple[Step, ...]
    state: StateKind | msgspec.UnsetType = msgspec.UNSET
    """Where state is kept, of the steps that do not say it themselves. No part of what a plan means: neither stored nor compared."""
    states: dict[str, StateKind] | msgspec.UnsetType = msgspec.UNSET
    """The same by step, of those that do."""

    def state_of(self, name: str) -> StateKind:
        """Where the state of a step is kept on the edge."""
        kind = "memory" if self.state is msgspec.UNSET else self.state
        return kind if self.states is msgspec.UNSET else self.states.get(name, kind)

    def step(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def consumers(self, name: str) -> tuple[tuple[Step, Input], ...]:
        """The steps that read the step's streams, feedback included, in plan order."""
        found = []
        for step in self.steps:
            reads = (*step.inputs, step.feedback) if isinstance(step, Loop) else step.inputs
            found += [(step, stream) for stream in reads if stream.step == name]
        return tuple(found)

    def feeds(self, name: str) -> tuple[tuple[Step, int, Input], ...]:
        """The steps that read the step's streams, feedback left out, and as which of their inputs; in plan order."""
        return tuple(
            (step, index, stream)
            for step in self.steps
            for index, stream in enumerate(step.inputs)
            if stream.step == name
        )

    def upstream(self, name: str, *, stop_at: tuple[type[Step], ...] = ()) -> tuple[Step, ...]:
        """The steps that the rows of a step come through, in plan order; feedback left out.

        Steps of the classes `stop_at` are included, those before them are not.
        """
        seen: set[str] = set()
        todo = [stream.step for stream in self.step(name).inputs]
        while todo:
            if (at := todo.pop()) not in seen:
                seen.add(at)
                step = self.step(at)
                todo += [] if isinstance(step, stop_at) else [stream.step for stream in step.inputs]
        return tuple(step for step in self.steps if step.name in seen)

    def sources_of(self, name: str) -> tuple[Source, ...]:
        """The sources whose rows come to a step."""
        return tuple(step for step in self.upstream(name) if isinstance(step, Source))

    def has_late_reader(self, name: str) -> bool:
        """Whether a step reads the late rows of this one."""
        return any(stream.port == "late" for _, stream in self.consumers(name))

    def to_json(self) -> bytes:
        """JSON; the order of columns is part of what a plan says, so equal plans give equal bytes."""
        return msgspec.json.encode(self)

    def digest(self) -> str:
        return hashlib.sha256(self.unplaced().to_json()).hexdigest()

    @property
    def tiered(self) -> bool:
        """Whether it is for two tiers, so that no engine runs it as it is."""
        return any(isinstance(step, TierStep) for step in self.steps)

    def unplaced(self) -> Plan:
        """The plan without where this run finds its far ends and keeps its state: what may be stored and compared."""
        steps = tuple(_unplaced(step) for step in self.steps)
        return msgspec.structs.replace(self, steps=steps, state=msgspec.UNSET, states=msgspec.UNSET)


def _unplaced(step: Step) -> Step:
    if not isinstance(step, Source | Sink) or step.connector.at is msgspec.UNSET:
        return step
    spec = ConnectorSpec(kind=step.connector.kind, options=step.connector.options)
    return msgspec.structs.replace(step, connector=spec)


def read_plan(data: bytes) -> Plan:
    """Read a plan back. Raises `PlanError` for anything that is not one."""
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except msgspec.DecodeError as error:
        raise PlanError(f"this is not a plan: {error}.") from error
    if plan.version != PLAN_VERSION:
        raise PlanError(f"the plan has version {plan.version}; this fordstone reads version {PLAN_VERSION}.")
    return plan
