"""The output of the demo: a live picture on a terminal; elsewhere only the events, one line each."""

from __future__ import annotations

import time

from demo_fleet import Fleet
from demo_watch import Watch
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR_CHARS = 46
MIB = 1 << 20


class View:
    """Shows events and progress. The caller decides when it draws."""

    def __init__(self, console: Console, fleet: Fleet, watch: Watch, *, seconds: float) -> None:
        self._console = console
        self._fleet = fleet
        self._watch = watch
        self._seconds = seconds
        self._events: list[Text] = []
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._drawn = 0.0

    def start(self) -> None:
        if self._live is not None:
            self._live.start()

    def stop(self) -> None:
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            self._live.stop()

    def show(self, event: str) -> None:
        line = Text.from_markup(f"{self._watch.seconds:6.1f} s  {event}")
        self._events.append(line)
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._live.update(self._picture(), refresh=True)

    def draw(self) -> None:
        if self._live is not None and time.monotonic() - self._drawn > 0.25:
            self._drawn = time.monotonic()
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        produced = sum(gateway.devices.rows for gateway in self._fleet.gateways)
        parts: list[RenderableType] = [self._gateways(), Text()]
        parts += [
            _bar("rows written", produced, produced),
            _bar("rows counted at center", self._watch.counted, produced),
        ]
        hub = Text("up", style="green") if self._watch.hub_answers else Text("down", style="bold red")
        lag = self._watch.lag[-1][1] if self._watch.lag else 0.0
        parts += [
            Text.assemble("hub ", hub, f"   center ({self._fleet.center_engine}) lags by {lag:.1f} s"),
            Text(),
            *self._events,
        ]
        return Group(*parts)

    def _gateways(self) -> Table:
        table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("gateway")
        for column in ("rows", "epochs at the hub", "waiting", "alarms", "sent", "of raw"):
            table.add_column(column, justify="right")
        for gateway in self._fleet.gateways:
            view = self._watch.gateways[gateway.name]
            state = Text(f"{gateway.name} (dead)", style="bold red") if gateway.command.dead else Text(gateway.name)
            sent, raw = gateway.network.sent_bytes, max(gateway.devices.raw_bytes, 1)
            head = f"{view.info.head:,}" if view.info is not None else "-"
            table.add_row(
                state,
                f"{gateway.devices.rows:,}",
                head,
                f"{view.waiting:,}",
                f"{view.alarms:,}",
                f"{sent / MIB:.1f} MiB",
                f"{sent / raw:.1%}",
            )
        return table


def _bar(name: str, done: int, total: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=22)
    grid.add_column(width=BAR_CHARS)
    grid.add_row(name, ProgressBar(total=max(total, 1), completed=done, width=BAR_CHARS), f"{done:,}")
    return grid
