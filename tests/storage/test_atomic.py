"""A file is replaced whole or not at all, whatever goes wrong."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fordstone.errors import DamagedError, StorageError
from fordstone.storage.atomic import AtomicWriter, remove_leftovers, write_file
from fordstone.storage.disk import FatalStorageError, OsDisk
from fordstone.testing.memory_disk import MemoryDisk, PowerCut


@pytest.fixture
def disk() -> MemoryDisk:
    made = MemoryDisk()
    made.make_dirs("d")
    AtomicWriter(made).write("d/file", b"old")
    return made


def test_pieces_may_be_read_from_the_file_that_they_replace(tmp_path: Path, disk: MemoryDisk) -> None:
    real = OsDisk(tmp_path)
    real.make_dirs("d")
    for one in (real, disk):
        AtomicWriter(one).write("d/file", b"old")
        AtomicWriter(one).write("d/file", (piece + b"er" for piece in (*one.read_pieces("d/file"), b", new")))
        assert one.read("d/file") == b"older, newer"
        AtomicWriter(one).write("d/file", iter(()))
        assert one.read("d/file") == b""


@pytest.mark.parametrize("problem", [DamagedError, StorageError])
def test_pieces_that_cannot_be_read_leave_the_old_file_and_no_temporary_one(
    disk: MemoryDisk, problem: type[Exception]
) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise problem("a bad sector")

    with pytest.raises(problem):
        AtomicWriter(disk).write("d/file", pieces())
    assert disk.read("d/file") == b"old"
    assert list(disk.list("d")) == ["file"]


@pytest.mark.parametrize("path", ["d/file", "file"])
def test_what_was_written_is_read_back_and_no_temporary_file_is_left(disk: MemoryDisk, path: str) -> None:
    AtomicWriter(disk).write(path, b"new")
    assert disk.read(path) == b"new"
    assert [name for name in (*disk.list(""), *disk.list("d")) if name.startswith(".tmp")] == []


@pytest.mark.parametrize("changes", range(7))
def test_a_power_cut_at_any_step_leaves_the_old_file_or_the_new_one(disk: MemoryDisk, changes: int) -> None:
    for seed in range(20):
        disk.kill()
        AtomicWriter(disk).write("d/file", b"old")
        disk.kill()
        disk.cut_after = changes
        returned = False
        try:
            AtomicWriter(disk).write("d/file", iter((b"the new", b" one")))
            returned = True
        except PowerCut:
            pass
        disk.crash(Random(seed))
        assert disk.read("d/file") in ({b"the new one"} if returned else {b"old", b"the new one"})
        remove_leftovers(disk, "d")
        assert list(disk.list("d")) == ["file"]


@pytest.mark.parametrize(("operation", "fault"), [("create", "full"), ("create", "read-only"), ("rename", "read-only")])
def test_a_failed_write_changes_nothing_and_leaves_no_temporary_file(
    disk: MemoryDisk, operation: Any, fault: Any
) -> None:
    disk.fail_next(operation, fault)
    with pytest.raises(StorageError):
        AtomicWriter(disk).write("d/file", b"new")
    assert disk.read("d/file") == b"old"
    assert list(disk.list("d")) == ["file"]


def test_a_failed_sync_is_fatal_and_the_old_file_is_still_there(disk: MemoryDisk) -> None:
    disk.fail_next("fsync", "sync")
    with pytest.raises(FatalStorageError):
        AtomicWriter(disk).write("d/file", b"new")
    assert disk.read("d/file") == b"old"


def test_a_missing_directory_leaves_no_temporary_file_elsewhere(disk: MemoryDisk) -> None:
    with pytest.raises(FileNotFoundError):
        AtomicWriter(disk).write("none/file", b"new", temp_directory="d")
    assert list(disk.list("d")) == ["file"]


def test_failpoints_are_hit_in_order(disk: MemoryDisk) -> None:
    hits: list[str] = []

    class Noting:
        def hit(self, name: str) -> None:
            hits.append(name)

    writer = AtomicWriter(disk, Noting())
    writer.write("d/file", b"new", kind="manifest")
    assert hits == ["manifest.created", "manifest.synced", "manifest.renamed", "manifest.dir-synced"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_path_is_replaced_with_its_mode_and_missing_directories_are_made(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a" / "b"
    write_file(path, b"1", mode=0o600, durable=durable)
    write_file(path, b"22", mode=0o600, durable=durable)
    assert path.read_bytes() == b"22"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["b"]


def test_a_path_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="could not"):
        write_file(tmp_path / "file" / "below", b"1")
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageError, match="could not rename"):
        write_file(tmp_path / "directory", b"1")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["directory", "file"]
