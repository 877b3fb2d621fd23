"""What the machines of a simulated fleet have in common: a real engine on a disk that forgets.

A host is started, stepped and crashed by `fleet`; what it asks of the hub goes through its `Wire`. See `fleet_machine` and
`fleet_center`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Final, Literal

from tests.simulation.fleet_ledger import Ledger
from tests.simulation.fleet_network import Wire
from tests.simulation.fleet_scenario import PIPELINE, FleetScenario
from tests.simulation.fleet_tally import Fault
from tests.simulation.rows import SimulationError
from tests.simulation.simulator import NoDeadLetters, SimClock

from fordstone.edge.engine.assembly import ConnectorOpener, Job
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import FencedError, HubError, HubRefusedError, SourceError
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

KEEP: Final = 2


class MachineClock(SimClock):
    """The clock of one machine: time passes as everywhere, but it may be set by itself."""

    def __init__(self, everywhere: SimClock) -> None:
        self._everywhere = everywhere
        self.set_us = 0

    @property
    def now_us(self) -> int:  # type: ignore[override]  # it is never assigned here
        """The simulated time."""
        return self._everywhere.now_us

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._everywhere.wait(seconds)


Step = Callable[[], bool]


class Host(ABC):
    """A machine: its disk outlives its processes."""

    def __init__(self, name: str, node: str, wire: Wire, clock: SimClock, rng: Random, ledger: Ledger) -> None:
        self.name = name
        self.node = node
        self.wire = wire
        self.clock = MachineClock(clock)
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

    def environment(self, opener: Callable[[Job], ConnectorOpener] | None = None) -> Environment:
        """What an engine here is handed."""
        return Environment(
            clock=self.clock,
            disk=self.disk,
            choose=self.rng.randrange,
            dead_letters=lambda _: NoDeadLetters(),
            opener=opener,
        )

    def crash(self, *, midway: bool = False) -> None:
        """Lose the process, and perhaps the power. `midway`: in the middle of a change of the disk."""
        power = self.rng.random() < 0.5
        self.ledger.faults[Fault.ENDED_MIDWAY if midway else Fault.POWER_CUT if power else Fault.KILLED] += 1
        if power:
            self.disk.crash(self.rng)
        else:
            self.disk.kill()
        self.engine, self.steps = None, []
        if self.state == "running":
            self.state = "off"

    def shut_out(self) -> None:
        """Stop for good: another has the right to commit."""
        self.ledger.faults[Fault.SHUT_OUT] += 1
        self.crash()
        self.state = "dead"

    def stops_with(self, error: Exception) -> bool:
        """Stop with an error of the hub, if that is right here."""
        if isinstance(error, HubRefusedError) and error.code == "held":
            self.shut_out()
            return True
        return False

    @abstractmethod
    def after_step(self) -> None:
        """Judge what a step has changed."""

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


def step(host: Host, work: Step) -> bool:
    """Let a host do one thing. A crash ends its process, a newer generation ends it for good."""
    try:
        did = work()
        host.after_step()
    except PowerCut:
        host.crash(midway=True)
        return True
    except FencedError:
        host.shut_out()
        return True
    except (HubError, SourceError) as error:
        if not host.stops_with(error):
            raise
        return True
    return did
