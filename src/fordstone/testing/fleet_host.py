"""Machines of a simulated fleet: those of nodes and that of the center. Each runs the real engine on a disk that forgets.

A host is started, stepped and crashed by `fleet`; what its sender and its fetcher ask goes through its `Wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final, Literal

import polars as pl

from fordstone.checkpoint.store import CheckpointStore
from fordstone.connectors.connector import Delivery, Sink, SinkStream, Source
from fordstone.connectors.control import PARTITION, ControlSource
from fordstone.connectors.control_publish import ControlSink
from fordstone.connectors.hub_epochs import HubOptions, HubSource
from fordstone.connectors.hub_index import Follower
from fordstone.edge.config import RunConfig
from fordstone.edge.control_fetch import ControlFetcher
from fordstone.edge.ends import Ends
from fordstone.edge.engine import Engine, Rim
from fordstone.edge.hub_link import HubLink
from fordstone.edge.owner import holder_of
from fordstone.edge.run import recovered_engine
from fordstone.errors import FencedError, HubRefusedError
from fordstone.hub.address import HubAddress
from fordstone.model import plan as p
from fordstone.model.manifest import TIME_MAX_US
from fordstone.model.schema import Schema
from fordstone.testing.fleet_ledger import Ledger
from fordstone.testing.fleet_network import Wire
from fordstone.testing.fleet_scenario import CONTROL, CUT, PIPELINE, FleetScenario
from fordstone.testing.memory_disk import MemoryDisk, PowerCut
from fordstone.testing.rows import SimulationError
from fordstone.testing.simulator import SimClock

KEEP: Final = 2
CENTER: Final = "center"
NOWHERE: Final = HubAddress(url="http://127.0.0.1:1")
"""Nobody is asked there: hosts are handed their wires."""
FETCH_EVERY_US: Final = 20_000
SMALL_OUTBOX_BYTES: Final = 300
"""So much of no use is enough to write the outbox's index anew."""
Step = Callable[[], bool]


class _Swallow(Sink):
    """Takes dead letters, of which a simulation has none."""

    @property
    def delivery(self) -> Delivery:
        return Delivery.EXACTLY_ONCE

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        if frame.height:
            raise SimulationError(f"dead letters in epoch {epoch}: {frame}")

    def write(self, frame: pl.DataFrame) -> None:
        raise SimulationError(f"dead letters written at once: {frame}")

    def close(self) -> None:
        """Nothing to close."""


class Host:
    """A machine: its disk outlives its processes."""

    def __init__(self, name: str, node: str, wire: Wire, clock: SimClock, rng: Random, ledger: Ledger) -> None:
        self.name = name
        self.node = node
        self.wire = wire
        self.clock = clock
        self.rng = rng
        self.ledger = ledger
        self.disk = MemoryDisk()
        self.engine: Engine | None = None
        self.steps: list[Step] = []
        """What may be stepped now."""
        self.state: Literal["off", "running", "ended", "dead"] = "off"
        self.starts = 0
        self._sealed = 0

    def store(self) -> CheckpointStore:
        """Open the checkpoints on its disk."""
        return CheckpointStore(self.disk, pipeline=PIPELINE, node=self.node, compression="none", keep=KEEP)

    def rim(self, ends: Callable[..., Ends] = Ends) -> Rim:
        """What an engine here is handed."""
        return Rim(
            clock=self.clock, disk=self.disk, choose=self.rng.randrange, dead_letters=lambda _: _Swallow(), ends=ends
        )

    def crash(self) -> None:
        """Lose the process, and perhaps the power."""
        if self.rng.random() < 0.5:
            self.disk.crash(self.rng)
        else:
            self.disk.kill()
        self.engine, self.steps = None, []
        if self.state == "running":
            self.state = "off"

    def check_whole(self, store: CheckpointStore) -> None:
        """Every sealed checkpoint is whole after a crash, and sealed as it was (unless we damaged it ourselves)."""
        if self.name in self.ledger.again:
            return
        for fact in store.survey(deep=True).checkpoints:
            if fact.problem is not None:
                raise SimulationError(f"{self.name}: sealed checkpoint {fact.epoch} is not whole: {fact.problem}")
        for epoch in store.epochs():
            self.ledger.note_sealed(self.name, store.manifest(epoch).cut)

    def parallelism(self, scenario: FleetScenario) -> int:
        """Of the next start."""
        return self.rng.choice((1, 2)) if scenario.rescales else 1

    def note_seals(self, store: CheckpointStore) -> bool:
        """See whether an epoch was sealed since; what is kept must be whole then."""
        if self.engine is None or self.engine.writer.epoch == self._sealed:
            return False
        self._sealed = self.engine.writer.epoch
        for epoch in store.epochs():
            manifest = store.manifest(epoch)
            self.ledger.note_sealed(self.name, manifest.cut)
            for ref in manifest.runs():
                if (fault := store.run_fault(ref)) is not None:
                    raise SimulationError(f"{self.name}: checkpoint {epoch} names a run that is not there: {fault}")
        return True


class Machine(Host):
    """Runs a node's half of the pipeline: engine, outbox, sender, and the fetcher of its control table."""

    def __init__(self, *given: Any, plan: p.Plan, scenario: FleetScenario, take_over: bool = False) -> None:
        super().__init__(*given)
        self.plan = plan
        self.scenario = scenario
        self.take_over = take_over
        self.link: HubLink | None = None
        self._fetch_at_us = 0
        self._store: CheckpointStore | None = None

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
        rim = self.rim()
        self.starts += 1
        self._store = store = self.store()
        self.check_whole(store)
        self.link = link = HubLink(self.wire, self.plan, config, rim, store)
        if scenario.small:
            link.outbox._compact_bytes_min = SMALL_OUTBOX_BYTES
        self.engine = engine = recovered_engine(self.plan, {}, config, rim, store, link.remote, outbox=link.outbox)
        engine.writer.keep_for(link.acknowledged)
        self._sealed = engine.writer.epoch
        for epoch in store.epochs():
            self.ledger.note_sealed(self.name, store.manifest(epoch).cut)
        self.state = "running"
        self.steps = [link.sender.step]
        if not engine.time_has_ended:
            self.steps += [one.step for one in engine.steppables()]
            self.steps += [self._fetching(fetcher) for fetcher in self._fetchers(engine)]

    def crash(self) -> None:
        """As any host, and perhaps the newest checkpoint is damaged then."""
        super().crash()
        store = self.store()
        epochs = store.epochs()
        if not self.scenario.damages or self.name in self.ledger.again or len(epochs) < KEEP:
            return
        self.ledger.again[self.name] = []
        newest, before = store.manifest(epochs[-1]), store.manifest(epochs[-2])
        only = sorted({ref.digest for ref in newest.runs()} - {ref.digest for ref in before.runs()})
        base = f"{store.pipeline}/{store.node}"
        path = f"{base}/manifests/{epochs[-1]:012}.json"
        if only and self.rng.random() < 0.7:
            path = f"{base}/runs/{self.rng.choice(only)}"
        data = bytearray(self.disk.read(path))
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        self.disk.damage(path, bytes(data))

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
            # It was told to stop: what is not sent yet waits for the next start.
            self.state, self.engine, self.steps = "off", None, []
        elif self.idle and not self.link.outbox.epochs:
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
            taken=0 if taken is None else taken.position,
            choose=self.rng.random,
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


class SteppedFollower(Follower):
    """Follows the hub when it is told to, instead of on a thread of its own."""

    def start(self) -> None:
        """Nothing begins by itself."""

    def wait_for_first(self, seconds: float) -> None:
        """Ask until all was told, or the hub turned out to be away."""
        del seconds
        while not self.asked:
            self.turn()


class CenterEnds(Ends):
    """The far ends of the center's half: streams and control tables at the hub, through the center's wire."""

    def __init__(self, host: Center, types: Mapping[Any, Any], disk: MemoryDisk, home: str, **more: Any) -> None:
        super().__init__(types, disk, home, **more)
        self._host = host
        self._home_dir = home

    def source(self, step: p.Source) -> Source:
        """A stream at the hub."""
        options = HubOptions(pipeline=PIPELINE, stream=CUT)
        return HubSource(
            self._host.wire,
            options,
            Schema.stored(step.schema),
            bounded=False,
            clock_us=self._host.clock.monotonic_us,
            follower=self._host.followed,
        )

    def sink(self, step: p.Sink) -> Sink:
        """A control table at the hub; others are in memory."""
        if step.connector.kind != "control":
            return super().sink(step)
        stream = self._types[step.input]
        owner = holder_of(self._host.disk, self._home_dir)
        told = SinkStream(step=step.name, schema=stream.schema, upsert_key=stream.upsert_key, owner=owner)
        return ControlSink(self._host.wire, told, pipeline=PIPELINE, control=CONTROL, keys=("k",))


class Center(Host):
    """Runs the center's half."""

    def __init__(self, *given: Any, plan: p.Plan, scenario: FleetScenario) -> None:
        super().__init__(*given)
        self.plan = plan
        self.scenario = scenario
        self._follower: SteppedFollower | None = None
        self._follow_at_us = 0
        self._store: CheckpointStore | None = None

    def followed(self, *given: Any, **more: Any) -> Follower:
        """What follows the hub for the engine's source."""
        self._follower = SteppedFollower(*given, **more)
        return self._follower

    def start(self) -> None:
        """Recover and be ready to be stepped."""
        config = RunConfig(
            node=CENTER,
            parallelism=self.parallelism(self.scenario),
            interval=f"{self.scenario.center_interval_us}us",
            keep=KEEP,
            batch_rows=self.scenario.batch_rows,
        )
        self.starts += 1
        self._follower, self._follow_at_us = None, 0
        self._store = store = self.store()
        self.check_whole(store)
        rim = self.rim(lambda *given, **more: CenterEnds(self, *given, **more))
        self.engine = engine = recovered_engine(self.plan, {}, config, rim, store, None)
        self._sealed = engine.writer.epoch
        self.state = "running"
        self.steps = [*(one.step for one in engine.steppables()), self._follow]

    def after_step(self) -> None:
        """Judge what a step has changed."""
        if self.engine is None or self._store is None:
            return
        self.note_seals(self._store)
        if self.engine.over:
            self.state, self.engine, self.steps = "ended", None, []

    def needed(self) -> dict[str, int] | None:
        """By node, the epoch behind which it may have to begin again; None: it does not run, so nobody knows."""
        if self.engine is None or self._store is None:
            return None
        if not (epochs := self._store.epochs()):
            return {}
        partitions = self._store.manifest(epochs[0]).cut.sources[CUT].partitions
        return {name: part.position for name, part in partitions.items()}

    def has_read(self, heads: Mapping[str, int]) -> bool:
        """Whether all that nodes will ever send is sealed here, and all time has passed."""
        if self.engine is None or self._store is None or not (epochs := self._store.epochs()):
            return False
        manifest = self._store.manifest(epochs[-1])
        source = manifest.cut.sources[CUT]
        read = {name: part.position for name, part in source.partitions.items()}
        over = source.watermark_us == TIME_MAX_US or not heads
        return over and all(read.get(node, 0) == head for node, head in heads.items())

    def _follow(self) -> bool:
        if self._follower is None or self.clock.now_us < self._follow_at_us:
            return False
        wait_s = self._follower.turn()
        self._follow_at_us = self.clock.now_us + int(wait_s * 1e6)
        return True


def step(host: Machine | Center, work: Step) -> bool:
    """Let a host do one thing. A crash ends its process, a newer generation ends it for good."""
    try:
        did = work()
        host.after_step()
    except PowerCut:
        host.crash()
        return True
    except FencedError:
        host.crash()
        host.state = "dead"
        return True
    except HubRefusedError as error:
        if error.code != "held":
            raise
        host.crash()
        host.state = "dead"
        return True
    return did
