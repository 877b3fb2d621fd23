"""A request between the guard and the app: its body and its answer, watched as they pass.

Bodies are bounded in size and in how slowly they may come; answers get the headers that all have. Whether a request gets
as far as this is `guard`'s business.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from fordstone.hub.server.answers import No, of_status
from fordstone.hub.server.limits import Limits
from fordstone.hub.server.places import Place
from fordstone.hub.server.within import within

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON: Final = b"application/json"
ABORT: Final = "fordstone.abort"
"""The extension by which a server lets its connection be cut off."""
_REFUSED: Final = 400
_HOSTS_KNOWN: Final = 256
"""Clients call the hub by the same few names, request after request."""
_OURS: Final = frozenset({b"cache-control", b"x-content-type-options", b"x-request-id"})


@dataclass(slots=True, kw_only=True)
class Request:
    """One request on its way."""

    id: str
    method: str
    began_s: float
    headers: dict[bytes, bytes]
    label: str = "none"
    caller: str = ""
    node: str | None = None
    """The name of a token that is one node's; None: who asks stands for many."""
    place: Place | None = None
    no: No | None = None
    """Why it is refused after all."""
    status: int = 0
    body_ended: bool = False
    received_bytes: int = 0
    sent_bytes: int = 0
    polls: bool = False


class Body:
    """The body of a request as the app reads it: bounded in size, and in how slowly it may come."""

    def __init__(self, request: Request, limits: Limits, receive: Receive, clock_s: Callable[[], float]) -> None:
        self._request = request
        self._limits = limits
        self._receive = receive
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._bytes_max = (
            limits.blob_bytes_max if request.place is not None and request.place.call.blob else limits.body_bytes_max
        )
        self.gone = False

    async def receive(self) -> Message:
        """The next piece. A body that breaks a bound looks like a client that has gone; why is noted in the request."""
        request = self._request
        if self.gone:
            return {"type": "http.disconnect"}
        if request.body_ended:
            # Whoever asks on waits for the client to go, for as long as the answer takes.
            return await self._receive()
        try:
            message = await within(self._limits.chunk_seconds_max, self._receive())
        except TimeoutError:
            return self._stop(self._too_slow())
        if message["type"] != "http.request":
            self.gone = True
            return message
        request.received_bytes += len(message.get("body", b""))
        request.body_ended = not message.get("more_body", False)
        if request.received_bytes > self._bytes_max:
            no = No(
                status=413,
                error="too_large",
                message=f"the body goes on beyond {self._bytes_max} bytes, which is the most. Send less at a time.",
            )
            return self._stop(no)
        if not request.body_ended and self._limits.too_slow(request.received_bytes, self._clock_s() - self._began_s):
            return self._stop(self._too_slow())
        return message

    def _stop(self, no: No) -> Message:
        self._request.no = no
        self.gone = True
        return {"type": "http.disconnect"}

    def _too_slow(self) -> No:
        return No(
            status=408,
            error="bad_request",
            message=f"the body came too slowly: {self._limits.bytes_per_s_min} bytes a second, and a piece every "
            f"{self._limits.chunk_seconds_max:g} s, are the least. Look at the network, then send it again.",
        )


class Answer:
    """The app's answer on its way: with the headers that every answer has; one that is no refusal but should be is held."""

    def __init__(self, request: Request, limits: Limits, send: Send, *, abort: Callable[[], None]) -> None:
        self._request = request
        self._limits = limits
        self._send = send
        self._abort = abort
        self._last_bytes = 0
        self.started = False
        self.replaced: No | None = None

    async def send(self, message: Message) -> None:
        """Pass a piece on. Nothing of it leaves once the request is refused."""
        request = self._request
        if message["type"] == "http.response.start":
            if request.no is not None:
                return
            status, headers = message["status"], message.get("headers", [])
            if status >= _REFUSED and not _is_json(headers):
                self.replaced = of_status(status, headers)
                return
            self.started = True
            request.status = status
            kept = [(name, value) for name, value in headers if name.lower() not in _OURS]
            if leaves_body(request):
                kept.append((b"connection", b"close"))
            message = {**message, "headers": [*kept, *safe_headers(request)]}
        elif not self.started:
            return
        # A server waits for the piece before this one to leave, which takes as long as the line is slow.
        seconds = self._limits.chunk_seconds_max + self._last_bytes / self._limits.bytes_per_s_min
        self._last_bytes = len(message.get("body", b""))
        request.sent_bytes += self._last_bytes
        try:
            await within(seconds, self._send(message))
        except TimeoutError:
            # Whoever does not take the answer would keep its bytes in memory for as long as the connection stands.
            self._abort()
            raise


def safe_headers(request: Request) -> list[tuple[bytes, bytes]]:
    """Headers that every answer has: what needs a token is kept by no cache, and is what it says that it is."""
    return [
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        (b"x-request-id", request.id.encode()),
    ]


def is_from_web_page(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser asks on behalf of a page: it says where the page is from, or reached us by the page's own name."""
    if b"origin" in headers:
        return True
    return _is_name(headers.get(b"host", b"localhost"))


@functools.lru_cache(maxsize=_HOSTS_KNOWN)
def _is_name(given: bytes) -> bool:
    """Whether this is a name other than that of this machine, rather than an address."""
    host = given.decode("latin-1").strip().lower()
    bare = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if bare == "localhost":
        return False
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return True
    return False


def _is_json(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(JSON) for name, value in headers)


def leaves_body(request: Request) -> bool:
    """Whether the client waits for leave to send its body, which it was not given: nobody can know whether one follows."""
    return b"expect" in request.headers and not request.received_bytes and not request.body_ended
