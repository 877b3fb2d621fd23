"""The number of seeds that are simulated, and what they tried: part of the result."""

from __future__ import annotations

import pytest
from tests.simulation.fleet_tally import FleetTally
from tests.simulation.simulator import Tally

BLOCK = 50
FLEET_SHARE = 2
"""A fleet takes as long as several engines: for this number of seeds, one fleet is simulated."""
FLEET_BLOCK = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seeds = metafunc.config.getoption("--seeds")
    first = metafunc.config.getoption("--first-seed")
    if "seed_block" in metafunc.fixturenames:
        _in_blocks(metafunc, "seed_block", first, seeds, BLOCK)
    if "fleet_block" in metafunc.fixturenames:
        _in_blocks(metafunc, "fleet_block", first, max(seeds // FLEET_SHARE, 1), FLEET_BLOCK)


def _in_blocks(metafunc: pytest.Metafunc, name: str, first: int, seeds: int, size: int) -> None:
    blocks = [range(start, min(start + size, first + seeds)) for start in range(first, first + seeds, size)]
    metafunc.parametrize(name, blocks, ids=[f"{block.start}-{block.stop - 1}" for block in blocks])


class Recorded(Tally):
    """A tally that the test's report carries."""

    __slots__ = ("counts",)

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def add(self, other: Tally) -> None:
        super().add(other)
        self.counts.update({name: getattr(self, name) for name in Tally.__slots__})


class RecordedFleets(FleetTally):
    """A tally of fleets that the test's report carries."""

    __slots__ = ("recorded",)

    def __init__(self, recorded: dict[str, int]) -> None:
        super().__init__()
        self.recorded = recorded

    def add(self, other: FleetTally) -> None:
        super().add(other)
        self.recorded.update(self.counts())


@pytest.fixture
def fleet_tally(request: pytest.FixtureRequest) -> FleetTally:
    counts: dict[str, int] = {}
    request.node.user_properties.append(("fleets", counts))
    return RecordedFleets(counts)


@pytest.fixture
def simulation_tally(request: pytest.FixtureRequest) -> Tally:
    counts: dict[str, int] = {}
    request.node.user_properties.append(("simulation", counts))
    return Recorded(counts)
