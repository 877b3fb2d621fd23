"""A control table from a center's sink through a real hub to a node's rows, and what the node does without the hub."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.control_hub import GONE, KEYS, SCHEMA, control_rows, edge_plan, pipeline_of
from tests.hub.running import running_hub

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.connectors.base import ConnectorSpec, Sink, SinkDelayedError, SinkStream
from fordstone.connectors.registry import open_sink
from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import FencedError, SinkError
from fordstone.hub.client import publisher as publishing
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.lang.schema import Schema
from fordstone.operators.base import DELETE, OP, UPSERT
from fordstone.plan import plan as p
from fordstone.protocol.progress import Progress
from fordstone.storage.disk import OsDisk

START = datetime(2026, 1, 1, tzinfo=UTC)
TICKS_MAX = 1000
"""About a minute: a run that takes longer has failed."""


def publisher(address: HubAddress, owner: str = "center", *, schema: Schema = SCHEMA) -> Sink:
    spec = ConnectorSpec("control", {"pipeline": "cold-chain", "control": "limits", "keys": list(KEYS)}, address.at())
    return open_sink(spec, SinkStream(step="limits_to_edges", schema=schema, upsert_key=KEYS, owner=owner))


class Node:
    """Runs the edge part until something is seen; rows come all the time."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.rows = 0
        self.source, self.alarms, self.out = MemorySource([[]]), MemorySink(), MemorySink()
        self.plan = pipeline_of(self.source, self.alarms, self.out)
        self.problems: list[str] = []

    def run_until(self, seen: Callable[[], bool], *, hub: HubAddress | None) -> None:
        ticks = 0
        stopped = False

        def tick(progress: Progress) -> None:
            nonlocal ticks, stopped
            ticks += 1
            if progress.hub_problem is not None:
                self.problems.append(progress.hub_problem)
            self.feed(1)
            if not stopped and (seen() or ticks > TICKS_MAX):
                stopped = True
                signal.raise_signal(signal.SIGTERM)

        config = RunConfig(state=self.state, node="n1", interval="20ms", hub=hub)
        report = run(self.plan, {}, config, on_progress=tick)
        assert report.outcome == "stopped"
        assert ticks <= TICKS_MAX

    def feed(self, count: int) -> None:
        """The rows are the same in every process."""
        numbers = range(self.rows, self.rows + count)
        self.source.append(0, [(number, "ab"[number % 2], START + timedelta(seconds=number)) for number in numbers])
        self.rows += count

    def newest(self) -> dict[str, Any]:
        """By device: what the last rows that were released saw."""
        rows = self.out.rows()
        if not rows.height:
            return {}
        return {row["device"]: row["threshold"] for row in rows.sort("n").iter_rows(named=True)}


@pytest.mark.slow
def test_thresholds_reach_the_rows_and_stay_when_the_hub_is_gone(tmp_path):
    node = Node(tmp_path / "state")
    with running_hub(tmp_path / "hub") as address:
        sink = publisher(address)
        sink.release(1, control_rows({"a": 1.0}))
        node.run_until(lambda: node.newest().get("a") == 1.0, hub=address)
        sink.release(2, control_rows({"a": GONE, "b": 2.0}))
        sink.release(2, control_rows({"a": GONE, "b": 2.0}))
        node.run_until(lambda: node.newest() == {"a": None, "b": 2.0}, hub=address)
        assert HubClient(address).control_page("cold-chain", "limits").newest == 2
        sink.close()
    assert not node.problems
    released = len(node.out.released)
    node.run_until(lambda: len(node.out.released) > released + 2, hub=address)
    assert node.newest() == {"a": None, "b": 2.0}
    assert any("limits" in problem or "does not answer" in problem for problem in node.problems)
    # Every row once, and those that were released at once too.
    numbers = node.out.rows().get_column("n").to_list()
    assert len(set(numbers)) == len(numbers)
    assert set(pl.concat(node.alarms.written).get_column("n").to_list()) >= set(numbers)


def test_a_publisher_with_a_checkpoint_of_its_own_shuts_the_one_before_out(tmp_path):
    with running_hub(tmp_path / "hub") as address:
        old = publisher(address, "old")
        old.release(7, control_rows({"a": 1.0}))
        publisher(address, "new").release(1, control_rows({"a": 2.0}))
        with pytest.raises(FencedError):
            old.release(8, control_rows({"a": 3.0}))
        page = HubClient(address).control_page("cold-chain", "limits")
        assert [(version.owner, version.batch) for version in page.versions] == [("old", 7), ("new", 1)]
    with pytest.raises(SinkDelayedError):
        old.release(8, control_rows({"a": 3.0}))


NESTED = {
    "device": "string",
    "limit": "struct<hi: double, at: array<struct<x: bigint>>>",
    "tags": "map<string, struct<n: bigint>>",
}


def test_a_table_of_structs_and_maps_is_the_same_at_a_node_that_starts_again_without_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "SNAPSHOT_EVERY", 2)
    full: dict[str, Any] = {
        "limit": {"hi": 1.5, "at": [{"x": 1}, None, {"x": None}]},
        "tags": {"p": {"n": 1}, "q": None},
    }
    hollow: dict[str, Any] = {"limit": {"hi": None, "at": None}, "tags": {}}
    nothing: dict[str, Any] = {"limit": None, "tags": None}
    published: list[dict[str, dict[str, Any] | None]] = [
        {"a": full, "b": hollow, "d": full},
        {"a": hollow, "d": None},
        {"b": nothing, "c": full},
    ]
    table = {"a": hollow, "b": nothing, "c": full, "d": nothing}
    source, out = MemorySource([[("a",), ("b",)]]), MemorySink()
    pipeline = Pipeline("cold-chain")
    limits = pipeline.control("limits", schema=NESTED, key="device")
    readings = pipeline.source("readings", memory(source), schema={"device": "string"})
    readings.join_control(limits, on="device").sink("out", memory(out))
    with running_hub(tmp_path / "hub") as address:
        config = RunConfig(state=tmp_path / "state", node="n1", available_now=True, hub=address)
        sink = publisher(address, schema=Schema.of(NESTED))
        for batch, changes in enumerate(published, 1):
            rows = [
                {"device": key, **(row or nothing), OP: DELETE if row is None else UPSERT}
                for key, row in changes.items()
            ]
            sink.release(batch, pl.DataFrame(rows, schema={**Schema.of(NESTED).polars, OP: pl.String()}))
        assert any(version.snapshot for version in HubClient(address).control_page("cold-chain", "limits").versions)
        run(edge_plan(pipeline), {}, config)
        source.append(0, [("c",), ("d",)])
        run(edge_plan(pipeline), {}, config)
    source.append(0, [(key,) for key in table])
    run(edge_plan(pipeline), {}, replace(config, hub=None))
    # The rows of the first epoch came before the table.
    assert out.rows()[2:].to_dicts() == [{"device": key, **table[key]} for key in ("c", "d", *table)]


# The center on the edge's engine.


def center(source: MemorySource, address: HubAddress) -> p.Plan:
    pipeline = Pipeline("cold-chain")
    rows = pipeline.source("means", memory(source), schema={"device": "string", "threshold": "double"})
    options = {"pipeline": "cold-chain", "control": "limits", "keys": list(KEYS)}
    rows.sink("limits_to_edges", ConnectorSpec("control", options, address.at()))
    return pipeline.plan()


def versions(address: HubAddress) -> list[tuple[str, int]]:
    page = HubClient(address).control_page("cold-chain", "limits")
    return [(version.owner, version.batch) for version in page.versions]


def test_the_center_is_the_same_publisher_after_a_restart_and_another_with_another_state_directory(tmp_path):
    with running_hub(tmp_path / "hub") as address:
        source = MemorySource([[("a", 1.0)]])
        for state, value in (("one", 2.0), ("one", 3.0), ("two", 4.0)):
            run(center(source, address), {}, RunConfig(state=tmp_path / state, node="center", bounded=True))
            source.append(0, [("a", value)])
        owners = [owner for owner, _ in versions(address)]
        assert [owners.index(owner) for owner in owners] == [0, 0, 2]
        assert [batch for _, batch in versions(address)] == [1, 2, 1]
        # Released again at the start: nothing new.
        before = versions(address)
        run(center(MemorySource([[]]), address), {}, RunConfig(state=tmp_path / "three", node="center", bounded=True))
        assert versions(address) == before
        with pytest.raises(FencedError, match="newer publisher"):
            run(center(source, address), {}, RunConfig(state=tmp_path / "one", node="center", bounded=True))


def test_a_center_from_an_older_copy_of_its_state_publishes_nothing_by_default(tmp_path):
    with running_hub(tmp_path / "hub") as address:
        source = MemorySource([[("a", 1.0)]])

        def go(state: str, **more: Any) -> None:
            run(center(source, address), {}, RunConfig(state=tmp_path / state, node="center", bounded=True, **more))

        go("state")
        shutil.copytree(tmp_path / "state", tmp_path / "older")
        source.append(0, [("b", 2.0)])
        go("state")
        source.append(0, [("c", 3.0)])
        with pytest.raises(
            SinkError, match="published up to epoch 2, and was started from state that ends with epoch 1"
        ):
            go("older")
        assert [batch for _, batch in versions(address)] == [1, 2]
        shutil.rmtree(tmp_path / "older")
        go("state")
        shutil.copytree(tmp_path / "state", tmp_path / "lost")
        for state, value in (("state", 4.0), ("lost", 5.0)):
            source.append(0, [("d", value)])
            go(state, discard_later_output=state == "lost")
        assert [batch for _, batch in versions(address)] == [1, 2, 3, 4, 4]


def test_a_hub_that_is_away_holds_the_center_until_it_is_back(tmp_path):
    with running_hub(tmp_path / "hub") as address:
        pass
    port = int(address.url.rpartition(":")[2])
    stalls: list[str] = []
    hubs = ExitStack()

    def tick(progress: Progress) -> None:
        if progress.stalled is not None:
            if not stalls:
                hubs.enter_context(running_hub(tmp_path / "hub", port=port))
            stalls.append(progress.stalled)

    with hubs:
        report = run(
            center(MemorySource([[("a", 1.0)]]), address),
            {},
            RunConfig(state=tmp_path / "state", node="center", bounded=True),
            on_progress=tick,
        )
        assert report.outcome == "ended"
        assert "control table limits cannot be published" in stalls[0]
        assert [batch for _, batch in versions(address)] == [1]


def test_a_bounded_run_takes_what_the_hub_has_when_it_starts(tmp_path):
    with running_hub(tmp_path / "hub") as address:
        publisher(address).release(1, control_rows({"a": 1.0}))
        publisher(address).release(2, control_rows({"b": 1.0}))
        out = MemorySink()
        rows = [(number, "a", START + timedelta(seconds=number)) for number in range(5)]
        plan = pipeline_of(MemorySource([rows]), MemorySink(), out)
        report = run(plan, {}, RunConfig(state=tmp_path / "state", node="n1", bounded=True, hub=address))
        assert report.outcome == "ended"
        assert out.rows().height == 5
    store = CheckpointStore(OsDisk(tmp_path / "state"), pipeline="cold-chain", node="n1", read_only=True)
    assert store.cut(store.epochs()[-1]).sources["limits"].partitions["control"].position == 2


CHILD = """
import sys
from pathlib import Path
from tests.edge.test_control_hub import Node
from fordstone.hub.client import publisher as publishing
from fordstone.hub.client.address import HubAddress
node = Node(Path(sys.argv[1]))
node.feed(int(sys.argv[3]))  # what the process before has read must be there
node.run_until(lambda: node.newest() == {"a": 3.0, "b": 2.0}, hub=HubAddress(url=sys.argv[2]))
print("seen")
"""


@pytest.mark.slow
@pytest.mark.parametrize("failpoint", ["control.fetched:2", "control.stored:2"])
def test_a_node_that_is_killed_between_fetching_and_storing_has_the_table_in_the_end(tmp_path, failpoint):
    with running_hub(tmp_path / "hub") as address:
        sink = publisher(address)
        sink.release(1, control_rows({"a": 1.0, "b": 2.0}))
        sink.release(2, control_rows({"a": GONE}))
        sink.release(3, control_rows({"a": 3.0}))
        for fails in (failpoint, ""):
            child = subprocess.run(
                [sys.executable, "-c", CHILD, str(tmp_path / "state"), address.url, "0" if fails else str(TICKS_MAX)],
                env=os.environ | {"FORDSTONE_FAILPOINT": fails},
                cwd=Path(__file__).parents[2],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert child.returncode == (-signal.SIGKILL if fails else 0), child.stderr
        assert child.stdout == "seen\n"
