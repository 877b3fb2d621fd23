"""What a run prints: plain lines for log files, JSON lines for machines, log lines for a supervisor. `live` draws on terminals.

A `View` holds the newest progress of each part of a run (one part in a run of one tier, edge and center in a run of two) and decides
what is printed of it, and how often. People read standard error and machines standard output, so a pipeline whose sink is standard
output can be piped.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import click

from fordstone.cli import format as fmt
from fordstone.cli.errors import UsageError
from fordstone.cli.format import GAP, Table
from fordstone.cli.logs import json_line, write_line
from fordstone.errors import SinkError
from fordstone.protocol.quarantine import describe_ways_on
from fordstone.storage.clock import monotonic_clock_us, wall_clock_us

if TYPE_CHECKING:
    from fordstone.plan.plan import Plan
    from fordstone.protocol.progress import Counters, HeldBack, NotRead, Progress, Report

JSON_EVERY_US: Final = 1_000_000
LINE_EVERY_US: Final = 10_000_000
PREPARES: Final = "pipeline prepares"
PROGRESS: Final = "pipeline progress"
OVER: Final = "pipeline over"
ONE: Final = ("",)
"""The parts of a run of one tier."""
TWO: Final = ("edge", "center")
RATE_SPAN_US: Final = 2_000_000
"""A smoothed rate follows a change to two thirds within this time."""
TIME_END_US: Final = 2**62
"""Watermarks beyond this mean that the input has ended."""
HELD_BACK_US: Final = 1_000_000
"""Lags that are shorter than this are not worth a word: partitions come a little before and after each other."""
HEAD: Final = ("part", "rows/s", "rows in", "rows out", "late", "epoch", "outbox", "lag", "")
_RIGHT: Final = (1, 2, 3, 4, 5)
_AT_THE_END: Final = (0, 2, 3, 4, 5, 6, 8)
"""The columns that still mean something when the run is over."""
_OUTCOMES: Final = {
    "ended": "ended: all input was read",
    "stopped": "stopped; the next run resumes from here",
    "caught_up": "read everything there is; the next run resumes from here",
    "already_ended": "had ended already: there is nothing left to read. To read everything again, add --fresh. To read on whenever "
    "there is more, use --available-now instead of --bounded",
}
_WITHOUT_NODES: Final = {
    "ended": "ended: all input was read, except that of nodes in quarantine",
    "caught_up": "read everything there is, except that of nodes in quarantine; the next run resumes from here",
}
NOT_READ_MAX: Final = 20
"""Maximum number of nodes in quarantine that a summary names."""
ClockUs = Callable[[], int]


class Rate:
    """Rows per second, smoothed. A count that decreases belongs to a restart."""

    def __init__(self) -> None:
        self._rows: int | None = None
        self._at_us = 0
        self._rate: float | None = None

    def __call__(self, rows: int, at_us: int) -> float:
        if self._rows is None or rows < self._rows:
            self._rows, self._at_us = rows, at_us
        elif at_us > self._at_us:
            span_us = at_us - self._at_us
            now = (rows - self._rows) * 1e6 / span_us
            weight = 1 - math.exp(-span_us / RATE_SPAN_US)
            self._rate = now if self._rate is None else self._rate + weight * (now - self._rate)
            self._rows, self._at_us = rows, at_us
        return self._rate or 0.0


@dataclass(slots=True)
class Part:
    """The newest that is known of one part of a run."""

    rate: Rate = field(default_factory=Rate)
    rows_per_s: float = 0.0
    doing: str = ""
    """What it does before there is progress."""
    progress: Progress | None = None
    report: Report | None = None


@dataclass(kw_only=True)
class View:
    """Entered before the run starts and left when it is over, however it ended. Safe to use from several threads.

    This base prints nothing.
    """

    pipeline: str
    names: Sequence[str] = ONE
    bounded: bool = False
    dead_letters: Path | str | None = None
    monotonic_us: ClockUs = monotonic_clock_us
    wall_us: ClockUs = wall_clock_us

    def __post_init__(self) -> None:
        self.parts = {name: Part() for name in self.names}
        self.lock = threading.Lock()
        self.phase_text = ""
        self.hub_url: str | None = None

    @property
    def tiered(self) -> bool:
        return len(self.names) > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, text: str, part: str = "") -> None:
        """Called before there is progress, when something starts that takes a while."""
        with self.lock:
            self.parts[part].doing = text

    def show(self, progress: Progress, part: str = "") -> None:
        """Called about 20 times a second; must be quick. Only in a run of one tier is it called from the main thread."""
        with self.lock:
            found = self.parts[part]
            found.doing, found.progress = "", progress
            found.rows_per_s = found.rate(progress.rows_in, self.monotonic_us())

    def end(self, report: Report, part: str = "") -> None:
        """Called when a part has ended."""
        View.show(self, report.progress, part)
        with self.lock:
            self.parts[part].report = report

    def phase(self, text: str, hub_url: str | None) -> None:
        """Called about 20 times a second from the main thread of a run of two tiers. `text`: what is being started or stopped."""
        self.phase_text, self.hub_url = text, hub_url

    def finish(self, *, stopped: bool = False) -> None:
        """Called once after the end, outside of the context. `stopped`: a signal ended the run."""

    def failed(self, error: Exception) -> None:
        """Called instead of `finish` when the run raised something. The command prints the error."""

    def running(self) -> list[tuple[str, Progress, float]]:
        """The parts that have progress and have not ended: name, progress, rows per second."""
        with self.lock:
            return [
                (name, part.progress, part.rows_per_s)
                for name, part in self.parts.items()
                if part.progress is not None and part.report is None
            ]

    def lines(self) -> list[str]:
        """One line per running part: its notices, or what it does."""
        found = []
        for name, progress, rate in self.running():
            words = notices_of(progress)
            if not words:
                words = describe_progress(progress, rate, self.wall_us(), bounded=self.bounded)
                words += self.held(progress)
            if progress.share is not None:
                words.insert(0, f"{progress.share:.0%}")
            found.append(f"{name}: {' · '.join(words)}" if name else " · ".join(words))
        return found

    def held(self, progress: Progress) -> list[str]:
        """The partition that time waits for, as one text or none. Bounded input is read as fast as it can be: nothing is waited for."""
        text = "" if self.bounded or progress.held_back is None else describe_held(progress.held_back)
        return [text] if text else []

    def problems(self) -> list[str]:
        """What a person must see before anything else, of a run of two tiers."""
        return [
            f"{name}: {' '.join(problem.split())}"
            for name, progress, _ in self.running()
            for problem in dict.fromkeys((progress.stalled, progress.hub_problem, *_sources_away(progress)))
            if problem
        ]

    def table(self, columns: Sequence[int] = range(len(HEAD))) -> Table:
        wall_us = self.wall_us()
        with self.lock:
            rows = [_row(name, part, wall_us) for name, part in self.parts.items() if part.progress or part.doing]
        return Table(
            head=[HEAD[at] for at in columns],
            rows=[[row[at] for at in columns] for row in rows],
            right=[place for place, at in enumerate(columns) if at in _RIGHT],
        )

    def outcome(self, *, stopped: bool) -> str:
        if stopped or not self.bounded:
            return "stopped" if stopped else "caught_up"
        reports = [part.report for part in self.parts.values() if part.report is not None]
        return "already_ended" if reports and all(one.outcome == "already_ended" for one in reports) else "ended"

    def summary(self, *, took_us: int, stopped: bool = False) -> str:
        report = self.parts[self.names[0]].report
        if self.tiered:
            how = _outcome_text(self.outcome(stopped=stopped), whole=not self._not_read())
            table = self.table(_AT_THE_END)
            lines = [
                f"{self.pipeline} {how}.",
                *([table.text(GAP)] if table.rows else []),
                *(f"{GAP}late at the {name}: {late}" for name, late in self._late()),
                *(f"{GAP}{line}" for line in self._not_read()),
                f"{GAP}took {fmt.span(took_us)}",
            ]
            return "\n".join(lines)
        if report is None:
            raise AssertionError("a run of one tier that is over has a report")
        return self._summary(report, took_us)

    def _late(self) -> list[tuple[str, str]]:
        """The parts with late rows, and why these were late."""
        with self.lock:
            found = [(name, part.progress) for name, part in self.parts.items()]
        return [(name, progress.late) for name, progress in found if progress is not None and progress.late]

    def _not_read(self) -> list[str]:
        """One line per node in quarantine."""
        with self.lock:
            found = [part.progress for part in self.parts.values() if part.progress is not None]
        return describe_not_read(node for progress in found for node in progress.not_read)

    def _summary(self, report: Report, took_us: int) -> str:
        progress = report.progress
        how = _outcome_of(report)
        lines = describe_not_read(progress.not_read)
        not_read = "".join(f"\n{GAP}{line}" for line in lines)
        outcome = f"{report.pipeline} {_outcome_text(how, whole=not lines)}."
        if how == "already_ended":
            return outcome + not_read
        letters = f"in {self.dead_letters}"
        rate = fmt.rate(progress.rows_in * 1e6 / took_us) if progress.rows_in and took_us else ""
        rows = [
            ("rows in", fmt.count(progress.rows_in), rate),
            ("rows out", fmt.count(progress.rows_out), ""),
            ("late", fmt.count(progress.rows_late), progress.late or ""),
            ("rejected", fmt.count(progress.rows_rejected), _rejected(progress, letters)),
            *([("failed", fmt.count(progress.rows_failed), letters)] if progress.rows_failed else ()),
            ("epoch", fmt.count(progress.epoch), _checkpoints(progress)),
            ("restarts", fmt.count(progress.restarts), ""),
        ]
        table = Table(head=("", "", ""), rows=rows, right=(1,)).text(GAP)
        origin = "the beginning" if report.resumed_from is None else f"checkpoint {report.resumed_from}"
        held = "".join(f"\n{GAP}{text}" for text in self.held(progress))
        return f"{outcome}\n{table}\n{GAP}started from {origin}, took {fmt.span(took_us)}{held}{not_read}"


def _rejected(progress: Progress, letters: str) -> str:
    if not progress.rows_rejected:
        return ""
    return letters if progress.rejected is None else f"{letters}; one of them: {progress.rejected}"


def _outcome_text(how: str, *, whole: bool) -> str:
    """`whole`: no node was left out."""
    return _OUTCOMES[how] if whole else _WITHOUT_NODES.get(how, _OUTCOMES[how])


def describe_not_read(nodes: Iterable[NotRead]) -> list[str]:
    """One line per node in quarantine, with what to do; beyond `NOT_READ_MAX` nodes only their number."""
    found = list(dict.fromkeys(nodes))
    lines = [
        f"node {one.node} is in quarantine, and was not read from epoch {one.epoch} on. {describe_ways_on(one.pipeline, one.node, one.epoch)}"
        for one in found[:NOT_READ_MAX]
    ]
    more = len(found) - NOT_READ_MAX
    return [*lines, f"{fmt.count(more, 'more node')} in quarantine: fordstone hub quarantine"] if more > 0 else lines


def describe_progress(progress: Progress, rate: float, now_us: int, *, bounded: bool) -> list[str]:
    """The progress of one part in a few words, the most important first. `now_us` is the wall clock."""
    words = [fmt.rate(rate)]
    watermark_us = progress.watermark_us
    if not bounded and watermark_us is not None and watermark_us < TIME_END_US:
        words.append(f"lag {fmt.span(max(now_us - watermark_us, 0))}")
    words.append(f"epoch {progress.epoch}")
    if progress.checkpoint_us is not None:
        words.append(f"checkpoint {fmt.span(progress.checkpoint_us)}, {fmt.size(progress.checkpoint_bytes or 0)}")
    words.append(f"state {fmt.size(progress.state_bytes)}")
    if progress.outbox_epochs:
        words.append(f"outbox {outbox_text(progress)}")
    if progress.hub_problem is not None:
        words.append(" ".join(progress.hub_problem.split()))
    words += [" ".join(problem.split()) for problem in _sources_away(progress)]
    for number, noun in (
        (progress.rows_late, "late"),
        (progress.rows_rejected, "rejected"),
        (progress.rows_failed, "failed"),
        (progress.restarts, "restart" if progress.restarts == 1 else "restarts"),
        (progress.given_up, "checkpoints given up"),
        (progress.damaged_runs, "damaged runs"),
        (len(progress.not_read), "node in quarantine" if len(progress.not_read) == 1 else "nodes in quarantine"),
    ):
        if number:
            words.append(f"{fmt.count(number)} {noun}")
    return words


def _sources_away(progress: Progress) -> list[str]:
    """Sinks that are away are in `stalled`."""
    return [f"{one.name} waits: {one.problem}" for one in progress.away if one.role == "source"]


def notices_of(progress: Progress) -> list[str]:
    """What a person must see before anything else."""
    found = []
    if progress.stalled is not None:
        found.append(f"STALLED: {' '.join(progress.stalled.split())}")
    if progress.stopping:
        found.append("stopping: finishing the epoch (again to stop at once)")
    return found


def describe_held(held: HeldBack) -> str:
    """The partition or node that the watermark waits for, by how much it lags, and for how long it has been silent.

    Empty if the others are hardly ahead of it.
    """
    if held.lag_us is not None and held.lag_us < HELD_BACK_US:
        return ""
    which = f"node {held.partition}" if held.is_node else f"{held.partition} of {held.source}"
    nothing = "has sent nothing" if held.is_node else "has had no rows"
    silent = held.silent_us is not None and held.silent_us >= HELD_BACK_US
    span = fmt.span(held.silent_us or 0)
    if held.lag_us is None:
        return f"time waits for {which}, which {nothing} yet{f', after {span}' if silent else ''}"
    return (
        f"time waits for {which}, which lags by {fmt.span(held.lag_us)}{f' and {nothing} for {span}' if silent else ''}"
    )


def outbox_text(progress: Counters) -> str:
    """The epochs that wait for the hub."""
    if not progress.outbox_epochs:
        return "empty"
    return f"{fmt.count(progress.outbox_epochs, 'epoch')}, {fmt.size(progress.outbox_bytes)}"


def _row(name: str, part: Part, wall_us: int) -> tuple[str, ...]:
    progress, over = part.progress, part.report is not None
    if progress is None:
        return (name, *[""] * (len(HEAD) - 2), part.doing)
    watermark_us = progress.watermark_us
    timed = not over and watermark_us is not None and watermark_us < TIME_END_US
    notes = [
        part.doing or ("" if part.report is None else _outcome_of(part.report).replace("_", " ")),
        fmt.count(progress.restarts, "restart") if progress.restarts else "",
        f"{fmt.count(progress.rows_rejected)} rejected" if progress.rows_rejected else "",
        f"{fmt.count(progress.rows_failed)} failed" if progress.rows_failed else "",
    ]
    return (
        name,
        "" if over else f"{part.rows_per_s:,.0f}",
        *(fmt.count(one) for one in (progress.rows_in, progress.rows_out, progress.rows_late, progress.epoch)),
        outbox_text(progress) if name == "edge" else "",
        fmt.span(max(wall_us - (watermark_us or 0), 0)) if timed else "",
        ", ".join(note for note in notes if note),
    )


def _outcome_of(report: Report) -> str:
    """A run that stopped although no stop was requested has read what there was."""
    return "caught_up" if report.outcome == "stopped" and not report.progress.stopping else report.outcome


def _checkpoints(progress: Progress) -> str:
    if not progress.checkpoints:
        return ""
    last = f", the last in {fmt.span(progress.checkpoint_us)}" if progress.checkpoint_us is not None else ""
    return f"{fmt.count(progress.checkpoints, 'checkpoint')} in this run{last}"


class LineView(View):
    """For standard error that is not a terminal: a line every ten seconds and when something happens, and the summary."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._began_us = self.monotonic_us()
        self._next_us = self._began_us + LINE_EVERY_US
        self._noticed: list[tuple[bool, bool]] = []

    def note(self, text: str, part: str = "") -> None:
        """Print a line. The time of a run of one tier is counted from the last note on, so it excludes the start of Spark."""
        super().note(text, part)
        self._restart_clock()
        self._say(f"{part}: {text}" if part else text)

    def show(self, progress: Progress, part: str = "") -> None:
        super().show(progress, part)
        if not self.tiered:
            self._refresh()

    def phase(self, text: str, hub_url: str | None) -> None:
        if hub_url is not None and self.hub_url is None:
            self._say(f"the hub listens at {hub_url}")
        if text and text != self.phase_text:
            self._say(text)
        super().phase(text, hub_url)
        self._refresh()

    def finish(self, *, stopped: bool = False) -> None:
        took_us = self.monotonic_us() - self._began_us
        click.echo(self.summary(took_us=took_us, stopped=stopped), err=True)

    def _restart_clock(self) -> None:
        if not self.tiered:
            self._began_us = self.monotonic_us()
            self._next_us = self._began_us + LINE_EVERY_US

    def _refresh(self) -> None:
        now_us = self.monotonic_us()
        noticed = [(progress.stalled is not None, progress.stopping) for _, progress, _ in self.running()]
        news = noticed != self._noticed and any(any(one) for one in noticed)
        self._noticed = noticed
        if now_us >= self._next_us or news:
            self._next_us = now_us + LINE_EVERY_US
            for line in self.lines():
                self._say(line)

    def _say(self, text: str) -> None:
        # A closed standard error does not stop a pipeline.
        with contextlib.suppress(OSError):
            click.echo(f"{self.pipeline}: {text}", err=True)


@dataclass(kw_only=True)
class LogView(View):
    """For standard error that machines read: a log line at an interval."""

    every_us: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next_us = self.monotonic_us()

    def note(self, text: str, part: str = "") -> None:
        super().note(text, part)
        self._log(PREPARES, {"pipeline": self.pipeline, "doing": text})

    def show(self, progress: Progress, part: str = "") -> None:
        super().show(progress, part)
        now_us = self.monotonic_us()
        if now_us >= self._next_us:
            self._next_us = now_us + self.every_us
            self._log(PROGRESS, _facts(progress))

    def end(self, report: Report, part: str = "") -> None:
        super().end(report, part)
        self._log(OVER, _facts(report.progress) | {"outcome": report.outcome, "resumed_from": report.resumed_from})

    def _log(self, event: str, fields: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            write_line(json_line("INFO", event, fields, at_s=time.time()))


class JsonView(View):
    """One JSON object per line on standard output: `progress` about once a second, at the end `report` or `error`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next_us = dict.fromkeys(self.names, self.monotonic_us() + JSON_EVERY_US)

    def show(self, progress: Progress, part: str = "") -> None:
        super().show(progress, part)
        now_us = self.monotonic_us()
        if now_us >= self._next_us[part]:
            self._next_us[part] = max(self._next_us[part] + JSON_EVERY_US, now_us)
            self._print("progress", ({"part": part} if part else {}) | _builtins(progress))

    def phase(self, text: str, hub_url: str | None) -> None:
        if hub_url is not None and self.hub_url is None:
            self._print("hub", {"url": hub_url})
        super().phase(text, hub_url)

    def finish(self, *, stopped: bool = False) -> None:
        reports = {name: part.report for name, part in self.parts.items()}
        if not self.tiered:
            self._print("report", _builtins(reports[""]))
            return
        parts = {
            name: _facts(part.progress) | ({} if part.report is None else {"outcome": part.report.outcome})
            for name, part in self.parts.items()
            if part.progress is not None
        }
        outcome = self.outcome(stopped=stopped)
        self._print("report", {"pipeline": self.pipeline, "outcome": outcome, "parts": parts})

    def failed(self, error: Exception) -> None:
        with contextlib.suppress(SinkError):
            self._print("error", {"error": type(error).__name__, "message": str(error)})

    def _print(self, event: str, body: dict[str, Any]) -> None:
        try:
            fmt.print_json({"event": event} | body)
        except BrokenPipeError as error:
            raise SinkError("stdout: the reader of the progress has closed it. Stopping.") from error


def _builtins(body: object) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(body)
    return found


def _facts(progress: Progress) -> dict[str, Any]:
    return {name: value for name, value in _builtins(progress).items() if value is not None}


def make_view(plan: Plan, *, as_json: bool, logged_every: str | None = None, **facts: Any) -> View:
    """JSON lines if they were asked for, else a drawing for a terminal and plain lines for anything else.

    `logged_every`: standard error is for log lines only, with progress at this interval. `facts`: the fields of `View`.
    """
    facts["pipeline"] = plan.pipeline
    if as_json:
        _check_stdout(plan)
        return JsonView(**facts)
    if logged_every is not None:
        from fordstone.lang.duration import positive_us

        return LogView(**facts, every_us=positive_us(logged_every, what="--progress-every"))
    if not sys.stderr.isatty():
        return LineView(**facts)
    from fordstone.cli.view.live import LiveView

    return LiveView(**facts)


def run_shown(view: View, work: Callable[[], Report]) -> None:
    """Run a pipeline of one tier while the view shows it; then print its report, or raise what it raised."""
    try:
        with view:
            view.end(work())
    except Exception as error:
        view.failed(error)
        raise
    view.finish()


def _check_stdout(plan: Plan) -> None:
    """With --json, standard output is for the machine that reads it."""
    from fordstone.connectors.base import Capability, live_of
    from fordstone.connectors.registry import capabilities
    from fordstone.plan import plan as p

    printing = [
        step.name
        for step in plan.steps
        if isinstance(step, p.Sink)
        and Capability.PRINTS in capabilities(step.connector)
        and live_of(step.connector) is None
    ]
    if printing:
        raise UsageError(
            f"--json needs stdout for itself, but sink {', '.join(printing)} prints there. Write to files instead, or omit --json."
        )
