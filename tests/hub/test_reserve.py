"""The space that a full hub still has, to remove rows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import pytest

from fordstone.hub.messages import Rejection
from fordstone.hub.server.limits import DiskQuota
from fordstone.hub.store.blobs import BlobLocks, open_blobs
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.log_schema import PAGE_BYTES, WAL_PAGES
from fordstone.hub.store.reserve import RESERVE_BYTES_MAX, RESERVE_NAME, Reserve
from fordstone.hub.store.retention import Retention
from fordstone.hub.store.sqlite import SqliteStore

MIB = 1 << 20


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the disk says of itself."""
    disk = {"total": 100 * MIB, "free": 100 * MIB}
    monkeypatch.setattr(
        "fordstone.hub.store.reserve.shutil.disk_usage", lambda _: Usage(disk["total"], 0, disk["free"])
    )
    return disk


@pytest.mark.parametrize(
    ("total", "size_bytes"),
    [(1 << 40, RESERVE_BYTES_MAX), (160 * MIB, 10 * MIB), (0, 0)],
    ids=["large", "small", "odd"],
)
def test_the_reserve_fits_its_disk(tmp_path: Path, usage: dict[str, int], total: int, size_bytes: int) -> None:
    usage["total"] = total
    reserve = Reserve(tmp_path)
    assert (reserve.size_bytes, reserve.held) == (size_bytes, True)
    assert (tmp_path / RESERVE_NAME).stat().st_size == size_bytes


def test_it_is_held_only_while_the_disk_has_twice_as_much_space(tmp_path: Path, usage: dict[str, int]) -> None:
    reserve = Reserve(tmp_path, size_bytes=MIB)
    reserve.give_up()
    reserve.give_up()
    assert not (tmp_path / RESERVE_NAME).exists()
    usage["free"] = 2 * MIB - 1
    assert not reserve.take()
    usage["free"] = 2 * MIB
    assert reserve.take()
    usage["free"] = 0
    assert Reserve(tmp_path, size_bytes=MIB).held, "it was there when the hub was started"


def test_a_reserve_with_holes_holds_nothing(tmp_path: Path, usage: dict[str, int]) -> None:
    usage["free"] = 0
    with (tmp_path / RESERVE_NAME).open("wb") as file:
        file.truncate(MIB)
    assert not Reserve(tmp_path, size_bytes=MIB).held


def test_a_disk_that_cannot_give_the_space_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("fordstone.hub.store.reserve.os.posix_fallocate", full)
    assert not Reserve(tmp_path, size_bytes=MIB).held
    assert not (tmp_path / RESERVE_NAME).exists()


def test_what_waits_in_the_write_ahead_log_fits_into_half_of_the_reserve(tmp_path: Path) -> None:
    for size_bytes, pages in ((RESERVE_BYTES_MAX, WAL_PAGES), (MIB, MIB // 2 // PAGE_BYTES)):
        store = SqliteStore(tmp_path / "log.sqlite", reserve=Reserve(tmp_path, size_bytes=size_bytes))
        assert store._db.execute("PRAGMA wal_autocheckpoint").fetchone()[0] == pages
        store.close()


def test_without_the_reserve_neither_blobs_nor_epochs_are_taken(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path, size_bytes=MIB)
    log = HubLog(SqliteStore(tmp_path / "log.sqlite", reserve=reserve), clock_us=lambda: 0)
    quota = DiskQuota([], has_reserve=log.has_reserve)
    with contextlib.closing(log):
        quota.check_blob()
        reserve.give_up()
        for check in (quota.check_blob, quota.check_epochs):
            with pytest.raises(Rejection, match="nearly full"):
                check()
        assert log.restore_reserve().result(10)
        quota.check_epochs()


def test_free_pages_are_cut_off_the_file_and_the_write_ahead_log_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    wal = tmp_path / "log.sqlite-wal"
    with contextlib.closing(HubLog(SqliteStore(path), clock_us=lambda: 0)) as log:
        blobs = {f"{number:064x}": bytes([number]) * 10_000 for number in range(30)}
        log.write(lambda tx: [tx.log.save_small_blob(*blob, ran_us=0) for blob in blobs.items()]).result(10)
        digests = log.read(lambda log: log.unreferenced_blobs(before_us=1, limit=99))
        log.write(lambda tx: tx.log.remove_blobs(digests, before_us=1)).result(10)
        assert log.empty_wal().result(10)
        before, free = path.stat().st_size, log.read(lambda log: log.pages()).free
        assert free > 30
        log.shrink(10).result(10)
        assert log.read(lambda log: log.pages()).free == free - 10
        log.shrink(1_000).result(10)
        assert log.empty_wal().result(10)
        assert log.read(lambda log: log.pages()).free == 0
        assert path.stat().st_size <= before - free * PAGE_BYTES
        assert wal.stat().st_size == 0


def test_retention_cuts_off_the_pages_that_it_has_freed_when_space_is_short(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "blobs", beside=tmp_path / "incoming")
    with contextlib.closing(HubLog(SqliteStore(tmp_path / "log.sqlite"), clock_us=lambda: 0)) as log:
        log.write(
            lambda tx: [tx.log.save_small_blob(f"{one:064x}", b"x" * 10_000, ran_us=0) for one in range(30)]
        ).result(10)
        retention = Retention(log, blobs, BlobLocks(), grace_us=-1, short_of_space=lambda: True)
        assert retention.round().blobs == 30
        while retention.round().more:
            pass
        assert log.read(lambda log: log.pages()).free == 0


def test_a_reader_delays_only_the_end_of_the_write_ahead_log(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "log.sqlite")
    with store.snapshot() as log:
        log.newest_seq()
        with store.transaction() as writer:
            writer.save_small_blob("d", b"data", ran_us=0)
        assert not store.empty_wal(), "and does not wait"
    assert store.empty_wal()
    store.close()
