"""Run two pipelines as real processes, kill them with SIGKILL half way, start them again, and count what was lost.

Word count over files that appear and grow, and a cold chain of sensors: windows, late rows, alarms that go out at once,
running totals. In the end all results are compared with an oracle that shares no code with Fordstone.
Exits with 1 if a single row was lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from demo_job import DemoError, Job, cold_chain, word_count
from demo_oracle import Verdict
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text


class View:
    """What one sees: bars on a terminal; on anything else the events alone, a line each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description:<22}"), BarColumn(bar_width=40), MofNCompleteColumn(), console=console
        )
        self._events: list[Text] = []
        self._rows: dict[str, tuple[TaskID, TaskID]] = {}
        # By job, the bars of its input and of its results.
        self.live = Live(self._shown(), console=console, refresh_per_second=10) if console.is_terminal else None

    def add(self, job: Job) -> None:
        written = self._bars.add_task(f"{job.name}: written", total=job.feed.total)
        counted = self._bars.add_task(f"{job.name}: counted", total=None)
        self._rows[job.name] = (written, counted)

    def tell(self, job: Job, event: str) -> None:
        line = Text.from_markup(f"{time.monotonic() - self._began:5.1f} s  {job.name:<10}  {event}")
        self._events.append(line)
        if self.live is None:
            self._console.print(line, soft_wrap=True)
        else:
            self.live.update(self._shown())

    def tick(self, job: Job) -> None:
        if self.live is None:
            return
        written, counted = self._rows[job.name]
        self._bars.update(written, completed=job.feed.count)
        self._bars.update(counted, completed=job.counted(), total=job.expected())

    def _shown(self) -> Group:
        return Group(self._bars, *self._events)


def verdicts_table(jobs: list[tuple[Job, list[Verdict]]]) -> Table:
    """All that was compared, a line each."""
    table = Table(
        title="Compared with the oracle", title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("output")
    for column in ("produced", "counted", "lost", "doubled", "wrong", "kills", "epochs"):
        table.add_column(column, justify="right")
    for job, verdicts in jobs:
        for at, verdict in enumerate(verdicts):
            numbers = (verdict.produced, verdict.counted, verdict.lost, verdict.doubled, verdict.wrong)
            run = (str(job.kills), str(job.epochs())) if at == 0 else ("", "")
            style = "" if verdict.good else "bold red"
            table.add_row(verdict.output, *(f"{n:,}" for n in numbers), *run, style=style)
    return table


def run(folder: Path, *, seed: int, kills: int, seconds: float, console: Console) -> bool:
    """Both jobs, one after the other; whether all was right."""
    view = View(console)
    done: list[tuple[Job, list[Verdict]]] = []
    jobs = [make(folder / make.__name__, seed=seed, kills=kills, seconds=seconds) for make in (word_count, cold_chain)]
    if view.live is not None:
        view.live.start()
    try:
        for job in jobs:
            view.add(job)
            done.append((job, job.run(seconds, lambda event, job=job: view.tell(job, event), view.tick)))  # type: ignore[misc]  # a lambda's default
    finally:
        if view.live is not None:
            view.live.stop()
    verdicts = [verdict for _, found in done for verdict in found]
    console.print(verdicts_table(done))
    again = sum(verdict.again for verdict in verdicts)
    console.print(
        f"Every epoch has its checkpoint. Alarms that came again after a kill, dropped by their id: {again:,}."
    )
    console.print(
        f"Rows produced: {sum(job.feed.count for job in jobs):,}. Kills: {sum(job.kills for job in jobs)}. "
        f"Lost: {sum(v.lost for v in verdicts)}. Doubled: {sum(v.doubled for v in verdicts)}. Seed: {seed}."
    )
    return all(verdict.good for verdict in verdicts) and all(job.kills == kills for job in jobs)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()) % 10_000,
        help="of the rows and of the moments of the kills; by the clock if left out",
    )
    parser.add_argument("--kills", type=int, default=1, help="how often each job is killed (1)")
    parser.add_argument("--seconds", type=float, default=6.0, help="for how long each job's input comes in (6)")
    parser.add_argument(
        "--out", type=Path, help="a new folder for input, state and output; a temporary one if left out"
    )
    given = parser.parse_args()
    console = Console(highlight=False)
    folder = given.out or Path(tempfile.mkdtemp(prefix="fordstone-demo-"))
    if given.out is not None and given.out.exists():
        parser.error(f"{given.out} is there already. Name a new folder.")
    try:
        good = run(folder, seed=given.seed, kills=given.kills, seconds=given.seconds, console=console)
    except DemoError as error:
        console.print(f"The demo could not go on: {error}", markup=False)
        good = False
    if good and given.out is None:
        shutil.rmtree(folder)
    else:
        console.print(f"Input, state and output are in {folder}.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
