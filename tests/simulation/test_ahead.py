"""Rows ahead of the clock under seeds: which ones were believed is recorded, so an epoch computed again believes the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from tests.simulation.scenario import MAX_AHEAD, Scenario
from tests.simulation.simulator import Tally, simulate

from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ReplayError
from fordstone.lang.duration import TIME_MAX_US
from fordstone.runtime.partition import Partition

SEEDS = [seed for seed in range(31_000, 31_060) if MAX_AHEAD[seed % len(MAX_AHEAD)] in {"5s", "20s"}]
BASE = SEEDS[: len(SEEDS) // 3]
"""Enough to compute epochs again and to give attempts up."""


def hard(seed: int, *, gives_up: bool) -> Scenario:
    """Rows turn up while the clock is set forward; checkpoints are damaged, and attempts given up."""
    scenario = Scenario.of(seed, guarantee="exactly_once", mode=("aligned", "blocking")[seed // 2 % 2], shape="chain")
    return replace(
        scenario,
        live=True,
        damages=True,
        crashes_max=3,
        crash_rate=0.008,
        interval_us=2_000,
        timeout_us=4_000 if gives_up else 60_000_000,
        tail=None,
    )


@pytest.mark.parametrize("gives_up", [False, True])
def test_rows_are_believed_or_not_as_they_were_when_an_epoch_is_computed_again(gives_up, simulation_tally: Tally):
    tally = Tally()
    for seed in BASE:
        tally.add(simulate(hard(seed, gives_up=gives_up)))
    simulation_tally.add(tally)
    assert tally.replayed > 0
    assert bool(tally.given_up) == gives_up


def test_it_is_noticed_if_that_is_not_recorded(monkeypatch):
    whole = Partition.cut

    def forgetful(self: Partition) -> PartitionCut:
        return changed(whole(self), limit_us=TIME_MAX_US)

    monkeypatch.setattr(Partition, "cut", forgetful)
    with pytest.raises(ReplayError, match="gave other output"):
        simulate_all()


def simulate_all() -> None:
    for seed in SEEDS:
        simulate(hard(seed, gives_up=False))
