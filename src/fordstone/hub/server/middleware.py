"""The one ASGI middleware of the hub: it authenticates, limits, times out and counts requests, and maps rejections.

The order is fixed: token, rate, names in the path, role, head of the body, bytes per hour, slots, handler. A handler never sees
a request that was rejected here; if a body is too large or too slow, or memory for bodies is short, reading it raises the
rejection within the handler.

Invariants: every request counts against the rate of a token or a peer, whatever else is wrong with it; no response and no log
line contains a token; bodies are never decompressed; nothing waits without a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect

from fordstone.hub.messages import Rejection
from fordstone.hub.server.auth import PREFIX, TOKEN, Token, Tokens, why_forbidden
from fordstone.hub.server.connection import CONNECTION, peer_name
from fordstone.hub.server.limits import SHARED_TIMES, BodyMemory, Limits, LogLines, RateLimiter, Slots
from fordstone.hub.server.metrics import HubMetrics
from fordstone.hub.server.routes import METHODS, Matched, Routes

_events = logging.getLogger(__name__)

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

BUSY_RETRY_S: Final = 1
UPLOAD_BYTES_MAX: Final = 3 << 20
"""Maximum size of what is in memory of a blob that is sent or received."""
SMALL_RESPONSE_BYTES: Final = 64 << 10
"""Responses up to this size are not counted against the memory."""
TAKEN_CHECK_S: Final = 0.01
"""First pause between two looks whether a client has read a response that the kernel did not take at once."""
TAKEN_CHECK_MAX_S: Final = 0.5
CALLERS_LISTED_MAX: Final = 10
SERVER_ERROR: Final = 500
"""This status and those above are the hub's fault."""
_CREATED: Final = 201
_LENGTH_DIGITS_MAX: Final = 18


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its response."""

    id: str
    method: str
    started_s: float
    headers: dict[bytes, bytes]
    caller: str
    """The token or peer address to which limits apply."""
    times: int = 1
    """Multiple of a node's limits that applies to the caller."""
    known: bool = False
    """Whether the caller has a valid token, or needs none."""
    node: str | None = None
    """The name of a token that belongs to one node; None: the caller represents many."""
    matched: Matched | None = None
    polls: bool = False
    rejection: Rejection | None = None
    status: int = 0
    body_ended: bool = False
    announced_bytes: int | None = None
    """The Content-Length, once the body is counted against the bytes per hour."""
    received_bytes: int = 0
    sent_bytes: int = 0
    memory_bytes: int = 0
    """What it has taken of the memory for bodies."""

    @property
    def label(self) -> str:
        """The route for logs and metrics: one of a few."""
        return "none" if self.matched is None else self.matched.route.path

    @property
    def blob(self) -> bool:
        return self.matched is not None and self.matched.route.blob

    @property
    def public(self) -> bool:
        """Whether the route needs no token."""
        return self.matched is not None and "anyone" in self.matched.route.roles

    def bytes_max(self, limits: Limits) -> int:
        """Return the maximum size of its body."""
        if self.blob:
            return limits.blob_bytes_max
        of_route = None if self.matched is None else self.matched.route.body_bytes_max
        return limits.body_bytes_max if of_route is None else min(of_route, limits.body_bytes_max)


class HubMiddleware:
    """Stands before every handler. There is one per hub, on its event loop."""

    def __init__(
        self,
        routes: Routes,
        *,
        lifespan: App,
        tokens: Tokens | None,
        limits: Limits,
        metrics: HubMetrics,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lifespan` is called for the start and stop of the server. Without `tokens` the hub is open."""
        self._routes = routes
        self._lifespan = lifespan
        self._tokens = tokens
        self._limits = limits
        self._metrics = metrics
        self._clock_s = clock_s
        self._rates = RateLimiter(
            rate_per_s=limits.rate_per_s, burst=limits.rate_per_s * limits.burst_s, callers_max=limits.callers_max
        )
        self._bytes = RateLimiter(
            rate_per_s=limits.bytes_per_hour / 3600, burst=limits.bytes_per_hour, callers_max=limits.callers_max
        )
        self._slots = Slots(limits.requests_max, node_max=limits.node_requests_max)
        self._polls = Slots(limits.polls_max, node_max=limits.node_polls_max)
        self._memory = BodyMemory(limits.memory_bytes_max)
        self._lines = LogLines(callers_max=limits.callers_max)
        metrics.requests_running.set_function(lambda: self._slots.taken)
        metrics.polls_waiting.set_function(lambda: self._polls.taken)
        metrics.body_memory_bytes.set_function(lambda: self._memory.taken_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        peer = scope.get("client")
        exchange = Exchange(
            id=secrets.token_hex(8),
            method=scope["method"],
            started_s=self._clock_s(),
            headers=_headers(scope["headers"]),
            caller=f"peer {peer_name(peer[0]) if peer else 'unknown'}",
        )
        connection = scope.get("extensions", {}).get(CONNECTION, {}).get("connection")
        response = _Response(exchange, self._limits, send, self._take_memory, connection)
        try:
            await self._handle(exchange, scope, receive, response, connection)
        except Rejection as rejection:
            # Its frames have the body, and futures in these frames have the exception: a cycle, which would keep the body's memory
            # long after it was given back.
            await self._reject(exchange, rejection.with_traceback(None), response)
        except ClientDisconnect:
            self._metrics.disconnects.inc()
        except Exception:  # noqa: BLE001 - a bug fails one request; it is logged
            where = "its log says why"
            if self._lines.take(exchange.caller, self._clock_s(), known=exchange.known):
                _events.exception("request failed", extra={"request": exchange.id, "route": exchange.label})
                where += f" under request {exchange.id}"
            await self._reject(
                exchange, Rejection("failed", f"the hub failed; {where}. Trying again is safe."), response
            )
        finally:
            self._end(exchange)

    def log_left_out(self) -> None:
        """Log how many rejections were not logged since the last call. Called every few seconds."""
        left_out = self._lines.left_out()
        if left_out:
            most = dict(left_out.most_common(CALLERS_LISTED_MAX))
            _events.info("rejections not logged", extra={"rejections": left_out.total(), "callers": most})

    async def _handle(
        self, exchange: Exchange, scope: Scope, receive: Receive, response: _Response, connection: Any
    ) -> None:
        """Pass the request to its handler, or raise why not."""
        token, why_not = self._identify(exchange)
        self._take_connection(exchange, connection)
        self._limit_rate(exchange)
        found = self._routes.match(dict(scope))
        if isinstance(found, Matched):
            exchange.matched = found
        if why_not is not None and not exchange.public:
            raise why_not
        if isinstance(found, Rejection):
            raise found
        why = None if token is None else why_forbidden(token, found)
        if why is not None:
            raise Rejection(
                "forbidden", f"{why}. Use a token that has access, or make one with `fordstone hub token add`."
            )
        self._check_head(exchange)
        self._limit_bytes(exchange)
        # Read as the handler reads it: escapes hide nothing.
        exchange.polls = found.route.polls and "wait" in QueryParams(scope.get("query_string", b""))
        slots = self._polls if exchange.polls else self._slots
        with slots.one(exchange.node) as given:
            if not given:
                raise _busy(exchange.caller if slots.is_full_of(exchange.node) else None)
            body = _Body(exchange, self._limits, receive, self._take_memory, self._clock_s)
            scope["path_params"] = dict(found.params)
            scope[TOKEN] = token
            await found.starlette.handle(scope, body.receive, response.send)
            # Not within `send`: Starlette cancels that once the last piece of a stream is handed over.
            await response.taken()

    def _identify(self, exchange: Exchange) -> tuple[Token | None, Rejection | None]:
        """Find the caller to which limits apply. The rejection is for all routes but those that need no token."""
        if self._tokens is None or not self._tokens.required:
            exchange.times = SHARED_TIMES
            exchange.known = not is_from_web_page(exchange.headers)
            if exchange.known:
                return None, None
            return None, Rejection(
                "forbidden",
                "a hub without tokens answers only programs of this machine, which use an IP address or localhost in its URL; this "
                "request came from a web page, or with another name. Make a token with `fordstone hub token add`.",
            )
        try:
            token = self._token_of(exchange)
        except Rejection as rejection:
            # Counted against the peer, so that guessing is slow.
            return None, rejection
        exchange.known = True
        exchange.caller = f"token {token.name}"
        exchange.node = token.name if token.role == "node" else None
        exchange.times = 1 if exchange.node is not None else SHARED_TIMES
        return token, None

    def _take_connection(self, exchange: Exchange, connection: Any) -> None:
        """Count the connection to its caller, or to its peer if that has shown no valid token."""
        if connection is None:
            return
        owner, most = exchange.caller if exchange.known else None, self._limits.node_connections_max * exchange.times
        if not connection.belongs_to(owner, most):
            raise Rejection(
                "too_many_requests",
                f"{exchange.caller} has {most} connections, each with a request in progress. Try again when one is answered.",
                headers={"retry-after": str(BUSY_RETRY_S), "connection": "close"},
            )

    def _token_of(self, exchange: Exchange) -> Token:
        assert self._tokens is not None  # noqa: S101 - asked before
        text = exchange.headers.get(b"authorization", b"")
        if not text:
            raise _unauthorised("this hub answers only requests with a token, and this one has none")
        scheme, _, secret = text.decode("latin-1").partition(" ")
        token = self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            raise _unauthorised(f"the hub does not have this token (tokens begin with {PREFIX})")
        if token.revoked_us is not None:
            raise _unauthorised(f"the token {token.name} has been revoked")
        self._tokens.used(token)
        return token

    def _limit_rate(self, exchange: Exchange) -> None:
        wait_s = self._rates.take(exchange.caller, self._clock_s(), times=exchange.times)
        if wait_s:
            raise _later(
                f"{exchange.caller} sends more than {self._limits.rate_per_s * exchange.times:g} requests per second. Try again "
                "later; `fordstone hub --rate` sets the rate.",
                wait_s,
            )

    def _limit_bytes(self, exchange: Exchange) -> None:
        """Count the body against the bytes per hour. What comes otherwise than announced is corrected at the end."""
        announced = int(exchange.headers.get(b"content-length", b"0"))
        wait_s = self._bytes.take(exchange.caller, self._clock_s(), times=exchange.times, amount=announced)
        if wait_s:
            raise _later(
                f"{exchange.caller} has sent and received more than {self._limits.bytes_per_hour * exchange.times} bytes per hour. Try "
                "again later; `fordstone hub --bytes-per-hour` sets the limit.",
                wait_s,
            )
        exchange.announced_bytes = announced

    def _take_memory(self, exchange: Exchange, memory_bytes: int) -> None:
        """Take memory for a body, in addition to what the exchange has. It is given back at the end."""
        limits = self._limits
        most_bytes = limits.node_memory_bytes_max if exchange.node is not None else limits.memory_bytes_max // 2
        if not self._memory.take(exchange.caller, memory_bytes, most_bytes=most_bytes):
            raise Rejection(
                "too_many_requests",
                "the hub has as many bytes of bodies in memory as it may have, or as one caller may. Try again in a moment.",
                status=503,
                headers={"retry-after": str(BUSY_RETRY_S)},
            )
        exchange.memory_bytes += memory_bytes

    def _check_head(self, exchange: Exchange) -> None:
        """Reject a body by what the request's headers say."""
        encoding = exchange.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in {b"identity", b""}:
            raise Rejection(
                "bad_request",
                "the hub takes bodies as they are and decompresses nothing. Send it without Content-Encoding.",
                status=415,
            )
        length = exchange.headers.get(b"content-length")
        if length is None:
            return
        if not length.isdigit():
            raise Rejection("bad_request", "Content-Length is not a number. Send the number of bytes of the body.")
        if len(length) > _LENGTH_DIGITS_MAX or int(length) > exchange.bytes_max(self._limits):
            raise _too_large(exchange, self._limits)

    async def _reject(self, exchange: Exchange, rejection: Rejection, response: _Response) -> None:
        exchange.rejection = rejection
        # Its frames refer to it, and to the connection: they would hold the memory of TLS until Python looks for cycles.
        rejection.__traceback__ = None
        self._metrics.rejections.labels(error=rejection.refusal.error).inc()
        if response.started:
            # The server closes the connection after this, which would wait for ever for a client that does not read.
            with contextlib.suppress(ClientDisconnect):
                await response.taken()
            return
        body = rejection.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **rejection.headers}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        with contextlib.suppress(ClientDisconnect):
            await response.send({"type": "http.response.start", "status": rejection.status, "headers": pairs})
            await response.send({"type": "http.response.body", "body": b"" if exchange.method == "HEAD" else body})
            await response.taken()

    def _end(self, exchange: Exchange) -> None:
        """Give back what the exchange has taken, count it and log it."""
        now_s = self._clock_s()
        if exchange.memory_bytes:
            self._memory.free(exchange.caller, exchange.memory_bytes)
        if exchange.announced_bytes is not None:
            more = exchange.received_bytes + exchange.sent_bytes - exchange.announced_bytes
            self._bytes.correct(exchange.caller, now_s, times=exchange.times, amount=more)
        seconds = now_s - exchange.started_s
        method = exchange.method if exchange.method in METHODS else "other"
        status = str(exchange.status or "gone")
        self._metrics.requests.labels(method=method, route=exchange.label, status=status).inc()
        if not exchange.polls:
            self._metrics.seconds.labels(method=method, route=exchange.label).observe(seconds)
        params = {} if exchange.matched is None else exchange.matched.params
        if exchange.blob:
            self._metrics.blob_bytes_in.inc(exchange.received_bytes)
            self._metrics.blob_bytes_out.inc(exchange.sent_bytes)
        if "epochs" in params and exchange.status == _CREATED:
            first, _, last = params["epochs"].partition("-")
            self._metrics.commits.inc()
            self._metrics.epochs.inc(int(last) - int(first) + 1)
        fields: dict[str, object] = {
            "request": exchange.id,
            "method": method,
            "route": exchange.label,
            "status": status,
        }
        fields |= {**params, "caller": exchange.caller, "ms": round(seconds * 1000, 1)}
        if exchange.rejection is None:
            _events.debug("request", extra=fields)
        elif self._lines.take(exchange.caller, now_s, known=exchange.known):
            fields |= {"error": exchange.rejection.refusal.error, "reason": str(exchange.rejection)}
            level = logging.ERROR if exchange.status >= SERVER_ERROR else logging.INFO
            _events.log(level, "request rejected", extra=fields)


class _Body:
    """The body of a request as its handler reads it: bounded in size, in memory, and in how slowly it may come."""

    def __init__(
        self,
        exchange: Exchange,
        limits: Limits,
        receive: Receive,
        take_memory: Callable[[Exchange, int], None],
        clock_s: Callable[[], float],
    ) -> None:
        self._exchange = exchange
        self._limits = limits
        self._bytes_max = exchange.bytes_max(limits)
        self._receive = receive
        self._take_memory = take_memory
        self._clock_s = clock_s
        self._window_s = clock_s()
        self._window_bytes = 0

    async def receive(self) -> Message:
        exchange = self._exchange
        if exchange.body_ended:
            # The handler waits for the client to disconnect, for as long as the response takes.
            return await self._receive()
        try:
            # A timer costs 7 us of CPU, and a small request has three, one of them for the log: 20 of more than 300 us.
            async with asyncio.timeout(self._limits.chunk_seconds_max):
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow() from None
        if message["type"] != "http.request":
            return message
        piece_bytes = len(message.get("body", b""))
        exchange.received_bytes += piece_bytes
        exchange.body_ended = not message.get("more_body", False)
        if exchange.received_bytes > self._bytes_max:
            raise _too_large(exchange, self._limits)
        if not exchange.body_ended:
            self._check_speed(piece_bytes)
        held_bytes = min(exchange.received_bytes, UPLOAD_BYTES_MAX) if exchange.blob else exchange.received_bytes
        if held_bytes > exchange.memory_bytes:
            self._take_memory(exchange, held_bytes - exchange.memory_bytes)
        return message

    def _check_speed(self, piece_bytes: int) -> None:
        """Reject a body that came too slowly in the newest window, however quick it was before."""
        now_s = self._clock_s()
        self._window_bytes += piece_bytes
        seconds = now_s - self._window_s
        if seconds < self._limits.slow_window_s:
            return
        if self._window_bytes < self._limits.bytes_per_s_min * seconds:
            raise self._too_slow()
        self._window_s, self._window_bytes = now_s, 0

    def _too_slow(self) -> Rejection:
        return Rejection(
            "bad_request",
            f"the body came too slowly: at least {self._limits.bytes_per_s_min} bytes per second in every "
            f"{self._limits.slow_window_s:g} s, and a piece every {self._limits.chunk_seconds_max:g} s, are required. Check the "
            "network, then send it again.",
            status=408,
        )


@dataclass(slots=True)
class _Response:
    """The response on its way: with the headers that every response has, and a timeout for each piece."""

    exchange: Exchange
    limits: Limits
    server_send: Send
    take_memory: Callable[[Exchange, int], None]
    connection: Any
    """None: the server did not hand it over."""
    started: bool = False
    start: Message | None = None
    """What begins the response: it is sent with the first piece of the body, so that both have one timer."""
    last_bytes: int = 0

    async def send(self, message: Message) -> None:
        exchange = self.exchange
        if message["type"] == "http.response.start":
            self._count_memory(message)
            self.started = True
            exchange.status = message["status"]
            # No cache keeps what needs a token, and no browser guesses the type.
            headers = [
                *message.get("headers", []),
                (b"cache-control", b"no-store"),
                (b"x-content-type-options", b"nosniff"),
                (b"x-request-id", exchange.id.encode()),
            ]
            if b"expect" in exchange.headers and not exchange.received_bytes and not exchange.body_ended:
                # The client waits for permission to send its body, which it does not get: it may send it or not.
                headers.append((b"connection", b"close"))
            self.start = {**message, "headers": headers}
            return
        # A server waits for the previous piece to leave, which takes as long as the line is slow.
        seconds = self.limits.chunk_seconds_max + self.last_bytes / self.limits.bytes_per_s_min
        self.last_bytes = len(message.get("body", b""))
        exchange.sent_bytes += self.last_bytes
        try:
            async with asyncio.timeout(seconds):
                if self.start is not None:
                    await self.server_send(self.start)
                    self.start = None
                await self.server_send(message)
        except TimeoutError:
            self._cut_off()

    async def taken(self) -> None:
        """Wait until the client has taken the response, as far as it is in this process: its memory is counted until then.

        The server has handed the last piece to the connection, which holds what the kernel does not take.
        """
        if self.connection is None or not self.connection.unsent_bytes:
            return
        exchange, least_bytes, pause_s = self.exchange, self.connection.unsent_bytes, TAKEN_CHECK_S
        more_bytes = min(least_bytes, exchange.sent_bytes) - exchange.memory_bytes
        if exchange.known and more_bytes > 0:
            try:
                self.take_memory(exchange, more_bytes)
            except Rejection:
                self._cut_off()
        loop = asyncio.get_running_loop()
        silent_s = loop.time() + self.limits.chunk_seconds_max
        until_s = silent_s + self.last_bytes / self.limits.bytes_per_s_min
        while left_bytes := self.connection.unsent_bytes:
            if left_bytes < least_bytes:
                least_bytes, silent_s = left_bytes, loop.time() + self.limits.chunk_seconds_max
            if loop.time() >= min(silent_s, until_s):
                self._cut_off()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, TAKEN_CHECK_MAX_S)

    def _cut_off(self) -> NoReturn:
        """Close the connection of a client that does not read: it would hold the bytes in memory for as long as it exists."""
        if self.connection is not None:
            self.connection.abort()
        raise ClientDisconnect from None

    def _count_memory(self, start: Message) -> None:
        """Take memory for a large response, before anything of it is sent."""
        length = next((int(value) for name, value in start.get("headers", []) if name == b"content-length"), 0)
        if length > SMALL_RESPONSE_BYTES and self.exchange.method != "HEAD":
            self.take_memory(self.exchange, min(length, UPLOAD_BYTES_MAX) if self.exchange.blob else length)


def is_from_web_page(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser asks on behalf of a page: it says so, or has reached the hub by the page's own host name.

    With many GETs a browser sends no origin, but on which page's behalf it asks; `none`: a person has typed the address.
    """
    if b"origin" in headers or headers.get(b"sec-fetch-site", b"none").strip().lower() != b"none":
        return True
    host = headers.get(b"host", b"localhost").decode("latin-1").strip().lower()
    bare = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if bare == "localhost":
        return False
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return True
    return False


def _unauthorised(why: str) -> Rejection:
    """`why` never contains the token."""
    return Rejection(
        "unauthorised",
        f"{why}. Give one with --token-file or FORDSTONE_HUB_TOKEN; `fordstone hub token add` makes one.",
        headers={"www-authenticate": 'Bearer realm="fordstone hub"'},
    )


def _busy(greedy: str | None) -> Rejection:
    """`greedy`: the caller that has as many slots as one node may have; None: all slots are taken."""
    if greedy is not None:
        status, message = (
            429,
            f"{greedy} has as many requests in progress as one node may have. Try again when one is answered.",
        )
    else:
        status, message = 503, "the hub has as many requests in progress as it can serve. Try again in a moment."
    return Rejection("too_many_requests", message, status=status, headers={"retry-after": str(BUSY_RETRY_S)})


def _later(message: str, wait_s: float) -> Rejection:
    return Rejection("too_many_requests", message, headers={"retry-after": str(max(1, round(wait_s + 0.5)))})


def _too_large(exchange: Exchange, limits: Limits) -> Rejection:
    what = "a blob" if exchange.blob else "a body of this request"
    return Rejection("too_large", f"{what} may have {exchange.bytes_max(limits)} bytes at most. Send less at a time.")


def _headers(pairs: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by lower-case name; several of one name are joined, so that none is overlooked."""
    headers: dict[bytes, bytes] = {}
    for name, value in pairs:
        key = name.lower()
        headers[key] = headers[key] + b"," + value if key in headers else value
    return headers
