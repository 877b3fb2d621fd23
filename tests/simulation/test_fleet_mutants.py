"""Deliberate faults between nodes, hub and center: a simulation that does not notice them is worth nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.fleet import simulate_fleet
from tests.simulation.fleet_mutants import FLEET_MUTANTS
from tests.simulation.fleet_scenario import FleetScenario
from tests.simulation.rows import SimulationError

SEEDS_MAX = 120


@pytest.mark.parametrize("name", FLEET_MUTANTS)
def test_the_simulation_of_fleets_catches(name: str, request: pytest.FixtureRequest):
    with FLEET_MUTANTS[name]():
        for count, seed in enumerate(range(50_000, 50_000 + SEEDS_MAX), start=1):
            drawn = FleetScenario.of(seed)
            hard = replace(drawn, crash_rate=0.06, crashes_max=20, lost=0.2, chaos_steps=500, copies=0.02)
            if not drawn.pushes and seed % 2:
                hard = replace(hard, controls=False, restores=0.02)
            try:
                simulate_fleet(hard)
            except SimulationError:
                request.node.user_properties.append(("mutants", {"caught": 1, "seeds needed": count}))
                return
    pytest.fail(f"{name} went unnoticed in {SEEDS_MAX} seeds")
