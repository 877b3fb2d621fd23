"""Files at a URL: in memory, in S3 and in HDFS, as source and as sink, on both engines."""

from __future__ import annotations

import gzip
import io
import json
import socket
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
from tests.services.fixtures import at_urls
from tests.spark.both_engines import Engine, OnEdge, OnSpark
from tests.spark.micro import MicroSpark

from fordstone import Pipeline, tumbling
from fordstone.connectors import files, latest, rows
from fordstone.connectors.base import PartedSink, PartWriter, SinkStream, SourceOptions
from fordstone.connectors.files.remote import WRITER_NAME, RemoteFileSource
from fordstone.connectors.files.rows import MARK_NAME
from fordstone.connectors.files.settings import dead_letter_files
from fordstone.connectors.registry import open_parts, open_sink, open_source
from fordstone.errors import ConfigError, SinkError, SourceError
from fordstone.lang.schema import Schema
from fordstone.operators.dead_letter import LETTER_SCHEMA
from fordstone.plan.ids import PartitionId
from fordstone.plan.plan import Plan
from fordstone.storage.remote import FsspecRemote, open_filesystem

SCHEMA = {"n": "bigint", "ts": "timestamp"}
ROUNDS = 100
ENGINES = ("edge", "edge-3", "spark")
on_engines = pytest.mark.parametrize(("url", "engine"), at_urls(ENGINES, "edge", "spark"), indirect=True)
on_edge = pytest.mark.parametrize(("url", "engine"), at_urls(ENGINES, "edge"), indirect=True)
"""In the stores on the edge alone: what is tested does not depend on the engine."""


@pytest.fixture(name="engine")
def engine_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    kind, _, parallelism = request.param.partition("-")
    return OnSpark(tmp_path, 1) if kind == "spark" else OnEdge(tmp_path, int(parallelism or 1), rounds=ROUNDS)


def put(url: str, data: bytes) -> None:
    folder, _, name = url.rpartition("/")
    FsspecRemote(*open_filesystem(folder, kind="files")).put(name, data)


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


@on_engines
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


@on_edge
def test_all_formats_and_folders_are_read(engine: Engine, url: str) -> None:
    put(f"{url}/in/x/a.jsonl.gz", gzip.compress(lines(range(10))))
    put(f"{url}/in/y/z/b.jsonl", lines(range(10, 20)))
    frame = pl.read_ndjson(lines(range(20, 30))).with_columns(pl.col("ts").str.to_datetime(time_zone="UTC"))
    frame.write_parquet(parquet := io.BytesIO())
    put(f"{url}/in/c.parquet", parquet.getvalue())
    put(f"{url}/in/d.csv", b"n,ts\n30,2026-01-01T00:00:30Z\n")
    engine.run(copying(url, "**/*"))
    assert sorted(rows(f"{url}/out")["n"].to_list()) == list(range(31))


def test_a_file_that_was_read_to_its_end_is_not_fetched_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(f"{url}/in/a.jsonl", lines(range(60)))
    engine, fetched = OnEdge(tmp_path, 1, rounds=ROUNDS), list[str]()
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


@on_edge
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


@pytest.mark.parametrize(("url", "ending"), at_urls(["jsonl", "parquet"], "jsonl"), indirect=["url"])
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


def parted(url: str, file_format: str = "jsonl", **more: Any) -> tuple[PartedSink, PartWriter]:
    given: dict[str, Any] = {"step": "s", "schema": Schema.of({"n": "bigint", "k": "string"})} | more
    spec, stream = files(f"{url}/out", format=file_format), SinkStream(**given)
    sink, writer = open_sink(spec, stream), open_parts(spec, stream)
    assert isinstance(sink, PartedSink)
    assert writer is not None
    return sink, writer


def numbers(*found: int) -> pl.DataFrame:
    return pl.DataFrame({"n": found, "k": [f"k{n}" for n in found]}, schema={"n": pl.Int64, "k": pl.String})


def names(url: str) -> list[str]:
    """All files of a sink but its mark."""
    found = FsspecRemote(*open_filesystem(f"{url}/out", kind="files")).walk(deep=True)
    return sorted(name for name in found if name not in {MARK_NAME, WRITER_NAME})


@pytest.mark.parametrize(
    ("url", "file_format"), at_urls(["jsonl", "csv", "parquet", "arrow"], "parquet"), indirect=["url"]
)
def test_parts_that_tasks_write_at_a_url_are_one_epoch(url: str, file_format: str) -> None:
    sink, writer = parted(url, file_format)
    writer.write(1, "a", 10_000, numbers(1, 2))
    parts = [writer.write(1, "a", n, numbers(*found)) for n, found in enumerate([(1, 2), (3,), ()])]
    writer.write(1, "given-up", 0, numbers(9))
    assert rows(f"{url}/out").is_empty()
    for _ in range(2):
        sink.release_parts(1, "a", parts)
    sink.release(2, numbers(4))
    assert rows(f"{url}/out")["n"].to_list() == [1, 2, 3, 4]
    inside = [f"epoch-000000000001/{part.name}" for part in parts if part.rows]
    assert names(url) == sorted([*inside, f"epoch-000000000002.{file_format}"])
    sink.release(1, numbers(1, 2, 3))
    with pytest.raises(SinkError, match="already has epoch 1"):
        sink.release_parts(1, "b", [writer.write(1, "b", 0, numbers(7))])
    writer.write(3, "late", 0, numbers(8))
    parted(url, file_format)
    assert not [name for name in names(url) if name.startswith("_staged")]
    assert rows(f"{url}/out")["n"].to_list() == [1, 2, 3, 4]


def test_upserts_come_in_parts_too(url: str) -> None:
    sink, writer = parted(url, upsert_key=("k",))
    for epoch, n in ((1, 1), (2, 5)):
        frame = pl.DataFrame({"n": [n], "k": ["a"], "__op": ["upsert"]})
        sink.release_parts(epoch, f"try{epoch}", [writer.write(epoch, f"try{epoch}", 0, frame)])
    assert latest(f"{url}/out").to_dicts() == [{"n": 5, "k": "a"}]


@pytest.mark.parametrize(("url", "moves"), at_urls(range(3), 1), indirect=["url"])
def test_a_crash_while_parts_are_moved_leaves_each_row_once(
    url: str, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    sink, writer = parted(url)
    parts = [writer.write(1, "a-b", n, numbers(n)) for n in range(3)]
    writer.write(1, "other", 0, numbers(9))
    move, left = FsspecRemote.move, [moves]

    def dies(self: FsspecRemote, path: str, to: str) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        move(self, path, to)

    with monkeypatch.context() as patch:
        patch.setattr(FsspecRemote, "move", dies)
        with pytest.raises(KeyboardInterrupt):
            sink.release_parts(1, "a-b", parts)
    again, _ = parted(url, sealed="a-b", owner="me", start="2", resumes_after=1)
    again.release_parts(1, "a-b", parts)
    assert rows(f"{url}/out")["n"].to_list() == [0, 1, 2]
    assert names(url) == [f"epoch-000000000001/{part.name}" for part in parts]


def test_a_part_that_is_gone_is_an_error_that_names_it(url: str) -> None:
    sink, writer = parted(url)
    part = writer.write(1, "a", 0, numbers(1))
    parted(url)  # removes what is staged
    with pytest.raises(SinkError, match=rf"_staged/.*{part.name}.* is gone"):
        sink.release_parts(1, "a", [part])


def test_later_parts_at_a_url_are_found_and_set_aside(url: str) -> None:
    sink, writer = parted(url)
    for epoch in (1, 2, 3):
        sink.release_parts(epoch, "a", [writer.write(epoch, "a", n, numbers(epoch)) for n in range(2)])
    with pytest.raises(SinkError, match="epochs 2 to 3"):
        parted(url, owner="me", start="1", resumes_after=1)
    sink, writer = parted(url, owner="me", start="1", resumes_after=1, discard_later=True)
    assert rows(f"{url}/out")["n"].to_list() == [1, 1]
    sink.release_parts(2, "b", [writer.write(2, "b", 0, numbers(5))])
    parted(url, owner="me", start="2", resumes_after=2)
    assert rows(f"{url}/out")["n"].to_list() == [1, 1, 5]
    assert sum(name.endswith(".old") for name in names(url)) == 4


def test_spark_tasks_write_their_rows_to_a_url_themselves(tmp_path: Path, s3_url: str) -> None:
    put(f"{s3_url}/in/a.jsonl", lines(range(60)))
    MicroSpark().start(copying(s3_url), state=tmp_path / "state", available_now=True).run()
    assert sorted(rows(f"{s3_url}/out")["n"].to_list()) == list(range(60))
    assert all(name.startswith("epoch-000000000001/part-") for name in names(s3_url))
    assert not list((tmp_path / "state").glob("**/*.arrow"))


LETTERS = {
    "torn": ("epoch-000000000001.jsonl", b'{"torn'),
    "empty": ("epoch-000000000001.jsonl", b""),
    "mark torn": (MARK_NAME, b'{"torn'),
    "mark not utf-8": (MARK_NAME, b'{"step":"\xee"}'),
    "mark of another stream": (
        MARK_NAME,
        b'{"version":1,"step":"other","format":"jsonl","columns":{"n":"int"},"upsert_key":null,"delimiter":","}',
    ),
    "mark gone": (MARK_NAME, None),
}


@pytest.mark.parametrize(("url", "letters"), at_urls(LETTERS, "torn", "mark gone"), indirect=["url"])
def test_damaged_dead_letters_at_a_url_are_set_aside(url: str, letters: str) -> None:
    name, damage = LETTERS[letters]
    spec, stream = dead_letter_files(f"{url}/out"), SinkStream(step="dl", schema=LETTER_SCHEMA)
    letter = pl.DataFrame(
        {name: [None] for name in LETTER_SCHEMA}, schema={name: kind.polars for name, kind in LETTER_SCHEMA.items()}
    )
    open_sink(spec, stream).release(1, letter)
    remote = FsspecRemote(*open_filesystem(f"{url}/out", kind="files"))
    remote.remove(name) if damage is None else remote.put(name, damage)
    sink = open_sink(spec, stream)
    sink.release(1, letter)
    sink.release(2, letter)
    assert rows(f"{url}/out").height == 2
    if damage is not None:
        assert remote.get(f"damaged-1/{name}") == damage


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


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("abfs", "adlfs")])
def test_a_scheme_whose_package_is_missing_names_it(scheme: str, package: str) -> None:
    with pytest.raises(ConfigError, match=f"Install what this kind of URL needs: pip install {package}"):
        open_filesystem(f"{scheme}://host/in", kind="files")


def test_a_server_that_cannot_be_reached_is_not_an_empty_directory():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    stream = Pipeline("p").source("rows", files(f"http://127.0.0.1:{port}/in/a.jsonl"), schema={"n": "bigint"})
    with pytest.raises(SourceError, match=f"could not list http://127.0.0.1:{port}/in.*Connect"):
        stream.collect()
