"""One TCP connection to the hub, with the limits that apply before there is a request: heads that never end, or never come.

Uvicorn's protocol on httptools does the work; it has no limit on the size or the time of a head, and no option for either.
Uvicorn's protocol on h11 limits the size, but took 550 to 600 us of CPU per PUT of 2 kB, against 300 to 420 us with httptools
with or without this class (4,000 requests over one connection, twice, on two busy cores). So this class extends the quicker
one. `middleware` limits what a request may then do.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fordstone.hub.messages import Refusal
from fordstone.hub.server.middleware import ABORT

OVERHEAD_BYTES_MAX: Final = 512 << 10
"""Maximum of what is not body: the head, the marks between chunks, trailers. It is more than one read of the socket returns."""
HEAD_SECONDS_MAX: Final = 20.0
"""Timeout for a head."""
LINGER_SECONDS_MAX: Final = 5.0
"""Timeout for the rest of a body whose request is answered. Closing at once would cut the response off."""
_PER_BODY_BYTE: Final = 17
"""The marks of a chunk of one byte have this size."""


class Connection(HttpToolsProtocol):
    """A connection that is closed if a head does not come, or is too long."""

    def __init__(
        self, *args: Any, connections_max: int, head_seconds_max: float = HEAD_SECONDS_MAX, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._connections_max = connections_max
        self._head_seconds_max = head_seconds_max
        self._timer: asyncio.TimerHandle | None = None
        self._overhead_bytes = 0
        self._began = False
        self._head_open = False
        self._body_open = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the timeout for the first head."""
        super().connection_made(transport)
        if len(self.connections) > self._connections_max:
            transport.abort()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what is not body. A piece in which a message begins is not counted: it may hold the end of another."""
        self._began = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._began:
            self._overhead_bytes += len(data)
        if self._overhead_bytes > OVERHEAD_BYTES_MAX:
            self._give_up(f"the head of the request has more than {OVERHEAD_BYTES_MAX} bytes.")
        elif self._timer is None and self._idle():
            self._await_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._began = True
        self._head_open = self._body_open = True
        self._overhead_bytes = 0
        self._await_head()

    def on_headers_complete(self) -> None:
        """The head is here."""
        self._head_open = False
        self._head_came()
        self.scope["extensions"] = {ABORT: {"now": self.transport.abort}}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Subtract a piece of the body from the overhead."""
        self._overhead_bytes = max(0, self._overhead_bytes - _PER_BODY_BYTE * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is here."""
        self._body_open = False
        if self._idle():
            self._head_came()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give the client time to send the rest of an unread body; then the timeout of idle connections counts."""
        self._head_came()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._head_open:
            self._await_head()
        elif self._body_open:
            self._timer = self.loop.call_later(LINGER_SECONDS_MAX, self._no_head)

    def send_400_response(self, msg: str) -> None:
        """Reject what is not HTTP with the same kind of body as other rejections."""
        body = msgspec.json.encode(Refusal(error="bad_request", message=f"{msg} Ask with HTTP/1.1."))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_came()
        self._timer = self.loop.call_later(self._head_seconds_max, self._no_head)

    def _head_came(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _no_head(self) -> None:
        self._timer = None
        if not self._idle():
            # The next request has begun while the previous one is answered; it gets its time later.
            self._await_head()
        elif not self.transport.is_closing():
            self.transport.close()

    def _give_up(self, why: str) -> None:
        self._head_came()
        if self._idle():
            self.send_400_response(why)
        else:
            self.transport.abort()
