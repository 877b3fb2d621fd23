"""What a run shows of itself: JSON lines for machines, plain lines for log files. `cli.live` draws for terminals.

A view is handed every `Progress` and decides how often it speaks. People read standard error and machines standard
output, so that a pipeline whose sink is standard output can be piped.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import click

from fordstone.cli import format as wording
from fordstone.cli.logs import json_line
from fordstone.errors import SinkError

if TYPE_CHECKING:
    from fordstone.runtime.progress import Progress, Report

JSON_EVERY_US: Final = 1_000_000
LINE_EVERY_US: Final = 10_000_000
LOG_EVERY_US: Final = 60_000_000
PREPARES: Final = "pipeline prepares"
PROGRESS: Final = "pipeline progress"
OVER: Final = "pipeline over"
SMOOTHED_OVER_US: Final = 2_000_000
"""A rate follows a change to two thirds within this time."""
TIME_END_US: Final = 2**62
"""Watermarks beyond this mean that the input has ended."""
ClockUs = Callable[[], int]


class View(Protocol):
    """Entered before the pipeline starts, left when it is over, however it ended."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def note(self, pipeline: str, words: str) -> None:
        """Called before there is progress to show, when something begins that takes a person's patience."""

    def show(self, progress: Progress) -> None:
        """Called about 20 times a second from the main thread; must be quick."""

    def report(self, report: Report) -> None:
        """Called once after the end, outside of the context."""

    def failed(self, error: Exception) -> None:
        """Called instead of `report` when the run raised something, before it is shown to people."""


class Rate:
    """Rows a second, smoothed. A count that goes back belongs to a new start."""

    def __init__(self) -> None:
        self._rows: int | None = None
        self._at_us = 0
        self._rate: float | None = None

    def __call__(self, rows: int, at_us: int) -> float:
        """Take in a count and give the rate."""
        if self._rows is None or rows < self._rows:
            self._rows, self._at_us = rows, at_us
        elif at_us > self._at_us:
            over_us = at_us - self._at_us
            now = (rows - self._rows) * 1e6 / over_us
            weight = 1.0 if self._rate is None else 1 - math.exp(-over_us / SMOOTHED_OVER_US)
            self._rate = now if self._rate is None else self._rate + weight * (now - self._rate)
            self._rows, self._at_us = rows, at_us
        return self._rate or 0.0


def words_of(progress: Progress, rate: float, now_us: int, *, bounded: bool) -> list[str]:
    """What the live line says, the most important first. `now_us` is the wall clock."""
    words = [wording.rate(rate)]
    mark_us = progress.watermark_us
    if not bounded and mark_us is not None and mark_us < TIME_END_US:
        words.append(f"lag {wording.span(max(now_us - mark_us, 0))}")
    words.append(f"epoch {progress.epoch}")
    if progress.checkpoint_us is not None:
        words.append(
            f"checkpoint {wording.span(progress.checkpoint_us)}, {wording.size(progress.checkpoint_bytes or 0)}"
        )
    words.append(f"state {wording.size(progress.state_bytes)}")
    if progress.outbox_epochs:
        words.append(f"outbox {wording.count(progress.outbox_epochs, 'epoch')}, {wording.size(progress.outbox_bytes)}")
    if progress.hub_problem is not None:
        words.append(" ".join(progress.hub_problem.split()))
    for number, word in (
        (progress.rows_late, "late"),
        (progress.rows_rejected, "rejected"),
        (progress.restarts, "restarts"),
        (progress.given_up, "checkpoints given up"),
    ):
        if number:
            words.append(f"{wording.count(number)} {word}")
    return words


def notices_of(progress: Progress) -> list[str]:
    """What the person should see before anything else."""
    found = []
    if progress.stalled is not None:
        found.append(f"STALLED: {' '.join(progress.stalled.split())}")
    if progress.stopping:
        found.append("stopping: finishing the epoch (once more to stop at once)")
    return found


def summary(report: Report, *, took_us: int, dead_letters: Path, batch_job: bool = False) -> str:
    """The table at the end of a run. `batch_job`: it was one of Spark's, which is done once."""
    progress = report.progress
    how = {
        "ended": "ended: all input was read",
        "stopped": "stopped: the epoch was finished, and running again goes on from here"
        if progress.stopping
        else "has read what was there, and running again goes on from here",
        "already_ended": "had ended already: there is nothing left to read",
    }[report.outcome]
    origin = "the beginning" if report.resumed_from is None else f"checkpoint {report.resumed_from}"
    if report.outcome == "already_ended" and batch_job:
        return (
            f"{report.pipeline} had ended already: the batch job of this state directory is done. To run it again, use another state "
            "directory and other sinks. To read on whenever more has come, use --available-now instead of --bounded."
        )
    if report.outcome == "already_ended":
        return (
            f"{report.pipeline} {how} (at {origin}). To read it all again, use another state directory and other sinks."
        )
    rows = [
        ("rows in", wording.count(progress.rows_in)),
        ("rows out", wording.count(progress.rows_out)),
        ("late", wording.count(progress.rows_late)),
        ("rejected", wording.count(progress.rows_rejected)),
        ("epoch", wording.count(progress.epoch)),
        ("restarts", wording.count(progress.restarts)),
    ]
    notes = {
        "rows in": f"{wording.rate(progress.rows_in * 1e6 / took_us)}" if progress.rows_in and took_us else "",
        "rejected": f"in {dead_letters}" if progress.rows_rejected else "",
        "epoch": _checkpoints(progress),
    }
    width = max(len(value) for _, value in rows)
    lines = [f"  {name:<9} {value:>{width}}  {notes.get(name, '')}".rstrip() for name, value in rows]
    return "\n".join([f"{report.pipeline} {how}.", *lines, f"  began at {origin}, took {wording.span(took_us)}"])


def _checkpoints(progress: Progress) -> str:
    if not progress.checkpoints:
        return ""
    last = f", the last in {wording.span(progress.checkpoint_us)}" if progress.checkpoint_us is not None else ""
    return f"{wording.count(progress.checkpoints, 'checkpoint')} by this run{last}"


class LineView:
    """For standard error that is not a terminal: a line now and then, and the summary."""

    def __init__(
        self, *, bounded: bool, dead_letters: Path, monotonic_us: ClockUs, wall_us: ClockUs, batch_job: bool = False
    ) -> None:
        self.bounded = bounded
        self._batch_job = batch_job
        self.wall_us = wall_us
        self.monotonic_us = monotonic_us
        self.rate = Rate()
        self._dead_letters = dead_letters
        self._began_us = monotonic_us()
        self._next_us = self._began_us + LINE_EVERY_US
        self._noticed = (False, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, pipeline: str, words: str) -> None:
        """A line of its own. The summary counts from the last one on: what a run took is not what starting Spark took."""
        self.begin_anew()
        with contextlib.suppress(OSError):
            click.echo(f"{pipeline}: {words}", err=True)

    def begin_anew(self) -> None:
        """Count the time from now on."""
        self._began_us = self.monotonic_us()
        self._next_us = self._began_us + LINE_EVERY_US

    def show(self, progress: Progress) -> None:
        """Print a line if it is time, or if something happened that should be seen."""
        now_us = self.monotonic_us()
        rate = self.rate(progress.rows_in, now_us)
        notice = (progress.stalled is not None, progress.stopping)
        news = any(notice) and notice != self._noticed
        self._noticed = notice
        if now_us < self._next_us and not news:
            return
        self._next_us = now_us + LINE_EVERY_US
        words = notices_of(progress) or words_of(progress, rate, self.wall_us(), bounded=self.bounded)
        if progress.share is not None:
            words.insert(0, f"{progress.share:.0%}")
        # Somebody who no longer reads standard error is no reason to stop a pipeline.
        with contextlib.suppress(OSError):
            click.echo(f"{progress.pipeline}: {' · '.join(words)}", err=True)

    def report(self, report: Report) -> None:
        """Print the summary."""
        took_us = self.monotonic_us() - self._began_us
        text = summary(report, took_us=took_us, dead_letters=self._dead_letters, batch_job=self._batch_job)
        click.echo(text, err=True)

    def failed(self, error: Exception) -> None:
        """Whoever shows errors does it."""


class LogView:
    """For standard error that machines read: a log line now and then, whatever is logged besides."""

    def __init__(self, *, monotonic_us: ClockUs, every_us: int = LOG_EVERY_US) -> None:
        self._monotonic_us = monotonic_us
        self._every_us = every_us
        self._next_us = monotonic_us()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, pipeline: str, words: str) -> None:
        """Something begins that takes a while."""
        self._say(PREPARES, {"pipeline": pipeline, "doing": words})

    def show(self, progress: Progress) -> None:
        """A line if it is time."""
        now_us = self._monotonic_us()
        if now_us >= self._next_us:
            self._next_us = now_us + self._every_us
            self._say(PROGRESS, _facts(progress))

    def report(self, report: Report) -> None:
        """The last line."""
        self._say(OVER, _facts(report.progress) | {"outcome": report.outcome, "resumed_from": report.resumed_from})

    def failed(self, error: Exception) -> None:
        """Whoever shows errors does it."""

    def _say(self, event: str, fields: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            print(json_line("INFO", event, fields, at_s=time.time()), file=sys.stderr, flush=True)


def _facts(progress: Progress) -> dict[str, Any]:
    import msgspec

    return {name: value for name, value in msgspec.to_builtins(progress).items() if value is not None}


class JsonView:
    """One object a line on standard output: `progress` about once a second, at the end `report` or `error`."""

    def __init__(self, *, monotonic_us: ClockUs) -> None:
        self._monotonic_us = monotonic_us
        self._next_us = monotonic_us() + JSON_EVERY_US

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, pipeline: str, words: str) -> None:
        """For people only."""

    def show(self, progress: Progress) -> None:
        """Print a line if it is time."""
        now_us = self._monotonic_us()
        if now_us >= self._next_us:
            self._next_us = max(self._next_us + JSON_EVERY_US, now_us)
            self._print("progress", progress)

    def report(self, report: Report) -> None:
        """The last line."""
        self._print("report", report)

    def failed(self, error: Exception) -> None:
        """The last line of a run that failed."""
        with contextlib.suppress(SinkError):
            self._print("error", {"error": type(error).__name__, "message": str(error)})

    def _print(self, event: str, body: Any) -> None:
        import msgspec

        line = msgspec.json.encode({"event": event} | msgspec.to_builtins(body)).decode() + "\n"
        try:
            sys.stdout.write(line)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise SinkError("stdout: whoever read the progress has gone. Stopping.") from error
