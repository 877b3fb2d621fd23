"""The pipeline: where a stream graph is declared, checked, explained and run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args

from fordstone.api.stream import ControlTable, Stream
from fordstone.errors import ExpressionError, PipelineError
from fordstone.lang.choices import check_word
from fordstone.lang.duration import duration_us, positive_us
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.plan.ids import checked_name, free_name
from fordstone.plan.stream_type import StreamType
from fordstone.planner.check import check_feedback, check_rules, derive
from fordstone.planner.guarantee import path_guarantees

if TYPE_CHECKING:
    from fordstone.edge.config import RunConfig
    from fordstone.protocol.progress import Report


class Pipeline:
    """A graph of named steps.

    `guarantee` is `"exactly_once"` by default. If it is given, a path that cannot give it is an error; if
    not, each path gives what its source and sink can, and `explain()` says what that is. `mode` is how barriers are
    taken: `"aligned"`, `"unaligned"` or `"blocking"`.
    """

    def __init__(self, name: str, *, guarantee: p.Guarantee | None = None, mode: p.Mode = "aligned") -> None:
        self.name = checked_name(name, "pipeline")
        if guarantee is not None:
            check_word("guarantee", guarantee, get_args(p.Guarantee), error=PipelineError)
        check_word("mode", mode, get_args(p.Mode), error=PipelineError)
        self._strict = guarantee is not None
        self._guarantee: p.Guarantee = guarantee or "exactly_once"
        self._mode: p.Mode = mode
        self._steps: list[p.Step] = []
        self._types: dict[p.Input, StreamType] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._open_loops: set[str] = set()

    def source(
        self,
        name: str,
        connector: p.ConnectorSpec,
        *,
        schema: Mapping[str, str],
        time: str | None = None,
        lateness: str | timedelta = "0s",
        max_ahead: str | timedelta | None = "1h",
        idle_after: str | timedelta | None = None,
        on_error: p.OnError = "keep",
    ) -> Stream:
        """Rows from outside.

        `time` names the event-time column; a row is late if it is older than the newest before it in its partition by
        more than `lateness`. In a run without end it is late too if it is more than `max_ahead` ahead of this machine's clock, and
        then moves no time on; None: never. A partition silent for `idle_after` no longer holds time back. A row that cannot be
        read goes to the dead letters (`on_error="keep"`) or stops the pipeline (`"fail"`).
        """
        checked_name(name, "source")
        if not isinstance(connector, p.ConnectorSpec):
            raise PipelineError(f"source {name}: {connector!r} is not a connector. Use one of fordstone.connectors.")
        check_word("on_error", on_error, get_args(p.OnError), where=f"source {name}: ", error=PipelineError)
        lateness_us = duration_us(lateness, what=f"source {name}: lateness")
        if lateness_us < 0:
            raise PipelineError(f"source {name}: lateness={lateness!r} must not be negative.")
        max_ahead_us = None if max_ahead is None else positive_us(max_ahead, what=f"source {name}: max_ahead")
        return self.add(
            p.Source(
                name=name,
                connector=connector,
                schema=Schema.of(schema).to_dict(),
                time=time,
                lateness_us=lateness_us,
                max_ahead_us=None if time is None else max_ahead_us,
                idle_after_us=None
                if idle_after is None
                else positive_us(idle_after, what=f"source {name}: idle_after"),
                on_error=on_error,
            )
        )

    def control(self, name: str, *, schema: Mapping[str, str], key: str | Sequence[str]) -> ControlTable:
        """A table that the center writes (`stream.to_edges(name)`) and every node reads (`stream.join_control(table, on=...)`).

        Rows replace each other by `key`. A node takes new rows over at barriers; it keeps its copy while it is offline.
        """
        checked_name(name, "control")
        keys = (key,) if isinstance(key, str) else tuple(key)
        columns = Schema.of(schema)
        self.add(p.Control(name=name, schema=columns.to_dict(), keys=keys))
        return ControlTable(pipeline=self, name=name, schema=columns, keys=keys)

    def sql(self, query: str, *, tables: Mapping[str, Stream] | None = None, name: str | None = None) -> Stream:
        """What a query gives, as a stream like any other: `sql("SELECT device, temp FROM readings WHERE temp > 20")`.

        FROM names sources and other steps of this pipeline, or streams by the names that `tables` gives them. `name` is
        that of the last step. A query that is refused adds nothing.
        """
        from fordstone.api.sql.query import build  # noqa: PLC0415 - it builds on pipelines

        for table, stream in (tables or {}).items():
            if not isinstance(stream, Stream) or stream.pipeline is not self:
                raise PipelineError(f"sql: tables[{table!r}] is not a stream of this pipeline.")
        steps, types = list(self._steps), self._types
        try:
            return build(self, query, tables or {}, name)
        except BaseException:
            self._steps, self._types = steps, types
            raise

    def plan(self) -> p.Plan:
        """The checked, serialisable form."""
        if self._open_loops:
            raise PipelineError(
                f"loop {', '.join(sorted(self._open_loops))} is not complete: plan(), explain() or run() was called inside its body, "
                "or its body failed. Return the pair of streams from the body first."
            )
        draft = self._draft()
        if not any(_is_end(draft, step) for step in draft.steps):
            raise PipelineError(
                f"pipeline {self.name} has no sink, so its results would be lost. Add stream.sink(...)."
            )
        return draft

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The functions that the plan names, as this process knows them."""
        return dict(self._functions)

    def explain(self, *, format: str = "text") -> str:  # noqa: A002 - the word users expect
        """Where each step runs, what it gives, and each path's guarantee. `format` is `"text"`, `"mermaid"` or `"json"`.

        Of a pipeline for two tiers also what crosses between them, what was pushed below the cut, and why no more.
        """
        from fordstone.planner.explain import explain  # noqa: PLC0415 - running is above declaring

        return explain(self.plan(), format=format)

    def run(self, config: RunConfig | None = None, **options: Any) -> Report:
        """Run here, on the edge engine, until bounded input ends or the process is asked to stop.

        Options are those of `fordstone.edge.config.RunConfig`: `state=`, `bounded=`, `parallelism=`, `interval=` ...
        """
        from fordstone.edge.run import run  # noqa: PLC0415 - running is above declaring

        return run(self.plan(), self.functions, config, **options)

    # What streams call.

    def add(self, step: p.Step) -> Stream:
        """Check a step, take it in, and return its output. Raises and changes nothing if it may not stand there."""
        if any(known.name == step.name for known in self._steps):
            raise PipelineError(f"two steps are named {step.name!r}. Give one of them another name.")
        types = self._types | derive(step, self._types)
        draft = self._draft(step)
        check_rules(draft, step, types)
        if self._strict and isinstance(step, p.Sink):
            self._check_guarantee(draft, step)
        self._steps.append(step)
        self._types = types
        return Stream(self, p.Input(step.name))

    def add_loop(self, at: p.Input, name: str, body: Callable[[Stream], tuple[Stream, Stream]]) -> Stream:
        """Add a loop's head, the steps of its body, and close it."""
        if self._open_loops:
            raise PipelineError(
                f"loop {name} is inside loop {', '.join(self._open_loops)}: loops cannot be nested. Let rows carry a count, and send "
                "them around one loop."
            )
        open_head = p.Loop(name=name, input=at, feedback=at)
        self.add(open_head)
        self._open_loops.add(name)
        first = len(self._steps)
        given = body(Stream(self, p.Input(name)))
        if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, Stream) for part in given)):  # noqa: PLR2004 - a pair
            raise PipelineError(f"loop {name}: the body gives a pair of streams: (what goes back, what goes on).")
        back, onward = (stream._at for stream in given)  # noqa: SLF001 - our own class
        inside = {name} | {step.name for step in self._steps[first:]}
        for step in self._steps[first:]:
            outside = [str(stream) for stream in step.inputs if stream.step not in inside]
            if outside:
                raise PipelineError(
                    f"loop {name}: step {step.name} inside it reads {', '.join(outside)} from outside. Unite them before the loop."
                )
        if back.step not in inside or onward.step not in inside:
            raise PipelineError(f"loop {name}: both streams that the body gives must come from inside it.")
        closed = p.Loop(name=name, input=at, feedback=back)
        check_feedback(closed, self._types)
        self._steps[first - 1] = closed
        self._open_loops.discard(name)
        return Stream(self, onward)

    def name_for(self, base: str, given: str | None) -> str:
        """The given name, checked, or one derived from what the step does."""
        if given is not None:
            return checked_name(given, "step")
        return free_name(base, {step.name for step in self._steps})

    def register(self, function: Callable[..., Any]) -> str:
        """Give the import path of a function, or a local name if it has none."""
        path = (
            import_path(function)
            or f"{p.LOCAL_FUNCTION}:{getattr(function, '__name__', 'function')}:{len(self._functions)}"
        )
        self._functions[path] = function
        return path

    @contextmanager
    def building(self, step: str) -> Iterator[None]:
        """Name the step in errors of its expressions."""
        try:
            yield
        except ExpressionError as error:
            raise (error if error.step else error.at_step(step)) from None

    def type_of(self, at: p.Input) -> StreamType:
        return self._types[at]

    def has(self, at: p.Input) -> bool:
        return at in self._types

    def _draft(self, *more: p.Step) -> p.Plan:
        return p.Plan(pipeline=self.name, guarantee=self._guarantee, mode=self._mode, steps=(*self._steps, *more))

    def _check_guarantee(self, draft: p.Plan, sink: p.Sink) -> None:
        for path in path_guarantees(draft):
            if path.sink == sink.name and path.gives != self._guarantee:
                raise PipelineError(
                    f"sink {sink.name}: the pipeline asks for {self._guarantee}, but the path from {path.source} gives "
                    f"{path.gives}: {path.why}. Use another connector, or leave guarantee= out and take what explain() shows."
                )


def _is_end(plan: p.Plan, step: p.Step) -> bool:
    """Whether rows leave here. Rows that cross and are read by no step are kept at the hub, where other jobs can read them."""
    return isinstance(step, p.Sink | p.ToEdges) or (isinstance(step, p.ToCenter) and not plan.consumers(step.name))


def import_path(function: Callable[..., Any]) -> str | None:
    """`module:name` if another process can import the function by it, else None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in {None, "__main__"} or "<" in name or "." in name:
        return None
    loaded = sys.modules.get(str(module))
    # While the module is still being imported its name may not be bound yet; a top-level name will be.
    return f"{module}:{name}" if loaded is not None and getattr(loaded, name, function) is function else None
