"""A partition that turns up on a task that had none: time waits for it from the barrier on that let it in."""

from __future__ import annotations

import pytest
from tests.simulation.simulator import NoDeadLetters, SimClock

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.plan.plan import Guarantee, Mode
from fordstone.testing.memory_disk import MemoryDisk

ROUNDS = 400


def run_a_while(engine: Engine, clock: SimClock) -> None:
    for _ in range(ROUNDS):
        clock.now_us += 100
        for steppable in engine.steppables():
            steppable.step()


@pytest.mark.parametrize(
    ("guarantee", "mode"),
    [
        ("exactly_once", "aligned"),
        ("exactly_once", "blocking"),
        ("exactly_once", "unaligned"),
        ("at_least_once", "aligned"),
        ("at_most_once", "aligned"),
    ],
)
def test_time_waits_for_a_partition_that_joins_an_idle_task_before_any_time_was_known(guarantee: Guarantee, mode: Mode):
    source, windows, late = MemorySource([[(1, "2026-01-01T00:00:14Z")]]), MemorySink(), MemorySink()
    pipeline = Pipeline("joining", guarantee=guarantee, mode=mode)
    stream = pipeline.source(
        "source", memory(source), schema={"id": "bigint", "ts": "timestamp"}, time="ts", idle_after="10s"
    )
    made = stream.group_by().window(tumbling("10s")).agg(ids="collect(id)")
    made.sink("windows", memory(windows))
    made.late.sink("late", memory(late))
    clock, disk = SimClock(), MemoryDisk()
    plan = pipeline.plan()
    store = CheckpointStore(disk, pipeline=plan.pipeline, node="n", compression="none", keep=2)
    config = RunConfig(node="n", bounded=False, parallelism=2, interval="2ms")
    environment = Environment(clock=clock, disk=disk, choose=lambda _: 0, dead_letters=lambda _: NoDeadLetters())
    engine = recovered_engine(plan, {}, config, environment, store, None)
    run_a_while(engine, clock)
    source.add_partition()
    run_a_while(engine, clock)
    source.append(0, [(2, "2026-01-01T00:01:40Z")])
    run_a_while(engine, clock)
    assert windows.rows().height == 0
    source.append(1, [(3, "2026-01-01T00:00:12Z"), (4, "2026-01-01T00:01:40Z")])
    run_a_while(engine, clock)
    assert windows.rows()["ids"].to_list() == [[3, 1]]
    assert late.rows().height == 0


@pytest.mark.parametrize("jump_after", [4, 6, 8])
def test_a_slow_machine_makes_no_partition_of_bounded_input_idle(jump_after: int):
    """Partition 1 is ahead, so partition 0 is read first, for longer than `idle_after`; then it jumps ahead of partition 1."""
    times = [
        [*[f"00:00:{second:02}" for second in range(jump_after)], *[f"01:00:{second:02}" for second in range(9)]],
        ["00:00:59", "00:01:00", "00:01:01"],
    ]
    source, late = MemorySource([[(1, f"2026-01-01T{one}Z") for one in part] for part in times]), MemorySink()
    pipeline = Pipeline("slow")
    stream = pipeline.source(
        "source", memory(source), schema={"id": "bigint", "ts": "timestamp"}, time="ts", idle_after="1s"
    )
    made = stream.group_by().window(tumbling("10s")).agg(n="count(*)")
    made.sink("windows", memory(MemorySink()))
    made.late.sink("late", memory(late))
    clock, disk, plan = SimClock(), MemoryDisk(), pipeline.plan()
    config = RunConfig(node="n", bounded=True, interval="10s", batch_rows=1)
    environment = Environment(clock=clock, disk=disk, choose=lambda _: 0, dead_letters=lambda _: NoDeadLetters())
    store = CheckpointStore(disk, pipeline=plan.pipeline, node="n", compression="none")
    engine = recovered_engine(plan, {}, config, environment, store, None)
    for _ in range(ROUNDS):
        clock.now_us += 300_000
        for steppable in engine.steppables():
            steppable.step()
    assert engine.over
    assert late.rows().height == 0
