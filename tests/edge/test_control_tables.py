"""Control tables in a running engine: rows see the table of the epochs before theirs, whatever crashes and is damaged."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import msgspec
import polars as pl
import pytest
from tests.connectors.control_hub import GONE, FakeHub, Guarantee, Table, applied, control_rows, edge_plan, pipeline_of
from tests.examples import rest
from tests.simulation.simulator import SimClock

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.connectors.control import PARTITION, ControlSource
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.link.control import ControlFetcher
from fordstone.edge.run import recovered_engine, run
from fordstone.epochs.manifest import Cut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, SourceError
from fordstone.operators.base import ROW_ID
from fordstone.plan import plan as p
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

START = datetime(2026, 1, 1, tzinfo=UTC)
DEVICES = ("a", "b", "c", "d")
STEPS_MAX = 60_000


@dataclass
class Node:
    """A node in simulation: rows, versions and steps come in any order, and the power goes when it likes."""

    seed: int
    parallelism: int = 1
    hub: FakeHub = field(default_factory=FakeHub)
    disk: MemoryDisk = field(default_factory=MemoryDisk)
    clock: SimClock = field(default_factory=SimClock)
    source: MemorySource = field(default_factory=lambda: MemorySource([[], []]))
    alarms: MemorySink = field(default_factory=MemorySink)
    out: MemorySink = field(default_factory=MemorySink)
    tables: list[Table] = field(default_factory=lambda: [{}])
    cuts: dict[int, Cut] = field(default_factory=dict)
    rows: dict[int, str] = field(default_factory=dict)
    replayed: int = 0
    guarantee: Guarantee = "exactly_once"

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.plan = pipeline_of(self.source, self.alarms, self.out, guarantee=self.guarantee)

    def store(self) -> CheckpointStore:
        return CheckpointStore(self.disk, pipeline=self.plan.pipeline, node="n", compression="none", keep=2)

    def engine(self, *, bounded: bool = False) -> tuple[Engine, ControlFetcher]:
        config = RunConfig(
            node="n", bounded=bounded, parallelism=self.parallelism, interval="5ms", keep=2, batch_rows=7
        )
        environment = Environment(
            clock=self.clock, disk=self.disk, choose=self.rng.randrange, dead_letters=lambda _: _none()
        )
        made = recovered_engine(self.plan, {}, config, environment, self.store(), None)
        self.replayed += len(made.resumption.replay)
        source = made.sources["limits"]
        assert isinstance(source, ControlSource)
        manifest = made.resumption.manifest
        taken = None if manifest is None else manifest.cut.sources["limits"].partitions.get(PARTITION)
        return made, ControlFetcher(self.hub, source.log, pipeline="cold-chain", control="limits", taken=taken)

    def publish(self) -> None:
        changes: dict[str, Any] = {
            self.rng.choice(DEVICES): GONE if self.rng.random() < 0.3 else float(len(self.tables))
        }
        self.tables.append(applied(self.tables[-1], changes))
        whole = self.rng.random() < 0.2
        self.hub.add(self.tables[-1] if whole else changes, snapshot=whole)
        if whole and self.rng.random() < 0.5:
            self.hub.forget_before(self.hub.newest)

    def feed(self, count: int = 3) -> None:
        partition = self.rng.randrange(2)
        some = []
        for _ in range(count):
            number = len(self.rows)
            self.rows[number] = self.rng.choice(DEVICES)
            some.append((number, self.rows[number], START + timedelta(seconds=number)))
        self.source.append(partition, some)

    def note_cuts(self) -> None:
        store = self.store()
        for epoch in store.epochs():
            with suppress(CheckpointError):
                self.cuts.setdefault(epoch, store.cut(epoch))

    def live(self, steps: int, *, bounded: bool = False, crashes: bool = False) -> bool:
        """Run for some steps, or to the end of bounded input; says whether it is over."""
        try:
            engine, fetcher = self.engine(bounded=bounded)
            steppables = engine.steppables()
            sealed = -1
            for number in range(STEPS_MAX):
                self.clock.now_us += self.rng.randrange(200)
                chance = self.rng.random()
                if not bounded and chance < 0.02:
                    self.publish()
                elif not bounded and chance < 0.06:
                    self.feed()
                elif chance < 0.1:
                    fetcher.step(wait_s=0.0)
                if not self.rng.choice(steppables).step():
                    self.clock.now_us += 300
                if crashes and number == steps // 2:
                    self.disk.cut_after = self.disk.changes + self.rng.randrange(12)
                if engine.writer.epoch != sealed:
                    sealed = engine.writer.epoch
                    self.note_cuts()
                if engine.over:
                    assert engine.coordinator.given_up == 0
                    return True
                if number >= steps and not bounded:
                    break
            assert not bounded, "a bounded run did not end"
            assert engine.coordinator.given_up == 0
        except PowerCut:
            pass
        return False

    def crash(self) -> None:
        if self.rng.random() < 0.5:
            self.disk.crash(self.rng)
        else:
            self.disk.kill()
        self.note_cuts()

    def damage_newest(self) -> None:
        """Lose the newest checkpoint: its epoch is computed again."""
        epochs = self.store().epochs()
        if len(epochs) > 1:
            self.disk.damage(f"cold-chain/n/manifests/{epochs[-1]:012}.json", b"not a manifest")

    def version_before(self, epoch: int) -> int:
        """The version that the node had taken when the epoch began."""
        cut = self.cuts[epoch - 1].sources["limits"] if epoch > 1 else None
        return 0 if cut is None or PARTITION not in cut.partitions else cut.partitions[PARTITION].position

    def check(self) -> None:
        """Every row came once, with the table of the epochs before its own."""
        seen = []
        for epoch, frame in self.out.released.items():
            table = self.tables[self.version_before(epoch)]
            for row in frame.iter_rows(named=True):
                seen.append(row["n"])
                assert row["threshold"] == table.get(row["device"]), (epoch, row)
        assert sorted(seen) == sorted(self.rows)


def _none() -> Any:
    return _DeadLetters()


class _DeadLetters:
    """Takes what no test has."""

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        assert frame.is_empty(), (epoch, frame)

    def close(self) -> None:
        """Nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(6), *rest(*range(6, 12))])
def test_rows_see_the_table_of_the_epochs_before_theirs_whatever_crashes_and_is_damaged(seed):
    node = Node(seed=seed)
    for part in range(5):
        node.parallelism = node.rng.choice((1, 2, 4))
        node.live(1200, crashes=part % 2 == 1)
        node.crash()
        if part in {1, 3}:
            node.damage_newest()
    node.parallelism = node.rng.choice((1, 4))
    assert node.live(0, bounded=True)
    node.check()
    assert max(node.version_before(epoch) for epoch in node.out.released) > 0
    # Those that were released at once came at least once, each under its own id.
    assert {row["n"] for frame in node.alarms.written for row in frame.iter_rows(named=True)} == set(node.rows)
    ids = {(row["n"], row[ROW_ID]) for frame in node.alarms.written for row in frame.iter_rows(named=True)}
    assert len(ids) == len({number for number, _ in ids}) == len({one for _, one in ids})


@pytest.mark.slow
def test_epochs_were_computed_again_in_that_test_with_versions_in_them():
    replayed = 0
    for seed in range(3):
        node = Node(seed=seed)
        for _ in range(3):
            node.live(900)
            node.crash()
            node.damage_newest()
        assert node.live(0, bounded=True)
        node.check()
        replayed += node.replayed
    assert replayed > 3


def test_the_same_rows_and_versions_give_the_same_with_one_subtask_and_with_four():
    def results(parallelism: int) -> list[Any]:
        node = Node(seed=7, parallelism=parallelism)
        for number in range(1, 4):
            node.tables.append(applied(node.tables[-1], {"a": float(number), "b": GONE if number == 2 else 1.0}))
            node.hub.add({"a": float(number), "b": GONE if number == 2 else 1.0})
        engine, fetcher = node.engine()
        fetcher.step(wait_s=0.0)
        until_sealed(node, engine, lambda: PARTITION in taken(node) and taken(node)[PARTITION] == 3)
        node.rng = Random(8)  # how many were drawn by now depends on the number of tasks
        node.feed(40)
        until_sealed(node, engine, lambda: sum(frame.height for frame in node.out.released.values()) == 40)
        return sorted(row[0:2] + row[3:] for frame in node.out.released.values() for row in frame.rows())

    one, four = results(1), results(4)
    assert one == four
    assert {row[1]: row[2] for row in one} == {"a": 3.0, "b": 1.0, "c": None, "d": None}


def taken(node: Node) -> dict[str, int]:
    node.note_cuts()
    if not node.cuts:
        return {}
    return {name: cut.position for name, cut in node.cuts[max(node.cuts)].sources["limits"].partitions.items()}


def until_sealed(node: Node, engine: Engine, done: Any) -> None:
    steppables = engine.steppables()
    for number in range(STEPS_MAX):
        node.clock.now_us += 200
        sealed = engine.writer.epoch
        node.rng.choice(steppables).step()
        if sealed != engine.writer.epoch:
            node.note_cuts()
        if number % 50 == 0 and done():
            return
    raise AssertionError("it never came to that")


def test_a_node_that_is_offline_for_long_goes_on_with_the_last_table():
    node = Node(seed=3)
    node.hub.add({"a": 1.0})
    node.tables.append({"a": 1.0})
    engine, fetcher = node.engine()
    fetcher.step(wait_s=0.0)
    until_sealed(node, engine, lambda: taken(node).get(PARTITION) == 1)
    node.hub.away = True
    for _ in range(3):
        node.crash()
        engine, fetcher = node.engine()
        assert fetcher.step(wait_s=0.0) > 0.0
        node.feed(10)
        wanted = len(node.rows)
        until_sealed(node, engine, lambda wanted=wanted: sum(f.height for f in node.out.released.values()) == wanted)
    node.check()
    assert {row["threshold"] for frame in node.out.released.values() for row in frame.iter_rows(named=True)} == {
        1.0,
        None,
    }


@pytest.mark.slow
def test_old_versions_are_folded_away_but_none_that_a_checkpoint_may_need():
    node = Node(seed=11)
    engine, fetcher = node.engine()
    source = engine.sources["limits"]
    assert isinstance(source, ControlSource)
    for number in range(60):
        changes = {DEVICES[number % 3]: float(number)}
        node.tables.append(applied(node.tables[-1], changes))
        node.hub.add(changes)
        fetcher.step(wait_s=0.0)
        until_sealed(node, engine, lambda number=number: taken(node).get(PARTITION) == number + 1)
    assert source.log.files < 40
    node.crash()
    node.damage_newest()
    assert node.live(0, bounded=True)
    node.check()


@pytest.mark.slow
def test_a_lost_folder_is_an_error_only_where_epochs_must_be_computed_again():
    node = Node(seed=5)
    node.live(1500)
    node.crash()
    lost = node.disk.list("cold-chain/n/control/limits")
    assert lost
    for name in lost:
        node.disk.remove(f"cold-chain/n/control/limits/{name}")
    node.live(1500)
    node.crash()
    assert node.live(0, bounded=True)
    node.check()


def test_with_a_folder_and_a_checkpoint_lost_together_nothing_is_guessed():
    node = Node(seed=5)
    while not (len(node.cuts) > 3 and taken_at_ends(node)):
        node.live(400)
        node.crash()
    for name in node.disk.list("cold-chain/n/control/limits"):
        node.disk.remove(f"cold-chain/n/control/limits/{name}")
    node.damage_newest()
    with pytest.raises(SourceError, match="is needed again and is not there"):
        node.live(3000)


def taken_at_ends(node: Node) -> bool:
    """Whether the newest epoch took a version."""
    epochs = node.store().epochs()
    if len(epochs) < 2:
        return False
    last, before = (node.cuts[epoch].sources["limits"].partitions for epoch in (epochs[-1], epochs[-2]))
    return PARTITION in before and last[PARTITION].position > before[PARTITION].position


def test_at_most_once_forgets_no_version():
    node = Node(seed=2, guarantee="at_most_once")
    node.hub.add({"a": 1.0, "b": 2.0})
    engine, fetcher = node.engine()
    fetcher.step(wait_s=0.0)
    for _ in range(300):
        for task in engine.tasks:
            task.step()
    # Read, and lost before any checkpoint: a table's rows come again, where a stream's would not.
    node.crash()
    engine, _ = node.engine()
    until_sealed(node, engine, lambda: taken(node).get(PARTITION) == 1)
    node.feed(20)
    until_sealed(node, engine, lambda: sum(frame.height for frame in node.out.written) == 20)
    found = {row["device"]: row["threshold"] for frame in node.out.written for row in frame.iter_rows(named=True)}
    assert found == {"a": 1.0, "b": 2.0, "c": None, "d": None}


# Time.


def windowed(source: MemorySource, out: MemorySink) -> p.Plan:
    pipeline = Pipeline("windows")
    readings = pipeline.source("readings", memory(source), schema={"device": "string", "ts": "timestamp"}, time="ts")
    limits = pipeline.control("limits", schema={"device": "string", "threshold": "double"}, key="device")
    seen = readings.join_control(limits, on="device")
    seen.group_by("device").window(tumbling("10s")).agg(n="count(*)").sink("out", memory(out))
    return edge_plan(pipeline)


@pytest.mark.parametrize("parallelism", [1, 4])
@pytest.mark.parametrize("versions", [0, 2])
def test_a_control_table_never_holds_time_back(parallelism, versions):
    source, out, disk, clock = MemorySource([[]]), MemorySink(), MemoryDisk(), SimClock()
    plan = windowed(source, out)
    config = RunConfig(node="n", parallelism=parallelism, interval="5ms")
    environment = Environment(clock=clock, disk=disk, dead_letters=lambda _: _none())
    engine = recovered_engine(plan, {}, config, environment, CheckpointStore(disk, pipeline="windows", node="n"), None)
    table = engine.sources["limits"]
    assert isinstance(table, ControlSource)
    source.append(0, [("a", START + timedelta(seconds=second)) for second in range(35)])
    rng = Random(1)
    for number in range(STEPS_MAX):
        if number % 400 == 100 and table.log.newest < versions:
            table.log.add(table.log.newest + 1, control_rows({"a": 1.0}), chain="")
        clock.now_us += 200
        rng.choice(engine.steppables()).step()
        if sum(frame.height for frame in out.released.values()) == 3:
            break
    assert sorted(row["n"] for frame in out.released.values() for row in frame.iter_rows(named=True)) == [10, 10, 10]


@pytest.mark.parametrize("parallelism", [1, 4])
def test_a_bounded_run_ends_whether_there_is_a_table_or_not(tmp_path, parallelism):
    rows = [("a", START + timedelta(seconds=second)) for second in range(25)]
    out = MemorySink()
    report = run(
        windowed(MemorySource([rows, rows]), out),
        {},
        RunConfig(state=tmp_path, bounded=True, parallelism=parallelism),
    )
    assert report.outcome == "ended"
    assert out.rows().get_column("n").sum() == 50


def test_plans_with_a_control_source_are_read_back_as_they_were():
    plan = windowed(MemorySource([[]]), MemorySink())
    step = plan.step("limits")
    assert isinstance(step, p.Source)
    assert step.replaces == ("device",)
    assert msgspec.json.decode(msgspec.json.encode(step), type=p.Source) == step
