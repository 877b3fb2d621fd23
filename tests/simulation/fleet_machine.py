"""The machines of a node in a simulated fleet: engine, outbox, sender, and the fetcher of a control table."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from tests.simulation.fleet_host import KEEP, Host, Step
from tests.simulation.fleet_scenario import CONTROL, PIPELINE, FleetScenario
from tests.simulation.fleet_tally import Fault
from tests.simulation.rows import Row, SimulationError

from fordstone.connectors.control import PARTITION, ControlSource
from fordstone.connectors.memory import MemorySource
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine
from fordstone.edge.link.control import ControlFetcher
from fordstone.edge.link.links import HubLink
from fordstone.edge.link.owner import Ownership
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import HubAwayError, HubError
from fordstone.hub.client.address import HubAddress
from fordstone.plan import plan as p
from fordstone.testing.memory_disk import MemoryDisk

NOWHERE: Final = HubAddress(url="http://127.0.0.1:1")
"""Nobody is asked there: hosts are handed their wires."""
FETCH_EVERY_US: Final = 20_000
SMALL_LOG_BYTES: Final = 2_000
"""The epoch log is compacted above this, also while epochs wait for the hub."""


class Machine(Host):
    """Runs a node's half of the pipeline: engine, outbox, sender, and the fetcher of its control table."""

    def __init__(self, *given: Any, plan: p.Plan, scenario: FleetScenario, take_over: bool = False) -> None:
        super().__init__(*given)
        self.plan = plan
        self.scenario = scenario
        self.take_over = take_over
        self.link: HubLink | None = None
        self.disputed = False
        """There are or were copies of its disk, or the hub was restored and another machine went on: it may find that it must stop."""
        self._fetch_at_us = 0
        self._store: CheckpointStore | None = None

    def stops_with(self, error: Exception) -> bool:
        """As any host; where there are copies, it may find that another has gone on."""
        if self.disputed and isinstance(error, HubError) and not isinstance(error, HubAwayError):
            self.shut_out()
            return True
        return super().stops_with(error)

    def begin_with(self, disk: MemoryDisk, original: Machine) -> None:
        """Have a disk that was another machine's, with what that one had sealed."""
        self.disk = disk
        present = self.store().epochs()
        sealed = self.ledger.sealed.get(original.name, {})
        newest = max(present, default=0)
        self.ledger.sealed[self.name] = {epoch: one for epoch, one in sealed.items() if epoch <= newest}
        if original.name in self.ledger.again:
            self.ledger.again[self.name] = list(self.ledger.again[original.name])

    def start(self, *, bounded: bool) -> None:
        """Recover and be ready to be stepped."""
        scenario = self.scenario
        config = RunConfig(
            node=self.node,
            bounded=bounded,
            interval=f"{scenario.interval_us}us",
            keep=KEEP,
            batch_rows=scenario.batch_rows,
            hub=NOWHERE,
            hub_state=scenario.hub_state,
            take_over=self.take_over,
            outbox_bytes_max=scenario.outbox_bytes,
            parallelism=self.parallelism(scenario),
        )
        environment = self.environment()
        self.starts += 1
        self._store = store = self.store()
        self.check_whole(store)
        ownership = Ownership(environment.disk, f"{store.pipeline}/{store.node}")
        self.link = link = HubLink(self.wire, self.plan, config, environment, store, ownership)
        if scenario.small:
            store.log._max_bytes = store.log._rewrite_above_bytes = SMALL_LOG_BYTES
        self.engine = engine = recovered_engine(
            self.plan, {}, config, environment, store, link.remote, outbox=link.outbox, ownership=ownership
        )
        engine.writer.stages.retention.keep_for(link.acknowledged)
        self._sealed = engine.writer.epoch
        for epoch in store.epochs():
            self.ledger.note_sealed(self.name, store.manifest(epoch).cut)
        self.state = "running"
        self.steps = [link.sender.step]
        if not engine.time_has_ended:
            self.steps += [one.step for one in engine.steppables()]
            self.steps += [self._fetching(fetcher) for fetcher in self._fetchers(engine)]

    def crash(self, *, midway: bool = False) -> None:
        """As any host, and perhaps the newest checkpoint is damaged then."""
        super().crash(midway=midway)
        store = self.store()
        epochs = store.epochs()
        if not self.scenario.damages or self.name in self.ledger.again or len(epochs) < KEEP:
            return
        for epoch in epochs:
            self.ledger.note_sealed(self.name, store.manifest(epoch).cut)
        self.ledger.again[self.name] = []
        newest, before = store.manifest(epochs[-1]), store.manifest(epochs[-2])
        spared = {ref.digest for ref in before.runs()}
        only = [digest for digest in dict.fromkeys(ref.digest for ref in newest.runs()) if digest not in spared]
        base = f"{store.pipeline}/{store.node}"
        path = f"{base}/manifests/{epochs[-1]:012}.json"
        if only and self.rng.random() < 0.7:
            path = f"{base}/runs/{self.rng.choice(only)}"
        data = bytearray(self.disk.read(path))
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        self.disk.damage(path, bytes(data))
        self.ledger.faults[Fault.DAMAGED] += 1

    def stop(self) -> None:
        """Finish the epoch, even if the outbox is full."""
        if self.engine is not None and self.link is not None:
            self.engine.stop()
            self.link.outbox.overrun = True

    @property
    def idle(self) -> bool:
        """Whether its engine is over: only what waits in the outbox is left to do."""
        return self.engine is not None and (self.engine.over or self.engine.time_has_ended)

    def after_step(self) -> None:
        """Judge what a step has changed."""
        if self.engine is None or self.link is None or self._store is None:
            return
        if self.note_seals(self._store):
            outbox = self.link.outbox
            for entry in outbox.oldest(outbox.epochs):
                for segment in entry.streams.values():
                    for ref in segment.runs:
                        if (fault := self._store.run_fault(ref)) is not None:
                            raise SimulationError(f"{self.name}: unsent epoch {entry.epoch} lacks a run: {fault}")
        if self.take_over and self.link.outbox.sent and self.engine.writer.epoch > self.link.outbox.sent > 0:
            self.take_over = False
        if self.engine.over and not self.engine.config.bounded:
            # It was stopped: what is not sent yet waits for the next start.
            self.state, self.engine, self.steps = "off", None, []
        elif self.idle and not self.link.sender.unfinished:
            self.state, self.engine, self.steps = "ended", None, []
        elif self.engine.over:
            self.steps = [self.link.sender.step]

    def _fetchers(self, engine: Engine) -> list[ControlFetcher]:
        source = engine.sources.get(CONTROL)
        if not isinstance(source, ControlSource):
            return []
        manifest = engine.resumption.manifest
        cut = manifest.cut.sources.get(CONTROL) if manifest is not None else None
        taken = cut.partitions.get(PARTITION) if cut is not None else None
        fetcher = ControlFetcher(
            self.wire,
            source.log,
            pipeline=PIPELINE,
            control=CONTROL,
            taken=taken,
            chance=self.rng.random,
        )
        return [fetcher]

    def _fetching(self, fetcher: ControlFetcher) -> Step:
        self._fetch_at_us = 0

        def step() -> bool:
            if self.clock.now_us < self._fetch_at_us:
                return False
            wait_s = fetcher.step(wait_s=0.0)
            self._fetch_at_us = self.clock.now_us + max(int(wait_s * 1e6), FETCH_EVERY_US)
            return wait_s == 0.0

        return step


@dataclass(slots=True)
class Node:
    """A node: its input, and the machines that are or were it."""

    name: str
    rows: tuple[tuple[Row, ...], ...]
    source: MemorySource
    plan: p.Plan
    fed: list[int]
    machines: list[Machine] = field(default_factory=list)
    made: int = 0
    """How many machines were made."""

    @property
    def all_fed(self) -> bool:
        """Whether all its rows have turned up."""
        return all(count == len(rows) for count, rows in zip(self.fed, self.rows, strict=True))

    def feed(self, rng: Random, rows_max: int) -> None:
        """Let some rows turn up."""
        index = rng.randrange(len(self.rows))
        rows = self.rows[index][self.fed[index] : self.fed[index] + rng.randint(1, rows_max)]
        self.source.append(index, [row.record() for row in rows])
        self.fed[index] += len(rows)
