"""The plan: the checked, serialisable form of a pipeline. JSON, with no code inside.

A plan is a list of steps in an order in which each stands behind its inputs (except a loop's feedback). Expressions
are canonical SQL text; functions are import paths. `model.stream` derives what each step's stream looks like, and
refuses what cannot run.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

from fordstone.errors import PlanError

PLAN_VERSION: Final = 1
Guarantee = Literal["exactly_once", "at_least_once", "at_most_once"]
Mode = Literal["aligned", "unaligned", "blocking"]
Release = Literal["commit", "at_once"]
OnError = Literal["keep", "fail"]

LOCAL_FUNCTION: Final = "<local>"
"""Begins the path of a function that cannot be imported: it runs in the process that built the pipeline only."""


class ConnectorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which system, and how: what a plan says of a source's or a sink's far end."""

    kind: str
    options: dict[str, Any] = {}


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream that a step reads: a step's output, or its `late` port."""

    step: str
    port: Literal["main", "late"] = "main"

    def __str__(self) -> str:
        return self.step if self.port == "main" else f"{self.step}.{self.port}"


class _Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="op", kw_only=True):
    name: str

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The streams this step reads, feedback left out."""
        found = getattr(self, "input", None)
        return () if found is None else (found,)


class Source(_Step, frozen=True, tag="source", kw_only=True):
    """Rows from outside."""

    connector: ConnectorSpec
    schema: dict[str, str]
    time: str | None = None
    lateness_us: int = 0
    idle_after_us: int | None = None
    on_error: OnError = "keep"


class Filter(_Step, frozen=True, tag="filter", kw_only=True):
    """The rows for which a condition is true."""

    input: Input
    predicate: str


class Select(_Step, frozen=True, tag="select", kw_only=True):
    """New columns in place of the old."""

    input: Input
    columns: tuple[str, ...]


class WithColumns(_Step, frozen=True, tag="with_columns", kw_only=True):
    """New columns beside the old; one of the same name is replaced."""

    input: Input
    columns: tuple[str, ...]


class Explode(_Step, frozen=True, tag="explode", kw_only=True):
    """A row for each element of an array expression, beside the other columns."""

    input: Input
    expression: str


class Function(_Step, frozen=True, tag="function", kw_only=True):
    """A user's function: of one record (`map`), of one to many (`flat_map`), or of a batch (`map_batches`)."""

    input: Input
    kind: Literal["map", "flat_map", "map_batches"]
    path: str
    schema: dict[str, str]


class Union(_Step, frozen=True, tag="union", kw_only=True):
    """The rows of several streams of one schema."""

    streams: tuple[Input, ...]

    @property
    def inputs(self) -> tuple[Input, ...]:
        """All the streams."""
        return self.streams


class Tumbling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tumbling"):
    """Windows [s, s + size), s a multiple of size from the UTC epoch, shifted by offset."""

    size_us: int
    offset_us: int = 0


Window = Tumbling


class NamedAggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One output column of an aggregate step."""

    name: str
    sql: str


class Aggregate(_Step, frozen=True, tag="aggregate", kw_only=True):
    """One row a key and window, or with no window one row a key, kept up to date."""

    input: Input
    keys: tuple[str, ...]
    window: Window | None = None
    aggregates: tuple[NamedAggregate, ...]


class Ewma(_Step, frozen=True, tag="ewma", kw_only=True):
    """The rows of each key in order of time, each with exponentially weighted means of all up to it."""

    input: Input
    keys: tuple[str, ...]
    alpha: float
    columns: tuple[str, ...]


class Loop(_Step, frozen=True, tag="loop", kw_only=True):
    """The head of a loop: the rows of its input, and those that come back along `feedback`."""

    input: Input
    feedback: Input


class Sink(_Step, frozen=True, tag="sink", kw_only=True):
    """Rows to the outside."""

    input: Input
    connector: ConnectorSpec
    release: Release = "commit"


Step = Source | Filter | Select | WithColumns | Explode | Function | Union | Aggregate | Ewma | Loop | Sink


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pipeline, ready to be stored, compared and run."""

    version: int = PLAN_VERSION
    pipeline: str
    guarantee: Guarantee = "exactly_once"
    mode: Mode = "aligned"
    steps: tuple[Step, ...]

    def step(self, name: str) -> Step:
        """The step of that name."""
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def consumers(self, name: str) -> tuple[tuple[Step, Input], ...]:
        """Who reads the step's streams, feedback included, in plan order."""
        found = []
        for step in self.steps:
            reads = (*step.inputs, step.feedback) if isinstance(step, Loop) else step.inputs
            found += [(step, stream) for stream in reads if stream.step == name]
        return tuple(found)

    def to_json(self) -> bytes:
        """JSON; the order of columns is part of what a plan says, so equal plans give equal bytes."""
        return msgspec.json.encode(self)

    def digest(self) -> str:
        """The sha256 of the JSON."""
        return hashlib.sha256(self.to_json()).hexdigest()


def read_plan(data: bytes) -> Plan:
    """Read a plan back. Raises `PlanError` for anything that is not one."""
    try:
        plan = msgspec.json.decode(data, type=Plan)
    except msgspec.DecodeError as error:
        raise PlanError(f"this is not a plan: {error}.") from error
    if plan.version != PLAN_VERSION:
        raise PlanError(f"the plan has version {plan.version}; this fordstone reads version {PLAN_VERSION}.")
    return plan
