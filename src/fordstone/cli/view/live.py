"""The view for terminals: a progress bar for bounded input, a live line for input without end. The only one with Rich.

Drawn from the main thread when progress comes, a few times a second, on standard error; log lines and rows printed
meanwhile go above it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Self, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fordstone.cli import format as wording
from fordstone.cli.view.view import LineView, notices_of, words_of

if TYPE_CHECKING:
    from fordstone.runtime.progress import Progress, Report

DRAW_EVERY_US: Final = 200_000
BAR_CHARS: Final = 30
MINUTE: Final = 60
_SHARE_MIN: Final = 0.01
"""Below this, what is left cannot be guessed."""


class Drawing:
    """The bottom of a terminal, drawn anew when told to, for the time of a block; what is printed meanwhile goes above it."""

    def __init__(self, console: Console | None) -> None:
        """`console`: standard error if left out."""
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._replaced: tuple[TextIO, TextIO] | None = None

    def __enter__(self) -> Self:
        self._replaced = sys.stdout, sys.stderr
        self._live.start()
        # A second signal ends the process on the spot, and nobody would bring a hidden cursor back.
        self._console.show_cursor(show=True)
        # Rows of a sink that prints elsewhere than to this terminal must not be caught.
        if sys.stdout.isatty():
            sys.stdout = cast("TextIO", _Above(self._console))
        sys.stderr = cast("TextIO", _Above(self._console))
        return self

    def __exit__(self, *_: object) -> None:
        if self._replaced is not None:
            sys.stdout, sys.stderr = self._replaced
        self._live.stop()


class LiveView(Drawing):
    """Draws; what it says is `view.words_of`."""

    def __init__(self, plain: LineView, *, console: Console | None = None) -> None:
        """`plain` prints the summary, and knows the clock."""
        self._plain = plain
        super().__init__(console)
        self._next_us = 0
        self._began_us = plain.monotonic_us()
        self._first: tuple[int, float] | None = None

    def note(self, pipeline: str, words: str) -> None:
        """Where progress will stand."""
        self._plain.begin_anew()
        with contextlib.suppress(OSError):
            self._live.update(_line(pipeline, [words]), refresh=True)

    def show(self, progress: Progress) -> None:
        """Draw anew if it is time."""
        now_us = self._plain.monotonic_us()
        rate = self._plain.rate(progress.rows_in, now_us)
        if now_us < self._next_us:
            return
        self._next_us = now_us + DRAW_EVERY_US
        style = "bold red" if progress.stalled else "bold yellow"
        parts: list[RenderableType] = [Text(notice, style=style) for notice in notices_of(progress)]
        if self._plain.bounded and progress.share is not None:
            parts.append(self._bar(progress.share, progress, now_us))
        # A terminal that was closed is no reason to stop a pipeline.
        with contextlib.suppress(OSError):
            self._live.update(Group(*parts, self._line(progress, rate)), refresh=True)

    def report(self, report: Report) -> None:
        """Print the summary below."""
        self._plain.report(report)

    def failed(self, error: Exception) -> None:
        """Whoever shows errors does it."""

    def _line(self, progress: Progress, rate: float) -> Text:
        return _line(progress.pipeline, words_of(progress, rate, self._plain.wall_us(), bounded=self._plain.bounded))

    def _bar(self, share: float, progress: Progress, now_us: int) -> Table:
        grid = Table.grid(padding=(0, 1))
        words = [f"{share:4.0%}", wording.count(progress.rows_in, "row")]
        if progress.read_bytes is not None and progress.total_bytes is not None:
            words.append(f"{wording.size(progress.read_bytes)} of {wording.size(progress.total_bytes)}")
        if (left := self._left(share, now_us)) is not None:
            words.append(left)
        grid.add_row(ProgressBar(total=1.0, completed=share, width=BAR_CHARS), Text(" · ".join(words), no_wrap=True))
        return grid

    def _left(self, share: float, now_us: int) -> str | None:
        """How long it will take at the pace since the first look; a run that was resumed did not begin at nothing."""
        if self._first is None or share < self._first[1]:
            self._first = (now_us, share)
        since_us, began = self._first
        done = share - began
        if done < _SHARE_MIN or share >= 1.0:
            return None
        seconds = round((now_us - since_us) * (1 - share) / done / 1e6)
        return f"{seconds} s left" if seconds < MINUTE else f"{wording.span(seconds * 1e6)} left"


def _line(pipeline: str, words: Sequence[str]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(pipeline, style="bold")
    for place, word in enumerate(words):
        text.append(" · " if place else "  ", style="dim").append(word)
    return text


class _Above(io.TextIOBase):
    """Prints whole lines above what is drawn, as they are: not wrapped, so that they can be copied."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Keep what has no end of line yet."""
        with self._lock:
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._console.print(Text(lines), soft_wrap=True)
        return len(text)

    def isatty(self) -> bool:
        """It stands for a terminal."""
        return True
