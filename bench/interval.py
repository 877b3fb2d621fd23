"""What checkpoints cost a pipeline, and which interval the model of Young and Daly chooses for that cost.

    python bench/interval.py totals.py [--seconds 5] [--failure-every 7d] [--recovery-goal 10s]

The pipeline runs without checkpoints, with one at each of three intervals, and without again; its sinks write to a scratch directory
instead. `interval="auto"` uses the same model (`protocol.interval`) while a pipeline runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fordstone.cli import format as fmt
from fordstone.cli.format import Table
from fordstone.cli.loading import load_pipeline
from fordstone.connectors import files
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.assembly import Environment, Job
from fordstone.edge.engine.engine import Engine
from fordstone.edge.engine.recovery import Resumption
from fordstone.edge.run import ThreadScheduler
from fordstone.epochs.manifest import Manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.lang.duration import positive_us
from fordstone.operators.base import Functions
from fordstone.plan import plan as p
from fordstone.protocol.interval import IntervalChoice, IntervalFacts, choose, overhead
from fordstone.runtime.clock import SystemClock
from fordstone.storage.disk import OsDisk

NEVER = "30d"
"""An interval longer than any measurement."""
WARM_UP_SECONDS = 1.0
ROWS_MIN = 10_000
"""Fewer rows than this do not measure speed."""
MEASURED_US = (100_000, 250_000, 1_000_000)
SHOWN_US = (100_000, 500_000, 1_000_000, 5_000_000, 30_000_000, 60_000_000, 300_000_000, 1_800_000_000, 3_600_000_000)
REREADABLE = frozenset({"files", "generator"})
"""Sources that a second reader does not disturb."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of a pipeline."""

    rows: int
    cpu_seconds: float
    costs_us: tuple[int, ...]
    """Per checkpoint, without the last: the writer's work, and the pause of the slowest task."""
    restore_us: float

    @property
    def work_rate(self) -> float:
        """Rows per second of processor time: other work on the machine hardly changes it."""
        return self.rows / self.cpu_seconds if self.cpu_seconds else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    cost_us: float
    restore_us: float
    lost: dict[int, float]
    """The share of speed that was lost, by interval."""
    notes: tuple[str, ...]


def measure(plan: p.Plan, functions: Functions, *, seconds: float, parallelism: int, directory: str | None) -> Measured:
    with tempfile.TemporaryDirectory(dir=directory, prefix="fordstone-interval-") as scratch:

        def sample(name: str, interval: str, span_s: float) -> Sample:
            print(f"running {name} for {span_s:g} s ...", file=sys.stderr, flush=True)
            home = Path(scratch) / str(time.monotonic_ns())
            return run_for(plan, functions, home, interval, span_s, parallelism)

        sample("to warm up", NEVER, min(WARM_UP_SECONDS, seconds))
        without = [sample("without checkpoints", NEVER, seconds)]
        having = {us: sample(f"with one every {us / 1e6:g} s", f"{us}us", seconds) for us in MEASURED_US}
        without.append(sample("without checkpoints again", NEVER, seconds))
    base = statistics.mean(one.work_rate for one in without)
    apart = abs(without[0].work_rate - without[1].work_rate) / base if base else 0.0
    costs = [cost for one in having.values() for cost in one.costs_us]
    if min(one.rows for one in (*without, *having.values())) < ROWS_MIN or not costs:
        sys.exit(
            f"the input is too short to measure: fewer than {ROWS_MIN:,} rows in {seconds:g} s, or it ended before a checkpoint."
        )
    return Measured(
        cost_us=statistics.median(costs),
        restore_us=statistics.median(one.restore_us for one in having.values()),
        lost={us: 1 - one.work_rate / base for us, one in having.items()},
        notes=(
            f"cost: the median of {fmt.count(len(costs), 'checkpoint')}",
            f"measured: the loss against {fmt.rate(base)} of processor time without checkpoints",
            f"  two such runs differ by {fmt.share(apart)}; smaller differences mean nothing",
        ),
    )


def run_for(
    plan: p.Plan, functions: Functions, scratch: Path, interval: str, seconds: float, parallelism: int
) -> Sample:
    """Run until the time is up or bounded input ends; sinks write below `scratch`."""
    plan = msgspec.structs.replace(plan, steps=tuple(to_scratch(step, scratch) for step in plan.steps))
    bounded = all(ends(step) for step in plan.steps if isinstance(step, p.Source))
    config = RunConfig(state=scratch / "state", interval=interval, parallelism=parallelism, bounded=bounded)
    disk, clock = OsDisk(config.directory), SystemClock()
    store = CheckpointStore(disk, pipeline=plan.pipeline, node=config.node)
    engine = Engine(Job(plan, functions, config, Environment(clock=clock, disk=disk), store), Resumption())
    began_us, began_ns = clock.monotonic_us(), time.process_time_ns()
    costs: dict[int, int] = {}
    reached: list[tuple[int, int]] = []

    def tick() -> None:
        if reached:
            return
        last = engine.writer.last
        if last is not None:
            costs[last.epoch] = last.cpu_us + last.pause_us
        if clock.monotonic_us() - began_us >= seconds * 1e6 or engine.ended:
            reached.append((engine.progress().rows_in, time.process_time_ns() - began_ns))
            engine.stop()

    try:
        ThreadScheduler(engine.steppables()).run(lambda: engine.over, every_tick=tick)
        rows, cpu_ns = reached[0] if reached else (engine.progress().rows_in, time.process_time_ns() - began_ns)
        restore_us = reading_us(store, store.manifest(store.epochs()[-1]))
    finally:
        engine.close()
        disk.close()
    return Sample(rows=rows, cpu_seconds=cpu_ns / 1e9, costs_us=tuple(costs.values()), restore_us=restore_us)


def reading_us(store: CheckpointStore, manifest: Manifest) -> float:
    """The time that it takes to read and check everything in a checkpoint."""
    began_ns = time.monotonic_ns()
    for run in dict.fromkeys(manifest.runs()):
        store.read_run(run)
    return (time.monotonic_ns() - began_ns) / 1e3


def to_scratch(step: p.Step, scratch: Path) -> p.Step:
    if not isinstance(step, p.Sink):
        return step
    kept: dict[str, Any] = {"format": "arrow"} if step.connector.kind != "files" else dict(step.connector.options)
    kept.pop("path", None)
    return msgspec.structs.replace(step, connector=files(str(scratch / "sinks" / step.name), **kept))


def ends(source: p.Source) -> bool:
    return source.connector.kind != "generator" or source.connector.options.get("rows") is not None


def intervals(facts: IntervalFacts, choice: IntervalChoice, lost: dict[int, float]) -> list[dict[str, Any]]:
    return [
        {
            "interval_us": us,
            "checkpoints": facts.cost_us / us,
            "together": overhead(us, facts),
            "recovery_us": facts.restore_us + us / facts.replay_ratio,
            "measured": lost.get(us),
            "chosen": us == choice.interval_us,
        }
        for us in sorted({*SHOWN_US, choice.interval_us, *lost})
    ]


def show(facts: IntervalFacts, choice: IntervalChoice, measured: Measured, rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"A checkpoint costs {fmt.span(facts.cost_us)}, loading one takes {fmt.span(facts.restore_us)}; a failure every "
        f"{fmt.span(facts.failure_every_us)}."
    )
    print("".join(f"  {note}\n" for note in measured.notes))
    head = ["", "interval", "for checkpoints", "for failures", "together", "measured", "recovered within"]
    cells = [
        [
            "*" if row["chosen"] else "",
            fmt.span(row["interval_us"]),
            *(fmt.share(max(part, 0.0)) for part in (row["checkpoints"], row["together"] - row["checkpoints"])),
            fmt.share(row["together"]),
            "" if row["measured"] is None else fmt.share(row["measured"]),
            fmt.span(row["recovery_us"]),
        ]
        for row in rows
    ]
    print(f"Share of time lost, by the model:\n\n{Table(head=head, rows=cells, right=range(1, len(head))).text()}\n")
    print(f"* {choice.because}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE[:NAME]")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each of five runs")
    parser.add_argument("--parallelism", type=int, default=1)
    parser.add_argument("--failure-every", metavar="SPAN", default="1d")
    parser.add_argument("--recovery-goal", metavar="SPAN", default=None)
    parser.add_argument("--directory", default=None, help="where state is written")
    parser.add_argument("--json", type=Path, default=None, help="write the results here too")
    options = parser.parse_args()
    pipeline = load_pipeline(options.file)
    plan = pipeline.plan()
    sources = [step for step in plan.steps if isinstance(step, p.Source)]
    if foreign := [step.name for step in sources if step.connector.kind not in REREADABLE]:
        sys.exit(f"source {', '.join(foreign)} cannot be read beside the real pipeline.")
    measured = measure(
        plan,
        pipeline.functions,
        seconds=options.seconds,
        parallelism=options.parallelism,
        directory=options.directory,
    )
    goal = options.recovery_goal
    facts = IntervalFacts(
        cost_us=measured.cost_us,
        restore_us=measured.restore_us,
        failure_every_us=positive_us(options.failure_every, what="--failure-every"),
        recovery_goal_us=None if goal is None else positive_us(goal, what="--recovery-goal"),
    )
    choice = choose(facts)
    rows = intervals(facts, choice, measured.lost)
    show(facts, choice, measured, rows)
    if options.json is not None:
        body = {"facts": dataclasses.asdict(facts), "choice": dataclasses.asdict(choice), "intervals": rows}
        options.json.write_text(json.dumps(body, indent=2))


if __name__ == "__main__":
    main()
