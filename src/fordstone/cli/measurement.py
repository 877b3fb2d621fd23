"""Measure what checkpoints cost: from those that are stored, or by running a pipeline with and without them.

What is measured is handed to the model in `protocol.interval`; nothing here decides. Nothing that belongs to the user
is written: stored checkpoints are only read, and a pipeline is run with its sinks turned into a scratch directory.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from fordstone.cli.errors import Mistake, Misuse
from fordstone.connectors import files
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.engine.recovery import Resumption
from fordstone.edge.engine.scheduler import ThreadScheduler
from fordstone.epochs.manifest import Manifest
from fordstone.epochs.run_file import encode_run
from fordstone.epochs.sealed import encode_manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError
from fordstone.operators.base import Functions
from fordstone.plan import plan as p
from fordstone.runtime.clock import SystemClock
from fordstone.storage.disk import OsDisk

NEVER: Final = "30d"
"""An interval that no measurement sees the end of."""
WARM_UP_SECONDS: Final = 1.0
ROWS_MIN: Final = 10_000
"""Fewer rows than this say nothing about speed."""
_REREADABLE: Final = frozenset({"files", "generator"})
"""Sources that a second reader does not disturb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the model needs, and how it was found."""

    cost_us: float
    restore_us: float
    how: tuple[str, ...]
    now_us: int | None = None
    """The interval at which the pipeline has been checkpointing."""
    lost: dict[int, float] = field(default_factory=dict)
    """By interval: the share of speed that was lost, as measured."""


def from_store(store: CheckpointStore) -> Measured:
    """From the checkpoints that are kept: write again, in memory, what each had added, and read the newest whole."""
    manifests = _readable(store)
    if not manifests:
        raise Mistake(f"pipeline {store.pipeline} on node {store.node} has no readable checkpoint to measure.")
    newest = manifests[-1]
    restore_us = _reading_us(store, newest)
    costs, sizes = [], []
    for before, after in pairwise([None, *manifests]):
        if after is None or (before is None and len(manifests) > 1):
            # What the oldest one had added cannot be told from what it had taken over.
            continue
        old = frozenset[str]() if before is None else frozenset(run.digest for run in before.runs())
        new = [run for run in dict.fromkeys(after.runs()) if run.digest not in old]
        rows = [store.read_run(run) for run in new]
        began_ns = time.thread_time_ns()
        for frame in rows:
            encode_run(frame, "lz4")
        encode_manifest(after)
        costs.append((time.thread_time_ns() - began_ns) / 1e3)
        sizes.append(sum(run.size_bytes for run in new))
    steps = [
        after.created_us - before.created_us for before, after in pairwise(manifests) if after.epoch == before.epoch + 1
    ]
    from fordstone.cli import format as wording

    return Measured(
        cost_us=statistics.median(costs),
        restore_us=restore_us,
        how=(
            f"cost: what {wording.count(len(costs), 'checkpoint')} had added ({wording.size(round(statistics.median(sizes)))} each), encoded again here",
            f"loading: checkpoint {newest.epoch} read here, {wording.size(sum(run.size_bytes for run in dict.fromkeys(newest.runs())))}",
        ),
        now_us=round(statistics.median(steps)) if steps else None,
    )


def _readable(store: CheckpointStore) -> list[Manifest]:
    found = []
    for epoch in store.epochs():
        try:
            found.append(store.manifest(epoch))
        except CheckpointError:
            continue
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of a pipeline for a while."""

    rows: int
    seconds: float
    cpu_seconds: float
    costs_us: tuple[int, ...]
    """Of each checkpoint but the last: the writer's work, and the pause of the slowest task."""
    restore_us: float

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def work_rate(self) -> float:
        """Rows a second of processor time: what else the machine does hardly changes it."""
        return self.rows / self.cpu_seconds if self.cpu_seconds else 0.0


def from_runs(
    plan: p.Plan,
    functions: Functions,
    intervals: Sequence[int],
    *,
    seconds: float,
    parallelism: int,
    tell: Callable[[str], None],
) -> Measured:
    """Run the pipeline for `seconds` without checkpoints, at each of `intervals` (microseconds), and without again."""
    foreign = [
        step.name for step in plan.steps if isinstance(step, p.Source) and step.connector.kind not in _REREADABLE
    ]
    if foreign:
        raise Misuse(
            f"source {', '.join(foreign)} cannot be read beside the real pipeline. Measure with --state, or give --cost."
        )
    with tempfile.TemporaryDirectory(dir=".", prefix=".fordstone-measure-") as scratch:

        def sample(name: str, interval: str, long: float) -> Sample:
            tell(f"running {name} for {long:g} s ...")
            return run_for(
                plan,
                functions,
                Path(scratch) / f"{name}-{time.monotonic_ns()}".replace(" ", "-"),
                interval,
                long,
                parallelism,
            )

        sample("to warm up", NEVER, min(WARM_UP_SECONDS, seconds))
        without = [sample("without checkpoints", NEVER, seconds)]
        having = {
            interval_us: sample(f"with one every {interval_us / 1e6:g} s", f"{interval_us}us", seconds)
            for interval_us in intervals
        }
        without.append(sample("without checkpoints again", NEVER, seconds))
    base = statistics.mean(found.work_rate for found in without)
    apart = abs(without[0].work_rate - without[1].work_rate) / base if base else 0.0
    costs = [cost for found in having.values() for cost in found.costs_us]
    if min(found.rows for found in (*without, *having.values())) < ROWS_MIN or not costs:
        raise Mistake(
            f"the input is too short to measure: less than {ROWS_MIN:,} rows in {seconds:g} s, or it ended before a checkpoint was due."
        )
    from fordstone.cli import format as wording

    return Measured(
        cost_us=statistics.median(costs),
        restore_us=statistics.median(found.restore_us for found in having.values()),
        how=(
            f"cost: the median of {wording.count(len(costs), 'checkpoint')} of this pipeline, run here",
            f"measured: by how much fewer rows a second of processor time there were than the {wording.rate(base)} without",
            f"  checkpoints; two such runs were {wording.share(apart)} apart, so differences smaller than that mean nothing",
        ),
        lost={interval_us: 1 - found.work_rate / base for interval_us, found in having.items()},
    )


def run_for(
    plan: p.Plan, functions: Functions, scratch: Path, interval: str, seconds: float, parallelism: int
) -> Sample:
    """Run until the time is up or bounded input ends; sinks write below `scratch`."""
    plan = msgspec.structs.replace(plan, steps=tuple(_scratched(step, scratch) for step in plan.steps))
    bounded = all(_ends(step) for step in plan.steps if isinstance(step, p.Source))
    config = RunConfig(state=scratch / "state", interval=interval, parallelism=parallelism, bounded=bounded)
    disk, clock = OsDisk(config.state), SystemClock()
    store = CheckpointStore(disk, pipeline=plan.pipeline, node=config.node)
    engine = Engine(plan, functions, config, Environment(clock=clock, disk=disk), store, Resumption())
    began_us, began_ns = clock.monotonic_us(), time.process_time_ns()
    costs: dict[int, int] = {}
    reached: list[tuple[int, int, int]] = []

    def stand() -> tuple[int, int, int]:
        return engine.progress().rows_in, clock.monotonic_us() - began_us, time.process_time_ns() - began_ns

    def tick() -> None:
        last, now_us = engine.writer.last, clock.monotonic_us()
        if last is not None and not reached:
            costs[last.epoch] = last.cpu_us + last.pause_us
        if not reached and (now_us - began_us >= seconds * 1e6 or engine.ended):
            reached.append(stand())
            engine.stop()

    try:
        ThreadScheduler(engine.steppables()).run(lambda: engine.over, every_tick=tick)
    finally:
        engine.close()
        disk.close()
    rows, took_us, cpu_ns = reached[0] if reached else stand()
    return Sample(
        rows=rows,
        seconds=took_us / 1e6,
        cpu_seconds=cpu_ns / 1e9,
        costs_us=tuple(costs.values()),
        restore_us=_reading_us(store, store.manifest(store.epochs()[-1])),
    )


def _reading_us(store: CheckpointStore, manifest: Manifest) -> float:
    """How long it takes to read and check everything that a checkpoint names."""
    began_ns = time.monotonic_ns()
    for run in dict.fromkeys(manifest.runs()):
        store.read_run(run)
    return (time.monotonic_ns() - began_ns) / 1e3


def _scratched(step: p.Step, scratch: Path) -> p.Step:
    if not isinstance(step, p.Sink):
        return step
    kept: dict[str, Any] = {"format": "arrow"} if step.connector.kind != "files" else dict(step.connector.options)
    kept.pop("path", None)
    return msgspec.structs.replace(step, connector=files(str(scratch / "sinks" / step.name), **kept))


def _ends(source: p.Source) -> bool:
    return source.connector.kind != "generator" or source.connector.options.get("rows") is not None
