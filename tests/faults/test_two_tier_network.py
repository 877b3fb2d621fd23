"""A bad network between node, hub and center: requests cut in the middle, answers lost, delayed and repeated. Results stay exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.proxy import Trouble, proxied
from tests.faults.two_tier import Fleet

BLOB, COMMIT, LEASE, HEAD = r"^PUT /v1/blobs/", r"^POST .*/epochs/", r"^POST .*/lease", r"^GET .*/head"
PAGE, PUBLISH, CONTROL, READ = r"^GET .*/streams/", r"^POST .*/control/", r"^GET .*/control/", r"^GET /v1/blobs/"


def between_node_and_hub() -> list[Trouble]:
    return [
        Trouble(what="lose_answer", where=LEASE),
        Trouble(what="cut_answer", where=HEAD),
        Trouble(what="cut_request", where=BLOB, times=2, between=2),
        Trouble(what="cut_answer", where=BLOB, times=1, between=2),
        Trouble(what="cut_request", where=COMMIT, times=2, between=1),
        Trouble(what="lose_answer", where=COMMIT, times=2, between=1),
        Trouble(what="cut_answer", where=COMMIT, times=1, between=1),
        Trouble(what="twice", where=COMMIT, times=3, between=1),
        Trouble(what="twice", where=BLOB, times=3, between=2),
        Trouble(what="delay", where=COMMIT, times=3, between=1),
    ]


def between_hub_and_center() -> list[Trouble]:
    return [
        Trouble(what="cut_answer", where=PAGE, times=2, between=1),
        Trouble(what="cut_request", where=PUBLISH, times=1),
        Trouble(what="lose_answer", where=PUBLISH, times=2, between=1),
        Trouble(what="twice", where=PUBLISH, times=2, between=1),
        Trouble(what="cut_request", where=BLOB, times=1),
        Trouble(what="lose_answer", where=BLOB, times=1, between=1),
        Trouble(what="cut_answer", where=READ, times=2, between=2),
        Trouble(what="refuse", where=READ, times=2, between=2),
        Trouble(what="delay", where=PAGE, times=3, between=1),
    ]


def test_a_line_that_cuts_loses_delays_and_repeats_changes_no_result(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    with (
        Fleet(tmp_path, "north", seed=7) as fleet,
        proxied(fleet.port, *between_node_and_hub()) as below,
        proxied(fleet.port, *between_hub_and_center()) as above,
    ):
        # Readers are not told where blobs lie, so that every one comes over the line.
        fleet.hub("--no-blobs-direct")
        fleet.feeds["north"].write(120)
        node = fleet.node("north", url=below.url)
        center = fleet.center(url=above.url)

        def all_of_it() -> bool:
            return all(trouble.happened == trouble.times for trouble in (*below.troubles, *above.troubles))

        fleet.feed_until(center, all_of_it, "trouble of every kind")
        assert node.running, node.errors()
        fleet.finish_live(center, node)
        for proxy in (below, above):
            faults(**{f"requests_{what}": count for what, count in proxy.happened().items()})


@pytest.mark.parametrize("share", [0.0, 0.99])
def test_a_commit_whose_answer_never_comes_is_looked_for_and_not_sent_again(share: float, tmp_path: Path) -> None:
    lost = Trouble(what="cut_answer", where=COMMIT, share=share)
    with Fleet(tmp_path, "north", seed=8) as fleet, proxied(fleet.port, lost) as proxy:
        fleet.hub()
        fleet.feeds["north"].write(60)
        ended = fleet.node("north", url=proxy.url, live=False).ended()
        assert ended.report["progress"]["outbox_epochs"] == 0
        assert "hub not reached" in ended.errors
        commits = [one.path for one in proxy.commits()]
        assert len(commits) == len(set(commits)), "a commit that the hub had was sent again"
        assert lost.happened == 1
        fleet.finish()
