"""Kill -9 of the center, on the engine of the edge, on its way to a commit; with two nodes, and then of everything at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.faults.oracle import expect
from tests.faults.two_tier import Fleet, Part

FIRST_ROWS = 60
KILLS = (
    ("run.renamed", 3),
    ("cut.synced", 2),
    ("manifest.renamed", 2),
    ("sink.before-release", 2),
    ("sink.released", 3),
    ("sink.before-release", 6),
    ("retention.before", 2),
    ("retention.removed-manifest", 1),
)
"""Three sinks are let out an epoch: rows, windows and the control table."""
ROUNDS = 2


def test_a_center_killed_at_a_failpoint_loses_and_doubles_nothing(tmp_path: Path, faults: Callable[..., None]) -> None:
    with Fleet(tmp_path, "north", "south", seed=3) as fleet:
        fleet.hub()
        nodes = [begun(fleet, node) for node in fleet.feeds]
        for life, (name, count) in enumerate(KILLS):
            hits = tmp_path / f"hits-{life}"
            ended = fleet.feed_until_killed(fleet.center(failpoint=f"{name}:{count}@{hits}"))
            assert ended.killed, ended.errors
            assert hits.read_text().splitlines() == [name] * count
            faults(center_kills=1)
        center = fleet.center()
        fleet.feed_until(center, lambda: all(fleet.steered(node) for node in fleet.feeds), "steering of both nodes")
        fleet.finish_live(center, *nodes)
        assert fleet.limits() == newest_windows(fleet)


def test_everything_killed_at_once_again_and_again_loses_and_doubles_nothing(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    rng = Random(5)
    with Fleet(tmp_path, "north", "south", seed=5) as fleet:
        hub = fleet.hub()
        nodes = {node: begun(fleet, node) for node in fleet.feeds}
        center = fleet.center()
        for _ in range(ROUNDS):
            reached = fleet.sealed("center") + rng.randrange(1, 4)
            fleet.feed_until(center, lambda reached=reached: fleet.sealed("center") >= reached, "epoch of the center")  # type: ignore[misc]
            parts = [hub, center, *nodes.values()]
            rng.shuffle(parts)
            for part in parts:
                assert part.kill().killed
            faults(node_kills=2, hub_kills=1, center_kills=1)
            # Nodes and center start before the hub is there.
            nodes, center = {node: fleet.node(node) for node in fleet.feeds}, fleet.center()
            hub = fleet.hub()
        fleet.finish_live(center, *nodes.values())
        assert fleet.limits() == newest_windows(fleet)


def test_a_control_table_ends_with_the_newest_window_however_many_close_together(tmp_path: Path) -> None:
    with Fleet(tmp_path, "north", seed=6) as fleet:
        fleet.hub()
        fleet.feeds["north"].write(400)
        fleet.finish()
        assert fleet.limits() == newest_windows(fleet)


def begun(fleet: Fleet, node: str) -> Part:
    """A node that the hub knows: one that came later would find windows closed."""
    fleet.feeds[node].write(FIRST_ROWS)
    part = fleet.node(node)
    part.until(lambda: fleet.head(node) > 0, "epoch at the hub")
    return part


def newest_windows(fleet: Fleet) -> dict[int, int]:
    """What the control table says in the end: how many rows the last window of each key has."""
    found: dict[int, tuple[int, int]] = {}
    for (k, start), (n, _) in expect(fleet.written).windows.items():
        found[k] = max(found.get(k, (start, n)), (start, n))
    return {k: n for k, (_, n) in found.items()}
