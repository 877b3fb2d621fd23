"""A node whose epoch cannot be taken: the center goes on without it, and with it again when the operator says how (rule 25)."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.fake_hub import PIPELINE, Epoch
from tests.edge.bad_node import BAD, Story, commit_junk, fleet
from tests.edge.declared import Outputs, center_plan, epoch, rows
from tests.edge.hub_nodes import Node
from tests.edge.runs import TICKS_MAX
from tests.hub.running import running_hub

from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.errors import NodeQuarantinedError
from fordstone.hub.client.client import HubClient
from fordstone.protocol.progress import NotRead, Progress
from fordstone.runtime.health import PipelineWatch


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_bad_epoch_stops_its_node_alone_and_the_node_goes_on_after_a_skip(
    tmp_path: Path, bad: str, reason: str
) -> None:
    out = Outputs()
    with fleet(tmp_path) as nodes:
        nodes.commit(bad)
        story = Story(nodes, out, reason, ticks_max=TICKS_MAX)
        plan = center_plan(out, place=nodes.center.at())
        config: dict[str, Any] = {"state": tmp_path / "state", "node": "center"}
        run(plan, {}, RunConfig(interval="20ms", **config), on_progress=story.steer)
        story.check()
        run(plan, {}, RunConfig(bounded=True, **config))
        story.check()
    assert out.found()["y", 30] == [12]


def test_rows_before_a_bad_epoch_in_one_read_are_taken(tmp_path: Path) -> None:
    out = Outputs()
    with running_hub(tmp_path / "hub") as hub:
        client = HubClient(hub)
        Node(client, "n").commit(*(epoch(number, ("x", float(number), number)) for number in range(1, 13)))
        commit_junk(client, "n", 13)
        Node(client, "n").commit(Epoch(runs=[pl.concat([rows(("x", 14.0, 14))])]))
        ticks = 0

        def steer(progress: Progress) -> None:
            nonlocal ticks
            ticks += 1
            assert ticks < TICKS_MAX, "it took too long"
            (found,) = client.nodes().nodes
            if found.quarantine is not None and len(out.ids("rows")) == 12 and not progress.stopping:
                signal.raise_signal(signal.SIGTERM)

        run(
            center_plan(out, place=hub.at()),
            {},
            RunConfig(state=tmp_path / "state", interval="20ms"),
            on_progress=steer,
        )
    assert out.ids("rows") == list(range(1, 13))


def test_a_node_whose_time_stands_still_is_put_aside_by_hand(tmp_path: Path) -> None:
    out, ticks, did = Outputs(), 0, list[str]()
    with fleet(tmp_path) as nodes:
        bad = Node(nodes.clients["bad"], "bad")
        bad.commit(epoch(3, ("y", 2.0, 11)))
        nodes.good(epoch(25, ("x", 1.0, 1)))

        def steer(progress: Progress) -> None:
            nonlocal ticks
            ticks += 1
            assert ticks < TICKS_MAX, f"it took too long after {did}"
            if not did and out.ids("rows") == [1, 11]:
                bad.commit(epoch(3, ("y", 2.5, 12)))
                did.append("sent")
            if did == ["sent"] and 12 in out.ids("rows"):
                assert out.found() == {}, "it is in contact, so it is waited for"
                assert progress.held_back is not None
                assert progress.held_back.partition == "bad"
                nodes.operator("hub", "quarantine", "bad")
                did.append("put aside")
            if out.found() and not progress.stopping:
                signal.raise_signal(signal.SIGTERM)

        run(
            center_plan(out, place=nodes.center.at()),
            {},
            RunConfig(state=tmp_path / "state", node="center", interval="20ms"),
            on_progress=steer,
        )
    assert out.found() == {("x", 0): [1], ("y", 0): [11, 12]}


@pytest.mark.parametrize("options", [{"bounded": True}, {"available_now": True}], ids=["bounded", "available now"])
def test_a_run_over_what_is_there_fails_once_and_then_says_which_node_it_did_not_read(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    out = Outputs()
    with fleet(tmp_path) as nodes:
        nodes.commit("no Arrow")
        plan = center_plan(out, place=nodes.center.at())
        config = RunConfig(state=tmp_path / "state", node="center", **options)
        with pytest.raises(NodeQuarantinedError, match="fordstone hub skip bad --pipeline p --until 2"):
            run(plan, {}, config)
        report = run(plan, {}, config)
    assert report.progress.not_read == (NotRead(pipeline=PIPELINE, node="bad", epoch=2),)
    assert out.ids("rows") == [1, 2, 11]


def test_a_center_says_for_how_long_it_cannot_reach_the_hub(tmp_path: Path) -> None:
    out, watch, ticks = Outputs(), PipelineWatch(PIPELINE), 0
    with ExitStack() as stack:
        hub = stack.enter_context(running_hub(tmp_path / "hub"))
        Node(HubClient(hub), "n").commit(epoch(1, ("x", 1.0, 1)))

        def steer(progress: Progress) -> None:
            nonlocal ticks
            ticks += 1
            assert ticks < TICKS_MAX, "it took too long"
            watch.show(progress)
            if out.ids("rows") == [1] and progress.hub_problem is None:
                assert watch.health().hub_away_s is None
                stack.close()
            if watch.health().hub_away_s is not None and not progress.stopping:
                assert watch.health().healthy, "a restart would not bring the hub back"
                signal.raise_signal(signal.SIGTERM)

        run(
            center_plan(out, place=hub.at()),
            {},
            RunConfig(state=tmp_path / "state", interval="20ms"),
            on_progress=steer,
        )
    assert watch.health().hub_away_s is not None
