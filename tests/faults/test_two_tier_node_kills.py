"""Kill -9 of a node at every failpoint of the way to the hub and back: nothing is lost and nothing is doubled at the center."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.two_tier import Fleet

from fordstone.storage.failpoint import CONTROL_FAILPOINTS, OUTBOX_FAILPOINTS

FIRST_ROWS = 120
Chain = tuple[tuple[str, int], ...]
CHAINS = {
    "while epochs come into the outbox": (
        ("outbox.before-add", 1),
        ("outbox.added", 1),
        ("outbox.before-add", 4),
        ("outbox.added", 5),
    ),
    "while they are sent": (
        ("outbox.blob-sent", 2),
        ("outbox.before-commit", 1),
        ("outbox.committed", 1),
        ("outbox.blob-sent", 9),
        ("outbox.before-commit", 4),
        ("outbox.committed", 3),
    ),
    "while they are let go": (
        ("outbox.marked", 1),
        ("outbox.trimmed", 1),
        ("outbox.marked", 4),
        ("outbox.trimmed", 3),
    ),
}
STEERED = (("control.fetched", 1), ("control.stored", 1), ("control.fetched", 2), ("control.stored", 2))
"""At which hit each process of a chain is killed: the next one starts on what the one before has left."""


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_node_killed_at_a_failpoint_loses_and_doubles_nothing(
    chain: Chain, tmp_path: Path, faults: Callable[..., None]
) -> None:
    with Fleet(tmp_path, "north", seed=len(chain)) as fleet:
        fleet.hub()
        kill_at_each(fleet, chain, faults)
        fleet.finish()


def test_a_node_killed_while_a_control_table_comes_loses_and_doubles_nothing(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    with Fleet(tmp_path, "north", seed=9) as fleet:
        fleet.hub()
        center = fleet.center()
        kill_at_each(fleet, STEERED, faults)
        node = fleet.node("north")
        fleet.feed_until(node, lambda: fleet.steered("north") > 0, "row that the center's table was joined with")
        fleet.finish_live(center, node)


def kill_at_each(fleet: Fleet, chain: Chain, faults: Callable[..., None]) -> None:
    fleet.feeds["north"].write(FIRST_ROWS)
    for life, (name, count) in enumerate(chain):
        hits = fleet.folder / f"hits-{life}"
        ended = fleet.feed_until_killed(fleet.node("north", failpoint=f"{name}:{count}@{hits}"))
        assert ended.killed, ended.errors
        assert hits.read_text().splitlines() == [name] * count
        faults(node_kills=1)


def test_every_failpoint_is_covered() -> None:
    names = {name for chain in (*CHAINS.values(), STEERED) for name, _ in chain}
    assert names == {*OUTBOX_FAILPOINTS, *CONTROL_FAILPOINTS}
