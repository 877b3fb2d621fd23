"""Sinks that outlive the state of their writer, on both engines: no row is there twice, and only one writer is let in."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from tests.hub.running import running_hub
from tests.spark.micro import MicroSpark

from fordstone import Pipeline
from fordstone.connectors import delta, files, rows
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.assembly import Environment
from fordstone.edge.engine.engine import Engine
from fordstone.edge.link.owner import Ownership
from fordstone.edge.run import recovered_engine, run
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import FencedError, SinkError
from fordstone.plan.plan import Plan
from fordstone.runtime.clock import SystemClock
from fordstone.storage.disk import OsDisk

SINKS = ["files", "delta"]
STEPS_MAX = 20_000


def plan_of(root: Path, sink: str) -> Plan:
    pipeline = Pipeline("p")
    source = pipeline.source("src", files(str(root / "in/*.jsonl")), schema={"n": "int", "x": "double"})
    source.sink("out", delta(str(root / "out")) if sink == "delta" else files(str(root / "out"), format="jsonl"))
    return pipeline.plan()


def seen(root: Path) -> list[int]:
    found = pl.DataFrame(DeltaTable(root / "out").scan()) if (root / "out/_delta_log").exists() else rows(root / "out")
    return sorted(found["n"].to_list())


def add(root: Path, number: int) -> None:
    (root / "in").mkdir(exist_ok=True)
    (root / "in" / f"{number}.jsonl").write_text(f'{{"n":{number},"x":{number}.5}}\n')


# A disk is lost.


@pytest.mark.parametrize("sink", SINKS)
def test_a_restart_from_an_older_remote_copy_does_not_double_rows(tmp_path: Path, sink: str) -> None:
    """Epoch 1 is copied; later ones are sealed while the remote is away; the disk is lost; the new run has other epochs."""

    def run(**options: Any) -> None:
        pipeline = Pipeline("p")
        source = pipeline.source("src", files(str(tmp_path / "in/*.jsonl")), schema={"n": "int", "x": "double"})
        source.sink("out", delta(str(tmp_path / "out")) if sink == "delta" else files(str(tmp_path / "out"), "jsonl"))
        pipeline.run(state=tmp_path / "state", available_now=True, **options)

    remote = f"file://{tmp_path}/copies"
    add(tmp_path, 1)
    run(remote=remote, interval="1h")
    for number in (2, 3):
        add(tmp_path, number)
        run(interval="20ms")
    shutil.rmtree(tmp_path / "state")
    for _ in range(2):
        with pytest.raises(
            SinkError, match=r"(?s)sink out: .*out.* has epochs? .*only up to epoch .*--discard-later-output"
        ):
            run(remote=remote, interval="1h")
    assert seen(tmp_path) == [1, 2, 3]
    add(tmp_path, 4)
    run(remote=remote, interval="1h", discard_later_output=True)
    assert seen(tmp_path) == [1, 2, 3, 4]
    add(tmp_path, 5)
    run(remote=remote)
    assert seen(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("sink", SINKS)
def test_a_checkpoint_location_that_was_restored_from_an_older_copy_does_not_double_rows(
    tmp_path: Path, sink: str
) -> None:
    spark, state = MicroSpark(), tmp_path / "state"

    def run(**options: Any) -> None:
        spark.start(plan_of(tmp_path, sink), state=state, available_now=True, **options).run()

    add(tmp_path, 1)
    run()
    shutil.copytree(state, tmp_path / "copy")
    for number in (2, 3):
        add(tmp_path, number)
        run()
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "copy", state)
    with pytest.raises(SinkError, match=r"(?s)has epochs 2 to 3.*only up to epoch 1"):
        run()
    assert seen(tmp_path) == [1, 2, 3]
    run(discard_later_output=True)
    assert seen(tmp_path) == [1, 2, 3]
    add(tmp_path, 4)
    run()
    assert seen(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("engine", ["edge", "spark"])
def test_output_without_its_state_is_an_error_before_anything_is_written(
    tmp_path: Path, sink: str, engine: str
) -> None:
    def run() -> None:
        if engine == "edge":
            with contextlib.closing(Node(tmp_path, sink, "state")) as node:
                node.run()
        else:
            MicroSpark().start(plan_of(tmp_path, sink), state=tmp_path / "state", available_now=True).run()

    add(tmp_path, 1)
    run()
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(SinkError, match=r"(?s)no epoch at all.*--fresh"):
        run()
    assert seen(tmp_path) == [1]


# Two writers.


class Node:
    """An engine on a state directory of its own, stepped in this thread."""

    def __init__(self, root: Path, sink: str, state: str, *, granted: int = 0, **options: Any) -> None:
        plan = plan_of(root, sink)
        self._disk = OsDisk(root / state)
        store = CheckpointStore(self._disk, pipeline="p", node="node", compression="none", keep=2)
        config = RunConfig(state=root / state, available_now=True, interval="1ms", **options)
        ownership = Ownership(self._disk, "p/node")
        ownership.grant(granted)
        environment = Environment(clock=SystemClock(), disk=self._disk)
        self.engine: Engine = recovered_engine(plan, {}, config, environment, store, None, ownership=ownership)

    def run(self, until: Callable[[Engine], bool] = lambda engine: engine.over) -> None:
        for _ in range(STEPS_MAX):
            for steppable in self.engine.steppables():
                steppable.step()
            if until(self.engine):
                return
        raise AssertionError("the engine does not come to its end")

    def close(self) -> None:
        self.engine.close()
        self._disk.close()


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("generations", [(1, 2), (0, 1), (0, 0)])
def test_a_node_that_was_replaced_is_refused_and_its_successor_goes_on(
    tmp_path: Path, sink: str, generations: tuple[int, int]
) -> None:
    """Node A is cut off from the hub; B takes over with what the hub has, which is all that A has released."""
    old, new = generations
    add(tmp_path, 1)
    first = Node(tmp_path, sink, "a", granted=old)
    first.run()
    first.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/p/node/owner.json").unlink()
    cut_off = Node(tmp_path, sink, "a", granted=old)
    successor = Node(tmp_path, sink, "b", granted=new)
    add(tmp_path, 2)
    waiting = Node(tmp_path, sink, "b", granted=new)
    with pytest.raises(FencedError, match="taken over by node node"):
        cut_off.engine.release_again()
    with pytest.raises(FencedError):
        successor.engine.release_again()
    waiting.run()
    assert seen(tmp_path) == [1, 2]
    if old < new:
        with pytest.raises(FencedError, match=f"generation {new}"):
            Node(tmp_path, sink, "a", granted=old)


@pytest.mark.parametrize("sink", SINKS)
def test_a_successor_that_finds_epochs_which_the_hub_never_received_says_so(tmp_path: Path, sink: str) -> None:
    add(tmp_path, 1)
    first = Node(tmp_path, sink, "a", granted=1)
    first.run()
    first.close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/p/node/owner.json").unlink()
    add(tmp_path, 2)
    offline = Node(tmp_path, sink, "a", granted=1)
    offline.run()
    with pytest.raises(
        SinkError, match=r"(?s)has epochs? .*a new machine has taken over what the old one had released"
    ):
        Node(tmp_path, sink, "b", granted=2)
    add(tmp_path, 3)
    Node(tmp_path, sink, "b", granted=2, discard_later_output=True).run()
    assert seen(tmp_path) == [1, 2, 3]
    with pytest.raises(FencedError):
        offline.engine.release_again()


@pytest.mark.parametrize("sink", SINKS)
def test_a_driver_that_still_runs_beside_a_new_one_is_refused(tmp_path: Path, sink: str) -> None:
    spark, plan = MicroSpark(), plan_of(tmp_path, sink)
    add(tmp_path, 1)
    old = spark.start(plan, state=tmp_path / "state")
    old.run()
    new = spark.start(plan, state=tmp_path / "state")
    add(tmp_path, 2)
    with pytest.raises(FencedError, match="start 2, without a hub"):
        old.run()
    new.run()
    assert seen(tmp_path) == [1, 2]


# A node that had a hub moves.


@pytest.fixture(name="granted")
def granted_fixture(tmp_path: Path, request: pytest.FixtureRequest) -> Plan:
    """A plan whose sink a node has claimed under a generation of a hub."""
    plan = plan_of(tmp_path, request.param)
    with running_hub(tmp_path / "hub") as hub:
        add(tmp_path, 1)
        run(plan, {}, RunConfig(state=tmp_path / "edge", node="n1", interval="1h", available_now=True, hub=hub))
    add(tmp_path, 2)
    return plan


@pytest.mark.parametrize("granted", SINKS, indirect=True)
def test_a_node_with_a_hub_moves_to_spark_and_keeps_its_sinks(tmp_path: Path, granted: Plan) -> None:
    given: dict[str, Any] = {"state": tmp_path / "center", "node": "n1", "available_now": True, "shards": 2}
    spark = MicroSpark()
    spark.start(granted, from_checkpoint=str(tmp_path / "edge"), **given).run()
    assert seen(tmp_path) == [1, 2]
    add(tmp_path, 3)
    spark.start(granted, **given).run()
    assert seen(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("granted", SINKS, indirect=True)
def test_a_copy_that_no_hub_has_granted_anything_takes_the_sink_over_only_on_purpose(
    tmp_path: Path, granted: Plan
) -> None:
    (tmp_path / "edge/p/n1/owner.json").unlink()
    spark = MicroSpark()
    for engine in ("edge", "spark"):
        shutil.copytree(tmp_path / "edge", tmp_path / engine / "copy")

    def on_edge(**options: Any) -> None:
        run(
            granted,
            {},
            RunConfig(state=tmp_path / "edge/copy", node="n1", available_now=True, interval="1h", **options),
        )

    def on_spark(**options: Any) -> None:
        given: dict[str, Any] = {"state": tmp_path / "center", "node": "n1", "available_now": True, "shards": 2}
        spark.start(granted, from_checkpoint=str(tmp_path / "spark/copy"), **given, **options).run()

    for start in (on_edge, on_spark):
        with pytest.raises(FencedError, match=r"generation 1\.1.*--discard-later-output"):
            start()
    on_spark(discard_later_output=True)
    assert seen(tmp_path) == [1, 2]
    add(tmp_path, 3)
    on_spark()
    assert seen(tmp_path) == [1, 2, 3]
