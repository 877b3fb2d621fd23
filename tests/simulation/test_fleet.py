"""Fleets under seeds: nodes, a hub, readers and a center, with a network that loses things and machines that crash."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from tests.simulation import fleet as fleet_module
from tests.simulation.fleet import simulate_fleet
from tests.simulation.fleet_judge import judge_center, judge_tap
from tests.simulation.fleet_scenario import FleetScenario
from tests.simulation.fleet_tally import Fault, FleetTally
from tests.simulation.rows import SimulationError


def test_every_fleet_keeps_the_invariants(fleet_block: range, fleet_tally: FleetTally):
    for seed in fleet_block:
        fleet_tally.add(simulate_fleet(FleetScenario.of(seed)))


def test_a_seed_gives_the_same_run_every_time():
    # Without aggregates: Polars gives groups in any order, so runs of equal rows may be one blob or two.
    drawn = replace(FleetScenario.of(7), center=False, pushes=False, controls=True, damages=False)
    hard = replace(drawn, lost=0.2, crash_rate=0.02, crashes_max=6, takes_over=True, hub_state=True)
    tallies = [simulate_fleet(hard) for _ in range(2)]
    assert tallies[0] == tallies[1]
    assert tallies[0].faults.total() > 50


@pytest.mark.slow
def test_every_kind_of_fault_happens_in_a_block_of_fleets(fleet_tally: FleetTally):
    missing = list(Fault)
    for seed in range(43_000, 43_080):
        drawn = FleetScenario.of(seed)
        hard = replace(drawn, crash_rate=0.05, crashes_max=20, lost=0.1, copies=0.02, small_blob_bytes=0)
        if seed % 2 and not drawn.pushes:
            hard = replace(hard, restores=0.02, copies=0.0, controls=False)
        fleet_tally.add(simulate_fleet(hard))
        missing = [fault for fault in missing if not fleet_tally.faults[fault]]
        if not missing:
            break
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["cut_off", "never"])
def test_what_was_folded_after_days_offline_is_the_same_stream(offline: str, fleet_tally: FleetTally):
    for seed in range(40_000, 40_006):
        drawn = FleetScenario.of(seed)
        cut_rate = 0.05 if offline == "cut_off" else 0.0
        fleet_tally.add(
            simulate_fleet(replace(drawn, cut_rate=cut_rate, jump_rate=0.02, crash_rate=0.01, crashes_max=3))
        )
    assert fleet_tally.faults[Fault.HOURS_JUMPED] >= 24
    assert (fleet_tally.faults[Fault.CUT_OFF] > 0) == (offline == "cut_off")


@pytest.mark.slow
def test_a_machine_that_takes_over_goes_on_exactly_and_the_old_machine_is_shut_out(fleet_tally: FleetTally):
    for seed in range(41_000, 41_010):
        drawn = FleetScenario.of(seed)
        fleet_tally.add(simulate_fleet(replace(drawn, takes_over=True, hub_state=True, chaos_steps=600, cut_rate=0.01)))
    assert fleet_tally.faults[Fault.TAKE_OVER] > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42_500, 42_502, 42_504])
def test_a_fleet_of_ten_nodes_with_thousands_of_rows_keeps_the_invariants(seed: int, fleet_tally: FleetTally):
    scenario = FleetScenario.large(seed)
    assert len(scenario.rows()) > 2_000
    fleet_tally.add(simulate_fleet(scenario))


@pytest.mark.parametrize("change", ["lost", "doubled"])
@pytest.mark.parametrize("where", ["hub", "center"])
def test_the_oracle_of_a_fleet_sees_a_row(where: str, change: str, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def changed(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.slice(1) if change == "lost" else pl.concat([frame, frame.head(1)])

    def at_hub(scenario, tap, ledger):
        judge_tap(scenario, tap, ledger)
        for frames in (frames for epochs in tap.read.values() for _, frames in epochs if frames):
            frames[0] = changed(frames[0])
            with pytest.raises(SimulationError):
                judge_tap(scenario, tap, ledger)
            seen.append(scenario.seed)
            return

    def at_center(scenario, sinks, ledger):
        judge_center(scenario, sinks, ledger)
        released = sinks["rows"].released
        epoch = next((epoch for epoch, frame in released.items() if frame.height), None)
        if epoch is not None:
            released[epoch] = changed(released[epoch])
            with pytest.raises(SimulationError):
                judge_center(scenario, sinks, ledger)
            seen.append(scenario.seed)

    monkeypatch.setattr(
        fleet_module, "judge_tap" if where == "hub" else "judge_center", at_hub if where == "hub" else at_center
    )
    for seed in range(42_000, 42_020):
        drawn = replace(
            FleetScenario.of(seed), pushes=False, center=where == "center", restores=0.0, crash_rate=0.0, lost=0.0
        )
        simulate_fleet(drawn)
        if seen:
            return
    pytest.fail("no seed gave rows")
