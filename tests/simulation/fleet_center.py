"""The center of a simulated fleet: the real engine over the real source and sink, which ask the hub through a wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tests.simulation.fleet_host import KEEP, Host
from tests.simulation.fleet_scenario import CONTROL, CUT, PIPELINE, FleetScenario
from tests.simulation.fleet_tally import Fault

from fordstone.connectors.base import Sink, SinkStream, Source
from fordstone.connectors.control import ControlSink
from fordstone.connectors.hub import HubOptions, HubSource
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.assembly import ConnectorOpener, Job
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import NodeStoppedError, SourceError
from fordstone.hub.client.reader import Follower
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p

CENTER: Final = "center"


class SteppedFollower(Follower):
    """Follows the hub when it is stepped, instead of on a thread of its own."""

    def start(self) -> None:
        """Nothing begins by itself."""

    def wait_until_listed(self, seconds: float) -> None:
        """Ask until everything is listed, or the hub turned out to be away."""
        del seconds
        while not self.listed:
            self.step()


class CenterEnds(ConnectorOpener):
    """The far ends of the center's half: streams and control tables at the hub, through the center's wire."""

    def __init__(self, host: Center, job: Job) -> None:
        super().__init__(job)
        self._host = host

    def source(self, step: p.Source) -> Source:
        """A stream at the hub."""
        options = HubOptions(pipeline=PIPELINE, stream=CUT)
        return HubSource(
            self._host.wire,
            options,
            Schema.stored(step.schema),
            bounded=self._host.bounded,
            clock_us=self._host.clock.monotonic_us,
            pause=lambda _: None,
            chance=lambda: 1.0,
            follower=self._host.followed,
        )

    def sink(self, step: p.Sink, *, resumes_after: int | None = None) -> Sink:
        """A control table at the hub; others are in memory."""
        if step.connector.kind != "control":
            return super().sink(step, resumes_after=resumes_after)
        stream = self._job.types[step.input]
        owner = self._job.ownership.owner
        sink_stream = SinkStream(
            step=step.name,
            schema=stream.schema,
            upsert_key=stream.upsert_key,
            owner=owner.holder,
            start=owner.start,
            resumes_after=resumes_after,
        )
        return ControlSink(self._host.wire, sink_stream, pipeline=PIPELINE, control=CONTROL, keys=("k",))


class Center(Host):
    """Runs the center's half."""

    def __init__(self, *given: Any, plan: p.Plan, scenario: FleetScenario) -> None:
        super().__init__(*given)
        self.plan = plan
        self.scenario = scenario
        self.bounded = False
        """What the hub has is all that will ever come."""
        self.stopped: NodeStoppedError | None = None
        """Why it stopped; an operator has to act before it is started again."""
        self._follower: SteppedFollower | None = None
        self._follow_at_us = 0
        self._store: CheckpointStore | None = None

    def stops_with(self, error: Exception) -> bool:
        """As any host; after the hub was restored a node may have to wait for an operator."""
        if self.ledger.restores and isinstance(error, NodeStoppedError):
            self.crash()
            self.stopped = error
            self.ledger.faults[Fault.READER_STOPPED] += 1
            return True
        if self.ledger.restores and isinstance(error, SourceError):
            # Rows that were listed before the hub was restored are gone. Started again, it lists what there is now.
            self.crash()
            return True
        return super().stops_with(error)

    def followed(self, *given: Any, **more: Any) -> Follower:
        """What follows the hub for the engine's source."""
        self._follower = SteppedFollower(*given, **more)
        return self._follower

    def start(self) -> None:
        """Recover and be ready to be stepped."""
        config = RunConfig(
            node=CENTER,
            bounded=self.bounded,
            parallelism=self.parallelism(self.scenario),
            interval=f"{self.scenario.center_interval_us}us",
            keep=KEEP,
            batch_rows=self.scenario.batch_rows,
        )
        self.starts += 1
        self._follower, self._follow_at_us = None, 0
        self._store = store = self.store()
        self.check_whole(store)
        environment = self.environment(lambda job: CenterEnds(self, job))
        self.engine = engine = recovered_engine(self.plan, {}, config, environment, store, None)
        self._sealed = engine.writer.epoch
        self.state = "running"
        self.steps = [*(one.step for one in engine.steppables()), self._follow]

    def after_step(self) -> None:
        """Judge what a step has changed."""
        if self.engine is None or self._store is None:
            return
        self.note_seals(self._store)
        if self.engine.over:
            self.state = "ended" if self.engine.config.bounded else "off"
            self.engine, self.steps = None, []

    def needed(self) -> dict[str, int] | None:
        """By node, the epoch after which it may have to begin again; None: it does not run, so that is not known."""
        if self.engine is None or self._store is None:
            return None
        # A power cut may bring an older checkpoint back, which was removed without a sync: nothing is kept for it.
        if not (epochs := self._store.epochs()[-KEEP:]):
            return {}
        partitions = self._store.manifest(epochs[0]).cut.sources[CUT].partitions
        return {name: part.position for name, part in partitions.items()}

    def has_read(self, heads: Mapping[str, int]) -> bool:
        """Whether all that nodes will ever send is sealed here."""
        if self.engine is None or self._store is None or not (epochs := self._store.epochs()):
            return False
        manifest = self._store.manifest(epochs[-1])
        parts = manifest.cut.sources[CUT].partitions
        return all(node in parts and parts[node].position >= head for node, head in heads.items())

    def _follow(self) -> bool:
        if self._follower is None or self.clock.now_us < self._follow_at_us:
            return False
        wait_s = self._follower.step()
        self._follow_at_us = self.clock.now_us + int(wait_s * 1e6)
        return True
