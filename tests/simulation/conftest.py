"""How many seeds are simulated, and what they tried: part of the result."""

from __future__ import annotations

import pytest

from fordstone.testing.simulator import Tally

BLOCK = 50


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed_block" in metafunc.fixturenames:
        seeds = metafunc.config.getoption("--seeds")
        first = metafunc.config.getoption("--first-seed")
        blocks = [range(start, min(start + BLOCK, first + seeds)) for start in range(first, first + seeds, BLOCK)]
        metafunc.parametrize("seed_block", blocks, ids=[f"{block.start}-{block.stop - 1}" for block in blocks])


class Recorded(Tally):
    """A tally that the test's report carries."""

    __slots__ = ("counts",)

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def add(self, other: Tally) -> None:
        super().add(other)
        self.counts.update({name: getattr(self, name) for name in Tally.__slots__})


@pytest.fixture
def simulation_tally(request: pytest.FixtureRequest) -> Tally:
    counts: dict[str, int] = {}
    request.node.user_properties.append(("simulation", counts))
    return Recorded(counts)
