"""Random pipelines whose state is in memory, in files and in RocksDB: in every epoch the checkpoint says the same."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import get_args

import polars as pl
from tests.examples import share_of
from tests.simulation.scenario import Scenario
from tests.simulation.simulator import Tally, simulate

from fordstone.edge.engine.engine import Engine
from fordstone.operators.registry import make_operator
from fordstone.plan.plan import StateKind

State = tuple[int, str, str, int]
"""An epoch, a step, the name of its state, a subtask."""


class Digests:
    """The digest of each state in each epoch: of its rows, in an order of their own, not of the files that they are in."""

    def __init__(self) -> None:
        self.found: dict[State, tuple[int, str]] = {}
        self._last = 0

    def note(self, engine: Engine) -> None:
        """Called after every step."""
        epochs = engine.store.epochs()
        if not epochs or epochs[-1] == self._last:
            return
        self._last = epochs[-1]
        for runs in engine.store.manifest(self._last).states:
            state = make_operator(engine.plan.step(runs.step), engine._job.setting).states()[runs.state]
            frames = [engine.store.read_run(run) for run in runs.runs]
            rows = state.combine(frames, oldest=True) if frames else pl.DataFrame()
            # Lists hold the values of a key in the order in which they came, which is the same; rows have no order.
            texts = sorted(map(repr, rows.select(sorted(rows.columns)).rows()))
            digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
            self.found[self._last, runs.step, runs.state, runs.subtask] = (rows.height, digest)


def digests(scenario: Scenario, kind: StateKind, tally: Tally) -> dict[State, tuple[int, str]]:
    noted = Digests()
    tally.add(simulate(replace(scenario, states=(kind,)), check=noted.note))
    return noted.found


def test_every_checkpoint_says_the_same_whatever_state_is_kept_in(simulation_tally: Tally) -> None:
    rows = 0
    for seed in range(32_000, 32_000 + share_of(15)):
        drawn = Scenario.of(seed, guarantee="exactly_once")
        scenario = replace(drawn, crashes_max=0, damages=False, fills=False, rescales=False, interval_us=2_000)
        in_memory = digests(scenario, "memory", simulation_tally)
        rows += sum(count for count, _ in in_memory.values())
        for kind in get_args(StateKind)[1:]:
            found = digests(scenario, kind, simulation_tally)
            assert found == in_memory, f"{scenario.title()}: {kind}"
    assert rows > 100
