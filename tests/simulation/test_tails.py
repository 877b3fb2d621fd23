"""Every operator under the simulator: crashes, given-up checkpoints, damage, rescaling, late rows, idleness; and that its oracle sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import polars as pl
import pytest
from tests.examples import share_of
from tests.simulation import simulator
from tests.simulation.failing_tails import FailingProcessTail, FunctionTail
from tests.simulation.join_tails import JoinTail, LatestTail
from tests.simulation.judge import judge
from tests.simulation.keyed_tails import MatchTail, ProcessTail
from tests.simulation.query_tails import DistinctTail, OverTail, RunningTail, TopTail
from tests.simulation.rows import SimulationError
from tests.simulation.scenario import Scenario, Shape, World
from tests.simulation.simulator import Tally, simulate
from tests.simulation.tails import LETTERS, MORE, OUT, Tail
from tests.simulation.window_tails import CountTail, ForgettingTail, SessionTail, SlidingTail, WindowTail

from fordstone.plan.plan import Mode

TAILS: dict[str, Tail] = {
    "sliding": SlidingTail(early_us=None, allowed=0, size=6, every=2, offset=0),
    "sliding_with_gaps": SlidingTail(early_us=None, allowed=0, size=2, every=7, offset=3),
    "early_and_final": SlidingTail(early_us=1_000, allowed=0, size=10, every=5, offset=1),
    "allowed_lateness": SlidingTail(early_us=None, allowed=9, size=6, every=2, offset=0),
    "allowed_and_early": SlidingTail(early_us=1_000, allowed=4, size=5, every=5, offset=0),
    "session": SessionTail(early_us=None, allowed=0, gap=3),
    "count": CountTail(early_us=None, allowed=0, size=3, every=2),
    "join_inner": JoinTail(how="inner", least=-2, most=2),
    "join_full": JoinTail(how="full", least=0, most=3),
    "match_strict": MatchTail(kind="strict", skip="past_last"),
    "match_relaxed": MatchTail(kind="relaxed", skip="past_last"),
    "match_absent": MatchTail(kind="absent", skip="next"),
    "process": ProcessTail(by_clock=False),
    "process_by_clock": ProcessTail(by_clock=True),
    "top_of_windows": TopTail("windows", 2, "dense_rank"),
    "top_of_rows": TopTail("rows", 2),
    "top_of_counts": TopTail("counts", 2),
    "over_rows": OverTail(rows=3, span=None),
    "over_range": OverTail(rows=None, span=4),
    "over_all": OverTail(rows=None, span=None),
    "distinct": DistinctTail(timed=True),
    "distinct_so_far": DistinctTail(timed=False),
    "running": RunningTail(),
    "forgetting": ForgettingTail(ttl=3),
    "failing_map": FunctionTail("map"),
    "failing_flat_map": FunctionTail("flat_map"),
    "failing_map_batches": FunctionTail("map_batches"),
    "failing_process": FailingProcessTail(),
    "latest": LatestTail(waits=True),
    "latest_at_once": LatestTail(waits=False),
}
SHAPES: tuple[Shape, ...] = ("chain", "diamond", "union")
MODES: tuple[Mode, ...] = ("aligned", "blocking", "unaligned")


def scenario(name: str, seed: int, tail: Tail) -> Scenario:
    mode = MODES[seed % (2 if name.startswith("latest") else 3)]
    drawn = Scenario.of(seed, guarantee="exactly_once", shape=SHAPES[seed // 3 % 3], mode=mode)
    return replace(drawn, tail=tail, smooths=False, deduplicates=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", TAILS)
def test_each_operator_is_exact_whatever_crashes(name: str, simulation_tally: Tally):
    for seed in range(28_000, 28_000 + share_of(6)):
        drawn = scenario(name, seed, TAILS[name])
        rescales = drawn.mode != "unaligned"
        hard = replace(drawn, crashes_max=3, crash_rate=0.01, interval_us=4_000, rescales=rescales, damages=rescales)
        simulation_tally.add(simulate(hard))
    assert simulation_tally.crashes > 0


def judged_sinks() -> Iterator[tuple[str, str, str]]:
    """A tail, a sink that its oracle judges, and what happens to a row there. One that replaces another may come twice."""
    for name, tail in TAILS.items():
        final = MORE if isinstance(tail, WindowTail) and tail.replaces else OUT
        for sink in (final, LETTERS) if isinstance(tail, FunctionTail | FailingProcessTail) else (final,):
            yield name, sink, "lost"
            if not isinstance(tail, RunningTail | ForgettingTail) and not (
                isinstance(tail, TopTail) and tail.kind != "windows"
            ):
                yield name, sink, "doubled"


@pytest.mark.parametrize(("name", "sink", "change"), list(judged_sinks()))
def test_the_oracle_of_each_operator_sees_a_row(name: str, sink: str, change: str, monkeypatch):
    seen = []

    def tampered(given: Scenario, world: World, *more) -> None:
        judge(given, world, *more)
        released = world.sinks[sink].released
        epoch = max((epoch for epoch, frame in released.items() if frame.height), default=None)
        if epoch is None:
            return
        frame = released[epoch]
        released[epoch] = frame.head(-1) if change == "lost" else pl.concat([frame, frame.tail(1)])
        with pytest.raises(SimulationError):
            judge(given, world, *more)
        seen.append(given.seed)

    monkeypatch.setattr(simulator, "judge", tampered)
    for seed in range(29_000, 29_020):
        drawn = scenario(name, seed, TAILS[name])
        simulate(replace(drawn, crashes_max=0))
        if seen:
            return
    pytest.fail("no seed gave rows")
