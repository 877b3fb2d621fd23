"""Both engines over real files, stepped until nothing more happens: the edge engine without threads, Spark without a JVM."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.simulation.simulator import NoDeadLetters, SimClock
from tests.spark.micro import MicroQuery, MicroSpark

from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Environment
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.plan.plan import Plan
from fordstone.protocol.pacing import IDLE_INTERVAL_US
from fordstone.testing.memory_disk import MemoryDisk

ROUNDS = 400


class Engine(Protocol):
    """Runs a plan until nothing more happens; called again, goes on with what has come since."""

    def run(self, plan: Plan) -> None: ...

    def restart(self) -> None: ...


class OnEdge:
    def __init__(
        self, root: Path, parallelism: int, *, batch_rows: int = 7, keep: int = 2, rounds: int = ROUNDS
    ) -> None:
        """`rounds`: the number of steps of a run; in each the source may list its store."""
        del root
        self._disk, self._clock = MemoryDisk(), SimClock()
        self._parallelism, self._batch_rows, self._keep = parallelism, batch_rows, keep
        self._rounds = rounds
        self.replayed = 0
        self._engine: Any = None

    def run(self, plan: Plan, rounds: int | None = None) -> None:
        if self._engine is None:
            config = RunConfig(
                node="n",
                bounded=False,
                parallelism=self._parallelism,
                interval="2ms",
                batch_rows=self._batch_rows,
            )
            store = self._store(plan)
            environment = Environment(
                clock=self._clock, disk=self._disk, choose=lambda _: 0, dead_letters=lambda _: NoDeadLetters()
            )
            self._engine = recovered_engine(plan, {}, config, environment, store, None)
            self.replayed += len(self._engine.resumption.replay)
        else:
            # What only the clock changes is noticed at a barrier, and an idle pipeline has one per minute.
            self._clock.now_us += IDLE_INTERVAL_US
        for _ in range(self._rounds if rounds is None else rounds):
            self._clock.now_us += 100
            for steppable in self._engine.steppables():
                steppable.step()

    def restart(self) -> None:
        """As after a crash: what was not sealed is forgotten."""
        self._engine = None

    def damage(self, plan: Plan) -> None:
        """Damage all checkpoints: the next start replays what was sealed, if all of it is kept."""
        store = self._store(plan)
        for epoch in store.epochs():
            self._disk.damage(f"{store.pipeline}/{store.node}/manifests/{epoch:012}.json", b"not a manifest")

    def _store(self, plan: Plan) -> CheckpointStore:
        return CheckpointStore(self._disk, pipeline=plan.pipeline, node="n", compression="none", keep=self._keep)


class OnSpark:
    def __init__(self, root: Path, parallelism: int) -> None:
        del parallelism
        self._state, self._spark = root / "state", MicroSpark()
        self._query: MicroQuery | None = None

    def run(self, plan: Plan) -> None:
        if self._query is None:
            self._query = self._spark.start(plan, state=self._state)
        self._query.run()

    def restart(self) -> None:
        self._query = None


@pytest.fixture(name="engine", params=["edge", "edge-3", "spark"])
def engine_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    kind, _, parallelism = request.param.partition("-")
    return (OnEdge if kind == "edge" else OnSpark)(tmp_path, int(parallelism or 1))
