"""One job of the demo: input that grows, a real process that works on it, and the one who kills it.

The process is `fordstone run` in a folder of its own. It is killed with SIGKILL, which no program can catch, and started
again with the same command.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_oracle import Verdict, json_rows, judge_readings, judge_words

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import make_data  # noqa: E402 - stands beside the examples

FORDSTONE = Path(sys.executable).with_name("fordstone")
INTERVAL = "250ms"
LINES_PER_SECOND = 4_000
READINGS_PER_SECOND = 3_000
TEXT_FILES = 12
GATEWAYS = 3
CATCH_UP_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
TICK_SECONDS = 0.05


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(kw_only=True)
class Feed:
    """Writes rows to files, a few at a time, as they would come in. `rows` gives each row with the file it goes to."""

    directory: Path
    rows: Iterator[tuple[str, dict[str, Any]]]
    total: int
    written: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    count: int = 0

    def write_until(self, share: float) -> None:
        """Write until this share of all rows is there."""
        texts: dict[str, list[str]] = {}
        while self.count < min(int(share * self.total), self.total):
            name, row = next(self.rows)
            self.written.setdefault(name, []).append(row)
            texts.setdefault(name, []).append(json.dumps(row) + "\n")
            self.count += 1
        for name, lines in texts.items():
            with (self.directory / name).open("a") as file:
                file.writelines(lines)


class Worker:
    """The process that runs the pipeline."""

    def __init__(self, pipeline: Path, folder: Path) -> None:
        self._pipeline = pipeline
        self._folder = folder
        self._log = folder / "fordstone.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> int:
        """Start it; gives the process id."""
        command = [str(FORDSTONE), "run", str(self._pipeline), "--state", "state", "--interval", INTERVAL, *options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self._process.pid

    def check(self) -> None:
        """Raise if it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise DemoError(f"`fordstone run` ended by itself, with {self._process.returncode}:\n{self._tail()}")

    def kill(self) -> int:
        """Kill it with SIGKILL; gives the process id that was."""
        process, self._process = self._process, None
        if process is None:
            raise DemoError("there is nothing to kill.")
        process.kill()
        if process.wait(STOP_SECONDS_MAX) != -signal.SIGKILL:
            raise DemoError(f"`fordstone run` was gone before it was killed:\n{self._tail()}")
        return process.pid

    def stop(self) -> None:
        """Ask it to finish its epoch and end, and wait until it has."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        self.wait()

    def wait(self) -> None:
        """Wait for its end."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            code = process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DemoError(f"`fordstone run` did not end within {STOP_SECONDS_MAX:.0f} s:\n{self._tail()}") from None
        if code != 0:
            raise DemoError(f"`fordstone run` ended with {code}:\n{self._tail()}")

    def close(self) -> None:
        """Leave no process behind."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])


@dataclass(kw_only=True)
class Job:
    """A pipeline, its input, and how its results are judged."""

    name: str
    folder: Path
    pipeline: Path
    feed: Feed
    counted: Callable[[], int]
    """How many rows the visible results account for now."""
    expected: Callable[[], int]
    """How many they must account for in the end."""
    judge: Callable[[], list[Verdict]]
    kills_at: list[float]
    closes_windows: bool = False
    """Whether results wait for time, which only the end of the input brings."""
    kills: int = 0

    def run(self, seconds: float, tell: Callable[[str], None], tick: Callable[[Job], None]) -> list[Verdict]:
        """Feed, kill, start again, stop, judge."""
        worker = Worker(self.pipeline, self.folder)
        tell(f"process {worker.start()} started: fordstone run {self.pipeline.name}")
        try:
            self._feed(worker, seconds, tell, tick)
            self._catch_up(worker, tick)
            worker.stop()
            if self.closes_windows:
                worker.start("--bounded")
                worker.wait()
            tell(f"stopped; {self.epochs()} epochs sealed")
        finally:
            worker.close()
        tick(self)
        return self.judge()

    def epochs(self) -> int:
        """The newest sealed epoch, by the checkpoints that lie there."""
        return max((int(file.stem) for file in self.folder.glob("state/*/*/manifests/*.json")), default=0)

    def _feed(self, worker: Worker, seconds: float, tell: Callable[[str], None], tick: Callable[[Job], None]) -> None:
        """Let the input grow, and kill when it is time. A process that has sealed nothing yet is given time first."""
        share, begun_at, now = 0.0, 0, time.monotonic()
        deadline = now + seconds + CATCH_UP_SECONDS_MAX
        while share < 1:
            before, now = now, time.monotonic()
            sealed = self.epochs()
            next_kill = self.kills_at[self.kills] if self.kills < len(self.kills_at) else None
            if sealed > begun_at:
                share = min(share + (now - before) / seconds, 1.0 if next_kill is None else next_kill)
            self.feed.write_until(share)
            if next_kill is not None and share >= next_kill:
                self.kills += 1
                killed, begun, begun_at = worker.kill(), worker.start(), self.epochs()
                tell(
                    f"[bold red]kill -9 {killed}[/] after {self.feed.count:,} rows, with epoch {sealed} sealed; "
                    f"started again as {begun}"
                )
            if now > deadline:
                raise DemoError(f"no epoch was sealed after number {begun_at}.")
            worker.check()
            tick(self)
            time.sleep(TICK_SECONDS)

    def _catch_up(self, worker: Worker, tick: Callable[[Job], None]) -> None:
        """Wait until the results account for every row. If some are lost that never comes, and the judge will say so."""
        deadline = time.monotonic() + CATCH_UP_SECONDS_MAX
        while self.counted() < self.expected() and time.monotonic() < deadline:
            worker.check()
            tick(self)
            time.sleep(TICK_SECONDS)


def word_count(folder: Path, *, seed: int, kills: int, seconds: float) -> Job:
    """Files of text that appear one after the other, each growing for a while. Killed at even distances."""
    total = int(LINES_PER_SECOND * seconds)
    lines = make_data.lines(seed)
    places = (f"text-{at * TEXT_FILES // total:02d}.jsonl" for at in range(total))
    feed = Feed(directory=_made(folder / "in/words"), rows=zip(places, lines, strict=False), total=total)
    out = folder / "out"

    def rows() -> list[dict[str, Any]]:
        return [row for part in feed.written.values() for row in part]

    return Job(
        name="word count",
        folder=folder,
        pipeline=EXAMPLES / "word_count.py",
        feed=feed,
        counted=_Latest(out / "counts", "word").total,
        expected=lambda: sum(len(row["line"].split()) for row in rows()),
        judge=lambda: judge_words(rows(), out),
        kills_at=[(at + 1) / (kills + 1) for at in range(kills)],
    )


def cold_chain(folder: Path, *, seed: int, kills: int, seconds: float) -> Job:
    """Three gateways, one file each. Killed at random moments."""
    total = int(READINGS_PER_SECOND * seconds)
    directory = _made(folder / "in/readings")
    names = [f"gateway-{gateway}.jsonl" for gateway in range(GATEWAYS)]
    for name in names:
        (directory / name).touch()
    readings = [make_data.readings(seed, gateway) for gateway in range(GATEWAYS)]
    places = ((names[at % GATEWAYS], next(readings[at % GATEWAYS])) for at in range(total))
    feed = Feed(directory=directory, rows=places, total=total)
    rng = random.Random(seed)
    out = folder / "out"
    return Job(
        name="cold chain",
        folder=folder,
        pipeline=EXAMPLES / "cold_chain_edge.py",
        feed=feed,
        counted=_Latest(out / "totals", "device").total,
        expected=lambda: sum(-60 < row["temp"] < 80 for part in feed.written.values() for row in part),
        judge=lambda: judge_readings(feed.written.values(), out),
        kills_at=sorted(rng.uniform(0.2, 0.9) for _ in range(kills)),
        closes_windows=True,
    )


class _Latest:
    """The newest count of each key, read from the files as they appear."""

    def __init__(self, directory: Path, key: str) -> None:
        self._directory = directory
        self._key = key
        self._seen: set[str] = set()
        self._counts: dict[str, int] = {}

    def total(self) -> int:
        for file in sorted(self._directory.glob("epoch-*.jsonl")):
            if file.name not in self._seen:
                self._seen.add(file.name)
                self._counts |= {row[self._key]: row["n"] for row in json_rows(self._directory, file.name)}
        return sum(self._counts.values())


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory
