"""One contract for every disk; then what only the real one does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fordstone.errors import DamagedError, StorageError, StoreLockedError
from fordstone.storage.disk import FatalStorageError, OsDisk
from fordstone.testing.memory_disk import MemoryDisk


@pytest.fixture(params=["os", "memory"])
def any_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    disk = OsDisk(tmp_path / "root") if request.param == "os" else MemoryDisk()
    disk.make_dirs("a/b")
    return disk


def test_what_was_created_is_read_back(any_disk: Any) -> None:
    for data in (b"", b"abc", bytearray(b"def"), memoryview(b"ghij")[1:3]):
        any_disk.create("a/b/file", data)
        any_disk.fsync("a/b/file")
        assert any_disk.read("a/b/file") == bytes(data)
        assert any_disk.size("a/b/file") == len(data)
        any_disk.remove("a/b/file")


def test_a_name_is_created_once(any_disk: Any) -> None:
    any_disk.create("a/x", b"1")
    with pytest.raises(FileExistsError):
        any_disk.create("a/x", b"2")
    assert any_disk.read("a/x") == b"1"


def test_appending_adds_at_the_end_before_and_after_a_sync(any_disk: Any) -> None:
    any_disk.append("a/log", b"1")
    any_disk.append("a/log", b"2")
    any_disk.fsync("a/log")
    any_disk.append("a/log", b"3")
    any_disk.fsync("a/log")
    assert any_disk.read("a/log") == b"123"


def test_renaming_replaces(any_disk: Any) -> None:
    any_disk.create("a/old", b"old")
    any_disk.create("a/b/new", b"new")
    any_disk.rename("a/b/new", "a/old")
    assert any_disk.read("a/old") == b"new"
    assert not any_disk.exists("a/b/new")


def test_what_is_missing_is_reported_as_missing(any_disk: Any) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: any_disk.read("a/none"),
        lambda: any_disk.read("none/none"),
        lambda: any_disk.size("a/none"),
        lambda: any_disk.size("a/b"),
        lambda: any_disk.rename("a/none", "a/x"),
        lambda: any_disk.fsync("a/none"),
        lambda: any_disk.fsync_dir("none"),
    )
    for call in calls:
        with pytest.raises(FileNotFoundError):
            call()
    any_disk.remove("a/none")
    any_disk.remove("none/none")
    assert any_disk.list("none") == ()
    assert not any_disk.exists("none")


def test_listing_gives_files_and_directories_sorted(any_disk: Any) -> None:
    any_disk.create("a/z", b"")
    any_disk.create("a/c", b"")
    assert list(any_disk.list("a")) == ["b", "c", "z"]
    assert list(any_disk.list("a/b")) == []


def test_making_directories_twice_is_no_fault(any_disk: Any) -> None:
    any_disk.make_dirs("a/b")
    any_disk.make_dirs("a/b/c/d")
    assert any_disk.exists("a/b/c/d")
    any_disk.fsync_dir("a/b/c")


def test_a_directory_is_renamed_with_all_that_is_in_it(any_disk: Any) -> None:
    any_disk.make_dirs("a/b/c")
    any_disk.create("a/b/c/x", b"1")
    any_disk.create("a/b/y", b"2")
    any_disk.rename("a/b", "a/n")
    assert not any_disk.exists("a/b")
    assert any_disk.read("a/n/c/x") == b"1"
    assert list(any_disk.list("a/n")) == ["c", "y"]
    any_disk.make_dirs("a/b")
    assert list(any_disk.list("a/b")) == []


def test_a_directory_never_takes_the_name_of_one_that_has_files(any_disk: Any) -> None:
    any_disk.make_dirs("a/n")
    any_disk.create("a/n/x", b"1")
    with pytest.raises(StorageError):
        any_disk.rename("a/b", "a/n")
    assert any_disk.read("a/n/x") == b"1"


def test_only_an_empty_directory_is_removed_and_one_that_is_gone_is_no_fault(any_disk: Any) -> None:
    any_disk.create("a/b/x", b"1")
    with pytest.raises(StorageError):
        any_disk.remove_dir("a/b")
    any_disk.remove("a/b/x")
    for _ in range(2):
        any_disk.remove_dir("a/b")
        assert not any_disk.exists("a/b")


def test_a_synced_file_can_be_synced_again(any_disk: Any) -> None:
    any_disk.create("a/x", b"1")
    any_disk.fsync("a/x")
    any_disk.fsync("a/x")


# The real one


@pytest.fixture
def real(tmp_path: Path) -> Any:
    disk = OsDisk(tmp_path)
    disk.make_dirs("d")
    return disk


def failing(number: Any) -> Any:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_failed_sync_is_fatal_and_every_later_change_is_refused(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real.create("d/x", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(FatalStorageError, match=r"(?s)syncing .*d/x failed.*must stop"):
            real.fsync("d/x")
    changes: tuple[Callable[[], object], ...] = (
        lambda: real.create("d/y", b""),
        lambda: real.append("d/y", b""),
        lambda: real.fsync("d/x"),
        lambda: real.rename("d/x", "d/y"),
        lambda: real.fsync_dir("d"),
        lambda: real.remove("d/x"),
        lambda: real.remove_dir("d"),
        lambda: real.make_dirs("e"),
    )
    for change in changes:
        with pytest.raises(FatalStorageError):
            change()
    assert real.read("d/x") == b"1"


def test_a_full_disk_found_only_by_the_sync_is_fatal_too(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real.create("d/x", b"1")
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    with pytest.raises(FatalStorageError):
        real.fsync_dir("d")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_so(real: Any, monkeypatch: pytest.MonkeyPatch, number: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(number))
        with pytest.raises(StorageError, match="the disk is full") as caught:
            real.create("d/x", b"abc")
    assert not isinstance(caught.value, FatalStorageError)
    assert "Nothing was acknowledged" in str(caught.value)
    real.remove("d/x")
    real.create("d/x", b"abc")


def test_a_really_full_device_says_so(real: Any, tmp_path: Path) -> None:
    (tmp_path / "d" / "full").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="the disk is full"):
        real.append("d/full", b"abc")


def test_a_read_only_file_system_says_so(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", failing(errno.EROFS))
    with pytest.raises(StorageError, match="Make the directory writable"):
        real.create("d/x", b"")


def test_a_short_write_is_gone_on_with(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    real.create("d/x", b"abcdefgh")
    assert real.read("d/x") == b"abcdefgh"


def test_a_bad_sector_is_damage_and_not_a_reason_to_stop(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real.create("d/x", b"1")
    monkeypatch.setattr(Path, "open", failing(errno.EIO))
    with pytest.raises(DamagedError, match="cannot be read"):
        real.read("d/x")


def test_a_file_that_may_not_be_read_is_no_damage(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real.create("d/x", b"1")
    monkeypatch.setattr(Path, "open", failing(errno.EACCES))
    with pytest.raises(StorageError, match="could not read"):
        real.read("d/x")


def test_the_sync_goes_through_the_descriptor_that_wrote(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the kernel may have reported the error to another descriptor already."""
    synced: list[int] = []
    real.create("d/x", b"1")
    written = real._unsynced["d/x"]
    monkeypatch.setattr(os, "fsync", synced.append)
    real.fsync("d/x")
    assert synced == [written]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    disk = OsDisk(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        disk.create(f"x{number}", b"1")
        if number % 3 == 0:
            disk.fsync(f"x{number}")
        elif number % 3 == 1:
            disk.remove(f"x{number}")
        else:
            disk.rename(f"x{number}", "y")
    disk.create("z", b"")
    disk.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_second_process_is_refused_naming_the_first(tmp_path: Path) -> None:
    disk = OsDisk(tmp_path)
    disk.lock()
    disk.lock()
    code = (
        "import sys\n"
        "from fordstone.storage.disk import OsDisk\n"
        "from fordstone.errors import StoreLockedError\n"
        "try:\n"
        "    OsDisk(sys.argv[1]).lock()\n"
        "except StoreLockedError as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('got it')\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    refused = subprocess.run(run, capture_output=True, text=True, check=True, timeout=600).stdout
    assert f"belongs to process {os.getpid()}, which is still running" in refused
    disk.close()
    assert subprocess.run(run, capture_output=True, text=True, check=True, timeout=600).stdout == "got it\n"


def test_a_lock_keeps_off_the_same_process_too(tmp_path: Path) -> None:
    first, second = OsDisk(tmp_path), OsDisk(tmp_path)
    first.lock()
    with pytest.raises(StoreLockedError, match=str(os.getpid())):
        second.lock()
    first.close()
    second.lock()
    second.close()


def test_a_root_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not create the directory"):
        OsDisk(tmp_path / "file" / "below")
