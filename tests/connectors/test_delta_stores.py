"""Delta tables in S3 and in HDFS, on real servers."""

from __future__ import annotations

import threading
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from tests.services.s3 import S3

from fordstone.connectors import delta
from fordstone.connectors.base import Sink, SinkStream
from fordstone.connectors.registry import open_sink
from fordstone.errors import FencedError, SinkError
from fordstone.lang.schema import Schema
from fordstone.storage.remote import StoreAwayError

WRITERS, EPOCHS = 4, 3


def opened(url: str, app: str = "a", **more: Any) -> Sink:
    stream: dict[str, Any] = {"step": "s", "schema": Schema.of({"n": "bigint"}), "pipeline": "p", "node": "n"} | more
    return open_sink(delta(f"{url}/t", app=app), SinkStream(**stream))


def numbers(*found: int) -> pl.DataFrame:
    return pl.DataFrame({"n": found}, schema={"n": pl.Int64})


def rows_of(url: str) -> tuple[int, int]:
    """The number of rows of a table, and their sum, as its log has them: Polars does not read HDFS."""
    files = pl.DataFrame(DeltaTable(f"{url}/t").get_add_actions(flatten=True))
    assert (files["min.n"] == files["max.n"]).all(), "each file has one row"
    return int(files["num_records"].sum()), int(files["min.n"].sum())


def test_an_epoch_is_committed_once_whatever_other_writers_do(store_url: str) -> None:
    sinks = [opened(store_url, f"a{number}") for number in range(WRITERS)]

    def write(number: int) -> None:
        for epoch in range(1, EPOCHS + 1):
            sinks[number].release(epoch, numbers(100 * number + epoch))
            sinks[number].release(epoch, numbers(100 * number + epoch))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [100 * number + epoch for number in range(WRITERS) for epoch in range(1, EPOCHS + 1)]
    assert rows_of(store_url) == (len(wanted), sum(wanted))
    with pytest.raises(SinkError, match="already has epoch 1"):
        opened(store_url, "a0").release(1, numbers(7))


def test_a_former_writer_commits_nothing(store_url: str) -> None:
    former = opened(store_url, owner="me", start="1")
    former.release(1, numbers(1))
    later = opened(store_url, owner="me", start="2", resumes_after=1)
    with pytest.raises(FencedError, match="has been taken over"):
        former.release(2, numbers(2))
    later.release(2, numbers(3))
    assert rows_of(store_url) == (2, 4)


def test_a_store_that_is_away_is_an_error_that_passes(own_s3: S3) -> None:
    url = f"s3://{own_s3.bucket()}"
    sink = opened(url)
    sink.release(1, numbers(1))
    own_s3.kill()
    with pytest.raises(StoreAwayError, match=r"could not read the table: Connection refused"):
        sink.release(2, numbers(2))
    own_s3.start()
    sink.release(2, numbers(2))
    assert rows_of(url) == (2, 3)


WRONG = {
    "secret": ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "t", "the secret key does not belong to the key id"),
    "no TLS": ({"AWS_ALLOW_HTTP": "false"}, "t", "Set AWS_ALLOW_HTTP=true"),
    "bucket": ({}, "misspelt", "bucket does not exist.\nCreate the bucket"),
}


@pytest.mark.parametrize(("environment", "bucket", "advice"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_an_error_that_says_what_to_do(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], bucket: str, advice: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreAwayError, match=advice) as raised:
        opened(s3_url if bucket == "t" else f"s3://{bucket}")
    assert "\x1b" not in str(raised.value)
