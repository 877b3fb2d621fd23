"""Memory and open files of the fleet's processes over time, and whether they stay flat."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from demo_fleet import Command

KIB = 1024
_PARENT = 1
"""The place of the parent's id in what follows the name in /proc/PID/stat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a process and its children."""

    pid: int
    memory_bytes: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The first and the last part of the life of one process, each as a median."""

    name: str
    memory_before: int
    memory_after: int
    memory_peak: int
    files_before: int
    files_after: int
    samples: int

    def flat(self, *, share: float, spare_bytes: int, spare_files: int) -> bool:
        return (
            self.memory_after <= self.memory_before * share + spare_bytes
            and self.files_after <= self.files_before + spare_files
        )


@dataclass(slots=True)
class Usage:
    """Samples of all commands. Linux only."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def look(self, commands: list[Command]) -> None:
        children = _children()
        for command in commands:
            if command.pid is None:
                continue
            found = [usage for pid in _tree(command.pid, children) if (usage := _usage(pid)) is not None]
            if found:
                sample = Sample(
                    pid=command.pid, memory_bytes=sum(one[0] for one in found), files=sum(one[1] for one in found)
                )
                self.samples.setdefault(command.name, []).append(sample)

    def growth(self, part: float = 0.25) -> list[Growth]:
        """Compare the first with the last part of what each process has lived, the newest process of each command."""
        found = []
        for name, samples in self.samples.items():
            mine = [sample for sample in samples if sample.pid == samples[-1].pid]
            size = max(1, int(len(mine) * part))
            first, last = mine[:size], mine[-size:]
            found.append(
                Growth(
                    name=name,
                    memory_before=int(statistics.median(one.memory_bytes for one in first)),
                    memory_after=int(statistics.median(one.memory_bytes for one in last)),
                    memory_peak=max(one.memory_bytes for one in samples),
                    files_before=int(statistics.median(one.files for one in first)),
                    files_after=int(statistics.median(one.files for one in last)),
                    samples=len(mine),
                )
            )
        return found


def family(pid: int) -> list[int]:
    """A process and all that it has started: a node's supervisor starts the engine in a session of its own."""
    return _tree(pid, _children())


def _children() -> dict[int, list[int]]:
    """All processes by the id of their parent."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                found.setdefault(int(words[_PARENT]), []).append(int(entry.name))
    return found


def _tree(pid: int, children: dict[int, list[int]]) -> list[int]:
    found = [pid]
    for one in found:
        found += children.get(one, ())
    return found


def _usage(pid: int) -> tuple[int, int] | None:
    """Resident memory in bytes and the number of open files; None if it has just ended."""
    place = Path("/proc") / str(pid)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (place / "status").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
        return kib * KIB, sum(1 for _ in (place / "fd").iterdir())
    return None
