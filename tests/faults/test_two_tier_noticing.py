"""Deliberate faults of a node, in real processes: what judges the other tests must notice them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.proxy import Trouble, proxied
from tests.faults.two_tier import Fleet

NOTICED = r"lost or wrong|too many|only up to epoch|already has epoch|disagree"


def test_a_node_that_forgets_what_the_hub_has_not_taken_is_noticed(tmp_path: Path) -> None:
    with Fleet(tmp_path, "north", seed=61) as fleet:
        fleet.hub()
        fleet.feeds["north"].write(60)
        mutant = "node_drops_entries_before_the_answer"
        node = fleet.node("north", mutant=mutant, failpoint="outbox.before-commit:2")
        assert fleet.feed_until_killed(node).killed
        with pytest.raises(AssertionError, match=NOTICED):
            fleet.finish()


def test_a_node_that_takes_silence_for_yes_is_noticed(tmp_path: Path) -> None:
    cut = Trouble(what="cut_request", where=r"^POST .*/epochs/")
    with Fleet(tmp_path, "north", seed=62) as fleet, proxied(fleet.port, cut) as proxy:
        fleet.hub()
        fleet.feeds["north"].write(60)
        node = fleet.node("north", mutant="sender_takes_silence_for_yes", url=proxy.url, live=False)
        assert node.ended().report["progress"]["outbox_epochs"] == 0
        assert cut.happened == 1
        with pytest.raises(AssertionError, match=NOTICED):
            fleet.finish()
