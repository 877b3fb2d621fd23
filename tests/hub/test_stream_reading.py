"""The two requests of a reader: how far the nodes of a stream have come, and their next epochs after compared positions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hub.sending import commit_of, entry, run

from fordstone.hub.messages import (
    NUMBER_MAX,
    ConsumerPosition,
    EpochEntry,
    EpochRange,
    EpochsRequest,
    Generation,
    LeaseRequest,
    NodeEpochs,
    NodePosition,
    QuarantineRequest,
    SkipRequest,
    StreamEpochs,
    StreamSegment,
)
from fordstone.hub.store import commits, quarantine
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.protocol.chain import chained

START = NodePosition()


class Log:
    """A hub's log with nodes that commit to it."""

    def __init__(self, path: Path) -> None:
        self.log = HubLog(SqliteStore(path / "log.sqlite"), clock_us=lambda: 5)
        self.generations: dict[str, Generation] = {}

    def lease(self, node: str, **more: Any) -> None:
        asked = LeaseRequest(holder=node, local=1, start=f"{node}{len(self.generations)}", **more)
        lease = self.log.write(lambda tx: commits.lease(tx, "p", node, asked)).result(10)
        self.generations[node] = lease.generation

    def commit(self, node: str, *epochs: EpochEntry, **more: Any) -> None:
        if node not in self.generations:
            self.lease(node)
        for one in epochs:
            for ref in (ref for segment in one.streams.values() for ref in segment.runs):
                self.log.record_blob(ref.digest, ref.size_bytes)
        body = commit_of(*epochs, generation=self.generations[node], **more)
        digests = [one.digest() for one in body.epochs]
        self.log.write(lambda tx: commits.commit(tx, "p", node, body, digests)).result(10)

    def passed(self, node: str, epoch: int) -> None:
        """Let a consumer pass epochs, and retention remove them."""
        position = ConsumerPosition(streams={"s": {node: self.position(node, epoch)}})
        self.log.write(lambda tx: tx.log.save_position("p", "c", position, now_us=5)).result(10)
        of = self.log.read(lambda log: log.segments("p", "s", node))
        assert of is not None
        self.log.write(lambda tx: tx.log.remove_segments(of.stream_id, of.node_id, epoch, limit=999)).result(10)

    def position(self, node: str, epoch: int) -> NodePosition:
        facts = self.log.read(lambda log: log.chain_facts("p", node, epoch))
        assert facts.chain is not None
        return NodePosition(epoch, facts.chain)

    def ask(self, nodes: dict[str, EpochRange], **more: Any) -> StreamEpochs:
        request = EpochsRequest(nodes=nodes, **more)
        return self.log.read(lambda log: commits.stream_epochs(log, "p", "s", request))

    def one(self, after: int, seen: NodePosition = START, *, listed: bool = True, **more: Any) -> NodeEpochs:
        return self.ask({"n": EpochRange(after=after, seen=seen, **more)}, listed=listed).nodes["n"]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path)
    yield made
    made.log.close()


def with_rows(epoch: int, rows: int) -> EpochEntry:
    return EpochEntry(epoch=epoch, streams={"s": StreamSegment(runs=(run(f"{epoch}", rows=rows),))}, created_us=1)


def epochs(found: NodeEpochs) -> list[int]:
    return [one.epoch for one in found.epochs]


def code(found: NodeEpochs) -> str | None:
    return None if found.stopped is None else found.stopped.code


# Bounds of a response.


def test_a_range_gives_the_epochs_after_a_position_up_to_another(log: Log) -> None:
    log.commit("n", *(entry(epoch) for epoch in range(1, 7)))
    assert epochs(log.one(0)) == [1, 2, 3, 4, 5, 6]
    assert epochs(log.one(2, log.position("n", 2), until=4)) == [3, 4]
    assert log.one(2, until=4).end == log.position("n", 4)
    assert log.one(6) == NodeEpochs()
    assert log.ask({"unknown": EpochRange()}).nodes == {"unknown": NodeEpochs()}


@pytest.mark.parametrize(
    ("rows_max", "epochs_max", "last"),
    [(1, 100, 1), (4, 100, 1), (7, 100, 1), (8, 100, 2), (NUMBER_MAX, 3, 3), (NUMBER_MAX, 100, 5)],
)
def test_rows_and_epochs_per_node_are_bounded_and_a_plan_ends_where_the_list_does(
    log: Log, rows_max: int, epochs_max: int, last: int
) -> None:
    log.commit("n", *(with_rows(epoch, 4) for epoch in range(1, 6)))
    asked = {"n": EpochRange()}
    listed = log.ask(asked, rows_max=rows_max, epochs_max=epochs_max).nodes["n"]
    assert epochs(listed) == list(range(1, last + 1))
    planned = log.ask(asked, rows_max=rows_max, epochs_max=epochs_max, listed=False).nodes["n"]
    assert planned == msgspec.structs.replace(listed, epochs=())
    assert (planned.first, planned.end) == (1, log.position("n", last))


@pytest.mark.parametrize("listed", [True, False])
def test_nodes_that_have_no_room_are_left_out_and_the_first_is_always_there(
    log: Log, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("a", "b", "c"):
        log.commit(node, *(entry(epoch) for epoch in range(1, 4)))
    monkeypatch.setattr(commits, "PAGE_ENTRIES_MAX", 4)
    monkeypatch.setattr(commits, "PLANNED_EPOCHS_MAX", 4)
    found = log.ask({node: EpochRange() for node in ("c", "a", "b")}, listed=listed).nodes
    assert {node: one.end.epoch for node, one in found.items()} == {"c": 3, "a": 1}


def test_the_bytes_of_a_response_are_bounded_and_a_single_epoch_may_have_more(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.commit("n", *(with_rows(epoch, 1) for epoch in range(1, 9)))
    monkeypatch.setattr(commits, "PAGE_BYTES_MAX", 250)
    assert epochs(log.one(0)) == [1, 2]
    monkeypatch.setattr(commits, "PAGE_BYTES_MAX", 1)
    assert epochs(log.one(0)) == [1]


def test_epochs_without_the_stream_are_no_gap(log: Log) -> None:
    log.commit("n", entry(1), entry(2, stream="t"), msgspec.structs.replace(entry(3), streams={}), entry(4))
    assert epochs(log.one(1, log.position("n", 1))) == [4]
    assert epochs(log.one(0)) == [1, 4]


# Positions that are compared.


def test_a_reader_of_this_log_goes_on_and_of_another_one_stops(log: Log) -> None:
    log.commit("n", *(entry(epoch) for epoch in range(1, 5)))
    other = NodePosition(3, chained("", "x"))
    for listed in (True, False):
        assert code(log.one(3, log.position("n", 3), listed=listed)) is None
        assert code(log.one(3, other, listed=listed)) == "differs"
        assert code(log.one(5, NodePosition(5, other.chain), listed=listed)) == "beyond"
        assert code(log.one(1, other, listed=listed)) == "differs", "what was seen counts, wherever reading goes on"
    assert code(log.ask({"unknown": EpochRange(after=1, seen=other)}).nodes["unknown"]) == "beyond"


def test_one_node_that_is_stopped_does_not_stop_the_others(log: Log) -> None:
    log.commit("n", entry(1))
    log.commit("m", entry(1))
    bad = EpochRange(after=1, seen=NodePosition(1, chained("", "x")))
    found = log.ask({"n": bad, "m": EpochRange()}).nodes
    assert (code(found["n"]), epochs(found["m"])) == ("differs", [1])


# Epochs that are not there any more.


def test_removed_epochs_stop_a_reader_that_has_not_read_them_unless_it_wants_the_earliest(log: Log) -> None:
    log.commit("n", *(entry(epoch) for epoch in range(1, 6)))
    at = {epoch: log.position("n", epoch) for epoch in (1, 3)}
    log.passed("n", 3)
    assert epochs(log.one(3, at[3])) == [4, 5]
    for after, seen in ((1, at[1]), (0, START)):
        found = log.one(after, seen)
        assert found.stopped is not None
        assert (found.stopped.code, f"epochs {after + 1} to 3" in found.stopped.reason) == ("gone", True)
        assert epochs(log.one(after, seen, earliest=True)) == [4, 5]
    log.passed("n", 5)
    assert code(log.one(0)) == "gone"
    for listed in (True, False):
        passed = log.one(0, earliest=True, listed=listed)
        assert (passed.epochs, passed.end) == ((), log.position("n", 5)), (
            "nothing is there, and nothing is missing after it"
        )
    assert log.one(0, earliest=True, until=4) == NodeEpochs()


def test_a_position_whose_entry_is_gone_is_compared_with_the_next_one(log: Log) -> None:
    log.commit("n", *(entry(epoch) for epoch in range(1, 9)))
    at = {epoch: log.position("n", epoch) for epoch in (3, 5)}
    log.passed("n", 5)
    log.log.write(lambda tx: tx.log._db.execute("DELETE FROM entries WHERE epoch <= 5")).result(10)
    assert epochs(log.one(5, at[5])) == [6, 7, 8]
    assert code(log.one(5, NodePosition(5, chained("", "x")))) == "differs"
    assert code(log.one(5, at[3])) == "unknown", "it could be any log"
    assert epochs(log.one(5, at[3], earliest=True)) == [6, 7, 8]


# A log that was restored from a backup.


def restored(log: Log) -> str:
    former = log.log.read(lambda read: read.log_id())
    log.log.write(lambda tx: tx.log.mark_restored(now_us=tx.now_us)).result(10)
    return former


def test_after_a_restore_readers_wait_for_the_node_and_go_on_where_they_were(log: Log) -> None:
    entries = [entry(epoch, f"{epoch}") for epoch in range(1, 9)]
    log.commit("n", *entries[:2])
    chains = ["", *(log.position("n", epoch).chain for epoch in (1, 2))]
    for one in entries[2:]:
        chains.append(chained(chains[-1], one.digest()))
    reader = NodePosition(6, chains[6])
    assert code(log.one(6, reader)) == "beyond", "nobody said that the log was restored"
    former = restored(log)
    waiting = log.one(6, reader)
    assert waiting == NodeEpochs(awaited=waiting.awaited), "the node may bring it back"
    assert "ends at epoch 2, and epoch 6 was read" in waiting.awaited
    log.lease("n", head=7, chain=chains[7], log_id=former)
    log.commit("n", *entries[4:], after=chains[4])
    assert epochs(log.one(6, reader)) == [7, 8], "it has read the epochs that the hub has lost"
    assert epochs(log.one(4, NodePosition(4, chains[4]))) == [5, 6, 7, 8], "it stands at the end of the gap"
    found = log.one(2, NodePosition(2, chains[2]))
    assert found.stopped is not None
    assert (found.stopped.code, "epochs 3 to 4 of this node were lost" in found.stopped.reason) == ("lost", True)
    assert epochs(log.one(0)) == [1, 2], "what is before the gap is read first"
    assert log.one(0, listed=False).end == NodePosition(2, chains[2])
    assert code(log.one(3, NodePosition(3, chains[3]))) == "lost"
    assert code(log.one(2, NodePosition(2, chains[2]), earliest=True)) == "lost", "a skip is the operator's to say"


def test_a_reader_of_the_log_as_it_was_before_a_restore_lists_it_again(log: Log) -> None:
    log.commit("n", entry(1))
    log.commit("n", entry(2))
    former = restored(log)

    def nodes(after: int, log_id: str) -> tuple[int, ...]:
        page = log.log.read(lambda read: commits.stream_nodes(read, "p", "s", after=after, limit=9, log_id=log_id))
        return tuple(one.epoch for one in page.nodes)

    own = log.log.read(lambda read: read.log_id())
    assert nodes(2, own) == ()
    assert nodes(2, former) == nodes(99, former) == (2,)


def test_a_position_takes_little_room() -> None:
    wanted = {
        f"node-{number:04}": EpochRange(after=86_400, seen=NodePosition(86_400, "a" * 64)) for number in range(1_000)
    }
    assert len(msgspec.json.encode(EpochsRequest(nodes=wanted))) < 256 << 10


# Nodes in quarantine, and epochs that are skipped (rule 25).


def quarantined(log: Log, epoch: int) -> None:
    asked = QuarantineRequest(epoch=epoch, reason="bad", by="center")
    log.log.write(lambda tx: quarantine.quarantine(tx, "p", "n", asked)).result(10)


def skipped(log: Log, until: int) -> None:
    log.log.write(lambda tx: quarantine.skip(tx, "p", "n", SkipRequest(until=until))).result(10)


def newest(log: Log, after: int = 0) -> list[tuple[int, int]]:
    page = log.log.read(lambda read: commits.stream_nodes(read, "p", "s", after=after, limit=10, log_id=None))
    return [(one.epoch, one.quarantined) for one in page.nodes]


@pytest.mark.parametrize("listed", [True, False])
def test_a_node_in_quarantine_is_read_up_to_the_epoch_before_unless_more_was_planned(log: Log, listed: bool) -> None:
    log.commit("n", *(entry(epoch) for epoch in range(1, 7)))
    quarantined(log, 4)
    assert log.one(0, listed=listed).end == log.position("n", 3)
    assert log.one(3, log.position("n", 3), listed=listed) == NodeEpochs()
    assert log.one(5, log.position("n", 5), listed=listed) == NodeEpochs(), "it was read beyond it before"
    assert log.one(0, listed=listed, until=6).end == log.position("n", 6), "planned before it was in quarantine"


@pytest.mark.parametrize("listed", [True, False])
def test_what_a_node_in_quarantine_loses_stops_no_reader_until_it_would_read_it(log: Log, listed: bool) -> None:
    log.commit("n", *(entry(epoch) for epoch in range(1, 7)))
    at = log.position("n", 3)
    quarantined(log, 4)
    log.passed("n", 5)  # as --keep-unread does
    assert log.one(3, at, listed=listed) == NodeEpochs()
    assert log.one(3, at, listed=listed, until=3) == NodeEpochs()
    log.log.write(lambda tx: quarantine.release(tx, "p", "n")).result(10)
    assert code(log.one(3, at, listed=listed)) == "gone"


@pytest.mark.parametrize("listed", [True, False])
def test_a_node_may_be_set_aside_where_epochs_were_lost_with_a_restored_log(log: Log, listed: bool) -> None:
    entries = [entry(epoch, f"{epoch}") for epoch in range(1, 6)]
    log.commit("n", *entries[:2])
    at = log.position("n", 2)
    chains = [at.chain]
    for one in entries[2:]:
        chains.append(chained(chains[-1], one.digest()))
    former = restored(log)
    log.lease("n", head=5, chain=chains[-1], log_id=former)
    log.commit("n", entries[4], after=chains[2])
    assert code(log.one(2, at, listed=listed)) == "lost"
    quarantined(log, 3)
    assert log.one(2, at, listed=listed) == NodeEpochs()
    skipped(log, 4)
    assert log.one(2, at, listed=listed).first == 5


@pytest.mark.parametrize("listed", [True, False])
def test_skipped_epochs_are_passed_over_and_counted(log: Log, listed: bool) -> None:
    log.commit("n", *(entry(epoch) for epoch in range(1, 8)))
    quarantined(log, 4)
    skipped(log, 5)
    before = log.one(0, listed=listed)
    assert (before.end, before.skipped) == (log.position("n", 3), 0)
    following = log.one(3, log.position("n", 3), listed=listed)
    assert (following.first, following.end, following.skipped) == (6, log.position("n", 7), 2)
    assert log.one(4, log.position("n", 4), until=7, listed=listed).skipped == 1
    quarantined(log, 6)
    skipped(log, 7)
    passed = log.one(3, log.position("n", 3), listed=listed)
    assert (passed.first, passed.end, passed.skipped) == (0, log.position("n", 7), 4), "nothing follows yet"
    cut = log.one(3, log.position("n", 3), until=5, listed=listed)
    assert (cut.first, cut.end) == (0, log.position("n", 5)), "a plan from before the skip ends where it did"


def test_epochs_without_the_stream_before_skipped_ones_do_not_hold_a_reader_back(log: Log) -> None:
    log.commit("n", entry(1), entry(2, stream="t"), entry(3), entry(4))
    quarantined(log, 3)
    assert newest(log) == [(1, 3)]
    skipped(log, 3)
    assert epochs(log.one(1, log.position("n", 1))) == [4]


def test_a_quarantine_and_its_end_are_news_for_readers(log: Log) -> None:
    log.commit("n", *(entry(epoch) for epoch in range(1, 5)))
    seq = log.log.read(lambda read: read.newest_seq())
    assert newest(log, seq) == []
    quarantined(log, 3)
    assert newest(log, seq) == [(2, 3)]
    quarantined(log, 1)
    assert newest(log, seq) == [(0, 1)], "nothing of it may be read"
    log.log.write(lambda tx: quarantine.release(tx, "p", "n")).result(10)
    assert newest(log, seq + 2) == [(4, 0)]
