"""Lines over TCP: what comes is rows, once it is journalled; what cannot be taken makes the sender wait."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.waiting import until

from fordstone.connectors import socket_lines
from fordstone.connectors.base import Delivery, Home, OpenContext, SinkDelayedError, SinkStream, SourceOptions
from fordstone.connectors.journal.source import PARTITION, JournalSource
from fordstone.connectors.registry import open_sink, open_source, sink_delivery, source_delivery
from fordstone.connectors.socket_lines import LINE_BYTES_MAX, SocketFeed
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.storage.disk import FatalStorageError, OsDisk

SCHEMA = Schema.of({"n": "bigint"})


class Open:
    def __init__(self, place: Path, **options: Any) -> None:
        self.disk = OsDisk(place)
        context = OpenContext(home=Home(disk=self.disk, directory="p/n"), step="in")
        made = open_source(socket_lines(**options), SourceOptions(schema=SCHEMA, bounded=False), context)
        assert isinstance(made, JournalSource)
        assert isinstance(made.feed, SocketFeed)
        self.source, self.feed = made, made.feed
        self.reader = made.open(PARTITION, Position(0), with_positions=False)
        self.found: list[int] = []
        self.rejected: list[str] = []
        self.take()

    def take(self) -> list[int]:
        while (chunk := self.reader.read(1000)) is not None:
            self.found += chunk.frame["n"].to_list()
            self.rejected += [one.text for one in chunk.rejected]
        return self.found

    def wait_for(self, numbers: list[int]) -> None:
        until(lambda: self.take() == numbers, "the rows", report=lambda: self.found[-20:], seconds_max=30)

    def close(self) -> None:
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
    with started(tmp_path, listen="127.0.0.1:0") as made:
        yield made


def connected(opened: Open) -> socket.socket:
    return socket.create_connection(("127.0.0.1", opened.feed.port), timeout=30)


def test_lines_are_rows_however_they_are_cut(opened: Open) -> None:
    with connected(opened) as sender:
        for part in (b'{"n"', b': 1}\r\n{"n": 2}\n\n{', b'"n": 3}\nbad\n{"n": 4}'):
            sender.sendall(part)
    opened.wait_for([1, 2, 3, 4])
    assert opened.rejected == ["bad"]


def test_rows_are_there_after_a_restart(tmp_path: Path) -> None:
    with started(tmp_path, listen="127.0.0.1:0") as opened, connected(opened) as sender:
        sender.sendall(b'{"n": 1}\n')
        opened.wait_for([1])
    with started(tmp_path, listen="127.0.0.1:0") as opened:
        assert opened.take() == [1]


def test_a_full_journal_makes_the_sender_wait_and_loses_nothing(opened: Open) -> None:
    log = opened.source.messages
    log._bytes_max, log._segment_bytes = 300_000, 10_000
    lines = b"".join(b'{"n": %d}\n' % n for n in range(40_000))
    with connected(opened) as sender:
        sender.sendall(lines)
        until(lambda: "is full" in (opened.source.trouble().away or ""), "a full journal", seconds_max=30)

        def trimmed() -> bool:
            log.trim(len(opened.take()))  # a position is a number of messages
            return len(opened.found) == 40_000

        until(trimmed, "all rows", seconds_max=60)
        assert opened.found == list(range(40_000))
        assert opened.source.trouble().away is None


def test_a_line_without_end_ends_its_connection_and_no_other(opened: Open) -> None:
    with connected(opened) as endless, connected(opened) as other:
        with contextlib.suppress(OSError):  # cut off while it sends
            endless.sendall(b"x" * (LINE_BYTES_MAX + 1_000_000))
        with contextlib.suppress(ConnectionResetError):
            assert endless.recv(1) == b""
        other.sendall(b'{"n": 1}\n')
        opened.wait_for([1])
    assert opened.rejected == []


def test_a_failed_sync_stops_the_reader(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: str) -> None:
        raise FatalStorageError(f"syncing {path} failed")

    monkeypatch.setattr(opened.disk, "fsync", failing)

    def failed() -> bool:
        try:
            opened.take()
        except FatalStorageError:
            return True
        return False

    with connected(opened) as sender:
        sender.sendall(b'{"n": 1}\n')
        until(failed, "the failure to be raised", seconds_max=30)
    assert opened.found == []


def test_a_source_connects_and_connects_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with started(tmp_path, connect=address) as opened:
            for n in range(3):
                with server.accept()[0] as peer:
                    peer.sendall(b'{"n": %d}\n' % n)
                    opened.wait_for(list(range(n + 1)))
                until(
                    lambda: "is away" in (opened.source.trouble().away or ""), "the end to be noticed", seconds_max=30
                )


def test_a_sink_writes_to_the_source(opened: Open) -> None:
    address = f"127.0.0.1:{opened.feed.port}"
    sink = open_sink(socket_lines(connect=address), SinkStream(step="out", schema=SCHEMA))
    for epoch in (1, 2):
        sink.release(epoch, pl.DataFrame({"n": [epoch, epoch + 10]}))
        sink.release(epoch, pl.DataFrame({"n": []}, schema={"n": pl.Int64}))
    sink.close()
    opened.wait_for([1, 11, 2, 12])


def test_a_peer_that_is_away_delays_the_sink() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    sink = open_sink(socket_lines(connect=address), SinkStream(step="out", schema=SCHEMA))
    with pytest.raises(SinkDelayedError, match="is away"):
        sink.release(1, pl.DataFrame({"n": [1]}))


def test_what_is_wrong_with_options_is_said_when_they_are_given() -> None:
    with pytest.raises(ConfigError, match="give listen='HOST:PORT'"):
        socket_lines()
    with pytest.raises(ConfigError, match="give listen='HOST:PORT'"):
        socket_lines(listen="a:1", connect="a:1")
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        socket_lines(listen="7000")
    spec = socket_lines(listen="127.0.0.1:7000")
    assert source_delivery(spec) is Delivery.AT_MOST_ONCE
    with pytest.raises(ConfigError, match="a sink connects"):
        sink_delivery(spec)
