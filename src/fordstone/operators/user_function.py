"""User functions of rows and batches: `map`, `flat_map` and `map_batches`.

A row for which the function raises, for which it gives what does not fit the schema, or that it cannot be given (with a time beyond the
year 9999), stops the run (`on_error="fail"`) or becomes a dead letter (`"dead_letter"`), and the others go on. With "fail", a function
that raises is called once more with the same row: if it raises the same again, a restart would not help, and the error is final. An
`OSError` is left to the restarts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import polars as pl

from fordstone.errors import FordstoneError, SchemaError, TaskError
from fordstone.lang.python_times import shown_row, shown_values
from fordstone.lang.schema import Schema
from fordstone.lang.values import UnfitError, frame_of_columns
from fordstone.operators.base import ROW_ID, ROW_WATERMARK, Emit, Emits, Moment, Operator, by_watermark
from fordstone.operators.dead_letter import (
    DEAD,
    SHOWN_CHARS_MAX,
    Failed,
    function_error,
    givable,
    letters_of,
    reason_of,
    row_text,
)
from fordstone.plan import plan as p
from fordstone.state.base import State

Record = dict[str, Any]
RAISED = (Exception, pl.exceptions.PanicException)
"""Polars panics at some values, such as times beyond the year 262142. That is no `Exception`."""
FINAL_OR_PASSING = (FordstoneError, OSError)
"""Not tried again at once: a wrong result stays wrong, and the network and other systems may come back for a restart, after a wait."""


class UserFunction(Operator):
    """Calls a user's function. Subclasses call it with what it takes."""

    _cuts: ClassVar[bool] = False
    """Whether rows of different watermarks are given to the function apart: it is not known which rows it makes of which."""

    def __init__(self, step: p.Function, function: Callable[[Any], Any], time: str | None) -> None:
        """`time`: the column with the event time, which the function passes on."""
        self._step = step
        self._time = time
        self._function = function
        self._schema = Schema.of(step.schema)
        self._sets_aside = step.has_dead_letters

    def on_batch(self, frame: pl.DataFrame, *, late: bool) -> Emits:
        failed: list[Failed] = []
        out = (
            by_watermark(lambda rows: self._applied(rows, failed))(frame)
            if self._cuts
            else self._applied(frame, failed)
        )
        emits = [Emit(out, late=late)] if out.height else []
        if failed:
            emits.append(Emit(letters_of(self._step.name, failed), port=DEAD))
        return emits

    def on_watermark(self, watermark_us: int) -> Emits:  # noqa: ARG002 - nothing waits for time here
        return []

    def on_barrier(self, moment: Moment) -> Emits:  # noqa: ARG002 - nothing waits for the clock here
        return []

    def states(self) -> Mapping[str, State]:
        return {}

    @abstractmethod
    def _applied(self, frame: pl.DataFrame, failed: list[Failed]) -> pl.DataFrame:
        """What comes of the rows. Those that are set aside are added to `failed`."""

    @abstractmethod
    def _made(self, given: Any) -> Any:
        """What the function makes of its argument, checked."""

    def _check_times(self, rows: pl.DataFrame, given: pl.Series) -> None:
        """Raise if the function has moved a row back in time: whether that is late would depend on how rows are cut into batches."""
        times = rows.get_column(self._time or "")
        early = (times < given).fill_null(value=False)
        if early.any():
            place = int(early.arg_max() or 0)
            before = shown_values(given[place : place + 1] if len(given) > 1 else given)[0]
            made = row_text(shown_row(rows, place))[:SHOWN_CHARS_MAX]
            raise SchemaError(
                f"step {self._step.name}: the function gave {made}, whose {self._time} is before {before}, the "
                "time that it was given. Keep the event time or give a later one; or name the column differently, and assign the time "
                "afterwards with with_time(...)."
            )

    def _again(self, record: Record, error: BaseException, given: Any) -> Any:
        """Call once more for a row that an exception was raised for. Raises a final error if the same happens again."""
        if isinstance(error, FINAL_OR_PASSING):
            raise error
        try:
            return self._made(given)
        except RAISED as second:
            if reason_of(second) == reason_of(error):
                # Without the first, which is being handled here: its traceback shows nothing more.
                second.__context__ = None
                failure = Failed(record=record, error=second)
                raise function_error(self._step.name, self._step.path, failure, times=True) from second
            raise


class RecordFunction(UserFunction):
    """`map` and `flat_map`: one record at a time."""

    def _applied(self, frame: pl.DataFrame, failed: list[Failed]) -> pl.DataFrame:
        records: list[Record] = []
        places: list[int] = []
        """For each record, the row that it was made of."""
        frame = givable(frame, failed, self._step)
        shown = frame.drop(ROW_WATERMARK, strict=False)
        plain = shown.drop(ROW_ID, strict=False)
        for place, row in enumerate(plain.iter_rows(named=True)):
            try:
                made = self._made(row)
            except RAISED as error:  # of the user's function, which may have changed the row
                if self._sets_aside:
                    failed.append(Failed(record=shown.row(place, named=True), error=error))
                    continue
                made = self._again(shown.row(place, named=True), error, plain.row(place, named=True))
            records += made
            places += [place] * len(made)
        try:
            rows = self._framed(records, frame, places)
        except SchemaError:
            if not self._sets_aside:
                raise
            fitting = self._fitting(shown, records, places, failed)
            records, places = [records[at] for at in fitting], [places[at] for at in fitting]
            rows = self._framed(records, frame, places)
        return self._with_hidden(rows, frame, places)

    def _made(self, row: Record) -> list[Record]:
        given = self._function(row)
        made = list(given) if self._step.kind == "flat_map" else [given]
        for record in made:
            if not isinstance(record, dict):
                raise TaskError(
                    f"step {self._step.name}: the function gave {type(record).__name__} {record!r}; records are dicts."
                )
        return made

    def _framed(self, records: Sequence[Record], frame: pl.DataFrame, places: Sequence[int]) -> pl.DataFrame:
        """The records as a frame. Raises `SchemaError` for one that does not fit, or that is earlier than its row."""
        rows = frame_of(records, self._schema, self._step.name)
        if self._time is not None:
            self._check_times(rows, frame.get_column(self._time).gather(list(places)))
        return rows

    def _fitting(
        self, frame: pl.DataFrame, records: Sequence[Record], places: Sequence[int], failed: list[Failed]
    ) -> list[int]:
        """Which records to keep: those of rows all of whose records fit the schema."""
        wrong: dict[int, SchemaError] = {}
        for place, record in zip(places, records, strict=True):
            try:
                self._framed([record], frame, [place])
            except SchemaError as error:
                wrong.setdefault(place, error)
        failed += [Failed(record=frame.row(place, named=True), error=error) for place, error in wrong.items()]
        return [at for at, place in enumerate(places) if place not in wrong]

    def _with_hidden(self, rows: pl.DataFrame, frame: pl.DataFrame, places: Sequence[int]) -> pl.DataFrame:
        if ROW_WATERMARK in frame.columns:
            rows = rows.with_columns(frame.get_column(ROW_WATERMARK).gather(list(places)))
        if ROW_ID not in frame.columns:
            return rows
        ids = frame.get_column(ROW_ID)[list(places)].to_list() if places else []
        if self._step.kind == "flat_map":
            ids = [f"{row_id}.{ordinal}" for row_id, ordinal in zip(ids, _ordinals(places), strict=True)]
        return rows.with_columns(pl.Series(ROW_ID, ids, dtype=pl.String()))


class BatchFunction(UserFunction):
    """`map_batches`: a frame at a time. How rows are cut into frames is not promised, so a frame may be cut again."""

    _cuts = True

    def _applied(self, frame: pl.DataFrame, failed: list[Failed]) -> pl.DataFrame:
        try:
            return self._made(frame)
        except RAISED as error:  # of the user's function
            if not self._sets_aside:
                return self._made_again(frame, error)
            if frame.height == 1:
                failed.append(Failed(record=shown_row(frame, 0), error=error))
                return self._schema.empty()
        return pl.concat([self._applied(half, failed) for half in _halves(frame)])

    def _made_again(self, frame: pl.DataFrame, error: Exception) -> pl.DataFrame:
        """Find a row that the function raises for; if there is none, call it once more with all of them."""
        if isinstance(error, FINAL_OR_PASSING):
            raise error
        found, raised = frame, error
        while found.height > 1:
            for half in _halves(found):
                try:
                    self._made(half)
                except RAISED as other:  # of the user's function
                    found, raised = half, other
                    break
            else:
                break
        if found.height == 1:
            self._again(shown_row(found, 0), raised, found)
        return self._made(frame)

    def _made(self, frame: pl.DataFrame) -> pl.DataFrame:
        # Other steps may hold this frame; what the function does to its own in place is its own business.
        given = self._function(frame.drop(ROW_ID) if ROW_ID in frame.columns else frame.clone())
        step, schema = self._step.name, self._schema
        if not isinstance(given, pl.DataFrame):
            raise TaskError(f"step {step}: map_batches gave {type(given).__name__}; it must give a Polars DataFrame.")
        missing = [name for name in schema if name not in given.columns]
        if missing:
            raise SchemaError(
                f"step {step}: map_batches gave columns {', '.join(given.columns)}; "
                f"{', '.join(missing)} of the declared schema is missing. Give it, or declare schema=."
            )
        rows = given.clone()
        if given.columns != list(schema) or given.dtypes != [kind.polars for kind in schema.values()]:
            try:
                rows = given.select(pl.col(name).cast(kind.polars) for name, kind in schema.items())
            except pl.exceptions.PolarsError as error:
                problem = str(error).partition("\n")[0]
                raise SchemaError(
                    f"step {step}: map_batches gave values that are not of the declared type: {problem}"
                ) from None
        if self._time is not None:
            # It is not known which rows were made of which.
            self._check_times(rows, frame.select(pl.col(self._time).min()).to_series())
        return rows


def user_function(step: p.Function, function: Callable[..., Any], *, time: str | None) -> UserFunction:
    """The operator of a step. `time`: the column with the event time, if the rows that the function gives have one."""
    return (BatchFunction if step.kind == "map_batches" else RecordFunction)(step, function, time)


def frame_of(records: Sequence[Record], schema: Schema, step: str) -> pl.DataFrame:
    """Records as a frame of a schema; raises `SchemaError` for what does not fit."""
    known = set(schema)
    for record in records:
        if not record.keys() <= known:
            unknown = record.keys() - known
            raise SchemaError(
                f"step {step}: the function gave {', '.join(sorted(map(str, unknown)))}, which the declared schema "
                f"({', '.join(schema)}) does not have. Declare schema=."
            )
    try:
        return frame_of_columns({name: [record.get(name) for record in records] for name in schema}, schema)
    except UnfitError as error:
        record = records[error.row]
        raise SchemaError(
            f"step {step}: the function gave {error.column}={record[error.column]!r}, which is not of the declared type "
            f"{schema[error.column]}:\n  {row_text(record)[:SHOWN_CHARS_MAX]}\nCorrect the function, or declare schema=."
        ) from None


def _halves(frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    middle = frame.height // 2
    return frame[:middle], frame[middle:]


def _ordinals(places: Sequence[int]) -> Iterator[int]:
    """For each record, its number among those of the same row."""
    before, ordinal = -1, 0
    for place in places:
        ordinal = ordinal + 1 if place == before else 0
        before = place
        yield ordinal
