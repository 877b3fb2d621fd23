"""The server of `http_in`: takes POST requests into a journal, and answers when their rows are synced.

One thread with an event loop reads requests and writes answers; a few threads journal, and share syncs. A repeated `Idempotency-Key` gets the first
answer: keys are in the journal beside their rows, and in `keys.jsonl` once those are trimmed.

Bounds, since anybody may connect: connections, the size of a head and of a body, the bytes of all bodies together, and the time for each of
them. A request is authenticated before its body is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from fordstone.connectors.http.kind import HEALTH_PATH, HttpInOptions, secret
from fordstone.connectors.journal.loop_feed import LoopFeed
from fordstone.errors import ConfigError, DamagedError, StorageError
from fordstone.hub.listen import bound
from fordstone.protocol.http_head import HEAD_END, Head, HeadError, parse_head, response_head
from fordstone.storage.disk import Disk, FatalStorageError
from fordstone.storage.journal import Journal, seal
from fordstone.storage.message_log import Message, MessageLog, MessageLogFullError, MessageReader

if TYPE_CHECKING:
    from fordstone.connectors.base import OpenContext

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 256
HEAD_BYTES_MAX: Final = 16_384
BODIES_BYTES_MAX: Final = 64 << 20
"""Of all bodies that are being read or journalled."""
HEAD_SECONDS_MAX: Final = 30.0
"""For the next request of a connection to come, and for its head."""
TLS_SECONDS_MAX: Final = 10.0
"""For the handshake of a connection."""
BODY_SECONDS_MAX: Final = 60.0
ANSWER_SECONDS_MAX: Final = 30.0
KEY_CHARS_MAX: Final = 255
RETRY_AFTER_S: Final = 1
READ_MESSAGES: Final = 10_000


class _Key(msgspec.Struct, frozen=True, array_like=True):
    """A request that was taken. `digest`: of its body."""

    key: str
    digest: str
    rows: int


_KEY: Final = msgspec.json.Decoder(_Key)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE: Final = msgspec.json.Decoder(msgspec.Raw)


class _RejectedError(Exception):
    """The answer to a request that is not taken. `closes`: its body was not read."""

    def __init__(
        self, status: HTTPStatus, problem: str, *, closes: bool = False, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem
        self.closes = closes
        self.headers = headers or {}


class Keys:
    """The keys of the newest requests, durable for as long as they are remembered. Used from several threads."""

    def __init__(self, messages: MessageLog, journal: Journal, keys_max: int) -> None:
        """Read the keys of trimmed messages, then those that are in the journal of messages."""
        self._lock = threading.Lock()
        self._keys_max = keys_max
        self._file = journal
        self._known: OrderedDict[str, _Key] = OrderedDict()
        self._unsaved: OrderedDict[str, int] = OrderedDict()
        """Keys that only the messages have, and the positions after these."""
        lines = journal.read()
        self._lines = 0
        for record in lines:
            self._lines += 1
            self._remember(record.decode(_KEY))
        if lines.damaged_lines:
            raise DamagedError(
                f"{journal.path}: {lines.damaged_lines} lines are damaged, so requests that are repeated might be taken twice. Restore the file from a "
                "copy; or remove it, if no client repeats a request of before."
            )
        reader = MessageReader(messages, messages.first)
        found: OrderedDict[str, tuple[int, int]] = OrderedDict()
        while some := reader.read(READ_MESSAGES):
            for part in some:
                for number, one in enumerate(part.ids):
                    if one:
                        rows, _ = found.get(one, (0, 0))
                        found[one] = rows + 1, part.first + number + 1
        for stored, (rows, end) in found.items():
            digest, _, key = stored.partition(" ")
            self.add(_Key(key, digest, rows), end)

    def get(self, key: str) -> _Key | None:
        with self._lock:
            return self._known.get(key)

    def add(self, key: _Key, end: int) -> None:
        """Remember a request whose rows are durable before the position."""
        with self._lock:
            self._remember(key)
            self._unsaved[key.key] = end

    def save(self, position: int) -> None:
        """Make the keys durable whose messages before the position will be removed."""
        with self._lock:
            due = [key for key, end in self._unsaved.items() if end <= position]
            lines = [seal("key", self._known[key]) for key in due if key in self._known]
            if lines and self._lines + len(lines) > 2 * self._keys_max:
                kept = [seal("key", one) for key, one in self._known.items() if key not in self._unsaved or key in due]
                self._file.rewrite(kept)
                self._lines = len(kept)
            elif lines:
                self._file.append(*lines)
                self._lines += len(lines)
            for key in due:
                del self._unsaved[key]

    def _remember(self, key: _Key) -> None:
        self._known[key.key] = key
        self._known.move_to_end(key.key)
        while len(self._known) > self._keys_max:
            oldest, _ = self._known.popitem(last=False)
            self._unsaved.pop(oldest, None)


@dataclass(slots=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    headers: Mapping[str, str]


class HttpFeed(LoopFeed):
    """One listening socket."""

    def __init__(
        self, options: HttpInOptions, messages: MessageLog, disk: Disk, context: OpenContext, *, where: str
    ) -> None:
        super().__init__(where)
        token = secret(options.token, context, where)
        self._options = options
        self._messages = messages
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._keys = Keys(messages, Journal(disk, f"{messages.folder}/keys.jsonl"), options.keys_max)
        self._taking: dict[str, asyncio.Future[None]] = {}
        """Keys of requests that are being taken."""
        self._tls = _tls(options, where)
        self._bodies_bytes = 0
        self._open: set[asyncio.Task[None]] = set()
        self.port = options.port
        """The real one, after the start."""

    def start(self) -> None:
        self._socket = bound(self._options.host, self._options.port, option="port")
        self.port = self._socket.getsockname()[1]
        super().start()
        log.info("http source listens", extra={"source": self._where, "port": self.port, "path": self._options.path})

    def away(self) -> str | None:
        return None

    def before_trim(self, position: int) -> None:
        self._keys.save(position)

    # On the thread of the event loop.

    async def _main(self) -> None:
        handshake_s = None if self._tls is None else TLS_SECONDS_MAX
        server = await asyncio.start_server(
            self._connected,
            sock=self._socket,
            limit=HEAD_BYTES_MAX,
            ssl=self._tls,
            ssl_handshake_timeout=handshake_s,
        )
        self._ready.set()
        async with server:
            await self._stop.wait()
            for task in tuple(self._open):
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs it as one
        if len(self._open) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._open.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (TimeoutError, OSError, EOFError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._open.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read and answer one request; return whether another one may follow."""
        keeps_alive = False
        try:
            head = await self._head(reader)
            if head is None:
                return False
            keeps_alive = head.keeps_alive
            answer = await self._respond(head, reader, writer)
        except _RejectedError as error:
            keeps_alive = keeps_alive and not error.closes
            answer = _Answer(error.status, msgspec.json.encode({"error": error.problem}), error.headers)
        first = response_head(answer.status, answer.body, answer.headers, keeps_alive=keeps_alive)
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            writer.write(first + answer.body)
            await writer.drain()
        return keeps_alive

    async def _head(self, reader: asyncio.StreamReader) -> Head | None:
        try:
            async with asyncio.timeout(HEAD_SECONDS_MAX):
                raw = await reader.readuntil(HEAD_END)
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            raise _RejectedError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the head has more than {HEAD_BYTES_MAX} bytes",
                closes=True,
            ) from None
        try:
            return parse_head(raw)
        except HeadError as error:
            raise _RejectedError(HTTPStatus.BAD_REQUEST, str(error), closes=True) from None

    async def _respond(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Answer:
        """Check a request before its body is read, then take it."""
        path = head.path
        if path == HEALTH_PATH and head.method == "GET":
            if head.body_bytes != 0:
                raise _RejectedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "send no body", closes=True)
            return self._health()
        if path not in {self._options.path, HEALTH_PATH}:
            raise _RejectedError(HTTPStatus.NOT_FOUND, f"requests go to {self._options.path}", closes=True)
        if head.method != "POST" or path == HEALTH_PATH:
            allowed = {"allow": "GET" if path == HEALTH_PATH else "POST"}
            raise _RejectedError(HTTPStatus.METHOD_NOT_ALLOWED, f"use {allowed['allow']}", closes=True, headers=allowed)
        given = head.headers.get("authorization", "").encode("latin-1")
        if self._authorization is not None and not hmac.compare_digest(given, self._authorization):
            raise _RejectedError(
                HTTPStatus.UNAUTHORIZED,
                "send the token as Authorization: Bearer ...",
                closes=True,
                headers={"www-authenticate": "Bearer"},
            )
        key = head.headers.get("idempotency-key")
        if key is not None and not (0 < len(key) <= KEY_CHARS_MAX and key.isascii() and key.isprintable()):
            raise _RejectedError(
                HTTPStatus.BAD_REQUEST, f"an Idempotency-Key has 1 to {KEY_CHARS_MAX} printable characters", closes=True
            )
        size_bytes = self._body_size(head)
        self._bodies_bytes += size_bytes
        try:
            if head.headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            async with asyncio.timeout(BODY_SECONDS_MAX):
                body = await reader.readexactly(size_bytes)
            return await self._take(body, key)
        finally:
            self._bodies_bytes -= size_bytes

    def _body_size(self, head: Head) -> int:
        size_bytes = head.body_bytes
        if size_bytes is None or "content-length" not in head.headers:
            raise _RejectedError(
                HTTPStatus.LENGTH_REQUIRED, "send the body with Content-Length, not in chunks", closes=True
            )
        if size_bytes > self._options.body_bytes_max:
            problem = f"the body has more than {self._options.body_bytes_max} bytes: send less at once"
            raise _RejectedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, problem, closes=True)
        if self._bodies_bytes + size_bytes > BODIES_BYTES_MAX:
            raise _later(HTTPStatus.TOO_MANY_REQUESTS, "too much is being sent at once", closes=True)
        return size_bytes

    async def _take(self, body: bytes, key: str | None) -> _Answer:
        """Journal the rows of a request, unless its key says that they are there; answer when they are synced."""
        values = self._values(body)
        if not values:
            return _taken(0)
        loop = asyncio.get_running_loop()
        if key is None:
            await self._synced(loop.run_in_executor(self._pool, self._store, values, None))
            return _taken(len(values))
        digest = hashlib.blake2b(body, digest_size=16).hexdigest()
        while (other := self._taking.get(key)) is not None:
            await asyncio.wait([other])
        if (known := self._keys.get(key)) is None:
            request = _Key(key, digest, len(values))
            storing = self._taking[key] = loop.run_in_executor(self._pool, self._store, values, request)
            storing.add_done_callback(lambda _: self._taking.pop(key))
            await self._synced(storing)
            return _taken(len(values))
        if known.digest != digest:
            problem = "this Idempotency-Key was used for a request with another body"
            raise _RejectedError(HTTPStatus.UNPROCESSABLE_ENTITY, problem)
        return _taken(known.rows)

    def _store(self, values: list[bytes], request: _Key | None) -> None:
        """Journal rows, and remember the key of their request. On a thread of the pool, also if the client has gone away meanwhile."""
        stored_id = "" if request is None else f"{request.digest} {request.key}"
        now_us = time.time_ns() // 1_000
        end = self._messages.commit([Message(value, "", now_us, stored_id) for value in values])
        if request is not None:
            self._keys.add(request, end)

    async def _synced(self, storing: asyncio.Future[None]) -> None:
        """Wait until the rows are durable, or raise the answer that says why they are not."""
        try:
            await asyncio.shield(storing)
        except MessageLogFullError:
            problem = "the journal is full, because rows are not processed quickly enough"
            raise _later(HTTPStatus.TOO_MANY_REQUESTS, problem) from None
        except FatalStorageError as error:
            log.exception("journal failed, nothing is acknowledged any more", extra={"source": self._where})
            raise _later(HTTPStatus.SERVICE_UNAVAILABLE, "the journal has failed") from error
        except StorageError as error:
            log.warning("request not taken", extra={"source": self._where, "problem": str(error)})
            raise _later(HTTPStatus.SERVICE_UNAVAILABLE, "the journal takes nothing now") from error

    def _values(self, body: bytes) -> list[bytes]:
        if self._options.format == "raw":
            return [body]
        try:
            if body.lstrip()[:1] == b"[":
                return [bytes(one) for one in _LIST.decode(body)]
            lines = [line for line in body.splitlines() if line.strip()]
            if len(lines) > 1:
                with contextlib.suppress(msgspec.DecodeError):
                    _VALUE.decode(lines[0])  # else it is one object on several lines
                    for line in lines:
                        _VALUE.decode(line)
                    return lines
            _VALUE.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            problem = f"the body is neither a JSON object, nor an array, nor JSON lines: {error}. Nothing was taken"
            raise _RejectedError(HTTPStatus.BAD_REQUEST, problem) from None
        return [body]

    def _health(self) -> _Answer:
        status = HTTPStatus.OK
        try:
            self._messages.check()
        except StorageError:
            status = HTTPStatus.SERVICE_UNAVAILABLE
        return _Answer(status, msgspec.json.encode({"healthy": status is HTTPStatus.OK}), {})


def _tls(options: HttpInOptions, where: str) -> ssl.SSLContext | None:
    if options.cert_file is None:
        return None
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password, OpenSSL would ask for that of an encrypted key at the terminal.
        made.load_cert_chain(options.cert_file, options.key_file, password="")
    except OSError as error:
        raise ConfigError(
            f"{where}: the certificate {options.cert_file} with the key {options.key_file} cannot be used: {error}. Both are files in PEM "
            "form on this node; the key may not be encrypted."
        ) from error
    return made


def _taken(rows: int) -> _Answer:
    return _Answer(HTTPStatus.ACCEPTED, msgspec.json.encode({"rows": rows}), {})


def _later(status: HTTPStatus, problem: str, *, closes: bool = False) -> _RejectedError:
    return _RejectedError(
        status, f"{problem}. Send it again later", closes=closes, headers={"retry-after": str(RETRY_AFTER_S)}
    )
