"""Lookups: rows with the columns of a table's row beside them, found by key.

A static table is read when the first rows come, and never again: a lookup is then a function of each row. One with `refresh` is read
again now and then; which rows it has depends on the time of the barrier before, which is recorded. The table of a
control stream holds the newest row of each key. It changes at barriers only, so that what a row finds depends on the epoch
that it is in, and not on which of two streams was read first. A control table (`join_control`) is such a stream whose rows
carry a version, by which they are ordered, and what they do: a delete takes the key's row away.

Keys are compared as in a join (`operators.join.sides`): a null finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import polars as pl

from fordstone.errors import FordstoneError, PipelineError, SourceError, TaskError
from fordstone.lang.duration import human_us
from fordstone.lang.python_times import shown_row
from fordstone.lang.schema import Schema
from fordstone.operators.base import (
    DELETE,
    IN_STEP,
    OP,
    ROW_ID,
    ROW_WATERMARK,
    Emit,
    Emits,
    Family,
    Moment,
    OpenTable,
    Operator,
    OperatorContext,
    Stateless,
    connector_text,
    stream_details,
)
from fordstone.operators.dead_letter import reason_of
from fordstone.operators.join.sides import (
    LEFT,
    LOOKUP_HOWS,
    RIGHT,
    JoinColumns,
    Side,
    check_how,
    join_columns,
    keys_details,
    lookup_columns,
    with_hidden,
)
from fordstone.operators.row_order import total_order
from fordstone.plan import plan as p
from fordstone.plan.stream_type import Derived, StreamType, Types, append_only
from fordstone.state.base import FOUND, State, StateBackend, Table

_UNMATCHED: Final = {"inner": "dropped", "left": "emitted with nulls"}
VERSION: Final = "__version"
"""Of rows of a control table: which version brought them. Of one version, each key has one row."""


class LookupJoin:
    """Puts the columns of a table's rows beside rows. The table has its rows as their side carries them."""

    def __init__(self, columns: JoinColumns, left: Side, right: Side, *, inner: bool) -> None:
        self.left, self.right = left, right
        self._inner = inner
        self._out = list(columns.schema)
        self._new = list(columns.right.values())
        payload = {name: columns.schema[name].polars for name in self._new if right.source(name) == name}
        self.table_schema: dict[str, pl.DataType] = right.key_types | payload
        """Of the table: key columns, then the others."""

    def table(self, state: StateBackend) -> Table:
        """A fresh table. Beside its columns it has the time of each row, or null."""
        return state.table(self.right.keys, schema=self.table_schema | {RIGHT: pl.Int64()})

    def join(self, rows: pl.DataFrame, table: Table) -> pl.DataFrame:
        """Rows, as their side carries them, as rows of the result."""
        got = table.get(rows.select(self.left.keys))
        found = got.get_column(FOUND)
        columns = self.left.shown(rows)
        nothing = pl.Series([None], dtype=pl.Boolean)
        for name, series in self.right.shown(got, only=self._new).items():
            # `get` returns the key of a row that was not found as well; in the result it is null.
            columns[name] = series if found.all() else series.zip_with(found, nothing.cast(series.dtype))
        out = with_hidden(pl.DataFrame([columns[name] for name in self._out]), rows)
        return out.filter(found) if self._inner else out


class StaticLookup:
    """Looks rows up in a static table."""

    def __init__(
        self,
        step: str,
        lookup: LookupJoin,
        read: Callable[[], pl.DataFrame],
        state: StateBackend,
    ) -> None:
        """`read` gives the table's rows; called once, when the first rows come."""
        self._step = step
        self._lookup = lookup
        self._read = read
        self._state = state
        self._table: Table | None = None
        self.keys, self.key_columns = list(lookup.right.keys), list(lookup.right.key_columns)

    def apply(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows with the columns of the table."""
        if self._table is None:
            self._table = self._filled()
        return self._lookup.join(with_hidden(self._lookup.left.carried(frame), frame), self._table)

    def forget(self) -> None:
        """Read the table again when the next rows come."""
        self._table = None

    def rows(self, given: pl.DataFrame) -> pl.DataFrame:
        """The rows of a table as they are looked up in; `SourceError` if a key has more than one."""
        side = self._lookup.right
        rows = side.carried(given).drop_nulls(list(side.keys))
        double = rows.filter(pl.struct(side.keys).is_duplicated())
        if double.height:
            key = shown_row(side.alone(double.head(1)), 0)
            named = ", ".join(f"{name}={key[name]!r}" for name in side.key_columns)
            raise SourceError(
                f"step {self._step}: the table of the lookup has more than one row for {named}. "
                "Leave one row per key in it, or add a column to on= that distinguishes them."
            )
        return rows

    def _filled(self) -> Table:
        try:
            given = self._read()
        except FordstoneError as error:
            raise SourceError(
                f"step {self._step}: the table of the lookup cannot be read: {error}"
            ) from error.__cause__
        except OSError as error:
            # The network and other systems may come back: the engine tries again, after a wait.
            error.add_note(f"{IN_STEP}{self._step}, while the table of the lookup was read")
            raise
        except Exception as error:
            raise TaskError(
                f"step {self._step}: the table of the lookup cannot be read: {reason_of(error)}."
            ) from error
        table = self._lookup.table(self._state)
        table.put(self.rows(given))
        return table


class RefreshedLookup(Stateless):
    """Looks rows up in a table that is read again while the pipeline runs. What rows find depends on the epoch that they are in alone."""

    def __init__(self, step: p.Lookup, lookup: LookupJoin, open_table: OpenTable, context: OperatorContext) -> None:
        self._now_us = context.began_us
        self._static = StaticLookup(step.name, lookup, self._read, context.state)
        super().__init__(self._static.apply)
        self._kept = open_table(step, self._in_order)
        self._shown: pl.DataFrame | None = None

    def on_barrier(self, moment: Moment) -> Emits:
        self._now_us = moment.now_us
        if self._shown is not None and self._kept.at(moment.now_us) is not self._shown:
            self._static.forget()
        self._kept.refresh(moment.now_us)
        return []

    def clock_due_us(self) -> int | None:
        """So that the first rows after a long silence do not find what the table had in it before."""
        return self._kept.due_us()

    def _read(self) -> pl.DataFrame:
        self._shown = self._kept.at(self._now_us)
        return self._shown

    def _in_order(self, given: pl.DataFrame) -> pl.DataFrame:
        """What was read, in one order and without rows that no key finds; it is checked before it takes the place of what there was."""
        rows = self._static.rows(given)
        places = rows.with_row_index("__place").sort(self._static.keys)["__place"]
        return given.drop_nulls(self._static.key_columns)[places]


class LookupLatest(Operator):
    """Looks rows up in the newest rows of a control stream. Takes both as their feeders give them."""

    def __init__(
        self, lookup: LookupJoin, right: Side, order: list[pl.Expr], *, waits: bool, state: StateBackend
    ) -> None:
        """`order`: by what control rows of one key, epoch and time are ordered."""
        self._lookup = lookup
        self._keys = list(right.keys)
        self._order = order
        self._waits = waits
        self._table = lookup.table(state)
        self._control: list[pl.DataFrame] = []
        """Of this epoch. Neither these nor `_waiting` outlive a barrier: so they are no state."""
        self._waiting: list[pl.DataFrame] = []

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        """Keep control rows for the barrier. Other rows wait for it too, or go on with what was known before."""
        if RIGHT in frame.columns:
            self._control.append(frame)
            return []
        if self._waits:
            self._waiting.append(frame)
            return []
        return self._joined(frame, late=late)

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - the newest row is the newest at any time
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - nor for the clock
        self._take_control()
        if not self._waiting:
            return []
        waiting, self._waiting = self._waiting, []
        return self._joined(pl.concat(waiting), late=False)

    def states(self) -> Mapping[str, State]:
        return {"latest": self._table}

    def _joined(self, rows: pl.DataFrame, *, late: bool) -> Emits:
        out = self._lookup.join(rows, self._table)
        return [Emit(out, late=late)] if out.height else []

    def _take_control(self) -> None:
        if not self._control:
            return
        rows = pl.concat(self._control).drop_nulls(self._keys)
        self._control = []
        # Nulls come first: a row without a time is older than all with one.
        newest = rows.sort(RIGHT, *self._order).unique(self._keys, keep="last", maintain_order=True)
        if OP in newest.columns:
            # Of a control table: versions only grow from epoch to epoch, so none of these is older than what is there.
            goes = newest.get_column(OP) == DELETE
            if goes.any():
                self._table.delete(newest.filter(goes).select(self._keys))
                newest = newest.filter(~goes)
        before = self._table.get(newest.select(self._keys)).get_column(RIGHT)
        newer = (newest.get_column(RIGHT) >= before).fill_null(value=False) | before.is_null()
        self._table.put(newest.filter(newer).select([*self._lookup.table_schema, RIGHT]))


def _latest_sides(step: p.LookupLatest, context: OperatorContext) -> tuple[JoinColumns, Side, Side]:
    stream, control = context.types[step.input], context.types[step.control]
    columns = join_columns(stream.schema, control.schema, step.keys, step.control_keys, suffix=step.suffix)
    return (
        columns,
        Side(columns, stream.schema, step.keys, mark=LEFT, time=None),
        Side(columns, control.schema, step.control_keys, mark=RIGHT, time=control.time),
    )


class LookupFamily(Family[p.Lookup]):
    """Rows with the columns of a static table's row beside them."""

    steps = (p.Lookup,)
    stays = "{step} reads a table at the center"

    def check(self, step: p.Lookup, types: Types) -> Derived:
        stream = types[step.input]
        check_how(step, LOOKUP_HOWS)
        append_only(step, stream, "a lookup")
        return {p.Input(step.name): replace(stream, schema=lookup_columns(step, stream.schema).schema, upsert_key=None)}

    def make(self, step: p.Lookup, context: OperatorContext) -> Operator:
        stream, schema = context.types[step.input], Schema.of(step.schema)
        columns = lookup_columns(step, stream.schema)
        left = Side(columns, stream.schema, step.keys, mark=LEFT, time=None)
        right = Side(columns, schema, step.table_keys, mark=RIGHT, time=None)
        lookup = LookupJoin(columns, left, right, inner=step.how == "inner")
        if step.refresh_us is not None:
            if context.open_table is None:
                raise AssertionError(f"nothing here reads the table of step {step.name} again")
            return RefreshedLookup(step, lookup, context.open_table, context)
        read = partial(context.read_table, step.table, schema)
        return Stateless(StaticLookup(step.name, lookup, read, context.state).apply)

    def check_plan(self, step: p.Lookup, plan: p.Plan, types: Types) -> None:  # noqa: ARG002 - only the mode counts
        if step.refresh_us is not None and plan.mode == "unaligned":
            raise PipelineError(
                f"step {step.name}: with refresh= what a row finds depends on its epoch; in mode 'unaligned' rows change epochs when barriers "
                "overtake them. Use mode='aligned'."
            )

    def title(self, step: p.Lookup) -> str:
        return f"look up in {connector_text(step.table)}"

    def describe(self, step: p.Lookup, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        if step.refresh_us is not None:
            yield "table", f"is read again every {human_us(step.refresh_us)}, and used from the next epoch on"
        yield from keys_details(step.keys, step.table_keys, _UNMATCHED[step.how])
        yield from stream_details(step, types)


class LookupLatestFamily(Family[p.LookupLatest]):
    """Rows with the columns of the newest row of a control stream beside them."""

    steps = (p.LookupLatest,)
    fed = True
    stays = "{step} looks rows up in a stream at the center"

    def check(self, step: p.LookupLatest, types: Types) -> Derived:
        stream, control = types[step.input], types[step.control]
        check_how(step, LOOKUP_HOWS)
        append_only(step, stream, "a lookup")
        if not control.table:
            append_only(step, control, "the control stream of join_latest")
        if stream.looped or control.looped:
            raise PipelineError(f"step {step.name}: join_latest is not possible inside or below a loop.")
        columns = join_columns(stream.schema, control.schema, step.keys, step.control_keys, suffix=step.suffix)
        # The watermark may pass rows that wait for a barrier; and a control stream without time holds the watermark back
        # until it ends. A control table has no time either, but does not: its rows count from the barrier at which they came.
        timed = not step.waits and (control.time is not None or control.table)
        found = StreamType(
            schema=columns.schema,
            time=stream.time if timed else None,
            row_wise=control.table and stream.row_wise,
        )
        return {p.Input(step.name): found}

    def check_plan(self, step: p.LookupLatest, plan: p.Plan, types: Types) -> None:  # noqa: ARG002 - only the mode counts
        if plan.mode == "unaligned":
            raise PipelineError(
                f"step {step.name}: join_latest takes control rows in at barriers, so that what a row finds depends on its "
                "epoch; in mode 'unaligned' rows change epochs when barriers overtake them. Use mode='aligned'."
            )

    def make(self, step: p.LookupLatest, context: OperatorContext) -> Operator:
        columns, left, right = _latest_sides(step, context)
        lookup = LookupJoin(columns, left, right, inner=step.how == "inner")
        payload = {name: columns.schema[name] for name in columns.right.values() if name in lookup.table_schema}
        order = total_order((), Schema.of(payload)) if payload else []
        return LookupLatest(lookup, right, order, waits=step.waits, state=context.state)

    def make_feeder(self, step: p.LookupLatest, index: int, context: OperatorContext) -> Operator:
        _, left, right = _latest_sides(step, context)
        if index == 0:
            ids = (ROW_ID,) if step.name in context.with_ids else ()
            # Rows that wait for a barrier have no event time any more.
            hidden = ids if step.waits else (*ids, ROW_WATERMARK)
            return Stateless(lambda frame: with_hidden(left.carried(frame), frame, hidden))
        # A control table goes by version rather than by time, and its rows say what they do.
        table = context.types[step.control].table
        more = [pl.col(VERSION).alias(RIGHT), pl.col(OP)] if table else []
        return Stateless(lambda frame: right.carried(frame).with_columns(frame.select(more)))

    def title(self, step: p.LookupLatest) -> str:
        return f"look up in the newest rows of {step.control}"

    def describe(self, step: p.LookupLatest, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield from keys_details(step.keys, step.control_keys, _UNMATCHED[step.how])
        sees = "wait for the end of their epoch, and see its control rows"
        yield "rows", sees if step.waits else "go on at once, and see the control rows of epochs before"
        yield from stream_details(step, types)
        yield "keeps", "the newest control row of each key"
