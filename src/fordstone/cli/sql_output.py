"""How the rows of `fordstone sql` are shown: as JSON lines, as a plain table, or as a table that lives in the terminal.

Rows that only come are let out as they come. Those that replace each other are let out at the end, or in a query without
end each time they change.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, Self

import polars as pl

from fordstone.cli import wording
from fordstone.cli.sql_result import Order, Result
from fordstone.cli.sql_table import Layout, cells, numeric
from fordstone.cli.view import Rate, notices_of
from fordstone.connectors.encoding import encoded
from fordstone.connectors.stream_mark import DELETE, OP
from fordstone.errors import SinkError
from fordstone.model.schema import RESERVED_PREFIX, Schema

if TYPE_CHECKING:
    from rich.text import Text

    from fordstone.edge.report import Progress

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
