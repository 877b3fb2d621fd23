from __future__ import annotations

from pathlib import Path

import pytest
from tests.hub.running import running_hub
from tests.hub.sending import digest_of

from fordstone.hub.client.client import HubClient
from fordstone.hub.store.blobs import BlobLocks, DiskBlobs, Stored
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.retention import HOUR_US, Retention
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.state.base import RunRef

DATA = b"a few rows"
DIGEST = digest_of(DATA)


def files(data: Path) -> list[str]:
    return [path.name for path in (data / "blobs").glob("??/*")]


def test_a_small_blob_is_no_file_and_read_through_the_hub_also_by_those_who_reach_the_store(tmp_path: Path) -> None:
    large = b"x" * 20_000
    with running_hub(tmp_path) as address:
        client = HubClient(address)
        client.put_blob(DIGEST, DATA)
        client.put_blob(digest_of(large), large)
        assert files(tmp_path) == [digest_of(large)]
        direct = client.stream_nodes("p", "s").blobs
        for data in (DATA, large):
            assert client.read_blob(RunRef(digest_of(data), len(data), 0), direct) == data
    with running_hub(tmp_path) as address:
        assert HubClient(address).get_blob(DIGEST) == DATA, "durable when it was answered"
        assert HubClient(address).missing([DIGEST]) == set()


def test_a_hub_that_keeps_nothing_small_reads_what_another_kept(tmp_path: Path) -> None:
    with running_hub(tmp_path) as address:
        HubClient(address).put_blob(DIGEST, DATA)
    with running_hub(tmp_path, small_bytes_max=-1) as address:
        client = HubClient(address)
        client.put_blob(digest_of(b"other"), b"other")
        assert files(tmp_path) == [digest_of(b"other")]
        assert client.get_blob(DIGEST) == DATA
    with running_hub(tmp_path) as address:
        client = HubClient(address)
        client.put_blob(digest_of(b"other"), b"other")
        assert client.get_blob(digest_of(b"other")) == b"other"


@pytest.fixture
def clock() -> list[int]:
    return [0]


def test_a_small_blob_goes_with_its_row_after_its_grace_time_and_may_come_again(
    tmp_path: Path, clock: list[int]
) -> None:
    log = HubLog(SqliteStore(tmp_path / "log.sqlite"), clock_us=lambda: clock[0])
    retention = Retention(log, DiskBlobs(tmp_path / "blobs"), BlobLocks())
    assert log.write(lambda tx: tx.log.save_small_blob(DIGEST, DATA, ran_us=tx.ran_us)).result(10) is not Stored.KNOWN
    clock[0] = HOUR_US
    assert log.write(lambda tx: tx.log.save_small_blob(DIGEST, DATA, ran_us=tx.ran_us)).result(10) is Stored.KNOWN
    clock[0] = 2 * HOUR_US
    assert retention.round().blobs == 0, "it came again"
    clock[0] += 1
    assert retention.round().blobs == 1
    assert log.read(lambda log: log.small_blob(DIGEST)) is None
    assert log.write(lambda tx: tx.log.save_small_blob(DIGEST, DATA, ran_us=tx.ran_us)).result(10) is not Stored.KNOWN
    assert log.read(lambda log: log.small_blob(DIGEST)) == DATA
    log.close()


def test_a_blob_that_is_not_whole_in_the_store_is_kept_whole_here(tmp_path: Path) -> None:
    log = HubLog(SqliteStore(tmp_path / "log.sqlite"), clock_us=lambda: 0)
    log.record_blob(DIGEST, 3)
    assert log.write(lambda tx: tx.log.save_small_blob(DIGEST, DATA, ran_us=tx.ran_us)).result(10) is not Stored.KNOWN
    assert log.read(lambda log: log.small_blob(DIGEST)) == DATA
    log.close()
