"""At most once: what was emitted after the last checkpoint is not emitted again, whatever kind of step it waited in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.simulation.simulator import NoDeadLetters, SimClock

from fordstone import KeyedFunction, Pattern, Pipeline, Stream, session, sliding, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Environment
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.testing.memory_disk import MemoryDisk

ROUNDS = 300


class Ring(KeyedFunction):
    """Tells five seconds after a row."""

    def process(self, row, ctx):
        ctx.set_timer("ring", after="5s")

    def on_timer(self, timer, ctx):
        yield {"id": 1}


def timed_out(stream: Stream) -> Stream:
    return stream.match(Pattern("two").start("a", "id = 1").then("b", "id = 9").within("5s"), {"id": "a.id"}).timeouts


STEPS: dict[str, Callable[[Stream], Stream]] = {
    "tumbling": lambda stream: stream.group_by().window(tumbling("10s")).agg(id="min(id)"),
    "sliding": lambda stream: stream.group_by().window(sliding("10s", every="10s")).agg(id="min(id)"),
    "session": lambda stream: stream.group_by().window(session("5s")).agg(id="min(id)"),
    "timer": lambda stream: stream.group_by("id").process(Ring, schema={"id": "bigint"}),
    "left_join": lambda stream: stream.join(stream.filter("id = 9"), on="id", between=("0s", "5s"), how="left"),
    "timeout": timed_out,
}


@pytest.mark.parametrize("assigned", [False, True], ids=["declared", "assigned"])
@pytest.mark.parametrize("kind", STEPS)
def test_what_time_released_since_the_checkpoint_is_lost_rather_than_repeated(kind: str, assigned: bool):
    source, found = MemorySource([[(1, "2026-01-01T00:00:01Z"), (2, "2026-01-01T00:00:02Z")]]), MemorySink()
    pipeline = Pipeline("once", guarantee="at_most_once")
    schema = {"id": "bigint", "ts": "timestamp"}
    stream = pipeline.source("source", memory(source), schema=schema, time=None if assigned else "ts")
    stream = stream.with_time("ts") if assigned else stream
    STEPS[kind](stream).sink("found", memory(found))
    plan, clock, disk = pipeline.plan(), SimClock(), MemoryDisk()

    def run_until_killed(interval: str) -> None:
        store = CheckpointStore(disk, pipeline=plan.pipeline, node="n", compression="none", keep=2)
        environment = Environment(clock=clock, disk=disk, choose=lambda _: 0, dead_letters=lambda _: NoDeadLetters())
        config = RunConfig(node="n", bounded=False, interval=interval)
        engine = recovered_engine(plan, {}, config, environment, store, None)
        for _ in range(ROUNDS):
            clock.now_us += 100
            for steppable in engine.steppables():
                steppable.step()
        disk.kill()

    run_until_killed("2ms")
    assert found.rows().height == 0
    source.append(0, [(3, "2026-01-01T00:01:00Z")])
    run_until_killed("1h")
    released = found.rows()["id"].to_list()
    assert 1 in released
    # Time moves on once more, over everything that waits in the checkpoint.
    source.append(0, [(4, "2026-01-01T00:03:00Z")])
    run_until_killed("1h")
    assert found.rows()["id"].to_list()[: len(released)] == released
    assert not set(found.rows()["id"].to_list()[len(released) :]) & {1, 2}
