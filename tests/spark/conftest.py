"""What tests of the hosted way share: a quick disk, seeds, and the count of what was tried."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

SEEDS = 16
"""One seed here per this number of the simulation's (`--seeds`), which are that much quicker."""


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no disk: processes die in these tests, machines do not."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def each_seed(request: pytest.FixtureRequest) -> Callable[[Callable[[int], Counter[str]]], Counter[str]]:
    """Call something with every seed of this run. It gives what it tried, which is summed up and shown at the end of the run."""

    def tried(trial: Callable[[int], Counter[str]]) -> Counter[str]:
        found: Counter[str] = Counter()
        first = request.config.getoption("--first-seed") - 100_000
        for seed in range(first, first + request.config.getoption("--seeds") // SEEDS):
            try:
                found += trial(seed) + Counter(seeds=1)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
        request.node.user_properties.append(("hosted without Spark", dict(found)))
        return found

    return tried
