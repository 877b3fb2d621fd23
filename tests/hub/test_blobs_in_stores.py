"""The blobs of a hub in S3 and in HDFS, on real servers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fordstone.errors import ConfigError
from fordstone.hub.messages import Rejection
from fordstone.hub.store.blobs import SMALL_BYTES, Stored, Upload, claim, is_whole, open_blobs
from fordstone.storage.remote import open_filesystem

SIZES = (0, 10, SMALL_BYTES, 3 * SMALL_BYTES + 7)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_blob_is_stored_once_read_in_parts_and_removed(store_url: str, tmp_path: Path, size_bytes: int) -> None:
    blobs = open_blobs(f"{store_url}/blobs", beside=tmp_path)
    data = bytes(range(256)) * (size_bytes // 256) + b"x" * (size_bytes % 256)
    digest = hashlib.sha256(data).hexdigest()
    for stored in (Stored.NEW, Stored.KNOWN):
        upload = Upload(blobs.beside())
        upload.write(data)
        assert upload.store(blobs, digest) is stored
        upload.close()
    assert blobs.size(digest) == size_bytes
    assert is_whole(blobs, digest)
    assert blobs.names(digest[:2]) == [(digest, size_bytes)]
    with blobs.open(digest) as file:
        assert file.seek(0, 2) == size_bytes
        file.seek(size_bytes // 2)
        assert file.read(5) == data[size_bytes // 2 :][:5]
    blobs.remove(digest)
    assert blobs.size(digest) is None
    with pytest.raises(Rejection, match="no blob"):
        blobs.open(digest)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_store_belongs_to_one_hub(store_url: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    claim(f"{store_url}/blobs", tmp_path / "one")
    claim(f"{store_url}/blobs", tmp_path / "one")
    with pytest.raises(ConfigError, match="belongs to another hub"):
        claim(f"{store_url}/blobs", tmp_path / "two")


def test_what_a_killed_hub_left_is_removed_when_it_starts(store_url: str, tmp_path: Path) -> None:
    claim(f"{store_url}/blobs", tmp_path)
    filesystem, root = open_filesystem(f"{store_url}/blobs", kind="files")
    if store_url.startswith("s3"):
        bucket, _, prefix = root.partition("/")
        filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/ab/half")
        assert filesystem.list_multipart_uploads(bucket)
        claim(f"{store_url}/blobs", tmp_path)
        assert not filesystem.list_multipart_uploads(bucket)
    else:
        filesystem.makedirs(f"{root}/ab", exist_ok=True)
        half = filesystem.open(f"{root}/ab/.tmp-0-half", "wb")
        half.write(b"ha")
        assert len(filesystem.ls(f"{root}/ab")) == 1
        claim(f"{store_url}/blobs", tmp_path)
        assert filesystem.ls(f"{root}/ab") == []
