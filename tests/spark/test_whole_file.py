"""Small files below a checkpoint location: whole or not there, whatever happens while they are written."""

from __future__ import annotations

from pathlib import Path

import fsspec
import msgspec
import pytest

from fordstone.spark.hosted.identity import QueryFile, QueryIdentity
from fordstone.spark.hosted.sealed import write_whole


def test_a_file_is_written_and_replaced_at_a_path_and_behind_a_url(tmp_path: Path) -> None:
    for place in (f"{tmp_path}/a/b/file", f"file://{tmp_path}/c/file", "memory://whole/file"):
        for data in (b"one", b"another"):
            write_whole(place, data)
            fs, path = fsspec.core.url_to_fs(place)
            assert fs.cat_file(path) == data


def test_a_process_that_dies_while_it_writes_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file"
    write_whole(str(place), b"one")

    def die(self: Path, target: Path) -> None:
        raise OSError("no power")

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(OSError, match="no power"):
        write_whole(str(place), b"another")
    assert place.read_bytes() == b"one"


def test_a_query_that_died_while_it_wrote_its_identity_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = QueryIdentity(pipeline="p", plan=msgspec.Raw(b"{}"), step_digests={}, stages=(), shards=1, first_epoch=1)

    def die(self: Path, target: Path) -> None:
        raise OSError("no power")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", die)
        with pytest.raises(OSError, match="no power"):
            QueryFile(str(tmp_path)).checked(identity)
    assert QueryFile(str(tmp_path)).read() is None
    assert QueryFile(str(tmp_path)).checked(identity) == identity
