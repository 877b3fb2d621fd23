"""A node whose epoch cannot be taken: the center goes on without it, and with it again when the operator says how (rule 25)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.fake_hub import Epoch
from tests.edge.bad_node import BAD, Story, commit_junk, fleet
from tests.edge.declared import Outputs, center_plan, epoch, rows
from tests.edge.hub_nodes import Node
from tests.edge.runs import TICKS_MAX
from tests.hub.running import running_hub

from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.hub.client.client import HubClient
from fordstone.protocol.progress import Progress


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
