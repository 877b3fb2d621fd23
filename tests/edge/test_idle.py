"""A pipeline in which nothing happens seals few epochs, and misses nothing by it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.simulation.rows import ROWS_BEGIN_US
from tests.simulation.simulator import NoDeadLetters, SimClock

from fordstone import Context, KeyedFunction, Pipeline, Timer, ValueState, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory, stdout
from fordstone.edge.config import RunConfig
from fordstone.edge.engine import engine as engine_module
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.link.outbox import Outbox
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.lang.duration import duration_us
from fordstone.operators.base import Operator
from fordstone.operators.registry import FAMILIES
from fordstone.plan.plan import Sink
from fordstone.planner.split import split
from fordstone.protocol.pacing import IDLE_INTERVAL_US
from fordstone.testing.memory_disk import MemoryDisk

KEEP = 3
SECOND_US = 1_000_000
START = datetime.fromtimestamp(ROWS_BEGIN_US / SECOND_US, UTC)
STEPS_MAX = 200
SCHEMA = {"k": "string", "ts": "timestamp", "n": "bigint"}


class Machine:
    """An engine, stepped until it has nothing more to do, on a clock that the test moves."""

    def __init__(self, pipeline: Pipeline, *, interval: str = "1s", hub_away: bool = False, **options: Any) -> None:
        self.clock = SimClock(ROWS_BEGIN_US)
        disk = MemoryDisk()
        store = CheckpointStore(disk, pipeline="p", node="node", keep=KEEP)
        config = RunConfig(interval=interval, keep=KEEP, **options)
        environment = Environment(
            clock=self.clock, disk=disk, wait=self.clock.wait, dead_letters=lambda _: NoDeadLetters()
        )
        outbox = Outbox(store, bytes_max=1 << 30) if hub_away else None
        plan = split(pipeline.plan()).edge if hub_away else pipeline.plan()
        self.engine: Engine = recovered_engine(
            plan, pipeline.functions, config, environment, store, None, outbox=outbox
        )

    @property
    def epoch(self) -> int:
        return self.engine.writer.epoch

    def rest(self, seconds: float, *, look_every_s: float = 0.1) -> None:
        """Let time pass, and step whatever wants to be stepped meanwhile."""
        until_us = self.clock.now_us + int(seconds * SECOND_US)
        while self.clock.now_us < until_us:
            self.clock.now_us = min(self.clock.now_us + int(look_every_s * SECOND_US), until_us)
            for _ in range(STEPS_MAX):
                did = [one.step() for one in self.engine.steppables()]
                if not any(did):
                    break
            else:
                raise AssertionError("it does not come to rest")


def row(second: float, k: str = "a", n: int = 1) -> dict[str, Any]:
    return {"k": k, "ts": START + timedelta(seconds=second), "n": n}


def windows(source: MemorySource, sink: MemorySink, *, early: str | None = None, **options: Any) -> Pipeline:
    pipeline = Pipeline("p")
    rows = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts", **options)
    counted = rows.group_by("k").window(tumbling("10s"), early=early).agg(c="count(*)")
    counted.sink("out", memory(sink))
    counted.late.sink("late", memory(MemorySink()))
    return pipeline


def test_an_idle_pipeline_seals_an_epoch_a_minute_and_none_more_for_what_has_happened() -> None:
    source = MemorySource([[row(1), row(2)]])
    machine = Machine(windows(source, MemorySink()))
    machine.rest(20)
    settled = machine.epoch
    assert settled <= 3 + KEEP, "those with the rows, and as many as are kept"
    machine.rest(600)
    assert machine.epoch - settled == 600 * SECOND_US // IDLE_INTERVAL_US


@pytest.mark.parametrize("crosses", [False, True])
def test_epochs_that_pile_up_become_longer_but_not_for_rows_of_local_sinks(
    crosses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PILED_UP_EPOCHS", 20)
    source, sink = MemorySource([[row(0)]]), MemorySink()
    pipeline = Pipeline("p")
    rows = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts")
    rows.filter("n > 100").sink("alarms", memory(sink))
    rows.filter(f"n {'>' if crosses else '<'} 0").to_center().sink("all", memory(MemorySink()))
    machine = Machine(pipeline, hub_away=True)

    def busy(seconds: int) -> int:
        before = machine.epoch
        for second in range(seconds):
            source.append(0, [row(machine.clock.now_us / SECOND_US - ROWS_BEGIN_US / SECOND_US + second % 2)])
            machine.rest(1)
        return machine.epoch - before

    assert busy(15) >= 12, "as long as few wait for the hub"
    busy(15)
    assert busy(180) <= 4
    source.append(0, [row(300, n=101)])
    machine.rest(1.2)
    assert sink.rows().height == 1, "the rows of sinks on the node are released as ever"


def test_a_row_is_sealed_within_an_interval_however_long_it_was_quiet() -> None:
    source, sink = MemorySource([[row(1)]]), MemorySink()
    pipeline = Pipeline("p")
    pipeline.source("rows", memory(source), schema=SCHEMA).sink("out", memory(sink))
    machine = Machine(pipeline)
    machine.rest(30)
    before = machine.epoch
    source.append(0, [row(2)])
    machine.rest(1.0)
    assert machine.epoch > before
    assert sink.rows().height == 2


def test_a_partition_is_found_within_an_interval_however_long_it_was_quiet() -> None:
    source, sink = MemorySource([[row(1)]]), MemorySink()
    pipeline = Pipeline("p")
    pipeline.source("rows", memory(source), schema=SCHEMA).sink("out", memory(sink))
    machine = Machine(pipeline)
    machine.rest(30)
    source.append(source.add_partition(), [row(2)])
    machine.rest(2.4)
    assert sink.rows().height == 2, "one interval to find it, and one to seal what was read"


def test_positions_are_acknowledged_up_to_the_last_row_before_the_pipeline_rests() -> None:
    acknowledged: list[int] = []

    class Source(MemorySource):
        def acknowledge(self, position: int) -> None:
            acknowledged.append(position)

    source = Source([[row(1), row(2)]])
    pipeline = Pipeline("p")
    pipeline.source("rows", memory(source), schema=SCHEMA).sink("out", memory(MemorySink()))
    Machine(pipeline).rest(15)
    assert acknowledged[-1] == 2


def test_early_results_come_on_time_although_no_more_rows_do() -> None:
    source, sink = MemorySource([[row(1)]]), MemorySink()
    machine = Machine(windows(source, sink, early="20s"))
    machine.rest(15)
    source.append(0, [row(2), row(3)])
    machine.rest(10)
    assert sink.rows()["c"].to_list() == [1, 3]


class Silence(KeyedFunction):
    """Gives a row when a key has had none for half a minute by the clock."""

    seen = ValueState("bigint")

    def process(self, row: dict[str, Any], ctx: Context) -> None:
        self.seen.set(row["n"])
        ctx.set_timer("silent", after="30s", clock=True)

    def on_timer(self, timer: Timer, ctx: Context) -> Iterator[dict[str, Any]]:
        del timer, ctx
        yield {"n": self.seen.get()}


def test_a_timer_by_the_clock_fires_on_time_although_nothing_happens() -> None:
    source, sink = MemorySource([[row(1, n=7)]]), MemorySink()
    pipeline = Pipeline("p")
    rows = pipeline.source("rows", memory(source), schema=SCHEMA)
    rows.group_by("k").process(Silence, schema={"n": "bigint"}).sink("out", memory(sink))
    machine = Machine(pipeline)
    machine.rest(29)
    assert sink.rows().height == 0
    before = machine.epoch
    machine.rest(5)
    assert sink.rows()["n"].to_list() == [7]
    assert machine.epoch <= before + 4


class Remembering(KeyedFunction):
    """Gives how many rows of a key it remembers, for ten seconds by the clock."""

    count = ValueState("bigint", ttl="10s")

    def process(self, row: dict[str, Any], ctx: Context) -> Iterator[dict[str, Any]]:
        del row, ctx
        known = (self.count.get() or 0) + 1
        self.count.set(known)
        yield {"n": known}


def test_state_is_forgotten_on_time_although_nothing_happens() -> None:
    source, sink = MemorySource([[row(1)]]), MemorySink()
    pipeline = Pipeline("p")
    rows = pipeline.source("rows", memory(source), schema=SCHEMA)
    rows.group_by("k").process(Remembering, schema={"n": "bigint"}).sink("out", memory(sink))
    machine = Machine(pipeline)
    machine.rest(14)
    source.append(0, [row(2)])
    machine.rest(3)
    assert sink.rows()["n"].to_list() == [1, 1]


def test_rows_are_compared_with_a_clock_that_is_not_older_than_an_interval() -> None:
    """With `max_ahead` of some seconds, the clock of a barrier a minute ago would take rows of now for rows of the future."""
    source, sink = MemorySource([[row(0)]]), MemorySink()
    pipeline = windows(source, sink, max_ahead="5s")
    machine = Machine(pipeline)
    machine.rest(50)
    source.append(0, [row(49), row(50)])
    machine.rest(3)
    assert machine.engine.progress().rows_late == 0


def test_an_attempt_that_was_given_up_does_not_hide_what_happened_before_it() -> None:
    source, sink = MemorySource([[row(1)]]), MemorySink()
    pipeline = Pipeline("p")
    pipeline.source("rows", memory(source), schema=SCHEMA).sink("out", memory(sink))
    machine = Machine(pipeline, checkpoint_timeout="2s")
    machine.rest(30)
    source.append(0, [row(2)])
    engine = machine.engine
    for task in engine.tasks:
        task.step()
    machine.clock.now_us += SECOND_US
    engine.coordinator.step()
    for task in engine.tasks:
        task.step()  # it passes the barrier, but the report of it comes too late
    machine.clock.now_us += 3 * SECOND_US
    engine.coordinator._mail.clear()
    engine.coordinator.step()
    assert engine.coordinator.given_up == 1
    machine.rest(1.5)
    assert sink.rows().height == 2


def test_operators_that_go_by_the_clock_say_when_they_are_due() -> None:
    """Otherwise an idle pipeline would have no barrier for them."""
    found = set[type]()
    waiting = [Operator]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if "on_barrier" in vars(kind) and _uses(kind.on_barrier, "moment"):
            found.add(kind)
            assert kind.clock_due_us is not Operator.clock_due_us, f"{kind.__qualname__} uses the clock"
    assert len(FAMILIES) > 10, "all operators are loaded"
    assert len(found) >= 3


def _uses(function: Any, name: str) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


@pytest.mark.parametrize("offline", ["24h", "20s"])
def test_the_node_is_given_the_time_after_which_the_center_takes_it_for_offline(offline: str) -> None:
    pipeline = Pipeline("p")
    rows = pipeline.source("rows", memory(MemorySource([[row(1)]])), schema=SCHEMA, time="ts")
    rows.to_center(offline=offline, name="cut").sink("out", stdout())
    edge = split(pipeline.plan()).edge
    assert edge is not None
    sinks = [step for step in edge.steps if isinstance(step, Sink)]
    assert [step.connector.options["offline_us"] for step in sinks] == [duration_us(offline)]
