"""Copies of data directories in a simulated fleet: a hub that is restored from a backup, machines that are cloned or set back.

What operators do then is done here, as docs/how-to/restore-a-hub.md and the errors of nodes and readers say. The ledger holds
what is allowed to be lost or doubled by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from tests.simulation.fleet_center import Center
from tests.simulation.fleet_hub import Backup, FleetHub, HubCrashedError
from tests.simulation.fleet_ledger import Ledger
from tests.simulation.fleet_machine import Machine, Node
from tests.simulation.fleet_scenario import PIPELINE
from tests.simulation.fleet_tally import Fault
from tests.simulation.fleet_tap import Tap
from tests.simulation.rows import SimulationError
from tests.simulation.simulator import copied

from fordstone.hub.messages import Rejection
from fordstone.testing.memory_disk import MemoryDisk

NO_GAP: Final = "Send the epochs between first."
RESTORES_MAX: Final = 3
COPIES_MAX: Final = 4
GO_ON_AFTER: Final = re.compile(r"`fordstone hub quarantine \S+ --epoch (\d+)`")
"""In the error of a reader that has read other content than the hub has now."""
BEYOND: Final = re.compile(r"but epoch (\d+) was read from it")
"""In the error of one that has read more."""


class HubCopies:
    """Backups of the hub, and the operator who deals with what comes of restoring one."""

    def __init__(
        self,
        hub: FleetHub,
        ledger: Ledger,
        rng: Random,
        *,
        tap: Tap,
        center: Center | None,
        nodes: Sequence[Node],
        now_us: Callable[[], int],
    ) -> None:
        self._now_us = now_us
        self._hub, self._ledger, self._rng = hub, ledger, rng
        self._tap, self._center, self._nodes = tap, center, nodes
        self._backup: Backup | None = None
        self._restored = False
        """The backup was put in the place of the data before."""

    def disturb(self) -> None:
        """Make a backup, or restore the last one."""
        if self._backup is None or self._rng.random() < 0.3:
            self._backup, self._restored = self._hub.backup(), False
        elif self._ledger.restores < RESTORES_MAX:
            self._restore(self._backup)

    def _restore(self, backup: Backup) -> None:
        self._ledger.faults[Fault.HUB_RESTORED] += 1
        self._ledger.faults[Fault.HUB_RESTORED_AGAIN] += self._restored
        self._restored = True
        # What stopped a reader of the former log says nothing of this one.
        self._tap.stopped.clear()
        if self._center is not None:
            self._center.stopped = None
        self._hub.restore(backup, now_us=self._now_us())
        self._ledger.note_restored(self._hub, [node.name for node in self._nodes])
        for node in self._nodes:
            for machine in node.machines:
                # Another machine may go on from what the backup has: one that took over, or takes over from now on.
                machine.disputed |= len(node.machines) > 1
                if machine.state == "dead" and self._rng.random() < 0.3:
                    # Somebody takes the wrong machine for the one that is to go on.
                    machine.state, machine.take_over = "off", True
                if machine.state == "ended":
                    # It is in contact with the hub only if somebody starts it.
                    machine.state = "off"

    def operate(self, *, calm: bool) -> None:
        """Let readers that have stopped go on, and start nodes again that were not in contact since the hub was restored."""
        for node in self._nodes:
            head = self._hub.head(PIPELINE, node.name)
            if head.resync or (not head.epoch and self._ledger.ever.get(node.name)):
                for machine in node.machines:
                    if machine.state == "ended" and self._rng.random() < 0.1:
                        machine.state = "off"
        for name, stop in sorted(self._tap.stopped.items()):
            seen = stop.seen if stop.code == "differs" or calm else 0
            self._note_stop(name, self._tap.position(name) + 1, seen)
            if name not in self._tap.stopped:
                return
        center = self._center
        if center is not None and center.stopped is not None:
            error = center.stopped
            differs, beyond = GO_ON_AFTER.search(str(error)), BEYOND.search(str(error))
            until = int(differs[1]) - 1 if differs else int(beyond[1]) if beyond and calm else 0
            self._note_stop(error.node, error.epoch, until)

    def _note_stop(self, node: str, epoch: int, seen: int) -> None:
        """Do what the error of a reader says that cannot read an epoch of a node. `seen`: up to where it has read other content.

        If another machine went on from the backup and has not come as far as the reader, that is awaited while there is chaos.
        """
        gap = next((gap for gap in self._hub.lost(node) if gap[0] <= epoch <= gap[1]), None)
        try:
            if gap is not None:
                self._hub.skip(node, gap[1])
            elif seen:
                self._ledger.forced[node] = max(seen, self._ledger.forced.get(node, 0))
                self._hub.quarantine(node, seen + 1)
                self._hub.skip(node, seen)
            else:
                return
        except Rejection as refused:
            if "nothing to skip" not in str(refused):
                raise SimulationError(f"an operator could not skip epochs of {node}: {refused}") from refused
            # For another reader it was done before.
        except HubCrashedError:
            self._hub.crash()
            return
        self._ledger.faults[Fault.SKIPPED] += 1
        self._tap.stopped.pop(node, None)
        if self._center is not None and self._center.stopped is not None and self._center.stopped.node == node:
            self._center.stopped = None


class MachineCopies:
    """Machines that are started from copies of a disk, and the operator who lets one of them go on where all must stop."""

    def __init__(self, hub: FleetHub, ledger: Ledger, rng: Random, *, make: Callable[[Node], Machine]) -> None:
        self._hub, self._ledger, self._rng, self._make = hub, ledger, rng, make
        self._saved: dict[str, tuple[Machine, MemoryDisk]] = {}
        """By node: a copy of a machine's disk, and which machine that was."""
        self._copies = 0

    def disturb(self, node: Node) -> None:
        """Copy the disk of a machine, or start a machine from a copy: beside the one that it was made of, or in its place."""
        living = [machine for machine in node.machines if machine.state in {"running", "off"}]
        if not living:
            return
        machine = self._rng.choice(living)
        saved = self._saved.get(node.name)
        if saved is None or self._rng.random() < 0.3:
            self._saved[node.name] = machine, copied(machine.disk)
        elif self._copies < COPIES_MAX:
            self._copies += 1
            if self._rng.random() < 0.5:
                self._ledger.faults[Fault.CLONED] += 1
                self._start(node, machine, machine.disk)
            else:
                self._ledger.faults[Fault.SET_BACK] += 1
                original, disk = saved
                # Its disk stays as it is: it is what is left if the copy is too old to go on.
                original.crash()
                original.state = "dead"
                self._start(node, original, disk)

    def _start(self, node: Node, original: Machine, disk: MemoryDisk) -> None:
        copy = self._make(node)
        copy.begin_with(copied(disk), original)
        for machine in node.machines:
            machine.disputed = True

    def stop_stuck(self, node: Node) -> None:
        """Stop a machine that can send nothing: the log accepts no gap after a machine that had its head, be it an older copy."""
        for machine in node.machines:
            problem = machine.link.sender.problem if machine.link is not None else None
            if machine.state == "running" and machine.disputed and problem is not None and NO_GAP in problem:
                machine.shut_out()

    def go_on(self, node: Node) -> None:
        """Every machine of a node had to stop: start an empty one from the hub's checkpoint, as the errors say, or one that may have the head."""
        found = self._hub.checkpoint(PIPELINE, node.name)
        head = self._hub.head(PIPELINE, node.name).epoch
        if (found is not None and found.epoch == head) and self._rng.random() < 0.5:
            machine = self._make(node)
            machine.disputed = True
        else:
            machine = self._rng.choice(node.machines)
            machine.state = "off"
        machine.take_over = True
