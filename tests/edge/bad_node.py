"""A good and a bad node at a hub, and an operator: what happens at a center on any engine (rule 25)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import urllib3
from click.testing import CliRunner
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch
from tests.edge.declared import epoch, rows
from tests.edge.hub_nodes import Node
from tests.hub.running import now_us, running_hub
from tests.hub.sending import digest_of

from fordstone.cli.main import cli
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Commit, EpochEntry, NodeInfo, StreamSegment
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.protocol.progress import NotRead, Progress
from fordstone.runtime.health import PipelineWatch
from fordstone.state.base import RunRef

JUNK = b"no Arrow at all!"
OTHER_COLUMNS = rows(("y", 4.0, 99)).drop("k")
BAD = [("no Arrow", "is rejected: it "), ("other columns", "has no column 'k'")]
"""What the bad node sends, and a part of the reason for its quarantine."""


class Found(Protocol):
    """What came out at the center."""

    def found(self) -> dict[tuple[str | None, int], list[int]]: ...

    def ids(self, name: str) -> list[int]: ...


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


class Fleet:
    """The hub, its tokens, and the nodes `good` and `bad`, whose epoch 2 is bad."""

    def __init__(self, folder: Path, url: str, tokens: dict[str, str]) -> None:
        self._folder = folder
        self.url = url
        self.center = HubAddress(url=url, token=tokens["center"])
        self.clients = {name: HubClient(HubAddress(url=url, token=token)) for name, token in tokens.items()}
        self._admin_token = tokens["admin"]
        (folder / "admin").write_text(tokens["admin"])
        (folder / "admin").chmod(0o600)

    def commit(self, bad: str) -> None:
        """The good node sends two epochs, and the bad one three."""
        self.good(epoch(5, ("x", 1.0, 1)), epoch(25, ("x", 11.0, 2)))
        Node(self.clients["bad"], "bad").commit(epoch(3, ("y", 2.0, 11)))
        commit_bad(self.clients["bad"], "bad", 2, bad)
        Node(self.clients["bad"], "bad").commit(epoch(40, ("y", 31.0, 12)))

    def good(self, *epochs: Epoch) -> None:
        Node(self.clients["good"], "good").commit(*epochs)

    def operator(self, *args: str) -> str:
        """Run a command of the operator; return what it prints."""
        done = CliRunner().invoke(cli, [*args, "--hub", self.url, "--token-file", str(self._folder / "admin")])
        assert done.exit_code == 0, done.output
        return done.output

    def info(self) -> NodeInfo:
        """What the hub says of the bad node."""
        return next(one for one in self.clients["admin"].nodes().nodes if one.node == "bad")

    def metrics(self) -> str:
        head = {"Authorization": f"Bearer {self._admin_token}"}
        return urllib3.request("GET", f"{self.url}/metrics", headers=head, retries=False).data.decode()


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    file = TokenFile(folder / "hub")
    (folder / "hub").mkdir()
    tokens = {name: file.add(name, role="node", node=name, now_us=0) for name in ("good", "bad")}
    tokens |= {"center": file.add("the-center", role="center", now_us=0)}
    tokens |= {"admin": file.add("the-admin", role="admin", now_us=0)}
    with running_hub(folder / "hub", tokens=Tokens(file, clock_s=time.monotonic, clock_us=now_us)) as hub:
        yield Fleet(folder, hub.url, tokens)


class Story:
    """What the operator does while a center runs: releases the bad node in vain, then skips its epoch; and then stops the center."""

    WANTED = ("released", "again", "skipped")

    def __init__(self, fleet: Fleet, out: Found, reason: str, *, ticks_max: int) -> None:
        self._fleet = fleet
        self._out = out
        self._reason = reason
        self._ticks_left = ticks_max
        self.watch = PipelineWatch(PIPELINE)
        self.did: list[str] = []

    def steer(self, progress: Progress) -> None:
        """Called with each progress of the center."""
        self._ticks_left -= 1
        assert self._ticks_left, f"it took too long after {self.did}"
        fleet, out, did = self._fleet, self._out, self.did
        self.watch.show(progress)
        if not did and ("x", 10) in out.found() and progress.not_read:
            assert progress.not_read == (NotRead(pipeline=PIPELINE, node="bad", epoch=2),)
            assert (self.watch.health().quarantined_nodes, self.watch.health().ready) == (1, True)
            found = fleet.info().quarantine
            assert found is not None
            assert (found.epoch, found.by, self._reason in found.reason) == (2, "center", True)
            assert "not read from epoch 2 on" in fleet.operator("nodes")
            assert "fordstone_hub_quarantined_nodes 1" in fleet.metrics()
            assert out.ids("rows") == [1, 2, 11], "what the node sent before is read"
            fleet.operator("hub", "release", "bad")
            did.append("released")
        if did == ["released"] and fleet.info().quarantine is not None:
            fleet.good(epoch(30, ("x", 26.0, 3)))
            did.append("again")
        if did == ["released", "again"] and 3 in out.ids("rows"):
            fleet.operator("hub", "skip", "bad", "--until", "2")
            did.append("skipped")
        if did[-1:] == ["skipped"] and 12 in out.ids("rows") and not progress.stopping:
            signal.raise_signal(signal.SIGTERM)

    def check(self) -> None:
        """Check what has come out: every good row, once."""
        assert tuple(self.did) == self.WANTED
        assert self.watch.health().quarantined_nodes == 0
        assert [(skip.first, skip.last, skip.rows) for skip in self._fleet.info().skips] == [(2, 2, 1)]
        assert self._out.ids("rows") == [1, 2, 3, 11, 12]
        assert self._out.ids("late") == []
        closed = {at: ids for at, ids in self._out.found().items() if at != ("y", 30)}
        assert closed == {("x", 0): [1], ("y", 0): [11], ("x", 10): [2], ("x", 20): [3]}
