"""Deliberate faults in the protocol: a suite that does not notice them is worth nothing."""

from __future__ import annotations

import pytest
from tests.simulation.mutants import MUTANTS
from tests.simulation.rows import SimulationError
from tests.simulation.scenario import Scenario, Shape
from tests.simulation.simulator import simulate

SEEDS_MAX = 400


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_catches(name, request):
    shape: Shape | None = "loop" if name == "loop_log_not_saved" else None
    with MUTANTS[name]():
        for count, seed in enumerate(range(30_000, 30_000 + SEEDS_MAX), start=1):
            try:
                simulate(Scenario.of(seed, guarantee="exactly_once", shape=shape))
            except SimulationError:
                request.node.user_properties.append(("mutants", {"caught": 1, "seeds needed": count}))
                return
    pytest.fail(f"{name} went unnoticed in {SEEDS_MAX} seeds")
