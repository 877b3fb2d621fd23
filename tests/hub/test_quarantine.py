"""Nodes in quarantine at the hub: set by a center, released and skipped by the operator, and shown."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import urllib3
from click.testing import CliRunner, Result
from tests.hub.running import now_us, running_hub
from tests.hub.sending import Node, entry

from fordstone.cli.main import cli
from fordstone.errors import HubRefusedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import NodeInfo, QuarantineRequest, SkippedEpochs, SkipRequest
from fordstone.hub.server.auth import TokenFile, Tokens


@pytest.fixture
def node(node: Node) -> Node:
    """Has epochs 1 to 9, of one row each."""
    node.put("a")
    node.commit(*(entry(epoch, "a") for epoch in range(1, 10)))
    return node


def bad(epoch: int, by: str = "center") -> QuarantineRequest:
    return QuarantineRequest(epoch=epoch, reason=f"epoch {epoch} is not Arrow IPC", by=by)


def only(client: HubClient) -> NodeInfo:
    (found,) = client.nodes().nodes
    return found


def test_a_node_is_in_quarantine_until_it_is_released_and_each_change_is_one_event(node, client, caplog):
    caplog.set_level(logging.WARNING, "fordstone.hub.store.quarantine")
    assert only(client).quarantine is None
    change = client.quarantine("p", "n", bad(5))
    assert change.changed
    assert only(client).quarantine == change.quarantine
    assert (change.quarantine.epoch, change.quarantine.by, change.quarantine.reason) == (
        5,
        "center",
        "epoch 5 is not Arrow IPC",
    )
    assert not client.quarantine("p", "n", bad(5)).changed, "it was reported again"
    assert not client.quarantine("p", "n", bad(7)).changed, "an earlier epoch counts"
    assert client.quarantine("p", "n", bad(3)).quarantine.epoch == 3
    released = client.release("p", "n")
    assert (released.changed, released.quarantine) == (True, None)
    assert not client.release("p", "n").changed
    assert only(client).quarantine is None
    assert [record.msg.partition(" pipeline=")[0] for record in caplog.records] == [
        "node in quarantine",
        "node in quarantine",
        "node released",
    ]


def test_skipped_epochs_are_kept_with_their_rows_and_the_node_is_released(node, client, caplog):
    caplog.set_level(logging.WARNING, "fordstone.hub.store.quarantine")
    client.quarantine("p", "n", bad(5))
    skipped = client.skip("p", "n", SkipRequest(until=7))
    assert (skipped.first, skipped.last, skipped.rows) == (5, 7, 3)
    assert (only(client).quarantine, only(client).skips) == (None, (skipped,))
    logged = caplog.records[-1]
    assert logged.msg.partition(" pipeline=")[0] == "epochs skipped"
    assert {name: vars(logged)[name] for name in ("pipeline", "node", "first", "last", "rows")} == {
        "pipeline": "p",
        "node": "n",
        "first": 5,
        "last": 7,
        "rows": 3,
    }
    assert not client.quarantine("p", "n", bad(6)).changed, "a center that reports late does not stop what was skipped"
    client.quarantine("p", "n", bad(8))
    client.skip("p", "n", SkipRequest(until=8))
    (both,) = only(client).skips
    assert (both.first, both.last, both.rows) == (5, 8, 4), "ranges that follow each other are one"


@pytest.mark.parametrize(
    ("quarantined", "until", "reason"),
    [
        (None, 5, "is not in quarantine, and no epoch of it was lost"),
        (5, 10, "has no epoch 10 yet. Skip up to epoch 9 at most"),
        (5, 3, "would stop again if they skipped up to epoch 3. Skip up to epoch 4 at least"),
    ],
)
def test_a_skip_that_would_not_help_is_rejected_with_what_would(node, client, quarantined, until, reason):
    if quarantined is not None:
        client.quarantine("p", "n", bad(quarantined))
    with pytest.raises(HubRefusedError, match=reason):
        client.skip("p", "n", SkipRequest(until=until))
    assert only(client).skips == ()


def test_a_node_that_the_hub_does_not_know_is_an_error(node, client):
    for call in (
        lambda: client.quarantine("p", "other", bad(1)),
        lambda: client.release("other", "n"),
        lambda: client.skip("p", "other", SkipRequest(until=1)),
    ):
        with pytest.raises(HubRefusedError, match="has no pipeline") as refused:
            call()
        assert refused.value.code == "not_found"


def test_a_reason_cannot_control_a_terminal(node, client):
    client.quarantine("p", "n", QuarantineRequest(epoch=1, reason="\x1b[2Jgone\n", by="center"))
    (found,) = client.nodes().nodes
    assert found.quarantine is not None
    assert found.quarantine.reason == " [2Jgone "


def test_quarantine_survives_a_restart_of_the_hub(tmp_path):
    with running_hub(tmp_path / "hub") as address:
        node = Node(HubClient(address))
        node.lease()
        node.put("a")
        node.commit(entry(1, "a"), entry(2, "a"))
        node.client.quarantine("p", "n", bad(1))
        node.client.skip("p", "n", SkipRequest(until=1))
        kept = node.client.quarantine("p", "n", bad(2)).quarantine
    with running_hub(tmp_path / "hub") as address:
        found = only(HubClient(address))
    assert found.quarantine == kept
    assert [(skip.first, skip.last) for skip in found.skips] == [(1, 1)]


ROLES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "node": ({"node": "n"}, set()),
    "center": ({}, {"quarantine"}),
    "center of another pipeline": ({"pipelines": ("other",)}, set()),
    "admin": ({}, {"quarantine", "release", "skip"}),
}


@pytest.mark.parametrize("who", ROLES)
def test_a_center_may_put_a_node_aside_and_only_an_admin_may_let_it_in_again(tmp_path: Path, who: str) -> None:
    file = TokenFile(tmp_path / "hub")
    (tmp_path / "hub").mkdir()
    options, allowed = ROLES[who]
    role: Any = who.split(maxsplit=1)[0]
    token = file.add("tested", role=role, now_us=0, **options)
    admin = file.add("admin-of-test", role="admin", now_us=0)
    with running_hub(tmp_path / "hub", tokens=Tokens(file, clock_s=time.monotonic, clock_us=now_us)) as address:
        node = Node(HubClient(HubAddress(url=address.url, token=admin)))
        node.lease()
        node.put("a")
        node.commit(entry(1, "a"))
        client = HubClient(HubAddress(url=address.url, token=token))
        calls = {
            "quarantine": lambda: client.quarantine("p", "n", bad(1)),
            "release": lambda: client.release("p", "n"),
            "skip": lambda: client.skip("p", "n", SkipRequest(until=1)),
        }
        for name, call in calls.items():
            node.client.quarantine("p", "n", bad(1))
            if name in allowed:
                call()
            else:
                with pytest.raises(HubRefusedError) as refused:
                    call()
                assert refused.value.code == "forbidden", name


def test_metrics_count_the_nodes_in_quarantine(node, client, hub):
    client.quarantine("p", "n", bad(5))
    text = urllib3.request("GET", f"{hub.url}/metrics").data.decode()
    assert "\nfordstone_hub_quarantined_nodes 1.0\n" in text
    assert '\nfordstone_hub_node_quarantine_epoch{node="n",pipeline="p"} 5.0\n' in text


# The command line.


def run(hub: HubAddress, *args: str) -> Result:
    return CliRunner().invoke(cli, [*args, "--hub", hub.url], prog_name="fordstone")


def test_the_operator_quarantines_lists_skips_and_releases(node, client, hub):
    assert "No node is in quarantine" in run(hub, "hub", "quarantine").stdout
    done = run(hub, "hub", "quarantine", "n", "--epoch", "5", "--reason", "sensor swapped")
    assert done.stdout == "n (p) is in quarantine from now on: it is read up to epoch 4.\n"
    assert "was in quarantine already" in run(hub, "hub", "quarantine", "n").stdout
    listed = run(hub, "hub", "quarantine").stdout
    assert "quarantine from epoch 5" in listed
    assert "sensor swapped" in listed
    shown = run(hub, "nodes").stdout
    assert "quarantine" in shown
    assert "not read from epoch 5 on: sensor swapped" in shown
    skipped = run(hub, "hub", "skip", "n", "--until", "6")
    assert skipped.stdout == "readers pass over epochs 5 to 6 of n (p), with 2 rows that the hub has.\n"
    assert "epochs 5 to 6 skipped" in run(hub, "hub", "quarantine").stdout
    run(hub, "hub", "quarantine", "n")
    assert "quarantine from epoch 10" in run(hub, "hub", "quarantine").stdout, "the next one, if none is given"
    assert run(hub, "hub", "release", "n").stdout == "n (p) is released.\n"
    assert run(hub, "hub", "release", "--all").stdout == "no node is in quarantine.\n"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("quarantine", "--epoch", "5"), 2, "name the node"),
        (("quarantine", "other"), 1, "has no node other"),
        (("quarantine", "n", "--pipeline", "q"), 1, "has no pipeline q on node n"),
        (("release",), 2, "name one node, or give --all"),
        (("skip", "n"), 2, "--until"),
        (("skip", "n", "--until", "3"), 1, "nothing to skip"),
    ],
)
def test_mistakes_are_explained(node, hub, args, code, said):
    result = run(hub, "hub", *args)
    assert (result.exit_code, said in result.stderr, "Traceback" in result.output) == (code, True, False), result.stderr


def test_a_node_with_several_pipelines_needs_its_pipeline(node, client, hub):
    other = Node(client, pipeline="q")
    other.lease()
    assert "one of p, q" in run(hub, "hub", "quarantine", "n").stderr
    assert run(hub, "hub", "quarantine", "n", "--pipeline", "q").exit_code == 0
    assert {one.pipeline: one.quarantine is None for one in client.nodes().nodes} == {"p": True, "q": False}


def test_lost_epochs_are_shown_until_they_are_skipped():
    from fordstone.cli.quarantine import describe_reading

    info = NodeInfo(node="n", pipeline="p", head=9, generation=None, seen_us=0, committed_us=None, lost=((3, 5),))
    assert describe_reading(info) == "epochs 3 to 5 lost"
    skip = SkippedEpochs(first=3, last=5, rows=0, at_us=0)
    assert (
        describe_reading(
            NodeInfo(
                node="n",
                pipeline="p",
                head=9,
                generation=None,
                seen_us=0,
                committed_us=None,
                lost=((3, 5),),
                skips=(skip,),
            )
        )
        == ""
    )
