from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from tests.hub.sending import digest_of

from fordstone.errors import ConfigError
from fordstone.hub.messages import Rejection
from fordstone.hub.store.blobs import SMALL_BYTES, BlobLocks, BlobStore, DiskBlobs, Stored, Upload, is_whole, open_blobs

SMALL = b"a few rows"
LARGE = b"many rows " * (SMALL_BYTES // 4)


@pytest.fixture(params=["file", "path", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    urls = {"file": f"file://{tmp_path}/b%20s", "path": str(tmp_path / "plain"), "memory": f"memory://{uuid4()}"}
    return open_blobs(urls[request.param], beside=tmp_path / "incoming")


def stored(blobs: BlobStore, data: bytes, digest: str | None = None) -> bool:
    upload = Upload(blobs.beside())
    try:
        for start in range(0, len(data), 100_000):
            upload.write(data[start : start + 100_000])
        return upload.store(blobs, digest or digest_of(data)) is not Stored.KNOWN
    finally:
        upload.close()


def everything(blobs: BlobStore) -> list[tuple[str, int]]:
    return [found for prefix in range(256) for found in blobs.names(f"{prefix:02x}")]


@pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
def test_what_was_stored_is_read_back_and_listed(blobs: BlobStore, data: bytes) -> None:
    digest = digest_of(data)
    assert blobs.size(digest) is None
    assert stored(blobs, data)
    assert blobs.size(digest) == len(data)
    with blobs.open(digest) as file:
        assert file.read() == data
    assert everything(blobs) == [(digest, len(data))]


def test_it_is_stored_once_and_the_second_upload_is_checked_all_the_same(blobs: BlobStore) -> None:
    assert stored(blobs, SMALL)
    assert not stored(blobs, SMALL)
    with pytest.raises(Rejection) as raised:
        stored(blobs, b"damaged on the way", digest_of(SMALL))
    assert raised.value.refusal.error == "wrong_digest"
    with blobs.open(digest_of(SMALL)) as file:
        assert file.read() == SMALL


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_bytes_that_are_not_what_their_name_says_leave_nothing(blobs: BlobStore, data: bytes) -> None:
    with pytest.raises(Rejection, match="changed on the way"):
        stored(blobs, data, digest_of(b"something else"))
    assert everything(blobs) == []


def test_a_blob_that_is_not_whole_is_replaced(blobs: BlobStore) -> None:
    digest = digest_of(SMALL)
    short = Upload(blobs.beside())
    short.write(SMALL[:4])
    blobs.put(digest, short)
    assert stored(blobs, SMALL)
    assert blobs.size(digest) == len(SMALL)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_a_blob_with_other_bytes_of_the_same_size_is_replaced(blobs: BlobStore, data: bytes) -> None:
    digest = digest_of(data)
    rotten = Upload(blobs.beside())
    rotten.write(bytes(len(data)))
    blobs.put(digest, rotten)
    rotten.close()
    assert not is_whole(blobs, digest)
    assert stored(blobs, data)
    assert is_whole(blobs, digest)
    assert not stored(blobs, data)


def test_what_is_removed_is_gone_and_may_be_removed_again(blobs: BlobStore) -> None:
    digest = digest_of(SMALL)
    stored(blobs, SMALL)
    blobs.remove(digest)
    blobs.remove(digest)
    assert blobs.size(digest) is None
    with pytest.raises(Rejection) as raised:
        blobs.open(digest)
    assert raised.value.refusal.error == "not_found"


@pytest.mark.parametrize("place", ["write", "fsync", "rename", "fsync of the directory"])
def test_a_disk_that_refuses_is_reported_and_no_part_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    blobs = DiskBlobs(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "write":
        monkeypatch.setattr("fordstone.storage.atomic.os.write", refuse)
    elif place == "fsync":
        monkeypatch.setattr("fordstone.storage.atomic.os.fsync", refuse)
    elif place == "rename":
        monkeypatch.setattr("fordstone.storage.atomic.os.rename", refuse)
    else:
        blobs._settle(digest_of(SMALL)[:2])
        monkeypatch.setattr("fordstone.storage.atomic.sync_dir", refuse)
    with pytest.raises(Rejection, match="full") as raised:
        stored(blobs, SMALL)
    assert (raised.value.status, raised.value.refusal.error) == (507, "storage")
    assert list((tmp_path / "incoming").iterdir()) == []
    monkeypatch.undo()
    assert everything(blobs) == [], "what is not durable has no name"


def test_a_store_that_takes_only_a_part_is_refused_and_the_part_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blobs = open_blobs(f"memory://{uuid4()}", beside=tmp_path)
    store: Any = fsspec.get_filesystem_class("memory")
    whole = store.pipe_file
    monkeypatch.setattr(store, "pipe_file", lambda self, path, data: whole(self, path, data[:3]))
    with pytest.raises(Rejection, match="3 of 10 bytes") as raised:
        stored(blobs, SMALL)
    assert raised.value.status == 507
    assert everything(blobs) == []


@pytest.mark.parametrize(("method", "data"), [("pipe_file", SMALL), ("put_file", LARGE)])
def test_a_full_remote_store_is_rejected_as_full_and_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, data: bytes
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    blobs = open_blobs(f"memory://{uuid4()}", beside=tmp_path)
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), method, full)
    with pytest.raises(Rejection, match="it is full") as raised:
        stored(blobs, data)
    assert str(raised.value).count(digest_of(data)) == 1
    assert everything(blobs) == []


def test_leftovers_of_a_killed_process_are_cleared_at_the_start(tmp_path: Path) -> None:
    DiskBlobs(tmp_path)
    (tmp_path / "incoming" / "half.part").write_bytes(b"half")
    DiskBlobs(tmp_path)
    assert list((tmp_path / "incoming").iterdir()) == []


def test_uploads_to_a_store_elsewhere_wait_in_the_hubs_own_directory_and_leftovers_are_cleared(tmp_path: Path) -> None:
    url = f"memory://{uuid4()}"
    upload = Upload(open_blobs(url, beside=tmp_path / "incoming").beside())
    upload.write(bytes(SMALL_BYTES + 1))
    assert len(list((tmp_path / "incoming").iterdir())) == 1
    # A kill: nobody closes the upload.
    open_blobs(url, beside=tmp_path / "incoming")
    assert list((tmp_path / "incoming").iterdir()) == []
    upload.close()


def test_bytes_are_synced_before_they_get_their_name_and_the_name_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    blobs = DiskBlobs(tmp_path)
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        steps.append("sync dir" if Path(f"/proc/self/fd/{fd}").resolve().is_dir() else "sync file")
        fsync(fd)

    def renamed(old: str, new: str) -> None:
        steps.append("rename")
        rename(old, new)

    monkeypatch.setattr("fordstone.storage.atomic.os.fsync", synced)
    monkeypatch.setattr("fordstone.storage.atomic.os.rename", renamed)
    stored(blobs, SMALL)
    assert steps[-3:] == ["sync file", "rename", "sync dir"]


def test_an_unknown_kind_of_store_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_blobs("nosuchkind://bucket/x", beside=tmp_path)


def test_what_arrives_is_not_removed_and_what_is_removed_arrives_after() -> None:
    locks = BlobLocks()
    with locks.arrival("a"), locks.removal(["a", "b"]) as free:
        assert free == ["b"]
    order: list[str] = []
    begun = threading.Event()

    def arrive() -> None:
        begun.set()
        with locks.arrival("a"):
            order.append("arrived")

    with locks.removal(["a"]) as free:
        assert free == ["a"]
        thread = threading.Thread(target=arrive)
        thread.start()
        assert begun.wait(10)
        thread.join(0.05)
        order.append("removed")
    thread.join(10)
    assert order == ["removed", "arrived"]


def test_two_uploads_of_one_blob_take_turns_so_that_the_second_finds_it_durable() -> None:
    locks = BlobLocks()
    order: list[str] = []

    def second() -> None:
        with locks.arrival("a"):
            order.append("second")

    with locks.arrival("a"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_name_that_a_killed_process_gave_is_made_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(DiskBlobs(tmp_path), SMALL)
    synced: list[str] = []
    monkeypatch.setattr("fordstone.hub.store.blobs.sync_dir", lambda path: synced.append(path.name))
    again = DiskBlobs(tmp_path)
    assert not stored(again, SMALL)
    assert digest_of(SMALL)[:2] in synced
