"""The view for terminals: a progress bar for bounded input, a live line for unbounded input, a table for two tiers. Uses Rich.

Drawn on standard error a few times a second, from the main thread. Log lines and rows printed at the same time appear above it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from fordstone.cli import format as fmt
from fordstone.cli.view.view import LineView, describe_progress, notices_of

if TYPE_CHECKING:
    from fordstone.protocol.progress import Progress

DRAW_EVERY_US: Final = 200_000
BAR_CHARS: Final = 30
MINUTE: Final = 60
_SHARE_MIN: Final = 0.01
"""Below this, the time left cannot be estimated."""


class Drawing:
    """The bottom of a terminal, redrawn by `update` inside a block. What is printed at the same time appears above it."""

    def __init__(self, console: Console | None = None, *, transient: bool = True) -> None:
        """`console`: standard error if omitted. `transient`: erase the drawing at the end."""
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._live = Live(
            console=self.console, auto_refresh=False, transient=transient, redirect_stdout=False, redirect_stderr=False
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._live)
        # A second signal ends the process on the spot, and nothing would bring a hidden cursor back.
        self.console.show_cursor(show=True)
        # Rows of a sink that prints elsewhere than to this terminal must not be caught.
        if sys.stdout.isatty():
            self._stack.enter_context(contextlib.redirect_stdout(_Above(self.console)))
        self._stack.enter_context(contextlib.redirect_stderr(_Above(self.console)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def update(self, drawn: RenderableType) -> None:
        """Draw. A terminal that was closed does not stop a pipeline."""
        with contextlib.suppress(OSError):
            self._live.update(drawn, refresh=True)


@dataclass(kw_only=True)
class LiveView(LineView):
    """Draws the progress; the summary at the end is that of `LineView`."""

    console: Console | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._drawing = Drawing(self.console)
        self._draw_us = 0
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        self._drawing.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._drawing.__exit__(*error)

    def note(self, text: str, part: str = "") -> None:
        """Draw it where progress will be. In a run of two tiers it is in the table, which only the main thread draws."""
        super().note(text, part)
        if not self.tiered:
            self._drawing.update(_line(self.pipeline, [text]))

    def _say(self, text: str) -> None:
        """Nothing: the drawing has it."""

    def _refresh(self) -> None:
        now_us = self.monotonic_us()
        if now_us >= self._draw_us:
            self._draw_us = now_us + DRAW_EVERY_US
            self._drawing.update(self.drawn())

    def drawn(self) -> RenderableType:
        if self.tiered:
            title = Text(no_wrap=True, overflow="ellipsis").append(self.pipeline, style="bold")
            title.append(f"  hub {self.hub_url}" if self.hub_url is not None else "", style="dim")
            notices = [Text(problem, style="bold red") for problem in self.problems()]
            notices += [Text(self.phase_text, style="bold yellow")] if self.phase_text else []
            table = self.table()
            shown = [table.styled(self._drawing.console.width)] if table.rows else []
            if not shown and not self.phase_text:
                shown = [Text("starting ...", style="dim")]
            held = [_held(f"{name}: {text}") for name, progress, _ in self.running() for text in self.held(progress)]
            return Group(*notices, title, *shown, *held)
        parts: list[RenderableType] = []
        for _, progress, rate in self.running():
            style = "bold red" if progress.stalled else "bold yellow"
            parts += [Text(notice, style=style) for notice in notices_of(progress)]
            if self.bounded and progress.share is not None:
                parts.append(self._bar(progress.share, progress))
            parts.append(_line(self.pipeline, describe_progress(progress, rate, self.wall_us(), bounded=self.bounded)))
            parts += [_held(text) for text in self.held(progress)]
        return Group(*parts)

    def _bar(self, share: float, progress: Progress) -> Grid:
        grid = Grid.grid(padding=(0, 1))
        words = [f"{share:4.0%}", fmt.count(progress.rows_in, "row")]
        if progress.read_bytes is not None and progress.total_bytes is not None:
            words.append(f"{fmt.size(progress.read_bytes)} of {fmt.size(progress.total_bytes)}")
        if (left := self._left(share)) is not None:
            words.append(left)
        grid.add_row(ProgressBar(total=1.0, completed=share, width=BAR_CHARS), Text(" · ".join(words), no_wrap=True))
        return grid

    def _left(self, share: float) -> str | None:
        """The time left at the pace since the first drawing; a resumed run did not start at zero."""
        now_us = self.monotonic_us()
        if self._first is None or share < self._first[1]:
            self._first = (now_us, share)
        since_us, began = self._first
        done = share - began
        if done < _SHARE_MIN or share >= 1.0:
            return None
        seconds = round((now_us - since_us) * (1 - share) / done / 1e6)
        return f"{seconds} s left" if seconds < MINUTE else f"{fmt.span(seconds * 1e6)} left"


def _line(pipeline: str, words: list[str]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(pipeline, style="bold")
    for place, word in enumerate(words):
        text.append(" · " if place else "  ", style="dim").append(word)
    return text


def _held(text: str) -> Text:
    """What time waits for, below the rest: the names of partitions may be long, so it wraps."""
    return Text(f"{fmt.GAP}{text}", style="yellow")


class _Above(io.TextIOBase):
    """Prints whole lines above the drawing, as they are: not wrapped, so that they can be copied."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._console.print(Text(lines), soft_wrap=True)
        return len(text)

    def isatty(self) -> bool:
        return True
