"""A node whose epoch cannot be taken: the center goes on without it, and with it again when the operator says how (rule 25)."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch
from tests.edge.declared import Outputs, center_plan, epoch, rows
from tests.edge.hub_nodes import Node
from tests.edge.runs import TICKS_MAX
from tests.hub.running import now_us, running_hub
from tests.hub.sending import digest_of

from fordstone.cli.main import cli
from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Commit, EpochEntry, NodeInfo, StreamSegment
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.protocol.progress import Progress
from fordstone.state.base import RunRef

JUNK = b"no Arrow at all!"
OTHER_COLUMNS = rows(("y", 4.0, 99)).drop("k")


def commit_junk(client: HubClient, node: str, number: int) -> None:
    """Commit 16 bytes that are no Arrow."""
    ref = RunRef(digest=digest_of(JUNK), size_bytes=len(JUNK), rows=1)
    client.put_blob(ref.digest, JUNK)
    lease = Node(client, node)._lease
    segment = StreamSegment(runs=(ref,), watermark_us=0)
    entry = EpochEntry(epoch=number, streams={STREAM: segment}, created_us=0)
    client.commit(PIPELINE, node, Commit(generation=lease.generation, epochs=(entry,)))


def commit_bad(client: HubClient, node: str, number: int, bad: str) -> None:
    if bad == "no Arrow":
        commit_junk(client, node, number)
    else:
        Node(client, node).commit(Epoch(runs=[OTHER_COLUMNS]))


@pytest.mark.parametrize(("bad", "reason"), [("no Arrow", "is rejected: it "), ("other columns", "has no column 'k'")])
def test_a_bad_epoch_stops_its_node_alone_and_the_node_goes_on_after_a_skip(
    tmp_path: Path, bad: str, reason: str
) -> None:
    file = TokenFile(tmp_path / "hub")
    (tmp_path / "hub").mkdir()
    tokens = {name: file.add(name, role="node", node=name, now_us=0) for name in ("good", "bad")}
    tokens |= {"center": file.add("the-center", role="center", now_us=0)}
    tokens |= {"admin": file.add("the-admin", role="admin", now_us=0)}
    out = Outputs()
    with running_hub(tmp_path / "hub", tokens=Tokens(file, clock_s=time.monotonic, clock_us=now_us)) as hub:
        clients = {name: HubClient(HubAddress(url=hub.url, token=token)) for name, token in tokens.items()}
        Node(clients["good"], "good").commit(epoch(5, ("x", 1.0, 1)), epoch(25, ("x", 11.0, 2)))
        Node(clients["bad"], "bad").commit(epoch(3, ("y", 2.0, 11)))
        commit_bad(clients["bad"], "bad", 2, bad)
        Node(clients["bad"], "bad").commit(epoch(40, ("y", 31.0, 12)))

        def operator(*args: str) -> str:
            done = CliRunner().invoke(cli, [*args, "--hub", hub.url, "--token-file", str(tmp_path / "admin")])
            assert done.exit_code == 0, done.output
            return done.output

        (tmp_path / "admin").write_text(tokens["admin"])
        (tmp_path / "admin").chmod(0o600)
        ticks, did = 0, list[str]()

        def info() -> NodeInfo:
            return next(one for one in clients["admin"].nodes().nodes if one.node == "bad")

        def steer(progress: Progress) -> None:
            nonlocal ticks
            ticks += 1
            assert ticks < TICKS_MAX, "it took too long"
            if not did and ("x", 10) in out.found():
                found = info().quarantine
                assert found is not None
                assert (found.epoch, found.by, reason in found.reason) == (2, "center", True)
                assert "not read from epoch 2 on" in operator("nodes")
                assert out.ids("rows") == [1, 2, 11], "what the node sent before is read"
                operator("hub", "release", "bad")
                did.append("released")
            if did == ["released"] and info().quarantine is not None:
                Node(clients["good"], "good").commit(epoch(30, ("x", 26.0, 3)))
                did.append("again")
            if did == ["released", "again"] and 3 in out.ids("rows"):
                operator("hub", "skip", "bad", "--until", "2")
                did.append("skipped")
            if did[-1:] == ["skipped"] and 12 in out.ids("rows") and not progress.stopping:
                signal.raise_signal(signal.SIGTERM)

        plan = center_plan(out, place=HubAddress(url=hub.url, token=tokens["center"]).at())
        config: dict[str, Any] = {"state": tmp_path / "state", "node": "center"}
        run(plan, {}, RunConfig(interval="20ms", **config), on_progress=steer)
        assert did == ["released", "again", "skipped"]
        assert [(skip.first, skip.last, skip.rows) for skip in info().skips] == [(2, 2, 1)]
        run(plan, {}, RunConfig(bounded=True, **config))
    assert out.ids("rows") == [1, 2, 3, 11, 12]
    assert out.ids("late") == []
    assert out.found() == {("x", 0): [1], ("y", 0): [11], ("x", 10): [2], ("x", 20): [3], ("y", 30): [12]}


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
