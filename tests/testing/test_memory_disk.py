from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from fordstone.errors import DamagedError, StorageError
from fordstone.storage.disk import FatalStorageError
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

SEEDS = range(200)


@pytest.fixture
def disk() -> Any:
    disk = MemoryDisk()
    disk.make_dirs("d/e")
    return disk


def outcomes(prepare: Any, look: Any) -> Any:
    """What a look at the disk gives after a crash, over many seeds."""
    found = set()
    for seed in SEEDS:
        disk = MemoryDisk()
        disk.make_dirs("d/e")
        prepare(disk)
        disk.crash(Random(seed))
        found.add(look(disk))
    return found


def content(path: Any) -> Any:
    return lambda disk: disk.read(path) if disk.exists(path) else None


def test_what_was_synced_with_its_name_survives_every_crash() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/x", b"abc")
        disk.fsync("d/x")
        disk.fsync_dir("d")

    assert outcomes(prepare, content("d/x")) == {b"abc"}


def test_unsynced_bytes_may_be_lost_torn_zeroed_or_whole() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/x", b"abcd")
        disk.fsync_dir("d")

    found = outcomes(prepare, content("d/x"))
    assert {b"", b"abcd", b"ab", b"ab\x00\x00", b"\x00\x00\x00\x00"} <= found
    assert None not in found


def test_an_unsynced_name_may_be_lost_even_when_the_bytes_are_synced() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/x", b"abc")
        disk.fsync("d/x")

    assert outcomes(prepare, content("d/x")) == {None, b"abc"}


def test_unsynced_appending_never_hurts_what_was_synced() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/x", b"abc")
        disk.fsync("d/x")
        disk.fsync_dir("d")
        disk.append("d/x", b"de")

    found = outcomes(prepare, content("d/x"))
    assert all(data.startswith(b"abc") for data in found)
    assert {b"abc", b"abcd", b"abcde"} <= found


def test_a_rename_that_is_not_synced_shows_the_old_or_the_new_and_never_neither() -> None:
    def prepare(disk: MemoryDisk) -> None:
        for name, data in (("x", b"old"), ("y", b"new")):
            disk.create(f"d/{name}", data)
            disk.fsync(f"d/{name}")
        disk.fsync_dir("d")
        disk.rename("d/y", "d/x")

    assert outcomes(prepare, lambda disk: (content("d/x")(disk), content("d/y")(disk))) == {
        (b"old", b"new"),
        (b"new", None),
    }


def test_a_rename_between_directories_may_come_apart() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/x", b"1")
        disk.fsync("d/x")
        disk.fsync_dir("d")
        disk.rename("d/x", "d/e/x")

    found = outcomes(prepare, lambda disk: (content("d/x")(disk), content("d/e/x")(disk)))
    assert found == {(b"1", None), (None, b"1"), (b"1", b"1"), (None, None)}


def test_a_directory_that_was_renamed_without_a_sync_has_the_old_name_or_the_new_and_keeps_its_files() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/e/x", b"1")
        disk.fsync("d/e/x")
        disk.fsync_dir("d/e")
        disk.rename("d/e", "d/f")

    assert outcomes(prepare, lambda disk: (content("d/e/x")(disk), content("d/f/x")(disk))) == {
        (b"1", None),
        (None, b"1"),
    }


def test_the_sync_of_a_directory_makes_the_new_name_of_one_below_it_durable_and_not_the_names_in_that() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/e/x", b"1")
        disk.fsync("d/e/x")
        disk.rename("d/e", "d/f")
        disk.fsync_dir("d")

    found = outcomes(prepare, lambda disk: (disk.exists("d/e"), disk.exists("d/f"), content("d/f/x")(disk)))
    assert found == {(False, True, None), (False, True, b"1")}


def test_a_directory_that_is_made_in_the_place_of_another_is_durable_whatever_becomes_of_that() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.rename("d/e", "d/f")
        disk.make_dirs("d/e")

    assert {found[0] for found in outcomes(prepare, lambda disk: (disk.exists("d/e"), disk.exists("d/f")))} == {True}


def test_a_removed_directory_may_come_back_without_a_sync_and_not_with_one() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.remove_dir("d/e")

    def prepare_synced(disk: MemoryDisk) -> None:
        prepare(disk)
        disk.fsync_dir("d")

    assert outcomes(prepare, lambda disk: disk.exists("d/e")) == {True, False}
    assert outcomes(prepare_synced, lambda disk: disk.exists("d/e")) == {False}


def test_a_removal_that_is_not_synced_may_be_undone() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/x", b"1")
        disk.fsync("d/x")
        disk.fsync_dir("d")
        disk.remove("d/x")

    assert outcomes(prepare, content("d/x")) == {None, b"1"}


def test_later_changes_may_survive_without_earlier_ones() -> None:
    def prepare(disk: MemoryDisk) -> None:
        for name in ("x", "y"):
            disk.create(f"d/{name}", b"1")
            disk.fsync(f"d/{name}")

    assert outcomes(prepare, lambda disk: tuple(disk.list("d"))) == {("e",), ("e", "x"), ("e", "y"), ("e", "x", "y")}


def test_the_same_seed_gives_the_same_crash() -> None:
    def run() -> Any:
        disk = MemoryDisk()
        disk.make_dirs("d")
        for number in range(20):
            disk.create(f"d/{number}", bytes(range(number)))
        disk.crash(Random(7))
        return [(name, disk.read(f"d/{name}")) for name in disk.list("d")]

    assert run() == run()


def test_a_second_crash_changes_nothing_more(disk: MemoryDisk) -> None:
    disk.create("d/x", b"abcdef")
    disk.append("d/y", b"abcdef")
    disk.crash(Random(3))
    first = [(name, disk.read(f"d/{name}")) for name in disk.list("d") if name != "e"]
    disk.crash(Random(4))
    assert [(name, disk.read(f"d/{name}")) for name in disk.list("d") if name != "e"] == first


def test_a_killed_process_leaves_everything_written(disk: MemoryDisk) -> None:
    disk.create("d/x", b"abc")
    disk.cut_after = disk.changes
    with pytest.raises(PowerCut):
        disk.fsync("d/x")
    disk.kill()
    assert disk.read("d/x") == b"abc"
    disk.fsync("d/x")


def test_the_power_goes_after_a_number_of_changes_and_stays_off(disk: MemoryDisk) -> None:
    disk.cut_after = 2
    disk.create("d/x", b"")
    disk.create("d/y", b"")
    for _ in range(2):
        with pytest.raises(PowerCut):
            disk.create("d/z", b"")
    assert disk.read("d/x") == b""
    disk.crash(Random(1))
    disk.create("d/z", b"")


def test_a_full_disk_takes_a_part_and_has_room_again_after_a_removal() -> None:
    disk = MemoryDisk(room_bytes=10)
    disk.create("x", b"123456")
    with pytest.raises(StorageError, match="the disk is full"):
        disk.create("y", b"123456")
    assert disk.read("y") == b"1234"
    disk.remove("x")
    disk.append("y", b"56")
    assert disk.read("y") == b"123456"
    with pytest.raises(StorageError):
        disk.append("y", b"7890abc")
    assert disk.read("y") == b"1234567890"


def test_replacing_a_file_gives_its_room_back() -> None:
    disk = MemoryDisk(room_bytes=8)
    for _ in range(5):
        disk.create("new", b"1234")
        disk.rename("new", "old")
    assert disk.read("old") == b"1234"


def test_planned_faults_come_once_in_order_and_are_counted(disk: MemoryDisk) -> None:
    disk.fail_next("create", "full")
    disk.fail_next("create", "read-only", after=1)
    with pytest.raises(StorageError, match="full"):
        disk.create("d/a", b"12")
    disk.create("d/b", b"12")
    with pytest.raises(StorageError, match="read-only"):
        disk.create("d/c", b"12")
    disk.create("d/c", b"12")
    assert disk.failures == 2
    assert disk.counts["create"] == 4


@pytest.mark.parametrize("operation", ["fsync", "fsync_dir"])
def test_after_a_failed_sync_all_changes_are_refused_until_the_machine_restarts(
    disk: MemoryDisk, operation: Any
) -> None:
    disk.create("d/x", b"abc")
    disk.fail_next(operation, "sync")
    with pytest.raises(FatalStorageError):
        disk.fsync("d/x") if operation == "fsync" else disk.fsync_dir("d")
    changes: tuple[Callable[[], None], ...] = (
        lambda: disk.create("d/y", b""),
        lambda: disk.fsync("d/x"),
        lambda: disk.remove("d/x"),
    )
    for change in changes:
        with pytest.raises(FatalStorageError):
            change()
    assert disk.read("d/x") == b"abc"
    disk.crash(Random(1))
    disk.create("d/y", b"")


def test_a_failed_sync_makes_nothing_durable() -> None:
    def prepare(disk: MemoryDisk) -> None:
        disk.create("d/x", b"abc")
        disk.fsync_dir("d")
        disk.fail_next("fsync", "sync")
        with pytest.raises(FatalStorageError):
            disk.fsync("d/x")

    assert b"" in outcomes(prepare, content("d/x"))


def test_a_bad_sector_fails_one_read(disk: MemoryDisk) -> None:
    disk.create("d/x", b"abc")
    disk.fail_next("read", "bad-sector")
    with pytest.raises(DamagedError):
        disk.read("d/x")
    assert disk.read("d/x") == b"abc"


def test_damage_is_durable(disk: MemoryDisk) -> None:
    disk.create("d/x", b"abc")
    disk.fsync_dir("d")
    disk.damage("d/x", b"zzz")
    disk.crash(Random(1))
    assert disk.read("d/x") == b"zzz"
