"""The whole engine under seeds: random graphs, rows, interleavings and crashes, judged by a plain oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from tests.examples import share_of
from tests.simulation import simulator
from tests.simulation.scenario import SHAPES, Scenario
from tests.simulation.simulator import Tally, simulate

from fordstone.plan.plan import StateKind

REGRESSIONS = {
    35: "a loop's probes kept its input from being read",
    378: "a damaged output run was found only after the checkpoint had been chosen",
    539: "a damaged output run was found only after the checkpoint had been chosen",
    614: "a damaged output run was found only after the checkpoint had been chosen",
    700: "an unaligned epoch that was computed again gave the rows that had been in flight",
    758: "a damaged output run was found only after the checkpoint had been chosen",
    1466: "rows in flight in a loop were replayed although nothing may be repeated",
    2395: "rows in flight in a loop were replayed although nothing may be repeated",
}


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_once_failed_passes(seed: int, simulation_tally: Tally):
    # They had no tail then: with one, tasks would take turns in another order. And crashes came at any time.
    simulation_tally.add(simulate(replace(Scenario.of(seed), tail=None, crashes_late=False)))


def test_every_seed_keeps_the_invariants(seed_block: range, simulation_tally: Tally):
    for seed in seed_block:
        simulation_tally.add(simulate(Scenario.of(seed)))


def test_a_bounded_run_reads_all_its_input_however_often_tasks_fail_and_attempts_are_given_up(simulation_tally: Tally):
    """With short timeouts most attempts are given up, the last ones too; then a task fails, and the engine is made again."""
    for seed in range(27_000, 27_000 + share_of(25)):
        simulation_tally.add(simulate(Scenario.failing(seed)))
    assert simulation_tally.failures > 0
    assert simulation_tally.given_up > 0


def test_every_start_may_keep_its_state_elsewhere_than_the_one_before(simulation_tally: Tally):
    """In memory, in files, in RocksDB, by turns: what one has left the next takes up."""
    before = simulation_tally.crashes
    for seed in range(31_000, 31_000 + share_of(25)):
        scenario = Scenario.of(seed, guarantee="exactly_once")
        simulation_tally.add(simulate(replace(scenario, states=get_args(StateKind), crashes_max=4)))
    assert simulation_tally.crashes > before


def test_every_kind_of_fault_happens(simulation_tally: Tally):
    """A kind that no longer fires would try nothing, in silence."""
    for seed in range(29_020, 29_030):
        simulation_tally.add(simulate(Scenario.of(seed)))
    missing = [name for name in Tally.__slots__ if name != "refused"]
    for seed in range(29_030, 29_070):
        simulation_tally.add(simulate(Scenario.failing(seed)))
        scenario = Scenario.of(seed, guarantee="exactly_once", mode="aligned")
        hard = replace(scenario, damages=True, rescales=True, crashes_max=4, crash_rate=0.005)
        hard = replace(hard, live=False, interval_us=2_000)
        simulation_tally.add(simulate(hard))
        simulation_tally.add(simulate(replace(hard, damages=False, rots=True, crash_rate=0.003)))
        missing = [name for name in missing if not getattr(simulation_tally, name)]
        if not missing:
            break
    assert missing == []


# A loop in mode unaligned is refused when the pipeline is built: see tests/api/test_pipeline.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        (mode, shape)
        for mode in ("aligned", "unaligned", "blocking")
        for shape in SHAPES
        if (mode, shape) != ("unaligned", "loop")
    ],
)
def test_each_mode_and_shape_is_exact_whatever_crashes(mode, shape, simulation_tally: Tally):
    before = simulation_tally.checkpoints
    for seed in range(20_000, 20_000 + share_of(12)):
        simulation_tally.add(simulate(Scenario.of(seed, guarantee="exactly_once", mode=mode, shape=shape)))
    assert simulation_tally.checkpoints > before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["aligned", "unaligned", "blocking"])
def test_a_damaged_checkpoint_is_computed_again_whatever_crashes(mode, simulation_tally: Tally):
    replayed = 0
    for seed in range(25_000, 25_015 if mode == "unaligned" else 25_000 + share_of(30)):
        if mode == "unaligned":
            # Live input cannot be replayed there (`Scenario.cannot_repeat`), and damage needs two checkpoints before a crash.
            scenario = Scenario.of(seed, guarantee="exactly_once", mode=mode, shape=SHAPES[seed % 2])
            scenario = replace(scenario, live=False, crash_rate=0.003, interval_us=500, crashes_late=False)
        else:
            scenario = Scenario.of(seed, guarantee="exactly_once", mode=mode)
            scenario = replace(scenario, crash_rate=0.008, interval_us=2_000)
        tally = simulate(replace(scenario, damages=True, crashes_max=3))
        simulation_tally.add(tally)
        replayed += tally.replayed
    assert replayed > (5 if mode == "unaligned" else 0)


@pytest.mark.slow
def test_several_damaged_checkpoints_are_computed_again(monkeypatch, simulation_tally: Tally):
    monkeypatch.setattr(simulator, "KEEP", 5)
    monkeypatch.setattr(simulator, "DAMAGED", 3)
    for seed in range(26_020, 26_020 + share_of(40)):
        scenario = Scenario.of(seed, guarantee="exactly_once", mode="aligned")
        hard = replace(scenario, damages=True, crashes_max=3, crash_rate=0.005, interval_us=2_000, rescales=False)
        simulation_tally.add(simulate(hard))
    assert simulation_tally.replayed > 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["aligned", "blocking"])
def test_a_state_with_any_damaged_file_goes_on_exactly_or_is_refused(mode, simulation_tally: Tally):
    tally = Tally()
    for seed in range(26_000, 26_000 + share_of(30)):
        scenario = Scenario.of(seed, guarantee="exactly_once", mode=mode)
        tally.add(
            simulate(replace(scenario, damages=False, rots=True, crashes_max=4, crash_rate=0.003, interval_us=2_000))
        )
    simulation_tally.add(tally)
    assert tally.rotten > tally.refused
    assert tally.replayed > 0
