"""Connections: accept them, bound their number, and bound what a client may send before there is a request.

A connection is unauthenticated until a request on it has shown a valid token; `middleware` says whose it is then. The newest
connection is always let in as long as there is an unauthenticated one to close for it, so that a client without a token can
take no place that a client with one needs. Places are counted per peer address and, with a token, per token.

Invariants: a head has at most `HEADERS_MAX` headers and `HEAD_BYTES_MAX` bytes; a TLS handshake, a head, the rest of an unread
body, the end of TLS and a response that the client does not read each have a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import traceback
from asyncio import sslproto
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fordstone.hub.messages import Refusal
from fordstone.hub.server.limits import Limits

HEADERS_MAX: Final = 100
"""Maximum number of headers of a request, trailers included. Each costs far more memory than its bytes."""
HEAD_BYTES_MAX: Final = 32 << 10
"""Maximum size of a head, and of the other bytes that are no body: marks between chunks, trailers."""
HEAD_SECONDS_MAX: Final = 20.0
"""Timeout for a head."""
OWNED_MIN: Final = 32
"""Connections that one token may have even if few files may be open, or half of them all."""
PIPELINED_MAX: Final = 4
"""Maximum number of requests that a client sends on a connection before the first of them is answered. Our clients send one."""
UNREAD_BYTES_MAX: Final = 16 << 10
"""Maximum size of what a client has not read of the previous responses when it begins the next request. Our clients have read all of it."""
LINGER_SECONDS_MAX: Final = 5.0
"""Timeout for the rest of a body whose request is answered. Closing at once would cut the response off."""
IDLE_SECONDS_MAX: Final = 10
"""Maximum time that an unauthenticated connection is kept open between two requests; others have uvicorn's option."""
CLOSE_SECONDS_MAX: Final = 30.0
"""Timeout for a client to read the response after which a connection that spoke no HTTP is closed."""
TLS_SECONDS_MAX: Final = 20.0
"""Timeout for a TLS handshake."""
TLS_END_SECONDS_MAX: Final = 5.0
"""Timeout for the other side to end TLS."""
TLS_BUFFER_BYTES: Final = 64 << 10
"""Size of the buffer that asyncio keeps for each TLS connection: 256 KiB otherwise, which was 300 of the 310 KiB of a connection."""
ACCEPTED_AT_ONCE: Final = 64
"""Connections that are accepted before those that were accepted earlier get their turn to show a token."""
BACKLOG: Final = 2_048
"""Connections that the kernel keeps until they are accepted."""
ACCEPT_RETRY_S: Final = 0.1
CONNECTION: Final = "fordstone.connection"
"""The ASGI extension with which a server hands over its `connection`, for `abort` and `belongs_to`."""
_REQUEST_LINE_BYTES: Final = 64
"""At least the bytes of a head that are neither the URL nor a header."""
_HEADER_BYTES: Final = 4
"""Those between the name and the value of a header, and after it."""
_PER_BODY_BYTE: Final = 17
"""The marks of a chunk of one byte have this size."""
_IPV6_NETWORK_BITS: Final = 64
PEERS_MAX: Final = 1_000
"""Number of peers whose name is remembered: it is asked for with each request."""
_events = logging.getLogger(__name__)


@lru_cache(PEERS_MAX)
def peer_name(host: str) -> str:
    """Return the name under which the limits of a peer are counted: its address, or the network of an IPv6 address.

    One machine usually has a whole network of IPv6 addresses (/64) to choose from.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _IPV6_NETWORK_BITS), strict=False))


class Connections:
    """All connections of a hub, by the peer or the token to which they count. Used on the event loop only."""

    def __init__(
        self, limits: Limits, *, files_max: int | None = None, closed: Callable[[], None] = lambda: None
    ) -> None:
        """`files_max`: how many files may be open for connections. `closed` is called for each one that makes room for another."""
        self._limits = limits
        self._most = limits.connections_max if files_max is None else min(limits.connections_max, files_max)
        self._unauthenticated_most = min(limits.unauthenticated_max, self._most)
        self._closed = closed
        self._unauthenticated: dict[str, dict[Connection, None]] = {}
        """By peer, oldest first."""
        self._owned: dict[str, dict[Connection, None]] = {}
        """By owner, oldest first."""
        self.unauthenticated = 0
        self.total = 0

    def admit(self, connection: Connection, peer: str) -> None:
        """Count a new connection. If that is one too many, the oldest idle one of the peer that has most is closed."""
        connection.peer = peer
        of_peer = self._add(self._unauthenticated, peer, connection)
        self.unauthenticated += 1
        self.total += 1
        if len(of_peer) > self._limits.peer_unauthenticated_max:
            self._close_one(of_peer)
        elif self.unauthenticated > self._unauthenticated_most or self.total > self._most:
            self._close_one(max(self._unauthenticated.values(), key=len))

    def belongs_to(self, connection: Connection, owner: str | None, most: int) -> bool:
        """Count a connection to the owner that its newest request has shown; None: to its peer.

        False if the owner has `most` connections already, all of them with a request in progress. If the process may open few files, it is
        fewer: the same share of all connections, but some.
        """
        most = min(most, max(most * self._most // self._limits.connections_max, min(OWNED_MIN, self._most // 2), 1))
        if connection.peer is None or connection.owner == owner:
            return True
        if owner is not None:
            others = self._owned.get(owner, {})
            if len(others) >= most and not self._close_idle(others):
                return False
        peer = connection.peer
        self.remove(connection)
        if owner is None:
            self.admit(connection, peer)
            return True
        self.total += 1
        connection.peer, connection.owner = peer, owner
        self._add(self._owned, owner, connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection, which may be forgotten already."""
        if connection.peer is None:
            return
        self.total -= 1
        if connection.owner is None:
            self.unauthenticated -= 1
            groups, name = self._unauthenticated, connection.peer
        else:
            groups, name = self._owned, connection.owner
        connection.peer = connection.owner = None
        del groups[name][connection]
        if not groups[name]:
            del groups[name]

    def _close_one(self, group: dict[Connection, None]) -> None:
        if not self._close_idle(group):
            self._close(next(iter(group)))

    def _close_idle(self, group: dict[Connection, None]) -> bool:
        for connection in group:
            if connection.idle:
                self._close(connection)
                return True
        return False

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.abort()
        self._closed()

    @staticmethod
    def _add(groups: dict[str, dict[Connection, None]], name: str, connection: Connection) -> dict[Connection, None]:
        group = groups.setdefault(name, {})
        group[connection] = None
        return group


class Connection(HttpToolsProtocol):
    """One connection, with the limits that apply before there is a request: heads that never end, or never come.

    Uvicorn's protocol on httptools has no limit on the size or the time of a head, and no option for either. Its protocol on h11
    limits the size, but took 550 to 600 us of CPU per PUT of 2 kB, against 300 to 420 us with httptools with or without this
    class (4,000 requests over one connection, twice, on two busy cores). So this class extends the quicker one.
    """

    def __init__(
        self,
        *args: Any,
        connections: Connections,
        head_seconds_max: float = HEAD_SECONDS_MAX,
        close_seconds_max: float = CLOSE_SECONDS_MAX,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.peer: str | None = None
        """Set while `connections` counts it, as is `owner`."""
        self.owner: str | None = None
        self.sock: socket.socket | None = None
        """Set while there is no transport yet."""
        self._all = connections
        self._head_seconds_max = head_seconds_max
        self._close_seconds_max = close_seconds_max
        self._keep_alive_s = self.timeout_keep_alive
        self._timer: asyncio.TimerHandle | None = None
        self._overhead_bytes = 0
        self._head_bytes = 0
        self._headers = 0
        self._problem = ""
        self._aborted = False
        self._made = False
        """Whether there was a transport; its handshake may also have failed."""
        self._head_open = False
        self._body_open = False

    @property
    def idle(self) -> bool:
        """Whether there is no request to answer."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses that the kernel has not taken yet, because the client does not read: they are in the hub's memory."""
        if not self._made:
            return 0
        # The transport of TLS hands all it has to the one below, which asyncio does not give out in a public way.
        tls = getattr(self.transport, "_ssl_protocol", self)
        if tls is None:
            return 0  # it is closed
        below = getattr(tls, "_transport", None)
        return self.transport.get_write_buffer_size() + (0 if below is None else below.get_write_buffer_size())

    def abort(self) -> None:
        """Close the connection, whatever it is doing."""
        self._aborted = True
        if self.sock is not None:
            # The transport is being made: it finds the socket at its end, and closes it.
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        elif self._made:
            self.transport.abort()

    def belongs_to(self, owner: str | None, most: int) -> bool:
        """See `Connections.belongs_to`."""
        return self._all.belongs_to(self, owner, most)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.sock, self._made = None, True
        if self._aborted:
            transport.abort()
        elif self.peer is None:
            self._all.admit(self, peer_name(self.client[0] if self.client else ""))
        if not transport.is_closing():
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._head_came()
        super().connection_lost(exc)
        # Uvicorn leaves this timer if the connection broke off. It and the cycles of references would hold the memory of TLS, 70 KiB.
        self._unset_keepalive_if_required()
        self.cycle = self.scope = None  # type: ignore[assignment]
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        """Count what is neither a head that is complete nor body."""
        if self.idle and not self._head_open and not self._body_open:
            self._overhead_bytes = 0
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._overhead_bytes > HEAD_BYTES_MAX:
            self._give_up(f"the head of the request has more than {HEAD_BYTES_MAX} bytes.")
        elif self._timer is None and self.idle:
            self._await_head()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED_MAX:
            self._stop_parsing(f"more than {PIPELINED_MAX} requests came before their turn.")
        if self.unsent_bytes > UNREAD_BYTES_MAX:
            self._stop_parsing("the next request came, and the responses before it are not read.")
        super().on_message_begin()
        self._head_open = self._body_open = True
        self._head_bytes = _REQUEST_LINE_BYTES
        self._headers = 0
        self._await_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > HEADERS_MAX:
            self._stop_parsing(f"the request has more than {HEADERS_MAX} headers.")
        self._count_head(len(name) + len(value) + _HEADER_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._overhead_bytes = max(0, self._overhead_bytes - self._head_bytes)
        self._head_came()
        self.scope["extensions"] = {CONNECTION: {"connection": self}}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Subtract a piece of the body, with its marks, from the overhead."""
        self._overhead_bytes = max(0, self._overhead_bytes - _PER_BODY_BYTE * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_open = False
        if self.idle:
            self._head_came()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give the client time to send the rest of an unread body; then the timeout of idle connections counts."""
        if not self.transport.is_closing():
            self._head_came()
        self.timeout_keep_alive = (
            min(IDLE_SECONDS_MAX, self._keep_alive_s) if self.owner is None else self._keep_alive_s
        )
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._head_open:
            self._await_head()
        elif self._body_open:
            self._timer = self.loop.call_later(LINGER_SECONDS_MAX, self._no_head)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, but none whose client is still reading: TLS would cut the response off."""
        if self.unsent_bytes:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Reject what is not HTTP with the same kind of body as other rejections."""
        text = self._problem or f"{msg} Ask with HTTP/1.1."
        body = msgspec.json.encode(Refusal(error="bad_request", message=text))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._head_came()
        self.transport.close()
        # Closing waits until the client has read everything.
        self._timer = self.loop.call_later(self._close_seconds_max, self.transport.abort)

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > HEAD_BYTES_MAX:
            self._stop_parsing(f"the head of the request has more than {HEAD_BYTES_MAX} bytes.")

    def _stop_parsing(self, problem: str) -> None:
        """Raise through the parser, which leaves the rest of what came alone; uvicorn then rejects it as no HTTP."""
        self._problem = f"{problem} Send less."
        raise ValueError(problem)

    def _await_head(self) -> None:
        self._head_came()
        self._timer = self.loop.call_later(self._head_seconds_max, self._no_head)

    def _head_came(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _no_head(self) -> None:
        self._timer = None
        if not self.idle:
            # The next request has begun while the previous one is answered; it gets its time later.
            self._await_head()
        elif not self.transport.is_closing():
            self.transport.close()

    def _give_up(self, why: str) -> None:
        self._head_came()
        if self.idle:
            self.send_400_response(why)
        else:
            self.transport.abort()


class Acceptor:
    """Accepts connections for as long as it runs.

    Asyncio's own server shows a TLS connection to its protocol only after the handshake, so that those before it could not be
    counted.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], Connection],
        connections: Connections,
        *,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`sock` is bound, does not block and does not listen yet. `make` makes the protocol of a connection."""
        self._sock = sock
        self._make = make
        self._all = connections
        self._tls = tls
        self._connecting: dict[asyncio.Task[None], Connection] = {}
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._tls is not None:
            sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
        self._sock.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Accept no more, and end handshakes. Established connections stay."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        for connection in self._connecting.values():
            if connection.sock is not None:
                connection.abort()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    async def _accept(self) -> None:
        loop, accepted = asyncio.get_running_loop(), 0
        while True:
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:
                _events.warning("connection not accepted", extra={"error": error.strerror})
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._begin(sock, address[0])
            accepted += 1
            if accepted % ACCEPTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _begin(self, sock: socket.socket, host: str) -> None:
        connection = self._make()
        connection.sock = sock
        self._all.admit(connection, peer_name(host))
        task = asyncio.create_task(self._connect(connection, sock))
        self._connecting[task] = connection
        task.add_done_callback(self._connecting.pop)

    async def _connect(self, connection: Connection, sock: socket.socket) -> None:
        """Make the transport, with the TLS handshake."""
        times: dict[str, Any] = {}
        if self._tls is not None:
            times = {"ssl_handshake_timeout": TLS_SECONDS_MAX, "ssl_shutdown_timeout": TLS_END_SECONDS_MAX}
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection, sock, ssl=self._tls, **times)
        except OSError as error:
            # The handshake failed or took too long, or the client is gone: asyncio has closed the socket.
            self._all.remove(connection)
            # Asyncio's frames refer to the error, which refers to them; the parser refers to the connection.
            traceback.clear_frames(error.__traceback__)
            connection.parser = None  # type: ignore[assignment]  # as uvicorn does at the end of others
        finally:
            connection.sock = None
