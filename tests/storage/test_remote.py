"""One contract for every kind of remote."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from fordstone.errors import ConfigError, StorageError
from fordstone.storage.remote import DiskRemote, FsspecRemote, open_remote, read_url
from fordstone.testing.memory_disk import MemoryDisk


@pytest.fixture(params=["directory", "file-url", "memory-disk", "fsspec-memory", "fsspec-local", "s3", "hdfs"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "s3" | "hdfs":
            return open_remote(request.getfixturevalue(f"{request.param}_url"))
        case "directory":
            return open_remote(str(tmp_path / "far"))
        case "file-url":
            return open_remote(f"file://{tmp_path}/far")
        case "memory-disk":
            return DiskRemote(MemoryDisk())
        case "fsspec-memory":
            return open_remote(f"memory://{tmp_path.name}/far")
        case _:
            return FsspecRemote(LocalFileSystem(), str(tmp_path / "far"))


def test_what_was_put_is_got_and_replaced(remote: Any) -> None:
    remote.put("p/n/runs/a", b"one")
    remote.put("p/n/runs/a", b"other")
    remote.put("p/n/runs/empty", b"")
    assert remote.get("p/n/runs/a") == b"other"
    assert remote.sizes("p/n/runs") == {"a": 5, "empty": 0}
    assert remote.exists("p/n/runs/a")
    assert not remote.exists("p/n/runs/b")


def test_of_several_that_create_a_file_one_does(remote: Any) -> None:
    assert remote.create("p/n/id", b"one")
    assert remote.create("p/n/id", b"one")
    assert not remote.create("p/n/id", b"two")
    assert remote.get("p/n/id") == b"one"
    assert remote.sizes("p/n") == {"id": 3}


def test_what_is_missing_is_reported_as_missing(remote: Any) -> None:
    with pytest.raises(FileNotFoundError):
        remote.get("p/n/runs/none")
    assert remote.sizes("p/n/none") == {}
    remote.remove("p/none")
    remote.put("p/a", b"")
    remote.remove("p/none")
    with pytest.raises(FileNotFoundError):
        remote.get("p/none")


def test_what_was_removed_is_gone(remote: Any) -> None:
    remote.put("p/a", b"1")
    remote.remove("p/a")
    assert remote.sizes("p") == {}


def test_directories_are_not_listed_as_files(remote: Any) -> None:
    remote.put("p/n/a", b"1")
    remote.put("p/b", b"22")
    assert remote.sizes("p").get("b") == 2
    assert "a" not in remote.sizes("p")
    remote.remove_leftovers("p/n")
    assert remote.sizes("p/n") == {"a": 1}


def test_leftovers_are_hidden_and_removed() -> None:
    disk = MemoryDisk()
    disk.make_dirs("p")
    disk.create("p/.tmp-half", b"1")
    remote = DiskRemote(disk)
    assert remote.sizes("p") == {}
    remote.remove_leftovers("p")
    assert disk.list("p") == []


def test_whatever_a_backend_raises_becomes_a_storage_error() -> None:
    class Broken:
        def __getattr__(self, name: Any) -> None:
            raise RuntimeError("the backend has its own ideas")

    remote = FsspecRemote(Broken(), "bucket")
    for call in (
        lambda: remote.put("p/a", b""),
        lambda: remote.create("p/a", b""),
        lambda: remote.get("p/a"),
        lambda: remote.sizes("p"),
        lambda: remote.remove("p/a"),
        lambda: remote.put_file(Path("a"), "p/a"),
        lambda: remote.size("p/a"),
        lambda: remote.open("p/a"),
    ):
        with pytest.raises(StorageError, match="its own ideas"):
            call()


def test_a_store_takes_a_local_file_and_gives_it_in_parts(url: str, tmp_path: Path) -> None:
    remote: Any = open_remote(url)
    (tmp_path / "local").write_bytes(b"12345")
    remote.put_file(tmp_path / "local", "p/a")
    assert remote.size("p/a") == 5
    with remote.open("p/a") as file:
        assert (file.read(2), file.read()) == (b"12", b"345")
    for call in (
        lambda: remote.put_file(tmp_path / "none", "p/b"),
        lambda: remote.size("p/none"),
        lambda: remote.open("p/none"),
    ):
        with pytest.raises(FileNotFoundError):
            call()


class PieceByPiece(LocalFileSystem):  # type: ignore[misc]  # it ships no types
    """A store in which a file grows under its name, such as HDFS or SFTP; renaming does not replace a file there."""

    def __init__(self, *, stops: bool = False, ignores: bool = False) -> None:
        """`stops`: the connection breaks in the middle of a file. `ignores`: a rename that is refused is not reported."""
        super().__init__(skip_instance_cache=True)
        self._stops = stops
        self._ignores = ignores

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        Path(path).write_bytes(value[: len(value) // 2] if self._stops else value)
        if self._stops:
            raise ConnectionError("the line is dead")

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        if Path(path2).exists() or self._ignores:
            if not self._ignores:
                raise FileExistsError(path2)
            return
        Path(path1).rename(path2)


def test_a_file_appears_whole_where_files_grow_under_their_names(tmp_path: Path) -> None:
    remote = FsspecRemote(PieceByPiece(), str(tmp_path))
    remote.put("p/a", b"one")
    remote.put("p/a", b"another")
    (tmp_path / "local").write_bytes(b"12345")
    remote.put_file(tmp_path / "local", "p/b")
    assert (remote.get("p/a"), remote.get("p/b")) == (b"another", b"12345")
    with pytest.raises(StorageError, match="the line is dead"):
        FsspecRemote(PieceByPiece(stops=True), str(tmp_path)).put("p/a", b"a third one")
    assert remote.get("p/a") == b"another"
    with pytest.raises(StorageError, match=r"could not write .*p/c"):
        FsspecRemote(PieceByPiece(ignores=True), str(tmp_path)).put("p/c", b"1")
    assert sorted(file.name for file in (tmp_path / "p").iterdir()) == ["a", "b"]


class PowerCutError(BaseException):
    """The process is gone: nothing that it would do next happens."""


class EndsAfter(PieceByPiece):
    """A store of which the process is gone after a number of calls that change something."""

    def __init__(self, changes: int) -> None:
        super().__init__()
        self._left = changes

    def _change(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise PowerCutError

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._change()
        super().pipe_file(path, value, mode)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self._change()
        super().mv(path1, path2)

    def rm_file(self, path: str) -> None:
        self._change()
        super().rm_file(path)


@pytest.mark.parametrize("changes", range(6))
def test_a_file_that_is_being_replaced_is_never_lost(tmp_path: Path, changes: int) -> None:
    remote = FsspecRemote(PieceByPiece(), str(tmp_path))
    remote.put("p/starts", b"7")
    with contextlib.suppress(PowerCutError):
        FsspecRemote(EndsAfter(changes), str(tmp_path)).put("p/starts", b"08")
    remote.remove_leftovers("p")
    found = remote.get("p/starts")
    assert found in {b"7", b"08"}
    assert remote.exists("p/starts")
    assert remote.sizes("p") == {"starts": len(found)}
    remote.put("p/starts", b"009")
    assert (remote.get("p/starts"), remote.sizes("p")) == (b"009", {"starts": 3})
    remote.put("p/starts", b"0010")
    assert [file.name for file in (tmp_path / "p").iterdir()] == ["starts"]
    remote.remove("p/starts")
    assert not remote.exists("p/starts")
    assert remote.sizes("p") == {}


def test_a_file_that_is_removed_while_it_was_being_replaced_does_not_come_back(tmp_path: Path) -> None:
    remote = FsspecRemote(PieceByPiece(), str(tmp_path))
    remote.put("p/a", b"1")
    (tmp_path / "p/a").rename(tmp_path / "p/.replaced-a")
    assert remote.get("p/a") == b"1"
    remote.remove("p/a")
    with pytest.raises(FileNotFoundError):
        remote.get("p/a")


def test_leftovers_at_a_url_are_hidden_and_removed(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / ".tmp-0-a").write_bytes(b"ha")
    remote = FsspecRemote(PieceByPiece(), str(tmp_path))
    assert remote.sizes("p") == {}
    remote.remove_leftovers("p")
    remote.remove_leftovers("none")
    assert list((tmp_path / "p").iterdir()) == []


@pytest.mark.parametrize("url", ["nonsense://x", "s3://bucket/x"])
def test_a_url_that_cannot_be_opened_says_what_to_install(url: Any) -> None:
    try:
        open_remote(url)
    except ConfigError as error:
        assert "Install what this kind of URL needs" in str(error)  # noqa: PT017 - s3fs may be installed
    else:
        assert url.startswith("s3")


def test_a_url_that_does_not_answer_may_be_tried_again() -> None:
    with pytest.raises(StorageError, match="cannot be reached"):
        open_remote("ftp://127.0.0.1:1/bucket")


def test_opening_and_reading_a_missing_directory_creates_nothing(tmp_path: Path) -> None:
    remote = open_remote(f"file:{tmp_path}/far")
    assert remote.sizes("p") == {}
    assert not remote.exists("p/a")
    assert not (tmp_path / "far").exists()
    remote.put("a", b"1")
    assert (tmp_path / "far" / "a").read_bytes() == b"1"


@pytest.mark.parametrize("scheme", ["memory://read-url", "file://"])
def test_a_bounded_part_of_a_file_is_read_by_its_url(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}{tmp_path}"
    open_remote(url).put("a", b"12345")
    assert read_url(f"{url}/a", bytes_max=3) == b"123"
    with pytest.raises(FileNotFoundError):
        read_url(f"{url}/b", bytes_max=3)


def test_fsspec_is_not_imported_before_a_url_needs_it(tmp_path: Path) -> None:
    code = (
        "import sys, fordstone.epochs.copies as u, fordstone.epochs.copies\n"
        "from fordstone.storage.remote import open_remote\n"
        f"open_remote({str(tmp_path)!r})\n"
        "print('fsspec' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "False\n"


def test_a_file_in_the_place_of_a_remote_directory_is_an_error_and_not_an_empty_remote(tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("a file, where the share was")
    with pytest.raises(StorageError, match="is not a directory"):
        open_remote(str(tmp_path / "remote"))
