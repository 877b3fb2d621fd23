"""Run a pipeline in a test: given rows in, frames out, with crashes between.

Sources and sinks are replaced by ones in memory, and the state is on a disk in memory. The real engine runs in small steps under a seed, so
a failure can be repeated. A crash drops the engine where it is, and perhaps what the disk had not synced; the next engine recovers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec
import polars as pl
from polars.testing import assert_frame_equal

from fordstone.api.pipeline import Pipeline
from fordstone.api.tiers import run_here
from fordstone.connectors.base import Sink, SinkStream, live_of
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.connectors.registry import open_sink
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.assembly import Environment
from fordstone.edge.engine.engine import Engine
from fordstone.edge.engine.source_task import SourceTask
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import ConfigError, FordstoneError
from fordstone.lang.choices import did_you_mean
from fordstone.lang.schema import Schema
from fordstone.operators.base import Functions
from fordstone.operators.dead_letter import LETTER_SCHEMA
from fordstone.plan import plan as p
from fordstone.testing.memory_disk import MemoryDisk

STEPS_MAX: Final = 1_000_000
CHUNKS: Final = 16
"""About how many reads the rows of a source take, so that there are several epochs."""
START_US: Final = 1_767_225_600_000_000
"""What the clock of a run begins at: 2026-01-01 00:00 UTC."""
READ_SHARE: Final = 0.03
"""How often a step reads: seldom, so that barriers pass and epochs are sealed between two reads."""
_STEP_US: Final = 200
_IDLE_US: Final = 1_000
_ID: Final = "__id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Mapping[str, pl.DataFrame]):
    """The rows of each sink by its name; of an upsert stream the newest row of each key."""

    sinks: dict[str, pl.DataFrame]
    dead_letters: dict[str, pl.DataFrame] = field(default_factory=dict)
    """What each step could not read or process, by its name; only steps that have some."""
    epochs: int = 0
    """The number of epochs that were sealed."""
    crashes: int = 0

    def __getitem__(self, sink: str) -> pl.DataFrame:
        if sink not in self.sinks:
            hint = did_you_mean(sink, self.sinks) or f"Sinks are: {', '.join(self.sinks)}."
            raise KeyError(f"there is no sink {sink!r}. {hint}")
        return self.sinks[sink]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sinks)

    def __len__(self) -> int:
        return len(self.sinks)


def run_pipeline(
    pipeline: Pipeline | Callable[[], Pipeline],
    rows: Mapping[str, object] | None = None,
    *,
    crashes: int = 0,
    seed: int = 0,
    parallelism: int = 1,
    nodes: int | None = None,
    rel_tol: float = 1e-9,
) -> Results:
    """Run a pipeline, or what a function builds, over the rows of each source by name, and return the rows of each sink.

    What may be given for a source is what `memory(...)` takes, without generators; a source that is not named is read as it is declared. With
    `crashes`, it is run a second time and killed that often, at moments that follow from `seed`; the results must be those of the run
    without crashes, floats within `rel_tol`, or an `AssertionError` shows the difference. A pipeline of two tiers runs with `nodes`
    nodes, and without crashes.
    """
    declared = pipeline if isinstance(pipeline, Pipeline) else pipeline()
    plan = _fed(declared.plan(), rows or {})
    if plan.tiered:
        if crashes:
            raise ConfigError(
                "crashes=: a pipeline of two tiers runs here without crashes. Test its halves on their own."
            )
        return _in_tiers(plan, declared.functions, parallelism=parallelism, nodes=nodes)
    if nodes is not None:
        raise ConfigError(f"nodes={nodes}: pipeline {plan.pipeline} has one tier, which runs as one node.")
    calm = _Machine(plan, declared.functions, parallelism=parallelism, rng=Random(seed))
    calm.live()
    if not crashes:
        return calm.results()
    killed = _Machine(plan, declared.functions, parallelism=parallelism, rng=Random(seed))
    for _ in range(crashes):
        killed.live(steps_max=killed.rng.randint(1, calm.steps))
        killed.crash()
    killed.live()
    found = killed.results()
    _check_same(calm.results(), found, seed=seed, rel_tol=rel_tol)
    return found


def _fed(plan: p.Plan, rows: Mapping[str, object]) -> p.Plan:
    """The plan with these rows in place of its sources."""
    sources = [step.name for step in plan.steps if isinstance(step, p.Source)]
    for name in rows:
        if name not in sources:
            hint = did_you_mean(name, sources) or f"Sources are: {', '.join(sources)}."
            raise ConfigError(f"pipeline {plan.pipeline} has no source {name!r}. {hint}")

    def changed(step: p.Step) -> p.Step:
        if not isinstance(step, p.Source) or step.name not in rows:
            return step
        connector = memory(rows[step.name])
        live = live_of(connector)
        if not isinstance(live, MemorySource) or not live.replays:
            raise ConfigError(f"source {step.name}: give a list of rows or a frame; a generator can be read once only.")
        try:
            live.check_names(Schema.of(step.schema))
        except FordstoneError as error:
            raise type(error)(f"source {step.name}: {error}") from None
        return msgspec.structs.replace(step, connector=connector)

    return msgspec.structs.replace(plan, steps=tuple(map(changed, plan.steps)))


def _with_sinks(plan: p.Plan) -> tuple[p.Plan, dict[str, MemorySink]]:
    """The plan with sinks in memory, and these."""
    sinks = {step.name: MemorySink() for step in plan.steps if isinstance(step, p.Sink)}
    steps = tuple(
        msgspec.structs.replace(step, connector=memory(sinks[step.name])) if isinstance(step, p.Sink) else step
        for step in plan.steps
    )
    return msgspec.structs.replace(plan, steps=steps), sinks


def _rows_of(sink: MemorySink) -> pl.DataFrame:
    rows = sink.latest()
    # Rows that were released at once may come again after a crash; their ids tell.
    return rows.unique(_ID, keep="first", maintain_order=True).drop(_ID) if _ID in rows.columns else rows


def _in_tiers(plan: p.Plan, functions: Functions, *, parallelism: int, nodes: int | None) -> Results:
    plan, sinks = _with_sinks(plan)
    report = run_here(plan, functions, RunConfig(bounded=True, parallelism=parallelism, interval="20ms"), nodes=nodes)
    return Results(sinks={name: _rows_of(sink) for name, sink in sinks.items()}, epochs=report.progress.epoch)


class _Clock:
    """Moves with the steps of the run."""

    def __init__(self) -> None:
        self.now_us = START_US

    def wall_us(self) -> int:
        return self.now_us

    def monotonic_us(self) -> int:
        return self.now_us

    def wait(self, seconds: float) -> None:
        self.now_us += int(seconds * 1e6)


class _Machine:
    """What outlives a crash: the disk, the clock and the sinks."""

    def __init__(self, plan: p.Plan, functions: Functions, *, parallelism: int, rng: Random) -> None:
        self.rng = rng
        self.steps = 0
        self._plan, self._sinks = _with_sinks(plan)
        self._functions = functions
        self._disk = MemoryDisk()
        self._clock = _Clock()
        self._letters: dict[str, MemorySink] = {}
        self._epochs = 0
        self._crashes = 0
        self._config = RunConfig(
            bounded=True, parallelism=parallelism, interval="200us", compression="none", batch_rows=_batch_rows(plan)
        )

    def live(self, *, steps_max: int | None = None) -> None:
        """Run to the end, or for a number of steps."""
        store = CheckpointStore(
            self._disk, pipeline=self._plan.pipeline, node=self._config.node, compression=self._config.compression
        )
        environment = Environment(
            clock=self._clock, disk=self._disk, dead_letters=self._dead_letters, wait=self._clock.wait
        )
        engine = recovered_engine(self._plan, self._functions, self._config, environment, store, None)
        if not engine.time_has_ended:
            self._step(engine, steps_max)
        self._epochs = engine.writer.epoch
        if steps_max is None:
            engine.close()

    def crash(self) -> None:
        """Lose the process; half of the time the power too."""
        self._crashes += 1
        if self.rng.random() < 0.5:
            self._disk.crash(self.rng)
        else:
            self._disk.kill()

    def results(self) -> Results:
        return Results(
            sinks={name: _rows_of(sink) for name, sink in self._sinks.items()},
            dead_letters={name: sink.rows() for name, sink in self._letters.items() if sink.rows().height},
            epochs=self._epochs,
            crashes=self._crashes,
        )

    def _step(self, engine: Engine, steps_max: int | None) -> None:
        parts = engine.steppables()
        sources = [part for part in parts if isinstance(part, SourceTask)]
        others = [part for part in parts if not isinstance(part, SourceTask)]
        idle = 0
        for number in range(STEPS_MAX):
            if engine.over or number == steps_max:
                return
            self.steps += 1
            self._clock.now_us += self.rng.randrange(_STEP_US)
            part = self.rng.choice(sources if self.rng.random() < READ_SHARE else others)
            idle = 0 if part.step() else idle + 1
            if idle > 2 * len(parts):
                self._clock.now_us += _IDLE_US
        raise AssertionError(f"the pipeline did not end within {STEPS_MAX:,} steps: {engine.progress()}")

    def _dead_letters(self, step: str) -> Sink:
        sink = self._letters.setdefault(step, MemorySink())
        return open_sink(memory(sink), SinkStream(step=step, schema=LETTER_SCHEMA))


def _batch_rows(plan: p.Plan) -> int:
    """The number of rows per read with which the largest source takes `CHUNKS` reads."""
    lives = [live_of(step.connector) for step in plan.steps if isinstance(step, p.Source)]
    rows = max((live.row_count() for live in lives if isinstance(live, MemorySource)), default=0)
    return max(1, rows // CHUNKS)


def _check_same(expected: Results, found: Results, *, seed: int, rel_tol: float) -> None:
    for kind, wanted, got in (
        ("sink", expected.sinks, found.sinks),
        ("dead letters of", expected.dead_letters, found.dead_letters),
    ):
        for name in wanted.keys() | got.keys():
            left, right = (one.get(name, pl.DataFrame()) for one in (wanted, got))
            try:
                assert_frame_equal(right, left, check_row_order=False, rel_tol=rel_tol)
            except AssertionError as error:
                raise AssertionError(
                    f"{kind} {name}: after {found.crashes} crashes (seed {seed}) its rows are not those of the run without.\n"
                    f"{error}\nWithout crashes:\n{left}\nWith crashes:\n{right}"
                ) from None
