"""What stands before the hub's app: names, tokens, limits, and an answer that is always a `Refusal` when it is no.

Pure ASGI. The order is fixed: names in the path, then the token, then the rate, then what the token may, then room, then
the head of the body, then the app. What the app does with a request is its business; it never sees one that was refused
here, and of a body that turns out too large or too slow it sees a client that has gone away.

Invariants: no answer echoes a token; bodies are never decompressed; nothing waits without a bound.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import parse_qsl

from fordstone.hub.server import metrics as m
from fordstone.hub.server.answers import BROKEN, No, bad_name, busy, from_web_page, nowhere, unauthorised
from fordstone.hub.server.limits import SHARED_TIMES, Buckets, Limits, Slots
from fordstone.hub.server.places import METRICS, BadName, Nowhere, Place, epochs_in, find, known_method, why_not
from fordstone.hub.server.tokens import PREFIX, Token, Tokens
from fordstone.hub.server.watched import (
    ABORT,
    JSON,
    Answer,
    App,
    Body,
    Receive,
    Request,
    Scope,
    Send,
    is_from_web_page,
    leaves_body,
    safe_headers,
)

log = logging.getLogger(__name__)

_CREATED: Final = 201
_DIGITS_MAX: Final = 18


class Guard:
    """Judges every request before the app sees it. One for a hub, on its event loop."""

    def __init__(
        self,
        app: App,
        *,
        tokens: Tokens,
        limits: Limits,
        metrics: m.Metrics,
        look: Callable[[], Awaitable[m.Looked | None]],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`look`: gathers what only log and store know, for `/metrics`."""
        self._app = app
        self._tokens = tokens
        self._limits = limits
        self._metrics = metrics
        self._look = look
        self._clock_s = clock_s
        self._buckets = Buckets(
            rate_per_s=limits.rate_per_s,
            burst=limits.rate_per_s * limits.burst_s,
            buckets_max=limits.buckets_max,
        )
        self._slots = Slots(limits.requests_max, node_max=limits.node_requests_max)
        self._polls = Slots(limits.polls_max, node_max=limits.node_polls_max)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        request = Request(
            id=secrets.token_hex(8),
            method=scope["method"],
            began_s=self._clock_s(),
            headers=_headers(scope["headers"]),
        )
        try:
            no = self._judge(request, scope)
            if no is None:
                await self._admit(request, scope, receive, send)
            else:
                await self._refuse(request, no, send)
        finally:
            self._count(request)

    def _judge(self, request: Request, scope: Scope) -> No | None:
        """Everything that the head of a request tells; nothing is awaited."""
        found = find(request.method, scope.get("raw_path") or scope["path"].encode())
        peer = scope.get("client")
        request.caller = f"peer {peer[0] if peer else 'unknown'}"
        if isinstance(found, BadName):
            return bad_name(found)
        if isinstance(found, Place):
            request.place, request.label = found, found.label
            if "anyone" in found.call.who:
                return self._too_often(request, times=1 if self._tokens.required else SHARED_TIMES)
        token: Token | None = None
        if not self._tokens.required:
            if is_from_web_page(request.headers):
                return from_web_page()
        else:
            known = self._who(request)
            if isinstance(known, No):
                # Counted against the peer, so that guessing is slow.
                return self._too_often(request, times=1) or known
            token = known
            request.caller = f"token {token.name}"
            request.node = token.name if token.role == "node" else None
        no = self._too_often(request, times=1 if request.node is not None else SHARED_TIMES)
        if no is not None:
            return no
        if isinstance(found, Nowhere):
            return nowhere(found)
        why = None if token is None else why_not(token, found)
        if why is not None:
            return No(
                status=403,
                error="forbidden",
                message=f"{why}. Use a token that may, or make one with `fordstone hub token add`.",
            )
        request.polls = found.call.polls and _waits(scope.get("query_string", b""))
        return self._bad_head(request, found)

    def _who(self, request: Request) -> Token | No:
        text = request.headers.get(b"authorization", b"")
        if not text:
            return unauthorised("this hub answers only to those who have a token, and the request has none")
        scheme, _, secret = text.decode("latin-1").partition(" ")
        token = self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            return unauthorised(f"the hub does not know this token (tokens begin with {PREFIX})")
        if token.revoked_us is not None:
            return unauthorised(f"the token {token.name} has been revoked")
        self._tokens.used(token)
        return token

    def _too_often(self, request: Request, *, times: int) -> No | None:
        wait_s = self._buckets.take(request.caller, self._clock_s(), times=times)
        if not wait_s:
            return None
        rate = self._limits.rate_per_s * times
        return No(
            status=429,
            error="too_many_requests",
            message=f"{request.caller} asks more than {rate:g} times a second. Ask again later; `fordstone hub --rate` sets the rate.",
            headers=((b"retry-after", str(max(1, round(wait_s + 0.5))).encode()),),
        )

    def _bad_head(self, request: Request, place: Place) -> No | None:
        encoding = request.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in {b"identity", b""}:
            return No(
                status=415,
                error="bad_request",
                message="the hub takes bodies as they are and decompresses nothing. Send it without Content-Encoding.",
            )
        length = request.headers.get(b"content-length")
        if length is None:
            return None
        if not length.isdigit():
            return No(
                status=400, error="bad_request", message="Content-Length is not a number. Send how many bytes follow."
            )
        too_large = len(length) > _DIGITS_MAX or int(length) > self._bytes_max(place)
        return self._too_large(place) if too_large else None

    def _bytes_max(self, place: Place) -> int:
        return self._limits.blob_bytes_max if place.call.blob else self._limits.body_bytes_max

    def _too_large(self, place: Place) -> No:
        what = "a blob" if place.call.blob else "a body"
        return No(
            status=413,
            error="too_large",
            message=f"{what} may have {self._bytes_max(place)} bytes at most. Send less at a time.",
        )

    async def _admit(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in if there is room, and answer it."""
        slots = self._polls if request.polls else self._slots
        greedy = slots.is_full_of(request.node)
        with slots.one(request.node) as inside:
            if not inside:
                await self._refuse(request, busy(request.caller if greedy else None), send)
                return
            self._metrics.polls_waiting = self._polls.taken
            self._metrics.requests_running = self._slots.taken
            try:
                if request.label == METRICS:
                    text = self._metrics.text(await self._look())
                    await self._answer(request, 200, text.encode(), m.CONTENT_TYPE.encode(), send)
                else:
                    await self._pass(request, scope, receive, send)
            finally:
                self._metrics.polls_waiting = self._polls.taken - request.polls
                self._metrics.requests_running = self._slots.taken - (not request.polls)

    async def _pass(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the app answer, with a watched body and a watched answer."""
        scope.setdefault("state", {})["request_id"] = request.id
        body = Body(request, self._limits, receive, self._clock_s)
        answer = Answer(request, self._limits, send, abort=_abort_of(scope))
        try:
            await self._app(scope, body.receive, answer.send)
        except Exception:
            if not body.gone:
                log.exception("request failed", extra={"request": request.id, "call": request.label})
        if body.gone and request.no is None:
            self._metrics.disconnects.add()
            return
        if answer.started:
            return
        no = request.no or answer.replaced or No(
            status=500,
            error="failed",
            message=f"the hub failed; its log says why under request {request.id}. Trying again is safe.",
        )  # fmt: skip
        await self._refuse(request, no, send)

    async def _refuse(self, request: Request, no: No, send: Send) -> None:
        """Say no. What is left of the body is `connection`'s business."""
        request.no = no
        self._metrics.refusals.add(error=no.error)
        headers = (*no.headers, (b"connection", b"close")) if leaves_body(request) else no.headers
        await self._answer(request, no.status, no.body(), JSON, send, headers)

    async def _answer(
        self,
        request: Request,
        status: int,
        body: bytes,
        kind: bytes,
        send: Send,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        request.status = status
        head = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *headers, *safe_headers(request)]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": b"" if request.method == "HEAD" else body})

    def _count(self, request: Request) -> None:
        seconds = self._clock_s() - request.began_s
        place, method, status = request.place, known_method(request.method), str(request.status or "gone")
        self._metrics.requests.add(method=method, route=request.label, status=status)
        if not request.polls:
            self._metrics.seconds.add(seconds, method=method, route=request.label)
        if place is not None and place.call.blob:
            self._metrics.blob_bytes_in.add(request.received_bytes)
            self._metrics.blob_bytes_out.add(request.sent_bytes)
        if place is not None and "epochs" in place.names and request.status == _CREATED:
            self._metrics.commits.add()
            self._metrics.epochs.add(epochs_in(place))
        level = logging.ERROR if request.status >= BROKEN else logging.INFO if request.no else logging.DEBUG
        if log.isEnabledFor(level):
            fields: dict[str, object] = {
                "request": request.id,
                "method": method,
                "call": request.label,
                "status": status,
            }
            fields |= dict(place.names) if place is not None else {}
            fields |= {"caller": request.caller, "ms": round(seconds * 1000, 1)}
            if request.no is not None:
                fields |= {"refused": request.no.error, "why": request.no.message}
            log.log(level, "request refused" if request.no else "request", extra=fields)


def _waits(query: bytes) -> bool:
    """Whether a question says how long to wait, read as the app reads it: escapes hide nothing."""
    return any(name == "wait" for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True))


def _abort_of(scope: Scope) -> Callable[[], None]:
    """How to cut a connection off, if the server says; see `connection`."""
    abort: Callable[[], None] = scope.get("extensions", {}).get(ABORT, {}).get("now", lambda: None)
    return abort


def _headers(pairs: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """By lower-case name; of several with one name all, so that none goes unseen."""
    headers: dict[bytes, bytes] = {}
    for name, value in pairs:
        key = name.lower()
        headers[key] = headers[key] + b"," + value if key in headers else value
    return headers
