"""The table of the parts of a run of two tiers, drawn anew a few times a second. With `cli.live` the only one with Rich."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fordstone.cli.view.live import Drawing
from fordstone.cli.view.tiers_view import HEAD, RIGHT, LineTiersView, words_of_phase

if TYPE_CHECKING:
    from fordstone.cli.tiers import Phase

DRAW_EVERY_S: Final = 0.2


class LiveTiersView(Drawing):
    """Draws on standard error; what is printed meanwhile goes above it."""

    def __init__(self, plain: LineTiersView, *, console: Console | None = None) -> None:
        """`plain` prints the table of the end."""
        self._plain = plain
        super().__init__(console)
        self._next = 0.0

    def heard(self, part: str, event: Mapping[str, Any]) -> None:
        """For the next time that it is drawn."""
        self._plain.board.heard(part, event, time.monotonic_ns() // 1_000)

    def phase(self, phase: Phase, url: str | None) -> None:
        """Draw if it is time."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + DRAW_EVERY_S
        # A terminal that was closed is no reason to stop a pipeline.
        with contextlib.suppress(OSError):
            self._live.update(self.drawn(phase, url), refresh=True)

    def report(self, *, bounded: bool, told: bool) -> None:
        """Print the table below."""
        self._plain.report(bounded=bounded, told=told)

    def drawn(self, phase: Phase, url: str | None) -> RenderableType:
        """What stands at the bottom of the terminal."""
        board = self._plain.board
        title = Text(no_wrap=True, overflow="ellipsis").append(board.pipeline, style="bold")
        title.append(f"  hub {url}" if url is not None else "", style="dim")
        parts: list[RenderableType] = [Text(problem, style="bold red") for problem in board.problems()]
        if words := words_of_phase(phase):
            parts.append(Text(words, style="bold yellow"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for place, name in enumerate(HEAD):
            table.add_column(name, justify="right" if place in RIGHT else "left", no_wrap=True)
        rows = board.rows(time.time_ns() // 1_000)
        for row in rows:
            table.add_row(*row)
        return Group(*parts, title, *([table] if rows else []))
