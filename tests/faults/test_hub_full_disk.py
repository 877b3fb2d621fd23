"""A hub that its own data has filled: once consumers have read on, it becomes empty and takes data again, without a restart."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.faults.small_disk import SmallDisk, small_disk

from fordstone.hub.messages import (
    Commit,
    ConsumerPosition,
    EpochEntry,
    Generation,
    LeaseRequest,
    NodePosition,
    Rejection,
    StreamSegment,
)
from fordstone.hub.server.limits import DiskQuota
from fordstone.hub.store import commits
from fordstone.hub.store.blobs import BlobLocks, DiskBlobs, Upload
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.reserve import Reserve
from fordstone.hub.store.retention import Removed, Retention
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.state.base import RunRef

SMALL_BYTES = 12_000
LARGE_BYTES = 100_000
BLOBS_PER_EPOCH = 8
EPOCHS_MAX = 20_000
"""More than fit on any of the disks."""


class FullError(Exception):
    pass


@dataclass
class FullHub:
    """The hub's log, blobs and retention on a small disk. Uploads look at the quota as the handlers do, or not at all."""

    place: Path
    asks: bool = True
    time_us: int = 0
    epoch: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.log = HubLog(
            SqliteStore(self.place / "log.sqlite", reserve=Reserve(self.place)), clock_us=lambda: self.time_us
        )
        self.blobs = DiskBlobs(self.place / "blobs")
        self.locks = BlobLocks()
        self._look_s = 0.0
        self.quota = DiskQuota([self.place], has_reserve=self.log.has_reserve, clock_s=self._clock_s)
        self.retention = Retention(self.log, self.blobs, self.locks, grace_us=0, short_of_space=self.quota.is_short)

    def _clock_s(self) -> float:
        """Every look is a new one."""
        self._look_s += 1.0
        return self._look_s

    def register(self) -> None:
        self.log.write(lambda tx: commits.lease(tx, "p", "n", LeaseRequest(holder="h", local=1, start="s"))).result(60)
        self.read_up_to(0)

    def put(self, size_bytes: int) -> RunRef:
        """Upload one blob; `FullError` if the hub rejects it because of its disk."""
        data = self.random.randbytes(size_bytes)
        digest = hashlib.sha256(data).hexdigest()
        with self._rejected():
            if self.asks:
                self.quota.check_blob()
            if size_bytes <= SMALL_BYTES:
                self.log.write(lambda tx: tx.log.save_small_blob(digest, data, ran_us=tx.ran_us)).result(60)
            else:
                with contextlib.closing(Upload(self.blobs.beside())) as upload, self.locks.arrival(digest):
                    upload.write(data)
                    upload.store(self.blobs, digest)
                    self.log.record_blob(digest, size_bytes)
        return RunRef(digest=digest, size_bytes=size_bytes, rows=1)

    def send(self, size_bytes: int) -> None:
        """Upload and commit one epoch."""
        runs = tuple(self.put(size_bytes) for _ in range(BLOBS_PER_EPOCH))
        entry = EpochEntry(epoch=self.epoch + 1, streams={"s": StreamSegment(runs=runs)}, created_us=0)
        body = Commit(generation=Generation(hub=1, local=1), epochs=(entry,))
        with self._rejected():
            if self.asks:
                self.quota.check_epochs()
            self.log.write(lambda tx: commits.commit(tx, "p", "n", body, [entry.digest()])).result(60)
        self.epoch += 1

    def fill(self, size_bytes: int) -> int:
        """Send epochs until the hub is full; return how many."""
        before = self.epoch
        with contextlib.suppress(FullError):
            while self.epoch < EPOCHS_MAX:
                self.send(size_bytes)
        assert self.epoch < EPOCHS_MAX, "the disk is full by then"
        return self.epoch - before

    def read_up_to(self, epoch: int) -> None:
        position = ConsumerPosition(streams={"s": {"n": NodePosition(epoch)}})

        def save() -> None:
            with self._rejected():
                self.log.write(lambda tx: tx.log.save_position("p", "center", position, now_us=tx.now_us)).result(60)

        try:
            save()
        except FullError:
            save()  # as the center does

    def retain(self) -> None:
        """Let retention run until it finds nothing."""
        self.time_us += 1
        while self.retention.round() != Removed():
            pass

    @contextlib.contextmanager
    def _rejected(self) -> Iterator[None]:
        try:
            yield
        except Rejection as rejection:
            raise (FullError if rejection.refusal.error == "storage" else AssertionError) from rejection


@contextlib.contextmanager
def full_hub(disk: SmallDisk, *, asks: bool = True) -> Iterator[FullHub]:
    hub = FullHub(disk.place, asks=asks)
    try:
        hub.register()
        yield hub
    finally:
        hub.log.close()


@pytest.mark.parametrize("asks", [True, False], ids=["refused early", "really full"])
@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, LARGE_BYTES], ids=["small blobs", "files"])
@pytest.mark.parametrize("disk_size", ["24m", "64m"])
def test_a_hub_that_was_full_and_then_emptied_takes_as_much_again(
    disk_size: str, size_bytes: int, asks: bool, tmp_path: Path, faults: Callable[..., None]
) -> None:
    with small_disk(tmp_path, "hub", size=disk_size) as disk, full_hub(disk, asks=asks) as hub:
        first = hub.fill(size_bytes)
        faults(full_disks=1)
        assert first > 3
        hub.read_up_to(hub.epoch)
        hub.retain()
        assert hub.log.has_reserve(), "held again"
        assert hub.fill(size_bytes) >= 0.9 * first


@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, LARGE_BYTES], ids=["small blobs", "files"])
def test_rows_are_removed_and_positions_taken_on_a_disk_that_others_have_filled_to_the_last_byte(
    size_bytes: int, tmp_path: Path, faults: Callable[..., None]
) -> None:
    with small_disk(tmp_path, "hub", size="48m") as disk, full_hub(disk) as hub:
        first = hub.fill(size_bytes)
        disk.fill()
        faults(full_disks=1)
        hub.read_up_to(hub.epoch)
        hub.retain()
        assert hub.log.read(lambda log: log.totals(after_seq=0)).blobs == 0
        disk.make_room()
        hub.retain()
        assert hub.fill(size_bytes) >= 0.9 * first


def test_a_hub_starts_on_a_full_disk_and_takes_nothing_until_there_is_space(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    with small_disk(tmp_path, "hub", size="24m") as disk:
        with full_hub(disk) as hub:
            hub.send(SMALL_BYTES)
        disk.fill()
        faults(full_disks=1)
        hub = FullHub(disk.place)
        with contextlib.closing(hub.log):
            hub.epoch = 1
            hub.read_up_to(1)
            with pytest.raises(FullError):
                hub.put(SMALL_BYTES)
            disk.make_room()
            hub.retain()
            hub.send(SMALL_BYTES)
