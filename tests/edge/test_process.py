"""Keyed functions on the edge engine: the same results however it ran, crashed and was started again."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.edge.process_functions import OUT_SCHEMA, SCHEMA, Reminders, Visits, by_hand, record, some_rows, visits
from tests.simulation.simulator import NoDeadLetters, SimClock

from fordstone import KeyedFunction, Pipeline, ValueState, tumbling
from fordstone.connectors import stdout
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import PlanError, ReplayError
from fordstone.plan import plan as p
from fordstone.plan.plan import Plan
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.explain import explain
from fordstone.testing.memory_disk import MemoryDisk

STEPS_MAX = 50_000


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead letters go to the state directory, below the working one."""
    monkeypatch.chdir(tmp_path)


def rows_of(sink: MemorySink) -> Counter[Any]:
    return Counter(sink.rows().select(list(OUT_SCHEMA)).rows()) if sink.released else Counter()


# Crashes, with a clock and a disk of our own.


class World:
    """What outlives a crash."""

    def __init__(self, plan: Plan, functions: Any, seed: int) -> None:
        self.plan, self.functions = plan, functions
        self.rng = random.Random(seed)
        self.disk, self.clock = MemoryDisk(), SimClock()
        self.replayed = 0

    def engine(self, *, parallelism: int, bounded: bool = True) -> Engine:
        config = RunConfig(bounded=bounded, parallelism=parallelism, interval="5ms", batch_rows=4, compression="none")
        environment = Environment(clock=self.clock, disk=self.disk, dead_letters=lambda _: NoDeadLetters())
        engine = recovered_engine(self.plan, self.functions, config, environment, self.store(), None)
        self.replayed += len(engine.resumption.replay)
        return engine

    def store(self) -> CheckpointStore:
        return CheckpointStore(self.disk, pipeline=self.plan.pipeline, node="node", compression="none")

    def step(self, engine: Engine, steps: int) -> bool:
        """Take up to `steps` steps; return whether the run is over."""
        parts = engine.steppables()
        for _ in range(steps):
            self.clock.now_us += self.rng.randrange(200)
            if not self.rng.choice(parts).step():
                self.clock.now_us += 300
            if engine.over:
                return True
        return False

    def crash(self) -> None:
        self.disk.kill()

    def lose_newest(self) -> bool:
        """Damage the newest manifest, so that its epoch is computed again from what was recorded of it."""
        store = self.store()
        epochs = store.epochs()
        if len(epochs) < 2:
            return False
        self.disk.damage(f"{store.pipeline}/{store.node}/manifests/{epochs[-1]:012}.json", b"not a manifest")
        return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_after_crashes_and_with_other_subtasks_results_are_exact(seed):
    partitions = [some_rows(seed + number, 60) for number in (10, 20)]
    out = MemorySink()
    pipeline = visits(MemorySource([[record(row) for row in rows] for rows in partitions]), out)
    world = World(pipeline.plan(), pipeline.functions, seed)
    crashes = 0
    for crashes in range(200):
        if world.step(world.engine(parallelism=world.rng.choice((1, 2, 3))), world.rng.randrange(30) * (5 + crashes)):
            break
        world.crash()
    else:
        raise AssertionError("it never ended")
    assert crashes > 0
    assert rows_of(out) == by_hand(partitions)[0]


def reminding(source: MemorySource, out: MemorySink) -> Pipeline:
    pipeline = Pipeline("reminders")
    rows = pipeline.source("rows", memory(source), schema=SCHEMA)
    rows.group_by("k").process(Reminders, schema={"k": "string", "n": "bigint", "clock": "timestamp"}).sink(
        "out", memory(out)
    )
    return pipeline


@pytest.mark.parametrize("seed", range(5))
def test_timers_by_the_clock_ring_at_the_same_epochs_when_these_are_computed_again(seed):
    source, out = MemorySource([[record(("ab"[n % 2], n, n)) for n in range(8)]]), MemorySink()
    pipeline = reminding(source, out)
    world = World(pipeline.plan(), pipeline.functions, seed)
    rung = []
    for _ in range(8):
        world.step(world.engine(parallelism=2, bounded=False), 400)
        rung.append(out.rows().height)
        world.crash()
        # What was sealed is compared with what comes of computing it again, hours later: `edge.replay` stops if it differs.
        world.lose_newest()
        world.clock.now_us += 3_600_000_000 if rung[-1] >= 4 else 0
    assert world.replayed > 0
    assert rung[-1] >= 4, "keys are reported at least twice, and forgotten"
    assert None in out.rows()["n"].to_list()


def test_a_function_of_clock_and_chance_is_found_out_when_an_epoch_is_computed_again():
    class Chance(KeyedFunction):
        def process(self, row, ctx):
            yield {"x": random.getrandbits(60)}

    out = MemorySink()
    pipeline = Pipeline("chance")
    rows = pipeline.source("rows", memory([[record(("a", n, n)) for n in range(400)]]), schema=SCHEMA)
    rows.group_by("k").process(Chance, schema={"x": "bigint"}).sink("out", memory(out))
    world = World(pipeline.plan(), pipeline.functions, 1)
    engine = world.engine(parallelism=1, bounded=False)
    for _ in range(200):
        if len(world.store().epochs()) > 2 and out.rows().height:
            break
        world.step(engine, 20)
    # Lose every checkpoint but the cuts, so that epochs with rows are computed again.
    store = world.store()
    world.crash()
    for epoch in store.epochs()[1:]:
        world.disk.damage(f"{store.pipeline}/{store.node}/manifests/{epoch:012}.json", b"not a manifest")
    with pytest.raises(ReplayError):
        world.step(world.engine(parallelism=1, bounded=False), STEPS_MAX)


# Beside other steps, and what is said of it.


def test_windows_over_what_a_function_gives_and_a_function_over_windows(tmp_path):
    class Last(KeyedFunction):
        before = ValueState("bigint")

        def process(self, row, ctx):
            yield {**row, "change": row["n"] - self.before.get(0)}
            self.before.set(row["n"])

    out, ends = MemorySink(), MemorySink()
    rows = [record(("a", second, second)) for second in range(0, 40, 2)]
    pipeline = Pipeline("both")
    source = pipeline.source("rows", memory([rows]), schema=SCHEMA, time="ts")
    visited = source.group_by("k").process(Visits, schema=OUT_SCHEMA)
    visited.group_by("k").window(tumbling("10s")).agg(rows="count(*)").sink("out", memory(out))
    counts = source.group_by("k").window(tumbling("10s")).agg(n="count(*)", name="counts")
    schema = counts.schema.to_dict() | {"change": "bigint"}
    counts.group_by("k").process(Last, schema=schema).sink("ends", memory(ends))
    pipeline.run(state=tmp_path, bounded=True, parallelism=2, batch_rows=3, interval="5ms")
    assert ends.rows().sort("window_end")["change"].to_list() == [5, 0, 0, 0]
    sevens = sum(what == "seven" for _, _, what, _, _ in by_hand([[("a", s, s) for s in range(0, 40, 2)]])[0])
    assert sum(out.rows()["rows"].to_list()) == 20 + 1 + sevens


def process_plan(function: type[KeyedFunction] = Visits) -> Plan:
    pipeline = Pipeline("explained")
    rows = pipeline.source("rows", memory(MemorySource()), schema=SCHEMA, time="ts")
    rows.group_by("k").process(function, schema=OUT_SCHEMA, name="visits").sink("out", stdout())
    return pipeline.plan()


EXPLAINED = """\
task visits x2: 2 steps fused
  visits: process tests.edge.process_functions:Visits for each k
  │  takes    rows in order of time
  │  columns  k string, ts timestamp, what string, n bigint, seen string
  │  keeps    the rows that wait for time, timers, and for each key: n, lately (for 5s), counts (for 30s)
  └─ out: sink stdout(format='jsonl')
        releases  when the epoch is sealed
"""


def test_it_is_explained():
    assert EXPLAINED in explain(process_plan(), parallelism=2)


def test_other_states_are_another_state():
    class More(Visits):
        more = ValueState("string")

    digests = {step_digests(plan, stream_types(plan))["visits"] for plan in (process_plan(), process_plan(More))}
    assert len(digests) == 2


def test_a_local_function_runs_here_and_cannot_be_deployed(tmp_path):
    class Local(Visits):
        pass

    plan = process_plan(Local)
    (step,) = [step for step in plan.steps if isinstance(step, p.Process)]
    assert step.path.startswith("<local>:Local")
    with pytest.raises(PlanError, match="function Local was written in place"):
        World(plan, {}, 0).engine(parallelism=1)
