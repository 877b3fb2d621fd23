"""Memory and open files of the fleet's processes over time, and whether they stay flat."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from demo_fleet import Command

KIB = 1024
MIB = 1 << 20
WARM_UP_SECONDS = 60.0
"""The first part of the life of each process, which is not judged: caches fill, and connections open."""
OF_JAVA = "'s Java"
"""Java fills its heap before it collects, so its processes are judged apart: by their bound alone."""
_SAMPLES_MIN = 8
_SECONDS_PER_HOUR = 3600.0
_PARENT = 1
"""The place of the parent's id in what follows the name in /proc/PID/stat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a process and its children."""

    pid: int
    at_s: float
    memory_bytes: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The first and the last part of the life of one process after its warm-up, each as a median."""

    name: str
    memory_before: int
    memory_after: int
    memory_peak: int
    files_before: int
    files_after: int
    minutes: float
    mib_per_hour: float
    """The slope of the line that fits the samples best."""
    judged: bool
    """False: it has lived for too short a time."""
    fills_heap: bool = False
    """Only a bound says whether its memory is in order."""

    def flat(self, *, share: float, spare_bytes: int, spare_files: int) -> bool:
        flat = self.fills_heap or self.memory_after <= self.memory_before * share + spare_bytes
        return flat and self.files_after <= self.files_before + spare_files


@dataclass(slots=True)
class Usage:
    """Samples of all commands. Linux only."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def look(self, commands: list[Command], at_s: float) -> None:
        children = _children()
        for command in commands:
            if command.pid is None:
                continue
            found: dict[str, list[tuple[int, int]]] = {}
            for pid in _tree(command.pid, children):
                usage = _usage(pid)
                if usage is not None:
                    name = f"{command.name}{OF_JAVA}" if _is_java(pid) else command.name
                    found.setdefault(name, []).append(usage)
            for name, usages in found.items():
                sample = Sample(
                    pid=command.pid,
                    at_s=at_s,
                    memory_bytes=sum(one[0] for one in usages),
                    files=sum(one[1] for one in usages),
                )
                self.samples.setdefault(name, []).append(sample)

    def growth(self, part: float = 0.25) -> list[Growth]:
        """Compare the first with the last part of what the newest process of each command has lived after its warm-up."""
        found = []
        for name, samples in self.samples.items():
            alive = [sample for sample in samples if sample.pid == samples[-1].pid]
            warm = [sample for sample in alive if sample.at_s - alive[0].at_s >= WARM_UP_SECONDS]
            mine = warm or alive
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
                    minutes=(mine[-1].at_s - mine[0].at_s) / 60,
                    mib_per_hour=_slope(mine) * _SECONDS_PER_HOUR / MIB,
                    judged=len(warm) >= _SAMPLES_MIN,
                    fills_heap=name.endswith(OF_JAVA),
                )
            )
        return found


def _slope(samples: list[Sample]) -> float:
    """Bytes per second."""
    if len({sample.at_s for sample in samples}) == 1:
        return 0.0
    return statistics.linear_regression([one.at_s for one in samples], [one.memory_bytes for one in samples]).slope


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


def _is_java(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "comm").read_text().strip() == "java"
    return False


def _usage(pid: int) -> tuple[int, int] | None:
    """Memory in bytes and the number of open files; None if it has just ended.

    Of pages that several processes share, as forked workers do, each has its part: else a center would count them ten times.
    """
    place = Path("/proc") / str(pid)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (place / "smaps_rollup").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return kib * KIB, sum(1 for _ in (place / "fd").iterdir())
    return None
