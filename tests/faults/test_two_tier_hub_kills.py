"""Kill -9 of the hub at every failpoint of its commits and of its letting go, while a node and a center go on: results stay exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import urllib3
from tests.faults.two_tier import Fleet

from fordstone.storage.failpoint import HUB_FAILPOINTS

LARGE_ROWS = 6000
LATER_S = 7200
"""So much later nobody waits any more for a commit that would name a blob."""
CHAINS = {
    "while blobs come": (
        ("hub.blob-written", 1),
        ("hub.blob-renamed", 2),
        ("hub.blob-written", 6),
        ("hub.blob-renamed", 5),
    ),
    "while it commits": (
        ("hub.before-commit", 1),
        ("hub.committed", 1),
        ("hub.before-answer", 1),
        ("hub.before-commit", 4),
        ("hub.committed", 3),
        ("hub.before-answer", 4),
    ),
}
"""At which hit each hub of a chain is killed."""
LETTING_GO = ("hub.gc-removed", "hub.gc-forgotten", "hub.gc-before")


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_hub_killed_at_a_failpoint_loses_and_doubles_nothing(
    chain: tuple[tuple[str, int], ...], tmp_path: Path, faults: Callable[..., None]
) -> None:
    with Fleet(tmp_path, "north", seed=len(chain)) as fleet:
        # Enough for blobs that lie in files; later ones are so small that they are kept in the log.
        fleet.feeds["north"].write(LARGE_ROWS)
        node, center = fleet.node("north"), fleet.center()
        for life, (name, count) in enumerate(chain):
            hits = tmp_path / f"hits-{life}"
            ended = fleet.feed_until_killed(fleet.hub(failpoint=f"{name}:{count}@{hits}"))
            assert ended.killed, ended.errors
            assert hits.read_text().splitlines() == [name] * count
            faults(hub_kills=1)
        fleet.hub()
        assert list((tmp_path / "hub" / "data" / "blobs").glob("??/*")), "no blob was large enough for a file"
        assert "hub not reached" in node.errors()
        fleet.finish_live(center, node)


def test_a_hub_killed_while_it_lets_go_keeps_what_is_needed(tmp_path: Path, faults: Callable[..., None]) -> None:
    with Fleet(tmp_path, "north", seed=4) as fleet:
        fleet.feeds["north"].write(LARGE_ROWS)
        node, center = fleet.node("north"), fleet.center()
        for life, name in enumerate(LETTING_GO):
            hub = fleet.hub(ahead_s=LATER_S * life)
            before = passed(fleet)
            fleet.feed_until(center, lambda before=before: passed(fleet) > before, "epoch that is not needed any more")  # type: ignore[misc]
            hub.kill()
            hits = tmp_path / f"hits-{name}"
            ended = fleet.hub(failpoint=f"{name}@{hits}", ahead_s=LATER_S * (life + 1)).ended()
            assert ended.killed, ended.errors
            assert hits.read_text().splitlines() == [name]
            faults(hub_kills=2)
        fleet.hub(ahead_s=LATER_S * len(LETTING_GO))
        assert min(epoch.epoch for epoch in fleet.crossed()["plain"]) > 1
        fleet.finish_live(center, node)


def passed(fleet: Fleet) -> int:
    """Up to which epoch of each stream the center needs nothing of the node any more."""
    answer = urllib3.request("GET", f"{fleet.url}/v1/pipelines/{fleet.pipeline}/consumers/center")
    streams = answer.json().get("streams", {}) if answer.status == 200 else {}
    return min((epochs.get("north", 0) for epochs in streams.values()), default=0)


def test_every_failpoint_is_covered() -> None:
    assert {*LETTING_GO, *(name for chain in CHAINS.values() for name, _ in chain)} == set(HUB_FAILPOINTS)
