"""Files at a URL: in memory and in an S3 server of this process, as source and as sink, on both engines."""

from __future__ import annotations

import gzip
import io
import json
import socket
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
from moto.server import ThreadedMotoServer
from tests.spark.both_engines import Engine, OnEdge, engine_fixture

from fordstone import Pipeline, tumbling
from fordstone.connectors import files, latest, rows
from fordstone.connectors.base import SinkStream, SourceOptions
from fordstone.connectors.files.remote import RemoteFileSource
from fordstone.connectors.registry import open_sink, open_source
from fordstone.errors import ConfigError, SinkError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId
from fordstone.plan.plan import Plan
from fordstone.storage.remote import FsspecRemote, open_filesystem

__all__ = ["engine_fixture"]
SCHEMA = {"n": "bigint", "ts": "timestamp"}
_NUMBERS = count(1)


@pytest.fixture(name="s3", scope="module")
def s3_fixture() -> Iterator[str]:
    """The address of a server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(name="url", params=["memory", "s3"])
def url_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    number = next(_NUMBERS)
    if request.param == "memory":
        return f"memory://bucket{number}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    fsspec.filesystem("s3").mkdir(f"bucket{number}")
    return f"s3://bucket{number}"


def put(url: str, data: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(data)


def lines(seconds: Iterable[int]) -> bytes:
    return "".join(
        json.dumps({"n": n, "ts": f"2026-01-01T00:{n // 60:02d}:{n % 60:02d}Z"}) + "\n" for n in seconds
    ).encode()


def copying(url: str, pattern: str = "*.jsonl", **options: Any) -> Plan:
    pipeline = Pipeline("remote")
    source = pipeline.source("src", files(f"{url}/in/{pattern}", **options), schema=SCHEMA, time="ts")
    source.select("n").sink("out", files(f"{url}/out", format="jsonl"))
    windows = source.group_by().window(tumbling("10s")).agg(n="count(*)")
    windows.sink("windows", files(f"{url}/windows", format="parquet"))
    return pipeline.plan()


def test_files_that_come_are_read_once_and_epochs_are_written(engine: Engine, url: str) -> None:
    plan = copying(url)
    put(f"{url}/in/a.jsonl", lines(range(60)))
    put(f"{url}/in/_not.jsonl", lines(range(60)))
    put(f"{url}/in/other.csv", b"n\n1\n")
    engine.run(plan)
    put(f"{url}/in/b.jsonl", lines(range(60, 120)))
    engine.run(plan)
    engine.restart()
    put(f"{url}/in/c.jsonl", lines(range(120, 180)).rstrip(b"\n"))
    engine.run(plan)
    assert sorted(rows(f"{url}/out")["n"].to_list()) == list(range(180))
    closed = rows(f"{url}/windows").sort("window_start")
    assert closed["n"].to_list() == [10] * closed.height
    assert closed.height >= 11


def test_all_formats_and_folders_are_read(engine: Engine, url: str) -> None:
    put(f"{url}/in/x/a.jsonl.gz", gzip.compress(lines(range(10))))
    put(f"{url}/in/y/z/b.jsonl", lines(range(10, 20)))
    frame = pl.read_ndjson(lines(range(20, 30))).with_columns(pl.col("ts").str.to_datetime(time_zone="UTC"))
    with fsspec.open(f"{url}/in/c.parquet", "wb") as file:
        frame.write_parquet(file)
    put(f"{url}/in/d.csv", b"n,ts\n30,2026-01-01T00:00:30Z\n")
    engine.run(copying(url, "**/*"))
    assert sorted(rows(f"{url}/out")["n"].to_list()) == list(range(31))


def test_a_file_that_was_read_to_its_end_is_not_fetched_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(f"{url}/in/a.jsonl", lines(range(60)))
    engine, fetched = OnEdge(tmp_path, 1), list[str]()
    fetch = RemoteFileSource.fetched

    def noted(self: RemoteFileSource, partition: PartitionId, *args: Any, **options: Any) -> Any:
        fetched.append(partition)
        return fetch(self, partition, *args, **options)

    monkeypatch.setattr(RemoteFileSource, "fetched", noted)
    engine.run(copying(url))
    engine.restart()
    put(f"{url}/in/b.jsonl", lines(range(60, 120)))
    engine.run(copying(url))
    assert fetched == ["a.jsonl", "b.jsonl"]


def test_a_file_that_changed_after_it_was_read_is_an_error(engine: Engine, url: str) -> None:
    plan = copying(url)
    put(f"{url}/in/a.jsonl", lines(range(60)))
    engine.run(plan)
    engine.restart()
    put(f"{url}/in/a.jsonl", lines(range(100, 180)))
    with pytest.raises(SourceError, match=r"in/a\.jsonl is another file than the one that was read"):
        engine.run(plan)


def test_bounded_input_without_a_file_is_an_error(url: str) -> None:
    source = open_source(files(f"{url}/in/*.jsonl"), SourceOptions(schema=Schema.of(SCHEMA), bounded=True))
    with pytest.raises(SourceError, match="no file matches"):
        source.partitions()


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_column_that_the_first_file_lacks_is_an_error_that_names_its_url(url: str, ending: str) -> None:
    frame, data = pl.DataFrame({"n": [1], "tz": ["2026-01-01"]}), io.BytesIO()
    frame.write_ndjson(data) if ending == "jsonl" else frame.write_parquet(data)
    put(f"{url}/in/a.{ending}", data.getvalue())
    pipeline = Pipeline("remote")
    with pytest.raises(ConfigError, match='"n": "bigint"'):
        pipeline.source("look", files(f"{url}/in/*.{ending}"))
    source = pipeline.source("src", files(f"{url}/in/*.{ending}"), schema=SCHEMA)
    with pytest.raises(SourceError, match=f"{url}/in/a.{ending}: no row has column 'ts'"):
        source.collect()


def test_an_epoch_is_released_once_and_never_changes(url: str) -> None:
    stream = SinkStream(step="s", schema=Schema.of({"n": "bigint"}), upsert_key=("n",))
    sink = open_sink(files(f"{url}/out", format="jsonl"), stream)
    sink.release(1, pl.DataFrame({"n": [1, 2]}))
    sink.release(2, pl.DataFrame({"n": []}, schema={"n": pl.Int64}))
    again = open_sink(files(f"{url}/out", format="jsonl"), stream)
    again.release(1, pl.DataFrame({"n": [2, 1]}))
    again.write(pl.DataFrame({"n": [3]}))
    assert sorted(latest(f"{url}/out")["n"].to_list()) == [1, 2, 3]
    with pytest.raises(SinkError, match="already has epoch 1"):
        again.release(1, pl.DataFrame({"n": [4]}))
    with pytest.raises(SinkError, match="holds the output of another stream"):
        open_sink(files(f"{url}/out", format="parquet"), stream)


def test_where_a_file_does_not_appear_at_once_it_is_renamed_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = fsspec.filesystem("file")
    moved: list[str] = []
    move = local.mv

    def noted(old: str, new: str) -> None:
        moved.append(old)
        move(old, new)

    monkeypatch.setattr(local, "mv", noted)
    FsspecRemote(local, str(tmp_path)).put("a/b.jsonl", b"x")
    (old,) = moved
    assert fnmatch(old, f"{tmp_path}/a/.tmp-*-b.jsonl")
    assert (tmp_path / "a/b.jsonl").read_bytes() == b"x"


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    assert files(f"file://{tmp_path}/in/*.jsonl") == files(f"{tmp_path}/in/*.jsonl")


@pytest.mark.parametrize(("scheme", "package"), [("hdfs", "hdfs-native"), ("gs", "gcsfs"), ("abfs", "adlfs")])
def test_a_scheme_whose_package_is_missing_names_it(scheme: str, package: str) -> None:
    with pytest.raises(ConfigError, match=f"Install what this kind of URL needs: pip install {package}"):
        open_filesystem(f"{scheme}://host/in", kind="files")


def test_a_server_that_cannot_be_reached_is_not_an_empty_directory():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    stream = Pipeline("p").source("rows", files(f"http://127.0.0.1:{port}/in/a.jsonl"), schema={"n": "bigint"})
    with pytest.raises(SourceError, match=f"could not list http://127.0.0.1:{port}/in.*Connect"):
        stream.collect()
