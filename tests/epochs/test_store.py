from __future__ import annotations

import threading
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import polars as pl
import pytest

from fordstone.epochs.run_file import HOLD_COMMITS
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    PipelineError,
    StorageError,
    StoreLockedError,
)
from fordstone.protocol.recovery import Resume, decide_recovery
from fordstone.state.base import RunRef
from fordstone.storage.disk import FatalStorageError, OsDisk
from fordstone.testing.memory_disk import MemoryDisk


def decide(store: CheckpointStore, *, deep: Any = True) -> Any:
    survey = store.survey(deep=deep)
    return decide_recovery(survey.checkpoints, survey.cuts)


def files_of(disk: MemoryDisk, base: Any) -> Any:
    """Every file with its bytes."""
    found = {}
    for directory in ("", "/manifests", "/runs", "/aside"):
        for name in disk.list(base + directory):
            path = f"{base}{directory}/{name}"
            if name not in {"manifests", "runs", "aside"}:
                found[path] = disk.read(path)
    return found


def test_what_was_committed_is_read_back_by_another_process(
    disk: MemoryDisk, store: CheckpointStore, build: Any
) -> None:
    manifest = build.commit(store, 1)
    other = build.open(disk)
    assert other.manifest(1) == manifest
    assert other.read_run(manifest.segments[0].runs[0]).equals(build.frame(1001))
    assert other.cut(1) == manifest.cut
    assert decide(other) == Resume(epoch=1, where="local")


def test_two_equal_runs_are_one_file_and_two_contributions(
    disk: MemoryDisk, store: CheckpointStore, build: Any
) -> None:
    first, second = store.write_run(build.frame(1)), store.write_run(build.frame(1))
    store.commit(build.manifest(1, (first, second)))
    assert first == second
    assert len(disk.list(f"{build.base}/runs")) == 1
    assert build.open(disk).manifest(1).states[0].runs == (first, first)


def test_a_run_that_is_there_is_not_written_again(disk: MemoryDisk, store: CheckpointStore, build: Any) -> None:
    store.write_run(build.frame(1))
    written = disk.counts["create"]
    store.write_run(build.frame(1))
    assert disk.counts["create"] == written


@pytest.mark.parametrize("form", [lambda data: b"", lambda data: data[:-1] + b"?"])
def test_a_damaged_run_is_written_again_and_heals_older_checkpoints(
    disk: MemoryDisk, store: CheckpointStore, build: Any, form: Any
) -> None:
    run = store.write_run(build.frame(1))
    store.commit(build.manifest(1, (run,)))
    path = f"{build.base}/runs/{run.digest}"
    disk.damage(path, form(disk.read(path)))
    assert store.verify().damaged_runs
    store.write_run(build.frame(1))
    assert store.verify().whole


def test_a_run_from_elsewhere_is_checked_before_it_is_stored(
    disk: MemoryDisk, store: CheckpointStore, build: Any
) -> None:
    run = build.open(MemoryDisk()).write_run(build.frame(5))
    with pytest.raises(DamagedError, match="has 3 bytes, the manifest says"):
        store.put_run(run, b"abc")
    assert disk.list(f"{build.base}/runs") == []


def test_a_sealed_epoch_is_not_sealed_again(store: CheckpointStore, build: Any) -> None:
    build.commit(store, 1)
    build.commit(store, 2)
    with pytest.raises(CheckpointError, match="epoch 2 is the newest sealed one, so the next is 3"):
        store.commit(build.manifest(2))
    with pytest.raises(CheckpointError, match="A sealed epoch is final"):
        store.commit(build.manifest(4))


def test_a_manifest_that_names_a_run_that_is_not_stored_is_refused(store: CheckpointStore, build: Any) -> None:
    with pytest.raises(CheckpointError, match="names 1 runs that are not stored, aaaaaaaaaaaa"):
        store.commit(build.manifest(1, (RunRef(digest="a" * 64, size_bytes=1, rows=1),)))
    assert store.epochs() == ()


@pytest.mark.parametrize("change", [{"pipeline": "other"}, {"node": "other"}, {"epoch": 2}])
def test_a_manifest_of_something_else_is_refused(store: CheckpointStore, build: Any, change: Any) -> None:
    with pytest.raises(CheckpointError, match="does not belong into the store"):
        store.commit(msgspec.structs.replace(build.manifest(1), **change))


def test_a_damaged_checkpoint_is_set_aside_with_its_damaged_runs_and_nothing_is_deleted(
    disk: MemoryDisk, store: CheckpointStore, build: Any
) -> None:
    for epoch in (1, 2, 3):
        build.commit(store, epoch)
    (run,) = store.manifest(3).segments[0].runs
    path = f"{build.base}/runs/{run.digest}"
    disk.damage(path, disk.read(path)[:-3])
    before = sorted(files_of(disk, build.base).values())
    store.set_aside(3, "run is short")
    after = files_of(disk, build.base)
    notes = [data for name, data in after.items() if name.endswith("-1.json")]
    assert sorted(set(after.values()) - set(notes)) == sorted(set(before))
    assert b"run is short" in notes[0]
    assert decide(store) == Resume(epoch=2, where="local", replay=(3,), damaged=decide(store).damaged)
    assert decide(build.open(disk)).replay == (3,)


def test_an_epoch_that_was_set_aside_stays_sealed(disk: MemoryDisk, store: CheckpointStore, build: Any) -> None:
    build.commit(store, 1)
    manifest = build.commit(store, 2)
    store.set_aside(2, "for a test")
    for opened in (store, build.open(disk)):
        with pytest.raises(CheckpointError, match="epoch 2 is the newest sealed one"):
            opened.commit(manifest)
    store.commit(manifest, sealed_before=True)
    assert decide(build.open(disk)) == Resume(epoch=2, where="local")
    build.commit(store, 3)


def test_rebuilding_keeps_the_damaged_manifest_for_those_who_want_to_look(
    disk: MemoryDisk, store: CheckpointStore, build: Any
) -> None:
    build.commit(store, 1)
    manifest = build.commit(store, 2)
    disk.damage(f"{build.base}/manifests/000000000002.json", b"rotten")
    store.commit(manifest, sealed_before=True)
    assert b"rotten" in files_of(disk, build.base).values()
    assert store.manifest(2) == manifest


def test_setting_aside_twice_keeps_both(disk: MemoryDisk, store: CheckpointStore, build: Any) -> None:
    build.commit(store, 1)
    for _ in range(2):
        manifest = store.manifest(1)
        store.set_aside(1, "again")
        store.commit(manifest, sealed_before=True)
    assert len(store.verify().aside) == 4
    assert store.verify().whole


def test_leftovers_of_a_crash_are_cleaned_at_open_but_not_when_only_looking(
    disk: MemoryDisk, store: CheckpointStore, build: Any
) -> None:
    build.commit(store, 1)
    disk.create(f"{build.base}/runs/.tmp-x-1", b"half")
    disk.create(f"{build.base}/manifests/.tmp-x-2", b"half")
    disk.create(f"{build.base}/.tmp-x-3", b"half")
    build.open(disk, read_only=True)
    assert disk.exists(f"{build.base}/runs/.tmp-x-1")
    build.open(disk)
    assert not [name for name in files_of(disk, build.base) if "/.tmp-" in name]


def test_a_store_for_reading_only_changes_nothing(disk: MemoryDisk, store: CheckpointStore, build: Any) -> None:
    manifest = build.commit(store, 1)
    reader = build.open(disk, read_only=True)
    changes = disk.changes
    assert reader.manifest(1) == manifest
    assert reader.verify().whole
    for change in (
        lambda: reader.write_run(build.frame(1)),
        lambda: reader.commit(manifest),
        reader.collect,
        lambda: reader.set_aside(1, ""),
        lambda: reader.replace(manifest),
        lambda: reader.add_cuts([]),
        lambda: reader.put_run(manifest.runs()[0], b""),
    ):
        with pytest.raises(CheckpointError, match="reading only"):
            change()
    assert disk.changes == changes


def test_looking_at_a_store_that_does_not_exist_finds_nothing_and_makes_nothing(disk: MemoryDisk, build: Any) -> None:
    assert build.open(disk, read_only=True).survey().checkpoints == ()
    assert not disk.exists(build.base)


def test_foreign_files_are_passed_over(disk: MemoryDisk, store: CheckpointStore, build: Any) -> None:
    build.commit(store, 1)
    for name in (
        "manifests/readme.txt",
        "manifests/12.json",
        "manifests/00000000000x.json",
        "manifests/000000000000.json",
        "runs/x",
    ):
        disk.create(f"{build.base}/{name}", b"?")
    other = build.open(disk)
    assert other.epochs() == (1,)
    other.collect()
    assert disk.exists(f"{build.base}/runs/x")


# Retention


def test_the_last_n_are_kept_and_every_run_they_name(disk: MemoryDisk, build: Any) -> None:
    store = build.open(disk, keep=2)
    for epoch in range(1, 9):
        build.commit(store, epoch)
        store.collect()
        assert store.verify().whole
    assert store.epochs() == (7, 8)
    named = {run.digest for epoch in (7, 8) for run in store.manifest(epoch).runs()}
    assert set(disk.list(f"{build.base}/runs")) == named
    assert store.size_bytes() == sum(disk.size(f"{build.base}/runs/{digest}") for digest in named)


def test_a_pinned_checkpoint_stays_whole_until_it_is_unpinned_as_often(disk: MemoryDisk, build: Any) -> None:
    store = build.open(disk, keep=1)
    build.commit(store, 1)
    store.pin(1)
    store.pin(1)
    for epoch in (2, 3, 4, 5):
        build.commit(store, epoch)
        store.collect()
    assert store.epochs() == (1, 5)
    store.unpin(1)
    store.collect()
    assert store.verify(1).whole
    store.unpin(1)
    collected = store.collect()
    assert store.epochs() == (5,)
    assert collected.manifests == (1,)
    assert collected.runs == 2
    assert collected.size_bytes > 0


def test_the_newest_acknowledged_checkpoint_stays(build: Any, store: CheckpointStore) -> None:
    for epoch in range(1, 9):
        build.commit(store, epoch)
    store.collect(acknowledged=(2, 3))
    assert store.epochs() == (2, 3, 6, 7, 8)
    assert store.verify().whole


@pytest.mark.parametrize("at_the_same_moment", [False, True])
def test_of_two_processes_that_no_lock_keeps_apart_one_seals_an_epoch(
    disk: MemoryDisk, build: Any, monkeypatch: pytest.MonkeyPatch, *, at_the_same_moment: bool
) -> None:
    """As on a network file system whose locks are local."""
    build.commit(build.open(disk), 1)
    first, second = build.open(disk), build.open(disk)
    sealed = build.manifest(2, (first.write_run(build.frame(2)),), position=200)
    other = build.manifest(2, (second.write_run(build.frame(3)),), position=300)
    first.commit(sealed)
    with monkeypatch.context() as patch:
        if at_the_same_moment:
            patch.setattr(disk, "exists", lambda _path: False)
        with pytest.raises(StoreLockedError, match="written by another process"):
            second.commit(other)
    assert first.manifest(2) == sealed
    assert first.cut(2) == sealed.cut, "of two records the later one counts"
    build.commit(first, 3)
    assert build.open(disk).survey().checkpoints[-1].epoch == 3


def test_a_record_that_differs_from_its_manifest_is_replaced_at_the_next_start(disk: MemoryDisk, build: Any) -> None:
    """A process that lost against another one may have been killed before it could take its record back."""
    store = build.open(disk)
    build.commit(store, 1)
    store.log.restate(build.cut(1, position=999))
    assert build.open(disk).cut(1).sources["readings"].partitions["p0"].position == 999
    opened = build.open(disk)
    assert "1 cuts of kept checkpoints are missing or differ" in str(opened.mend_cuts())
    assert opened.cut(1) == opened.manifest(1).cut


def test_a_checkpoint_that_does_not_exist_cannot_be_pinned(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="cannot be pinned"):
        store.pin(1)


def test_a_run_that_an_attempt_wrote_survives_until_the_next_attempt_names_it(
    store: CheckpointStore, build: Any
) -> None:
    build.commit(store, 1)
    run = store.write_run(build.frame(77))
    store.collect()
    build.commit(store, 2)
    store.collect()
    store.commit(build.manifest(3, (run,)))
    assert store.verify().whole


def test_a_run_found_again_is_not_collected_before_it_is_named(build: Any, disk: MemoryDisk) -> None:
    """Its old manifests are about to go; `write_run` finds the file and does not write it."""
    store = build.open(disk, keep=1)
    run = store.write_run(build.frame(1))
    store.commit(build.manifest(1, (run,)))
    store.commit(build.manifest(2))
    assert store.write_run(build.frame(1)) == run
    store.collect()
    store.commit(build.manifest(3, (run,)))
    assert store.verify().whole


def test_a_run_that_nobody_ever_names_goes_in_the_end(build: Any, store: CheckpointStore, disk: MemoryDisk) -> None:
    orphan = store.write_run(build.frame(77))
    for epoch in range(1, HOLD_COMMITS + 3):
        store.commit(build.manifest(epoch))
        store.collect()
    assert not disk.exists(f"{build.base}/runs/{orphan.digest}")


def test_runs_that_nobody_names_after_a_restart_go_with_the_first_collection(
    disk: MemoryDisk, store: CheckpointStore, build: Any
) -> None:
    build.commit(store, 1)
    orphan = store.write_run(build.frame(77))
    other = build.open(disk)
    assert other.collect().runs == 1
    assert not disk.exists(f"{build.base}/runs/{orphan.digest}")
    assert other.verify().whole


def test_no_run_is_removed_while_a_kept_manifest_cannot_be_read(
    disk: MemoryDisk, build: Any, store: CheckpointStore
) -> None:
    for epoch in (1, 2, 3):
        build.commit(store, epoch)
    store.write_run(build.frame(77))
    disk.damage(f"{build.base}/manifests/000000000002.json", b"?")
    other = build.open(disk, keep=2)
    runs = disk.list(f"{build.base}/runs")
    other.collect()
    assert other.epochs() == (1, 2, 3), "the damaged one counts for none of the last two"
    assert disk.list(f"{build.base}/runs") == runs


def test_a_damaged_manifest_that_is_no_longer_kept_is_set_aside(
    disk: MemoryDisk, build: Any, store: CheckpointStore
) -> None:
    for epoch in (1, 2, 3, 4, 5):
        build.commit(store, epoch)
    disk.damage(f"{build.base}/manifests/000000000001.json", b"?")
    other = build.open(disk)
    assert other.collect().manifests == (2,)
    assert other.epochs() == (3, 4, 5)
    assert b"?" in files_of(disk, build.base).values()


def test_a_damaged_newest_manifest_does_not_push_the_last_whole_one_out(disk: MemoryDisk, build: Any) -> None:
    """It once counted among the last N, so with keep=1 nothing whole was left."""
    store = build.open(disk, keep=1)
    build.commit(store, 1)
    build.commit(store, 2)
    disk.damage(f"{build.base}/manifests/000000000002.json", b"?")
    other = build.open(disk, keep=1)
    other.collect()
    assert other.epochs() == (1, 2)
    assert other.verify(1).whole


def test_what_an_epoch_released_stays_until_it_is_rebuilt(disk: MemoryDisk, store: CheckpointStore, build: Any) -> None:
    manifests = [build.commit(store, epoch) for epoch in (1, 2, 3)]
    store.set_aside(2, "for a test")
    store.set_aside(3, "for a test")
    other = build.open(disk)
    other.collect()
    for manifest in manifests:
        for segment in manifest.segments:
            assert [other.read_run(run).height for run in segment.runs] == [2]
    build.commit(other, 2, sealed_before=True)
    other.collect()
    assert other.read_run(manifests[2].segments[0].runs[0]).height == 2
    build.commit(other, 3, sealed_before=True)
    other.collect()
    assert other.verify().whole


def test_a_removal_that_a_refusing_disk_stopped_is_made_durable_before_runs_go(build: Any) -> None:
    """The second call removes no manifest, but must not take the first one's removal for durable."""
    for seed in range(20):
        disk = MemoryDisk()
        store = build.open(disk, keep=1)
        for epoch in (1, 2, 3, 4):
            build.commit(store, epoch)
        disk.fail_next("remove", "read-only", after=3)
        with pytest.raises(StorageError):
            store.collect()
        assert disk.failures == 1
        store.collect()
        disk.crash(Random(seed))
        assert all(fact.problem is None for fact in build.open(disk).survey(deep=True).checkpoints)


def test_runs_are_removed_only_after_the_removal_of_their_manifest_is_durable(build: Any) -> None:
    order = []

    class Watched(MemoryDisk):
        def remove(self, path: Any) -> None:
            order.append(("remove", path.split("/")[-2]))
            super().remove(path)

        def fsync_dir(self, path: Any) -> None:
            order.append(("sync", path.split("/")[-1]))
            super().fsync_dir(path)

    store = build.open(Watched(), keep=1)
    build.commit(store, 1)
    store.commit(build.manifest(2))
    order.clear()
    store.collect()
    assert order == [("remove", "manifests"), ("sync", "manifests"), ("remove", "runs"), ("remove", "runs")]


def test_collecting_while_others_write_and_commit_never_takes_a_named_run(tmp_path: Path, build: Any) -> None:
    store = build.open(OsDisk(tmp_path), keep=1)
    stop = threading.Event()
    failures = []

    def collect() -> None:
        try:
            while not stop.is_set():
                store.collect()
        except Exception as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for epoch in range(1, 25):
            # The same few frames over and over: runs are found again just when they are about to go.
            state = tuple(store.write_run(build.frame(number % 3)) for number in range(epoch, epoch + 2))
            store.commit(build.manifest(epoch, state))
            assert store.verify(epoch).whole
    finally:
        stop.set()
        collector.join(timeout=30)
    assert failures == []


# Full disk, failed sync


@pytest.mark.parametrize(("operation", "after"), [("create", 0), ("create", 1), ("create", 2), ("append", 0)])
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_refused_write_seals_nothing_and_the_same_epoch_can_be_committed_later(
    disk: MemoryDisk, store: CheckpointStore, build: Any, operation: Any, after: Any, fault: Any
) -> None:
    build.commit(store, 1)
    disk.fail_next(operation, fault, after=after)
    with pytest.raises(StorageError, match="Nothing was acknowledged") as caught:
        build.commit(store, 2)
    assert not isinstance(caught.value, FatalStorageError)
    assert store.epochs() == (1,)
    assert decide(build.open(disk, read_only=True)) == Resume(epoch=1, where="local")
    assert not [name for name in files_of(disk, build.base) if "/.tmp-" in name]
    manifest = build.commit(store, 2)
    assert build.open(disk).verify().whole
    assert decide(build.open(disk)) == Resume(epoch=2, where="local")
    assert build.open(disk).cuts()[2] == manifest.cut


def test_a_disk_that_is_full_for_long_and_then_not_goes_on_where_it_stood(build: Any) -> None:
    disk = MemoryDisk()
    store = build.open(disk)
    build.commit(store, 1)
    disk.room_bytes = 0
    for _ in range(5):
        with pytest.raises(StorageError, match="the disk is full"):
            build.commit(store, 2)
    disk.room_bytes = None
    build.commit(store, 2)
    assert build.open(disk).verify().whole


@pytest.mark.parametrize("room", range(0, 4000, 37))
def test_however_little_room_there_is_an_epoch_is_sealed_whole_or_not_at_all(build: Any, room: Any) -> None:
    disk = MemoryDisk(room_bytes=room)
    sealed = 0
    try:
        store = build.open(disk)
        for epoch in (1, 2):
            build.commit(store, epoch)
            sealed = epoch
    except StorageError:
        pass
    found = build.open(disk, read_only=True)
    assert found.epochs() == tuple(range(1, sealed + 1))
    assert all(fact.problem is None for fact in found.verify().checkpoints)


@pytest.mark.parametrize(
    ("operation", "after"), [("fsync", n) for n in range(4)] + [("fsync_dir", 0), ("fsync_dir", 1)]
)
def test_after_a_failed_sync_nothing_is_acknowledged_ever_again(build: Any, operation: Any, after: Any) -> None:
    disk = MemoryDisk()
    store = build.open(disk)
    store.commit(build.manifest(1))
    disk.fail_next(operation, "sync", after=after)
    with pytest.raises(FatalStorageError, match="must stop"):
        build.commit(store, 2)
    assert disk.failures == 1
    with pytest.raises(FatalStorageError):
        build.commit(store, 2)
    with pytest.raises(FatalStorageError):
        store.write_run(build.frame(99))


# Names and options


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", ".hidden", "a..b", "-x", "a" * 101])
def test_names_that_could_lead_elsewhere_are_refused(disk: MemoryDisk, name: Any, build: Any) -> None:
    with pytest.raises(PipelineError, match="a name has 1 to 100"):
        type(build.open(disk))(disk, pipeline=name, node="n")


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": -1}, {"compression": "gzip"}])
def test_options_that_make_no_sense_are_refused(disk: MemoryDisk, build: Any, options: Any) -> None:
    with pytest.raises(ConfigError):
        build.open(disk, **options)


def test_failpoints_are_hit_in_the_order_of_a_commit(disk: MemoryDisk, build: Any) -> None:
    failpoints = build.failpoints()
    store = build.open(disk, failpoints=failpoints, keep=1)
    store.commit(build.manifest(1, (store.write_run(build.frame(1)),)))
    assert failpoints.hits == [
        "run.created",
        "run.synced",
        "run.renamed",
        "runs.dir-synced",
        "cut.appended",
        "cut.synced",
        "manifest.created",
        "manifest.synced",
        "manifest.renamed",
        "manifest.dir-synced",
    ]
    failpoints.hits.clear()
    store.commit(build.manifest(2))
    failpoints.hits.clear()
    store.collect()
    assert failpoints.hits == ["retention.before", "retention.removed-manifest", "retention.removed-run"]


def test_a_checkpoint_survives_on_a_real_disk(tmp_path: Path, build: Any) -> None:
    store = build.open(OsDisk(tmp_path))
    for epoch in range(1, 6):
        build.commit(store, epoch)
        store.collect()
    other = build.open(OsDisk(tmp_path))
    assert other.epochs() == (3, 4, 5)
    assert other.verify().whole
    assert isinstance(other.read_run(other.manifest(5).runs()[0]), pl.DataFrame)


@pytest.mark.parametrize("lost", [(3,), (2, 3), (1, 2, 3)])
def test_manifests_that_vanish_are_missed_and_their_epochs_stay_sealed(
    disk: MemoryDisk, store: CheckpointStore, build: Any, lost: tuple[int, ...]
) -> None:
    manifests = {epoch: build.commit(store, epoch) for epoch in (1, 2, 3)}
    for epoch in lost:
        disk.remove(f"{build.base}/manifests/{epoch:012}.json")
    opened = build.open(disk)
    decision = decide(opened)
    assert (decision.epoch, decision.replay) == (lost[0] - 1, lost)
    assert [fact.problem for fact in decision.damaged] == ["checkpoint 3 of pipeline cold-chain is missing."]
    opened.set_aside(3, "it is missing")
    assert b"it is missing" in disk.read(f"{build.base}/aside/000000000003-1.json")
    # What they had released is kept until they have been computed again.
    opened.collect()
    for epoch in lost:
        for run in manifests[epoch].segments[0].runs:
            assert opened.run_fault(run, deep=True) is None
    for epoch in lost:
        build.commit(opened, epoch, sealed_before=True)
    assert decide(build.open(disk)) == Resume(epoch=3, where="local")
    build.commit(opened, 4)


def test_an_epoch_that_was_never_sealed_is_not_missed(disk: MemoryDisk, store: CheckpointStore, build: Any) -> None:
    build.commit(store, 1)
    manifest = build.manifest(2, (store.write_run(build.frame(2)),))
    disk.fail_next("create", "full")
    with pytest.raises(StorageError):
        store.commit(manifest)
    assert store.cuts().keys() == {1, 2}
    opened = build.open(disk)
    assert decide(opened) == Resume(epoch=1, where="local")
    opened.set_aside(2, "there is none")
    assert decide(build.open(disk)) == Resume(epoch=1, where="local")
    build.commit(opened, 2)


def test_a_damaged_cut_log_is_mended_at_recovery(disk: MemoryDisk, store: CheckpointStore, build: Any) -> None:
    manifests = [build.commit(store, epoch) for epoch in (1, 2, 3)]
    assert store.mend_cuts() is None
    disk.damage(f"{build.base}/epochs.jsonl", b"rubbish")
    opened = build.open(disk)
    assert "3 cuts of kept checkpoints are missing" in str(opened.mend_cuts())
    assert opened.cuts() == {manifest.epoch: manifest.cut for manifest in manifests}
    assert disk.read(f"{build.base}/aside/epochs-1.jsonl") == b"rubbish"
    assert opened.mend_cuts() is None
    build.commit(opened, 4)
