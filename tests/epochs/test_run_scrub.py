"""A node reads the runs of its checkpoints again, slowly, and repairs from a copy what the disk has damaged."""

from __future__ import annotations

import itertools
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fordstone.edge.link.scrub import RunScrub
from fordstone.epochs.copies import Uploader, fetch_run
from fordstone.epochs.run_file import SCRUB_PASS_US, digest_of
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import DamagedError, HubAwayError
from fordstone.state.base import RunRef
from fordstone.storage.disk import PIECE_BYTES, OsDisk
from fordstone.storage.remote import DiskRemote
from fordstone.testing.memory_disk import MemoryDisk


class Clock:
    def __init__(self) -> None:
        self.us = 0

    def monotonic_us(self) -> int:
        return self.us

    def wall_us(self) -> int:
        return self.us


class World:
    """Three checkpoints, and a scrub that the test steps."""

    def __init__(self, build: Any, disk: MemoryDisk, store: CheckpointStore, **how: Any) -> None:
        for epoch in (1, 2, 3):
            build.commit(store, epoch)
        self.build, self.disk, self.store = build, disk, store
        self.clock = Clock()
        self.scrub = RunScrub(store, self.clock, chance=lambda: 0.5, **how)

    def runs(self) -> list[RunRef]:
        return sorted({run for epoch in self.store.epochs() for run in self.store.manifest(epoch).runs()}, key=str)

    def flip(self, run: RunRef, at: int = -1) -> None:
        path = f"{self.build.base}/runs/{run.digest}"
        data = bytearray(self.disk.read(path))
        data[at] ^= 1
        self.disk.damage(path, bytes(data))

    def one_pass(self) -> None:
        """Step through a whole pass, moving the clock over every wait."""
        until_us = self.clock.us + SCRUB_PASS_US
        while True:
            self.scrub.step()
            wait_us = self.scrub.idle_wait_us
            assert wait_us is not None
            if self.clock.us + wait_us >= until_us:
                self.clock.us = until_us
                return
            self.clock.us += wait_us


@pytest.fixture
def world(build: Any, disk: MemoryDisk, store: CheckpointStore) -> World:
    return World(build, disk, store)


def test_whole_runs_are_read_once_per_pass_and_slowly(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, RunRef]] = []
    fault = world.store.run_fault

    def look(run: RunRef, *, deep: bool = False) -> str | None:
        read.append((world.clock.us, run))
        return fault(run, deep=deep)

    monkeypatch.setattr(world.store, "run_fault", look)
    world.scrub = RunScrub(world.store, world.clock, bytes_per_s=1_000)
    world.one_pass()
    assert sorted((run for _, run in read), key=str) == world.runs()
    for (began_us, run), (next_us, _) in itertools.pairwise(read):
        assert next_us - began_us >= run.size_bytes * 1_000, "at most 1,000 bytes per second"
    assert world.scrub.damaged == 0
    world.one_pass()
    assert len(read) == 2 * len(world.runs())


def test_every_flipped_run_is_found_and_reported_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for run in world.runs():
        world.flip(run, at=run.size_bytes // 2)
    with caplog.at_level(logging.ERROR):
        world.one_pass()
        world.one_pass()
    assert world.scrub.damaged == len(world.runs())
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == len(world.runs())


def test_a_missing_run_is_damage_and_one_that_was_collected_is_not(world: World) -> None:
    first, second = world.runs()[:2]
    world.disk.remove(f"{world.build.base}/runs/{first.digest}")
    world.one_pass()
    assert world.scrub.damaged == 1
    world.flip(second)
    for epoch in range(4, 8):
        world.build.commit(world.store, epoch)
    world.store.collect()
    gone = {first, second} - set(world.runs())
    world.one_pass()
    assert world.scrub.damaged == 2 - len(gone)


def test_a_copy_at_the_remote_repairs_it_and_copies_that_are_away_or_damaged_do_not(
    build: Any, disk: MemoryDisk, store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    def away(_run: RunRef) -> bytes:
        raise HubAwayError("no route")

    remote = DiskRemote(MemoryDisk())
    copies: list[Any] = [away, lambda run: bytes(run.size_bytes)]
    world = World(build, disk, store, copies=copies)
    uploader = Uploader(store, remote)
    uploader.offer(3)
    while uploader.step():
        pass
    run = store.manifest(3).runs()[0]
    world.flip(run)
    world.one_pass()
    assert world.scrub.damaged == 1
    world.scrub = RunScrub(store, world.clock, copies=[*copies, lambda run: fetch_run(remote, store, run)])
    with caplog.at_level(logging.WARNING):
        world.one_pass()
    assert world.scrub.damaged == 0
    assert any("damaged run repaired" in record.message for record in caplog.records)
    assert store.read_run(run) is not None
    assert store.verify().whole


def test_damage_that_a_later_write_repaired_is_no_longer_reported(world: World) -> None:
    run = world.store.manifest(3).runs()[0]
    data = world.store.read_run_bytes(run)
    world.flip(run)
    world.one_pass()
    assert world.scrub.damaged == 1
    with pytest.raises(DamagedError):
        world.store.read_run(run)
    world.store.put_run(run, data)
    world.one_pass()
    assert world.scrub.damaged == 0


def test_a_large_run_is_checked_in_little_memory(tmp_path: Path) -> None:
    """A merged run has all of a state, which may be half of what the machine has."""
    store = CheckpointStore(OsDisk(tmp_path), pipeline="p", node="n", keep=3)
    data = bytes(16 * PIECE_BYTES)
    whole = RunRef(digest_of(data), len(data), 1)
    store.put_run(whole, data)
    tracemalloc.start()
    try:
        assert store.run_fault(whole, deep=True) is None
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * PIECE_BYTES
