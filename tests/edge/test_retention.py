"""Rule 3: the newest checkpoint that the hub has, and the newest at the remote, stay on this node. Damage stops no merge of other states."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.epochs.conftest import NODE, PIPELINE, commit_epoch, open_store
from tests.epochs.test_merge import Summed, part

from fordstone import Pipeline
from fordstone.connectors import memory, stdout
from fordstone.connectors.memory import MemorySource
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.assembly import Environment
from fordstone.edge.engine.release import Retention
from fordstone.edge.engine.writer import Writer
from fordstone.edge.link.links import CheckpointCopier, HubLink, Links
from fordstone.hub.client.address import HubAddress
from fordstone.runtime.clock import SystemClock
from fordstone.runtime.snapshot import FrozenState
from fordstone.state.base import Piece
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


def test_a_run_with_a_hub_and_a_remote_registers_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubLink, "acknowledged", lambda _: (2,))
    monkeypatch.setattr(CheckpointCopier, "acknowledged", lambda _: (5,))
    config = RunConfig(state=tmp_path, hub=HubAddress(url="http://127.0.0.1:1"), remote=str(tmp_path / "remote"))
    pipeline = Pipeline(PIPELINE)
    pipeline.source("src", memory(MemorySource()), schema={"n": "bigint"}).sink("out", stdout())
    disk = MemoryDisk()
    store = open_store(disk, keep=2)
    retention = Retention(store)
    links = Links(pipeline.plan(), config, Environment(clock=SystemClock(), disk=disk), store)
    with closing(links):
        links.begin(cast("Writer", SimpleNamespace(stages=SimpleNamespace(retention=retention))))
        for epoch in range(1, 10):
            commit_epoch(store, epoch)
            retention.collect(epoch)
    assert store.epochs() == (2, 5, 8, 9)


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


def test_a_damaged_run_keeps_its_state_from_being_merged_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    store = open_store(disk)
    damaged, whole = (Summed([Piece(ref=store.write_run(part(key, value))) for value in (1, 2)]) for key in "ab")
    rotten = damaged.freeze()[0].ref
    assert rotten is not None
    disk.damage(f"{PIPELINE}/{NODE}/runs/{rotten.digest}", b"other bytes")
    retention = Retention(store)
    for _ in range(2):
        states = [
            FrozenState(step="count", name=name, subtask=0, pieces=state.freeze(), state=state)
            for name, state in (("damaged", damaged), ("whole", whole))
        ]
        retention.merge_later(states)
        while retention.merge_one():
            pass
    assert (len(damaged.freeze()), len(whole.freeze())) == (2, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "logged once"
