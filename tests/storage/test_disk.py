"""One contract for every disk; then what only the real one does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fordstone.errors import DamagedError, StorageError, StoreLockedError
from fordstone.storage.disk import PIECE_BYTES, FatalStorageError, OsDisk
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


@pytest.mark.parametrize("size", [0, 1, 600_000])
def test_a_file_is_read_in_pieces_also_if_another_takes_its_name_meanwhile(any_disk: Any, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    any_disk.create("a/x", data)
    any_disk.create("a/y", b"other")
    pieces: list[bytes] = []
    for piece in any_disk.read_pieces("a/x"):
        if not pieces:
            any_disk.rename("a/y", "a/x")
        pieces.append(piece)
    assert b"".join(pieces) == data
    assert max(map(len, pieces), default=0) <= PIECE_BYTES
    with pytest.raises(FileNotFoundError):
        list(any_disk.read_pieces("a/none"))


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


def test_renaming_to_a_name_that_must_be_free_never_replaces(any_disk: Any) -> None:
    any_disk.create("a/new", b"new")
    any_disk.rename("a/new", "a/free", replace=False)
    assert (list(any_disk.list("a")), any_disk.read("a/free")) == (["b", "free"], b"new")
    any_disk.create("a/newer", b"newer")
    with pytest.raises(FileExistsError):
        any_disk.rename("a/newer", "a/free", replace=False)
    assert any_disk.read("a/free") == b"new"
    assert any_disk.read("a/newer") == b"newer"


def test_what_is_missing_is_reported_as_missing(any_disk: Any) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: any_disk.read("a/none"),
        lambda: any_disk.read("none/none"),
        lambda: any_disk.size("a/none"),
        lambda: any_disk.size("a/b"),
        lambda: any_disk.rename("a/none", "a/x"),
        lambda: any_disk.rename("a/none", "a/x", replace=False),
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


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_links_still_never_replaces(
    real: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    test_renaming_to_a_name_that_must_be_free_never_replaces(Within(real, "d"))


class Within:
    """The same disk, with a directory `a/b` in one of its directories."""

    def __init__(self, disk: OsDisk, directory: str) -> None:
        self._disk, self._directory = disk, directory
        disk.make_dirs(f"{directory}/a/b")

    def __getattr__(self, name: str) -> Any:
        def call(*paths: Any, **options: Any) -> Any:
            placed = [f"{self._directory}/{path}" if isinstance(path, str) else path for path in paths]
            return getattr(self._disk, name)(*placed, **options)

        return call


def test_a_link_whose_answer_was_lost_counts_as_made(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system sends the request again, and the answer is that the name is there: from the first request."""
    link = os.link

    def twice(old: Any, new: Any) -> None:
        link(old, new)
        link(old, new)

    monkeypatch.setattr(os, "link", twice)
    real.create("d/new", b"new")
    real.rename("d/new", "d/free", replace=False)
    assert list(real.list("d")) == ["free"]


class Synced:
    """Which directories were synced, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Path] = []
        fsync = os.fsync

        def note(fd: int) -> None:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if path.is_dir():
                self.paths.append(path)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", note)


def test_a_new_root_is_durable_with_all_that_was_made_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch)
    OsDisk(tmp_path / "var" / "lib" / "state")
    assert synced.paths == [tmp_path, tmp_path / "var", tmp_path / "var" / "lib"]


def test_a_relative_root_is_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    synced = Synced(monkeypatch)
    OsDisk("var/state")
    assert synced.paths == [tmp_path, tmp_path / "var"]


def test_directories_of_a_process_that_was_killed_before_the_sync_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state" / "p" / "node").mkdir(parents=True)
    synced = Synced(monkeypatch)
    disk = OsDisk(tmp_path / "state")
    disk.lock()
    assert synced.paths == [tmp_path]
    disk.make_dirs("p/node")
    disk.make_dirs("p/node")
    assert synced.paths == [tmp_path, tmp_path / "state", tmp_path / "state" / "p"], "each of them once"
    disk.close()


def test_a_directory_above_that_may_not_be_opened_is_no_fault(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fordstone.storage.disk.sync_dir", failing(errno.EACCES))
    real.lock()
    real.close()


def test_a_disk_that_was_abandoned_takes_no_change_and_stays_locked(tmp_path: Path) -> None:
    disk = OsDisk(tmp_path)
    disk.lock()
    disk.create("x", b"1")
    disk.abandon("a thread hangs")
    for change in (lambda: disk.create("y", b""), lambda: disk.rename("x", "y"), lambda: disk.append("x", b"2")):
        with pytest.raises(FatalStorageError, match="a thread hangs"):
            change()
    disk.close()
    with pytest.raises(StoreLockedError):
        OsDisk(tmp_path).lock()


def test_a_root_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not create the directory"):
        OsDisk(tmp_path / "file" / "below")


@pytest.fixture
def wide_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("wide_umask")
@pytest.mark.parametrize("there", [False, True])
def test_a_private_disk_is_for_its_user_only(tmp_path: Path, there: bool) -> None:
    root = tmp_path / "above" / "root"
    if there:
        root.mkdir(parents=True, mode=0o755)
    with closing(OsDisk(root, private=True)) as disk:
        disk.lock()
        disk.make_dirs("a/b")
        disk.create("a/b/c", b"rows")
        disk.append("d", b"rows")
    modes = {("directory" if path.is_dir() else "file", oct(path.stat().st_mode & 0o777)) for path in root.rglob("*")}
    assert modes == {("directory", "0o700"), ("file", "0o600")}
    assert oct(root.stat().st_mode & 0o777) == "0o700"
    assert oct(root.parent.stat().st_mode & 0o777) == "0o755"


def test_a_directory_whose_mode_may_not_be_changed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "not the owner")

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    with closing(OsDisk(tmp_path, private=True)):
        pass
    assert "others can read it" in caplog.text
