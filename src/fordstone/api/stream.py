"""Streams: what a pipeline is written with. Every method adds a step and returns the step's output stream.

A step is checked when it is added. Nothing runs until the pipeline is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Any, Unpack, get_args

import polars as pl

from fordstone.api.column import Column, expression_source
from fordstone.api.graph import Graph, Span, Timing, check_state, graph_of
from fordstone.api.pattern import MatchOptions, Pattern, match_step
from fordstone.api.process import KeyedFunction, declared_states
from fordstone.api.table import ControlTable, LookupTable, TableRows, table_of
from fordstone.connectors.base import SinkStream
from fordstone.connectors.function import function_sink
from fordstone.connectors.memory import to_pandas
from fordstone.connectors.registry import open_sink
from fordstone.connectors.stdout import stdout
from fordstone.errors import ConfigError, FordstoneError, PipelineError
from fordstone.lang.aggregates import parse_aggregate
from fordstone.lang.choices import check_word
from fordstone.lang.duration import duration_us, positive_us
from fordstone.lang.expression import expand, parse, parse_double, parse_predicate
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.sql.parser import read_order
from fordstone.operators.aggregate.user import Aggregator, AggregatorCall
from fordstone.operators.with_time import parse_time
from fordstone.plan import plan as p
from fordstone.plan.ids import checked_name
from fordstone.plan.stream_type import StreamType, shown
from fordstone.planner.picture import picture

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline


Expr = str | Column
On = str | Sequence[str] | Mapping[str, str]
"""Columns that must be equal: of both sides, or from those of the left to those of the right."""
Aggregated = str | Column | AggregatorCall
"""An aggregate expression as SQL text or built, or `MyAggregator.of(...)`."""
Record = dict[str, Any]
SinkFunction = Callable[[pl.DataFrame], object] | Callable[[pl.DataFrame, Any], object]
"""Takes the rows of an epoch, and the epoch's number; what it returns is awaited if it can be."""


class Stream:
    """Rows on their way. Made by `Pipeline.source` and by the methods here; never changes."""

    def __init__(self, graph: Graph, at: p.Input) -> None:
        self._graph = graph
        self._at = at

    @property
    def name(self) -> str:
        """The name of the step that this stream comes from."""
        return str(self._at)

    @property
    def schema(self) -> Schema:
        """The columns and their types."""
        return self._type.schema

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that this stream belongs to."""
        return self._graph.pipeline

    @property
    def _type(self) -> StreamType:
        return self._graph.types[self._at]

    @property
    def late(self) -> Stream:
        """The rows that came too late for this step, as they were."""
        return self._port("late", "late rows; only steps that wait for time have, such as windows and ewma.")

    @property
    def timeouts(self) -> Stream:
        """Of a pattern with `within`: the candidates that timed out."""
        return self._port("timeout", "time-outs; only a match of a pattern with .within(...) has.")

    def final(self) -> Stream:
        """Of a window with `early=` or `allowed_lateness=`: the last result of each window, once, as a window without gives it."""
        if self._type.upsert_key is None:
            raise PipelineError(f"step {self.name}: .final() is not needed here: no row is replaced by a later one.")
        return self._port(
            "final",
            "final results of its own. Call .final() directly after a window with early= or allowed_lateness=, before any filter or select. (Running "
            "results, without a window, are never final.)",
        )

    def _port(self, port: p.Port, missing: str) -> Stream:
        at = p.Input(self._at.step, port)
        if self._at.port != "main" or at not in self._graph.types:
            raise PipelineError(f"step {self.name} has no {missing}")
        return Stream(self._graph, at)

    def filter(self, predicate: Expr, *, name: str | None = None) -> Stream:
        """Keep the rows for which `predicate` is true (not those for which it is false or null)."""
        named = self._named("filter", name)
        with self._graph.building(named):
            sql = parse_predicate(expression_source(predicate), self.schema).sql
        return self._add(p.Filter(name=named, input=self._at, predicate=sql))

    def select(self, *columns: Expr, name: str | None = None) -> Stream:
        """Give new columns in place of the old: `select("device", "temp * 9 / 5 + 32 AS f")`. `"*"` is all there are."""
        named = self._named("select", name)
        return self._add(p.Select(name=named, input=self._at, columns=self._canonical(named, columns)))

    def with_columns(self, *columns: Expr, name: str | None = None) -> Stream:
        """Add columns, or replace those of the same name."""
        named = self._named("with_columns", name)
        return self._add(p.WithColumns(name=named, input=self._at, columns=self._canonical(named, columns)))

    def with_time(
        self,
        expression: Expr,
        *,
        lateness: str | timedelta = "0s",
        max_ahead: str | timedelta | None = "1h",
        idle_after: str | timedelta | None = None,
        check_time_unit: bool = True,
        name: str | None = None,
    ) -> Stream:
        """Assign event time: `with_time("to_timestamp(t, 'dd/MM/yyyy HH:mm:ss') AS ts", lateness="5s")`.

        A column, or an expression that becomes one: `event_time` unless AS names it. It stands after steps of one source that look
        at each row alone, and rows are judged as if the source had the column. The options are those of `Pipeline.source`; a row
        whose time is null goes where the source's `on_error` says.
        """
        named = self._named("with_time", name)
        with self._graph.building(named):
            sql = parse_time(expression_source(expression), self.schema).sql
        timing = Timing.of(f"step {named}", lateness, max_ahead, idle_after)
        step = p.WithTime(name=named, input=self._at, expression=sql)
        return Stream(self._graph, self._graph.add_time(step, timing, checks_unit=check_time_unit))

    def map(
        self,
        function: Callable[[Record], Record],
        *,
        schema: Mapping[str, str] | None = None,
        on_error: p.OnFunctionError = "fail",
        name: str | None = None,
    ) -> Stream:
        """Give one record for each. Convenient and slow: a row at a time. `schema` is that of the result, if it changes.

        `on_error="dead_letter"`: a row for which the function raises goes to the dead letters, and the others go on.
        """
        return self._function("map", function, schema, on_error, name)

    def flat_map(
        self,
        function: Expr | Callable[[Record], Iterable[Record]],
        *,
        schema: Mapping[str, str] | None = None,
        on_error: p.OnFunctionError = "fail",
        name: str | None = None,
    ) -> Stream:
        """Give any number of rows for each.

        An expression that makes an array gives a row for each element, beside the other columns:
        `flat_map("split(line, ' ') AS word")`. A function takes a record and gives records; `on_error`: see `map`.
        """
        if isinstance(function, str | Column):
            if schema is not None or on_error != "fail":
                raise PipelineError(
                    "flat_map of an expression has the schema of the expression, and does not raise. Leave schema= and on_error= out."
                )
            named = self._named("flat_map", name)
            (sql,) = self._canonical(named, (function,))
            return self._add(p.Explode(name=named, input=self._at, expression=sql))
        return self._function("flat_map", function, schema, on_error, name)

    def map_batches(
        self,
        function: Callable[[pl.DataFrame], pl.DataFrame],
        *,
        schema: Mapping[str, str] | None = None,
        on_error: p.OnFunctionError = "fail",
        name: str | None = None,
    ) -> Stream:
        """Give a Polars frame for each frame. How rows are cut into frames is not promised: treat rows one by one.

        `on_error="dead_letter"`: a frame for which the function raises is given to it again in halves, until the rows that it
        raises for are alone. These go to the dead letters.
        """
        return self._function("map_batches", function, schema, on_error, name)

    def union(self, *others: Stream, name: str | None = None) -> Stream:
        """The rows of this stream and of others with the same schema."""
        for other in others:
            if not isinstance(other, Stream):
                raise PipelineError(f"union: {other!r} is not a stream.")
            if other.pipeline is not self.pipeline:
                raise PipelineError(f"union: {other.name} belongs to another pipeline.")
        streams = (self._at, *(other._at for other in others))  # noqa: SLF001 - our own class
        return self._add(p.Union(name=self._named("union", name), streams=streams))

    def group_by(self, *keys: str | Sequence[str], state: p.StateKind | None = None) -> Grouped:
        """Rows of one key together. Follow with `.window(...)` and `.agg(...)`, or `.ewma(...)`. With no key there is one group.

        Keys are columns: `group_by("site", "device")`, or a list of them. `state`: where the step that follows keeps its state, if not where
        the pipeline does.
        """
        return Grouped(self, _key_names("group_by", keys), None, state=state)

    def deduplicate(
        self,
        *keys: str | Sequence[str],
        within: str | timedelta,
        name: str | None = None,
        state: p.StateKind | None = None,
    ) -> Stream:
        """Drop rows that repeat a key shortly after a row that was kept: `deduplicate("id", within="1h")`.

        The rows of a key are taken in order of time, once the watermark has passed them. A row is dropped if the last row of its key that
        was kept is less than `within` older. Nulls are equal to each other here.
        """
        named = self._named("deduplicate", name)
        with self._graph.building(named):
            span_us = positive_us(within, what="within")
        names = _key_names("deduplicate", keys)
        return self._add(p.Deduplicate(name=named, input=self._at, keys=names, within_us=span_us), state)

    def distinct(self, *, name: str | None = None, state: p.StateKind | None = None) -> Stream:
        """Each row once, however often it comes: `readings.select("device", "site").distinct()`.

        With event time a row is emitted once the watermark has passed it, and nothing is kept after that. Without, it is emitted when it
        first comes, and every distinct row is kept for good. `deduplicate` drops repeats of a key within a time.
        """
        return self._add(p.Distinct(name=self._named("distinct", name), input=self._at, keys=tuple(self.schema)), state)

    def top(
        self,
        n: int | None,
        *,
        by: str | Sequence[str],
        per: str | Sequence[str] = (),
        numbering: p.Numbering = "row_number",
        column: str = "rank",
        name: str | None = None,
        state: p.StateKind | None = None,
    ) -> Stream:
        """The first `n` rows of each window, or of each key so far, in an order: `top(3, by="n DESC", per="window_start")`.

        `by` is what ORDER BY takes. Rows that are equal in it are ordered by all their columns, so that results do not depend on
        how rows came. Each value of the columns `per` has a ranking of its own. If one of them gives the time of the rows, as `window_start` does,
        rankings are final and emitted when their window has closed; else they are kept up to date, as upserts. The number
        of a row, from 1 on, is in `column`. `numbering="rank"` or `"dense_rank"` gives one number to rows that are equal in `by`.
        With `n=None` all rows are numbered.
        """
        named = self._named("top", name)
        if n is not None and (isinstance(n, bool) or not isinstance(n, int)):
            raise PipelineError(f"step {named}: top({n!r}) is not a whole number of rows.")
        texts = [by] if isinstance(by, str) else list(by)
        with self._graph.building(named):
            order = tuple(
                p.SortKey(
                    sql=parse(key.by.tree, self.schema, text=text).sql,
                    descending=key.descending,
                    nulls_first=key.nulls_first,
                )
                for text in texts
                for key in read_order(text)
            )
        keys = (per,) if isinstance(per, str) else tuple(per)
        return self._add(
            p.Top(name=named, input=self._at, keys=keys, n=n, by=order, numbering=numbering, column=column), state
        )

    def match(
        self, pattern: Pattern, measures: Mapping[str, Expr] | None = None, **options: Unpack[MatchOptions]
    ) -> Stream:
        """Look for a pattern in all rows together; see `Grouped.match`."""
        return self.group_by().match(pattern, measures, **options)

    def iterate(self, body: Callable[[Stream], tuple[Stream, Stream]], *, name: str | None = None) -> Stream:
        """Send rows around: `body` takes the stream inside the loop and gives `(what goes back, what goes on)`.

        The steps inside run as one task. There is no event time inside or below a loop.
        """
        graph, loop = self._graph, self._named("iterate", name)
        if not callable(body):
            raise PipelineError(
                f"loop {loop}: {body!r} is not a function. Give one that takes a stream and gives a pair of streams."
            )
        given = body(Stream(graph, graph.open_loop(self._at, loop)))
        if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, Stream) for part in given)):  # noqa: PLR2004 - a pair
            raise PipelineError(f"loop {loop}: the body gives a pair of streams: (what goes back, what goes on).")
        back, onward = (stream._at for stream in given)  # noqa: SLF001 - our own class
        if not (graph.is_inside(loop, back) and graph.is_inside(loop, onward)):
            raise PipelineError(f"loop {loop}: both streams that the body gives must come from inside it.")
        graph.close_loop(self._at, loop, back=back)
        return Stream(graph, onward)

    def collect(self, *, nodes: int | None = None, parallelism: int = 1) -> pl.DataFrame:
        """The rows that this stream has over the input that is there now; of an upsert stream the newest row of each key.

        Only the steps that it comes from are run, as a bounded run without state; the sinks of the pipeline get nothing. `nodes`:
        of a pipeline with two tiers, the number of nodes.
        """
        return self._collect(nodes=nodes, parallelism=parallelism)

    def head(self, n: int = 10, *, nodes: int | None = None) -> pl.DataFrame:
        """The first `n` rows, as `collect` has them. Input that is not needed for them is not read."""
        return self._collect(nodes=nodes, rows_max=n)

    def show(self, n: int = 10, *, nodes: int | None = None) -> None:
        """Print the first `n` rows as a table."""
        rows = self.head(n, nodes=nodes)
        open_sink(stdout("table"), SinkStream(step=self.name, schema=self.schema)).write(rows)
        if rows.is_empty():
            print(f"{self.name}: no rows")  # noqa: T201 - it is asked to

    def to_pandas(self, *, nodes: int | None = None, parallelism: int = 1) -> Any:
        """The rows of `collect` as a pandas frame. It needs pandas and pyarrow."""
        return to_pandas(self.collect(nodes=nodes, parallelism=parallelism))

    def _collect(self, *, nodes: int | None, parallelism: int = 1, rows_max: int | None = None) -> pl.DataFrame:
        from fordstone.api.collect import collect  # noqa: PLC0415 - running is above declaring

        if rows_max is not None and (isinstance(rows_max, bool) or not isinstance(rows_max, int) or rows_max < 0):
            raise ConfigError(f"{rows_max!r} is not a number of rows.")
        return collect(self._graph, self._at, nodes=nodes, parallelism=parallelism, rows_max=rows_max)

    def sink(self, name: str, connector: p.ConnectorSpec | SinkFunction, *, release: p.Release = "commit") -> None:
        """Write the rows to a connector. `release="commit"`: once their epoch is sealed; `"at_once"`: now, with ids to deduplicate by.

        A function, or an async function, may stand in place of the connector: it is called with the rows of each epoch as a Polars
        frame, and with the number of the epoch if it takes two arguments. After a crash the last epoch may come again, with the same
        rows and number. What it raises stops the run.
        """
        checked_name(name, "sink")
        check_word("release", release, get_args(p.Release), where=f"sink {name}: ", error=PipelineError)
        if not isinstance(connector, p.ConnectorSpec):
            if not callable(connector):
                raise PipelineError(
                    f"sink {name}: {connector!r} is neither a connector nor a function. Use one of fordstone.connectors, as in "
                    f"files({name!r}, format='jsonl')."
                )
            try:
                connector = function_sink(connector)
            except ConfigError as error:
                raise PipelineError(f"sink {name}: {error}") from None
        self._add(p.Sink(name=name, input=self._at, connector=connector, release=release))

    def join(
        self,
        other: Stream,
        *,
        on: On,
        between: tuple[Span, Span] | None = None,
        how: str = "inner",
        suffix: str = "_right",
        name: str | None = None,
        state: p.StateKind | None = None,
    ) -> Stream:
        """Pairs of rows with equal `on`, where `other`'s time lies within the `between` bounds of this stream's time.

        `orders.join(payments, on="order", between=("0s", "1h"), how="left")`. Both bounds are included. `how`: `"inner"`,
        `"left"`, `"right"` or `"full"`. `on` is a name, several, or a mapping from names here to names there. A column of
        `other` that is there already gets the suffix.
        """
        step = self._named("join", name)
        self._check_joined(step, other)
        left_keys, right_keys = _join_columns(step, on)
        if between is None:
            raise PipelineError(
                f"step {step}: a join of two streams needs a bound on time, or it would have to keep every row for good. Add how far the "
                'right time may lie from the left: between=("-5s", "10s").'
            )
        if isinstance(between, str | timedelta) or len(between) != 2:  # noqa: PLR2004 - a pair
            raise PipelineError(f'step {step}: between={between!r} is not a pair. Write between=("-5s", "10s").')
        from_us, to_us = (_signed_us(bound, what=f"step {step}: between") for bound in between)
        return self._add(
            p.Join(
                name=step,
                left=self._at,
                right=other._at,
                left_keys=left_keys,
                right_keys=right_keys,
                from_us=from_us,
                to_us=to_us,
                how=how,  # type: ignore[arg-type]  # judged with the step
                suffix=suffix,
            ),
            state,
        )

    def lookup(
        self,
        table: p.ConnectorSpec | LookupTable | TableRows,
        *,
        on: On,
        schema: Mapping[str, str] | None = None,
        how: str = "left",
        suffix: str = "_right",
        refresh: str | timedelta | None = None,
        name: str | None = None,
    ) -> Stream:
        """Every row with the columns of the row of `table` that has its key. The table is read once, at the start.

        With `refresh="30s"` it is read again after this time, on another thread, and rows find what was read from the next epoch on.

        `readings.lookup(files("devices.csv"), on="device", schema={"device": "string", "site": "string"})`. A few rows may be
        given as they are: `lookup([{"device": "a", "site": "north"}], on="device")`. With `how="inner"` rows that find
        nothing are dropped.
        """
        step = self._named("lookup", name)
        keys, table_keys = _join_columns(step, on)
        try:
            spec, columns = table_of(table, schema)
        except FordstoneError as error:
            raise PipelineError(f"step {step}: {error}") from None
        return self._add(
            p.Lookup(
                name=step,
                input=self._at,
                table=spec,
                schema=columns.to_dict(),
                keys=keys,
                table_keys=table_keys,
                how=how,  # type: ignore[arg-type]  # judged with the step
                suffix=suffix,
                refresh_us=None if refresh is None else positive_us(refresh, what=f"step {step}: refresh"),
            )
        )

    def join_latest(
        self,
        control: Stream,
        *,
        on: On,
        how: str = "left",
        suffix: str = "_right",
        wait: bool = True,
        name: str | None = None,
        state: p.StateKind | None = None,
    ) -> Stream:
        """Every row with the columns of the newest row of `control` that has its key: `readings.join_latest(limits, on="device")`.

        Rows wait for the end of their epoch, and see the control rows that came in it. With `wait=False` they go on at
        once, see those of the epochs before, and keep their time if `control` has event time too.
        """
        step = self._named("join_latest", name)
        self._check_joined(step, control)
        keys, control_keys = _join_columns(step, on)
        return self._latest(
            step, control._at, keys, control_keys, how=how, suffix=suffix, waits=bool(wait), state=state
        )

    def to_center(self, *, offline: str | timedelta = "24h", name: str | None = None) -> Stream:
        """Cut the pipeline: the steps before run on the nodes, the steps after at the center, over the rows of all nodes.

        The planner moves filters, projections and partial aggregates below the cut where it may; `explain` shows it. A node
        that has been away for longer than `offline` no longer holds time back at the center. `name` is the stream's at the hub.
        """
        named = self._named(f"{self._at.step}_to_center", name)
        offline_us = positive_us(offline, what=f"step {named}: offline")
        return self._add(p.ToCenter(name=named, input=self._at, offline_us=offline_us))

    def to_edges(self, control: str | ControlTable, *, name: str | None = None) -> None:
        """Write these rows of the center into a control table, which every node applies at a barrier."""
        table = control.name if isinstance(control, ControlTable) else control
        if not isinstance(table, str):
            raise PipelineError(f"to_edges({control!r}): name a control table of this pipeline.")
        self._add(p.ToEdges(name=self._named(f"{table}_to_edges", name), input=self._at, control=table))

    def join_control(
        self,
        table: ControlTable,
        *,
        on: On,
        how: str = "left",
        suffix: str = "_right",
        name: str | None = None,
        state: p.StateKind | None = None,
    ) -> Stream:
        """Every row with the columns of the row of a control table that has its key: `readings.join_control(limits, on="device")`.

        Rows go on at once and see the table as it was when their epoch began. Where the table has no such row its columns
        are null, or with `how="inner"` the row is left out.
        """
        step = self._named("join_control", name)
        if not isinstance(table, ControlTable):
            raise PipelineError(
                f"step {step}: {table!r} is not a control table. Declare one with p.control(...); for a stream use join_latest."
            )
        if table.pipeline is not self.pipeline:
            raise PipelineError(f"step {step}: control table {table.name} belongs to another pipeline.")
        keys, control_keys = _join_columns(step, on)
        if set(control_keys) != set(table.keys):
            raise PipelineError(
                f"step {step}: on={on!r} does not name the key of {table.name}, which is ({', '.join(table.keys)})."
            )
        order = [control_keys.index(key) for key in table.keys]
        ordered = tuple(keys[place] for place in order)
        return self._latest(
            step, p.Input(table.name), ordered, table.keys, how=how, suffix=suffix, waits=False, state=state
        )

    def _latest(
        self,
        step: str,
        control: p.Input,
        keys: tuple[str, ...],
        control_keys: tuple[str, ...],
        *,
        how: Any,
        suffix: str,
        waits: bool,
        state: p.StateKind | None,
    ) -> Stream:
        return self._add(
            p.LookupLatest(
                name=step,
                input=self._at,
                control=control,
                keys=keys,
                control_keys=control_keys,
                how=how,
                suffix=suffix,
                waits=waits,
            ),
            state,
        )

    def _check_joined(self, step: str, other: object) -> None:
        if not isinstance(other, Stream):
            raise PipelineError(
                f"step {step}: {other!r} is not a stream. For a table that does not change, use .lookup(table, on=...); for a control "
                "table, .join_control(table, on=...)."
            )
        if other.pipeline is not self.pipeline:
            raise PipelineError(f"step {step}: {other.name} belongs to another pipeline.")

    def _function(
        self,
        kind: Any,
        function: Callable[..., Any],
        schema: Mapping[str, str] | None,
        on_error: p.OnFunctionError,
        name: str | None,
    ) -> Stream:
        named = self._named(kind, name)
        check_word("on_error", on_error, get_args(p.OnFunctionError), where=f"step {named}: ", error=PipelineError)
        if not callable(function):
            raise PipelineError(
                f"step {named}: {function!r} is not a function. "
                f"Give a function that takes a {'frame' if kind == 'map_batches' else 'record'}."
            )
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise PipelineError(
                f"step {named}: {function.__name__} is async, and {kind} does not wait for it. Write a function without async; rows for an async "
                "function leave by sink(name, function)."
            )
        path = self._graph.register(function)
        given = Schema.of(schema).to_dict() if schema is not None else self.schema.to_dict()
        return self._add(p.Function(name=named, input=self._at, kind=kind, path=path, schema=given, on_error=on_error))

    def _canonical(self, step: str, columns: tuple[Expr, ...]) -> tuple[str, ...]:
        if not columns:
            raise PipelineError(f"step {step}: no columns given. Name at least one.")
        with self._graph.building(step):
            return tuple(found.sql for found in expand([expression_source(column) for column in columns], self.schema))

    def _named(self, base: str, name: str | None) -> str:
        return self._graph.name_for(base, name)

    def _add(self, step: p.Step, state: p.StateKind | None = None) -> Stream:
        return Stream(self._graph, self._graph.add(step, state=state))

    def __repr__(self) -> str:
        return f"Stream({self.name}: {shown(self.schema)})"

    def _repr_html_(self) -> str:
        """The columns, and the steps that the stream comes from as a picture, in a notebook."""
        columns = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(kind))}</td></tr>" for name, kind in self.schema.items()
        )
        drawn = picture(self._graph.part_of(self._at), self._graph.types, marked=self._at.step)
        return f"<div><b>stream {escape(self.name)}</b><table>{columns}</table>{drawn}</div>"


class Grouped:
    """Rows of one key together, waiting to be aggregated."""

    def __init__(
        self,
        stream: Stream,
        keys: tuple[str, ...],
        window: p.Window | None,
        early: str | timedelta | None = None,
        allowed_lateness: str | timedelta | None = None,
        state: p.StateKind | None = None,
    ) -> None:
        if state is not None:
            check_state(state, where="group_by: ")
        self._state = state
        self._stream = stream
        self._graph = graph_of(stream)
        self._at = stream._at  # noqa: SLF001 - our own class
        self._keys = keys
        self._window = window
        self._early = early
        self._allowed_lateness = allowed_lateness

    def __repr__(self) -> str:
        window = "" if self._window is None else f", {type(self._window).__name__.lower()} window"
        return f"Grouped({self._stream.name} by {', '.join(self._keys) or 'nothing'}{window})"

    def window(
        self,
        window: p.Window,
        *,
        early: str | timedelta | None = None,
        allowed_lateness: str | timedelta | None = None,
    ) -> Grouped:
        """Cut the rows of each key by time. Without, the aggregate runs over all rows and is kept up to date.

        `early="1s"` gives provisional results before a window closes, about once per interval: each replaces the previous one by
        key and window, and `.final()` of the result has the closing ones only. `allowed_lateness="1h"` keeps a window for that
        time after its end: a row that comes late changes its result, which is emitted again at the next barrier. Then, too, results
        replace each other, and `.final()` has the last of each, when the window is no longer kept.
        """
        if self._window is not None:
            raise PipelineError("group_by has a window already.")
        if not isinstance(window, p.Window):
            raise PipelineError(
                f'window({window!r}): that is not a window. Write tumbling("10s"), or one of the others.'
            )
        return Grouped(self._stream, self._keys, window, early, allowed_lateness, self._state)

    def agg(
        self,
        *unnamed: Aggregated,
        name: str | None = None,
        ttl: str | timedelta | None = None,
        **aggregates: Aggregated,
    ) -> Stream:
        """Aggregate to one row per key (and window): `agg(n="count(*)", mean="avg(temp)")`.

        With a window, a row is emitted once, when the window closes, with columns `window_start` and `window_end`. Without,
        a key's row is emitted at the end of each epoch in which it changed, and replaces the previous one.

        With `ttl="7d"`, and without a window, a key that has had no row for that long, in event time, is forgotten, so that state
        does not grow with every key that was ever seen. If the key comes back, its aggregates begin again. Rows then count when the
        watermark has passed them.
        """
        if unnamed:
            raise PipelineError(f"agg({unnamed[0]!r}): give each aggregate a name, as in agg(n='count(*)').")
        graph, window = self._graph, self._window
        named = self._named("agg", name)
        with graph.building(named):
            given = tuple(
                _named_aggregate(column, wanted, self._stream.schema, graph.register)
                for column, wanted in aggregates.items()
            )
        early_us = None if self._early is None else positive_us(self._early, what=f"step {named}: early")
        if early_us is None and graph.types[self._at].central and isinstance(window, p.Tumbling | p.Sliding):
            # A window is final once every node has passed it, and a node may be away for a day: so results come before that.
            early_us = p.CENTER_EARLY_US
        allowed = self._allowed_lateness
        allowed_us = 0 if allowed is None else positive_us(allowed, what=f"step {named}: allowed_lateness")
        return self._add(
            p.Aggregate(
                name=named,
                input=self._at,
                keys=self._keys,
                window=window,
                aggregates=given,
                early_us=early_us,
                allowed_lateness_us=allowed_us,
                ttl_us=None if ttl is None else positive_us(ttl, what=f"step {named}: ttl"),
            )
        )

    def ewma(
        self,
        *,
        alpha: float | None = None,
        half_life: str | timedelta | None = None,
        name: str | None = None,
        **columns: Expr,
    ) -> Stream:
        """Every row, with exponentially weighted means beside it: `ewma(smooth="temp", alpha=0.2)`.

        The rows of a key are taken in order of time, once the watermark has passed them; each new column is a double,
        `alpha` times the row's value plus `1 - alpha` times the mean so far. With `half_life="30s"` in place of `alpha` it
        is the mean of the values so far, each counting half as much with every half-life that has passed since. The
        first value is the first mean; a null leaves the mean as it is.
        """
        if self._window is not None:
            raise PipelineError("ewma goes on over all rows of a key and has no windows. Leave .window(...) out.")
        graph, named = self._graph, self._named("ewma", name)
        if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float)):
            raise PipelineError(f"step {named}: alpha={alpha!r} is not a number. It is the weight of the newest value.")
        with graph.building(named):
            span_us = None if half_life is None else positive_us(half_life, what="half_life")
            given = tuple(
                parse_double(expression_source(sql), self._stream.schema, column).sql for column, sql in columns.items()
            )
        weight = None if alpha is None else float(alpha)
        return self._add(
            p.Ewma(name=named, input=self._at, keys=self._keys, alpha=weight, half_life_us=span_us, columns=given)
        )

    def over(
        self,
        *,
        rows: int | None = None,
        range: str | timedelta | None = None,  # noqa: A002 - the word of SQL
        order: str | Sequence[str] = (),
        name: str | None = None,
        **aggregates: Expr,
    ) -> Stream:
        """Every row, with aggregates over the rows of its key up to it: `over(rows=3, mean="avg(temp)", before="lag(temp)")`.

        `rows=3` is the row and the two before it in order of time; `range="10s"` is the rows that are up to 10 seconds older, and all
        of its own time; without both it is all rows so far. Rows are emitted once the watermark has passed them. `order`: columns by
        which rows of one time are ordered.
        """
        if self._window is not None:
            raise PipelineError("over has a frame of its own, rows= or range=. Leave .window(...) out.")
        named = self._named("over", name)
        if rows is not None and (range is not None or isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise PipelineError(
                f"step {named}: over takes either rows= (a whole number of at least 1, the row itself included) or range= (a span)."
            )
        with self._graph.building(named):
            given = tuple(
                p.NamedAggregate(
                    column, parse_aggregate(expression_source(sql, column), self._stream.schema, column, over=True).sql
                )
                for column, sql in aggregates.items()
            )
            span_us = None if range is None else positive_us(range, what="range")
        return self._add(
            p.Over(
                name=named,
                input=self._at,
                keys=self._keys,
                frame="rows" if range is None else "range",
                preceding=span_us if rows is None else rows - 1,
                aggregates=given,
                order=(order,) if isinstance(order, str) else tuple(order),
            )
        )

    def match(
        self, pattern: Pattern, measures: Mapping[str, Expr] | None = None, **options: Unpack[MatchOptions]
    ) -> Stream:
        """Look for a pattern in the rows of each key: `match(pattern, measures={"peak": "max(b.temp)"})`.

        Emits one row per match with the keys and the measures; with `rows="all"`, each of its rows with the measures up to there.
        `skip`: where to go on after a match: `"past_last"`, `"next"`, `("first", "b")`, `("last", "b")`, or `"none"` for all.
        `choose`: of matches with one first row the `"earliest"` to be complete, or the one `"preferred"` as in SQL. `order`:
        columns by which rows of one time are ordered. `limit`: the maximum number of candidates per key.
        """
        if self._window is not None:
            raise PipelineError("match goes through all rows of a key and has no windows. Leave .window(...) out.")
        graph, named = self._graph, self._named("match", options.get("name"))
        with graph.building(named):
            return self._add(match_step(named, self._at, self._keys, pattern, measures or {}, options))

    def process(
        self,
        function: type[KeyedFunction],
        *,
        schema: Mapping[str, str] | None = None,
        ordered: bool | None = None,
        on_error: p.OnFunctionError = "fail",
        name: str | None = None,
    ) -> Stream:
        """What a function with state and timers makes of the rows of each key: `process(Alarm, schema={...})`.

        `function` is a class that derives from `KeyedFunction`. With event time the rows of a key come in order of time, once
        the watermark has passed them; `ordered=False`, and streams without, take them as they arrive. `schema` is that of
        the rows it gives, if it is not the input's. `on_error="dead_letter"`: a row or timer for which it raises goes to the dead
        letters, and the state of the key is as it was before the call.
        """
        if self._window is not None:
            raise PipelineError("process sees all rows of a key and has no windows. Leave .window(...) out.")
        graph, named = self._graph, self._named("process", name)
        check_word("on_error", on_error, get_args(p.OnFunctionError), where=f"step {named}: ", error=PipelineError)
        return self._add(
            p.Process(
                name=named,
                input=self._at,
                keys=self._keys,
                states=declared_states(function, named),
                path=graph.register(function),
                schema=(self._stream.schema if schema is None else Schema.of(schema)).to_dict(),
                ordered=graph.types[self._at].time is not None if ordered is None else ordered,
                on_error=on_error,
            )
        )

    def _add(self, step: p.Step) -> Stream:
        return Stream(self._graph, self._graph.add(step, state=self._state))

    def _named(self, what: str, name: str | None) -> str:
        return self._graph.name_for(keyed_name(what, self._keys), name)


def keyed_name(what: str, keys: Sequence[str]) -> str:
    """The name of a step by what it does and the keys it does it by."""
    return "_".join([what, *(key for key in keys if key.isidentifier() and key.isascii())])[:80]


def _key_names(what: str, given: tuple[str | Sequence[str], ...]) -> tuple[str, ...]:
    """Keys, from names and lists of names."""
    names: list[Any] = []
    for one in given:
        names += [one] if isinstance(one, str) or not isinstance(one, Sequence) else one
    for name in names:
        if not isinstance(name, str):
            raise PipelineError(
                f"{what}({name!r}): a key is the name of a column, as in {what}('device'). Make a column of an expression first, with "
                "with_columns(...)."
            )
    return tuple(names)


def _signed_us(value: Span, *, what: str) -> int:
    if isinstance(value, str) and value.strip().startswith("-"):
        return -duration_us(value.strip().removeprefix("-"), what=what)
    return duration_us(value, what=what)


def _join_columns(step: str, on: On) -> tuple[tuple[str, ...], tuple[str, ...]]:
    given: Any = on
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        names = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
        pairs = [(name, name) for name in names]
    if not all(isinstance(name, str) for pair in pairs for name in pair):
        raise PipelineError(
            f'step {step}: on={on!r} does not name columns. Write on="device", on=["site", "device"], or from left to right '
            'on={"device": "id"}.'
        )
    return tuple(left for left, _ in pairs), tuple(right for _, right in pairs)


def _named_aggregate(
    name: str, wanted: Aggregated | type, schema: Schema, register: Callable[[Callable[..., Any]], str]
) -> p.NamedAggregate:
    """One output column of an aggregate step, checked. `register` gives the import path of a class.

    Raises:
        ExpressionError, PipelineError: what is wrong, and where.
    """
    if isinstance(wanted, AggregatorCall):
        return _user_aggregate(name, wanted, schema, register)
    if isinstance(wanted, type) and issubclass(wanted, Aggregator):
        raise PipelineError(f"{name}={wanted.__name__}: say what it is over: {wanted.__name__}.of('column').")
    return p.NamedAggregate(name, parse_aggregate(expression_source(wanted, name), schema, name).sql)


def _user_aggregate(
    name: str, wanted: AggregatorCall, schema: Schema, register: Callable[[Callable[..., Any]], str]
) -> p.NamedAggregate:
    aggregator = wanted.aggregator
    called = f"{name}={aggregator.__name__}.of(...)"
    if not wanted.arguments:
        raise PipelineError(f"{called}: give at least one column or expression.")
    state, result = getattr(aggregator, "state", None), getattr(aggregator, "result", None)
    if not isinstance(state, Mapping) or not state:
        raise PipelineError(f"{called}: the class needs state, such as state = {{'total': 'double'}}.")
    if not isinstance(result, str):
        raise PipelineError(f"{called}: the class needs the type of its result, such as result = 'double'.")
    unknown = ", ".join(column for column in aggregator.init if column not in state)
    if unknown:
        raise PipelineError(f"{called}: init names {unknown}, which is not in state.")
    arguments = tuple(parse(expression_source(argument, name), schema).sql for argument in wanted.arguments)
    user = p.UserAggregate(
        path=register(aggregator),
        arguments=arguments,
        state={column: str(DataType.parse(kind)) for column, kind in state.items()},
        result=str(DataType.parse(result)),
    )
    return p.NamedAggregate(name, f"{aggregator.__name__}({', '.join(arguments)})", user)
