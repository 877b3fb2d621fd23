"""Rule 3: the newest checkpoint that the hub has, and the newest at the remote, stay on this node."""

from __future__ import annotations

from pathlib import Path

from tests.epochs.conftest import commit_epoch, open_store

from fordstone.edge.engine.release import Retention
from fordstone.edge.link.links import CheckpointCopier
from fordstone.runtime.clock import SystemClock
from fordstone.testing.memory_disk import MemoryDisk


def test_with_a_hub_and_a_remote_the_newest_acknowledged_of_each_stays() -> None:
    store = open_store(MemoryDisk(), keep=2)
    retention = Retention(store)
    hub, remote = [2], [5]
    retention.keep_for(lambda: hub)
    retention.keep_for(lambda: remote)
    for epoch in range(1, 10):
        commit_epoch(store, epoch)
        retention.collect(epoch)
    assert store.epochs() == (2, 5, 8, 9)
    hub[0] = 8
    retention.collect(9)
    assert store.epochs() == (5, 8, 9)
    assert store.verify().whole


def test_what_the_process_before_had_kept_for_the_remote_stays_until_a_newer_one_is_there(tmp_path: Path) -> None:
    disk = MemoryDisk()
    store = open_store(disk, keep=1)
    for epoch in range(1, 4):
        commit_epoch(store, epoch)
    store.collect(acknowledged=(2,))
    assert store.epochs() == (2, 3)

    again = open_store(disk, keep=1)
    retention = Retention(again)
    copier = CheckpointCopier(str(tmp_path / "remote"), again, SystemClock(), keep=1)
    retention.keep_for(copier.acknowledged)
    commit_epoch(again, 4)
    retention.collect(4)
    assert again.epochs() == (2, 3, 4), "which of them is at the remote is not known yet"
    copier.finish()
    retention.collect(4)
    assert again.epochs() == (4,)
