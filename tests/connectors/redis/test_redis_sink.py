"""Streams as sinks, on a real server: what an entry has, lost answers, large epochs, and what may happen to a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pytest
import trustme
from tests.connectors.redis.streams import entries_of, key_of
from tests.services.base import start_or_skip
from tests.services.cut import CutProxy
from tests.services.redis import RedisServer

from fordstone import Pipeline
from fordstone.connectors import MemorySource, memory, redis_stream
from fordstone.connectors.base import ConnectorSpec, Sink, SinkDelayedError, SinkStream
from fordstone.connectors.redis import server as server_module
from fordstone.connectors.redis import sink as sink_module
from fordstone.connectors.registry import open_sink
from fordstone.errors import ConfigError, FencedError, SinkError
from fordstone.lang.schema import Schema
from fordstone.protocol.lease import Fence

NUMBER = Schema.of({"n": "bigint"})
Opened = Callable[..., Sink]


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_of(tmp_path)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def opened(closing: ExitStack) -> Opened:
    """Open a sink as a start of a node does."""

    def open_it(spec: ConnectorSpec, schema: Schema = NUMBER, *, local: int = 1, known: int | None = None) -> Sink:
        stream = SinkStream(
            step="out",
            schema=schema,
            pipeline="p",
            node="n1",
            owner="state",
            start=f"start-{local}",
            generation=Fence(0, local),
            resumes_after=known,
        )
        sink = open_sink(spec, stream)
        closing.callback(sink.close)
        return sink

    return open_it


@pytest.fixture
def own_server(redis_server: RedisServer, closing: ExitStack) -> Callable[..., RedisServer]:
    def start(*options: str, **given: Any) -> RedisServer:
        server = start_or_skip(lambda: RedisServer(*options, **given))
        closing.callback(server.close)
        return server

    return start


def rows(first: int, count: int) -> pl.DataFrame:
    return pl.DataFrame({"n": range(first, first + count)}, schema=NUMBER.polars)


def numbers_in(server: RedisServer, key: str) -> list[int]:
    return [int(fields[1]) for _, fields in entries_of(server, key)]


def mark_of(key: str) -> str:
    return f"{key}:fordstone:p.n1.out"


# What an entry has.


def test_columns_are_fields_as_text_and_null_is_no_field(redis_server: RedisServer, key: str, opened: Opened) -> None:
    kinds = ["string", "binary", "boolean", "int", "double", "timestamp", "date", "decimal(5,2)"]
    schema = Schema.of({kind[:4]: kind for kind in kinds})
    values: dict[str, list[Any]] = {
        "stri": ["a b", None, ""],
        "bina": [b"\xff\x00", None, b""],
        "bool": [True, None, False],
        "int": [-7, None, 0],
        "doub": [1.5, None, float("nan")],
        "time": [datetime(2026, 1, 31, 12, microsecond=5, tzinfo=UTC), None, datetime(1, 1, 1, tzinfo=UTC)],
        "date": [date(2026, 1, 31), None, date(9999, 12, 31)],
        "deci": ["123.40", None, "0.00"],
    }
    frame = pl.DataFrame({name: pl.Series(value).cast(schema.polars[name]) for name, value in values.items()})
    opened(redis_stream(key, url=redis_server.url), schema).release(1, frame)
    found = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in entries_of(redis_server, key)]
    assert found[0] == {
        b"stri": b"a b",
        b"bina": b"\xff\x00",
        b"bool": b"true",
        b"int": b"-7",
        b"doub": b"1.5",
        b"time": b"2026-01-31T12:00:00.000005Z",
        b"date": b"2026-01-31",
        b"deci": b"123.40",
    }
    assert found[1] == {b"__null": b""}
    assert found[2][b"doub"] == b"NaN"
    assert found[2][b"time"] == b"0001-01-01T00:00:00.000000Z"


def test_a_raw_value_has_ids_and_changes_beside_it(redis_server: RedisServer, key: str, opened: Opened) -> None:
    schema = Schema.of({"line": "string"})
    frame = pl.DataFrame({"line": ["a"], "__op": ["upsert"]})
    opened(redis_stream(key, url=redis_server.url, format="raw", field="body"), schema).release(1, frame)
    ((_, fields),) = entries_of(redis_server, key)
    assert fields == [b"body", b"a", b"__op", b"upsert"]


def test_a_pipeline_writes_each_epoch_once_and_its_empty_ones(
    redis_server: RedisServer, key: str, tmp_path: Path
) -> None:
    live = MemorySource([[]])
    for first in range(0, 30, 10):
        live.append(0, rows(first, 10).to_dicts())
        pipeline = Pipeline("p")
        pipeline.source("rows", memory(live), schema={"n": "bigint"}).filter("n < 10 OR n >= 20").sink(
            "out", redis_stream(key, url=redis_server.url)
        )
        pipeline.run(state=tmp_path / "state", available_now=True)
    assert numbers_in(redis_server, key) == [*range(10), *range(20, 30)]


def test_a_stream_is_trimmed_to_about_maxlen(redis_server: RedisServer, key: str, opened: Opened) -> None:
    sink = opened(redis_stream(key, url=redis_server.url, maxlen=500))
    for epoch in range(1, 11):
        sink.release(epoch, rows(epoch * 1_000, 1_000))
    left = numbers_in(redis_server, key)
    assert 500 <= len(left) <= 1_700  # whole nodes of 100 entries are removed, before the rows of an epoch are there
    assert left[-1] == 10_999


# Answers that are lost, and epochs that need several steps.


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_epoch_whose_answer_is_lost_is_there_once(
    redis_server: RedisServer, key: str, opened: Opened, closing: ExitStack, when: Literal["before", "after"]
) -> None:
    proxy = CutProxy(redis_server.port)
    closing.callback(proxy.close)
    sink = opened(redis_stream(key, url=f"redis://127.0.0.1:{proxy.port}"))
    sink.release(1, rows(10, 3))
    proxy.arm(b"EVALSHA", when)
    with pytest.raises(SinkDelayedError, match="does not answer"):
        sink.release(2, rows(20, 3))
    sink.release(2, rows(20, 3))
    sink.release(3, rows(30, 3))
    assert proxy.cuts == 1
    assert numbers_in(redis_server, key) == [10, 11, 12, 20, 21, 22, 30, 31, 32]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_large_epoch_is_added_in_steps_and_goes_on_where_it_was_cut(
    redis_server: RedisServer,
    key: str,
    opened: Opened,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    when: Literal["before", "after"],
    step: int,
    restarts: bool,
) -> None:
    monkeypatch.setattr(sink_module, "STEP_ROWS_MAX", 10)
    proxy = CutProxy(redis_server.port)
    closing.callback(proxy.close)
    spec = redis_stream(key, url=f"redis://127.0.0.1:{proxy.port}")
    sink = opened(spec, known=0)
    proxy.arm(b"EVALSHA", when, skip=step)
    with pytest.raises(SinkDelayedError):
        sink.release(1, rows(0, 35))
    assert numbers_in(redis_server, key) == [*range(min(35, 10 * (step + (when == "after"))))]
    if restarts:
        sink = opened(spec, local=2, known=1)
    sink.release(1, rows(0, 35))
    sink.release(2, rows(35, 5))
    assert numbers_in(redis_server, key) == [*range(40)]


def test_what_is_there_of_an_epoch_must_be_what_is_released(
    redis_server: RedisServer, key: str, opened: Opened, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "STEP_ROWS_MAX", 10)
    proxy = CutProxy(redis_server.port)
    closing.callback(proxy.close)
    sink = opened(redis_stream(key, url=f"redis://127.0.0.1:{proxy.port}"))
    proxy.arm(b"EVALSHA", "before", skip=1)
    with pytest.raises(SinkDelayedError):
        sink.release(1, rows(0, 35))
    for other in (rows(1, 35), rows(0, 5)):
        with pytest.raises(SinkError, match="has 10 rows of epoch 1, which are not those that are released now"):
            sink.release(1, other)
    assert numbers_in(redis_server, key) == [*range(10)]


def test_a_step_that_arrives_after_it_was_given_up_adds_nothing_twice(
    redis_server: RedisServer, key: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ANSWER_S", 0.3)
    sink = opened(redis_stream(key, url=redis_server.url))
    sink.release(1, rows(10, 3))
    with redis_server.paused():
        for _ in range(2):
            with pytest.raises(SinkDelayedError):
                sink.release(2, rows(20, 3))
    sink.release(2, rows(20, 3))
    assert numbers_in(redis_server, key) == [10, 11, 12, 20, 21, 22]


def test_of_two_writers_in_the_same_moment_one_adds_rows(redis_server: RedisServer, key: str, opened: Opened) -> None:
    spec = redis_stream(key, url=redis_server.url)
    old = opened(spec, local=1)
    old.release(1, rows(0, 1))
    refused = threading.Event()

    def release_all() -> None:
        try:
            for epoch in range(2, 100_000):
                old.release(epoch, rows(epoch, 1))
        except FencedError:
            refused.set()

    thread = threading.Thread(target=release_all)
    thread.start()
    while len(numbers_in(redis_server, key)) < 20:
        pass
    new: Sink | None = None
    for _ in range(100):  # as the engine does; an epoch takes far longer there than here
        with suppress(SinkDelayedError):
            new = opened(spec, local=2)
            break
    thread.join(60)
    assert new is not None
    assert refused.is_set()
    before = numbers_in(redis_server, key)
    new.release(len(before) + 1, rows(-1, 1))
    assert numbers_in(redis_server, key) == [*before, -1]
    assert before == [0, *range(2, len(before) + 1)]


# What may happen to a server.


def test_a_server_that_is_away_or_full_delays_the_sink(own_server: Callable[..., RedisServer], opened: Opened) -> None:
    server = own_server()
    sink = opened(redis_stream("s", url=server.url))
    sink.release(1, rows(0, 2))
    server.kill()
    with pytest.raises(SinkDelayedError, match=r"Redis at 127\.0\.0\.1:"):
        sink.release(2, rows(2, 2))
    with pytest.raises(SinkDelayedError):
        opened(redis_stream("s", url=server.url))
    server.start()
    with server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(SinkDelayedError, match="maxmemory"):
            sink.release(2, rows(2, 2))
        client.config_set("maxmemory", 0)
    sink.release(2, rows(2, 2))
    assert numbers_in(server, "s") == [0, 1, 2, 3]


def test_a_server_that_became_a_replica_delays_the_sink(
    own_server: Callable[..., RedisServer], redis_server: RedisServer, opened: Opened
) -> None:
    server = own_server()
    sink = opened(redis_stream("s", url=server.url))
    sink.release(1, rows(0, 2))
    with server.client() as client:
        client.replicaof("127.0.0.1", 1)
        with pytest.raises(SinkDelayedError, match="read only replica"):
            sink.release(2, rows(2, 2))
        client.replicaof("NO", "ONE")
    sink.release(2, rows(2, 2))
    assert numbers_in(server, "s") == [0, 1, 2, 3]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_server_that_forgot_epochs_is_an_error(
    own_server: Callable[..., RedisServer], opened: Opened, restarts: bool
) -> None:
    server = own_server(durable=False)
    spec = redis_stream("s", url=server.url)
    sink = opened(spec, known=0)
    sink.release(1, rows(0, 2))
    with server.client() as client:
        client.save()
    sink.release(2, rows(2, 2))
    sink.release(3, rows(4, 2))
    server.kill()
    server.start()
    if restarts:
        sink = opened(spec, local=2, known=3)
    with pytest.raises(SinkError, match="has epoch 1 now: it has lost data"):
        sink.release(3 if restarts else 4, rows(6, 2))
    assert numbers_in(server, "s") == [0, 1]


def test_an_epoch_that_may_have_been_released_is_not_repeated_without_its_mark(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    spec = redis_stream(key, url=redis_server.url)
    opened(spec, known=0).release(1, rows(0, 2))
    with redis_server.client() as client:
        client.delete(mark_of(key))
    with pytest.raises(
        SinkError, match=r"epoch 1 was sealed before this start(?s:.)*unmarked='skip'(?s:.)*unmarked='write'"
    ):
        opened(spec, local=2, known=1).release(1, rows(0, 2))
    skipping = opened(redis_stream(key, url=redis_server.url, unmarked="skip"), local=3, known=1)
    skipping.release(1, rows(0, 2))
    skipping.release(2, rows(2, 2))
    assert numbers_in(redis_server, key) == [0, 1, 2, 3]
    with redis_server.client() as client:
        client.delete(mark_of(key))
    opened(redis_stream(key, url=redis_server.url, unmarked="write"), local=4, known=2).release(2, rows(2, 2))
    assert numbers_in(redis_server, key) == [0, 1, 2, 3, 2, 3]


def test_a_mark_that_something_else_has_written_is_an_error(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    with redis_server.client() as client:
        client.set(mark_of(key), "mine")
    with pytest.raises(SinkError, match="has what this sink has not written"):
        opened(redis_stream(key, url=redis_server.url))


def test_a_key_that_is_no_stream_is_an_error_and_nothing_is_marked(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    sink = opened(redis_stream(key, url=redis_server.url))
    with redis_server.client() as client:
        client.lpush(key, "x")
        for _ in range(2):
            with pytest.raises(SinkError, match="is a list, and no stream"):
                sink.release(1, rows(0, 2))
        client.delete(key)
    sink.release(1, rows(0, 2))
    assert numbers_in(redis_server, key) == [0, 1]


def test_a_row_that_is_too_large_is_an_error_and_nothing_of_its_epoch_is_there(
    redis_server: RedisServer, key: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "ROW_BYTES_MAX", 1 << 20)
    schema = Schema.of({"n": "string"})
    sink = opened(redis_stream(key, url=redis_server.url), schema)
    with pytest.raises(SinkError, match="row 1 has more than 1 MiB"):
        sink.release(1, pl.DataFrame({"n": ["small", "x" * (1 << 20)]}))
    assert entries_of(redis_server, key) == []
    sink.release(1, pl.DataFrame({"n": ["small", "x" * (1 << 19)]}))
    assert [len(fields[1]) for _, fields in entries_of(redis_server, key)] == [5, 1 << 19]


def test_tls_needs_a_certificate_that_is_trusted(
    own_server: Callable[..., RedisServer], opened: Opened, tmp_path: Path
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem", "stranger.pem")]
    issued.cert_chain_pems[0].write_to_path(files[0])
    issued.private_key_pem.write_to_path(files[1])
    authority.cert_pem.write_to_path(files[2])
    stranger.cert_pem.write_to_path(files[3])
    server = own_server(tls=(files[0], files[1], files[2]))
    own: dict[str, Any] = {"cert_file": str(files[0]), "key_file": str(files[1])}
    sink = opened(redis_stream("s", url=server.url, ca_file=str(files[2]), **own))
    sink.release(1, rows(0, 2))
    sink.release(1, rows(0, 2))
    for ca_file in (str(files[3]), None):
        with pytest.raises(SinkError, match=r"does not let this process in: .*certificate verify failed"):
            opened(redis_stream("s", url=server.url, ca_file=ca_file, **own))
    with pytest.raises(SinkDelayedError, match="If it asks for a certificate, give one with cert_file="):
        opened(redis_stream("s", url=server.url, ca_file=str(files[2])))


@pytest.mark.parametrize(
    ("given", "schema", "error"),
    [
        ({"keys": ["a", "b"]}, NUMBER, "a sink writes to one stream"),
        ({"start": "latest"}, NUMBER, "start= is for sources"),
        ({"id": "n"}, NUMBER, "id= is for sources"),
        ({}, Schema.of({"a": "array<int>"}), "a field is one value"),
        ({}, Schema.of({f"c{number}": "int" for number in range(3_001)}), "3,001 columns are too many"),
        ({"password": "NO_SUCH"}, NUMBER, "names the secret 'NO_SUCH'"),
    ],
)
def test_wrong_options_are_errors_before_a_server_is_asked(
    opened: Opened, given: dict[str, Any], schema: Schema, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        opened(redis_stream(**{"keys": "s", "url": "redis://127.0.0.1:1"} | given), schema)
