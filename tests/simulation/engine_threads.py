"""A whole engine on the threads that run it in production, in an order that a seed decides, judged as every simulation is.

`ThreadScheduler` runs the tasks, the coordinator and the writer; the disk is slow, so that others run while it works. A task may fail in
the middle of a batch or of a barrier: then the engine is made again in the same process, as `edge.run` does. The input is bounded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

from tests.simulation.interleave import Interleaving
from tests.simulation.judge import judge
from tests.simulation.rows import ROWS_BEGIN_US, SimulationError
from tests.simulation.scenario import Scenario, World, build
from tests.simulation.simulator import FAILURES_MAX, YEAR_US, NoDeadLetters, TailLetters, Tally, rows_before
from tests.simulation.tails import LETTERS
from tests.simulation.tails import STEP as TAIL

from fordstone.edge import run as run_module
from fordstone.edge.config import RunConfig
from fordstone.edge.engine import channel as channel_module
from fordstone.edge.engine import source_task as source_task_module
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.run import ThreadScheduler, recovered_engine
from fordstone.epochs import epoch_log as epoch_log_module
from fordstone.epochs import store as store_module
from fordstone.epochs.manifest import Cut, Manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.runtime.chain import Chain
from fordstone.state import base as state_module
from fordstone.storage.disk import Data
from fordstone.testing.memory_disk import MemoryDisk

memory_module: Final = importlib.import_module("fordstone.connectors.memory")
"""The package has a function of this name."""
LOCKING: Final[tuple[ModuleType, ...]] = (
    run_module, channel_module, source_task_module, store_module, epoch_log_module, state_module, memory_module,
)  # fmt: skip
"""The modules whose locks, events and threads an engine uses."""
STEPS_MAX: Final = 2_000_000
TICKS_MAX_US: Final = (50, 500, 4_000)
"""By how much the clock moves at most whenever it is read: attempts time out seldom, often, or nearly always."""
TICKS_CHANGE: Final = 0.003
SLOW_AFTER: Final = 5_000
"""After how many times it is read the clock all but stops, so that the last attempts do not time out for ever."""


IDLE_SECONDS: Final = 0.0002
"""By how much it moves whenever all threads wait for a time."""


class TickingClock:
    """Moves on whenever it is read."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._now_us = ROWS_BEGIN_US + YEAR_US
        self._tick_max_us = rng.choice(TICKS_MAX_US)
        self._reads = 0

    def wall_us(self) -> int:
        return self.monotonic_us()

    def monotonic_us(self) -> int:
        self._reads += 1
        if self._rng.random() < TICKS_CHANGE:
            self._tick_max_us = self._rng.choice(TICKS_MAX_US)
        self._now_us += self._rng.randrange(self._tick_max_us if self._reads < SLOW_AFTER else 2)
        return self._now_us

    def wait(self, seconds: float) -> None:
        self._now_us += int(seconds * 1e6)


class SlowDisk(MemoryDisk):
    """Lets other threads run before each change."""

    def __init__(self, threads: Interleaving) -> None:
        super().__init__()
        self._threads = threads

    def create(self, path: str, data: Data) -> None:
        self._threads.pause()
        super().create(path, data)

    def append(self, path: str, data: Data) -> None:
        self._threads.pause()
        super().append(path, data)

    def fsync(self, path: str) -> None:
        self._threads.pause()
        super().fsync(path)

    def fsync_dir(self, path: str) -> None:
        self._threads.pause()
        super().fsync_dir(path)

    def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        self._threads.pause()
        super().rename(old, new, replace=replace)

    def remove(self, path: str) -> None:
        self._threads.pause()
        super().remove(path)


@dataclass(slots=True)
class _Noted:
    """What the judge has to know of epochs that are not kept any more."""

    engine: Engine | None = None
    given_up: int = 0
    cuts: dict[int, Cut] = field(default_factory=dict)
    uneven: set[int] = field(default_factory=set)

    def begin(self, engine: Engine) -> None:
        self.engine, self.given_up = engine, 0

    def note(self, manifest: Manifest) -> None:
        """An epoch was sealed."""
        self.cuts[manifest.epoch] = manifest.cut
        if self.engine is not None and self.engine.coordinator.given_up != self.given_up:
            self.given_up = self.engine.coordinator.given_up
            self.uneven.add(manifest.epoch)


class _Store(CheckpointStore):
    noted: _Noted

    def commit(self, manifest: Manifest, *, sealed_before: bool = False) -> None:
        super().commit(manifest, sealed_before=sealed_before)
        self.noted.note(manifest)


class FunctionAwayError(OSError):
    """What a function raises."""


@contextmanager
def failing_functions(rng: Random, rate: float, tally: Tally) -> Iterator[None]:
    """Let steps fail now and then, before or after rows, time or a barrier went through those of a task."""

    def fail() -> None:
        if tally.failures < FAILURES_MAX and rng.random() < rate:
            tally.failures += 1
            raise FunctionAwayError(f"failure {tally.failures}")

    def failing(work: Callable[..., None]) -> Callable[..., None]:
        def tried(*given: Any, **options: Any) -> None:
            fail()
            work(*given, **options)
            fail()

        return tried

    with ExitStack() as stack:
        for name in ("push", "on_watermark", "on_barrier"):
            stack.enter_context(patch.object(Chain, name, failing(getattr(Chain, name))))
        yield


def run_on_threads(scenario: Scenario, *, excludes: bool = True, traced: tuple[ModuleType, ...] = ()) -> Tally:
    """Run a bounded scenario to its end and judge it. Raises with the seed if an invariant does not hold, or no thread can go on."""
    threads = Interleaving(scenario.seed, traced=traced, steps_max=STEPS_MAX)
    rng, tally, noted = Random(scenario.seed ^ 0x7EAD), Tally(seeds=1), _Noted()
    with ExitStack() as stack:
        stack.enter_context(threads.inside(*LOCKING, excludes=excludes))
        stack.enter_context(failing_functions(rng, 10 * scenario.failure_rate, tally))
        world, disk, clock = build(scenario), SlowDisk(threads), TickingClock(rng)
        threads.on_idle = lambda: clock.wait(IDLE_SECONDS)
        threads.run(lambda: _until_ended(scenario, world, disk, clock, rng, noted, tally))
    epochs: dict[int, int] = {}
    for epoch in sorted(noted.cuts):
        for row in rows_before(scenario, noted.cuts[epoch]):
            epochs.setdefault(row.id, epoch)
    try:
        judge(scenario, world, epochs, noted.uneven)
    except SimulationError as error:
        raise SimulationError(f"{scenario.title()}, on threads: {error}") from error
    return tally


def _until_ended(
    scenario: Scenario, world: World, disk: MemoryDisk, clock: TickingClock, rng: Random, noted: _Noted, tally: Tally
) -> None:
    config = RunConfig(
        node="sim",
        bounded=True,
        parallelism=scenario.parallelism,
        interval=f"{scenario.interval_us}us",
        checkpoint_timeout=f"{scenario.timeout_us}us",
        keep=2,
        batch_rows=scenario.batch_rows,
        channel_rows_max=scenario.channel_rows,
        waiting_bytes_max=scenario.waiting_bytes,
    )
    environment = Environment(
        clock=clock,
        disk=disk,
        choose=rng.randrange,
        dead_letters=lambda step: TailLetters(world.sinks[LETTERS]) if step == TAIL else NoDeadLetters(),
        wait=clock.wait,
    )
    while True:
        store = _Store(disk, pipeline=world.plan.pipeline, node="sim", compression="none", keep=2)
        store.noted = noted
        try:
            engine = recovered_engine(world.plan, {}, config, environment, store, None)
        except FunctionAwayError:
            continue  # a step fails as time begins where the checkpoint has it
        noted.begin(engine)
        if engine.time_has_ended:
            return
        try:
            ThreadScheduler(engine.steppables()).run(lambda engine=engine: engine.over)  # type: ignore[misc]
        except FunctionAwayError:
            continue
        else:
            return
        finally:
            tally.checkpoints += engine.writer.sealed_count
            tally.given_up += engine.coordinator.given_up
            engine.close()
