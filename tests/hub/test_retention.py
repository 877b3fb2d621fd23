from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.hub.reading import epochs_in
from tests.hub.sending import blob, checkpoint, commit_of, entry, run, select

from fordstone.hub.messages import (
    Checkpoint,
    Commit,
    ConsumerPosition,
    ControlPublish,
    LeaseRequest,
    NodePosition,
    Rejection,
)
from fordstone.hub.store import commits, controls
from fordstone.hub.store import retention as retention_module
from fordstone.hub.store.blobs import BlobLocks, DiskBlobs, Upload
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.log_schema import SEGMENT_LOG_BYTES
from fordstone.hub.store.retention import HOUR_US, Removed, Retention
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.protocol.retention import MARKS
from fordstone.state.base import RunRef

DAY_US = 24 * HOUR_US


class Place:
    """A log and a store with a clock to turn."""

    def __init__(self, path: Path, **keeping: Any) -> None:
        self.path = path / "log.sqlite"
        self.time_us = 0
        self.set_us = 0
        """By how much the clock was set forward."""
        self.hits: list[str] = []
        self.log = HubLog(
            SqliteStore(path / "log.sqlite"),
            clock_us=lambda: self.time_us + self.set_us,
            monotonic_us=lambda: self.time_us,
        )
        self.blobs = DiskBlobs(path / "blobs")
        self.locks = BlobLocks()
        self.retention = Retention(self.log, self.blobs, self.locks, **keeping, failpoints=self)

    def hit(self, name: str) -> None:
        self.hits.append(name)

    def put(self, *texts: str) -> None:
        for text in texts:
            upload = Upload(self.blobs.beside())
            upload.write(blob(text))
            with self.locks.arrival(run(text).digest):
                upload.store(self.blobs, run(text).digest)
                self.log.record_blob(run(text).digest, upload.size_bytes)
            upload.close()
        self.log.write(lambda tx: None).result(10)

    def commit(self, body: Commit, node: str = "n") -> None:
        asked = LeaseRequest(holder="h", local=1, start="s")
        self.log.write(lambda tx: commits.lease(tx, "p", node, asked)).result(10)
        self.log.write(lambda tx: commits.commit(tx, "p", node, body, [one.digest() for one in body.epochs])).result(10)

    def passed(self, consumer: str, **epochs: dict[str, int]) -> None:
        passed = {
            stream: {node: NodePosition(epoch) for node, epoch in nodes.items()} for stream, nodes in epochs.items()
        }
        position = ConsumerPosition(streams=passed)
        self.log.write(lambda tx: tx.log.save_position("p", consumer, position, now_us=tx.now_us)).result(10)

    def publish(self, batch: int, text: str, *, snapshot: bool = False, owner: str = "o") -> None:
        body = ControlPublish(owner=owner, batch=batch, blob=run(text), snapshot=snapshot)
        self.log.write(lambda tx: controls.publish(tx, "p", "c", body)).result(10)

    def epochs(self, stream: str = "s") -> list[int]:
        return [found.epoch for found in epochs_in(self.log, "p", stream)]

    def versions(self) -> list[int]:
        return [version for (version,) in select(self.path, "SELECT version FROM versions ORDER BY 1")]

    def all_rounds(self) -> Counter[str]:
        sums: Counter[str] = Counter()
        while True:
            removed = self.retention.round()
            sums.update(segments=removed.segments, blobs=removed.blobs, versions=removed.versions)
            if removed == Removed():
                return sums

    def there(self, *texts: str) -> list[str]:
        return [text for text in texts if self.blobs.size(run(text).digest) is not None]

    def named(self) -> tuple[Counter[str], Counter[str]]:
        """How often blobs are named: as counted, and as they really are."""
        counted = Counter(dict(select(self.path, "SELECT digest, refs FROM blobs WHERE refs > 0")))
        real = Counter(
            ref.digest
            for (runs,) in select(self.path, "SELECT runs FROM segments")
            for ref in msgspec.json.decode(runs, type=list[RunRef])
        )
        for (content,) in select(self.path, "SELECT content FROM checkpoints"):
            real.update(ref.digest for ref in msgspec.json.decode(content, type=Checkpoint).runs())
        real.update(digest for (digest,) in select(self.path, "SELECT digest FROM versions"))
        return counted, real


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.log.close()


def three(place: Place) -> None:
    place.put("a", "b", "c")
    place.commit(commit_of(entry(1, "a"), entry(2, "b"), entry(3, "c")))


def test_segments_stay_while_no_consumer_is_registered(place: Place) -> None:
    three(place)
    place.time_us = 99 * DAY_US
    assert not place.all_rounds()["segments"]
    assert place.epochs() == [1, 2, 3]
    assert place.there("a", "b", "c") == ["a", "b", "c"]


def test_segments_go_when_the_slowest_consumer_has_passed_them_and_then_their_blobs(place: Place) -> None:
    three(place)
    place.passed("quick", s={"n": 3})
    place.passed("slow", s={"n": 1})
    place.time_us = 2 * HOUR_US
    place.all_rounds()
    assert place.epochs() == [2, 3]
    assert place.there("a", "b", "c") == ["b", "c"]
    place.passed("slow", s={"n": 3})
    place.all_rounds()
    assert place.epochs() == []
    assert place.there("a", "b", "c") == []
    assert place.log.read(lambda log: commits.head(log, "p", "n")).epoch == 3


def test_a_consumer_that_has_just_come_holds_all_and_one_of_another_stream_holds_nothing(place: Place) -> None:
    three(place)
    place.passed("reader", s={"n": 3})
    place.passed("other", t={})
    place.passed("new")
    place.all_rounds()
    assert place.epochs() == [1, 2, 3], "nobody knows yet what the new one will read"
    place.passed("new", t={})
    place.all_rounds()
    assert place.epochs() == []


def test_a_node_that_a_consumer_does_not_name_is_kept(place: Place) -> None:
    three(place)
    place.commit(commit_of(entry(1, "a")), node="m")
    place.passed("reader", s={"n": 3})
    place.all_rounds()
    assert [one.node for one in epochs_in(place.log)] == ["m"]
    place.time_us = 2 * HOUR_US
    place.all_rounds()
    assert place.there("a", "b", "c") == ["a"], "another node's epoch names it"


def test_positions_never_go_back(place: Place) -> None:
    three(place)
    place.passed("reader", s={"n": 2})
    place.passed("reader", s={"n": 1})
    assert place.log.read(lambda log: commits.position(log, "p", "reader")).streams == {"s": {"n": NodePosition(2)}}


def test_a_consumer_that_was_forgotten_holds_nothing(place: Place) -> None:
    three(place)
    place.passed("reader", s={"n": 3})
    place.passed("gone", s={})
    place.log.write(lambda tx: tx.log.remove_consumer("p", "gone")).result(10)
    place.all_rounds()
    assert place.epochs() == []


YEARS_US = 56 * 365 * DAY_US
"""From 1970 to now."""


def waiting(place: Place, span_us: int) -> None:
    """Let time go by, with a round of retention each hour."""
    until_us = place.time_us + span_us
    while place.time_us < until_us:
        place.time_us = min(place.time_us + HOUR_US, until_us)
        place.all_rounds()


def opened_again(place: Place, off_us: int) -> Place:
    """The hub is stopped, and started after a while; its clock says something else then."""
    place.log.close()
    again = Place(place.path.parent, unread_us=DAY_US)
    again.time_us, again.set_us = 0, off_us
    return again


AGES: dict[str, tuple[list[Callable[[Place], Place | None]], list[int]]] = {
    "not a day yet": ([lambda place: waiting(place, 21 * HOUR_US)], [1, 2, 3, 4]),
    "a day": ([lambda place: waiting(place, 23 * HOUR_US)], [4]),
    "it boots in 1970, and its clock is set": (
        [lambda place: setattr(place, "set_us", YEARS_US), lambda place: waiting(place, 5 * HOUR_US)],
        [1, 2, 3, 4],
    ),
    "and a day after that": (
        [lambda place: setattr(place, "set_us", YEARS_US), lambda place: waiting(place, 23 * HOUR_US)],
        [4],
    ),
    "and a day after all that came before": (
        [lambda place: setattr(place, "set_us", YEARS_US), lambda place: waiting(place, 25 * HOUR_US)],
        [],
    ),
    "its clock is set back": (
        [lambda place: setattr(place, "set_us", -YEARS_US), lambda place: waiting(place, 23 * HOUR_US)],
        [4],
    ),
    "it was off for years": (
        [
            lambda place: waiting(place, 20 * HOUR_US),
            lambda place: opened_again(place, YEARS_US),
            lambda place: waiting(place, HOUR_US),
        ],
        [1, 2, 3, 4],
    ),
    "it ran for a day with a break": (
        [
            lambda place: waiting(place, 20 * HOUR_US),
            lambda place: opened_again(place, -YEARS_US),
            lambda place: waiting(place, 3 * HOUR_US),
        ],
        [4],
    ),
}


@pytest.mark.parametrize(("steps", "kept"), AGES.values(), ids=AGES.keys())
def test_unread_segments_go_after_the_hub_has_run_for_their_time_whatever_its_clock_says(
    tmp_path: Path, steps: list[Callable[[Place], Place | None]], kept: list[int]
) -> None:
    place = Place(tmp_path, unread_us=DAY_US)
    three(place)
    place.all_rounds()
    place.time_us = 2 * HOUR_US
    place.commit(commit_of(entry(4)))
    for step in steps:
        place = step(place) or place
    assert place.epochs() == kept
    place.log.close()


def test_unread_segments_stay_for_ever_by_default(place: Place) -> None:
    three(place)
    waiting(place, 3 * DAY_US)
    assert place.epochs() == [1, 2, 3]
    assert select(place.path, "SELECT count(*) FROM marks") == [(0,)]


def test_the_number_of_marks_is_bounded(tmp_path: Path) -> None:
    place = Place(tmp_path, unread_us=DAY_US)
    for _ in range(400):
        place.time_us += DAY_US // (MARKS + 50)
        place.retention.round()
    assert select(place.path, "SELECT count(*) FROM marks")[0][0] <= MARKS + 2
    place.log.close()


def test_a_round_looks_at_all_pairs_of_stream_and_node_a_piece_at_a_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "PAIRS_PIECE", 2)
    monkeypatch.setattr(retention_module, "NODES_PIECE", 2)
    monkeypatch.setattr(retention_module, "ENTRIES_KEPT", 0)
    place.put("a")
    nodes = [f"n{number}" for number in range(5)]
    for node in nodes:
        place.commit(commit_of(entry(1, "a"), entry(2, "a")), node=node)
    place.passed("reader", s={"n4": 2, "n1": 1})
    place.all_rounds()
    left = select(
        place.path, "SELECT node, epoch FROM segments g JOIN nodes n ON n.id = g.node_id ORDER BY node, epoch"
    )
    assert left == [("n0", 1), ("n0", 2), ("n1", 2), ("n2", 1), ("n2", 2), ("n3", 1), ("n3", 2)]


def test_owners_of_control_tables_that_were_superseded_are_forgotten_after_many_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "PUBLISHERS_KEPT", 3)
    place.put("v")
    for owner in "abcdef":
        place.publish(1, "v", owner=owner)
    assert place.retention.round().publishers == 3
    assert select(place.path, "SELECT owner FROM publishers ORDER BY 1") == [("d",), ("e",), ("f",)]
    with pytest.raises(Rejection, match="superseded"):
        place.publish(2, "v", owner="e")
    place.publish(2, "v", owner="f")
    assert place.retention.round().publishers == 0


def test_an_upload_waits_its_grace_time_for_the_commit_that_names_it(place: Place) -> None:
    place.put("a")
    place.time_us = HOUR_US
    place.all_rounds()
    assert place.there("a") == ["a"]
    place.time_us += 1
    assert place.all_rounds()["blobs"] == 1
    assert place.there("a") == []


def test_an_upload_that_came_again_waits_again(place: Place) -> None:
    place.put("a")
    place.time_us = HOUR_US
    place.put("a")
    place.time_us = HOUR_US + 1
    place.all_rounds()
    assert place.there("a") == ["a"]


def test_a_blob_that_arrives_while_it_would_go_stays_and_can_be_named(place: Place) -> None:
    place.put("a")
    place.time_us = 2 * HOUR_US
    with place.locks.arrival(run("a").digest):
        place.all_rounds()
    assert place.there("a") == ["a"]


def test_a_blob_named_by_the_two_newest_checkpoints_stays(place: Place) -> None:
    place.put("x", "y", "manifest 1", "manifest 2", "manifest 3")
    place.commit(commit_of(entry(1), checkpoint=checkpoint(1, "x")))
    place.commit(commit_of(entry(2), checkpoint=checkpoint(2, "x", "y")))
    place.commit(commit_of(entry(3), checkpoint=checkpoint(3, "y")))
    place.time_us = 2 * HOUR_US
    place.all_rounds()
    assert place.there("x", "y", "manifest 1", "manifest 2", "manifest 3") == ["x", "y", "manifest 2", "manifest 3"]


def test_entries_go_far_behind_the_head_and_what_is_sent_again_is_still_known(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "ENTRIES_KEPT", 2)
    place.commit(commit_of(*(entry(epoch) for epoch in range(1, 6))))
    place.passed("reader", s={"n": 9})
    place.all_rounds()
    assert select(place.path, "SELECT epoch FROM entries") == [(4,), (5,)]
    place.commit(commit_of(entry(1), entry(2)))
    assert place.log.read(lambda log: commits.head(log, "p", "n")).epoch == 5


def test_the_epoch_that_a_consumer_stands_at_can_be_compared_however_far_the_head_is(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "ENTRIES_KEPT", 2)
    # Epochs 4 to 6 have no rows for any stream, as those that fill a gap after a take-over.
    without = [msgspec.structs.replace(entry(epoch), streams={}) for epoch in (4, 5, 6)]
    place.commit(commit_of(*(entry(epoch) for epoch in (1, 2, 3)), *without, *(entry(epoch) for epoch in range(7, 20))))
    place.passed("reader", s={"n": 3})
    place.passed("other", s={"n": 4})
    place.all_rounds()
    assert select(place.path, "SELECT log_bytes, epochs FROM stream_nodes") == [
        (13 * (SEGMENT_LOG_BYTES + len(b"[]")), 13)
    ]
    assert [epoch for (epoch,) in select(place.path, "SELECT epoch FROM entries")] == [3, 4, *range(7, 20)]


def controlled(place: Place) -> None:
    place.put("v1", "v2", "v3", "v4")
    for batch, text in enumerate(("v1", "v2", "v3", "v4"), start=1):
        place.publish(batch, text, snapshot=text in {"v2", "v4"})


def test_versions_go_below_the_newest_snapshot_that_all_nodes_have_passed(place: Place) -> None:
    controlled(place)
    place.commit(commit_of(entry(1, controls={"c": 4})))
    place.commit(commit_of(entry(1, controls={"c": 3})), node="m")
    place.commit(commit_of(entry(1)), node="reads none")
    place.all_rounds()
    assert place.versions() == [2, 3, 4]
    place.commit(commit_of(entry(2, controls={"c": 4})), node="m")
    place.time_us = 2 * HOUR_US
    place.all_rounds()
    assert place.versions() == [4]
    assert place.there("v1", "v2", "v3", "v4") == ["v4"]


def test_a_node_not_heard_of_for_long_does_not_hold_versions(place: Place) -> None:
    controlled(place)
    place.commit(commit_of(entry(1, controls={"c": 1})), node="lost")
    place.time_us = 7 * DAY_US
    place.commit(commit_of(entry(1, controls={"c": 4})))
    place.all_rounds()
    assert place.versions() == [1, 2, 3, 4]
    place.time_us += 1
    place.all_rounds()
    assert place.versions() == [4]


def test_without_a_snapshot_every_version_stays(place: Place) -> None:
    place.put("v1", "v2")
    place.publish(1, "v1")
    place.publish(2, "v2")
    place.all_rounds()
    assert place.versions() == [1, 2]


def test_the_sweep_finds_bytes_that_the_log_does_not_know_and_lets_them_go_later(place: Place) -> None:
    place.put("a")
    upload = Upload(place.blobs.beside())
    upload.write(blob("stray"))
    upload.store(place.blobs, run("stray").digest)
    upload.close()
    (place.blobs.root / "00").mkdir(exist_ok=True)
    (place.blobs.root / "00" / "notes.txt").write_text("not ours")
    place.time_us = 30
    assert sum(place.retention.sweep() for _ in range(256)) == 1
    assert sum(place.retention.sweep() for _ in range(256)) == 0
    place.time_us = HOUR_US + 30
    place.all_rounds()
    assert place.there("a", "stray") == ["stray"]
    place.time_us = HOUR_US + 31
    place.all_rounds()
    assert place.there("stray") == []


def test_work_is_bounded_a_round_and_more_is_asked_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "PIECE", 2)
    three(place)
    place.passed("reader", s={"n": 3})
    removed = place.retention.round()
    assert (removed.segments, removed.more) == (2, True)
    assert place.retention.round().segments == 1


def test_rows_go_before_bytes_and_every_step_is_a_failpoint(place: Place) -> None:
    place.put("a")
    place.time_us = 2 * HOUR_US
    place.retention.round()
    assert place.hits == ["hub.gc-before", "hub.gc-forgotten", "hub.gc-removed"]


TEXTS = st.sampled_from(["a", "b", "c", "d"])
STEPS = st.one_of(
    st.tuples(st.just("put"), TEXTS),
    st.tuples(st.just("commit"), st.lists(TEXTS, max_size=3), st.none() | st.lists(TEXTS, max_size=3)),
    st.tuples(st.just("publish"), TEXTS, st.booleans()),
    st.tuples(st.just("pass"), st.sampled_from(["x", "y"]), st.integers(0, 8)),
    st.tuples(st.just("time"), st.sampled_from([1, HOUR_US, 8 * DAY_US])),
    st.tuples(st.just("rounds")),
    st.tuples(st.just("sweep")),
)


@examples(60)
@given(st.lists(STEPS, max_size=30))
def test_whatever_happens_all_that_is_named_is_there_and_all_that_is_unread_is_kept(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        sent: dict[int, tuple[str, ...]] = {}
        passed: dict[str, int] = {}
        batch = 0
        for step in steps:
            match step:
                case ("put", text):
                    place.put(text)
                case ("commit", texts, state):
                    epoch = len(sent) + 1
                    kept = (
                        None
                        if state is None
                        else Checkpoint(epoch=epoch, manifest=run("a"), state=tuple(map(run, state)))
                    )
                    with contextlib.suppress(Rejection):
                        place.commit(commit_of(entry(epoch, *texts, controls={"c": batch}), checkpoint=kept))
                        sent[epoch] = tuple(texts)
                case ("publish", text, snapshot):
                    with contextlib.suppress(Rejection):
                        place.publish(batch + 1, text, snapshot=snapshot)
                        batch += 1
                case ("pass", consumer, epoch):
                    place.passed(consumer, s={"n": epoch})
                    passed[consumer] = max(epoch, passed.get(consumer, 0))
                case ("time", more_us):
                    place.time_us += more_us
                case ("rounds",):
                    place.all_rounds()
                case ("sweep",):
                    for _ in range(256):
                        place.retention.sweep()
            counted, real = place.named()
            assert counted == real
            assert all(place.blobs.size(digest) is not None for digest in real)
            unread = [epoch for epoch in sent if epoch > min(passed.values(), default=0)]
            assert set(unread) <= set(place.epochs())
        place.log.close()
