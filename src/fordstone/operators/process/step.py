"""Keyed functions: a user's code for the rows of a key, with state and timers.

Rows that are ordered wait for the watermark; then each key's rows and event timers are taken in order of time, a timer
after the rows of its time. Otherwise rows are taken as they come, and event timers when the watermark has passed them. Timers
by the clock fire at barriers, which carry the time of the clock. Keys are independent of each other, so they are taken one
after the other, each with its state at hand. `store` keeps the state, `cells` is what the function sees of it.

Invariants: if ordered, what a function sees and gives for a key is a function of the key's rows, whatever the batches,
watermarks, barriers and restores; rows that it gives are not late for the next step.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any, Final

import numpy as np
import polars as pl

from fordstone.errors import ConfigError, FordstoneError, PipelineError, PlanError, SchemaError, TaskError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US, UNIT_US, duration_us, human_us
from fordstone.lang.polars.times import microseconds
from fordstone.lang.python_times import shown_row
from fordstone.lang.schema import RESERVED_PREFIX, DataType, Schema
from fordstone.lang.values import MOST_US, UNFIT, coercion, microseconds_of, time_of
from fordstone.operators.aggregate.partial import ONE
from fordstone.operators.base import (
    IN_STEP,
    ROW_ID,
    ROW_WATERMARK,
    Emit,
    Emits,
    Family,
    Moment,
    Operator,
    OperatorContext,
    function_text,
    keys_text,
    late_emit,
    resolve_function,
    stream_details,
)
from fordstone.operators.dead_letter import DEAD, Failed, givable, letters_of
from fordstone.operators.process.cells import NOT_YET_US, CellKind, Scene
from fordstone.operators.process.store import Entry, KeyedStore, Timer, Timers
from fordstone.operators.row_order import KeyedRows, Numbers, WaitingRows, key_expressions, keyed
from fordstone.operators.user_function import RAISED, frame_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import (
    TIMESTAMP,
    Derived,
    EventTime,
    StreamType,
    Types,
    append_only,
    late_rows,
    needs_time,
    plain_keys,
)
from fordstone.state.base import State, StateBackend

AFTER_MAX_US: Final = 1_000_000 * UNIT_US["d"]
"""Maximum duration until a timer fires, about 2,700 years: the time at which it fires must be a valid timestamp."""


@dataclass(slots=True, kw_only=True)
class ProcessScene(Scene):
    """Where an operator is at the moment, with what timers need."""

    step: str
    shift_us: int | None
    """What to add to a time as users see it; None: the stream has no event time."""
    entry: Entry | None = None
    floor_us: int = TIME_MIN_US
    """No event timer can fire before this time."""
    firing_us: int | None = None
    """The time of the event timer that is firing."""
    input_ended: bool = False
    input_over: bool = False
    """The input has ended, and all rows of the key have been seen."""

    def here(self) -> str:
        return f"step {self.step}, key {self.key!r}"


class Context:
    """Handed to `process` and `on_timer`; good only until they return (a generator: until it is exhausted)."""

    __slots__ = ("_scene",)

    def __init__(self, scene: ProcessScene) -> None:
        self._scene = scene

    @property
    def key(self) -> Any:
        """The key: of one column its value, of several a tuple."""
        return self._scene.key

    @property
    def time(self) -> dt.datetime | None:
        """The event time of the row or timer; for timers by the clock, how far event time has come. None on streams without."""
        scene = self._scene
        if scene.shift_us is None or scene.now_us <= TIME_MIN_US + 1:
            return None
        return time_of(scene.now_us - scene.shift_us)

    @property
    def ended(self) -> bool:
        """Whether the input has ended and all rows of this key have been seen: only timers are left."""
        return self._scene.input_over

    def set_timer(
        self,
        name: str = "",
        *,
        at: dt.datetime | None = None,
        after: str | dt.timedelta | None = None,
        clock: bool = False,
    ) -> None:
        """Have `on_timer` called at a time, or after a duration. Replaces the key's timer of that name and kind."""
        scene = self._scene
        if not isinstance(name, str):
            raise TaskError(f"{scene.here()}: set_timer({name!r}): a timer's name is a string.")
        if (at is None) == (after is None):
            raise TaskError(f"{scene.here()}: set_timer({name!r}): give either at= or after=.")
        try:
            at_us = None if at is None else microseconds_of(at)
            after_us = 0 if after is None else _span_us(after)
        except (TypeError, ConfigError) as error:
            raise TaskError(f"{scene.here()}: set_timer({name!r}): {error}") from None
        if clock:
            timers, now_us = self._timers(clock=True), scene.now_us
            if at_us is None:
                timers.set_after(name, after_us, now_us)
            else:
                timers.set(name, at_us, now_us)
            return
        if scene.shift_us is None:
            raise TaskError(
                f"{scene.here()}: set_timer({name!r}): the stream has no event time. Set it by the clock (clock=True), or "
                "declare event time at the source."
            )
        due_us = scene.now_us + after_us if at_us is None else at_us + scene.shift_us
        if due_us - scene.shift_us > MOST_US:
            raise TaskError(
                f"{scene.here()}: set_timer({name!r}): it would fire after the year 9999. Set an earlier time."
            )
        if scene.firing_us is not None and due_us <= scene.firing_us:
            raise TaskError(
                f"{scene.here()}: set_timer({name!r}): on_timer may only set a timer later than the one that is firing, "
                "or timers would fire forever. Set a later time."
            )
        self._timers(clock=False).set(name, max(due_us, scene.floor_us), scene.now_us)

    def delete_timer(self, name: str = "", *, clock: bool = False) -> None:
        """Take the key's timer of that name and kind back, if there is one."""
        self._timers(clock=clock).delete(name)

    def _timers(self, *, clock: bool) -> Timers:
        entry = self._scene.entry
        if entry is None:
            raise AssertionError("timers are set while a function works on a key")
        if clock:
            if entry.clocks is None:
                entry.clocks = Timers()
            return entry.clocks
        if entry.timers is None:
            entry.timers = Timers()
        return entry.timers


@lru_cache(maxsize=1024)
def _span_us(span: str | dt.timedelta) -> int:
    found = duration_us(span, what="after")
    if found < 0:
        raise ConfigError(f"after={span!r} must not be negative.")
    if found > AFTER_MAX_US:
        raise ConfigError(
            f"after={span!r} is longer than {human_us(AFTER_MAX_US)}, the maximum. Use a shorter duration."
        )
    return found


METHODS: Final = frozenset({"process", "on_timer"})
"""The methods of a keyed function: no state can have one of these names."""
MAP_KEYS: Final = frozenset(
    {"boolean", "tinyint", "smallint", "int", "bigint", "string", "binary", "date", "timestamp", "decimal"}
)
"""Types whose values are equal exactly if they look equal."""


def state_types(step: p.Process) -> dict[str, tuple[DataType, DataType | None]]:
    """The types of each state: of its values, and of a map's keys. Refuses what cannot be kept."""
    found: dict[str, tuple[DataType, DataType | None]] = {}
    for state in step.states:
        where = f"state {state.name}"
        if not state.name.isidentifier() or state.name.startswith(RESERVED_PREFIX):
            raise SchemaError(
                f"{where}: a state must have the name of a Python attribute that does not begin with {RESERVED_PREFIX!r}. Rename it."
            )
        if state.name in METHODS:
            raise SchemaError(f"{where}: KeyedFunction has a method of that name. Give the state another name.")
        if state.name in found:
            raise SchemaError(f"{where} is declared twice. Remove one declaration.")
        if state.ttl_us is not None and state.ttl_us <= 0:
            raise SchemaError(f"{where}: ttl must be longer than zero. Leave it out to remember for good.")
        if (state.key_type is not None) != (state.kind == "map"):
            raise SchemaError(
                f"{where}: key_type is required for a map state and not allowed for value and list states."
            )
        key = None if state.key_type is None else _kept(where, state.key_type)
        if key is not None and key.name not in MAP_KEYS:
            raise SchemaError(f"{where}: {key} cannot be the key of a map; use one of {', '.join(sorted(MAP_KEYS))}.")
        found[state.name] = (_kept(where, state.type), key)
    return found


def _kept(where: str, text: str) -> DataType:
    try:
        kind = DataType.parse(text)
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from None
    if kind.name == "null":
        raise SchemaError(f"{where}: a state of type null has nothing to remember.")
    return kind


Record = dict[str, Any]

ROWS_AT_ONCE: Final = 32_768
"""Maximum number of rows that are Python objects at a time."""


def records_of(rows: pl.DataFrame) -> Iterator[Record]:
    """Each row as a dict."""
    return chain.from_iterable(_records(part) for part in rows.iter_slices(ROWS_AT_ONCE))


def _records(rows: pl.DataFrame) -> list[Record]:
    names, columns = rows.columns, [column.to_list() for column in rows.get_columns()]
    return [dict(zip(names, values)) for values in zip(*columns, strict=True)]  # noqa: B905 - as many values as names; the hot loop


class Given:
    """The rows that a function gave during one call of its operator."""

    def __init__(self, step: str, schema: Schema, time: EventTime | None) -> None:
        """`time`: where the rows carry event time, if they do."""
        self._step = step
        self._schema = schema
        self._coercions = {name: coercion(kind, as_read=True) for name, kind in schema.items()}
        self._time = time
        self._records: list[Record] = []
        self._marks: list[int] = []
        self._frames: list[pl.DataFrame] = []
        self._frame_marks: list[int] = []
        self.failed: list[Failed] = []
        """Rows and timers that the function raised an exception for, and that are set aside."""

    def checked(self, made: Any) -> list[Record]:
        """What the function gave as a list; raises for a record that does not fit the schema."""
        records = [made] if isinstance(made, dict) else list(made)
        for record in records:
            if not self._fits(record):
                self._frame([record])
        return records

    def _fits(self, record: Any) -> bool:
        """Whether a record fits. A frame of one record, whose error says why not, takes a hundred times as long."""
        if not isinstance(record, dict) or record.keys() - self._coercions.keys():
            return False
        try:
            for name, coerce in self._coercions.items():
                value = record.get(name)
                if value is not None:
                    coerce(value)
        except UNFIT:
            return False
        return True

    def take(self, made: Any, mark: int) -> None:
        """Take what the function gave: a record, or any number of them. `mark`: when, or where in the input."""
        records = self._records
        if isinstance(made, dict):
            records.append(made)
            self._marks.append(mark)
        else:
            # First all of them: a generator may raise in the middle, and then none counts.
            several = list(made)
            records += several
            self._marks.extend(repeat(mark, len(several)))
        if len(records) >= ROWS_AT_ONCE:
            self._pack()

    def emits(self, *, floor_us: int | None) -> Emits:
        """All of it, in the order of the marks. `floor_us`: no row may be before; None: before its mark."""
        self._pack()
        letters = [Emit(letters_of(self._step, self.failed), port=DEAD)] if self.failed else []
        if not self._frames:
            return letters
        frame = pl.concat(self._frames) if len(self._frames) > 1 else self._frames[0]
        marks = np.array(self._frame_marks, dtype=np.int64)
        if self._time is not None:
            self._check_times(frame, self._time, marks if floor_us is None else np.full_like(marks, floor_us))
        if len(marks) > 1 and (marks[1:] < marks[:-1]).any():
            frame = frame[marks.argsort(kind="stable")]
        return [Emit(frame), *letters]

    def _pack(self) -> None:
        if self._records:
            self._frames.append(self._frame(self._records))
            self._frame_marks += self._marks
            self._records, self._marks = [], []

    def _frame(self, records: Sequence[Record]) -> pl.DataFrame:
        if others := [record for record in records if not isinstance(record, dict)]:
            raise TaskError(
                f"step {self._step}: the function gave {type(others[0]).__name__} {others[0]!r}; records are dicts."
            )
        return frame_of(records, self._schema, self._step)

    def _check_times(self, frame: pl.DataFrame, time: EventTime, floors_us: Any) -> None:
        times = microseconds(frame.get_column(time.column))
        early = (times + time.shift_us < pl.Series(floors_us)).fill_null(value=True)
        if early.any():
            place = int(early.arg_max() or 0)
            found, floor = shown_row(frame, place), time_of(int(floors_us[place]) - time.shift_us)
            raise SchemaError(
                f"step {self._step}: the function gave {found!r}, whose {time.column} is "
                f"{'missing' if found[time.column] is None else f'before {floor}'}: it would be late for the next step. Give the "
                f"time of the row or timer, or a later one; or name the column differently, so that it is not the event time."
            )


def _with_id(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows with their ids, which are null where the source gives no positions."""
    return frame if ROW_ID in frame.columns else frame.with_columns(pl.lit(None, dtype=pl.String()).alias(ROW_ID))


class _Waiting:
    """The rows that wait for the watermark, with or without ids.

    Each kind has a state of its own, and both are always there: whether ids are wanted (`on_error`) may change between two runs,
    and the rows of the run before are released all the same.
    """

    def __init__(
        self, keys: Sequence[str], schema: Schema, *, time: EventTime, state: StateBackend, with_ids: bool
    ) -> None:
        self._with_ids = with_ids
        # Rows that differ in the id alone are in order, too: which of them is set aside must be the same on a replay.
        identified = Schema((*schema.items(), (ROW_ID, DataType.parse("string"))))
        self._plain = WaitingRows(keys, schema, time=time, state=state)
        self._identified = WaitingRows(keys, identified, time=time, state=state)
        self._used = self._identified if with_ids else self._plain

    def states(self) -> dict[str, State]:
        return {"waiting": self._plain.state, "identified": self._identified.state}

    def take(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        return self._used.take(_with_id(frame) if self._with_ids else frame, late=late)

    def release(self, watermark_us: int) -> pl.DataFrame | None:
        """The rows below it, in any order."""
        released = [waiting.release(watermark_us) for waiting in (self._plain, self._identified)]
        found = [rows for rows in released if rows.height]
        return pl.concat(found, how="diagonal") if found else None

    def by_key(self, rows: pl.DataFrame) -> tuple[KeyedRows, Numbers]:
        """Released rows (at least one), in order within each key, and their times."""
        keyed_rows = self._used.by_key(_with_id(rows) if self._with_ids else rows)
        return keyed_rows, self._used.times(keyed_rows.rows)


END_TIMERS_MAX: Final = 10_000
"""Maximum number of timers of one key that fire after the input has ended; more means that it never stops."""


class Process(Operator):
    """Calls a user's function for the rows and timers of each key."""

    def __init__(
        self,
        step: p.Process,
        stream: StreamType,
        out: StreamType,
        *,
        make: Callable[[], Any],
        state: StateBackend,
        with_ids: bool = False,
    ) -> None:
        """`stream`: the input. `make` makes the user's object; called when there is something for it to do, and not before.

        `with_ids`: rows keep the id that they carry, for the dead letters.
        """
        self._step, self._stream, self._out = step, stream, out
        self._with_ids = with_ids
        self._make = make
        self._function: Any = None
        self._names = [state.name for state in step.states]
        self._scene = ProcessScene(step=step.name, shift_us=None if stream.time is None else stream.time.shift_us)
        self._context = Context(self._scene)
        self._waiting: _Waiting | None = None
        if step.ordered and stream.time is not None:
            self._waiting = _Waiting(step.keys, stream.schema, time=stream.time, state=state, with_ids=with_ids)
        key_types = {name: stream.schema[name].polars for name in step.keys} or {ONE: pl.Int8()}
        types, kinds = state_types(step), []
        for declared in step.states:
            value, map_key = types[declared.name]
            kind = CellKind(
                step=step.name,
                name=declared.name,
                kind=declared.kind,
                scene=self._scene,
                coerce=coercion(value),
                coerce_key=None if map_key is None else coercion(map_key),
                ttl_us=declared.ttl_us,
                by_clock=stream.time is None,
                copies=value.is_nested,
            )
            kinds.append((kind, value.polars, None if map_key is None else map_key.polars))
        self._store = KeyedStore(key_types, kinds, state)
        self._watermark_us = TIME_MIN_US

    def states(self) -> Mapping[str, State]:
        waiting = {} if self._waiting is None else self._waiting.states()
        return waiting | self._store.states()

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        if self._waiting is not None:
            return self._waiting.take(frame, late=late)
        names = [*self._stream.schema, ROW_ID] if self._with_ids else list(self._stream.schema)
        rows = (_with_id(frame) if self._with_ids else frame).select(names)
        if self._stream.time is None:
            return self._taken(rows, until_us=TIME_MIN_US)
        times = microseconds(rows.get_column(self._stream.time.column)) + self._stream.time.shift_us
        if late:
            return [late_emit(rows, frame.get_column(ROW_WATERMARK) - times)]
        in_time = (times >= max(self._watermark_us, TIME_MIN_US + 1)).fill_null(value=False)
        emits = []
        if not in_time.all():
            emits.append(late_emit(rows.filter(~in_time), self._watermark_us - times.filter(~in_time)))
            rows = rows.filter(in_time)
        if rows.height:
            emits += self._taken(rows, until_us=TIME_MIN_US)
        return emits

    def on_watermark(self, watermark_us: int) -> Emits:
        before_us = self._watermark_us
        if self._stream.time is None:
            return []
        self._scene.input_ended = watermark_us == TIME_MAX_US
        emits = self._taken(
            None if self._waiting is None else self._waiting.release(watermark_us), until_us=watermark_us
        )
        self._watermark_us = watermark_us
        if before_us > TIME_MIN_US and watermark_us < TIME_MAX_US:
            self._store.forget(watermark_us, by_clock=False, before_us=before_us)
        return emits

    def on_barrier(self, moment: Moment) -> Emits:
        emits: Emits = []
        if self._watermark_us < TIME_MAX_US:
            due = self._store.due(moment.now_us, by_clock=True)
            if due:
                given = Given(self._step.name, self._out.schema, self._out.time)
                for entry in due:
                    self._ring(entry, moment.now_us, given)
                emits = given.emits(floor_us=self._watermark_us)
        self._store.settle(moment.now_us)
        if self._stream.time is None:
            self._store.forget(moment.now_us, by_clock=True, before_us=None)
        self._store.write_back()
        self._store.evict(settled=True)
        return emits

    def clock_due_us(self) -> int | None:
        timers_us = self._store.clock_timers_due_us() if self._watermark_us < TIME_MAX_US else None
        values_us = self._store.clock_values_due_us() if self._stream.time is None else None
        return min((due_us for due_us in (timers_us, values_us) if due_us is not None), default=None)

    # Rows and timers.

    def _taken(self, rows: pl.DataFrame | None, *, until_us: int) -> Emits:
        """Work on rows and on the timers below `until_us`."""
        given = Given(self._step.name, self._out.schema, self._out.time)
        if rows is not None:
            rows = givable(rows, given.failed, self._step)
        if rows is not None and rows.height:
            keyed, times = self._by_key(rows)
            rows = keyed.rows[keyed.by_key]
            ids = rows.get_column(ROW_ID).to_list() if self._with_ids else repeat(None, rows.height)
            plain = records_of(rows.select(list(self._stream.schema)))
            records = zip(plain, times.take(keyed.by_key).tolist(), ids, strict=True)
            for entry, count in zip(self._store.entries(keyed.keys), keyed.counts.tolist(), strict=True):
                self._take_rows(entry, islice(records, count), given)
                if entry.timers is not None and until_us > TIME_MIN_US:
                    self._fire(entry, until_us, given, after_rows=True)
        if until_us > TIME_MIN_US:
            for entry in self._store.due(until_us, by_clock=False):
                self._fire(entry, until_us, given, after_rows=True)
        self._store.evict()
        return given.emits(floor_us=None if self._waiting is not None else self._watermark_us)

    def _take_rows(self, entry: Entry, rows: Iterator[tuple[Record, int, str | None]], given: Given) -> None:
        """Call the function for this key's rows (each with its time or number, and its id), and for the timers between them."""
        scene, context = self._scene, self._context
        timed, ordered, sets_aside = (
            self._stream.time is not None,
            self._waiting is not None,
            self._step.has_dead_letters,
        )
        process = self._ready(entry).process
        scene.input_over = False
        scene.floor_us = self._watermark_us
        row: dict[str, Any] = {}
        try:
            for row, mark, row_id in rows:
                if ordered:
                    if entry.timers is not None and entry.timers.least_us < mark:
                        self._fire(entry, mark, given, after_rows=False)
                    scene.floor_us = mark
                if timed:
                    scene.now_us = mark
                if sets_aside:
                    kept = {**row, ROW_ID: row_id}
                    self._try(entry, kept, lambda row=row: process(row, context), given, mark)  # type: ignore[misc]
                    continue
                made = process(row, context)
                if made is not None:
                    given.take(made, mark)
        except FordstoneError:
            raise
        except Exception as error:
            if not any(note.startswith(IN_STEP) for note in getattr(error, "__notes__", ())):
                error.add_note(f"{IN_STEP}{self._step.name}, process() for key {scene.key!r}, on row {row!r}")
            raise

    def _fire(self, entry: Entry, below_us: int, given: Given, *, after_rows: bool) -> None:
        """Call the function for the event timers of a key below a time. `after_rows`: no rows of it are left."""
        timers = entry.timers
        if timers is None or timers.least_us >= below_us:
            return
        scene = self._scene
        function = self._ready(entry)
        scene.input_over = after_rows and scene.input_ended
        fired = 0
        while (name := timers.next_below(below_us)) is not None:
            at_us = timers.at_us[name]
            timers.delete(name)
            scene.now_us = scene.floor_us = scene.firing_us = at_us
            if self._waiting is None:
                scene.floor_us = self._watermark_us
            timer = Timer(name=name, time=time_of(at_us - (scene.shift_us or 0)), clock=False)
            self._call(function, entry, timer, given, at_us)
            fired += scene.input_over
            if fired > END_TIMERS_MAX:
                raise TaskError(
                    f"step {self._step.name}, key {scene.key!r}: the input has ended, and still {END_TIMERS_MAX:,} timers "
                    f"fired one after the other, the last {name!r}. A timer that sets itself again never ends: set it only "
                    "if not ctx.ended."
                )

    def _ring(self, entry: Entry, now_us: int, given: Given) -> None:
        """Call the function for the timers of a key that the clock has reached: each once, whatever it sets."""
        clocks: Timers | None = entry.clocks
        if clocks is None:
            return
        scene = self._scene
        function = self._ready(entry)
        scene.input_over = False
        for at_us, name in clocks.due(now_us):
            if clocks.at_us.get(name) != at_us:
                continue  # the one before it took it back
            set_us = clocks.set_us[name]
            clocks.delete(name)
            scene.now_us = max(self._watermark_us, set_us) if self._stream.time is not None else NOT_YET_US
            scene.floor_us, scene.firing_us = self._watermark_us, None
            self._call(function, entry, Timer(name=name, time=time_of(at_us), clock=True), given, at_us)

    def _try(self, entry: Entry, record: Record, call: Callable[[], Any], given: Given, mark: int) -> None:
        """Call the function. If it raises, the state of the key is as it was, and the record goes to the dead letters."""
        saved = entry.saved()
        try:
            made = call()
            if made is not None:
                given.take(given.checked(made), mark)
        except RAISED as error:  # of the user's function
            entry.restore(saved)
            given.failed.append(Failed(record=record, error=error))

    def _call(self, function: Any, entry: Entry, timer: Timer, given: Given, mark: int) -> None:
        if self._step.has_dead_letters:
            about = {"key": self._scene.key, "timer": timer.name, "time": timer.time}
            self._try(entry, about, lambda: function.on_timer(timer, self._context), given, mark)
            self._scene.firing_us = None
            return
        try:
            made = function.on_timer(timer, self._context)
            if made is not None:
                given.take(made, mark)
        except FordstoneError:
            raise
        except Exception as error:
            error.add_note(
                f"{IN_STEP}{self._step.name}, on_timer() for key {self._scene.key!r}, timer {timer.name!r} of "
                f"{timer.time}"
            )
            raise
        finally:
            self._scene.firing_us = None

    def _ready(self, entry: Entry) -> Any:
        """The user's object, with the state of a key at hand."""
        function = self._function
        if function is None:
            function = self._function = self._made()
        for name, cell in zip(self._names, entry.cells, strict=True):
            setattr(function, name, cell)
        scene, key = self._scene, entry.key
        scene.entry = entry
        if len(key) != 1:
            scene.key = key
        else:
            scene.key = key[0] if self._step.keys else ()
        return function

    def _made(self) -> Any:
        made = self._make()
        if not all(callable(getattr(made, name, None)) for name in ("process", "on_timer")):
            raise PlanError(
                f"step {self._step.name}: {type(made).__name__} is no KeyedFunction: it lacks process or on_timer."
            )
        return made

    def _by_key(self, rows: pl.DataFrame) -> tuple[KeyedRows, Numbers]:
        """The rows by key, and their times, or numbers if they have none."""
        if self._waiting is not None:
            return self._waiting.by_key(rows)
        at, time = keyed(rows, key_expressions(self._step.keys), in_order=True), self._stream.time
        marks = (
            np.arange(rows.height)
            if time is None
            else (microseconds(rows.get_column(time.column)) + time.shift_us).to_numpy()
        )
        return KeyedRows(rows=rows, keys=at.keys, counts=at.counts, by_key=at.by_key), marks


class ProcessFamily(Family[p.Process]):
    """A user's function of the rows of a key, with state and timers."""

    steps = (p.Process,)
    stays = "{step} is a user function with state by key, over the rows of all nodes"

    def check(self, step: p.Process, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, "process")
        if stream.looped:
            raise PipelineError(
                f"step {step.name}: process is not possible inside or below a loop: rows there have no event time and no fixed "
                "order, so a replay could give other results. Use it before the loop."
            )
        if step.ordered:
            needs_time(step, stream, "process(ordered=True)")
        plain_keys(step.keys, stream.schema)
        state_types(step)
        schema = Schema.of(step.schema)
        # Rows keep their event time in the column of the input's time, if it is there and still a time.
        time = stream.time if stream.time is not None and schema.get(stream.time.column) == TIMESTAMP else None
        main = StreamType(schema=schema, time=time, row_wise=False)
        late = late_rows(step, stream) if stream.time is not None else {}
        return {p.Input(step.name): main, **late}

    def make(self, step: p.Process, context: OperatorContext) -> Operator:
        make = resolve_function(step.path, context.functions)
        out = self.check(step, context.types)[p.Input(step.name)]
        with_ids = step.has_dead_letters and step.name in context.with_ids
        return Process(step, context.types[step.input], out, make=make, state=context.state, with_ids=with_ids)

    def title(self, step: p.Process) -> str:
        return f"process {function_text(step.path)} {keys_text(step.keys)}"

    def describe(self, step: p.Process, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield "takes", "rows in order of time" if step.ordered else "rows as they arrive: results depend on that"
        yield from stream_details(step, types)
        yield "keeps", _remembered(step)
        if step.has_dead_letters:
            yield "on error", "the row goes to the dead letters, and the key's state stays as it was"


def _remembered(step: p.Process) -> str:
    named = [
        state.name if state.ttl_us is None else f"{state.name} (for {human_us(state.ttl_us)})" for state in step.states
    ]
    waiting = "the rows that wait for time, timers" if step.ordered else "timers"
    return f"{waiting}, and for each key: {', '.join(named)}" if named else waiting.replace(", timers", ", and timers")
