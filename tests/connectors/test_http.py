"""HTTP: what is answered when, that a repeated request is taken once, and that hostile clients cost little."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import polars as pl
import pytest
import trustme
import urllib3
from tests.waiting import until

from fordstone.connectors import http_in, http_out
from fordstone.connectors.base import (
    ConnectorSpec,
    Home,
    OpenContext,
    SinkDelayedError,
    SinkStream,
    SourceOptions,
)
from fordstone.connectors.http import feed as http_feed
from fordstone.connectors.http.feed import HttpFeed
from fordstone.connectors.journal.source import PARTITION, JournalSource
from fordstone.connectors.registry import open_sink, open_source
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, SinkError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.storage.disk import FatalStorageError, OsDisk
from fordstone.testing.contracts.connector import SCHEMA as CONTRACT_SCHEMA
from fordstone.testing.contracts.connector import SinkContract

SCHEMA = Schema.of({"n": "bigint"})
TOKEN = {"T": "abc"}


class Open:
    """One start of the source over a folder."""

    def __init__(self, place: Path, *, schema: Schema = SCHEMA, **options: Any) -> None:
        self.disk = OsDisk(place)
        context = OpenContext(home=Home(disk=self.disk, directory="p/n"), step="in", secrets=TOKEN)
        made = open_source(http_in(port=0, **options), SourceOptions(schema=schema, bounded=False), context)
        assert isinstance(made, JournalSource)
        assert isinstance(made.feed, HttpFeed)
        self.source, self.feed = made, made.feed
        self.reader = made.open(PARTITION, Position(made.messages.first), with_positions=False)
        self.frames = [schema.empty()]
        self.rejected: list[str] = []
        self.take()
        self.pool = urllib3.PoolManager(retries=False, timeout=30)

    def take(self) -> None:
        while (chunk := self.reader.read(1000)) is not None:
            self.frames.append(chunk.frame)
            self.rejected += [one.text for one in chunk.rejected]

    def rows(self) -> list[Any]:
        self.take()
        return pl.concat(self.frames)["n"].to_list()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.feed.port}"

    def post(self, body: bytes | str, key: str | None = None, path: str = "/events", **headers: str) -> tuple[int, Any]:
        if key is not None:
            headers["idempotency-key"] = key
        answer = self.pool.request("POST", self.url + path, body=body, headers=headers)
        return answer.status, json.loads(answer.data)

    def raw(self, *parts: bytes) -> bytes:
        """What comes back for these bytes, until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.feed.port), timeout=30) as sock:
            for part in parts:
                sock.sendall(part)
            sock.shutdown(socket.SHUT_WR)
            found = b""
            while piece := sock.recv(65_536):
                found += piece
            return found

    def close(self) -> None:
        self.pool.clear()
        self.reader.close()
        self.source.close()
        self.disk.close()


@contextmanager
def started(place: Path, **options: Any) -> Iterator[Open]:
    opened = Open(place, **options)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    with started(tmp_path) as made:
        yield made


# What is taken


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ('{"n": 1}', [1]),
        ('{\n "n":\n 1\n}\n', [1]),
        ('[{"n": 1}, {"n":2}]', [1, 2]),
        ("[]", []),
        ('{"n": 1}\n\n{"n": 2}\r\n', [1, 2]),
    ],
)
def test_an_object_an_array_and_lines_are_rows(opened: Open, body: str, numbers: list[int]) -> None:
    assert opened.post(body) == (202, {"rows": len(numbers)})
    assert opened.rows() == numbers


@pytest.mark.parametrize("body", ["", "{", '{"n": 1} x', '[{"n": 1}', '{"n": 1}\n{', "[" * 100_000])
def test_what_is_no_json_is_rejected_as_a_whole(opened: Open, body: str) -> None:
    status, answer = opened.post(body)
    assert status == 400
    assert "Nothing was taken" in answer["error"]
    assert opened.rows() == []


def test_rows_that_do_not_fit_the_schema_are_dead_letters(opened: Open) -> None:
    assert opened.post('[{"n": 1}, {"n": "x"}, 7]')[0] == 202
    assert opened.rows() == [1]
    assert opened.rejected == ['{"n": "x"}', "7"]


def test_a_raw_body_is_one_value(tmp_path: Path) -> None:
    with started(tmp_path, schema=Schema.of({"n": "string"}), format="raw") as opened:
        assert opened.post("any\nthing") == (202, {"rows": 1})
        assert opened.rows() == ["any\nthing"]


def test_rows_that_were_answered_are_there_after_a_restart(tmp_path: Path) -> None:
    with started(tmp_path) as opened:
        for n in range(20):
            assert opened.post(json.dumps({"n": n}))[0] == 202
    with started(tmp_path) as opened:
        assert opened.rows() == list(range(20))


def test_nothing_is_answered_before_it_is_synced(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    syncing, go_on = Event(), Event()
    whole = opened.disk.fsync

    def slow(path: str) -> None:
        syncing.set()
        assert go_on.wait(60)
        whole(path)

    monkeypatch.setattr(opened.disk, "fsync", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(opened.post, '{"n": 1}')
        assert syncing.wait(60)
        assert opened.rows() == []
        assert not answer.done()
        go_on.set()
        assert answer.result(60)[0] == 202


def test_a_failed_sync_is_no_answer_of_success_and_stops_the_reader(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: str) -> None:
        raise FatalStorageError(f"syncing {path} failed")

    monkeypatch.setattr(opened.disk, "fsync", failing)
    assert opened.post('{"n": 1}')[0] == 503
    assert opened.pool.request("GET", opened.url + "/health").status == 503
    with pytest.raises(FatalStorageError):
        opened.rows()


# Keys


def test_a_repeated_key_is_answered_the_same_and_its_rows_are_there_once(opened: Open) -> None:
    for _ in range(3):
        assert opened.post('[{"n": 1}, {"n": 2}]', "k") == (202, {"rows": 2})
    assert opened.rows() == [1, 2]
    status, answer = opened.post('{"n": 3}', "k")
    assert (status, opened.rows()) == (422, [1, 2])
    assert "another body" in answer["error"]
    assert opened.post('{"n": 3}', "other")[0] == 202
    assert opened.rows() == [1, 2, 3]


def test_a_key_that_comes_twice_at_once_is_taken_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    syncing, go_on = Event(), Event()
    whole = opened.disk.fsync

    def slow(path: str) -> None:
        syncing.set()
        assert go_on.wait(60)
        whole(path)

    monkeypatch.setattr(opened.disk, "fsync", slow)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(opened.post, '{"n": 1}', "k") for _ in range(4)]
        assert syncing.wait(60)
        go_on.set()
        assert [answer.result(60) for answer in answers] == [(202, {"rows": 1})] * 4
    assert opened.rows() == [1]


def test_a_client_that_goes_away_before_the_answer_may_send_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing, go_on = Event(), Event()
    whole = opened.disk.fsync

    def slow(path: str) -> None:
        syncing.set()
        assert go_on.wait(60)
        whole(path)

    monkeypatch.setattr(opened.disk, "fsync", slow)
    sock = socket.create_connection(("127.0.0.1", opened.feed.port))
    sock.sendall(b'POST /events HTTP/1.1\r\nidempotency-key: k\r\ncontent-length: 8\r\n\r\n{"n": 1}')
    assert syncing.wait(60)
    sock.close()
    for task in tuple(opened.feed._open):
        opened.feed._loop.call_soon_threadsafe(task.cancel)  # type: ignore[union-attr]
    go_on.set()
    assert opened.post('{"n": 1}', "k") == (202, {"rows": 1})
    assert opened.rows() == [1]


def test_keys_survive_a_restart_and_the_trimming_of_their_rows(tmp_path: Path) -> None:
    for restart in range(3):
        with started(tmp_path) as opened:
            log = opened.source.messages
            log._segment_bytes = 200
            for n in range(30):
                assert opened.post(json.dumps({"n": n}), f"k{n}") == (202, {"rows": 1})
            assert log.end == 30
            if restart == 1:
                opened.source.ack({PARTITION: PartitionCut(position=log.end, identity=log.id)})
                assert log.first > 20
    with started(tmp_path, keys_max=10) as opened:
        assert opened.post('{"n": 29}', "k29")[0] == 202
        assert opened.source.messages.end == 30
        assert opened.post('{"n": 0}', "k0")[0] == 202
        assert opened.source.messages.end == 31, "only the newest keys are remembered"


def test_remembered_keys_stay_bounded_on_disk(tmp_path: Path) -> None:
    with started(tmp_path, keys_max=5) as opened:
        log = opened.source.messages
        for n in range(60):
            opened.post(json.dumps({"n": n}), f"k{n}")
            opened.source.ack({PARTITION: PartitionCut(position=log.end, identity=log.id)})
        path = tmp_path / "p/n/journal/in/keys.jsonl"
        assert path.read_bytes().count(b"\n") <= 10
        assert opened.post('{"n": 59}', "k59")[0] == 202
        assert log.end == 60


# Bounds and rejections


def test_a_token_is_needed_and_comes_before_the_body(tmp_path: Path) -> None:
    with started(tmp_path, token="T") as opened:
        assert opened.post('{"n": 1}')[0] == 401
        assert opened.post('{"n": 1}', authorization="Bearer abd")[0] == 401
        assert opened.post('{"n": 1}', authorization="Bearer abc")[0] == 202
        assert b" 401 " in opened.raw(b"POST /events HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
        assert opened.rows() == [1]
        assert opened.pool.request("GET", opened.url + "/health").status == 200


def test_a_full_journal_says_when_to_come_back(opened: Open) -> None:
    log = opened.source.messages
    log._bytes_max, log._segment_bytes = 4_000, 500
    statuses = [opened.post(json.dumps([{"n": n}] * 5))[0] for n in range(60)]
    assert set(statuses) == {202, 429}
    answer = opened.pool.request("POST", opened.url + "/events", body=json.dumps([{"n": 1}] * 5))
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert opened.rows() == [n for n, status in enumerate(statuses) if status == 202 for _ in range(5)]
    log.trim(log.end)
    assert opened.post('{"n": 1}')[0] == 202


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /events HTTP/1.1\r\n\r\n", 405),
        (b"POST /other HTTP/1.1\r\ncontent-length: 1\r\n\r\n", 404),
        (b"POST /events HTTP/1.1\r\n\r\n", 411),
        (b"POST /events HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 411),
        (b"POST /events HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 8\r\n\r\n", 400),
        (b"POST /events HTTP/1.1\r\ncontent-length: 8\r\ncontent-length: 9\r\n\r\n", 400),
        (b"POST /events HTTP/1.1\r\ncontent-length: -8\r\n\r\n", 400),
        (b"POST /events HTTP/1.1\r\ncontent-length : 8\r\n\r\n", 400),
        (b"POST /events HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n", 413),
        (b"POST /events HTTP/1.1\r\nidempotency-key: \xff\r\ncontent-length: 1\r\n\r\n", 400),
        (b"POST /events HTTP/1.1\r\nidempotency-key:\r\ncontent-length: 1\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /events HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"POST /events HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(101)) + b"\r\n", 400),
    ],
)
def test_hostile_and_wrong_requests_are_rejected_and_take_nothing(
    opened: Open, request_bytes: bytes, status: int
) -> None:
    assert opened.raw(request_bytes).startswith(b"HTTP/1.1 %d " % status)
    assert opened.rows() == []
    assert opened.post('{"n": 1}')[0] == 202


def certificates(folder: Path) -> dict[str, str]:
    """Make files of a certificate for this machine, of its key, and of the authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    made.private_key_pem.write_to_path(str(folder / "key.pem"))
    return {"cert_file": str(folder / "cert.pem"), "key_file": str(folder / "key.pem")}


def test_with_a_certificate_rows_come_over_tls_alone(tmp_path: Path) -> None:
    with started(tmp_path, **certificates(tmp_path)) as opened:
        body = "".join(f'{{"n": {n}}}\n' for n in range(100_000))
        url = opened.url.replace("http:", "https:") + "/events"
        with urllib3.PoolManager(retries=False, timeout=30, ca_certs=str(tmp_path / "ca.pem")) as trusting:
            assert trusting.request("POST", url, body=body).status == 202
            assert trusting.request("POST", url, body='{"n": -1}').status == 202
        assert opened.rows() == [*range(100_000), -1]
        with urllib3.PoolManager(retries=False, timeout=30) as other, pytest.raises(urllib3.exceptions.SSLError):
            other.request("POST", url, body='{"n": 1}')
        with pytest.raises(urllib3.exceptions.HTTPError):
            opened.post('{"n": 1}')
        assert len(opened.rows()) == 100_001


def test_a_handshake_that_does_not_come_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_feed, "TLS_SECONDS_MAX", 0.1)
    with (
        started(tmp_path, **certificates(tmp_path)) as opened,
        socket.create_connection(("127.0.0.1", opened.feed.port), timeout=30) as silent,
        contextlib.suppress(ConnectionResetError),
    ):
        assert silent.recv(100) == b""


@pytest.mark.parametrize(
    ("changed", "says"), [({"key_file": "missing.pem"}, "No such file"), ({"key_file": "ca.pem"}, "PEM")]
)
def test_a_certificate_that_cannot_be_used_is_an_error_at_the_start(
    tmp_path: Path, changed: dict[str, str], says: str
) -> None:
    given: dict[str, Any] = certificates(tmp_path) | {option: str(tmp_path / name) for option, name in changed.items()}
    with pytest.raises(ConfigError, match=rf"cert\.pem with the key .* cannot be used: .*{says}"):
        Open(tmp_path, **given)


def test_several_requests_come_on_one_connection(opened: Open) -> None:
    one = b'POST /events HTTP/1.1\r\ncontent-length: 8\r\n\r\n{"n": 1}'
    assert opened.raw(one * 3).count(b"HTTP/1.1 202 ") == 3
    assert opened.rows() == [1, 1, 1]


def test_a_client_that_waits_for_100_continue_is_asked_for_the_body(opened: Open) -> None:
    head = b"POST /events HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 8\r\n\r\n"
    found = opened.raw(head, b'{"n": 1}')
    assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 ")


def test_slow_and_silent_clients_are_cut_off(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_feed, "HEAD_SECONDS_MAX", 0.1)
    monkeypatch.setattr(http_feed, "BODY_SECONDS_MAX", 0.1)
    for begun in (b"", b"POST /ev", b"POST /events HTTP/1.1\r\ncontent-length: 100\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", opened.feed.port), timeout=30) as sock:
            sock.sendall(begun)
            with contextlib.suppress(ConnectionResetError):  # cut off as well
                assert sock.recv(100) == b""
    until(lambda: not opened.feed._open, "the end of all connections", seconds_max=30)
    assert opened.feed._bodies_bytes == 0


def test_more_connections_than_the_maximum_are_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_feed, "CONNECTIONS_MAX", 3)
    held = [socket.create_connection(("127.0.0.1", opened.feed.port), timeout=30) for _ in range(3)]
    until(lambda: len(opened.feed._open) == 3, "three connections", seconds_max=30)
    with pytest.raises(urllib3.exceptions.HTTPError):
        opened.post('{"n": 1}')
    for sock in held:
        sock.close()
    until(lambda: not opened.feed._open, "the end of all connections", seconds_max=30)
    assert opened.post('{"n": 1}')[0] == 202


def test_what_is_wrong_with_options_is_said_when_they_are_given(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"port": 70_000}, "ports go from 1 to 65535"),
        ({"path": "events"}, "path='events' must be like"),
        ({"path": "/health"}, "and not '/health'"),
        ({"body_bytes_max": 0}, "body_bytes_max=0 must be"),
        ({"host": "0.0.0.0"}, "can be reached from other machines, so give token="),
    ]
    for options, says in cases:
        with pytest.raises(ConfigError, match=says):
            http_in(**({"port": 1} | options))
    with pytest.raises(ConfigError, match="there is no environment variable of that name"):
        Open(tmp_path, token="MISSING")
    with pytest.raises(ConfigError, match="without user and password"):
        http_out("https://u:p@host/")


def test_a_port_that_is_taken_is_an_error_that_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        disk = OsDisk(tmp_path)
        context = OpenContext(home=Home(disk=disk, directory="p/n"), step="in")
        source = open_source(http_in(port=port), SourceOptions(schema=SCHEMA, bounded=False), context)
        reader = source.open(PARTITION, Position(0), with_positions=False)
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            reader.read(1)
        source.close()
        disk.close()


# The sink, posting to the source


class TestHttpSink(SinkContract):
    applies_upserts = False

    @pytest.fixture(autouse=True)
    def _receiver(self, tmp_path: Path) -> Iterator[None]:
        with started(tmp_path / "receiver", schema=Schema.of({"line": "string"}), format="raw") as self.receiver:
            yield

    def spec(self, place: Path) -> ConnectorSpec:
        return http_out(self.receiver.url + "/events", rows_per_request=2)

    def seen(self, place: Path) -> pl.DataFrame:
        self.receiver.take()
        bodies = pl.concat(self.receiver.frames)["line"].to_list()
        found = [json.loads(line) for body in bodies for line in body.splitlines()]
        plain: dict[str, pl.DataType] = {
            name: pl.String() if kind.name == "timestamp" else kind.polars for name, kind in CONTRACT_SCHEMA.items()
        }
        hidden: dict[str, pl.DataType] = {
            name: pl.String() for name in ("__id", "__op") if any(name in row for row in found)
        }
        frame = pl.DataFrame(found, schema=plain | hidden)
        return frame.with_columns(pl.col("ts").str.to_datetime(time_zone="UTC", time_unit="us"))


def sink_to(url: str, **more: Any) -> Any:
    stream = SinkStream(step="out", schema=SCHEMA, pipeline="p", node="n", owner="o")
    return open_sink(http_out(url, **more), stream, OpenContext(secrets=TOKEN))


def test_an_epoch_that_is_released_again_has_the_same_keys_and_is_taken_once(opened: Open) -> None:
    frame = pl.DataFrame({"n": list(range(2500))})
    for epoch in (1, 2, 2):
        sink = sink_to(opened.url + "/events")
        sink.release(epoch, frame.with_columns(pl.col("n") + epoch * 10_000))
        sink.close()
    assert opened.rows() == [epoch * 10_000 + n for epoch in (1, 2) for n in range(2500)]


def test_a_server_that_is_away_or_busy_delays_and_one_that_rejects_stops(tmp_path: Path) -> None:
    with started(tmp_path, token="T") as opened:
        frame = pl.DataFrame({"n": [1]})
        with pytest.raises(SinkError, match=r"answers 401.*send the token"):
            sink_to(opened.url + "/events").release(1, frame)
        sink = sink_to(opened.url + "/events", token="T")
        log = opened.source.messages
        before, log._bytes_max, log._segment_bytes = log._bytes_max, 3_000, 300
        released = 0

        def fill() -> None:
            nonlocal released
            while True:
                sink.release(released + 1, frame)
                released += 1

        with pytest.raises(SinkDelayedError, match="answers 429"):
            fill()
        log._bytes_max = before
        sink.release(released + 1, frame)
        assert opened.rows() == [1] * (released + 1)
        assert released
        url = opened.url
    with pytest.raises(SinkDelayedError, match="the server is away"):
        sink_to(url + "/events").release(3, frame)
