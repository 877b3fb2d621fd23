"""The one ASGI middleware of the hub: it authenticates, limits, times out and counts requests, and maps rejections.

The order is fixed: names in the path, token, rate, role, slots, head of the body, handler. A handler never sees a request
that was rejected here; if a body is too large or too slow, reading it raises the rejection within the handler.

Invariants: no response and no log line contains a token; bodies are never decompressed; nothing waits without a timeout.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect

from fordstone.hub.messages import Rejection
from fordstone.hub.server.auth import PREFIX, Token, Tokens, why_forbidden
from fordstone.hub.server.limits import SHARED_TIMES, Limits, RateLimiter, Slots
from fordstone.hub.server.metrics import HubMetrics
from fordstone.hub.server.routes import METHODS, Matched, Routes

log = logging.getLogger(__name__)

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

ABORT: Final = "fordstone.abort"
"""The ASGI extension with which a server allows its connection to be aborted."""
BUSY_RETRY_S: Final = 1
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
    node: str | None = None
    """The name of a token that belongs to one node; None: the caller represents many."""
    matched: Matched | None = None
    polls: bool = False
    rejection: Rejection | None = None
    status: int = 0
    body_ended: bool = False
    received_bytes: int = 0
    sent_bytes: int = 0

    @property
    def label(self) -> str:
        """The route for logs and metrics: one of a few."""
        return "none" if self.matched is None else self.matched.route.path

    @property
    def blob(self) -> bool:
        return self.matched is not None and self.matched.route.blob


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
        self._slots = Slots(limits.requests_max, node_max=limits.node_requests_max)
        self._polls = Slots(limits.polls_max, node_max=limits.node_polls_max)
        metrics.requests_running.set_function(lambda: self._slots.taken)
        metrics.polls_waiting.set_function(lambda: self._polls.taken)

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
            caller=f"peer {peer[0] if peer else 'unknown'}",
        )
        abort = scope.get("extensions", {}).get(ABORT, {}).get("now", lambda: None)
        response = _Response(exchange, self._limits, send, abort=abort)
        try:
            await self._handle(exchange, scope, receive, response)
        except Rejection as rejection:
            await self._reject(exchange, rejection, response)
        except ClientDisconnect:
            self._metrics.disconnects.inc()
        except Exception:
            log.exception("request failed", extra={"request": exchange.id, "route": exchange.label})
            message = f"the hub failed; its log says why under request {exchange.id}. Trying again is safe."
            await self._reject(exchange, Rejection("failed", message), response)
        finally:
            self._count(exchange)

    async def _handle(self, exchange: Exchange, scope: Scope, receive: Receive, response: _Response) -> None:
        """Pass the request to its handler, or raise why not."""
        found = self._routes.match(dict(scope))
        if isinstance(found, Matched):
            exchange.matched = found
        token = self._authenticate(exchange)
        if isinstance(found, Rejection):
            raise found
        why = None if token is None else why_forbidden(token, found)
        if why is not None:
            raise Rejection(
                "forbidden", f"{why}. Use a token that has access, or make one with `fordstone hub token add`."
            )
        self._check_head(exchange)
        # Read as the handler reads it: escapes hide nothing.
        exchange.polls = found.route.polls and "wait" in QueryParams(scope.get("query_string", b""))
        slots = self._polls if exchange.polls else self._slots
        with slots.one(exchange.node) as given:
            if not given:
                raise _busy(exchange.caller if slots.is_full_of(exchange.node) else None)
            body = _Body(exchange, self._limits, receive, self._clock_s)
            scope["path_params"] = dict(found.params)
            await found.starlette.handle(scope, body.receive, response.send)

    def _authenticate(self, exchange: Exchange) -> Token | None:
        """Find the caller, and count the request against the caller's rate."""
        public = exchange.matched is not None and "anyone" in exchange.matched.route.roles
        if self._tokens is None or not self._tokens.required:
            self._limit_rate(exchange, times=SHARED_TIMES)
            if not public and is_from_web_page(exchange.headers):
                raise Rejection(
                    "forbidden",
                    "a hub without tokens answers only programs of this machine, which use an IP address or localhost in its URL; this "
                    "request came from a web page, or with another name. Make a token with `fordstone hub token add`.",
                )
            return None
        if public:
            self._limit_rate(exchange, times=1)
            return None
        try:
            token = self._token_of(exchange)
        except Rejection:
            # Counted against the peer, so that guessing is slow.
            self._limit_rate(exchange, times=1)
            raise
        exchange.caller = f"token {token.name}"
        exchange.node = token.name if token.role == "node" else None
        self._limit_rate(exchange, times=1 if exchange.node is not None else SHARED_TIMES)
        return token

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

    def _limit_rate(self, exchange: Exchange, *, times: int) -> None:
        wait_s = self._rates.take(exchange.caller, self._clock_s(), times=times)
        if not wait_s:
            return
        raise Rejection(
            "too_many_requests",
            f"{exchange.caller} sends more than {self._limits.rate_per_s * times:g} requests per second. Try again later; "
            "`fordstone hub --rate` sets the rate.",
            headers={"retry-after": str(max(1, round(wait_s + 0.5)))},
        )

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
        if len(length) > _LENGTH_DIGITS_MAX or int(length) > self._limits.bytes_max(blob=exchange.blob):
            raise _too_large(exchange, self._limits)

    async def _reject(self, exchange: Exchange, rejection: Rejection, response: _Response) -> None:
        exchange.rejection = rejection
        self._metrics.rejections.labels(error=rejection.refusal.error).inc()
        if response.started:
            return
        body = rejection.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **rejection.headers}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await response.send({"type": "http.response.start", "status": rejection.status, "headers": pairs})
        await response.send({"type": "http.response.body", "body": b"" if exchange.method == "HEAD" else body})

    def _count(self, exchange: Exchange) -> None:
        seconds = self._clock_s() - exchange.started_s
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
            log.debug("request", extra=fields)
        else:
            fields |= {"error": exchange.rejection.refusal.error, "reason": str(exchange.rejection)}
            level = logging.ERROR if exchange.status >= SERVER_ERROR else logging.INFO
            log.log(level, "request rejected", extra=fields)


class _Body:
    """The body of a request as its handler reads it: bounded in size, and in how slowly it may come."""

    def __init__(self, exchange: Exchange, limits: Limits, receive: Receive, clock_s: Callable[[], float]) -> None:
        self._exchange = exchange
        self._limits = limits
        self._receive = receive
        self._clock_s = clock_s
        self._started_s = clock_s()

    async def receive(self) -> Message:
        exchange = self._exchange
        if exchange.body_ended:
            # The handler waits for the client to disconnect, for as long as the response takes.
            return await self._receive()
        try:
            # A timer costs 7 us of CPU, and a small request has three: 20 of more than 300 us.
            async with asyncio.timeout(self._limits.chunk_seconds_max):
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow() from None
        if message["type"] != "http.request":
            return message
        exchange.received_bytes += len(message.get("body", b""))
        exchange.body_ended = not message.get("more_body", False)
        if exchange.received_bytes > self._limits.bytes_max(blob=exchange.blob):
            raise _too_large(exchange, self._limits)
        if not exchange.body_ended and self._limits.too_slow(
            exchange.received_bytes, self._clock_s() - self._started_s
        ):
            raise self._too_slow()
        return message

    def _too_slow(self) -> Rejection:
        return Rejection(
            "bad_request",
            f"the body came too slowly: at least {self._limits.bytes_per_s_min} bytes per second, and a piece every "
            f"{self._limits.chunk_seconds_max:g} s, are required. Check the network, then send it again.",
            status=408,
        )


@dataclass(slots=True)
class _Response:
    """The response on its way: with the headers that every response has, and a timeout for each piece."""

    exchange: Exchange
    limits: Limits
    server_send: Send
    abort: Callable[[], None] = field(kw_only=True)
    started: bool = False
    last_bytes: int = 0

    async def send(self, message: Message) -> None:
        exchange = self.exchange
        if message["type"] == "http.response.start":
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
            message = {**message, "headers": headers}
        # A server waits for the previous piece to leave, which takes as long as the line is slow.
        seconds = self.limits.chunk_seconds_max + self.last_bytes / self.limits.bytes_per_s_min
        self.last_bytes = len(message.get("body", b""))
        exchange.sent_bytes += self.last_bytes
        try:
            async with asyncio.timeout(seconds):
                await self.server_send(message)
        except TimeoutError:
            # A client that does not read would hold the bytes in memory for as long as the connection exists.
            self.abort()
            raise


def is_from_web_page(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser asks on behalf of a page: it sends an origin, or has reached the hub by the page's own host name."""
    if b"origin" in headers:
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


def _too_large(exchange: Exchange, limits: Limits) -> Rejection:
    what = "a blob" if exchange.blob else "a body"
    return Rejection(
        "too_large", f"{what} may have {limits.bytes_max(blob=exchange.blob)} bytes at most. Send less at a time."
    )


def _headers(pairs: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by lower-case name; several of one name are joined, so that none is overlooked."""
    headers: dict[bytes, bytes] = {}
    for name, value in pairs:
        key = name.lower()
        headers[key] = headers[key] + b"," + value if key in headers else value
    return headers
