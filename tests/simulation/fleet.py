"""Run a whole fleet under a seed: nodes, their outboxes, a network that loses things, a hub, readers and a center.

Engines, outboxes, senders, fetchers, the hub's log, its decisions and its retention, the center's source and sink are the
real ones; clock, disks, network and scheduler are the simulation's. While there is chaos everything may crash at any step, the
clock may move on by hours, nodes may be cut off, taken over and go on unaware. Then the network is whole, and all must end:
outboxes empty, every row at the hub and at the center once. Judged are the invariants in docs/architecture.md.
"""

from __future__ import annotations

import sqlite3
from contextlib import nullcontext
from random import Random
from typing import Final

import msgspec
from tests.simulation.fleet_bounds import small_bounds
from tests.simulation.fleet_center import CENTER, Center
from tests.simulation.fleet_copies import HubCopies, MachineCopies
from tests.simulation.fleet_host import MachineClock, step
from tests.simulation.fleet_hub import FleetHub, HubCrashedError
from tests.simulation.fleet_judge import judge_center, judge_tap
from tests.simulation.fleet_ledger import Ledger
from tests.simulation.fleet_machine import Machine, Node
from tests.simulation.fleet_network import Network, Wire
from tests.simulation.fleet_scenario import (
    CUT,
    HOUR_US,
    PIPELINE,
    ROWS_BEGIN_US,
    SINKS,
    FleetScenario,
    build_plan,
    node_name,
    reading,
)
from tests.simulation.fleet_tally import Fault, FleetTally
from tests.simulation.fleet_tap import TAP, Publisher, Tap
from tests.simulation.rows import SimulationError
from tests.simulation.simulator import SimClock

from fordstone.connectors.memory import MemorySink, MemorySource
from fordstone.errors import CheckpointError, FordstoneError, HubAwayError, HubError, NodeStoppedError, StorageError
from fordstone.hub.messages import Commit, ConsumerPosition, Generation, Rejection
from fordstone.hub.store import retention
from fordstone.plan.plan import Plan
from fordstone.planner.split import split
from fordstone.storage.failpoint import HUB_FAILPOINTS
from fordstone.testing.memory_disk import PowerCut

STEPS_MAX: Final = 12_000
STEPS_PER_ROW: Final = 40
CRASH_POINTS: Final = (*HUB_FAILPOINTS, "hub.blob-renamed", "hub.blob-renamed")
"""The only moment at which a crash may take a blob back is drawn more often."""
IDLE_US: Final = (2_000, 20_000, 200_000, 2_000_000)
CALM_IDLE_US: Final = (20_000, 200_000, 30_000_000)


def simulate_fleet(scenario: FleetScenario) -> FleetTally:
    """Run a scenario to its end and judge it; raises `SimulationError` with the seed if an invariant does not hold."""
    fleet = Fleet(scenario)
    try:
        with small_bounds() if scenario.small else nullcontext():
            fleet.run()
    except (SimulationError, FordstoneError, HubCrashedError, sqlite3.Error) as error:
        kind = "" if isinstance(error, SimulationError) else f"{type(error).__name__}: "
        raise SimulationError(f"{scenario.title()}, step {fleet.tally.steps}: {kind}{error}") from error
    except Exception as error:
        error.add_note(scenario.title())
        raise
    finally:
        fleet.hub.close()
    return fleet.tally


class Fleet:
    """One run."""

    def __init__(self, scenario: FleetScenario) -> None:
        self.scenario = scenario
        self.rng = rng = Random(scenario.seed ^ 0xF1EE7)
        self.clock = SimClock()
        self.clock.now_us = ROWS_BEGIN_US
        self.tally = FleetTally(fleets=1)
        self.ledger = Ledger(lags=scenario.pushes or scenario.controls, faults=self.tally.faults)
        self.ledger.counts_rows = scenario.restores > 0
        self.hub_clock = MachineClock(self.clock)
        self.hub_clock.set_us = scenario.hub_skew_us
        self.hub = FleetHub(
            self.hub_clock.wall_us,
            rng,
            self.ledger.faults,
            wal_pages=scenario.wal_pages,
            small_blob_bytes=scenario.small_blob_bytes,
        )
        self.network = Network(self.hub, self.ledger, rng, lost=scenario.lost)
        self.sinks = {name: MemorySink() for name in SINKS}
        halves = split(build_plan(scenario, MemorySource([]), self.sinks))
        assert halves.edge is not None
        assert halves.center is not None
        self.nodes = [self._node(number, halves.edge) for number in range(len(scenario.nodes))]
        self.tap = Tap(Wire(self.network, TAP), self.clock, self.ledger)
        self.publisher = (
            Publisher(Wire(self.network, "publisher"), rng) if scenario.controls and not scenario.center else None
        )
        self.hub.consumer(PIPELINE, TAP, ConsumerPosition(streams={CUT: {}}))
        self.center: Center | None = None
        if scenario.center:
            self.hub.consumer(PIPELINE, CENTER, ConsumerPosition(streams={CUT: {}}))
            wire = Wire(self.network, CENTER)
            self.center = Center(
                CENTER, CENTER, wire, self.clock, rng, self.ledger, plan=halves.center, scenario=scenario
            )
        self.hub_copies = HubCopies(
            self.hub, self.ledger, rng, tap=self.tap, center=self.center, nodes=self.nodes, now_us=self.clock.wall_us
        )
        self.copies = MachineCopies(self.hub, self.ledger, rng, make=self._add_machine)
        self._taken_over: set[str] = set()
        self._idle = 0
        self._crashes = 0
        """How many were planned."""

    def _node(self, number: int, edge: Plan) -> Node:
        rows = self.scenario.nodes[number]
        source = MemorySource([[] for _ in rows])
        node = Node(node_name(number), rows, source, reading(edge, source), [0] * len(rows))
        self._add_machine(node)
        return node

    def _add_machine(self, node: Node, *, take_over: bool = False) -> Machine:
        node.made += 1
        name = f"{node.name}.{node.made - 1}"
        wire = Wire(self.network, name)
        machine = Machine(
            name, node.name, wire, self.clock, self.rng, self.ledger,
            plan=node.plan, scenario=self.scenario, take_over=take_over,
        )  # fmt: skip
        machine.disputed = self.ledger.restores > 0 or any(one.disputed for one in node.machines)
        node.machines.append(machine)
        return machine

    # The run.

    def run(self) -> None:
        """Chaos, then calm, then judgement."""
        calm = False
        steps_max = STEPS_MAX + STEPS_PER_ROW * len(self.scenario.rows())
        for number in range(steps_max):
            self.tally.steps += 1
            if number < self.scenario.chaos_steps:
                self._disturb()
            elif not calm:
                calm = True
                self._calm_down()
            if self.ledger.restores and self.hub.up and self.rng.random() < 0.1:
                self.hub_copies.operate(calm=calm)
                for node in self.nodes if calm else ():
                    self.copies.stop_stuck(node)
            self._start_hosts()
            self._feed(hurry=calm)
            if calm and number % 16 == 0 and self._is_over():
                break
            self._step(calm=calm)
        else:
            raise SimulationError(f"did not end within {steps_max} steps: {self._describe()}")
        self._judge()

    def _hosts(self) -> list[Machine | Center]:
        hosts: list[Machine | Center] = [machine for node in self.nodes for machine in node.machines]
        return hosts if self.center is None else [*hosts, self.center]

    def _step(self, *, calm: bool) -> None:
        """Let one host, or the plain reader, run for a while, short or long; where nobody has anything to do, time goes on."""
        hosts = [host for host in self._hosts() if host.steps]
        place = self.rng.randrange(len(hosts) + 1)
        did = False
        for _ in range(self.rng.choice((1, 2, 4, 16))):
            self.clock.now_us += self.rng.randrange(200)
            if place == len(hosts):
                did |= self.tap.step()
            elif hosts[place].steps:
                did |= step(hosts[place], self.rng.choice(hosts[place].steps))
        self._idle = 0 if did else self._idle + 1
        if self._idle > 2 * len(hosts):
            self._idle = 0
            self.clock.now_us += self.rng.choice(CALM_IDLE_US if calm else IDLE_US)

    def _start_hosts(self) -> None:
        for node in self.nodes:
            disputed = any(machine.disputed for machine in node.machines)
            if not disputed and node.machines[0].state == "dead" and node.name not in self._taken_over:
                raise SimulationError(f"{node.machines[0].name} was shut out, and nobody had taken over")
            if disputed and all(machine.state == "dead" for machine in node.machines):
                if self.hub.up:
                    self.copies.go_on(node)
            elif all(machine.state == "dead" for machine in node.machines):
                # Nobody has the right to commit any more: a person starts the last one again, with --take-over.
                last = node.machines[-1]
                last.state, last.take_over = "off", True
            for machine in [one for one in node.machines if one.state == "off"]:
                if self.rng.random() < 0.1:
                    self._start(node, machine)
        center = self.center
        if (
            center is not None
            and center.state == "off"
            and not center.stopped
            and self.rng.random() < 0.1
            and self._may_begin()
        ):
            try:
                center.start()
            except PowerCut:
                center.crash(midway=True)
            except StorageError:
                # What its last epoch published is published again first: without the hub it cannot begin.
                center.crash()
            except NodeStoppedError as error:
                if not center.stops_with(error):
                    raise

    def _may_begin(self) -> bool:
        """Where late rows of partial aggregates could not be distinguished, the center begins when all nodes are known."""
        return not self.scenario.pushes or all(self.ledger.accepted.get(node.name) for node in self.nodes)

    def _start(self, node: Node, machine: Machine) -> None:
        try:
            machine.start(bounded=node.all_fed)
        except PowerCut:
            machine.crash(midway=True)
        except (StorageError, HubAwayError):
            # A machine without anything needs the hub, which is away, or goes away in the middle.
            machine.crash()
        except HubError as error:
            if not machine.stops_with(error):
                raise
        except CheckpointError:
            if len(node.machines) == 1 or not machine.take_over:
                raise
            # The hub has no checkpoint of the last epoch there: only the old machine can go on.
            machine.crash()
            node.machines.remove(machine)

    def _feed(self, *, hurry: bool) -> None:
        for node in self.nodes:
            if not node.all_fed and (hurry or self.rng.random() < 0.06):
                node.feed(self.rng, self.scenario.feed_max)
            for machine in node.machines:
                engine = machine.engine
                if node.all_fed and engine is not None and not engine.config.bounded and self.rng.random() < 0.05:
                    machine.stop()

    # Chaos.

    def _disturb(self) -> None:
        rng, scenario = self.rng, self.scenario
        if rng.random() < scenario.crash_rate and self._crashes < scenario.crashes_max:
            self._crash_something()
        if not self.hub.up and rng.random() < 0.08:
            self._restart_hub()
        if rng.random() < scenario.jump_rate:
            hours = rng.choice((1, 2, 12))
            self.tally.faults[Fault.HOURS_JUMPED] += hours
            self.clock.now_us += hours * HOUR_US
        if rng.random() < scenario.set_rate:
            self._set_a_clock()
        if scenario.fills and rng.random() < 0.02:
            rng.choice(self._hosts()).disk.fail_next(rng.choice(("create", "append")), "full")
        for host in self._hosts():
            if host.wire.cut_off:
                host.wire.cut_off = rng.random() > 0.03
            elif rng.random() < scenario.cut_rate:
                host.wire.cut_off = True
        if self.network.late and rng.random() < 0.15:
            self.network.deliver()
        if self.hub.up and rng.random() < 0.03:
            self._collect()
        if self.hub.up and rng.random() < 0.03:
            self._stray(rng.choice(self.nodes))
        if self.publisher is not None and rng.random() < 0.06:
            self.publisher.publish()
        if scenario.takes_over and self.hub.up and rng.random() < 0.015:
            self._take_over(rng.choice(self.nodes))
        if self.hub.up and rng.random() < scenario.restores:
            before = self.ledger.restores
            self.hub_copies.disturb()
            if self.ledger.restores > before:
                # Connections ended when the hub was stopped.
                self.network.late.clear()
        if rng.random() < scenario.copies:
            self.copies.disturb(rng.choice(self.nodes))

    def _set_a_clock(self) -> None:
        """Somebody sets a clock, or it jumps: to any time between the first rows and a day from now."""
        clock = self.rng.choice([self.hub_clock, *(host.clock for host in self._hosts())])
        passed_us = self.clock.now_us - ROWS_BEGIN_US
        before_us = clock.set_us
        clock.set_us = self.rng.choice((0, -passed_us, -self.rng.randint(0, passed_us), HOUR_US, 24 * HOUR_US))
        if clock.set_us != before_us:
            self.tally.faults[Fault.CLOCK_FORWARD if clock.set_us > before_us else Fault.CLOCK_BACK] += 1

    def _crash_something(self) -> None:
        self._crashes += 1
        running = [host for host in self._hosts() if host.state == "running"]
        place = self.rng.randrange(len(running) + 2)
        if place < len(running):
            if self.rng.random() < 0.5:
                running[place].crash()
            else:
                running[place].disk.cut_after = running[place].disk.changes + self.rng.randrange(12)
        elif place == len(running):
            self.tap.crash()
        elif self.hub.up:
            match self.rng.randrange(3):
                case 0:
                    self.tally.faults[Fault.HUB_KILLED] += 1
                    self.hub.crash()
                case 1:
                    self.hub.crash_at = self.rng.choice(CRASH_POINTS)
                case _:
                    # Also far enough to meet the copy of the write-ahead log into the file.
                    self.hub.files.cut_after = self.rng.randrange(self.rng.choice((12, 150)))

    def _restart_hub(self) -> None:
        self.hub.restart()
        for node in self.nodes:
            self.ledger.look_at(self.hub, node.name)
        self.ledger.note_versions(self.hub)
        self.hub.check_blobs()

    def _collect(self) -> None:
        try:
            self.tally.segments_collected += self.hub.retention.round().segments
            for _ in range(self.rng.choice((0, 0, 256))):
                self.hub.retention.sweep()
        except HubCrashedError:
            self.hub.crash()
            return
        self.hub.check_blobs()
        center = self.center.needed() if self.center is not None else None
        for node in self.nodes:
            kept, epochs = self.hub.kept(node.name), self.ledger.accepted.get(node.name, {})
            for who, position in ((TAP, self.tap.position(node.name)), (CENTER, (center or {}).get(node.name, 0))):
                gone = [epoch for epoch in epochs if epoch > position and epoch not in kept]
                if gone and (who == TAP or center is not None):
                    raise SimulationError(
                        f"epochs {gone} of {node.name} are gone, and {who} may read from {position} on"
                    )

    def _stray(self, node: Node) -> None:
        """Something that must not be taken: from a copy of a machine's disk, an earlier generation, or a bug far away."""
        entries = self.hub.entries(node.name)
        head = self.hub.head(PIPELINE, node.name)
        if not entries or head.generation is None:
            return
        epoch, digest, _ = self.rng.choice(entries)
        known = self.ledger.sent[node.name, epoch, digest][1]
        generation = head.generation
        fault = self.rng.choice((Fault.STRAY_CHANGED, Fault.STRAY_GAP, Fault.STRAY_OLD))
        match fault:
            case Fault.STRAY_CHANGED:
                # Without `sealed_as`, which stands for the digest of an entry that was sealed by an earlier version.
                strange = msgspec.structs.replace(known, created_us=known.created_us + 1, sealed_as=None)
            case Fault.STRAY_GAP:
                strange = msgspec.structs.replace(known, epoch=head.epoch + 2, streams={})
            case _:
                strange = msgspec.structs.replace(known, epoch=head.epoch + 1, streams={})
                generation = Generation(hub=generation.hub, local=generation.local - 1)
        try:
            # Not through the network: what comes late may have become right.
            self.hub.commit(PIPELINE, node.name, Commit(generation=generation, epochs=(strange,)))
        except Rejection:
            self.tally.faults[fault] += 1
            return
        except HubCrashedError:
            self.hub.crash()
            return
        raise SimulationError(f"the hub took a stray epoch {strange.epoch} of {node.name} with {generation}")

    def _take_over(self, node: Node) -> None:
        if node.name in self._taken_over:
            return
        found = self.hub.checkpoint(PIPELINE, node.name)
        if (found.epoch if found is not None else 0) != self.hub.head(PIPELINE, node.name).epoch:
            return
        self._taken_over.add(node.name)
        self.tally.faults[Fault.TAKE_OVER] += 1
        self._add_machine(node, take_over=True)

    # Calm.

    def _calm_down(self) -> None:
        self.network.lost = 0.0
        self.hub_clock.set_us = 0
        self.hub.crash_at = self.hub.files.cut_after = None
        if not self.hub.up:
            self._restart_hub()
        while self.network.late:
            self.network.deliver()
        for host in self._hosts():
            host.wire.cut_off = False
            host.disk.cut_after = None

    def _is_over(self) -> bool:
        for node in self.nodes:
            live = [machine for machine in node.machines if machine.state != "dead"]
            if not live or any(machine.state != "ended" for machine in live):
                return False
        heads = {node.name: self.ledger.head(node.name) for node in self.nodes}
        if any(self.tap.position(name) < head for name, head in heads.items()):
            return False
        center = self.center
        if self.tap.stopped or (center is not None and center.stopped is not None):
            return False
        if center is None:
            return True
        if center.engine is not None and not center.bounded and center.has_read(heads):
            # Nodes may join it as long as it runs, so time does not end by itself: it is started once more, to come to the end.
            center.bounded = True
            center.engine.stop()
        return center.state == "ended"

    def _judge(self) -> None:
        for node in self.nodes:
            self.ledger.look_at(self.hub, node.name)
            self.tally.epochs += len(self.ledger.accepted.get(node.name, ()))
        self._collect_all()
        judge_tap(self.scenario, self.tap, self.ledger)
        if self.center is not None:
            judge_center(self.scenario, self.sinks, self.ledger)
        self.tally.requests = self.network.asked
        self.tally.control_versions = len(self.ledger.versions)
        self.tally.faults[Fault.DISK_FULL] += sum(host.disk.failures for host in self._hosts())

    def _collect_all(self) -> None:
        """In the end, all that nobody needs goes, and nothing else. What came while the hub's clock was ahead may stay a day longer."""
        self.clock.now_us += 25 * HOUR_US
        for _ in range(2):
            self.clock.now_us += 2 * HOUR_US
            while self.hub.retention.round().more:
                pass
            for _ in range(retention.PREFIXES):
                self.hub.retention.sweep()
        self.hub.check_blobs()
        strays = self.hub.unnamed()
        if strays:
            raise SimulationError(f"blobs that nothing names are kept: {sorted(strays)}")

    def _describe(self) -> str:
        machines = {machine.name: machine.state for node in self.nodes for machine in node.machines}
        heads = {node: self.ledger.head(node) for node in self.ledger.accepted}
        read = {node.name: self.tap.position(node.name) for node in self.nodes}
        center = "none" if self.center is None else self.center.state
        return f"machines {machines}, hub {heads}, read {read}, center {center}"
