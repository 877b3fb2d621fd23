"""The graph that a pipeline and its streams share: the steps so far, their types, and the functions that they name.

A step is checked before it is taken in, so the graph is valid at any time. What users call is in `pipeline` and `stream`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from fordstone.errors import ExpressionError, PipelineError
from fordstone.lang.choices import check_word
from fordstone.lang.duration import duration_us, positive_us
from fordstone.operators.with_time import source_of
from fordstone.plan import plan as p
from fordstone.plan.ids import checked_name, free_name
from fordstone.plan.stream_type import StreamType
from fordstone.planner.check import check_feedback, check_rules, derive
from fordstone.planner.guarantee import path_guarantees

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline
    from fordstone.api.stream import Stream
    from fordstone.api.table import LookupTable

Span = str | timedelta


@dataclass(frozen=True, slots=True)
class Timing:
    """The options that go with event time, in microseconds."""

    lateness_us: int
    max_ahead_us: int | None
    idle_after_us: int | None

    @classmethod
    def of(cls, what: str, lateness: Span, max_ahead: Span | None, idle_after: Span | None) -> Timing:
        """Read them. `what` names the step in errors."""
        lateness_us = duration_us(lateness, what=f"{what}: lateness")
        if lateness_us < 0:
            raise PipelineError(f"{what}: lateness={lateness!r} must not be negative.")
        return cls(
            lateness_us,
            None if max_ahead is None else positive_us(max_ahead, what=f"{what}: max_ahead"),
            None if idle_after is None else positive_us(idle_after, what=f"{what}: idle_after"),
        )


class Graph:
    """The steps of one pipeline."""

    def __init__(
        self, pipeline: Pipeline, *, guarantee: p.Guarantee | None, mode: p.Mode, state: p.StateKind = "memory"
    ) -> None:
        self.pipeline = pipeline
        self._state: p.StateKind = state
        self._states: dict[str, p.StateKind] = {}
        """Of the steps that say where their state is kept."""
        self.steps: list[p.Step] = []
        self.types: dict[p.Input, StreamType] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.tables: dict[str, LookupTable] = {}
        """That rows are looked up in, by name."""
        self._strict = guarantee is not None
        self._guarantee: p.Guarantee = guarantee or "exactly_once"
        self._mode: p.Mode = mode
        self._open_loop: str | None = None
        self._automatic: set[str] = set()
        """The names that were given to steps without one."""

    def draft(self, *more: p.Step) -> p.Plan:
        """The plan of the steps so far and of `more`. It may have no sink yet."""
        return self._placed(
            p.Plan(pipeline=self.pipeline.name, guarantee=self._guarantee, mode=self._mode, steps=(*self.steps, *more))
        )

    def _placed(self, plan: p.Plan) -> p.Plan:
        """The plan with where its steps keep their state, if that is not all in memory."""
        names = {step.name for step in plan.steps}
        states = {name: kind for name, kind in self._states.items() if name in names}
        return msgspec.structs.replace(
            plan,
            state=msgspec.UNSET if self._state == "memory" else self._state,
            states=states or msgspec.UNSET,
        )

    def plan(self) -> p.Plan:
        """The plan, which is complete."""
        if self._open_loop is not None:
            raise PipelineError(
                f"loop {self._open_loop} is not complete: plan(), explain() or run() was called inside its body, "
                "or its body failed. Return the pair of streams from the body first."
            )
        draft = self.draft()
        ends = [step.name for step in draft.steps if _is_end(draft, step)]
        if not ends:
            raise PipelineError(
                f"pipeline {draft.pipeline} has no sink, so its results would be lost. Add stream.sink(...)."
            )
        return self._part_before(ends)

    def part_of(self, at: p.Input) -> p.Plan:
        """The plan of the steps that a stream comes from. What writes a control table that they read is among them."""
        return self._part_before([at.step])

    def _part_before(self, ends: Iterable[str]) -> p.Plan:
        """The plan of these steps and of those that their rows come from: what is read by none of them does not run."""
        steps = {step.name: step for step in self.steps}
        writers = {step.control: step.name for step in self.steps if isinstance(step, p.ToEdges)}
        needed: set[str] = set()
        names = list(ends)
        while names:
            name = names.pop()
            if name in needed:
                continue
            needed.add(name)
            step = steps[name]
            names += [stream.step for stream in step.inputs]
            if isinstance(step, p.Loop):
                names.append(step.feedback.step)
            if isinstance(step, p.ToEdges):
                names.append(step.control)
            if name in writers:
                names.append(writers[name])
        draft = self.draft()
        return self._placed(
            msgspec.structs.replace(draft, steps=tuple(step for step in draft.steps if step.name in needed))
        )

    def add(self, step: p.Step, *, state: p.StateKind | None = None) -> p.Input:
        """Check a step, take it in, and return its output. Raises and changes nothing if it may not stand there.

        `state`: where its state is kept; None: where that of the pipeline is.
        """
        if state is not None:
            check_state(state, where=f"step {step.name}: ")
        if any(known.name == step.name for known in self.steps):
            automatic = " It is the automatic name of the earlier one." if step.name in self._automatic else ""
            raise PipelineError(
                f"two steps are named {step.name!r}.{automatic} Give one of them another name, with name=."
            )
        if step.name in self.tables:
            raise PipelineError(f"step {step.name!r} has the name of a table. Give one of them another name.")
        types = self.types | derive(step, self.types)
        draft = self.draft(step)
        check_rules(draft, step, types)
        if self._strict and isinstance(step, p.Sink):
            self._check_guarantee(draft, step)
        self.steps.append(step)
        self.types = types
        if state is not None:
            self._states[step.name] = state
        return p.Input(step.name)

    def add_time(self, step: p.WithTime, timing: Timing, *, checks_unit: bool) -> p.Input:
        """Add a step that assigns event time. Its source names it from then on."""
        derive(step, self.types)  # what is wrong with the stream is said before what is wrong with its source
        with self.unchanged_on_error():
            source = source_of(step, self.draft(step))
            if source.lateness_us or source.idle_after_us is not None:
                raise PipelineError(
                    f"step {step.name}: source {source.name} has lateness= or idle_after=, which are about its time, and its time is "
                    "assigned here. Give them to with_time."
                )
            timed = msgspec.structs.replace(
                source,
                timed_by=step.name,
                lateness_us=timing.lateness_us,
                max_ahead_us=timing.max_ahead_us,
                idle_after_us=timing.idle_after_us,
                checks_time_unit=checks_unit,
            )
            self.steps[self.steps.index(source)] = timed
            return self.add(step)

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Several steps, or none if one of them is refused."""
        steps, types = list(self.steps), self.types
        try:
            yield
        except BaseException:
            self.steps, self.types = steps, types
            raise

    def open_loop(self, at: p.Input, name: str) -> p.Input:
        """Add a loop's head. The steps that follow are its body, until `close_loop`."""
        if self._open_loop is not None:
            raise PipelineError(
                f"loop {name} is inside loop {self._open_loop}: loops cannot be nested. Let rows carry a count, and send "
                "them around one loop."
            )
        head = self.add(p.Loop(name=name, input=at, feedback=at))
        self._open_loop = name
        return head

    def close_loop(self, at: p.Input, name: str, *, back: p.Input) -> None:
        """Complete the loop: `back` is what goes to its head again."""
        first = next(number for number, step in enumerate(self.steps) if step.name == name)
        inside = {step.name for step in self.steps[first:]}
        for step in self.steps[first + 1 :]:
            outside = [str(stream) for stream in step.inputs if stream.step not in inside]
            if outside:
                raise PipelineError(
                    f"loop {name}: step {step.name} inside it reads {', '.join(outside)} from outside. Unite them before the loop."
                )
        closed = p.Loop(name=name, input=at, feedback=back)
        check_feedback(closed, self.types)
        self.steps[first] = closed
        self._open_loop = None

    def is_inside(self, loop: str, at: p.Input) -> bool:
        """Whether a stream comes from the body of the loop that was opened last."""
        names = [step.name for step in self.steps]
        return at.step in names[names.index(loop) :]

    def name_for(self, base: str, given: str | None) -> str:
        """The given name, checked, or one derived from what the step does."""
        if given is not None:
            return checked_name(given, "step")
        name = free_name(base, {step.name for step in self.steps})
        self._automatic.add(name)
        return name

    def register(self, function: Callable[..., Any]) -> str:
        """Give the import path of a function, or a local name if it has none."""
        path = (
            import_path(function)
            or f"{p.LOCAL_FUNCTION}:{getattr(function, '__name__', 'function')}:{len(self.functions)}"
        )
        self.functions[path] = function
        return path

    @contextmanager
    def building(self, step: str) -> Iterator[None]:
        """Name the step in errors of its expressions."""
        try:
            yield
        except ExpressionError as error:
            raise (error if error.step else error.at_step(step)) from None

    def _check_guarantee(self, draft: p.Plan, sink: p.Sink) -> None:
        for path in path_guarantees(draft):
            if path.sink == sink.name and path.gives != self._guarantee:
                raise PipelineError(
                    f"sink {sink.name}: the pipeline asks for {self._guarantee}, but the path from {path.source} gives "
                    f"{path.gives}: {path.why}. Use another connector, or leave guarantee= out and take what explain() shows."
                )


def check_state(state: object, *, where: str) -> None:
    """Raise unless this is a place where state can be kept."""
    check_word("state", state, get_args(p.StateKind), where=where, error=PipelineError)


def graph_of(owner: Pipeline | Stream) -> Graph:
    """The graph of a pipeline or stream."""
    return owner._graph  # noqa: SLF001 - our own classes


def _is_end(plan: p.Plan, step: p.Step) -> bool:
    """Whether rows leave here. Rows that cross and are read by no step are kept at the hub, where other jobs can read them."""
    return isinstance(step, p.Sink | p.ToEdges) or (isinstance(step, p.ToCenter) and not plan.consumers(step.name))


def import_path(function: Callable[..., Any]) -> str | None:
    """`module:name` if another process can import the function by it, else None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in {None, "__main__"} or not name or "<" in name or "." in name:
        return None
    loaded = sys.modules.get(str(module))
    # While the module is still being imported its name may not be bound yet; a top-level name will be.
    return f"{module}:{name}" if loaded is not None and getattr(loaded, name, function) is function else None
