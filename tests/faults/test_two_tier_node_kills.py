"""Kill -9 of a node at every failpoint of the way to the hub and back: nothing is lost and nothing is doubled at the center."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.two_tier import Fleet

from fordstone.checkpoint.failpoint import CONTROL_FAILPOINTS, OUTBOX_FAILPOINTS

FIRST_ROWS = 120
COUNTS = {
    "outbox.before-add": (1, 4),
    "outbox.added": (1, 5),
    "outbox.blob-sent": (2, 9),
    "outbox.before-commit": (1, 4),
    "outbox.committed": (1, 3),
    "outbox.marked": (1, 4),
    "outbox.trimmed": (1, 3),
    "control.fetched": (1, 2),
    "control.stored": (1, 2),
}
"""At which hit each process of a chain is killed: the next one starts on what the one before has left."""


@pytest.mark.parametrize("name", COUNTS)
def test_a_node_killed_at_a_failpoint_loses_and_doubles_nothing(
    name: str, tmp_path: Path, faults: Callable[..., None]
) -> None:
    with Fleet(tmp_path, "north", seed=len(name)) as fleet:
        fleet.hub()
        fleet.feeds["north"].write(FIRST_ROWS)
        center = fleet.center() if name in CONTROL_FAILPOINTS else None
        for life, count in enumerate(COUNTS[name]):
            hits = tmp_path / f"hits-{life}"
            ended = fleet.feed_until_killed(fleet.node("north", failpoint=f"{name}:{count}@{hits}"))
            assert ended.killed, ended.errors
            assert hits.read_text().splitlines() == [name] * count
            faults(node_kills=1)
        if center is None:
            fleet.finish()
            return
        node = fleet.node("north")
        fleet.feed_until(node, lambda: fleet.steered("north") > 0, "row that the center's table was joined with")
        fleet.finish_live(center, node)


def test_every_failpoint_is_covered() -> None:
    assert set(COUNTS) == {*OUTBOX_FAILPOINTS, *CONTROL_FAILPOINTS}
