"""What simulated fleets have tried: part of the result. Faults are counted where they happen, not where they are planned."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """A kind of fault that has happened. A block of fleets in which one of them never happens does not try it."""

    KILLED = "processes killed"
    POWER_CUT = "power cuts between steps"
    ENDED_MIDWAY = "crashes in a change of a disk"
    DISK_FULL = "full disks"
    DAMAGED = "checkpoints damaged"
    HUB_KILLED = "hub crashes between calls"
    HUB_FAILPOINT = "hub crashes at failpoints"
    HUB_POWER_CUT = "hub power cuts in a write"
    HUB_WAL_UNSYNCED = "hub crashes with an unsynced write-ahead log"
    HUB_FILE_UNSYNCED = "hub crashes with an unsynced file of the log"
    BLOB_TAKEN_BACK = "blobs lost with a crash"
    REQUEST_LOST = "requests lost"
    REQUEST_LATE = "requests late"
    REQUEST_TWICE = "requests twice"
    ANSWER_LOST = "answers lost"
    CUT_OFF = "requests cut off"
    HOURS_JUMPED = "hours jumped"
    CLOCK_FORWARD = "clocks set forward"
    CLOCK_BACK = "clocks set back"
    STRAY_CHANGED = "changed epochs refused"
    STRAY_GAP = "gaps refused"
    STRAY_OLD = "old generations refused"
    TAKE_OVER = "take-overs"
    SHUT_OUT = "machines shut out"
    HUB_RESTORED = "hubs restored"
    HUB_RESTORED_AGAIN = "hubs restored twice from one backup"
    EPOCH_LOST = "epochs lost with a hub"
    EPOCH_SENT_AGAIN = "epochs sent again to a restored hub"
    READER_STOPPED = "readers stopped"
    SKIPPED = "skips by an operator"
    CLONED = "machines cloned"
    SET_BACK = "machines set back"


@dataclass(slots=True)
class FleetTally:
    """What was tried: part of the result."""

    fleets: int = 0
    steps: int = 0
    epochs: int = 0
    requests: int = 0
    control_versions: int = 0
    segments_collected: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """By `Fault`."""

    def add(self, other: FleetTally) -> None:
        """Sum up."""
        for name in FleetTally.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def counts(self) -> dict[str, int]:
        """Everything by name, for a summary."""
        numbers = {name: getattr(self, name) for name in FleetTally.__slots__ if name != "faults"}
        return numbers | {str(fault): self.faults[fault] for fault in Fault}

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in self.counts().items())
