"""What a simulated fleet has done so far, written down beside it, and what must hold at every moment.

Judged here: sealed content never changes; the hub has what some machine had sealed, under the number it was sealed with,
without gaps; after a generation nothing below it commits; an answer that says yes is true; rows meet a control table as it
was at the barrier before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import polars as pl
from tests.simulation.fleet_hub import FleetHub
from tests.simulation.fleet_scenario import CONTROL, CUT, PIPELINE, SOURCE
from tests.simulation.fleet_tally import Fault
from tests.simulation.rows import LATENESS_S, SimulationError

from fordstone.epochs.manifest import Cut
from fordstone.epochs.run_file import decode_run
from fordstone.hub.client.publisher import apply_changes
from fordstone.hub.messages import Commit, Committed, ControlVersion, EpochEntry, LeaseRequest
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.state.base import RunRef

TABLE = pl.Schema({"k": pl.Int64(), "bound": pl.Int64(), "__op": pl.String()})


class SealedEpoch(msgspec.Struct, frozen=True):
    """What of an epoch must never change."""

    runs: tuple[RunRef, ...]
    control: int
    """The version of the control table that was taken when it ended."""
    ended: bool
    watermark_us: int
    """How far time had come in the partition that is furthest too_low."""
    now_us: int = 0
    """The time for operators when it ended."""
    midway: tuple[int, ...] = ()
    """The versions that were taken at barriers within it: those of attempts that were given up."""


@dataclass(slots=True)
class Ledger:
    """Kept by the simulation; nothing in the fleet reads it."""

    lags: bool = False
    """The stream that crosses comes from a step whose time may lag that of the source."""
    sealed: dict[str, dict[int, SealedEpoch]] = field(default_factory=dict)
    """By machine and epoch."""
    again: dict[str, list[SealedEpoch]] = field(default_factory=dict)
    """By machine whose disk was damaged: epochs that were computed again, in other runs."""
    sent: dict[tuple[str, int, str], tuple[str, EpochEntry]] = field(default_factory=dict)
    """By node, epoch and digest: which machine sent it, and what."""
    accepted: dict[str, dict[int, str]] = field(default_factory=dict)
    """By node and epoch: the digest that the hub was first seen with since it was restored last."""
    leases: dict[str, str] = field(default_factory=dict)
    """By node: the start that got the lease last."""
    restores: int = 0
    """How often the hub was restored from a backup."""
    withdrawn: dict[str, dict[int, set[str]]] = field(default_factory=dict)
    """By node and epoch: the digests of epochs that a restored hub no longer had."""
    lost: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By node: the ranges of epochs that the hub reports as lost."""
    forced: dict[str, int] = field(default_factory=dict)
    """By node: up to which epoch an operator let readers pass over other content than they had read."""
    ever: dict[str, set[int]] = field(default_factory=dict)
    """By node: the epochs that were ever withdrawn."""
    heads: dict[str, int] = field(default_factory=dict)
    """By node: the least epoch that a restored hub ended with."""
    counts_rows: bool = False
    """The stream that crosses has rows, and the hub may be restored, so that it matters which epoch has which."""
    rows: dict[tuple[str, int, str], frozenset[int]] = field(default_factory=dict)
    """By node, epoch and digest: the ids of rows that crossed."""
    versions: dict[int, ControlVersion] = field(default_factory=dict)
    tables: dict[int, dict[int, int]] = field(default_factory=lambda: {0: {}})
    """By version: what the control table says."""
    faults: Counter[str] = field(default_factory=Counter)
    """By `Fault`: what has happened."""

    # Machines.

    def note_sealed(self, machine: str, cut: Cut) -> None:
        """An epoch is sealed on a machine, or was found there again."""
        runs = next((segment.runs for segment in cut.segments if segment.sink == CUT), ())
        control = cut.sources.get(CONTROL)
        version = max((part.position for part in control.partitions.values()), default=0) if control else 0
        stages = control.stages if control else ()
        midway = tuple(part.position for stage in stages for part in stage.values())
        new = SealedEpoch(runs, version, cut.ended, _watermark_us(cut), cut.now_us, midway)
        epochs = self.sealed.setdefault(machine, {})
        known = epochs.setdefault(cut.epoch, new)
        before = epochs.get(cut.epoch - 1)
        if before is not None and new.now_us < before.now_us:
            raise SimulationError(
                f"{machine}: the operators' clock went back in epoch {cut.epoch}, from {before.now_us} to {new.now_us}"
            )
        if known != new and machine in self.again:
            self.again[machine].append(new)
        elif known != new:
            raise SimulationError(f"{machine}: epoch {cut.epoch} was sealed as {known}, and now it is {new}")

    # The hub.

    def note_sent(self, node: str, machine: str, commit: Commit) -> None:
        """A commit is on its way."""
        for entry in commit.epochs:
            self.sent.setdefault((node, entry.epoch, entry.digest()), (machine, entry))

    def look_at(self, hub: FleetHub, node: str) -> None:
        """Compare what the hub has of a node with all that is known."""
        known = self.accepted.setdefault(node, {})
        newest: tuple[int, int] = (0, 0)
        entries = hub.entries(node)
        self._note_lost(hub, node)
        after_gap = {first: last + 1 for first, last in self.lost[node]}
        # Of epochs long ago nothing is kept; those that are must follow each other, but for gaps that are reported.
        head = self.head(node)
        due = entries[0][0] if entries else 1
        if due > after_gap.get(head + 1, head + 1):
            raise SimulationError(f"the hub has epoch {due} of {node} after {head}")
        for epoch, digest, generation in entries:
            due = after_gap.get(due, due)
            if epoch != due:
                raise SimulationError(f"the hub has epoch {epoch} of {node} where {due} is due")
            due += 1
            if generation < newest:
                raise SimulationError(
                    f"{node}: generation {generation} committed epoch {epoch} after {newest} had committed"
                )
            newest = generation
            if known.setdefault(epoch, digest) != digest:
                raise SimulationError(f"the hub's epoch {epoch} of {node} has changed")
            if (node, epoch, digest) not in self.sent:
                raise SimulationError(f"the hub has an epoch {epoch} of {node} that nobody sent")
            machine, entry = self.sent[node, epoch, digest]
            self._check_content(node, machine, entry)
            self._note_rows(hub, node, entry)
            if digest in self.withdrawn.get(node, {}).get(epoch, ()):
                self.withdrawn[node][epoch].discard(digest)
                self.faults[Fault.EPOCH_SENT_AGAIN] += 1

    def head(self, node: str) -> int:
        """The newest epoch that the hub has of a node."""
        return max(self.accepted.get(node, ()), default=0)

    def note_restored(self, hub: FleetHub, nodes: Iterable[str]) -> None:
        """The hub was restored: what it no longer has is withdrawn."""
        self.restores += 1
        for node in nodes:
            head = hub.head(PIPELINE, node).epoch
            known = self.accepted.setdefault(node, {})
            self.heads[node] = min(head, self.heads.get(node, head))
            for epoch in [epoch for epoch in known if epoch > head]:
                self.withdrawn.setdefault(node, {}).setdefault(epoch, set()).add(known.pop(epoch))
            self.ever.setdefault(node, set()).update(self.withdrawn.get(node, ()))
            self.lost[node] = hub.lost(node)

    def may_pass(self, node: str, first: int, last: int) -> bool:
        """Whether readers may pass over these epochs: all of them are reported as lost, or an operator said so."""
        forced = self.forced.get(node, 0)
        return all(epoch <= forced or self.is_lost(node, epoch) for epoch in range(first, last + 1))

    def is_lost(self, node: str, epoch: int) -> bool:
        """Whether an epoch is reported as lost."""
        return any(first <= epoch <= last for first, last in self.lost.get(node, ()))

    def exempt(self) -> tuple[frozenset[int], frozenset[int]]:
        """Rows that a restored hub may have lost, and rows that an operator let be lost or doubled: of epochs in which it was said so."""
        lost, forced = set[int](), set[int]()
        for (node, epoch, digest), rows in self.rows.items():
            machine, _ = self.sent[node, epoch, digest]
            withdrawn = digest in self.withdrawn.get(node, {}).get(epoch, ())
            # A machine that has no whole copy either reports that with its next epoch. It may have ended.
            unreported = withdrawn and machine in self.again and epoch > self.head(node)
            if unreported or self.is_lost(node, epoch):
                lost |= rows
            until = self.forced.get(node, 0)
            if (
                until
                and epoch > self.heads.get(node, 0)
                and (epoch <= until or self.accepted[node].get(epoch) != digest)
            ):
                forced |= rows
        return frozenset(lost), frozenset(forced)

    def versions_of(self, node: str, epoch: int) -> list[tuple[str, EpochEntry]]:
        """By which machine an epoch was sent that the hub has, or had before it was restored, and what it was."""
        return [sent for (name, number, digest), sent in self.sent.items()
                if (name, number) == (node, epoch) and (name, number, digest) in self.rows]  # fmt: skip

    def _note_lost(self, hub: FleetHub, node: str) -> None:
        known = self.lost.setdefault(node, [])
        for first, last in hub.lost(node):
            if (first, last) in known:
                continue
            for epoch in range(first, last + 1):
                if epoch not in self.ever.get(node, ()):
                    raise SimulationError(f"the hub reports epoch {epoch} of {node} as lost, which it never had")
            known.append((first, last))
            self.faults[Fault.EPOCH_LOST] += last + 1 - first

    def _note_rows(self, hub: FleetHub, node: str, entry: EpochEntry) -> None:
        place = (node, entry.epoch, entry.digest())
        if place not in self.rows:
            runs = entry.streams[CUT].runs if CUT in entry.streams and self.counts_rows else ()
            frames = [decode_run(hub.get_blob(run.digest), run) for run in runs]
            self.rows[place] = frozenset(row for frame in frames for row in frame.get_column("id"))

    def check_lease(self, node: str, request: LeaseRequest, *, resync: bool) -> None:
        """The right to commit was given: to who has the newest epoch, or takes over on purpose, or had it already.

        A state with later epochs than the hub's gets it if the hub takes those epochs (`resync`).
        """
        head = self.head(node)
        if request.start != self.leases.get(node) and not request.take_over and request.head < head:
            raise SimulationError(
                f"the lease of {node} went to a state that has epoch {request.head}, and the head is {head}"
            )
        if request.start != self.leases.get(node) and request.head > head and not resync:
            raise SimulationError(
                f"the lease of {node} went to a state that goes on after epoch {request.head}, and the hub after {head}"
            )
        self.leases[node] = request.start

    def check_answer(self, node: str, commit: Commit, answer: Committed) -> None:
        """The hub said yes: then it has all of this."""
        known = self.accepted.get(node, {})
        for entry in commit.epochs:
            if known.get(entry.epoch) != entry.digest():
                raise SimulationError(
                    f"the hub said that it has epoch {entry.epoch} of {node}, and has another or none"
                )
        if answer.head < commit.epochs[-1].epoch:
            raise SimulationError(
                f"the hub took epoch {commit.epochs[-1].epoch} of {node} and says that {answer.head} is its newest"
            )

    def _check_content(self, node: str, machine: str, entry: EpochEntry) -> None:
        sealed = self.sealed.get(machine, {}).get(entry.epoch)
        if sealed is None:
            raise SimulationError(f"the hub has epoch {entry.epoch} of {node}, which {machine} never sealed")
        runs = entry.streams[CUT].runs if CUT in entry.streams else ()
        if not any(runs == one.runs and entry.ended == one.ended for one in (sealed, *self.again.get(machine, ()))):
            raise SimulationError(f"the hub has epoch {entry.epoch} of {node} with other rows than {machine} sealed")
        declared_us = entry.streams[CUT].watermark_us
        too_low = declared_us < sealed.watermark_us and not self.lags
        if not entry.ended and (too_low or declared_us > sealed.watermark_us) and machine not in self.again:
            raise SimulationError(
                f"epoch {entry.epoch} of {node} declares {declared_us}, and its time is {sealed.watermark_us}"
            )

    # Control tables.

    def note_versions(self, hub: FleetHub) -> None:
        """Something was published, or the hub may have crashed after that and before its answer."""
        for version in hub.versions():
            if self.versions.get(version.version) != version:
                self._note_version(version, hub.get_blob(version.blob.digest))

    def _note_version(self, version: ControlVersion, data: bytes) -> None:
        known = self.versions.setdefault(version.version, version)
        if known != version:
            raise SimulationError(f"control version {version.version} has changed at the hub")
        if version.version in self.tables:
            return
        if version.version - 1 not in self.tables:
            raise SimulationError(f"control version {version.version} came after {max(self.tables)}")
        before = {} if version.snapshot else self.tables[version.version - 1]
        rows = [(k, bound, "upsert") for k, bound in before.items()]
        table = apply_changes(pl.DataFrame(rows, schema=TABLE, orient="row"), [decode_run(data, version.blob)], ["k"])
        self.tables[version.version] = dict(table.select("k", "bound").iter_rows())

    def bounds_in(self, machine: str, epoch: int, k: int) -> set[int | None]:
        """What a row of an epoch may have met: the table at the barrier before it, or at that of an attempt given up since."""
        before = self.sealed[machine].get(epoch - 1)
        versions = (before.control if before is not None else 0, *self.sealed[machine][epoch].midway)
        return {self.tables[version].get(k) for version in versions}


def _watermark_us(cut: Cut) -> int:
    source = cut.sources.get(SOURCE)
    if source is None:
        return TIME_MIN_US
    lateness_us = LATENESS_S * 1_000_000
    parts = [part for part in source.partitions.values() if not part.done]
    times = [max(max(part.max_time_us, TIME_MIN_US + lateness_us) - lateness_us, part.floor_us) for part in parts]
    return min(times, default=TIME_MAX_US if source.partitions else TIME_MIN_US)
