"""What a run of two tiers on one machine shows: a table of its parts for a terminal, lines for a log file, JSON for machines.

Told of progress by the children's threads and of the phase by the main one, which is the only one that draws.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import click

from fordstone.cli import format as wording
from fordstone.cli.view.showing import print_json
from fordstone.cli.view.view import LINE_EVERY_US, OVER, PREPARES, PROGRESS, TIME_END_US, Rate

if TYPE_CHECKING:
    from fordstone.cli.tiers import Phase

PARTS: Final = ("edge", "center")
HEAD: Final = ("part", "rows/s", "rows in", "rows out", "late", "epoch", "outbox", "lag", "")
RIGHT: Final = (1, 2, 3, 4, 5)
_AT_THE_END: Final = (0, 2, 3, 4, 5, 6, 8)
"""The columns that still mean something when all is over."""
_WORDS: Final = {
    "hub": "starting the hub ...",
    "running": "",
    "center": "the edge has ended; now the center",
    "stopping edge": "stopping: the edge finishes its epoch and sends what it has (once more to stop at once)",
    "stopping center": "stopping: the center finishes its epoch (once more to stop at once)",
    "stopping hub": "stopping the hub",
    "over": "",
}
_ENDS: Final = {
    "ended": "ended: all input was read",
    "stopped": "stopped, and running again goes on from here",
    "already_ended": "had ended already: there is nothing left to read. To read it all again, use another state directory and "
    "other sinks",
}


class TiersView(Protocol):
    """Entered before the first process starts, left when the last has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def heard(self, part: str, event: Mapping[str, Any]) -> None:
        """A part tells of its progress, in the words of `view.LogView`. Called from any thread."""

    def phase(self, phase: Phase, url: str | None) -> None:
        """Called about 20 times a second, from the main thread."""

    def report(self, *, bounded: bool, told: bool) -> None:
        """Called once after the end, outside of the context."""


class Board:
    """How the parts stand. Knows no terminal."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.doing: dict[str, str] = {}
        self.over: dict[str, str] = {}
        self._rates = {part: Rate() for part in PARTS}
        self._rate = dict.fromkeys(PARTS, 0.0)
        self.lock = threading.Lock()

    def heard(self, part: str, event: Mapping[str, Any], now_us: int) -> None:
        """Take in what a part tells."""
        with self.lock:
            if event["event"] == PREPARES:
                self.doing[part] = str(event.get("doing", ""))
                return
            self.doing.pop(part, None)
            self.facts[part] = event
            self._rate[part] = self._rates[part](int(event.get("rows_in", 0)), now_us)
            if event["event"] == OVER:
                self.over[part] = str(event.get("outcome", ""))

    def rows(self, wall_us: int) -> list[tuple[str, ...]]:
        """A row for each part, as `HEAD` names them."""
        with self.lock:
            return [self._row(part, wall_us) for part in PARTS if part in self.facts or part in self.doing]

    def problems(self) -> list[str]:
        """What the person should see before anything else."""
        with self.lock:
            return [
                f"{part}: {' '.join(str(problem).split())}"
                for part, facts in self.facts.items()
                for problem in (facts.get("stalled"), facts.get("hub_problem"))
                if problem and part not in self.over
            ]

    def outcome(self, *, bounded: bool, told: bool) -> str:
        """How the run ended, in the words of a report."""
        if told or not bounded:
            return "stopped"
        return "already_ended" if set(self.over.values()) == {"already_ended"} else "ended"

    def _row(self, part: str, wall_us: int) -> tuple[str, ...]:
        facts = self.facts.get(part)
        if facts is None:
            return (part, *[""] * (len(HEAD) - 2), self.doing.get(part, ""))
        mark_us = facts.get("watermark_us")
        lag = "" if mark_us is None or mark_us >= TIME_END_US else wording.span(max(wall_us - mark_us, 0))
        notes = [self.doing.get(part) or self.over.get(part, "").replace("_", " ")]
        notes += [f"{facts[name]:,} {name}" for name in ("restarts",) if facts.get(name)]
        notes += [f"{facts['rows_rejected']:,} rejected"] if facts.get("rows_rejected") else []
        return (
            part,
            "" if part in self.over else f"{self._rate[part]:,.0f}",
            *(wording.count(int(facts.get(name, 0))) for name in ("rows_in", "rows_out", "rows_late", "epoch")),
            _outbox(facts) if part == "edge" else "",
            "" if part in self.over else lag,
            ", ".join(note for note in notes if note),
        )


class LineTiersView:
    """For standard error that is not a terminal: a line now and then, and the table at the end."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._shown: tuple[str, str | None] = ("", None)
        self._next_us = _now_us() + LINE_EVERY_US
        self._began_us = _now_us()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def heard(self, part: str, event: Mapping[str, Any]) -> None:
        """Say at once that something begins which takes patience; the rest is for the next line."""
        self.board.heard(part, event, _now_us())
        if event["event"] == PREPARES:
            self.say(f"{part}: {event.get('doing', '')}")

    def phase(self, phase: Phase, url: str | None) -> None:
        """A line if it is time, or if something happened."""
        news = (_WORDS[phase], url)
        if news != self._shown:
            if url is not None and self._shown[1] is None:
                self.say(f"the hub listens at {url}")
            if news[0]:
                self.say(news[0])
            self._shown = news
        if _now_us() >= self._next_us:
            self._next_us = _now_us() + LINE_EVERY_US
            for line in [*self.board.problems(), *self._lines()]:
                self.say(line)

    def report(self, *, bounded: bool, told: bool) -> None:
        """The table of the end."""
        took = wording.span(_now_us() - self._began_us)
        how = self.board.outcome(bounded=bounded, told=told)
        table = plain_table(self.board.rows(_wall_us()), _AT_THE_END)
        click.echo(f"{self.board.pipeline} {_ENDS[how]}.\n{table}\n  took {took}", err=True)

    def say(self, text: str) -> None:
        """A line. Nobody who reads it is no reason to stop."""
        with contextlib.suppress(OSError):
            click.echo(f"{self.board.pipeline}: {text}", err=True)

    def _lines(self) -> list[str]:
        return [
            f"{row[0]}  {' · '.join(f'{name} {value}'.strip() for name, value in zip(HEAD[1:], row[1:], strict=True) if value)}"
            for row in self.board.rows(_wall_us())
        ]


class JsonTiersView:
    """One object a line on standard output: what the parts tell, and a report at the end."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._url: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def heard(self, part: str, event: Mapping[str, Any]) -> None:
        """Pass it on."""
        self._board.heard(part, event, _now_us())
        if event["event"] == PROGRESS:
            print_json({"event": "progress", "part": part} | _told(event))

    def phase(self, phase: Phase, url: str | None) -> None:
        """Tell once where the hub is."""
        del phase
        if url is not None and self._url is None:
            self._url = url
            print_json({"event": "hub", "url": url})

    def report(self, *, bounded: bool, told: bool) -> None:
        """The last line."""
        parts = {part: _told(facts) for part, facts in self._board.facts.items()}
        outcome = self._board.outcome(bounded=bounded, told=told)
        print_json({"event": "report", "pipeline": self._board.pipeline, "outcome": outcome, "parts": parts})


def make_tiers_view(pipeline: str, *, as_json: bool) -> TiersView:
    """JSON lines if they were asked for, else a table for a terminal and plain lines for anything else."""
    board = Board(pipeline)
    if as_json:
        return JsonTiersView(board)
    plain = LineTiersView(board)
    if not sys.stderr.isatty():
        return plain
    from fordstone.cli.view.tiers_live import LiveTiersView

    return LiveTiersView(plain)


def plain_table(rows: list[tuple[str, ...]], places: Sequence[int] = range(len(HEAD))) -> str:
    """The parts below each other, set in; of the columns those at `places`."""
    right = [at for at, place in enumerate(places) if place in RIGHT]
    text = wording.table([HEAD[at] for at in places], [[row[at] for at in places] for row in rows], right=right)
    return "\n".join(f"  {line}" for line in text.splitlines())


def words_of_phase(phase: str) -> str:
    """What a phase is called; empty while all is as it should be."""
    return _WORDS[phase]


def _outbox(facts: Mapping[str, Any]) -> str:
    epochs = int(facts.get("outbox_epochs", 0))
    return f"{wording.count(epochs, 'epoch')}, {wording.size(int(facts.get('outbox_bytes', 0)))}" if epochs else "empty"


def _told(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in {"event", "level", "at"}}


def _now_us() -> int:
    return time.monotonic_ns() // 1_000


def _wall_us() -> int:
    return time.time_ns() // 1_000
