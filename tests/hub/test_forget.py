"""Nodes and streams that a hub forgets: what is removed, what is refused, and what readers and the node itself see of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner, Result
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch
from tests.edge import crossing_runs, hub_nodes
from tests.edge.crossing_runs import ids_at, plan_over, rows, run_plan, source_of
from tests.edge.test_hub_run import sent
from tests.hub.running import now_us, running_hub
from tests.hub.sending import Node, checkpoint, commit_of, entry, run, select
from tests.hub.test_retention import Place
from tests.waiting import until

from fordstone.cli.main import cli
from fordstone.connectors import memory
from fordstone.connectors.base import Idleness
from fordstone.connectors.hub import HubOptions, HubSource
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import HubRefusedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import (
    ConsumerPosition,
    EpochRange,
    EpochsRequest,
    ForgetRequest,
    Forgotten,
    Health,
    NodePosition,
)
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.hub.store import forget
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol.forget import SILENT_US_MIN

KEEP, DISCARD = ForgetRequest(), ForgetRequest(discard_unread=True)
SCHEMA = Schema.of({"device": "string", "n": "bigint"})


class Clock:
    """The hub's clock, which a test turns forward."""

    def __init__(self) -> None:
        self.ahead_us = 0

    def __call__(self) -> int:
        return now_us() + self.ahead_us

    def pass_silence(self) -> None:
        self.ahead_us += SILENT_US_MIN


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(tmp_path: Path, clock: Clock) -> Iterator[HubAddress]:
    with running_hub(tmp_path / "hub", clock_us=clock) as address:
        yield address


@pytest.fixture
def node(node: Node) -> Node:
    """Has epochs 1 to 9, of one row each."""
    node.put("a", "manifest 9", "state")
    node.commit(*(entry(epoch, "a") for epoch in range(1, 10)), checkpoint=checkpoint(9, "state"))
    return node


def chain_at(client: HubClient, epoch: int) -> str:
    wanted = EpochsRequest(nodes={"n": EpochRange(until=epoch)})
    return client.stream_epochs("p", "s", wanted).nodes["n"].end.chain


def pass_epochs(client: HubClient, epoch: int, consumer: str = "center") -> NodePosition:
    at = NodePosition(epoch, chain_at(client, epoch))
    assert not client.consumer("p", consumer, ConsumerPosition(streams={"s": {"n": at}})).refused
    return at


def refused(client: HubClient, request: ForgetRequest, *, node: str = "n") -> HubRefusedError:
    with pytest.raises(HubRefusedError) as raised:
        client.forget_node("p", node, request)
    return raised.value


# What may be forgotten.


def test_a_node_that_was_read_to_its_end_is_forgotten_and_leaves_no_list(node, client, clock, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "fordstone.hub.store.forget")
    pass_epochs(client, 9)
    clock.pass_silence()
    assert client.forget_node("p", "n", KEEP) == Forgotten(retired=True)
    assert (client.nodes().nodes, client.streams().streams, client.epochs().epochs) == ((), (), ())
    assert client.checkpoint("p", "n") is None
    (event,) = caplog.records
    assert event.msg.startswith("node forgotten")
    assert [getattr(event, name) for name in ("pipeline", "node", "head", "epochs", "rows")] == ["p", "n", 9, 0, 0]
    assert client.forget_node("p", "n", KEEP) == Forgotten(changed=False), "the same again changes nothing"


def test_a_node_that_is_running_is_refused_until_it_has_stopped_or_is_silent(node, client, clock):
    pass_epochs(client, 9)
    error = refused(client, DISCARD)
    assert error.code == "held"
    assert "Stop it there first" in str(error)
    client.report_health("n", "p", Health(state="stopped", sent_us=1))
    assert client.forget_node("p", "n", KEEP).changed


@pytest.mark.parametrize(("passed", "epochs"), [({}, 9), ({"a": 9, "b": 4}, 5), ({"a": 9}, 0)])
def test_unread_epochs_are_discarded_only_on_request_and_counted_exactly(node, client, clock, passed, epochs):
    for consumer, epoch in passed.items():
        pass_epochs(client, epoch, consumer)
    clock.pass_silence()
    if epochs:
        error = refused(client, KEEP)
        assert error.code == "unread"
        assert f"has {epochs} epochs with {epochs} rows" in str(error)
        assert "--discard-unread" in str(error)
        assert client.nodes().nodes, "nothing was removed"
    assert client.forget_node("p", "n", DISCARD) == Forgotten(epochs=epochs, rows=epochs, retired=True)


def test_a_consumer_that_is_forgotten_holds_nothing(node, client, clock):
    pass_epochs(client, 9, "center")
    pass_epochs(client, 2, "trial")
    clock.pass_silence()
    assert "has 7 epochs" in str(refused(client, KEEP))
    client.forget_consumer("p", "trial")
    assert client.forget_node("p", "n", KEEP).epochs == 0


def test_a_node_without_epochs_is_always_forgotten_and_may_come_back(client):
    junk = Node(client, "junk")
    junk.lease()
    client.report_health("junk", "p", Health(state="running", sent_us=1))
    assert client.forget_node("p", "junk", KEEP) == Forgotten(retired=False)
    assert client.nodes().nodes == ()
    junk.lease()
    junk.put("a")
    junk.commit(entry(1, "a"))


def test_what_the_hub_does_not_know_is_an_error(node, client):
    assert refused(client, KEEP, node="other").code == "not_found"
    with pytest.raises(HubRefusedError, match="has no stream other"):
        client.forget_stream("p", "other", KEEP)


# Streams.


def test_a_stream_that_nodes_have_left_is_forgotten_and_their_other_streams_stay(client):
    nodes = [Node(client, name) for name in ("n", "m")]
    for one in nodes:
        one.lease()
        one.put("a")
        one.commit(entry(1, "a", stream="old"), entry(2, "a", stream="old"))
    with pytest.raises(HubRefusedError, match="still written to by m, n") as raised:
        client.forget_stream("p", "old", DISCARD)
    assert raised.value.code == "held"
    for one in nodes:
        one.commit(entry(3, "a"))
    with pytest.raises(HubRefusedError, match="has 4 epochs with 4 rows"):
        client.forget_stream("p", "old", KEEP)
    assert client.forget_stream("p", "old", DISCARD) == Forgotten(epochs=4, rows=4)
    assert client.forget_stream("p", "old", DISCARD) == Forgotten(changed=False)
    assert [one.stream for one in client.streams().streams] == ["s"]
    assert [one.head for one in client.nodes().nodes] == [3, 3]


def test_a_stream_that_comes_back_has_the_new_epochs_only_and_a_reader_goes_on_with_them(node, client):
    at = pass_epochs(client, 7)
    node.commit(entry(10, "a", stream="other"))
    assert client.forget_stream("p", "s", DISCARD).epochs == 2
    planned = EpochsRequest(nodes={"n": EpochRange(after=7, until=9, seen=at)})
    found = client.stream_epochs("p", "s", planned).nodes["n"]
    assert (found.epochs, found.end.epoch, found.stopped) == ((), 9, None), "a read that was planned before"
    node.commit(entry(11, "a"))
    found = client.stream_epochs("p", "s", EpochsRequest(nodes={"n": EpochRange(after=9, seen=found.end)})).nodes["n"]
    assert [one.epoch for one in found.epochs] == [11]


# What becomes of the rest.


def test_blobs_rows_and_quotas_are_given_back(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.put("a", "b", "manifest 2", "state")
    commit = [entry(1, "a", stream="s"), entry(2, "b", stream="t")]
    place.commit(commit_of(*commit, checkpoint=checkpoint(2, "state")))
    place.commit(commit_of(entry(1, "a", stream="s")), node="m")
    place.time_us += SILENT_US_MIN
    place.log.write(lambda tx: forget.forget_node(tx, "p", "n", DISCARD)).result(10)
    counts = place.log.read(lambda log: (log.count_nodes_of("p"), log.count_pipelines_of("n"), log.node_bytes("n")))
    assert counts == (1, 0, (0, 0))
    assert [one.stream for one in place.log.read(lambda log: log.streams())] == ["s"], "no other node has the other one"
    place.time_us += 2 * 3_600_000_000
    place.all_rounds()
    assert place.there("a", "b", "manifest 2", "state") == ["a"], "the other node has it, too"
    for table in ("entries", "segments"):
        assert select(place.path, f"SELECT count(*) FROM {table}") == [(1,)]
    assert select(place.path, "SELECT count(*) FROM discarded") == [(0,)]
    counted, real = place.named()
    assert counted == real
    place.log.close()


def test_what_was_forgotten_is_removed_in_pieces_and_ids_are_not_used_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.put("a")
    place.commit(commit_of(*(entry(epoch, "a") for epoch in range(1, 21))))
    place.time_us += SILENT_US_MIN
    place.log.write(lambda tx: forget.forget_node(tx, "p", "n", DISCARD)).result(10)
    place.commit(commit_of(entry(1, "a")), node="m")
    removed = [place.log.write(lambda tx: tx.log.remove_discarded(limit=7)).result(10) for _ in range(7)]
    assert (sum(removed), max(removed), removed[-1]) == (40, 7, 0)
    assert place.epochs() == [1]
    assert select(place.path, "SELECT refs FROM blobs WHERE digest = ?", run("a").digest) == [(1,)]
    place.log.close()


# The node itself.


def test_a_node_that_comes_back_is_rejected_and_never_starts_again_at_one(node, client, clock):
    pass_epochs(client, 9)
    clock.pass_silence()
    client.forget_node("p", "n", KEEP)
    for call in (
        lambda: client.head("p", "n"),
        lambda: node.lease(local=2),
        lambda: node.lease(holder="another-disk"),
        lambda: node.lease(holder="another-disk", take_over=True),
    ):
        with pytest.raises(HubRefusedError, match=r"(?s)forgotten at .* with its epochs up to 9 .*--node") as raised:
            call()
        assert (raised.value.code, raised.value.status) == ("forgotten", 410)
    with pytest.raises(HubRefusedError) as raised:
        node.commit(entry(10, "a"))
    assert raised.value.code == "not_found", "it asks for a lease then, and gets the reason"
    assert client.nodes().nodes == ()


def test_a_run_of_a_forgotten_node_ends_with_what_to_do_and_sends_nothing(tmp_path: Path, hub, client, clock):
    source = source_of(20)
    plan = plan_over(memory(source))
    run_plan(plan, hub, tmp_path / "a", bounded=False, on_progress=sent(20))
    clock.pass_silence()
    assert client.forget_node(crossing_runs.PIPELINE, "node", DISCARD).rows == 20
    source.append(0, rows(5, 20))
    for _ in range(2):
        with pytest.raises(HubRefusedError, match=r"(?s)was forgotten at .*--node.*Nothing more is sent") as raised:
            run_plan(plan, hub, tmp_path / "a")
        assert raised.value.code == "forgotten"
    assert ids_at(hub) == []
    assert client.nodes().nodes == ()


# Readers.


def frame(*numbers: int) -> pl.DataFrame:
    return pl.DataFrame({"device": ["d"] * len(numbers), "n": list(numbers)}, schema=SCHEMA.polars)


def reading(client: HubClient) -> HubSource:
    options = HubOptions(pipeline=PIPELINE, stream=STREAM)
    return HubSource(client, options, SCHEMA, bounded=False, clock_us=now_us, chance=lambda: 0.0)


def read_until(source: HubSource, position: int, end: int) -> list[int]:
    """Read node `a` from a position to the end of it; the numbers that came."""
    reader, found, at = source.open(PartitionId("a"), Position(position), with_positions=False), list[int](), position

    def come() -> bool:
        nonlocal at
        chunk = reader.read(1_000)
        if chunk is not None:
            found.extend(chunk.frame["n"])
            at = int(chunk.position)
        return at >= end

    until(come, f"epoch {end}", seconds_max=20)
    return found


def test_a_center_that_has_read_all_takes_a_forgotten_node_as_ended_and_goes_on(client, clock):
    node, other = hub_nodes.Node(client, "a"), hub_nodes.Node(client, "b")
    node.commit(Epoch(runs=[frame(1)]), Epoch(runs=[frame(2)]))
    other.commit(Epoch(runs=[frame(3)]))
    source = reading(client)
    assert read_until(source, 0, 2) == [1, 2]
    cut = PartitionCut(position=2, identity=source.identity(PartitionId("a"), Position(2)))
    source.ack({"a": cut})
    until(lambda: client.streams().streams[0].consumers["center"] == 1, "the position", seconds_max=20)
    clock.pass_silence()
    client.forget_node(PIPELINE, "a", KEEP)
    until(
        lambda: ("a", 3) in [(one.node, one.epoch) for one in source._following().all()],
        "news of the closing epoch",
        seconds_max=20,
    )
    assert source.idleness(PartitionId("a"), Position(2)) is Idleness.EXPECTED
    assert read_until(source, 2, 3) == []
    assert source.idleness(PartitionId("a"), Position(3)) is Idleness.FINISHED, "time does not wait for it"
    source.close()
    again = reading(client)
    again.restore({"a": cut})
    assert set(again.partitions()) == {"a", "b"}
    assert read_until(again, 2, 3) == []
    assert again.idleness(PartitionId("a"), Position(3)) is Idleness.FINISHED
    again.close()


def test_a_center_passes_over_what_was_discarded_also_in_a_read_that_it_had_planned(client, clock):
    node = hub_nodes.Node(client, "a")
    node.commit(*(Epoch(runs=[frame(number)]) for number in range(1, 6)))
    source = reading(client)
    assert read_until(source, 0, 5) == [1, 2, 3, 4, 5]
    mark = source.identity(PartitionId("a"), Position(5))
    source.close()
    clock.pass_silence()
    assert client.forget_node(PIPELINE, "a", DISCARD).epochs == 5
    task = reading(client)
    task.restore({"a": PartitionCut(position=2, identity=mark)})
    assert task.read_planned("a", 2, 1_000, until=4).end == 4
    assert task.read_planned("a", 4, 1_000, until=6).end == 6, "the closing epoch"
    task.close()


def test_a_new_reader_does_not_see_a_node_that_nobody_has_read(node, client, clock):
    clock.pass_silence()
    client.forget_node("p", "n", DISCARD)
    assert client.stream_nodes("p", "s").nodes == ()
    client.consumer("p", "center", ConsumerPosition(streams={"s": {}}))
    assert client.stream_nodes("p", "s").nodes == ()


def test_a_position_of_another_log_is_still_noticed(node, client, clock):
    pass_epochs(client, 9)
    clock.pass_silence()
    client.forget_node("p", "n", KEEP)
    for at, code in ((NodePosition(11, "a" * 64), "beyond"), (NodePosition(10, "a" * 64), "differs")):
        wanted = EpochsRequest(nodes={"n": EpochRange(after=at.epoch, seen=at)})
        stopped = client.stream_epochs("p", "s", wanted).nodes["n"].stopped
        assert stopped is not None
        assert stopped.code == code
        assert client.consumer("p", "center", ConsumerPosition(streams={"s": {"n": at}})).refused


# The command line, and who may use it.


def command(hub: HubAddress, *args: str) -> Result:
    return CliRunner().invoke(cli, ["hub", "forget", *args, "--hub", hub.url], prog_name="fordstone")


def test_the_operator_forgets_a_consumer_a_node_and_a_stream(node, client, hub, clock):
    pass_epochs(client, 4)
    clock.pass_silence()
    found = command(hub, "node", "n")
    assert found.exit_code == 1
    assert "has 5 epochs with 5 rows" in found.stderr
    assert command(hub, "consumer", "center", "--pipeline", "p").exit_code == 0
    assert "has 9 epochs with 9 rows" in command(hub, "stream", "s").stderr
    found = command(hub, "stream", "s", "--discard-unread")
    assert found.stdout == "stream s (p) is forgotten; 9 epochs with 9 rows discarded unread.\n"
    found = command(hub, "node", "n")
    assert found.stdout == "n (p) is forgotten; nothing was discarded unread. The name is not used again.\n"
    assert command(hub, "node", "n", "--pipeline", "p").stdout == "n (p) was forgotten before; nothing has changed.\n"
    assert "has no node n" in command(hub, "node", "n").stderr
    assert "has no stream s" in command(hub, "stream", "s").stderr


ROLES: dict[str, tuple[dict[str, Any], bool]] = {
    "admin": ({}, True),
    "center": ({}, False),
    "node": ({"node": "n"}, False),
}


@pytest.mark.parametrize("who", ROLES)
def test_only_an_admin_forgets_nodes_and_streams(tmp_path: Path, who: str) -> None:
    (tmp_path / "data").mkdir()
    file = TokenFile(tmp_path / "data")
    options, allowed = ROLES[who]
    role: Any = who
    token, admin = file.add("tested", role=role, now_us=0, **options), file.add("one", role="admin", now_us=0)
    with running_hub(tmp_path / "data", tokens=Tokens(file, clock_s=time.monotonic, clock_us=now_us)) as address:
        Node(HubClient(HubAddress(url=address.url, token=admin))).lease()
        client = HubClient(HubAddress(url=address.url, token=token))
        calls = (lambda: client.forget_node("p", "n", KEEP), lambda: client.forget_stream("p", "s", KEEP))
        for call, done in zip(calls, ("changed", "not_found"), strict=True):
            if allowed and done == "changed":
                assert call().changed
                continue
            with pytest.raises(HubRefusedError) as raised:
                call()
            assert raised.value.code == (done if allowed else "forbidden")
