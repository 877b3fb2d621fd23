"""The sender step by step, against a hub that loses answers, says no, and is away for as long as the clock says."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from random import Random

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.simulation.simulator import SimClock

from fordstone.edge.link import sender as parcel
from fordstone.edge.link.outbox import Outbox, entry_of
from fordstone.edge.link.owner import Owner
from fordstone.edge.link.sender import STOP_SECONDS, Patience, Sender
from fordstone.epochs.manifest import Cut, Manifest, Segment, StateRuns, decode_manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import DamagedError, FencedError, HubAwayError, HubError, HubRefusedError
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import (
    Checkpoint,
    Commit,
    Committed,
    EpochEntry,
    Generation,
    Head,
    Lease,
    LeaseRequest,
    Refusal,
)
from fordstone.protocol.chain import CHAIN_START, chained
from fordstone.testing.memory_disk import MemoryDisk

PIPELINE, NODE = "p", "n"
HOUR_US = 3_600_000_000


class FakeHub(HubClient):
    """Keeps the rules of a hub, and does what `trouble` says before or after each call."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.entries: list[EpochEntry] = []
        self.commits: list[Commit] = []
        self.newest_checkpoint: Checkpoint | None = None
        self.generation = Generation(hub=1, local=0)
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[str], None] = lambda _: None

    def lease(self, pipeline: str, node: str, request: LeaseRequest) -> Lease:
        self._called("lease")
        self.generation = Generation(hub=self.generation.hub + request.take_over, local=request.local)
        self.after("lease")
        return Lease(generation=self.generation, head=len(self.entries), chain=self.chain(), log_id="log")

    def head(self, pipeline: str, node: str) -> Head:
        self._called("head")
        self.after("head")
        if not self.entries:
            return Head(log_id="log")
        return Head(
            epoch=len(self.entries), chain=self.chain(), generation=self.generation, log_id="log"
        )  # fmt: skip

    def chain(self) -> str:
        return functools.reduce(chained, (entry.digest() for entry in self.entries), CHAIN_START)

    def missing(self, digests: Iterable[str]) -> set[str]:
        digests = list(digests)
        self._called("missing")
        self.after("missing")
        return {digest for digest in digests if digest not in self.blobs}

    def put_blob(self, digest: str, data: bytes) -> None:
        self._called("put")
        assert hashlib.sha256(data).hexdigest() == digest
        self.blobs[digest] = data
        self.after("put")

    def commit(self, pipeline: str, node: str, commit: Commit) -> Committed:
        self._called("commit")
        if commit.generation < self.generation:
            raise refused("stale_generation", 412)
        new = [entry for entry in commit.epochs if entry.epoch > len(self.entries)]
        for entry in commit.epochs:
            if entry.epoch <= len(self.entries) and self.entries[entry.epoch - 1].digest() != entry.digest():
                raise refused("other_content", 409)
        if new and new[0].epoch != len(self.entries) + 1:
            raise refused("gap", 409, next_epoch=len(self.entries) + 1)
        named = {run.digest for entry in new for segment in entry.streams.values() for run in segment.runs}
        if commit.checkpoint is not None:
            named |= {run.digest for run in (*commit.checkpoint.state, commit.checkpoint.manifest)}
        if lacking := sorted(named - self.blobs.keys()):
            raise refused("missing_blobs", 424, missing=tuple(lacking))
        self.entries += new
        self.commits.append(commit)
        self.newest_checkpoint = commit.checkpoint or self.newest_checkpoint
        self.after("commit")
        return Committed(head=len(self.entries), chain=self.chain(), already=not new)

    def _called(self, name: str) -> None:
        self.before(name)
        self.calls.append(name)


def refused(code: str, status: int, **facts) -> HubRefusedError:
    refusal = Refusal(error=code, message=f"the hub says {code}.", **facts)  # type: ignore[arg-type]
    return HubRefusedError(refusal.message, status=status, code=code, refusal=refusal)


class Node:
    """A store, an outbox and a sender on a disk that can lose its power."""

    def __init__(self, hub: FakeHub | None = None, *, disk: MemoryDisk | None = None, **options) -> None:
        self.disk = disk or MemoryDisk()
        self.hub = hub or FakeHub()
        self.clock = SimClock()
        self.options = options
        self.incarnation = 0
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self.store = CheckpointStore(self.disk, pipeline=PIPELINE, node=NODE, compression="none", keep=2)
        self.store.log._max_bytes = 4000
        self.outbox = Outbox(self.store, bytes_max=1 << 30)
        self.outbox.begin(max(self.store.epochs(), default=0))
        self.sender = Sender(
            hub=self.hub,
            outbox=self.outbox,
            store=self.store,
            owner=Owner(holder="me", incarnation=self.incarnation, start=f"start-{self.incarnation}"),
            clock=self.clock,
            **({"chance": lambda: 0.0} | self.options),
        )

    def crash(self, rng: Random | None = None) -> None:
        self.disk.crash(rng or Random(1))
        self.start()

    def seal(self, count: int = 1) -> None:
        for _ in range(count):
            epoch = max(self.store.epochs(), default=0) + 1
            rows = self.store.write_run(pl.DataFrame({"rows": [epoch]}))
            state = self.store.write_run(pl.DataFrame({"state": [epoch]}))
            base = self.store.write_run(pl.DataFrame({"base": [1]}))
            cut = Cut(epoch=epoch, sources={}, segments=(Segment("s", (rows,), "s", epoch),), now_us=epoch)
            manifest = Manifest(
                pipeline=PIPELINE,
                node=NODE,
                epoch=epoch,
                attempt=epoch,
                mode="aligned",
                parallelism=1,
                plan_digest="",
                step_digests={},
                created_us=epoch,
                cut=cut,
                states=(StateRuns("step", "state", 0, (base, state)),),
            )
            self.store.commit(manifest)
            self.outbox.add(manifest.cut)
            self.store.collect(held=self.outbox.held())

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.sender.step()

    def send(self) -> None:
        """Step, and let the time pass that the sender wants to wait, until there is nothing to do."""
        for _ in range(5000):
            if not self.sender.step():
                if not self.outbox.epochs and not self.sender.failing:
                    return
                self.clock.now_us += self.sender.idle_wait_us or 1_000_000
        raise AssertionError(f"it never ended: {self.sender.problem}")


def away(_: str = "") -> None:
    raise HubAwayError("the hub does not answer.")


def once(name: str, error: Exception) -> Callable[[str], None]:
    """Raises at the first such call."""
    left = [error]

    def trouble(called: str) -> None:
        if called == name and left:
            raise left.pop()

    return trouble


def test_in_step_each_epoch_is_a_commit_of_its_own_with_its_checkpoint():
    node = Node()
    for _ in range(3):
        node.seal()
        node.send()
    assert [[entry.epoch for entry in commit.epochs] for commit in node.hub.commits] == [[1], [2], [3]]
    assert [commit.checkpoint.epoch for commit in node.hub.commits if commit.checkpoint] == [1, 2, 3]
    assert node.hub.calls[:3] == ["head", "lease", "head"]
    assert (node.hub.calls.count("lease"), node.hub.calls.count("head")) == (1, 2)


def test_state_that_the_hub_has_is_not_sent_again():
    node = Node()
    node.seal()
    node.send()
    puts = node.hub.calls.count("put")
    node.seal()
    node.send()
    # Rows, one new run of state, and the manifest; not what did not change.
    assert puts == 4
    assert node.hub.calls.count("put") == puts + 3


def test_when_it_lags_all_segments_are_sent_and_only_the_last_manifest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fordstone.edge.link.sender.EPOCHS_PER_COMMIT_MAX", 100)
    node = Node()
    node.seal(250)
    node.send()
    assert [len(commit.epochs) for commit in node.hub.commits] == [100, 100, 50]
    assert [commit.checkpoint is not None for commit in node.hub.commits] == [False, False, True]
    assert [entry.epoch for entry in node.hub.entries] == list(range(1, 251))
    assert all(run.digest in node.hub.blobs for entry in node.hub.entries for run in entry.streams["s"].runs)


def test_the_checkpoint_at_the_hub_is_whole():
    node = Node()
    node.seal(3)
    node.send()
    found = node.hub.newest_checkpoint
    assert found is not None
    manifest = decode_manifest(node.hub.blobs[found.manifest.digest], pipeline=PIPELINE, node=NODE, epoch=3)
    assert {run.digest for run in manifest.runs()} <= node.hub.blobs.keys()
    assert set(manifest.runs()) == set(found.state)


def test_without_hub_state_no_checkpoint_is_sent():
    node = Node(hub_state=False)
    node.seal(3)
    node.send()
    assert node.hub.newest_checkpoint is None
    assert len(node.hub.blobs) == 3


def test_what_the_hub_has_not_acknowledged_is_held():
    node = Node()
    node.hub.before = away
    node.seal(10)
    node.step(50)
    assert len(set(node.outbox.held())) == 10
    for entry in node.outbox.oldest(10):
        assert node.store.run_fault(entry.streams["s"].runs[0], deep=True) is None
    node.hub.before = lambda _: None
    node.send()
    node.seal()
    assert len(set(node.outbox.held())) == 1


def test_an_hour_without_the_hub_costs_a_bounded_number_of_calls_and_nothing_else():
    node = Node()
    tries = 0

    def count(_: str) -> None:
        nonlocal tries
        tries += 1
        away()

    node.hub.before = count
    began_us = node.clock.now_us
    while node.clock.now_us < began_us + HOUR_US:
        assert not node.sender.step()
        node.clock.now_us += node.sender.idle_wait_us or 0
    assert 100 < tries < 300
    assert node.sender.problem == "the hub does not answer."
    node.seal(5)
    node.hub.before = lambda _: None
    node.send()
    assert len(node.hub.entries) == 5
    assert node.sender.problem is None


def test_the_hubs_word_on_when_to_come_back_is_kept():
    node = Node()
    node.hub.before = once("head", HubAwayError("too many", retry_after_s=90))
    node.step()
    assert node.sender.idle_wait_us == 90_000_000
    node.clock.now_us += 89_000_000
    node.step()
    assert node.hub.calls == []
    node.clock.now_us += 1_000_000
    node.step()
    assert node.hub.calls == ["head"]


@pytest.mark.parametrize("name", ["lease", "head", "missing", "put", "commit"])
def test_a_lost_answer_changes_nothing(name: str):
    node = Node()
    node.seal(20)
    node.hub.after = once(name, HubAwayError("the answer was lost"))
    node.send()
    assert [entry.epoch for entry in node.hub.entries] == list(range(1, 21))
    assert node.outbox.epochs == 0


def test_after_a_lost_answer_to_a_commit_the_hub_is_asked_and_nothing_is_sent_twice():
    node = Node()
    node.seal(3)
    node.hub.after = once("commit", HubAwayError("the answer was lost"))
    node.send()
    assert node.hub.calls.count("commit") == 1
    assert node.hub.calls[-2:] == ["commit", "head"]


def test_a_commit_that_never_arrived_is_sent_again_without_its_blobs():
    node = Node()
    node.seal(3)
    node.hub.before = once("commit", HubAwayError("the request was lost"))
    node.send()
    assert node.hub.calls.count("put") == len(node.hub.blobs)
    assert len(node.hub.entries) == 3


def test_blobs_that_the_hub_lost_are_sent_again():
    node = Node()
    node.seal()
    node.send()
    node.hub.blobs.clear()
    node.seal()
    node.send()
    assert len(node.hub.entries) == 2
    assert node.hub.newest_checkpoint is not None
    assert {run.digest for run in node.hub.newest_checkpoint.state} <= node.hub.blobs.keys()
    assert node.hub.calls.count("commit") == 3


def test_a_hub_that_loses_blobs_as_soon_as_it_has_them_is_not_flooded():
    node = Node()
    node.seal()

    def lose(called: str) -> None:
        if called == "commit":
            node.hub.blobs.clear()

    node.hub.before = lose
    for _ in range(200):
        node.step()
    assert len(node.hub.calls) < 30
    assert node.sender.problem is not None


def test_an_older_generation_stops_and_keeps_everything():
    node = Node()
    node.seal()
    node.send()
    node.hub.generation = Generation(hub=2, local=1)
    node.seal(2)
    with pytest.raises(FencedError, match="taken over"):
        node.send()
    assert len(set(node.outbox.held())) == 2


def test_a_fenced_node_gets_that_error_even_if_the_successor_has_sent_other_rows():
    node = Node()
    node.seal(2)
    node.step(2)
    node.hub.entries = [EpochEntry(epoch=1, streams={}, created_us=99)]
    node.hub.generation = Generation(hub=2, local=1)
    with pytest.raises(FencedError, match="taken over"):
        node.send()
    assert node.outbox.epochs == 2


def test_an_old_copy_of_a_state_directory_is_refused():
    node = Node()
    node.hub.before = once("lease", refused("stale_generation", 412))
    with pytest.raises(FencedError, match="old copy"):
        node.step(2)


def test_another_holder_is_respected_and_the_words_say_how_to_take_over():
    node = Node()
    node.hub.before = once("lease", refused("held", 409))
    with pytest.raises(HubRefusedError, match="--take-over") as caught:
        node.step(2)
    assert caught.value.code == "held"


def test_taking_over_is_asked_for_only_when_it_was_said():
    node, taking = Node(), Node(take_over=True)
    for one in (node, taking):
        one.seal()
        one.send()
    assert node.hub.generation.hub == 1
    assert taking.hub.generation.hub == 2


def test_a_hub_that_forgot_the_lease_is_asked_for_it_again():
    node = Node()
    node.seal()
    node.hub.before = once("commit", refused("not_found", 404))
    node.send()
    assert node.hub.calls.count("lease") == 2
    assert len(node.hub.entries) == 1


@pytest.mark.parametrize("code", ["unauthorised", "forbidden", "bad_request", "storage", "failed"])
def test_a_no_that_only_people_can_mend_never_ends_the_pipeline(code: str):
    node = Node()
    node.seal()

    def no(_: str) -> None:
        raise refused(code, 403)

    node.hub.before = no
    for _ in range(20):
        node.step()
        node.clock.now_us += node.sender.idle_wait_us or 0
    assert code in (node.sender.problem or "")
    assert node.outbox.epochs == 1
    node.hub.before = lambda _: None
    node.send()


def test_a_range_that_is_too_large_is_halved():
    node = Node()
    node.seal(8)

    def limit(commit: Commit) -> None:
        if len(commit.epochs) > 2:
            raise refused("too_large", 413)

    take = node.hub.commit

    def bounded(pipeline: str, named: str, commit: Commit) -> Committed:
        limit(commit)
        return take(pipeline, named, commit)

    node.hub.commit = bounded  # type: ignore[method-assign, assignment]
    node.send()
    assert len(node.hub.entries) == 8


def test_other_content_at_the_hub_stops_with_words():
    node = Node()
    node.seal(2)
    node.hub.entries = [EpochEntry(epoch=1, streams={}, created_us=99)]
    with pytest.raises(HubError, match=r"disagree(.|\n)*epochs up to 1 have other content"):
        node.send()
    assert node.outbox.epochs == 2


def test_a_hub_that_is_ahead_stops_with_words():
    node = Node()
    node.hub.entries = [EpochEntry(epoch=epoch, streams={}, created_us=0) for epoch in (1, 2, 3)]
    node.seal()
    with pytest.raises(HubError, match=r"newest that was sealed here is 1(.|\n)*--take-over does not help"):
        node.send()


def test_a_damaged_run_is_never_sent_and_stays_until_it_is_brought_back():
    node = Node()
    node.hub.before = away
    node.seal(3)
    ref = node.outbox.oldest(1)[0].streams["s"].runs[0]
    path, data = f"{PIPELINE}/{NODE}/runs/{ref.digest}", node.store.read_run_bytes(ref)
    replace(node.disk, path, data[:-1] + b"?")
    node.hub.before = lambda _: None
    for _ in range(20):
        node.step()
        node.clock.now_us += node.sender.idle_wait_us or 0
    assert "damaged" in (node.sender.problem or "")
    assert node.hub.entries == []
    with pytest.raises(DamagedError):
        node.sender.finish(Patience.UNTIL_SENT, wait=passing(node))
    replace(node.disk, path, data)
    node.send()
    assert len(node.hub.entries) == 3


def test_rows_do_not_wait_for_a_state_that_is_damaged():
    node = Node()
    node.seal()
    state = node.store.manifest(1).states[0].runs[1]
    replace(node.disk, f"{PIPELINE}/{NODE}/runs/{state.digest}", b"?")
    node.send()
    assert len(node.hub.entries) == 1
    assert node.hub.newest_checkpoint is None


def test_rows_do_not_wait_for_a_state_that_this_hub_finds_too_large():
    node = Node()
    node.seal()
    state = node.store.manifest(1).states[0].runs[1]
    put = node.hub.put_blob

    def picky(digest: str, data: bytes) -> None:
        if digest == state.digest:
            raise refused("too_large", 413)
        put(digest, data)

    node.hub.put_blob = picky  # type: ignore[method-assign]
    node.send()
    assert [len(node.hub.entries), node.hub.newest_checkpoint, node.sender.problem] == [1, None, None]
    node.seal()
    node.send()
    assert len(node.hub.entries) == 2
    assert not node.store._pins


def test_rows_do_not_wait_for_a_state_that_makes_the_commit_too_large():
    node = Node()
    node.seal(3)
    take = node.hub.commit

    def picky(pipeline: str, node: str, commit: Commit) -> Committed:
        if commit.checkpoint is not None:
            raise refused("too_large", 413)
        return take(pipeline, node, commit)

    node.hub.commit = picky  # type: ignore[method-assign]
    node.send()
    assert [len(node.hub.entries), node.hub.newest_checkpoint] == [3, None]


def test_a_state_of_too_many_runs_for_one_commit_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parcel, "STATE_RUNS_MAX", 1)
    node = Node()
    node.seal()
    node.send()
    assert [len(node.hub.entries), node.hub.newest_checkpoint] == [1, None]


def test_nothing_is_pinned_when_all_is_sent():
    node = Node()
    node.seal(3)
    node.send()
    assert not node.store._pins


# The end.


def passing(node: Node) -> Callable[[float], bool]:
    def wait(seconds: float) -> bool:
        node.clock.now_us += int(seconds * 1e6)
        return False

    return wait


def test_at_the_end_of_a_bounded_run_all_is_sent_however_long_that_takes():
    node = Node()
    node.seal(5)
    back_us = node.clock.now_us + HOUR_US

    def later(_: str) -> None:
        if node.clock.now_us < back_us:
            away()

    node.hub.before = later
    node.sender.finish(Patience.UNTIL_SENT, wait=passing(node))
    assert len(node.hub.entries) == 5
    assert node.clock.now_us >= back_us


def test_a_person_can_end_the_waiting_and_the_rest_stays():
    node = Node()
    node.seal(5)
    node.hub.before = away
    node.sender.finish(Patience.UNTIL_SENT, wait=lambda _: True)
    assert node.outbox.epochs == 5


def test_on_a_stop_what_is_left_is_sent_if_the_hub_is_there():
    node = Node()
    node.seal(5)
    node.sender.finish(Patience.BRIEF, wait=lambda _: True)
    assert len(node.hub.entries) == 5


def test_on_a_stop_a_hub_that_is_away_delays_nothing():
    node = Node()
    node.seal(5)
    node.hub.before = away
    began_us = node.clock.now_us
    node.sender.finish(Patience.BRIEF, wait=passing(node))
    assert node.clock.now_us - began_us < 1_000_000
    assert node.outbox.epochs == 5


def test_a_run_over_what_is_there_now_sends_all_of_it_but_does_not_wait_for_a_hub_that_is_away():
    node = Node()
    node.seal(5)
    node.hub.before = away
    began_us = node.clock.now_us
    node.sender.finish(Patience.WHILE_IT_ANSWERS, wait=passing(node))
    assert node.clock.now_us - began_us < 1_000_000
    assert node.outbox.epochs == 5


def test_a_run_over_what_is_there_now_sends_all_of_it_to_a_slow_hub():
    node = Node()
    node.seal(5)

    def slow(_: str) -> None:
        node.clock.now_us += int(STOP_SECONDS * 1e6)

    node.hub.before = slow
    node.sender.finish(Patience.WHILE_IT_ANSWERS, wait=passing(node))
    assert len(node.hub.entries) == 5


def test_a_hub_that_says_no_at_the_end_of_a_bounded_run_is_an_error():
    node = Node()
    node.seal()

    def no(_: str) -> None:
        raise refused("forbidden", 403)

    node.hub.before = no
    with pytest.raises(HubRefusedError, match="forbidden"):
        node.sender.finish(Patience.UNTIL_SENT, wait=passing(node))


# Anything.


@examples(150)
@given(st.lists(st.sampled_from(["seal", "step", "step", "step", "lose", "drop", "crash", "wait"]), max_size=80))
def test_whatever_is_lost_and_whenever_it_crashes_the_hub_has_each_epoch_once_and_in_order(steps: list[str]):
    node = Node()
    lost = {"before": 0, "after": 0}

    def fail(which: str) -> Callable[[str], None]:
        def trouble(_: str) -> None:
            if lost[which]:
                lost[which] -= 1
                away()

        return trouble

    node.hub.before, node.hub.after = fail("before"), fail("after")
    sealed: list[EpochEntry] = []
    for number, step in enumerate(steps):
        match step:
            case "seal":
                node.seal()
                sealed.append(entry_of(node.store.manifest(len(sealed) + 1).cut))
            case "step":
                node.step()
            case "lose":
                lost["after"] += 1
            case "drop":
                lost["before"] += 1
            case "crash":
                node.crash(Random(number))
            case "wait":
                node.clock.now_us += 60_000_000
        assert node.hub.entries == sealed[: len(node.hub.entries)]
        assert node.outbox.sent <= len(node.hub.entries)
    node.send()
    assert node.hub.entries == sealed


def replace(disk: MemoryDisk, path: str, data: bytes) -> None:
    disk.remove(path)
    disk.create(path, data)
    disk.fsync(path)


def test_nodes_that_lost_the_hub_together_try_again_at_different_times():
    def wait_us(chance: float) -> int | None:
        node = Node(chance=lambda: chance)
        node.seal()

        def away(_: str) -> None:
            raise HubAwayError("away")

        node.hub.before = away
        node.sender.step()
        return node.sender.idle_wait_us

    assert [wait_us(chance) for chance in (0.0, 0.5, 1.0)] == [125_000, 187_500, 250_000]
