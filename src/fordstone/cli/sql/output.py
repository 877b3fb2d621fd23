"""How the rows of `fordstone sql` are shown: as JSON lines, as a plain table, or as a table that lives in the terminal.

Rows that only come are let out as they come. Those that replace each other are let out at the end, or in a query without
end each time they change.

What a query has given so far, in bounded memory: the last rows, and how many there were.

Results that replace each other (running aggregates) are kept by key, the one thing that grows with the result. Epochs come
from the thread of the writer; whoever shows the result asks from another.

A table of text: cells as a person reads them, in columns that fit the terminal.

Numbers are rounded to six decimals; `--json` gives them whole. What a terminal would take for commands is shown as escapes.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, Self

import polars as pl
from rich.cells import cell_len, set_cell_size

from fordstone.cli import format as wording
from fordstone.cli.view.view import Rate, notices_of
from fordstone.connectors.files.rows import encoded
from fordstone.connectors.files.settings import DELETE, OP
from fordstone.connectors.memory import MemorySink
from fordstone.errors import SinkError
from fordstone.lang.schema import RESERVED_PREFIX, Schema
from fordstone.plan.stream_type import TIMESTAMP, StreamType

if TYPE_CHECKING:
    from rich.text import Text

    from fordstone.runtime.progress import Progress


DECIMALS: Final = 6
GAP: Final = "  "
COLUMN_CELLS_MIN: Final = 8
"""Columns are not made narrower than this; then the last ones are left out."""
COLUMN_CELLS_MAX: Final = 60
"""In a table as wide as need be, longer texts push the rest of their row along, and not that of all others."""
_HUGE: Final = 1e15
_TINY: Final = 1e-4
"""Floating-point numbers beyond these are shown whole."""
_ELLIPSIS: Final = "…"
_UNSAFE: Final = "[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]"
_UNSAFE_CHAR: Final = re.compile(_UNSAFE)
NULL: Final = "null"


def cells(frame: pl.DataFrame) -> pl.DataFrame:
    """Every value as text."""
    return frame.select([_texts(frame.get_column(name)) for name in frame.columns])


def safe(text: str) -> str:
    """A text without characters that a terminal would obey."""
    return _UNSAFE_CHAR.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


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
    elif isinstance(kind, pl.List):
        texts = pl.Series([None if one is None else str(one.to_list()) for one in values], dtype=pl.String)
    else:
        texts = values.cast(pl.String)
    if kind in {pl.String, pl.List} and texts.str.contains(_UNSAFE).any():
        texts = pl.Series([None if one is None else safe(one) for one in texts], dtype=pl.String)
    return texts.fill_null(NULL).alias(values.name)


def numeric(schema: pl.Schema) -> tuple[bool, ...]:
    """Which columns are aligned to the right."""
    return tuple(kind.is_numeric() for kind in schema.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How wide columns are. Columns behind the last width are not shown."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    right: tuple[bool, ...]

    @classmethod
    def of(
        cls, names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int | None
    ) -> Layout:
        """Wide enough for the rows, and together no wider than `width` (None: as wide as need be)."""
        shown = [safe(name) for name in names]
        widths = [max([cell_len(name), *(cell_len(row[place]) for row in rows)]) for place, name in enumerate(shown)]
        widths = [min(one, COLUMN_CELLS_MAX) for one in widths] if width is None else _fitted(widths, width)
        return cls(names=tuple(shown), widths=tuple(widths), right=tuple(right))

    @property
    def hidden(self) -> int:
        """How many columns do not fit."""
        return len(self.names) - len(self.widths)

    def head(self) -> str:
        """The names."""
        return self.line(self.names)

    def rule(self) -> str:
        """A line below the names."""
        return GAP.join("─" * width for width in self.widths)

    def line(self, row: Sequence[str]) -> str:
        """One row. A cell that is wider than its column pushes the rest along, or is cut if the table must fit."""
        made = [
            _padded(cell, width, right=right) for cell, width, right in zip(row, self.widths, self.right, strict=False)
        ]
        return GAP.join(made).rstrip()

    def lines(self, texts: pl.DataFrame) -> str:
        """Many rows, each with its end of line. Columns of plain ASCII are padded as a whole."""
        columns = [
            _padded_all(texts.to_series(place), width, right=right)
            for place, (width, right) in enumerate(zip(self.widths, self.right, strict=True))
        ]
        joined = pl.select(pl.concat_str(columns, separator=GAP).str.strip_chars_end(" ").alias("line")).to_series()
        return "".join(f"{line}\n" for line in joined)

    def cut(self, row: Sequence[str]) -> str:
        """One row, no cell wider than its column."""
        return self.line([_cut(cell, width) for cell, width in zip(row, self.widths, strict=False)])


def _padded(cell: str, width: int, *, right: bool) -> str:
    blanks = " " * max(0, width - cell_len(cell))
    return blanks + cell if right else cell + blanks


def _padded_all(texts: pl.Series, width: int, *, right: bool) -> pl.Series:
    if (texts.str.len_bytes() == texts.str.len_chars()).all():
        return texts.str.pad_start(width) if right else texts.str.pad_end(width)
    return pl.Series([_padded(cell, width, right=right) for cell in texts], dtype=pl.String)


def _cut(cell: str, width: int) -> str:
    return cell if cell_len(cell) <= width else set_cell_size(cell, width - 1) + _ELLIPSIS


def _fitted(widths: list[int], width: int) -> list[int]:
    """Take from the widest first; if all are narrow already, leave out the last."""
    widths = list(widths)
    while widths and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        widest = max(widths)
        if widest > COLUMN_CELLS_MIN:
            widths[widths.index(widest)] = widest - 1
        elif len(widths) > 1:
            widths.pop()
        else:
            return [max(1, width)]
    return widths


Taker = Callable[[pl.DataFrame], None]
_MERGED_MIN: Final = 1_000
"""So many changes are kept before they are brought together with the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the rows of a result stand to each other."""

    key: tuple[str, ...] | None = None
    """By which they replace each other; None: they are appended."""
    by: tuple[str, ...] = ()
    """By which the rows of an epoch are sorted. Aggregates come in no order of their own; rows of a file stay as they are."""

    @classmethod
    def of(cls, stream: StreamType) -> Order:
        """Aggregates by time, then by the other columns."""
        if stream.row_wise:
            return cls(key=stream.upsert_key)
        plain = [name for name, kind in stream.schema.items() if kind.element is None]
        times = [name for name in plain if stream.schema[name] == TIMESTAMP]
        return cls(key=stream.upsert_key, by=(*times, *(name for name in plain if name not in times)))


class _Epochs(dict[int, pl.DataFrame]):
    """Hands the rows of each epoch on, and remembers only which epoch was the last."""

    def __init__(self, take: Taker) -> None:
        super().__init__()
        self._take = take

    def __setitem__(self, epoch: int, frame: pl.DataFrame) -> None:
        self._take(frame)
        self.clear()
        super().__setitem__(epoch, frame.clear())


class Result(MemorySink):
    """A sink in memory that keeps the end of the result. `on_rows` is called with rows that are final, as they come."""

    def __init__(self, *, order: Order, rows_kept: int, on_rows: Taker | None = None) -> None:
        super().__init__()
        self.released = _Epochs(self._take)
        self.key = order.key
        self._by = list(order.by)
        self._rows_kept = rows_kept
        self._on_rows = on_rows
        self._lock = threading.Lock()
        self._last: pl.DataFrame | None = None
        self._changes: list[pl.DataFrame] = []
        self._rows = 0

    def count(self) -> int:
        """How many rows the result has."""
        with self._lock:
            if self.key is None:
                return self._rows
            return self._merged().height

    def last(self) -> tuple[pl.DataFrame | None, int]:
        """The last rows, those that changed last at the end, and how many there are in all."""
        with self._lock:
            if self.key is None:
                return self._last, self._rows
            merged = self._merged()
            return merged.tail(self._rows_kept), merged.height

    def everything(self) -> pl.DataFrame:
        """All rows of a result by key."""
        with self._lock:
            return self._merged()

    def _take(self, frame: pl.DataFrame) -> None:
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
"""A plain table is held back until it has so many rows: then all its columns are as wide as they need be."""
SLICE_ROWS: Final = 10_000
DRAW_EVERY_US: Final = 200_000
DRAW_SHARE: Final = 10
"""Drawing takes at most one part in so many of the time."""
LINES_BESIDE: Final = 6
"""Lines of the terminal that are not rows: names, rule, counts, notices and the prompt to come."""


class ReaderGoneError(SinkError):
    """Whoever read the output has seen enough, as `head` does: no reason to complain."""


class UnwritableError(SinkError):
    """The result cannot be written where it should go: nothing that trying again would change."""


class Output(Protocol):
    """Entered before the query runs, left when it is over; then `finish`, if nothing was raised."""

    result: Result

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def note(self, pipeline: str, words: str) -> None:
        """Something begins that takes a person's patience."""

    def show(self, progress: Progress) -> None:
        """Called about 20 times a second from the main thread."""

    def finish(self) -> None:
        """Let out what is left."""


def put(text: str) -> None:
    """Write to standard output, at once.

    Raises:
        ReaderGoneError: if nobody reads any more.
        UnwritableError: if it cannot be written.
    """
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError as error:
            sys.stdout.write(_escaped(text, error.encoding))
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGoneError("stdout: whoever read the output has gone. Stopping.") from error
    except OSError as error:
        raise UnwritableError(f"stdout: the result could not be written: {error.strerror}.") from error


def _escaped(text: str, encoding: str) -> str:
    """With what this encoding has no signs for written as in JSON."""
    return "".join(sign if _has(encoding, sign) else _unit_escapes(sign) for sign in text)


def _has(encoding: str, sign: str) -> bool:
    try:
        sign.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _unit_escapes(sign: str) -> str:
    units = sign.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{int.from_bytes(units[at : at + 2]):04x}" for at in range(0, len(units), 2))


def _shown(frame: pl.DataFrame) -> pl.DataFrame:
    """Without the columns that only we know."""
    return frame.select([name for name in frame.columns if not name.startswith(RESERVED_PREFIX)])


class _Quiet:
    """What outputs that only print have in common."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, pipeline: str, words: str) -> None:
        """Nothing: progress is for terminals."""

    def show(self, progress: Progress) -> None:
        """Nothing: progress is for terminals."""


class JsonOutput(_Quiet):
    """One object a line. Changes of a result by key carry `__op`: `upsert` or `delete`."""

    def __init__(self, *, order: Order, follow: bool) -> None:
        self._at_end = order.key is not None and not follow
        self.result = Result(order=order, rows_kept=0, on_rows=None if self._at_end else self._print)

    def finish(self) -> None:
        """The rows of a result by key."""
        if self._at_end:
            self._print(self.result.everything())

    def _print(self, frame: pl.DataFrame) -> None:
        if not frame.is_empty():
            put(encoded(frame, "jsonl").decode())


class PlainOutput(_Quiet):
    """A table for files and pipes: every row, in columns."""

    def __init__(self, schema: Schema, *, order: Order, follow: bool) -> None:
        self._schema = schema
        self._at_end = order.key is not None and not follow
        self._held_rows_max = 0 if follow else HELD_ROWS_MAX
        self.result = Result(order=order, rows_kept=0, on_rows=None if self._at_end else self._take)
        self._held: list[pl.DataFrame] = []
        self._layout: Layout | None = None

    def finish(self) -> None:
        """What was held back; the names alone if there were no rows."""
        if self._at_end:
            self._held = [self.result.everything()]
        self._print()

    def _take(self, frame: pl.DataFrame) -> None:
        # A table has no way to take a row back.
        self._held.append(frame.filter(pl.col(OP) != DELETE) if OP in frame.columns else frame)
        if sum(one.height for one in self._held) >= self._held_rows_max:
            self._print()

    def _print(self) -> None:
        held, self._held = self._held, []
        if self._layout is None:
            texts = [row for frame in held for row in cells(_shown(frame).head(HELD_ROWS_MAX)).iter_rows()]
            self._layout = Layout.of(list(self._schema), texts, numeric(self._schema.polars), None)
            put(f"{self._layout.head()}\n{self._layout.rule()}\n")
        for frame in held:
            # Text takes far more memory than rows do.
            for part in _shown(frame).iter_slices(SLICE_ROWS):
                put(self._layout.lines(cells(part)))


class LiveOutput:
    """A table that is drawn anew as rows come: the last ones, and how many there are. At the end it stays."""

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
        from rich.live import Live

        self.result = Result(order=order, rows_kept=rows_max)
        self._schema = schema
        self._rows_max = rows_max
        self._bounded = bounded
        self._clock = monotonic_us or (lambda: time.monotonic_ns() // 1_000)
        self._console = Console(highlight=False, soft_wrap=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._rate = Rate()
        self._next_us = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._live.start()
        # A second signal ends the process on the spot, and nobody would bring a hidden cursor back.
        self._console.show_cursor(show=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def note(self, pipeline: str, words: str) -> None:
        """Where the table will stand."""
        from rich.text import Text

        with contextlib.suppress(OSError):
            self._live.update(Text(f"{pipeline}: {words}", style="dim"), refresh=True)

    def show(self, progress: Progress) -> None:
        """Draw anew if it is time."""
        now_us = self._clock()
        rate = self._rate(progress.rows_in, now_us)
        if now_us < self._next_us:
            return
        room = max(1, self._console.height - LINES_BESIDE)
        # A terminal that was closed is no reason to stop.
        with contextlib.suppress(OSError):
            self._live.update(self._drawn(min(room, self._rows_max), self._status(progress, rate)), refresh=True)
        took_us = self._clock() - now_us
        self._next_us = now_us + max(DRAW_EVERY_US, took_us * DRAW_SHARE)

    def finish(self) -> None:
        """The table as it stands in the end."""
        self._console.print(self._drawn(self._rows_max, []), no_wrap=True, overflow="crop")

    def _status(self, progress: Progress, rate: float) -> list[str]:
        words = [f"{wording.count(progress.rows_in, 'row')} read", wording.rate(rate)]
        if self._bounded and progress.share is not None:
            words.insert(0, f"{progress.share:.0%}")
        if not self._bounded:
            words.append("Ctrl-C ends")
        return [*notices_of(progress), " · ".join(words)]

    def _drawn(self, rows_max: int, status: Sequence[str]) -> Text:
        from rich.text import Text

        frame, total = self.result.last()
        texts = [] if frame is None else list(cells(_shown(frame.tail(rows_max))).iter_rows())
        layout = Layout.of(list(self._schema), texts, numeric(self._schema.polars), self._console.width)
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
            notes.append(f"the last {shown:,} of {wording.count(total, 'row')}; --rows N shows more, --json all")
        if hidden:
            notes.append(f"{wording.count(hidden, 'column')} more do not fit")
        return notes
