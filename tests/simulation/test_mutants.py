"""Deliberate faults in the protocol: a suite that does not notice them is worth nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.mutants import MUTANTS
from tests.simulation.rows import SimulationError
from tests.simulation.scenario import Scenario, Shape
from tests.simulation.simulator import simulate

from fordstone.errors import FordstoneError
from fordstone.plan.plan import Mode

SEEDS_MAX = 400


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_catches(name, request):
    shape: Shape | None = "loop" if name == "loop_log_not_saved" else None
    more: dict[str, Any] = (
        {"rescales": True, "deduplicates": True, "crashes_max": 3}
        if name == "deduplication_forgets_at_a_rescale"
        else {}
    )
    mode: Mode | None = "aligned" if more else None
    shape = "chain" if more else shape
    with MUTANTS[name]():
        for count, seed in enumerate(range(30_000, 30_000 + SEEDS_MAX), start=1):
            try:
                simulate(replace(Scenario.of(seed, guarantee="exactly_once", shape=shape, mode=mode), **more))
            except (SimulationError, FordstoneError):  # the engine itself may notice, as when a replay differs
                request.node.user_properties.append(("mutants", {"caught": 1, "seeds needed": count}))
                return
    pytest.fail(f"{name} went unnoticed in {SEEDS_MAX} seeds")
