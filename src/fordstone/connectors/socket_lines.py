"""Lines over TCP: the kind `socket_lines`, a source that listens or connects, and a sink that connects.

TCP has no acknowledgement of its own for lines: what a peer has sent and the journal has not synced is lost in a crash, so the source is at-most-once before
the journal, and exact after it. So is the sink: what the peer had not read when the connection broke is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from typing import Final

import polars as pl

from fordstone.connectors.base import (
    About,
    ConnectorSpec,
    Delivery,
    OpenContext,
    Sink,
    SinkDelayedError,
    SinkStream,
    Source,
    SourceOptions,
    checked_spec,
    options_of,
)
from fordstone.connectors.journal.loop_feed import LoopFeed
from fordstone.connectors.journal.source import (
    JOURNAL_BYTES,
    IfJournalLost,
    JournalKind,
    JournalOptions,
    open_journal_source,
)
from fordstone.connectors.messages import MessageFormatName, message_format
from fordstone.errors import ConfigError, StorageError
from fordstone.hub.listen import bound, parse_listen
from fordstone.protocol.retry import Backoff
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.message_log import Message, MessageLog, WhenFull

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 256
LINE_BYTES_MAX: Final = 1 << 20
READ_BYTES: Final = 1 << 16
ROOM_SECONDS: Final = 0.2
CONNECT_SECONDS: Final = 10.0
SEND_SECONDS: Final = 30.0
RECONNECT: Final = Backoff(first_us=200_000, max_us=30_000_000)


class SocketOptions(JournalOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan: one of `listen` and `connect`."""

    listen: str | None = None
    connect: str | None = None

    def __post_init__(self) -> None:
        self.check_journal("socket_lines()")
        if (self.listen is None) == (self.connect is None):
            raise ConfigError(
                "socket_lines(): give listen='HOST:PORT' to be connected to, or connect='HOST:PORT' to connect."
            )
        parse_listen(self.listen or self.connect or "", option="socket_lines(): address")

    @property
    def address(self) -> tuple[str, int]:
        return parse_listen(self.listen or self.connect or "")


def socket_lines(
    *,
    listen: str | None = None,
    connect: str | None = None,
    format: MessageFormatName = "json",  # noqa: A002 - as in files()
    received: str | None = None,
    time_unit: str = "us",
    journal_bytes_max: int = JOURNAL_BYTES,
    when_full: WhenFull = "wait",
    if_journal_lost: IfJournalLost = "stop",
) -> ConnectorSpec:
    """Lines over TCP: a source that others connect to (`listen`), or that connects and reads (`connect`); a sink that connects and writes.

    Each line is a row: a JSON object, or with `format="raw"` one column of text or bytes. Anybody who can reach the port may send: there is no token. What
    was sent and not journalled is lost in a crash.
    """
    return checked_spec("socket_lines", dict(locals()), SocketOptions)


class SocketLinesKind(JournalKind):
    """The kind `socket_lines`."""

    about = About(
        summary="lines over TCP",
        source='socket_lines(listen="127.0.0.1:7000")',
        sink='socket_lines(connect="127.0.0.1:7000")',
        guarantee="Nothing acknowledges a line, so those under way are lost with a connection. A source runs on the edge only.",
        page="how-to/sockets.md",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        options_of(spec, SocketOptions)
        return Delivery.AT_MOST_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        if options_of(spec, SocketOptions).connect is None:
            raise ConfigError("socket_lines(): a sink connects. Write connect='HOST:PORT'.")
        return Delivery.AT_MOST_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        """Open the journal. Connections begin with the first read."""
        settings = options_of(spec, SocketOptions)

        def feed(messages: MessageLog, where: str) -> SocketFeed:
            return SocketFeed(settings, messages, where=where)

        called = f"socket_lines({settings.listen or settings.connect})"
        return open_journal_source(spec, settings, options, context, called=called, make_feed=feed)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """The connection is opened with the first rows."""
        del context
        return SocketSink(options_of(spec, SocketOptions), stream)


class SocketFeed(LoopFeed):
    """Reads the lines of all connections into the journal. While it is full, nothing is read, so TCP makes the senders wait."""

    def __init__(self, options: SocketOptions, messages: MessageLog, *, where: str) -> None:
        super().__init__(where)
        self._options = options
        self._messages = messages
        self._open: set[asyncio.Task[None]] = set()
        self._away: str | None = None
        self._socket: socket.socket | None = None
        self.port = options.address[1]
        """The real one, after the start."""

    def start(self) -> None:
        if self._options.listen is not None:
            self._socket = bound(*self._options.address, option="listen")
            self.port = self._socket.getsockname()[1]
        super().start()

    def away(self) -> str | None:
        return self._away

    async def _main(self) -> None:
        if self._socket is None:
            connecting = asyncio.create_task(self._connect())
            self._ready.set()
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if connecting.done():
                connecting.result()
            connecting.cancel()
            return
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=READ_BYTES)
        self._ready.set()
        async with server:
            await self._stop.wait()
            for task in tuple(self._open):
                task.cancel()

    async def _connect(self) -> None:
        host, port = self._options.address
        failures = 0
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
                self._away, failures = None, 0
                try:
                    await self._read(reader)
                finally:
                    writer.close()
                problem = "the connection was closed"
            except (TimeoutError, OSError) as error:
                problem = str(error) or "it does not answer"
            failures += 1
            self._note_away(f"{host}:{port} is away: {problem}")
            await asyncio.sleep(RECONNECT.wait_s(failures, chance=random.random()))  # noqa: S311 - jitter

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs it as one
        if len(self._open) >= CONNECTIONS_MAX:
            log.warning(
                "connection refused, there are too many", extra={"source": self._where, "maximum": CONNECTIONS_MAX}
            )
            writer.transport.abort()
            return
        self._open.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._read(reader)
        self._open.discard(task)
        writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Journal lines until the peer has sent its last one, which may lack its end."""
        begun = b""
        while data := await reader.read(READ_BYTES):
            *lines, begun = (begun + data).split(b"\n")
            await self._journal(lines)
            if len(begun) > LINE_BYTES_MAX:
                log.warning("connection closed, a line is too long", extra={"source": self._where, "bytes": len(begun)})
                return
        await self._journal([begun])

    async def _journal(self, lines: list[bytes]) -> None:
        now_us = time.time_ns() // 1_000
        batch = [Message(line.removesuffix(b"\r"), "", now_us) for line in lines if line.strip()]
        while batch:
            try:
                await asyncio.get_running_loop().run_in_executor(self._pool, self._messages.commit, batch)
            except FatalStorageError:
                self._stop.set()  # readers of the journal raise it
                raise OSError("the journal has failed") from None
            except StorageError as error:
                if self._stop.is_set():
                    return
                self._note_away(str(error))
                await asyncio.sleep(ROOM_SECONDS)
            else:
                self._away = None
                return

    def _note_away(self, problem: str) -> None:
        if self._away is None:
            log.warning("socket source waits", extra={"source": self._where, "problem": problem})
        self._away = problem


class SocketSink(Sink):
    """Writes lines to one connection, and opens it again when it breaks."""

    def __init__(self, options: SocketOptions, stream: SinkStream) -> None:
        self._where = f"sink {stream.step}: socket_lines(connect={options.connect!r})"
        self._address = options.address
        self._format = message_format(options.format, stream.schema, where=self._where)
        self._socket: socket.socket | None = None

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        del epoch
        self.write(frame)

    def write(self, frame: pl.DataFrame) -> None:
        if frame.is_empty():
            return
        # In raw form, a newline within a value would make two lines of it.
        lines = [value.replace(b"\n", b" ") for value in self._format.encode(frame)]
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, timeout=CONNECT_SECONDS)
                self._socket.settimeout(SEND_SECONDS)
            self._socket.sendall(b"\n".join(lines) + b"\n")
        except OSError as error:
            self.close()
            host, port = self._address
            raise SinkDelayedError(f"{self._where}: {host}:{port} is away: {error}. It will be tried again.") from error

    def close(self) -> None:
        opened, self._socket = self._socket, None
        if opened is not None:
            opened.close()
