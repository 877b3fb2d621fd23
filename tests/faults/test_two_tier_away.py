"""A hub that is away, full, or does not know who asks: nodes go on, say why nothing is sent, and send it all later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.faults.small_disk import small_disk
from tests.faults.two_tier import Fleet, Part
from tests.simulation.simulator import SimClock

from fordstone.edge.link.outbox import Outbox
from fordstone.edge.link.owner import next_owner
from fordstone.edge.link.sender import Sender
from fordstone.epochs.store import CheckpointStore
from fordstone.hub.server.auth import TokenFile
from fordstone.storage.disk import OsDisk

HOUR_US = 3_600_000_000
TRIES_AN_HOUR_MAX = 260
"""Waits double up to half a minute, and half of each is by chance."""
EPOCHS_AWAY = 12
DISK_SIZE = "12m"
"""A log takes some megabytes before it is folded for the first time."""


def test_an_hour_without_the_hub_costs_some_calls_and_no_row(tmp_path: Path, faults: Callable[..., None]) -> None:
    """The hour is simulated: the real sender over what a real node has left, on a clock that is set forward."""
    with Fleet(tmp_path, "north", seed=41) as fleet:
        feed = fleet.feeds["north"]
        feed.write(120)
        node = fleet.node("north")
        fleet.feed_until(node, lambda: fleet.sealed("north") >= EPOCHS_AWAY, "epochs without the hub")
        said = node.until_said("hub not reached", f"127.0.0.1:{fleet.port}")
        assert "WARNING" in said
        assert node.kill().killed
        clock = SimClock()
        disk = OsDisk(tmp_path / "north" / "state")
        store = CheckpointStore(disk, pipeline=fleet.pipeline, node="north")
        directory = f"{fleet.pipeline}/north"
        outbox = Outbox(disk, directory, bytes_max=1 << 30)
        outbox.begin(max(store.epochs()), lambda _: None)
        waiting = outbox.epochs
        assert waiting >= EPOCHS_AWAY - 1
        with fleet.client() as client:
            sender = Sender(
                hub=client,
                outbox=outbox,
                store=store,
                owner=next_owner(disk, directory),
                clock=clock,
                choose=Random(41).randrange,
            )
            tries = 0
            while clock.monotonic_us() < HOUR_US:
                sender.step()
                assert sender.failing
                tries += 1
                clock.now_us += sender.idle_wait_us or 0
            assert tries < TRIES_AN_HOUR_MAX
            assert outbox.epochs == waiting
            hub = fleet.hub()
            clock.now_us += sender.idle_wait_us or 0
            while outbox.epochs:
                assert sender.step() or not outbox.epochs, sender.problem
            assert sender.problem is None
        assert hub.running
        assert fleet.head("north") == outbox.sent
        faults(hours_away=1)
        disk.close()
        fleet.finish()


@pytest.mark.parametrize("kind", ["missing", "wrong", "revoked"])
def test_a_node_without_a_token_that_holds_goes_on_says_so_and_sends_all_with_another(
    kind: str, tmp_path: Path, faults: Callable[..., None]
) -> None:
    with Fleet(tmp_path, "north", seed=42) as fleet:
        file = TokenFile(tmp_path / "hub" / "data")
        fleet.token = file.add("admin", role="admin", node=None, pipelines=(), now_us=1)
        secrets = {"good": file.add("north", role="node", node="north", pipelines=(), now_us=1)}
        secrets["revoked"] = file.add("old", role="node", node="north", pipelines=(), now_us=1)
        secrets["wrong"] = secrets["good"][:-2] + ("aa" if not secrets["good"].endswith("aa") else "bb")
        for name, secret in (secrets | {"admin": fleet.token}).items():
            (tmp_path / f"{name}.token").write_text(secret)
        fleet.hub()
        words = {"missing": (), "wrong": ("--token-file", str(tmp_path / "wrong.token"))}.get(
            kind, ("--token-file", str(tmp_path / "revoked.token"))
        )
        fleet.feeds["north"].write(60)
        node = fleet.node("north", *words)
        if kind == "revoked":
            fleet.feed_until(node, lambda: fleet.head("north") > 0, "commit with a token that holds")
            file.revoke("old", now_us=2)
        said = (
            node.until_said("`fordstone hub token add` makes one") if kind != "revoked" else fed_until_said(fleet, node)
        )
        assert "--token-file or FORDSTONE_HUB_TOKEN" in said
        assert not any(secret in node.errors() for secret in secrets.values())
        before = fleet.head("north")
        fleet.feed_until(node, lambda: fleet.sealed("north") > before + 3, "epochs that wait")
        assert fleet.head("north") == before
        assert node.stop().report["progress"]["outbox_epochs"] > 0
        faults(bad_tokens=1)
        good = ("--token-file", str(tmp_path / "good.token"))
        ended = fleet.node("north", *good, live=False).ended()
        assert ended.report["progress"]["outbox_epochs"] == 0
        ended = fleet.center("--token-file", str(tmp_path / "admin.token"), live=False).ended()
        assert ended.report["outcome"] == "ended", ended.errors
        fleet.judge()


def fed_until_said(fleet: Fleet, node: Part) -> str:
    words = "the token old has been revoked"
    fleet.feed_until(node, lambda: words in node.errors(), words)
    return node.until_said(words)


@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_a_hub_whose_disk_is_full_says_so_takes_nothing_half_and_goes_on_when_there_is_room(
    killed: bool, tmp_path: Path, faults: Callable[..., None]
) -> None:
    (tmp_path / "hub").mkdir()
    with small_disk(tmp_path / "hub", "data", size=DISK_SIZE) as disk, Fleet(tmp_path, "north", seed=43) as fleet:
        hub = fleet.hub(inside=disk.inside)
        fleet.feeds["north"].write(120)
        node, center = fleet.node("north"), fleet.center()
        fleet.feed_until(node, lambda: fleet.head("north") >= 2, "commits")

        def refused() -> bool:
            disk.fill()
            return "hub not reached" in node.errors()

        fleet.feed_until(node, refused, "refusal of a full hub")
        said = node.until_said("hub not reached")
        assert "its disk is full. Free space there" in said or "it is full. Free space" in said, said
        before = fleet.sealed("north")
        fleet.feed_until(node, lambda: fleet.sealed("north") > before + 3, "epochs without the hub")
        assert node.running, node.errors()
        assert center.running, center.errors()
        faults(full_disks=1)
        if killed:
            hub.kill()
            faults(hub_kills=1)
        disk.make_room()
        if killed:
            fleet.hub(inside=disk.inside)
        fleet.finish_live(center, node)
