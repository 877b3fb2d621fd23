"""Options and the closing summary of what was tried."""

from __future__ import annotations

import os
from collections import Counter

import pytest

# Before anybody imports polars: small frames on many threads only get in each other's way.
os.environ.setdefault("POLARS_MAX_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=2000, help="how many seeds the simulation runs")
    parser.addoption("--first-seed", type=int, default=100_000, help="the first of them")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for kind, counts in getattr(report, "user_properties", []):
                if isinstance(counts, dict):
                    tried.setdefault(kind, Counter()).update(counts)
    for kind, counts in sorted(tried.items()):
        terminalreporter.write_line(
            f"{kind}: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
        )
