from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from fordstone.epochs.copies import Uploader, fetch_checkpoint, survey_remote
from fordstone.epochs.manifest import MANIFEST_VERSION, encode_manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError, StorageError
from fordstone.protocol.recovery import Resume, StartEmpty, decide_recovery
from fordstone.protocol.retry import Backoff
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.remote import DiskRemote, Remote, open_remote
from fordstone.testing.memory_disk import MemoryDisk, PowerCut


class Flaky(Remote):
    """Another remote across a network: requests fail by plan, and a failed put may have come through in part."""

    def __init__(self, inner: Remote, fails: Any = lambda _number: False) -> None:
        self.inner = inner
        self.fails = fails
        self.requests = 0
        self.log: list[tuple[str, str]] = []

    def _ask(self, what: str, path: str) -> bool:
        self.requests += 1
        self.log.append((what, path))
        return bool(self.fails(self.requests))

    def put(self, path: str, data: bytes) -> None:
        if self._ask("put", path):
            self.inner.put(path, data[: len(data) // 2])
            raise StorageError("the network is gone")
        self.inner.put(path, data)

    def create(self, path: str, data: bytes) -> bool:
        return self.inner.create(path, data)

    def get(self, path: str) -> bytes:
        if self._ask("get", path):
            raise StorageError("the network is gone")
        return self.inner.get(path)

    def sizes(self, directory: str) -> dict[str, int]:
        if self._ask("sizes", directory):
            raise StorageError("the network is gone")
        return self.inner.sizes(directory)

    def remove(self, path: str) -> None:
        if self._ask("remove", path):
            raise StorageError("the network is gone")
        self.inner.remove(path)

    def exists(self, path: str) -> bool:
        return self.inner.exists(path)

    def remove_leftovers(self, directory: str) -> None:
        self.inner.remove_leftovers(directory)


class Clock:
    def __init__(self) -> None:
        self.now_us = 0

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return f"memory://{tmp_path.name}-far" if request.param == "memory" else f"file://{tmp_path}/far"


@pytest.fixture
def far() -> Any:
    return Flaky(DiskRemote(MemoryDisk()))


def drain(uploader: Any, clock: Any = None, *, limit: Any = 10_000) -> None:
    """Step until there is nothing left to do, moving the clock over every wait."""
    for _ in range(limit):
        if uploader.step():
            continue
        due_us = uploader.status.next_try_us
        if due_us is None or clock is None:
            return
        clock.now_us = due_us
    pytest.fail("the uploader does not come to an end")


def decide(remote: Any, store: CheckpointStore) -> Any:
    survey = survey_remote(remote, store, deep=True)
    return decide_recovery(survey.checkpoints, survey.cuts)


def assert_same(one: Any, other: Any, epoch: Any) -> None:
    assert one.manifest(epoch) == other.manifest(epoch)
    for run in one.manifest(epoch).runs():
        assert one.read_run(run).equals(other.read_run(run))


def test_a_checkpoint_goes_up_and_comes_back_whole(url: Any, build: Any, store: CheckpointStore) -> None:
    for epoch in (1, 2, 3):
        build.commit(store, epoch)
    uploader = Uploader(store, url)
    uploader.offer(3)
    drain(uploader)
    assert uploader.status.uploaded == 3
    assert uploader.status.last_error is None
    assert uploader.status.sent_bytes > 0
    elsewhere = build.open(MemoryDisk())
    assert decide(url, elsewhere) == Resume(epoch=3, where="remote")
    assert fetch_checkpoint(url, elsewhere) == store.manifest(3)
    assert_same(store, elsewhere, 3)
    assert elsewhere.cuts() == store.cuts()
    build.commit(elsewhere, 4)
    assert elsewhere.verify().whole


def test_nothing_to_do_is_said_so(build: Any, store: CheckpointStore, far: Any) -> None:
    uploader = Uploader(store, far)
    assert not uploader.step()
    uploader.offer(1)
    assert not uploader.step(), "offered, but there is no checkpoint"
    assert far.requests == 0


def test_the_manifest_goes_last_and_only_missing_runs_go_at_all(build: Any, store: CheckpointStore, far: Any) -> None:
    uploader = Uploader(store, far)
    build.commit(store, 1)
    uploader.offer(1)
    drain(uploader)
    far.log.clear()
    build.commit(store, 2)
    uploader.offer(2)
    drain(uploader)
    puts = [path.split("/")[2:] for what, path in far.log if what == "put"]
    assert [directory for directory, _ in puts] == ["runs", "runs", "cuts", "manifests"]
    assert {name for directory, name in puts if directory == "runs"}.isdisjoint(
        run.digest for run in store.manifest(1).runs()
    )


def test_only_the_newest_of_those_that_wait_goes_up_but_every_cut(build: Any, store: CheckpointStore, far: Any) -> None:
    for epoch in (1, 2, 3, 4):
        build.commit(store, epoch)
    uploader = Uploader(store, far)
    for epoch in (2, 3, 4):
        uploader.offer(epoch)
    drain(uploader)
    survey = survey_remote(far, store)
    assert [fact.epoch for fact in survey.checkpoints] == [4]
    assert survey.cuts == {1, 2, 3, 4}


def test_one_step_moves_one_file_at_most(build: Any, store: CheckpointStore, far: Any) -> None:
    build.commit(store, 1)
    uploader = Uploader(store, far)
    uploader.offer(1)
    while True:
        far.log.clear()
        worked = uploader.step()
        assert sum(what in {"put", "remove"} for what, _ in far.log) <= 1
        if not worked:
            break
    assert uploader.status.uploaded == 1


def test_what_goes_up_is_pinned_and_released_afterwards(build: Any, disk: MemoryDisk, far: Any) -> None:
    store = build.open(disk, keep=1)
    build.commit(store, 1)
    uploader = Uploader(store, far)
    uploader.offer(1)
    assert uploader.step()
    assert uploader.status.uploaded is None
    for epoch in (2, 3, 4, 5):
        build.commit(store, epoch)
        store.collect()
    assert store.epochs() == (1, 5)
    drain(uploader)
    assert decide(far, store) == Resume(epoch=1, where="remote")
    store.collect()
    assert store.epochs() == (5,)


def test_whichever_request_fails_it_is_tried_again_until_all_is_there(build: Any, store: CheckpointStore) -> None:
    for epoch in (1, 2, 3):
        build.commit(store, epoch)
    tried = 0
    for at in range(1, 100):
        clock = Clock()
        far = Flaky(DiskRemote(MemoryDisk()), lambda number, at=at: number == at)
        uploader = Uploader(store, far, clock_us=clock)
        uploader.offer(3)
        drain(uploader, clock)
        assert decide(far.inner, store) == Resume(epoch=3, where="remote")
        assert uploader.status.uploaded == 3
        if far.requests < at:
            break
        tried += 1
    assert tried >= 8


@pytest.mark.parametrize("seed", range(30))
def test_with_a_bad_network_the_remote_never_shows_a_broken_checkpoint_as_whole(build: Any, seed: int) -> None:
    rng = Random(seed)
    store, clock = build.open(MemoryDisk(), keep=2), Clock()
    far = Flaky(DiskRemote(MemoryDisk()), lambda _number: rng.random() < 0.3)
    uploader = Uploader(store, far, clock_us=clock, keep=2)
    for epoch in range(1, 12):
        build.commit(store, epoch)
        store.collect()
        uploader.offer(epoch)
        for _ in range(rng.randrange(12)):
            uploader.step()
            clock.now_us += rng.randrange(20_000_000)
        # Shallow and deep must agree on what can be fetched.
        shallow = survey_remote(far.inner, store)
        deep = survey_remote(far.inner, store, deep=True)
        assert [fact.problem is None for fact in shallow.checkpoints] == [
            fact.problem is None for fact in deep.checkpoints
        ]
        if uploader.status.uploaded is not None:
            decision = decide_recovery(deep.checkpoints, deep.cuts)
            assert isinstance(decision, Resume)
            assert decision.next_epoch > uploader.status.uploaded
    far.fails = lambda _number: False
    drain(uploader, clock)
    decision = decide(far, store)
    assert isinstance(decision, Resume)
    # A removal that failed after the last upload waits for the next one, so older ones may still lie there.
    assert (decision.epoch, decision.replay) == (11, ())
    elsewhere = build.open(MemoryDisk())
    fetch_checkpoint(far, elsewhere)
    assert_same(store, elsewhere, 11)


def test_a_node_that_is_long_offline_does_not_pin_an_old_checkpoint(build: Any, disk: MemoryDisk, far: Any) -> None:
    store, clock = build.open(disk, keep=1), Clock()
    far.fails = lambda _number: True
    uploader = Uploader(store, far, clock_us=clock)
    for epoch in range(1, 30):
        build.commit(store, epoch)
        uploader.offer(epoch)
        uploader.step()
        clock.now_us += 10**9
        store.collect()
    assert store.epochs() == (29,)
    far.fails = lambda _number: False
    drain(uploader, clock)
    assert uploader.status.uploaded == 29


def test_before_the_wait_is_over_nothing_is_asked(build: Any, store: CheckpointStore, far: Any) -> None:
    clock = Clock()
    build.commit(store, 1)
    far.fails = lambda _number: True
    uploader = Uploader(store, far, clock_us=clock, backoff=Backoff(first_us=1000, max_us=300_000_000, jitter=0))
    uploader.offer(1)
    assert not uploader.step()
    assert uploader.status.failures == 1
    assert uploader.status.next_try_us == 1000
    assert uploader.status.last_error == "the network is gone"
    clock.now_us = 999
    requests = far.requests
    assert not uploader.step()
    assert far.requests == requests


def test_nodes_that_lost_the_remote_together_do_not_all_come_back_at_the_same_moment(build: Any) -> None:
    waits: list[list[int]] = []
    for node in range(20):
        clock, store = Clock(), build.open(MemoryDisk())
        build.commit(store, 1)
        far = Flaky(DiskRemote(MemoryDisk()), fails=lambda _number: True)
        uploader = Uploader(store, far, clock_us=clock, chance=Random(node).random)
        uploader.offer(1)
        found = []
        for _ in range(12):
            uploader.step()
            due_us = uploader.status.next_try_us
            assert due_us is not None
            found.append(due_us - clock.now_us)
            clock.now_us = due_us
        waits.append(found)
    for failures, of_nodes in enumerate(zip(*waits, strict=True)):
        longest_us = min(1_000_000 * 2**failures, 300_000_000)
        assert len(set(of_nodes)) == 20
        assert longest_us / 2 <= min(of_nodes) < longest_us * 0.7 < max(of_nodes) <= longest_us


def test_a_checkpoint_that_is_damaged_here_is_never_sent_and_the_next_one_is(
    build: Any, disk: MemoryDisk, store: CheckpointStore, far: Any
) -> None:
    build.commit(store, 1)
    (run,) = store.manifest(1).segments[0].runs
    disk.damage(f"{build.base}/runs/{run.digest}", bytes(run.size_bytes))
    uploader = Uploader(store, far)
    uploader.offer(1)
    drain(uploader)
    assert uploader.status.uploaded is None
    assert "is damaged" in str(uploader.status.last_error)
    assert not uploader.step(), "it is not tried for ever"
    store.commit(build.manifest(2))
    uploader.offer(2)
    drain(uploader)
    assert [fact.epoch for fact in survey_remote(far, store).checkpoints] == [2]


def test_the_remote_keeps_the_last_n_and_every_run_they_name(url: Any, build: Any, disk: MemoryDisk) -> None:
    store = build.open(disk, keep=1)
    uploader = Uploader(store, url, keep=2)
    for epoch in range(1, 8):
        build.commit(store, epoch)
        store.collect()
        uploader.offer(epoch)
        drain(uploader)
    remote = open_remote(url)
    survey = survey_remote(url, store, deep=True)
    assert [(fact.epoch, fact.problem) for fact in survey.checkpoints] == [(6, None), (7, None)]
    # Three state runs and one of output each, of which two are shared.
    assert len(remote.sizes(f"{build.base}/runs")) == 6
    assert survey.cuts == set(range(1, 8))


def test_a_new_uploader_learns_what_is_there_and_collects_it(build: Any, store: CheckpointStore, far: Any) -> None:
    for epoch in range(1, 7):
        build.commit(store, epoch)
        uploader = Uploader(store, far, keep=2)
        uploader.offer(epoch)
        drain(uploader)
    assert [fact.epoch for fact in survey_remote(far, store).checkpoints] == [5, 6]
    assert len(far.sizes(f"{build.base}/runs")) == 6


def test_what_a_broken_connection_left_of_a_manifest_goes_once_a_newer_one_is_there(
    build: Any, store: CheckpointStore, far: Any
) -> None:
    for epoch in (1, 2):
        build.commit(store, epoch)
        uploader = Uploader(store, far, keep=2)
        uploader.offer(epoch)
        drain(uploader)
    far.inner.put(f"{build.base}/manifests/000000000002.json", b"torn")
    build.commit(store, 3)
    uploader = Uploader(store, far, keep=2)
    uploader.offer(3)
    drain(uploader)
    assert [(fact.epoch, fact.problem) for fact in survey_remote(far, store, deep=True).checkpoints] == [
        (1, None),
        (3, None),
    ]


def test_a_remote_manifest_of_a_newer_version_keeps_every_run_there(
    build: Any, store: CheckpointStore, far: Any
) -> None:
    build.commit(store, 1)
    newer = msgspec.structs.replace(store.manifest(1), version=MANIFEST_VERSION + 1, epoch=9)
    far.put(f"{build.base}/manifests/000000000009.json", encode_manifest(newer))
    far.put(f"{build.base}/runs/{'a' * 64}", b"of the newer one")
    uploader = Uploader(store, far, keep=1)
    uploader.offer(1)
    drain(uploader)
    assert "a" * 64 in far.sizes(f"{build.base}/runs")
    assert "000000000009.json" in far.sizes(f"{build.base}/manifests")
    with pytest.raises(CheckpointError, match="newer"):
        survey_remote(far, store)


def test_a_share_that_fails_a_sync_is_opened_again(
    build: Any, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    build.commit(store, 1)
    uploader = Uploader(store, f"file://{tmp_path}/far", clock_us=clock)
    first = uploader._remote
    assert isinstance(first, DiskRemote)
    monkeypatch.setattr(first._disk, "fsync", lambda _path: (_ for _ in ()).throw(FatalStorageError("sync failed")))
    uploader.offer(1)
    drain(uploader, clock)
    assert uploader._remote is not first
    assert uploader.status.uploaded == 1


def test_a_remote_that_is_out_of_reach_at_first_is_opened_when_it_is_back(
    build: Any, store: CheckpointStore, tmp_path: Path
) -> None:
    clock = Clock()
    build.commit(store, 1)
    (tmp_path / "far").write_text("not a share")
    uploader = Uploader(store, f"file://{tmp_path}/far", clock_us=clock)
    uploader.offer(1)
    while uploader.step():
        pass
    assert "is not a directory" in str(uploader.status.last_error)
    (tmp_path / "far").unlink()
    drain(uploader, clock)
    assert uploader.status.uploaded == 1


def test_power_cuts_at_the_remote_never_leave_a_checkpoint_that_looks_whole_and_is_not(
    build: Any, store: CheckpointStore
) -> None:
    for epoch in (1, 2, 3):
        build.commit(store, epoch)
    for cut_after in range(40):
        disk = MemoryDisk()
        uploader = Uploader(store, DiskRemote(disk))
        uploader.offer(3)
        disk.cut_after = cut_after
        with contextlib.suppress(PowerCut):
            drain(uploader)
        disk.crash(Random(cut_after))
        decision = decide(DiskRemote(disk), store)
        if uploader.status.uploaded is None:
            assert decision in (StartEmpty(), Resume(epoch=3, where="remote"))
        else:
            assert decision == Resume(epoch=3, where="remote")


# Fetching


@pytest.fixture
def uploaded(build: Any, store: CheckpointStore, far: Any) -> Any:
    for epoch in (1, 2, 3):
        build.commit(store, epoch)
        uploader = Uploader(store, far)
        uploader.offer(epoch)
        drain(uploader)
    return far


def test_a_damaged_remote_run_is_not_taken_and_the_checkpoint_before_is(
    build: Any, store: CheckpointStore, uploaded: Any
) -> None:
    (run,) = store.manifest(3).segments[0].runs
    uploaded.inner.put(f"{build.base}/runs/{run.digest}", bytes(run.size_bytes))
    elsewhere = build.open(MemoryDisk())
    assert decide(uploaded, elsewhere).epoch == 2
    assert fetch_checkpoint(uploaded, elsewhere).epoch == 2
    assert_same(store, elsewhere, 2)
    with pytest.raises(CheckpointError, match=r"checkpoint 3: run .* is damaged"):
        fetch_checkpoint(uploaded, elsewhere, 3)


@pytest.mark.parametrize("data", [b"", b"torn", b"{}"])
def test_a_damaged_remote_manifest_is_not_taken(build: Any, store: CheckpointStore, uploaded: Any, data: Any) -> None:
    uploaded.inner.put(f"{build.base}/manifests/000000000003.json", data)
    elsewhere = build.open(MemoryDisk())
    decision = decide(uploaded, elsewhere)
    assert (decision.epoch, decision.replay) == (2, (3,))
    assert fetch_checkpoint(uploaded, elsewhere).epoch == 2
    assert elsewhere.cut(3) == store.cut(3), "what is needed to replay epoch 3 came along"


def test_an_older_epoch_can_be_asked_for(build: Any, store: CheckpointStore, uploaded: Any) -> None:
    elsewhere = build.open(MemoryDisk())
    assert fetch_checkpoint(uploaded, elsewhere, 1) == store.manifest(1)


def test_what_is_whole_here_is_not_fetched_and_what_is_damaged_here_is(
    build: Any, disk: MemoryDisk, store: CheckpointStore, uploaded: Any
) -> None:
    (run,) = store.manifest(3).segments[0].runs
    disk.damage(f"{build.base}/runs/{run.digest}", b"")
    uploaded.log.clear()
    fetch_checkpoint(uploaded, store, 3)
    assert [path for what, path in uploaded.log if what == "get" and "/runs/" in path] == [
        f"{build.base}/runs/{run.digest}"
    ]
    assert store.verify().whole
    build.commit(store, 4)


def test_nothing_to_fetch_says_so(build: Any, far: Any) -> None:
    with pytest.raises(CheckpointError, match="there is none"):
        fetch_checkpoint(far, build.open(MemoryDisk()))


def test_the_network_going_away_while_fetching_leaves_the_local_store_as_it_was(
    build: Any, store: CheckpointStore, uploaded: Any
) -> None:
    elsewhere = build.open(MemoryDisk())
    for failing in range(1, 30):
        uploaded.requests = 0
        uploaded.fails = lambda number, failing=failing: number == failing
        try:
            fetch_checkpoint(uploaded, elsewhere)
        except StorageError:
            assert elsewhere.epochs() == ()
        else:
            break
    assert failing > 5
    assert_same(store, elsewhere, 3)


def test_a_missing_chunk_of_cuts_hides_only_its_cuts(build: Any, store: CheckpointStore, uploaded: Any) -> None:
    uploaded.inner.put(f"{build.base}/cuts/000000000002.jsonl", b"torn")
    uploaded.inner.put(f"{build.base}/cuts/readme.txt", b"foreign")
    for number in (1, 2, 3):
        uploaded.inner.remove(f"{build.base}/manifests/{number:012}.json")
    assert survey_remote(uploaded, store).cuts == {1, 3}


def test_a_local_and_a_remote_copy_together_give_the_newest_and_prefer_the_local_one(
    build: Any, disk: MemoryDisk, store: CheckpointStore, uploaded: Any
) -> None:
    local, remote = store.survey(), survey_remote(uploaded, store)
    assert decide_recovery([*local.checkpoints, *remote.checkpoints], local.cuts | remote.cuts) == Resume(
        epoch=3, where="local"
    )
    disk.damage(f"{build.base}/manifests/000000000003.json", b"")
    with pytest.raises(DamagedError):
        store.manifest(3)
    local = store.survey()
    decision = decide_recovery([*local.checkpoints, *remote.checkpoints], local.cuts | remote.cuts)
    assert isinstance(decision, Resume)
    assert (decision.epoch, decision.where, decision.replay) == (3, "remote", ())
    fetch_checkpoint(uploaded, store, 3)
    assert store.survey().checkpoints[-1].problem is None


def test_cuts_that_came_through_only_in_part_go_up_again(build: Any, store: CheckpointStore) -> None:
    """A chunk with the right name was once believed to be whole, and its cuts were never sent again."""
    build.commit(store, 1)
    clock = Clock()
    far = Flaky(DiskRemote(MemoryDisk()))
    far.fails = lambda _number: far.log[-1] == ("put", f"{build.base}/cuts/000000000001.jsonl")
    uploader = Uploader(store, far, clock_us=clock)
    uploader.offer(1)
    while uploader.step():
        pass
    assert uploader.status.failures == 1
    far.fails = lambda _number: False
    build.commit(store, 2)
    uploader.offer(2)
    drain(uploader, clock)
    assert survey_remote(far, store).cuts == {1, 2}


def test_cuts_that_are_there_whole_are_not_put_again_when_the_manifest_fails(
    build: Any, store: CheckpointStore
) -> None:
    """Else a second failure could tear them while the manifest is torn too."""
    build.commit(store, 1)
    clock = Clock()
    far = Flaky(DiskRemote(MemoryDisk()))
    far.fails = lambda _number: far.log[-1] == ("put", f"{build.base}/manifests/000000000001.json")
    uploader = Uploader(store, far, clock_us=clock)
    uploader.offer(1)
    for _ in range(50):
        uploader.step()
        clock.now_us += 10**9
    assert far.log.count(("put", f"{build.base}/cuts/000000000001.jsonl")) == 1
    assert far.log.count(("put", f"{build.base}/manifests/000000000001.json")) > 3
