"""What a benchmark found, as rows of a table and as JSON. Whether a target is reached is worked out here, from the numbers."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

NOTE_CHARS_MAX = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A number to reach."""

    bound: float
    is_least: bool
    """Whether more is better."""

    def reached_by(self, measured: float) -> bool:
        return measured >= self.bound if self.is_least else measured <= self.bound


def at_least(bound: float) -> Target:
    return Target(bound=bound, is_least=True)


def at_most(bound: float) -> Target:
    return Target(bound=bound, is_least=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table."""

    section: str
    case: str
    measured: float
    unit: str
    target: Target | None = None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    """For the JSON: what the number was worked out from."""

    @property
    def reached(self) -> bool | None:
        return None if self.target is None else self.target.reached_by(self.measured)

    def to_dict(self) -> dict[str, Any]:
        bound = None if self.target is None else {"bound": self.target.bound, "at_least": self.target.is_least}
        return {
            "section": self.section,
            "case": self.case,
            "measured": None if math.isnan(self.measured) else self.measured,
            "unit": self.unit,
            "target": bound,
            "reached": self.reached,
            "note": self.note,
            "details": self.details,
        }


def missing(section: str, case: str, reason: str) -> Finding:
    """What could not be measured here, with the reason."""
    return Finding(section=section, case=case, measured=float("nan"), unit="", note=f"not to be had: {reason}")


def rate_of(section: str, case: str, rates: Sequence[float], unit: str = "rows/s") -> Finding:
    """A rate that stands beside a ratio."""
    details = {"rates": list(rates)}
    return Finding(section=section, case=case, measured=middle(rates), unit=unit, note=spread(rates), details=details)


def in_turn(
    sides: Mapping[str, Callable[[], Any]], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each side and of processor time, in turn, after one run of each that does not count. Their results have to agree."""
    results = {name: side() for name, side in sides.items()}
    if len(set(results.values())) > 1:
        raise SystemExit(f"the sides give different results: {results}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repetitions):
        for name, side in sides.items():
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            side()
            seconds[name].append(time.perf_counter() - began_s)
            cpu_s[name].append(time.process_time() - began_cpu_s)
    return seconds, cpu_s


def show(findings: Sequence[Finding]) -> None:
    """Print the rows of one section."""
    header = ("case", "measured", "target", "reached", "")
    rows = [header, *(_cells(found) for found in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)) + "  " + row[4])
    print(flush=True)


def show_missed(findings: Sequence[Finding]) -> None:
    """Print which targets were not reached, at the end of a run."""
    missed = [f"{found.section}: {found.case}" for found in findings if found.reached is False]
    judged = sum(found.target is not None for found in findings)
    print(f"targets missed: {len(missed)} of {judged}", *missed, sep="\n  ")


def _cells(found: Finding) -> tuple[str, str, str, str, str]:
    target = ""
    if found.target is not None:
        target = f"{'>=' if found.target.is_least else '<='} {number(found.target.bound)}"
    reached = {None: "", True: "yes", False: "NO"}[found.reached]
    measured = "-" if math.isnan(found.measured) else f"{number(found.measured)} {found.unit}"
    return found.case, measured, target, reached, found.note[:NOTE_CHARS_MAX]


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def middle(values: Iterable[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """From the least to the most, so that a noisy machine is seen to be one."""
    return f"{number(min(values))} to {number(max(values))}"


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(np.asarray(values, dtype=np.float64), share)) if len(values) else float("nan")


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    import polars as pl

    import fordstone

    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_mb": int(memory["MemTotal"].split()[0]) // 1024,
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "polars": pl.__version__,
        "numpy": np.__version__,
        "fordstone": fordstone.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_json(
    path: Path, *, size: Literal["full", "quick", "tiny"], facts: dict[str, Any], findings: Sequence[Finding]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "size": size, "findings": [found.to_dict() for found in findings]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
