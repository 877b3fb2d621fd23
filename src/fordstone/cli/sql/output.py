"""How the rows of `fordstone sql` are printed: as JSON lines, as a plain table, or as a live table in the terminal.

Appended rows are printed as they come. Rows that replace each other (running aggregates) are kept by key, which is the only memory that
grows with the result; they are printed at the end, or with --follow whenever they change. In tables numbers are rounded to six
decimals; `--json` prints them exactly.
"""

from __future__ import annotations

import codecs
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import polars as pl

from fordstone.cli import format as fmt
from fordstone.cli.format import UNSAFE, Layout, Table, lines_of, safe
from fordstone.cli.view.view import Rate, describe_held, notices_of
from fordstone.connectors.files.rows import DELETE, OP, encoded
from fordstone.connectors.memory import MemorySink
from fordstone.errors import SinkError
from fordstone.lang.python_times import shown_values
from fordstone.lang.schema import RESERVED_PREFIX, Schema
from fordstone.plan.stream_type import TIMESTAMP, StreamType
from fordstone.storage.clock import monotonic_clock_us

if TYPE_CHECKING:
    from rich.text import Text

    from fordstone.protocol.progress import Progress


DECIMALS: Final = 6
COLUMN_CELLS_MAX: Final = 60
"""Maximum width of a column in a plain table. A longer text pushes the rest of its row to the right."""
_HUGE: Final = 1e15
_TINY: Final = 1e-4
"""Floating-point numbers beyond these are not rounded."""
NULL: Final = "null"


def cells(frame: pl.DataFrame) -> pl.DataFrame:
    """All values as text."""
    return frame.select([_texts(frame.get_column(name)) for name in frame.columns])


def _texts(values: pl.Series) -> pl.Series:
    kind = values.dtype
    if isinstance(kind, pl.Datetime):
        texts = values.dt.strftime("%Y-%m-%d %H:%M:%S%.fZ")
    elif kind.is_float():
        size = values.abs()
        whole = values.is_infinite() | values.is_nan() | (size >= _HUGE) | ((size < _TINY) & (size > 0))
        texts = pl.select(pl.when(whole).then(values).otherwise(values.round(DECIMALS)).cast(pl.String)).to_series()
    elif kind == pl.Binary:
        texts = values.bin.encode("hex")
    elif isinstance(kind, pl.Struct | pl.Map):
        texts = pl.Series([None if one is None else str(one) for one in shown_values(values)], dtype=pl.String)
    elif isinstance(kind, pl.List):
        texts = pl.Series([None if one is None else str(shown_values(one)) for one in values], dtype=pl.String)
    else:
        texts = values.cast(pl.String)
    if (kind == pl.String or kind.is_nested()) and texts.str.contains(UNSAFE).any():
        texts = pl.Series([None if one is None else safe(one) for one in texts], dtype=pl.String)
    return texts.fill_null(NULL).alias(values.name)


def _table(schema: Schema, rows: Sequence[Sequence[str]]) -> Table:
    right = [at for at, kind in enumerate(schema.polars.values()) if kind.is_numeric()]
    return Table(head=list(schema), rows=rows, right=right)


Taker = Callable[[pl.DataFrame], None]
_MERGED_MIN: Final = 1_000
"""Minimum number of changes that are merged with the rest at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The key and the order of the rows of a result."""

    key: tuple[str, ...] | None = None
    """The columns by which rows replace each other; None if rows are appended."""
    by: tuple[str, ...] = ()
    """The columns by which the rows of an epoch are sorted. Aggregates have no order of their own; rows of a file keep theirs."""

    @classmethod
    def of(cls, stream: StreamType) -> Order:
        """Sort aggregates by time, then by the other columns."""
        if stream.row_wise:
            return cls(key=stream.upsert_key)
        plain = [name for name, kind in stream.schema.items() if not kind.is_nested]
        times = [name for name in plain if stream.schema[name] == TIMESTAMP]
        return cls(key=stream.upsert_key, by=(*times, *(name for name in plain if name not in times)))


class Result(MemorySink):
    """A sink in memory that keeps the last rows of the result. `on_rows` is called with the rows of each epoch.

    The writer's thread adds epochs; another thread reads.
    """

    def __init__(self, *, order: Order, rows_kept: int, on_rows: Taker | None = None) -> None:
        super().__init__()
        self._newest = 0
        self.key = order.key
        self._by = list(order.by)
        self._rows_kept = rows_kept
        self._on_rows = on_rows
        self._lock = threading.Lock()
        self._last: pl.DataFrame | None = None
        self._changes: list[pl.DataFrame] = []
        self._rows = 0

    def count(self) -> int:
        with self._lock:
            if self.key is None:
                return self._rows
            return self._merged().height

    def last(self) -> tuple[pl.DataFrame | None, int]:
        """The last rows, the most recently changed at the end, and the total number of rows."""
        with self._lock:
            if self.key is None:
                return self._last, self._rows
            merged = self._merged()
            return merged.tail(self._rows_kept), merged.height

    def everything(self) -> pl.DataFrame:
        with self._lock:
            return self._merged()

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Show the rows of an epoch, once. Epochs come in order, and are not kept."""
        if epoch <= self._newest:
            return
        self._newest = epoch
        if frame.is_empty():
            return
        if self._by:
            frame = frame.sort(self._by, maintain_order=True)
        with self._lock:
            if self.key is None:
                self._rows += frame.height
                joined = frame if self._last is None else pl.concat([self._last, frame.tail(self._rows_kept)])
                self._last = joined.tail(self._rows_kept)
            else:
                self._changes.append(frame)
                if sum(one.height for one in self._changes[1:]) > max(_MERGED_MIN, self._changes[0].height):
                    self._merged()
        if self._on_rows is not None:
            self._on_rows(frame)

    def _merged(self) -> pl.DataFrame:
        """The newest row of each key. The caller holds the lock."""
        if not self._changes:
            return pl.DataFrame() if self.stream is None else self.stream.schema.empty()
        if len(self._changes) > 1 or OP in self._changes[0].columns:
            rows = pl.concat([_with_op(one) for one in self._changes])
            rows = rows.unique(subset=list(self.key), keep="last", maintain_order=True) if self.key else rows.tail(1)
            self._changes = [rows.filter(pl.col(OP) != DELETE).drop(OP)]
        return self._changes[0]


def _with_op(frame: pl.DataFrame) -> pl.DataFrame:
    return frame if OP in frame.columns else frame.with_columns(pl.lit("upsert").alias(OP))


HELD_ROWS_MAX: Final = 5_000
"""Maximum number of rows that are buffered to find the widths of columns before a plain table is printed."""
SLICE_ROWS: Final = 10_000
DRAW_EVERY_US: Final = 200_000
DRAW_SHARE: Final = 10
"""Drawing takes at most one part in this many of the time."""
LINES_BESIDE: Final = 7
"""Lines of the terminal that are not rows: names, rule, counts, notices, what time waits for, and the next prompt."""


class ReaderGoneError(SinkError):
    """The reader of the output has closed it, as `head` does. This is not an error."""


class UnwritableError(SinkError):
    """The result cannot be written. A retry would not help."""


class Output:
    """Entered before the query runs and left when it is over; then `finish` is called, if nothing was raised.

    This base shows no progress.
    """

    result: Result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, text: str) -> None:
        """Called when something starts that takes a while."""

    def show(self, progress: Progress) -> None:
        """Called about 20 times a second from the main thread."""

    def finish(self) -> None:
        """Print what is left."""
        raise NotImplementedError


def put(text: str) -> None:
    """Write to standard output and flush it.

    Raises:
        ReaderGoneError: if the reader has closed it.
        UnwritableError: if it cannot be written.
    """
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError as error:
            sys.stdout.write(text.encode(error.encoding, "fordstone.json").decode(error.encoding))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError("stdout: the reader of the output has closed it. Stopping.") from error
    except OSError as error:
        raise UnwritableError(f"stdout: the result could not be written: {error.strerror}.") from error


def _as_json(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks by their escapes in JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("fordstone.json", _as_json)


def _shown(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select([name for name in frame.columns if not name.startswith(RESERVED_PREFIX)])


class JsonOutput(Output):
    """One object per line. Changes of a result by key have `__op`: `upsert` or `delete`."""

    def __init__(self, *, order: Order, follow: bool) -> None:
        self._at_end = order.key is not None and not follow
        self.result = Result(order=order, rows_kept=0, on_rows=None if self._at_end else self._print)

    def finish(self) -> None:
        if self._at_end:
            self._print(self.result.everything())

    def _print(self, frame: pl.DataFrame) -> None:
        if not frame.is_empty():
            put(encoded(frame, "jsonl").decode())


class PlainOutput(Output):
    """A table for files and pipes: every row, in columns."""

    def __init__(self, schema: Schema, *, order: Order, follow: bool) -> None:
        self._schema = schema
        self._at_end = order.key is not None and not follow
        self._held_rows_max = 0 if follow else HELD_ROWS_MAX
        self.result = Result(order=order, rows_kept=0, on_rows=None if self._at_end else self._take)
        self._held: list[pl.DataFrame] = []
        self._layout: Layout | None = None

    def finish(self) -> None:
        if self._at_end:
            self._held = [self.result.everything()]
        self._print()

    def _take(self, frame: pl.DataFrame) -> None:
        # A printed table cannot take a row back.
        self._held.append(frame.filter(pl.col(OP) != DELETE) if OP in frame.columns else frame)
        if sum(one.height for one in self._held) >= self._held_rows_max:
            self._print()

    def _print(self) -> None:
        held, self._held = self._held, []
        if self._layout is None:
            texts = [row for frame in held for row in cells(_shown(frame).head(HELD_ROWS_MAX)).iter_rows()]
            self._layout = _table(self._schema, texts).layout(column_max=COLUMN_CELLS_MAX)
            put(f"{self._layout.line(self._layout.names)}\n{self._layout.rule()}\n")
        for frame in held:
            # Text takes far more memory than rows do.
            for part in _shown(frame).iter_slices(SLICE_ROWS):
                put(lines_of(self._layout, cells(part)))


class LiveOutput(Output):
    """A table of the last rows that is redrawn as rows come, and stays at the end."""

    def __init__(
        self,
        schema: Schema,
        *,
        order: Order,
        rows_max: int,
        bounded: bool,
        monotonic_us: Callable[[], int] | None = None,
    ) -> None:
        from rich.console import Console

        from fordstone.cli.view.live import Drawing

        self.result = Result(order=order, rows_kept=rows_max)
        self._schema = schema
        self._rows_max = rows_max
        self._bounded = bounded
        self._clock = monotonic_us or monotonic_clock_us
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=False)
        self._drawing = Drawing(self._console)
        self._rate = Rate()
        self._next_us = 0

    def __enter__(self) -> Self:
        self._drawing.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._drawing.__exit__(*error)

    def note(self, text: str) -> None:
        from rich.text import Text

        self._drawing.update(Text(text, style="dim"))

    def show(self, progress: Progress) -> None:
        now_us = self._clock()
        rate = self._rate(progress.rows_in, now_us)
        if now_us < self._next_us:
            return
        room = max(1, self._console.height - LINES_BESIDE)
        self._drawing.update(self._drawn(min(room, self._rows_max), self._status(progress, rate)))
        took_us = self._clock() - now_us
        self._next_us = now_us + max(DRAW_EVERY_US, took_us * DRAW_SHARE)

    def finish(self) -> None:
        self._console.print(self._drawn(self._rows_max, []), no_wrap=True, overflow="crop")

    def _status(self, progress: Progress, rate: float) -> list[str]:
        words = [f"{fmt.count(progress.rows_in, 'row')} read", fmt.rate(rate)]
        if self._bounded and progress.share is not None:
            words.insert(0, f"{progress.share:.0%}")
        if not self._bounded:
            words.append("Ctrl-C to stop")
        held = "" if self._bounded or progress.held_back is None else describe_held(progress.held_back)
        return [*notices_of(progress), " · ".join(words), *([held] if held else [])]

    def _drawn(self, rows_max: int, status: Sequence[str]) -> Text:
        from rich.text import Text

        frame, total = self.result.last()
        texts = [] if frame is None else list(cells(_shown(frame.tail(rows_max))).iter_rows())
        layout = _table(self._schema, texts).layout(width=self._console.width)
        below = [*self._notes(len(texts), total, layout.hidden), *status]
        lines = Text(no_wrap=True, overflow="crop")
        lines.append(layout.cut(layout.names), style="bold").append(f"\n{layout.rule()}", style="dim")
        for row in texts:
            lines.append(f"\n{layout.cut(row)}")
        for words in below:
            lines.append(f"\n{words}", style="dim")
        return lines

    def _notes(self, shown: int, total: int, hidden: int) -> list[str]:
        notes = []
        if total > shown:
            notes.append(f"the last {shown:,} of {fmt.count(total, 'row')}; --rows N shows more, --json all")
        if hidden:
            notes.append(f"{fmt.count(hidden, 'more column')} do not fit")
        return notes
