"""Streams as sources, on a real server: the parts of an entry, where streams begin, and what may happen to one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.redis.streams import add, key_of
from tests.services.base import free_port, start_or_skip
from tests.services.redis import RedisServer
from tests.waiting import until

from fordstone import Pipeline
from fordstone.connectors import MemorySink, memory, redis_stream
from fordstone.connectors.base import Chunk, ConnectorSpec, OpenContext, Reader, Source, SourceOptions
from fordstone.connectors.redis import source as source_module
from fordstone.connectors.registry import open_source
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.testing.contracts.connector import read_all

NUMBER = {"n": "bigint"}


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_of(tmp_path)


class Opened:
    """Opens sources, and closes them when the test is over."""

    def __init__(self, closing: ExitStack) -> None:
        self._closing = closing

    def __call__(
        self, spec: ConnectorSpec, schema: dict[str, str] = NUMBER, *, bounded: bool = True, **context: Any
    ) -> Source:
        source = open_source(spec, SourceOptions(schema=Schema.of(schema), bounded=bounded), OpenContext(**context))
        self._closing.callback(source.close)
        return source


@pytest.fixture
def opened() -> Iterator[Opened]:
    with ExitStack() as closing:
        yield Opened(closing)


@pytest.fixture
def own_server(redis_server: RedisServer) -> Iterator[Callable[..., RedisServer]]:
    """Start a server that only one test uses."""
    with ExitStack() as closing:

        def start(*options: str, durable: bool = False) -> RedisServer:
            server = start_or_skip(lambda: RedisServer(*options, durable=durable))
            closing.callback(server.close)
            return server

        yield start


def rows_in(source: Source, schema: dict[str, str] = NUMBER, number: int = 0) -> list[dict[str, Any]]:
    found = read_all(source, source.partitions()[number], Schema.of(schema))
    assert not found.rejected
    return found.rows.to_dicts()


def run(spec: ConnectorSpec, state: Path, schema: dict[str, str] = NUMBER, **options: Any) -> list[Any]:
    """Run a pipeline on what is there, and return its rows."""
    pipeline, out = Pipeline("p"), MemorySink()
    pipeline.source("rows", spec, schema=schema).sink("out", memory(out))
    pipeline.run(state=state / "state", **(options or {"available_now": True}))
    return [next(iter(row.values())) if len(row) == 1 else row for row in out.rows().to_dicts()]


def numbers(*values: int) -> list[dict[str, Any]]:
    return [{"n": value} for value in values]


def read_on(reader: Reader, rows: int) -> list[Chunk]:
    """Read as an engine does, until this number of rows has come."""
    chunks: list[Chunk] = []

    def enough() -> bool:
        chunk = reader.read(1_000)
        if chunk is not None:
            chunks.append(chunk)
        return sum(one.frame.height for one in chunks) >= rows

    until(enough, f"{rows} rows", seconds_max=30)
    return chunks


# The parts of an entry.


def test_fields_id_time_and_key_are_columns(redis_server: RedisServer, key: str, opened: Opened) -> None:
    entries: list[dict[str, Any]] = [
        {"s": "a b", "b": b"\xff\x00", "i": "7", "d": "1e3", "t": "2026-01-31T12:00:00Z", "f": "true", "more": "x"},
        {"s": "", "b": b"", "i": "", "d": "", "f": ""},
        {"other": "x"},
    ]
    ids = add(redis_server, key, entries, ids=["1700000000000-0", "1700000000000-1", "1700000001000-0"])
    schema = {"s": "string", "b": "binary", "i": "int", "d": "double", "t": "timestamp", "f": "boolean"}
    named = {"id": "string", "at": "timestamp", "from": "string"}
    spec = redis_stream(key, url=redis_server.url, id="id", timestamp="at", stream="from")
    rows = rows_in(opened(spec, named | schema), named | schema)
    assert [row["id"] for row in rows] == ids
    assert [row["at"].timestamp() for row in rows] == [1_700_000_000, 1_700_000_000, 1_700_000_001]
    assert {row["from"] for row in rows} == {key}
    assert (rows[0]["s"], rows[0]["b"], rows[0]["i"], rows[0]["d"], rows[0]["f"]) == (
        "a b",
        b"\xff\x00",
        7,
        1000.0,
        True,
    )
    assert rows[0]["t"].isoformat() == "2026-01-31T12:00:00+00:00"
    assert [rows[1][name] for name in schema] == ["", b"", None, None, None, None]
    assert [rows[2][name] for name in schema] == [None] * 6


def test_of_fields_with_one_name_the_last_counts(redis_server: RedisServer, key: str, opened: Opened) -> None:
    with redis_server.client() as client:
        client.execute_command("XADD", key, "*", "n", "1", "n", "2")
    assert rows_in(opened(redis_stream(key, url=redis_server.url))) == numbers(2)


@pytest.mark.parametrize(("kind", "value"), [("string", "a b"), ("binary", b"\xff\x00")])
def test_a_raw_value_is_one_column(redis_server: RedisServer, key: str, opened: Opened, kind: str, value: Any) -> None:
    add(redis_server, key, [{"body": value, "trace": "x"}])
    spec = redis_stream(key, url=redis_server.url, format="raw", field="body")
    assert rows_in(opened(spec, {"line": kind}), {"line": kind}) == [{"line": value}]


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({}, {"n": 1}, [({"n": "one"}, "column n:"), ({"n": b"\xff"}, "invalid UTF-8"), ({"n": 1 << 63}, "column n:")]),
        ({"format": "json"}, {"value": '{"n":1}'}, [({"value": "{"}, ""), ({"n": 1}, "no field 'value'")]),
    ],
)
def test_what_is_no_row_becomes_a_dead_letter_with_its_stream_and_id(
    redis_server: RedisServer, key: str, tmp_path: Path, options: Any, good: Any, bad: Any
) -> None:
    ids = add(redis_server, key, [good, *(entry for entry, _ in bad), good])
    assert run(redis_stream(key, url=redis_server.url, **options), tmp_path) == [1, 1]
    (letters,) = tmp_path.rglob("dead-letters/rows/*.jsonl")
    found = [json.loads(line) for line in letters.read_text().splitlines()]
    assert [one["partition"] for one in found] == [key] * len(bad)
    for one, entry_id, (_, why) in zip(found, ids[1:], bad, strict=False):
        assert one["reason"].startswith(f"{key} {entry_id}: ")
        assert why in one["reason"]


def test_answers_stay_bounded_when_entries_grow(
    redis_server: RedisServer, key: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "ANSWER_BYTES", 100_000)
    small, large = [{"n": 1}] * 300, [{"n": 2, "ballast": b"\xff" * 5_000}] * 300
    add(redis_server, key, [*small, *large])
    source = opened(redis_stream(key, url=redis_server.url))
    reader = source.open(PartitionId(key), Position(0), with_positions=False)
    heights = [chunk.frame.height for chunk in iter(lambda: reader.read(100_000), None)]
    assert sum(heights) == 600
    assert max(heights) > 100
    assert max(heights[-5:]) <= 100_000 // 5_000


def test_a_large_entry_is_not_fetched_again_and_again_while_nothing_follows_it(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    add(redis_server, key, [{"n": 1, "ballast": b"x" * (1 << 20)}])
    reader = opened(redis_stream(key, url=redis_server.url), bounded=False).open(
        PartitionId(key), Position(0), with_positions=False
    )
    read_on(reader, 1)
    with redis_server.client() as client:
        before = int(client.info("stats")["total_net_output_bytes"])
        for _ in range(100):
            assert reader.read(10) is None
        assert int(client.info("stats")["total_net_output_bytes"]) - before < 20 << 20
    add(redis_server, key, numbers(2))
    assert read_on(reader, 1)[-1].frame.to_dicts() == numbers(2)


def test_a_stream_that_is_set_back_while_nothing_follows_is_noticed(
    redis_server: RedisServer, key: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(redis_server, key, numbers(1, 2))
    reader = opened(redis_stream(key, url=redis_server.url), bounded=False).open(
        PartitionId(key), Position(0), with_positions=False
    )
    read_on(reader, 2)
    assert reader.read(10) is None
    deleted(redis_server, key)
    add(redis_server, key, numbers(1), ids=["5-1"])
    monkeypatch.setattr(source_module, "CHECK_EVERY_S", 0.0)
    with pytest.raises(SourceError, match="is not the one that was read: its newest id is 5-1"):
        reader.read(10)


def test_ids_that_do_not_fit_are_an_error_with_a_way_out(
    redis_server: RedisServer, key: str, tmp_path: Path, opened: Opened
) -> None:
    add(redis_server, key, numbers(1, 2), ids=["0-1", "0-2000000"])
    with pytest.raises(SourceError, match=r"0-2000000(?s:.)*sequence_bits=20.*below 1,048,576"):
        rows_in(opened(redis_stream(key, url=redis_server.url)))
    wide = redis_stream(key, url=redis_server.url, sequence_bits=62)
    assert run(wide, tmp_path) == [1, 2]
    with pytest.raises(SourceError, match="made with sequence_bits=62"):
        run(redis_stream(key, url=redis_server.url, sequence_bits=30), tmp_path)


# Where streams begin.


def test_latest_begins_after_what_is_there_also_if_the_first_run_read_nothing(
    redis_server: RedisServer, key: str, tmp_path: Path
) -> None:
    spec = redis_stream(key, url=redis_server.url, start="latest")
    add(redis_server, key, numbers(1))
    assert run(spec, tmp_path) == []
    add(redis_server, key, numbers(2, 3))
    assert run(spec, tmp_path) == [2, 3]
    assert run(spec, tmp_path) == []


def test_a_time_begins_at_the_first_entry_that_is_not_older(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    add(redis_server, key, numbers(*range(5)), ids=[f"{1_700_000_000 + second}000-0" for second in range(5)])
    for start, first in (
        ("2023-11-14T22:13:22Z", 2),
        ("2023-11-14T23:13:22.5+01:00", 3),
        ("2030-01-01", 5),
        ("1970-01-01", 0),
    ):
        source = opened(redis_stream(key, url=redis_server.url, start=start))
        assert rows_in(source) == numbers(*range(first, 5))


def test_an_epoch_that_began_at_latest_is_read_again_from_the_same_entry(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    spec = redis_stream(key, url=redis_server.url, start="latest")
    add(redis_server, key, numbers(1))
    reader = opened(spec, bounded=False).open(PartitionId(key), Position(0), with_positions=False)
    reader.read(1)
    add(redis_server, key, numbers(2, 3))
    end = read_on(reader, 2)[-1].position
    again = opened(spec, bounded=False)
    again.restore({key: PartitionCut(position=int(end), identity=reader.identity())})
    assert read_all(again, PartitionId(key), Schema.of(NUMBER), until=int(end)).rows["n"].to_list() == [2, 3]


def test_a_stream_that_is_not_there_is_awaited_unless_the_run_is_bounded(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    spec = redis_stream(key, url=redis_server.url)
    with pytest.raises(SourceError, match=f"there is no stream {key!r} in database 0 of Redis at 127.0.0.1"):
        rows_in(opened(spec))
    reader = opened(spec, bounded=False).open(PartitionId(key), Position(0), with_positions=False)
    for _ in range(3):
        reader.read(10)
    add(redis_server, key, numbers(1))
    assert read_on(reader, 1)[-1].frame.to_dicts() == numbers(1)


def test_several_streams_are_read_together(redis_server: RedisServer, tmp_path: Path) -> None:
    keys = [key_of(tmp_path, name) for name in "ab"]
    for number, one in enumerate(keys):
        add(redis_server, one, numbers(number))
    assert sorted(run(redis_stream(keys, url=redis_server.url), tmp_path)) == [0, 1]


def test_the_position_is_published_under_a_group(redis_server: RedisServer, key: str, tmp_path: Path) -> None:
    spec = redis_stream(key, url=redis_server.url, group="dashboard")
    ids = add(redis_server, key, numbers(1, 2, 3))
    assert run(spec, tmp_path) == [1, 2, 3]
    more = add(redis_server, key, numbers(4))
    assert run(spec, tmp_path) == [4]
    run(spec, tmp_path)
    with redis_server.client() as client:
        (group,) = client.xinfo_groups(key)
    assert group["last-delivered-id"].decode() in {ids[-1], more[-1]}
    assert group["entries-read"] == 3 + (group["last-delivered-id"].decode() == more[-1])


# What may happen to a stream.


def trimmed(server: RedisServer, key: str, maxlen: int) -> None:
    with server.client() as client:
        client.xtrim(key, maxlen=maxlen, approximate=False)


def test_entries_that_were_trimmed_before_they_were_read_are_an_error_or_skipped_on_purpose(
    redis_server: RedisServer, key: str, tmp_path: Path
) -> None:
    spec = redis_stream(key, url=redis_server.url)
    add(redis_server, key, numbers(*range(10)))
    assert run(spec, tmp_path) == [*range(10)]
    add(redis_server, key, numbers(*range(10, 20)))
    trimmed(redis_server, key, 6)
    for _ in range(2):
        with pytest.raises(
            SourceError, match=r"has removed 4 entries after it before they were read(?s:.)*lost='skip'(?s:.)*--fresh"
        ):
            run(spec, tmp_path)
    assert run(redis_stream(key, url=redis_server.url, lost="skip"), tmp_path) == [*range(14, 20)]


@pytest.mark.parametrize("left", [0, 1, 3])
def test_trimming_what_was_read_is_no_loss(redis_server: RedisServer, key: str, tmp_path: Path, left: int) -> None:
    spec = redis_stream(key, url=redis_server.url)
    add(redis_server, key, numbers(*range(10)))
    assert run(spec, tmp_path) == [*range(10)]
    trimmed(redis_server, key, left)
    assert run(spec, tmp_path) == []
    add(redis_server, key, numbers(10, 11))
    trimmed(redis_server, key, 2)
    assert run(spec, tmp_path) == [10, 11]


def test_entries_that_are_deleted_one_by_one_are_not_read_and_no_loss(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    ids = add(redis_server, key, numbers(*range(6)))
    reader = opened(redis_stream(key, url=redis_server.url), bounded=False).open(
        PartitionId(key), Position(0), with_positions=False
    )
    with redis_server.client() as client:
        client.xdel(key, ids[3])
        assert [row for chunk in read_on(reader, 5) for row in chunk.frame["n"]] == [0, 1, 2, 4, 5]
        assert reader.read(10) is None
        client.xdel(key, ids[5])
        trimmed(redis_server, key, 0)
    add(redis_server, key, numbers(6))
    assert read_on(reader, 1)[-1].frame.to_dicts() == numbers(6)


def test_a_stream_that_is_trimmed_while_it_is_read_is_an_error(
    redis_server: RedisServer, key: str, opened: Opened
) -> None:
    source = opened(redis_stream(key, url=redis_server.url), bounded=False)
    add(redis_server, key, numbers(*range(100)))
    reader = source.open(PartitionId(key), Position(0), with_positions=False)
    reader.read(10)
    chunk = reader.read(10)
    assert chunk is not None
    assert chunk.frame.height == 10
    trimmed(redis_server, key, 89)
    with pytest.raises(SourceError, match="has removed an entry after it"):
        reader.read(10)


def deleted(server: RedisServer, key: str) -> None:
    with server.client() as client:
        client.delete(key)


def replaced(server: RedisServer, key: str) -> None:
    deleted(server, key)
    add(server, key, numbers(*range(100, 150)))


def replaced_with_the_same_ids(server: RedisServer, key: str) -> None:
    deleted(server, key)
    add(server, key, numbers(*range(100, 150)), ids=[f"{number + 1}-1" for number in range(50)])


def replaced_and_trimmed(server: RedisServer, key: str) -> None:
    replaced(server, key)
    trimmed(server, key, 45)


def set_back(server: RedisServer, key: str) -> None:
    deleted(server, key)
    add(server, key, numbers(*range(7)), ids=[f"{number + 1}-1" for number in range(7)])


def set_back_and_written_again(server: RedisServer, key: str) -> None:
    set_back(server, key)
    add(server, key, numbers(*range(20, 40)), ids=[f"{number}-1" for number in range(50, 70)])


@pytest.mark.parametrize(
    "change",
    [deleted, replaced, replaced_with_the_same_ids, replaced_and_trimmed, set_back, set_back_and_written_again],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_stream_that_was_replaced_or_set_back_is_an_error(
    redis_server: RedisServer, key: str, tmp_path: Path, opened: Opened, change: Any, goes_on: bool
) -> None:
    spec = redis_stream(key, url=redis_server.url)
    add(redis_server, key, numbers(*range(10)), ids=[f"{number + 1}-1" for number in range(10)])
    match = r"is not the one that was read: (?s:.)*--fresh"
    if goes_on:
        reader = opened(spec, bounded=False).open(PartitionId(key), Position(0), with_positions=False)
        read_on(reader, 10)
        change(redis_server, key)
        with pytest.raises(SourceError, match=match):
            reader.read(10)
        return
    assert len(run(spec, tmp_path)) == 10
    change(redis_server, key)
    for _ in range(2):
        with pytest.raises(SourceError, match=match):
            run(spec, tmp_path)
    if change is not deleted:
        assert run(spec, tmp_path, available_now=True, fresh=True)


def test_a_key_that_is_no_stream_is_an_error(redis_server: RedisServer, key: str, opened: Opened) -> None:
    with redis_server.client() as client:
        client.set(key, "text")
    with pytest.raises(SourceError, match="the key is there, and is no stream"):
        rows_in(opened(redis_stream(key, url=redis_server.url)))


# Reads that are planned in one process, and made in others.


def planned(source: Source, key: str, position: int, rows: int) -> PartitionCut:
    """The end of a planned read, as its reader gets it. The engine also asks whether more follows, before it asks what the read is."""
    end = source.plan_read(PartitionId(key), Position(position), rows).position
    source.plan_read(PartitionId(key), end, 1)
    return PartitionCut(position=int(end), identity=source.identity(PartitionId(key), end))


def test_a_planned_read_notices_what_was_trimmed_since(redis_server: RedisServer, key: str, opened: Opened) -> None:
    spec = redis_stream(key, url=redis_server.url)
    add(redis_server, key, numbers(*range(30)))
    planner = opened(spec, bounded=False)
    first = planned(planner, key, 0, 10)
    second = planned(planner, key, first.position, 10)

    def read(cut: PartitionCut, position: int) -> list[int]:
        source = opened(spec, bounded=False)
        source.restore({key: cut})
        found = read_all(source, PartitionId(key), Schema.of(NUMBER), position=position, until=cut.position)
        return found.rows["n"].to_list()

    assert read(first, 0) == [*range(10)]
    trimmed(redis_server, key, 20)
    assert read(second, first.position) == [*range(10, 20)]
    trimmed(redis_server, key, 19)
    with pytest.raises(SourceError, match="has removed an entry after it"):
        read(second, first.position)
    with pytest.raises(SourceError, match="has removed"):
        read(first, 0)
    third = planned(planner, key, second.position, 100)
    trimmed(redis_server, key, 10)
    assert read(third, second.position) == [*range(20, 30)]
    again = opened(spec, bounded=False)
    again.restore({key: third})
    assert planned(again, key, third.position, 10).position == third.position
    deleted(redis_server, key)
    add(redis_server, key, numbers(*range(40)))
    with pytest.raises(SourceError, match="is not the one that was read"):
        planned(again, key, third.position, 10)


# The server.


def test_a_server_that_is_away_delays_an_unbounded_source_and_fails_a_bounded_run(
    own_server: Callable[..., RedisServer], opened: Opened
) -> None:
    server = own_server(durable=True)
    spec = redis_stream("s", url=server.url)
    source = opened(spec, bounded=False)
    add(server, "s", numbers(1))
    reader = source.open(PartitionId("s"), Position(0), with_positions=False)
    read_on(reader, 1)
    server.kill()
    until(lambda: reader.read(10) is None and source.trouble().away is not None, "trouble", seconds_max=30)
    assert "Redis at 127.0.0.1" in str(source.trouble().away)
    assert source.idleness(PartitionId("s"), Position(1)).value == "unknown"
    with pytest.raises(ConnectionError, match="does not answer as it should"):
        rows_in(opened(spec))
    server.start()
    add(server, "s", numbers(2))
    assert read_on(reader, 1)[-1].frame.to_dicts() == numbers(2)
    assert source.trouble().away is None


def test_a_server_that_forgot_what_was_read_is_an_error(own_server: Callable[..., RedisServer], opened: Opened) -> None:
    server = own_server()
    source = opened(redis_stream("s", url=server.url), bounded=False)
    add(server, "s", numbers(1, 2))
    reader = source.open(PartitionId("s"), Position(0), with_positions=False)
    read_on(reader, 2)
    server.kill()
    server.start()
    add(server, "s", numbers(3))

    def read_until_error() -> None:
        until(lambda: reader.read(10) is not None, "an error", seconds_max=30)

    with pytest.raises(SourceError, match="is not the one that was read"):
        read_until_error()


@pytest.mark.parametrize(
    ("secrets", "url", "error"),
    [
        ({}, "redis://{}", "names the secret 'REDIS_PASSWORD', and there is no environment variable"),
        ({"REDIS_PASSWORD": "wrong-word"}, "redis://{}", "does not let this process in: "),
        ({"REDIS_PASSWORD": "hunter2"}, "redis://nobody@{}", "does not let this process in: "),
        ({"REDIS_PASSWORD": "hunter2"}, "redis://reader@{}", "does not let this process in: .*permissions"),
    ],
)
def test_a_rejected_user_or_password_is_an_error_that_does_not_show_it(
    guarded: RedisServer, opened: Opened, secrets: dict[str, str], url: str, error: str
) -> None:
    spec = redis_stream("s", url=url.format(f"127.0.0.1:{guarded.port}"), password="REDIS_PASSWORD")
    with pytest.raises((SourceError, ConfigError), match=error) as raised:
        rows_in(opened(spec, secrets=secrets))
    assert "wrong-word" not in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.fixture(scope="module")
def guarded(redis_server: RedisServer) -> Iterator[RedisServer]:
    server = start_or_skip(
        lambda: RedisServer(
            "--requirepass", "hunter2", *("--user", "reader", "on", ">hunter2", "~*", "+ping", "+xrange"), durable=False
        )
    )
    yield server
    server.close()


def test_a_password_is_taken_from_the_environment(guarded: RedisServer, opened: Opened) -> None:
    with guarded.client(password="hunter2") as client:
        client.xadd("mine", {"n": 1})
    spec = redis_stream("mine", url=f"redis://127.0.0.1:{guarded.port}", password="REDIS_PASSWORD")
    assert rows_in(opened(spec, secrets={"REDIS_PASSWORD": "hunter2"})) == numbers(1)


def test_a_port_that_nothing_listens_on_is_an_error_of_a_bounded_run(opened: Opened) -> None:
    with pytest.raises(ConnectionError, match=r"Redis at 127\.0\.0\.1:"):
        rows_in(opened(redis_stream("s", url=f"redis://127.0.0.1:{free_port()}")))


def test_a_node_of_a_cluster_is_refused(own_server: Callable[..., RedisServer], opened: Opened) -> None:
    server = own_server("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with pytest.raises(SourceError, match="node of a Redis Cluster"):
        rows_in(opened(redis_stream("s", url=server.url)))


# Options.

build: Any = redis_stream
"""Without types, for what is wrong on purpose."""
URL = "redis://localhost"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"keys": []}, "name a stream"),
        ({"keys": ["a", "a"]}, "name each stream once"),
        ({"url": "localhost:6379"}, "url= must be redis://"),
        ({"url": "redis://localhost:port"}, "url= must be redis://"),
        ({"url": "redis://localhost/x"}, "url= must be redis://"),
        ({"url": "redis://me:hunter2@localhost"}, "its url has a password"),
        ({"url": "redis://localhost?password=hunter2"}, "its url has a password"),
        ({"start": "yesterday"}, "start='yesterday' must be"),
        ({"format": "xml"}, "format"),
        ({"sequence_bits": 63}, "sequence_bits=63 must be 0 to 62"),
        ({"maxlen": 0}, "maxlen=0"),
        ({"ca_file": "ca.pem"}, "ca_file= and cert_file= are for TLS"),
        ({"url": "rediss://localhost", "cert_file": "cert.pem"}, "cert_file= and key_file= go together"),
        ({"id": "x", "timestamp": "x"}, "cannot be two parts"),
        ({"password": ""}, "password= must not be empty"),
    ],
)
def test_wrong_options_are_errors_when_they_are_given(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error) as raised:
        build(**{"keys": "s", "url": URL} | given)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "schema", "error"),
    [
        ({"id": "id"}, NUMBER, "there is no column 'id'"),
        ({"id": "n"}, NUMBER, "column 'n' must be string"),
        ({"maxlen": 5}, NUMBER, "maxlen= is for sinks"),
        ({}, {"a": "array<int>"}, "a field is one value"),
        ({"format": "raw"}, NUMBER, "one column of type string or binary"),
    ],
)
def test_options_that_do_not_fit_the_schema_are_errors_when_the_source_is_opened(
    given: Any, schema: dict[str, str], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        open_source(build("s", url=URL, **given), SourceOptions(schema=Schema.of(schema), bounded=True))
