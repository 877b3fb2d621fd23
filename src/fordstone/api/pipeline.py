"""The pipeline: where a stream graph is declared, checked, explained and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from textwrap import indent
from typing import TYPE_CHECKING, Any, Unpack, get_args

from fordstone.api.graph import Graph, Timing, check_state
from fordstone.api.run import OnProgress, Run, Work, shortened
from fordstone.api.stream import Stream
from fordstone.api.table import ControlTable, LookupTable, TableRows, table_of
from fordstone.connectors.base import Capability, live_of
from fordstone.connectors.memory import MemorySource
from fordstone.connectors.registry import capabilities, first_look
from fordstone.errors import ConfigError, FordstoneError, PipelineError
from fordstone.lang.choices import check_word
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.plan.ids import checked_name
from fordstone.planner.picture import picture

if TYPE_CHECKING:
    from fordstone.edge.config import RunConfig, RunOptions
    from fordstone.protocol.progress import Report


class Pipeline:
    """A graph of named steps.

    `guarantee` is `"exactly_once"` by default. If it is given, a path that cannot give it is an error; if
    not, each path gives what its source and sink can, and `explain()` says what that is. `mode` is how barriers are
    taken: `"aligned"`, `"unaligned"` or `"blocking"`.

    `state` is where the edge keeps what steps remember while it runs: in `"memory"`; with `"file"`, windows and rows that wait are on disk; with
    `"rocksdb"`, what is kept by key as well. Steps take `state=` too. It changes no result and no checkpoint. The directory of
    checkpoints is another thing, and an option of `run`.
    """

    def __init__(
        self,
        name: str,
        *,
        guarantee: p.Guarantee | None = None,
        mode: p.Mode = "aligned",
        state: p.StateKind = "memory",
    ) -> None:
        self.name = checked_name(name, "pipeline")
        if guarantee is not None:
            check_word("guarantee", guarantee, get_args(p.Guarantee), error=PipelineError)
        check_word("mode", mode, get_args(p.Mode), error=PipelineError)
        check_state(state, where=f"pipeline {self.name}: ")
        self._graph = Graph(self, guarantee=guarantee, mode=mode, state=state)

    def source(
        self,
        name: str,
        connector: p.ConnectorSpec,
        *,
        schema: Mapping[str, str] | None = None,
        time: str | None = None,
        lateness: str | timedelta = "0s",
        max_ahead: str | timedelta | None = "1h",
        idle_after: str | timedelta | None = None,
        check_time_unit: bool = True,
        on_error: p.OnError = "keep",
    ) -> Stream:
        """Rows from outside.

        `time` names the event-time column. Rows may be out of order by `lateness`: the watermark of a row is the newest time before it in
        its partition less that, and the row is late for windows that end at or before it. In a run without end it is late too if it
        is more than `max_ahead` ahead of this machine's clock, and then moves no time on; None: never. A partition silent for
        `idle_after` no longer holds time back. Times that make sense only in another unit, such as milliseconds that are read as
        microseconds, stop the pipeline unless `check_time_unit` is False. A row that cannot be read goes to the dead letters
        (`on_error="keep"`) or stops the pipeline (`"fail"`).

        If the time has to be computed first, leave `time` and what goes with it out, and call `Stream.with_time`.
        """
        checked_name(name, "source")
        if not isinstance(connector, p.ConnectorSpec):
            raise PipelineError(f"source {name}: {connector!r} is not a connector. Use one of fordstone.connectors.")
        check_word("on_error", on_error, get_args(p.OnError), where=f"source {name}: ", error=PipelineError)
        if Capability.TABLE in capabilities(connector):
            raise PipelineError(
                f"source {name}: {connector.kind} gives the rows of a table, which have no order in which they could be read on. Look rows up "
                f"in it: stream.lookup({connector.kind}(...), on=..., schema=...)."
            )
        columns = _columns(name, connector, schema)
        timing = Timing.of(f"source {name}", lateness, max_ahead, idle_after)
        step = self._graph.add(
            p.Source(
                name=name,
                connector=connector,
                schema=columns.to_dict(),
                time=time,
                lateness_us=timing.lateness_us,
                max_ahead_us=None if time is None else timing.max_ahead_us,
                idle_after_us=timing.idle_after_us,
                checks_time_unit=time is not None and check_time_unit,
                on_error=on_error,
            )
        )
        return Stream(self._graph, step)

    def control(self, name: str, *, schema: Mapping[str, str], key: str | Sequence[str]) -> ControlTable:
        """A table that the center writes (`stream.to_edges(name)`) and every node reads (`stream.join_control(table, on=...)`).

        Rows replace each other by `key`. A node takes new rows over at barriers; it keeps its copy while it is offline.
        """
        checked_name(name, "control")
        if not isinstance(key, str | Sequence):
            raise PipelineError(
                f'control {name}: key={key!r} does not name columns. Write key="device", or a list of names.'
            )
        keys = (key,) if isinstance(key, str) else tuple(key)
        columns = Schema.of(schema)
        self._graph.add(p.Control(name=name, schema=columns.to_dict(), keys=keys))
        return ControlTable(pipeline=self, name=name, schema=columns, keys=keys)

    def table(
        self, name: str, table: p.ConnectorSpec | TableRows, *, schema: Mapping[str, str] | None = None
    ) -> LookupTable:
        """A table that does not change, for `Stream.lookup` and for JOIN in SQL: `table("devices", files("devices.csv"), schema={...})`.

        It is read once, at the start, and has one row per key. A few rows may be given as they are: a list of records, or a frame.
        """
        checked_name(name, "table")
        if name in self._graph.tables or any(step.name == name for step in self._graph.steps):
            raise PipelineError(f"there is a table or a step {name!r} already. Give one of them another name.")
        try:
            connector, columns = table_of(table, schema)
        except FordstoneError as error:
            raise PipelineError(f"table {name}: {error}") from error
        found = self._graph.tables[name] = LookupTable(name=name, connector=connector, schema=columns)
        return found

    def sql(
        self,
        query: str,
        *,
        tables: Mapping[str, Stream | LookupTable | ControlTable | TableRows] | None = None,
        name: str | None = None,
    ) -> Stream:
        """What a query gives, as a stream like any other: `sql("SELECT device, temp FROM readings WHERE temp > 20")`.

        FROM and JOIN name sources, steps and tables of this pipeline, or what `tables` gives a name: streams, tables, and rows as
        they are. `name` is that of the last step. A query that is refused adds nothing.
        """
        from fordstone.api.sql.query import build  # noqa: PLC0415 - it builds on pipelines

        named = {given: self._named_table(given, table) for given, table in (tables or {}).items()}
        with self._graph.unchanged_on_error():
            return build(self._graph, query, named, name)

    def _named_table(
        self, name: str, given: Stream | LookupTable | ControlTable | TableRows
    ) -> Stream | LookupTable | ControlTable:
        if isinstance(given, LookupTable):
            return given
        if isinstance(given, Stream | ControlTable):
            if given.pipeline is not self:
                raise PipelineError(f"sql: tables[{name!r}] belongs to another pipeline.")
            return given
        try:
            connector, columns = table_of(given, None)
        except FordstoneError as error:
            raise PipelineError(
                f"sql: tables[{name!r}] is neither a stream of this pipeline nor a table: {error} Declare files and other connectors "
                "with p.table(...)."
            ) from error
        return LookupTable(name=name, connector=connector, schema=columns)

    def plan(self) -> p.Plan:
        """The checked, serialisable form."""
        return self._graph.plan()

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The functions that the plan names, as this process knows them."""
        return dict(self._graph.functions)

    def explain(self, *, format: str = "text") -> str:  # noqa: A002 - the word users expect
        """Where each step runs, what it gives, and each path's guarantee. `format` is `"text"`, `"mermaid"` or `"json"`.

        Of a pipeline for two tiers also what crosses between them, what was pushed below the cut, and why no more.
        """
        from fordstone.planner.explain import explain  # noqa: PLC0415 - running is above declaring

        return explain(self.plan(), format=format)

    def __repr__(self) -> str:
        steps = self._graph.steps
        ends = [step.name for step in steps if isinstance(step, p.Sink)]
        starts = [step.name for step in steps if isinstance(step, p.Source)]
        ways = f"{', '.join(starts) or 'no source'} → {', '.join(ends) or 'no sink'}"
        return f"Pipeline({self.name}: {ways}; {len(steps)} step{'' if len(steps) == 1 else 's'})"

    def _repr_html_(self) -> str:
        """The steps as a picture, in a notebook."""
        return f"<div><div><b>pipeline {self.name}</b></div>{picture(self._graph.draft(), self._graph.types)}</div>"

    def run(
        self,
        config: RunConfig | None = None,
        *,
        nodes: int | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[RunOptions],
    ) -> Report:
        """Run here, on the edge engine, until bounded input ends or the process is asked to stop (SIGINT, SIGTERM).

        Without `state=` the run keeps nothing and reads nothing old. With it, the run resumes where the last one with this directory
        stopped. The other options are those of `fordstone.edge.config.RunConfig`. A pipeline of two tiers runs as a hub, `nodes`
        nodes (one by default) and a center, all in this process.
        """
        work = self._work(config, nodes, options)
        try:
            return work(on_progress, None)
        except FordstoneError as error:
            raise shortened(error) from error.__cause__

    def start(
        self,
        config: RunConfig | None = None,
        *,
        nodes: int | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[RunOptions],
    ) -> Run:
        """Run as `run` does, but in the background: `with p.start() as run:` stops the run at the end of the block."""
        return Run(self.name, self._work(config, nodes, options), on_progress=on_progress)

    def _work(self, config: RunConfig | None, nodes: int | None, options: RunOptions) -> Work:
        """What runs the pipeline as it is declared now."""
        from fordstone.api.tiers import check_options, run_here  # noqa: PLC0415 - running is above declaring
        from fordstone.edge.config import run_config  # noqa: PLC0415

        plan, functions, given = self.plan(), self.functions, run_config(config, options)
        check_options(plan, given, nodes)
        return lambda show, stop: run_here(plan, functions, given, nodes=nodes, on_progress=show, stop=stop)


def _without_schema(connector: p.ConnectorSpec) -> str:
    found = first_look(connector)
    if found is None:
        return 'it needs its columns: schema={"device": "string", "temp": "double"}. No data was found that would show them.'
    return f"it needs its columns. By a first look at the data they are:\n\n{indent(found, '    ')}\n\nCheck the types, and paste this into source(...)."


def _columns(source: str, connector: p.ConnectorSpec, schema: Mapping[str, str] | None) -> Schema:
    """The columns of a source. What is in the memory of this process can be looked at now."""
    live = live_of(connector)
    try:
        if not isinstance(live, MemorySource):
            if schema is None:
                raise ConfigError(_without_schema(connector))
            return Schema.of(schema)
        columns = Schema.of(live.inferred() if schema is None else schema)
        live.check(columns)
    except FordstoneError as error:
        raise type(error)(f"source {source}: {error}") from None
    return columns
