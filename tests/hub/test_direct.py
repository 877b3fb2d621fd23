"""Blobs from the hub's own store: only plain locations of known kinds are opened, in a bounded time."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hub.running import running_hub
from tests.hub.sending import Node, blob, run

from fordstone.errors import StorageError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.direct import DirectBlobs, location_problem
from fordstone.state.base import RunRef

DATA = b"rows of a node"
REF = RunRef(digest=hashlib.sha256(DATA).hexdigest(), size_bytes=len(DATA), rows=1)


@pytest.mark.parametrize(
    "url",
    [
        "file:///var/lib/hub/blobs",
        "file:///home/m%C3%BCller/hub/blobs",
        "s3://bucket/hub",
        "s3a://bucket/hub/",
        "gs://bucket",
        "gcs://bucket/hub",
        "az://container/hub",
        "abfs://container@account.dfs.core.windows.net/hub",
        "hdfs://namenode:8020/hub/blobs",
    ],
)
def test_plain_locations_of_stores_are_opened(url: str) -> None:
    assert location_problem(url) is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("zip://a::ftp://host/x", "a chain"),
        ("s3://bucket/x::s3://other", "a chain"),
        ("reference::file:///x.json", "a chain"),
        ("http://169.254.169.254/latest", "of kind 'http' is not opened"),
        ("ftp://host/x", "of kind 'ftp'"),
        ("sftp://host/x", "of kind 'sftp'"),
        ("memory://x", "of kind 'memory'"),
        ("filecache://x", "of kind 'filecache'"),
        ("github://o:r@main/x", "of kind 'github'"),
        ("/var/lib/hub", "of kind 'none'"),
        ("", "of kind 'none'"),
        ("file://server/share", "not an absolute path"),
        ("file:relative", "not an absolute path"),
        ("file:///a/../etc", "not normalised"),
        ("file:///a/%2e%2e/etc", "not normalised"),
        ("file:///a//b", "not normalised"),
        ("s3://bucket/../other", "not normalised"),
        ("s3:///x", "no bucket or host"),
        ("s3://key:secret@bucket/x", "a user"),
        ("s3://bucket/x?versionId=1", "a query"),
        ("s3://bucket/%2e%2e/x", "an escape"),
        ("s3://bucket/*", "a pattern"),
        ("hdfs://host:99999/x", "not a URL"),
        ("s3://bucket/a b", "not a plain URL"),
        ("s3://bucket/\n", "not a plain URL"),
        ("s3://" + "x" * 3_000, "not a plain URL"),
    ],
)
def test_other_locations_are_not_opened(url: str, problem: str) -> None:
    opened: list[str] = []
    blobs = DirectBlobs(read=lambda url, bytes_max: opened.append(url) or DATA)  # type: ignore[func-returns-value]
    assert problem in (location_problem(url) or "")
    assert blobs.read(url, REF) is None
    assert opened == []


def reading(*outcomes: bytes | Exception) -> tuple[Callable[..., bytes], list[str]]:
    asked: list[str] = []
    left = list(outcomes)

    def read(url: str, *, bytes_max: int) -> bytes:
        assert bytes_max == len(DATA) + 1
        asked.append(url)
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return read, asked


def test_a_blob_is_found_by_its_digest_and_bytes_that_differ_are_not_taken() -> None:
    read, asked = reading(DATA, DATA[:-1] + b"x", DATA + b"x")
    blobs = DirectBlobs(read=read)
    assert [blobs.read("s3://bucket/hub/", REF) for _ in range(3)] == [DATA, None, None]
    assert asked[0] == f"s3://bucket/hub/{REF.digest[:2]}/{REF.digest}"


def test_a_blob_that_is_not_there_is_asked_of_the_hub_and_the_location_tried_again() -> None:
    read, _ = reading(FileNotFoundError("small ones are in the log"), DATA)
    blobs = DirectBlobs(read=read)
    assert [blobs.read("s3://bucket", REF) for _ in range(2)] == [None, DATA]


def test_a_location_that_failed_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fordstone.hub.client.direct")
    read, asked = reading(StorageError("no credentials"), DATA)
    blobs = DirectBlobs(read=read)
    assert [blobs.read("s3://bucket", REF) for _ in range(3)] == [None, None, None]
    assert (len(asked), len(caplog.records)) == (1, 1)


def test_a_store_that_hangs_holds_nothing_up_for_long_and_few_threads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fordstone.hub.client.direct")
    never = threading.Event()
    began = threading.Semaphore(0)

    def hang(url: str, *, bytes_max: int) -> bytes:
        del url, bytes_max
        began.release()
        never.wait()
        return DATA

    blobs = DirectBlobs(read=hang, seconds=0.01, reads_max=2)
    try:
        assert [blobs.read(f"s3://bucket-{number}", REF) for number in range(4)] == [None] * 4
        assert began.acquire(timeout=10)
        assert began.acquire(timeout=10)
        assert not began.acquire(blocking=False), "the third and fourth did not begin"
        assert {getattr(record, "problem", None) for record in caplog.records} == {"nothing came within 0 s"}
    finally:
        never.set()


@pytest.mark.parametrize("direct", [True, False])
def test_a_client_reads_only_through_the_hub_if_that_is_set(tmp_path: Path, direct: bool) -> None:
    with running_hub(tmp_path / "hub", small_bytes_max=0) as address:
        client = HubClient(HubAddress(url=address.url, direct=direct))
        node = Node(client)
        node.put("a")
        location, ref = f"file://{tmp_path / 'hub' / 'blobs'}", run("a")
        assert client.read_blob(ref, location) == blob("a")
        client.get_blob = lambda digest: b""  # type: ignore[method-assign]
        if direct:
            assert client.read_blob(ref, location) == blob("a"), "not through the hub"
        else:
            with pytest.raises(Exception, match="has 0 bytes"):
                client.read_blob(ref, location)
    address = HubAddress(url="http://127.0.0.1:1", direct=direct)
    assert HubAddress.from_at(address.at()) == address
