"""Connections: who gets in while another holds all it can, and what may come before there is a request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import trustme
import uvicorn
from starlette.responses import Response, StreamingResponse
from tests.hub.sending import Node, entry
from tests.hub.started import SECONDS_MAX, Started, started
from tests.hub.test_middleware import Front
from uvicorn.server import ServerState

from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.server import connection
from fordstone.hub.server.auth import TokenFile
from fordstone.hub.server.connection import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PIPELINED_MAX,
    Acceptor,
    Connection,
    Connections,
    peer_name,
)
from fordstone.hub.server.limits import Limits
from fordstone.hub.server.serve import FILES_RESERVED

LIMITS = Limits(connections_max=6, unauthenticated_max=4, peer_unauthenticated_max=3)


@dataclass(eq=False)
class Line:
    """A connection as `Connections` sees it."""

    name: str
    idle: bool = True
    peer: str | None = None
    owner: str | None = None
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True


class Lines:
    """Connections by name: `a1` is the first one of peer `a`."""

    def __init__(self, limits: Limits = LIMITS, **more: Any) -> None:
        self.closed = 0
        self.all = Connections(limits, closed=self._count, **more)
        self.lines: dict[str, Line] = {}

    def _count(self) -> None:
        self.closed += 1

    def open(self, *names: str, idle: bool = True) -> None:
        for name in names:
            self.lines[name] = Line(name, idle=idle)
            self.all.admit(cast("Any", self.lines[name]), name[0])

    def owned(self, name: str, owner: str | None, most: int = 2) -> bool:
        return self.all.belongs_to(cast("Any", self.lines[name]), owner, most)

    def close(self, name: str) -> None:
        self.all.remove(cast("Any", self.lines[name]))

    @property
    def left(self) -> set[str]:
        assert sum(line.aborted for line in self.lines.values()) == self.closed
        left = {name for name, line in self.lines.items() if line.peer is not None}
        assert len(left) == self.all.total
        assert sum(self.lines[name].owner is None for name in left) == self.all.unauthenticated
        assert not any(self.lines[name].aborted for name in left)
        return left


def test_the_newest_connection_of_a_peer_gets_in_and_its_oldest_idle_one_goes():
    lines = Lines()
    lines.open("a1", idle=False)
    lines.open("a2", "a3", "a4")
    assert lines.left == {"a1", "a3", "a4"}
    lines.lines["a3"].idle = lines.lines["a4"].idle = False
    lines.open("a5", idle=False)
    assert lines.left == {"a3", "a4", "a5"}, "if none is idle, the oldest goes"


def test_the_peer_that_has_most_makes_room_for_another():
    lines = Lines()
    lines.open("a1", "b1", "a2", "a3", "c1")
    assert lines.left == {"b1", "a2", "a3", "c1"}
    lines.open("d1")
    assert lines.left == {"b1", "a3", "c1", "d1"}


def test_connections_with_a_token_are_counted_apart_and_are_not_closed_for_those_without():
    lines = Lines()
    for number in range(3):
        lines.open(f"a{number}")
        assert lines.owned(f"a{number}", "token t", 9)
    lines.open("b1", "b2", "b3", "c1", "c2")
    assert lines.left == {"a0", "a1", "a2", "b3", "c1", "c2"}


def test_if_all_connections_have_a_token_the_newest_does_not_get_in():
    lines = Lines()
    for number in range(6):
        lines.open(f"a{number}")
        assert lines.owned(f"a{number}", f"token {number % 2}", 9)
    lines.open("b1")
    assert lines.left == {f"a{number}" for number in range(6)}


def test_a_token_with_too_many_connections_loses_its_own_idle_one():
    lines = Lines()
    lines.open("a1", "a2", idle=False)
    assert lines.owned("a1", "token t")
    assert lines.owned("a2", "token t")
    lines.open("b1")
    assert not lines.owned("b1", "token t"), "both are in use"
    lines.lines["a2"].idle = True
    assert lines.owned("b1", "token t")
    assert lines.left == {"a1", "b1"}
    assert lines.owned("b1", "token t")


def test_a_connection_counts_to_whom_its_newest_request_shows():
    lines = Lines()
    lines.open("a1")
    assert lines.owned("a1", "token t")
    assert lines.owned("a1", "token u")
    assert lines.owned("a1", None)
    assert (lines.left, lines.all.unauthenticated) == ({"a1"}, 1)
    lines.close("a1")
    lines.close("a1")
    assert (lines.left, lines.all.total) == (set(), 0)
    assert lines.owned("a1", "token t"), "it is gone already"


def test_files_that_may_not_be_opened_bound_connections_too():
    lines = Lines(Limits(), files_max=2)
    lines.open("a1", "b1", "c1")
    assert lines.left == {"b1", "c1"}


@pytest.mark.parametrize(
    ("files_max", "most", "owned"),
    [
        (20_000, 400, 400),
        (10_000, 400, 200),
        (412, 400, 32),  # the usual limit of 1,024 open files
        (412, 8_000, 164),
        (40, 400, 20),
        (2, 400, 1),
    ],
)
def test_one_token_takes_its_share_of_the_connections_however_few_there_are(files_max, most, owned):
    lines = Lines(Limits(), files_max=files_max)
    for number in range(owned + 1):
        lines.open(f"a{number}", idle=False)
        assert lines.owned(f"a{number}", "token t", most) == (number < owned)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_peer_is_an_address_or_a_network_of_which_one_machine_may_have_all(host, name):
    assert peer_name(host) == name


def test_a_connection_whose_handshake_has_failed_can_be_aborted():
    async def go() -> None:
        config = uvicorn.Config(say_ok, http="httptools", ws="none", log_config=None, lifespan="off")
        config.load()
        Connection(config=config, server_state=ServerState(), app_state={}, connections=Connections(LIMITS)).abort()

    asyncio.run(go())


# A hub as a process, with a client that has no token and wants to harm it.


@dataclass(frozen=True)
class Target:
    hub: Started
    token: str
    ca: str | None = None

    @property
    def netloc(self) -> tuple[str, int]:
        place = urlsplit(self.hub.url)
        return "127.0.0.1", place.port or 0

    def connect(self, address: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(self.netloc, timeout=SECONDS_MAX, source_address=(address, 0))

    def memory_kib(self) -> int:
        lines = Path(f"/proc/{self.hub.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

    def work(self) -> None:
        """What a node does, on a connection of its own, without trying again."""
        url = f"{'http' if self.ca is None else 'https'}://127.0.0.1:{self.netloc[1]}"
        address = HubAddress(url=url, token=self.token, ca=self.ca)
        with contextlib.closing(HubClient(address, timeout_s=SECONDS_MAX)) as client:
            node = Node(client)
            node.lease()
            node.put("a")
            node.commit(entry(1, "a"))


@contextlib.contextmanager
def target(tmp_path: Path, *options: str, ca: str | None = None, files_max: int | None = None) -> Iterator[Target]:
    token = TokenFile(tmp_path / "data").add("n", role="node", node="n", now_us=1)
    with started(tmp_path / "data", *options, files_max=files_max) as hub:
        yield Target(hub, token, ca)


def gone(sock: socket.socket) -> bool:
    """Whether the hub has closed this connection. Its answer is read first."""
    try:
        while sock.recv(65_536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


HEADS = {
    "many headers": b"GET /v1/nodes HTTP/1.1\r\n" + b"a:\r\n" * 120_000,
    "a long header": b"GET /v1/nodes HTTP/1.1\r\na: " + b"x" * 480_000,
    "a long path": b"GET /" + b"x" * 480_000,
    "many requests": b"GET /v1/nodes HTTP/1.1\r\n\r\n" * 17_000,
    "a long header after a request": b"GET /v1/nodes HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\na: " + b"x" * 480_000,
    "many trailers": b"PUT /v1/nodes HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"a:\r\n" * 120_000,
}


@pytest.mark.parametrize("data", HEADS.values(), ids=HEADS.keys())
def test_large_heads_of_many_connections_take_no_memory(tmp_path, data):
    with target(tmp_path) as hub, contextlib.ExitStack() as stack:
        hub.work()
        before_kib = hub.memory_kib()
        socks = [stack.enter_context(hub.connect()) for _ in range(30)]
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
        assert all(gone(sock) for sock in socks)
        assert hub.memory_kib() - before_kib < 8 << 10


FILES = 600
CONNECTIONS = (FILES - FILES_RESERVED) // 2


@pytest.mark.parametrize("addresses", [1, 5])
def test_a_node_gets_in_while_others_without_a_token_hold_all_they_can(tmp_path, addresses):
    assert CONNECTIONS == 200
    with target(tmp_path, files_max=FILES) as hub, contextlib.ExitStack() as stack:
        for number in range(3 * CONNECTIONS):
            sock = stack.enter_context(hub.connect(f"127.0.0.{1 + number % addresses}"))
            if number % 2:
                sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    sock.recv(1000)
        for _ in range(3):
            hub.work()


def test_handshakes_that_never_end_are_counted_and_make_room(tmp_path):
    authority = trustme.CA()
    cert = authority.issue_cert("127.0.0.1")
    cert.private_key_pem.write_to_path(tmp_path / "hub.key")
    for blob in cert.cert_chain_pems:
        blob.write_to_path(tmp_path / "hub.crt", append=True)
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    options = ("--tls-cert", str(tmp_path / "hub.crt"), "--tls-key", str(tmp_path / "hub.key"))
    with target(tmp_path, *options, ca=str(tmp_path / "ca.crt"), files_max=FILES) as hub:
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(hub.connect()) for _ in range(CONNECTIONS + 50)]
            assert gone(socks[0]), "the oldest one makes room"
            hub.work()
        code, _, err = hub.hub.stop()
        assert code == 0, err


async def connected(
    app,
    talk,
    *,
    connections_max: int = 10,
    head_seconds_max: float = 0.05,
    close_seconds_max: float = SECONDS_MAX,
    tls: ssl.SSLContext | None = None,
    all_gone: bool = False,
    keep_alive_s: int = 5,
) -> None:
    """Have `talk` talk to an app over connections of ours. `all_gone`: after it, the server closes them by itself."""
    asked = asyncio.Event()

    async def counted(scope, receive, send) -> None:
        asked.set()
        await app(scope, receive, send)

    config = uvicorn.Config(
        counted, http="httptools", ws="none", log_config=None, lifespan="off", timeout_keep_alive=keep_alive_s
    )
    config.load()
    state, connections = ServerState(), Connections(Limits(connections_max=connections_max))
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(
            config=config,
            server_state=state,
            app_state={},
            connections=connections,
            head_seconds_max=head_seconds_max,
            close_seconds_max=close_seconds_max,
        ),
        "127.0.0.1",
        0,
        ssl=tls,
    )
    # Accepted connections inherit it: what a client does not read soon stays in the process.
    server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    async with server:
        async with asyncio.timeout(SECONDS_MAX):
            await talk(*server.sockets[0].getsockname())
            if all_gone:
                await asked.wait()
                await eventually(lambda: not state.connections)
        for connection in list(state.connections):
            connection.transport.abort()
        while state.tasks:
            await asyncio.wait(state.tasks)


def unread(host: str, port: int, data: bytes) -> socket.socket:
    """A connection with a small buffer on which a request was sent, and nothing is read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect((host, port))
    sock.sendall(data)
    return sock


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds; the timeout is that of `connected`."""
    for _ in iter(holds, True):
        await asyncio.sleep(0.005)


async def opened(host: str, port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the data has come before the server knows of it: its clock cannot run out in between."""
    sock = socket.create_connection((host, port))
    sock.sendall(data)
    return await asyncio.open_connection(sock=sock)


async def say_ok(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize(
    "begin",
    [b"", b"G", b"\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\nGE"],
)
def test_a_connection_on_which_no_whole_head_comes_is_closed(begin):
    async def talk(host, port) -> None:
        reader, writer = await opened(host, port, begin)
        answer = await reader.read()
        assert answer.endswith(b"ok") == begin.endswith(b"GE")
        writer.close()

    asyncio.run(connected(say_ok, talk))


def test_without_a_token_a_connection_is_not_kept_for_as_long_as_with_one(monkeypatch):
    monkeypatch.setattr(connection, "IDLE_SECONDS_MAX", 0.01)

    async def talk(host, port) -> None:
        reader, writer = await opened(host, port, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await reader.read()).endswith(b"ok")
        writer.close()

    asyncio.run(connected(say_ok, talk, head_seconds_max=SECONDS_MAX, keep_alive_s=10 * int(SECONDS_MAX)))


def test_a_handshake_is_counted_before_it_has_ended():
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    connections = Connections(Limits(connections_max=3))
    config = uvicorn.Config(say_ok, http="httptools", ws="none", log_config=None, lifespan="off")
    config.load()

    def made() -> Connection:
        return Connection(config=config, server_state=ServerState(), app_state={}, connections=connections)

    async def go() -> None:
        with socket.socket() as listener, contextlib.ExitStack() as stack:
            listener.bind(("127.0.0.1", 0))
            listener.setblocking(False)
            acceptor = Acceptor(listener, made, connections, tls=tls)
            acceptor.start()
            first = stack.enter_context(socket.create_connection(listener.getsockname()))
            async with asyncio.timeout(SECONDS_MAX):
                await eventually(lambda: connections.total == 1)
                for _ in range(3):
                    stack.enter_context(socket.create_connection(listener.getsockname()))
                reader, writer = await asyncio.open_connection(sock=first)
                assert not await reader.read(), "the oldest one makes room"
                writer.close()
            assert connections.total == connections.unauthenticated == 3
            await acceptor.stop()

    asyncio.run(go())


def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut_off():
    async def talk(host, port) -> None:
        async def slow(scope, receive, send) -> None:
            await asyncio.sleep(0.1)
            await say_ok(scope, receive, send)

        async def ask_slowly(host, port) -> None:
            two = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\nGET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            reader, writer = await opened(host, port, two)
            assert (await reader.read()).count(b"ok") == 2
            writer.close()

        await connected(slow, ask_slowly, head_seconds_max=0.01)

    asyncio.run(connected(say_ok, talk))


def test_trailers_without_end_are_cut_off():
    async def drain(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass

    async def talk(host, port) -> None:
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"PUT / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        sent = 0
        try:
            while sent < 64 << 20:
                writer.write(b"name: " + b"x" * 50_000 + b"\r\n")
                sent += 50_000
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()
        assert sent < 64 << 20

    asyncio.run(connected(drain, talk, head_seconds_max=SECONDS_MAX))


def test_many_small_chunks_are_not_taken_for_overhead():
    async def count(scope, receive, send) -> None:
        size = 0
        while True:
            message = await receive()
            size += len(message["body"])
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"size %d." % size})

    async def talk(host, port) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"PUT / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(30):
            writer.write(b"1\r\nx\r\n" * 10_000)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert b"size 300000." in await reader.read()
        writer.close()

    asyncio.run(connected(count, talk, head_seconds_max=SECONDS_MAX))


@pytest.mark.parametrize(
    ("data", "taken"),
    [
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * HEADERS_MAX + b"\r\n", True),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (HEADERS_MAX + 1) + b"\r\n", False),
        (b"GET / HTTP/1.1\r\na: " + b"x" * (HEAD_BYTES_MAX - 200) + b"\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\na: " + b"x" * HEAD_BYTES_MAX + b"\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\na: " + b"x" * HEAD_BYTES_MAX, False),
        (b"GET /" + b"x" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\na:" + b" " * HEAD_BYTES_MAX, False),
        (b"GET / HTTP/1.1\r\n\r\n" * (PIPELINED_MAX + 1), True),
        (b"GET / HTTP/1.1\r\n\r\n" * (PIPELINED_MAX + 2), False),
    ],
)
def test_a_head_has_a_bound_and_says_so(data, taken):
    async def talk(host, port) -> None:
        reader, writer = await opened(host, port, data)
        answer = await reader.readuntil(b"\r\n")
        assert answer.startswith(b"HTTP/1.1 200" if taken else b"HTTP/1.1 400"), answer
        writer.close()

    asyncio.run(connected(say_ok, talk, head_seconds_max=SECONDS_MAX))


def test_thousands_of_requests_on_one_connection_are_not_taken_for_one_head():
    async def talk(host, port) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for _ in range(400):
            # What is left of a line after its value is not counted by the parser's callbacks.
            writer.write(b"GET / HTTP/1.1\r\na: b" + b" " * 200 + b"\r\n\r\n")
            await reader.readuntil(b"ok")
        writer.close()

    asyncio.run(connected(say_ok, talk, head_seconds_max=SECONDS_MAX))


# Clients that do not read.

ASK = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Large:
    """An app with the hub's middleware that answers each request with a large response; and what the middleware counts."""

    def __init__(self, data: Path, *, size_bytes: int = 400_000, pieces: int = 1, **limits: Any) -> None:
        self.size_bytes, self.pieces = size_bytes, pieces
        self.front = Front(data, limits=Limits(**limits), handler=self.respond)
        self.taken_bytes: list[float | None] = []
        """The memory for bodies that was counted, from time to time."""

    async def respond(self, _: Any) -> Response:
        piece = b"x" * (self.size_bytes // self.pieces)
        if self.pieces == 1:
            return Response(piece)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(self.pieces):
                yield piece

        return StreamingResponse(pieces(), headers={"content-length": str(self.size_bytes)})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.front.middleware({**scope, "raw_path": b"/v1/nodes", "path": "/v1/nodes"}, receive, send)

    def memory(self) -> float:
        return self.front.value("body_memory_bytes") or 0.0


@pytest.fixture(scope="module")
def tls_pair() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server and of its client."""
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_client_that_never_reads_is_cut_off_and_its_memory_counts_until_then(tmp_path, tls_pair, encrypted, pieces):
    app = Large(tmp_path, pieces=pieces, chunk_seconds_max=0.5, bytes_per_s_min=1_000_000)

    async def talk(host, port) -> None:
        if encrypted:
            sock = unread(host, port, b"")
            sock.setblocking(False)
            _, writer = await asyncio.open_connection(sock=sock, ssl=tls_pair[1], server_hostname="127.0.0.1")
            cast("asyncio.Transport", writer.transport).pause_reading()
            writer.write(ASK)
        else:
            sock = unread(host, port, ASK)
        await eventually(lambda: app.memory() > 0)
        assert app.memory() == app.size_bytes
        await eventually(lambda: app.memory() == 0)
        assert app.front.value("requests_running") == 0
        if encrypted:
            writer.transport.abort()
        sock.close()

    asyncio.run(connected(app, talk, head_seconds_max=60.0, tls=tls_pair[0] if encrypted else None, all_gone=True))
    assert app.front.value("disconnects_total") == 1


def test_a_client_that_reads_slowly_gets_everything(tmp_path):
    app = Large(tmp_path, size_bytes=300_000, chunk_seconds_max=0.5)

    async def talk(host, port) -> None:
        sock = unread(host, port, ASK)
        sock.setblocking(False)
        loop, size_bytes = asyncio.get_running_loop(), 0
        while size_bytes < app.size_bytes:
            size_bytes += len(await loop.sock_recv(sock, 4_000))
            await asyncio.sleep(0.01)
        await eventually(lambda: app.memory() == 0)
        sock.sendall(ASK)
        assert (await loop.sock_recv(sock, 12)) == b"HTTP/1.1 200"
        sock.close()

    asyncio.run(connected(app, talk, head_seconds_max=60.0))


def test_small_responses_that_are_not_read_count_too_and_take_no_more_than_one_caller_may_have(tmp_path):
    app = Large(tmp_path, size_bytes=60_000, memory_bytes_max=200_000)

    async def talk(host, port) -> None:
        socks = [unread(host, port, ASK) for _ in range(5)]
        await eventually(lambda: app.front.value("disconnects_total") == 4)
        assert 0 < app.memory() <= 100_000
        for sock in socks:
            sock.close()

    asyncio.run(connected(app, talk, head_seconds_max=60.0))


def test_a_client_that_asks_on_without_reading_is_rejected(tmp_path):
    app = Large(tmp_path)

    async def talk(host, port) -> None:
        sock = unread(host, port, ASK)
        await eventually(lambda: app.memory() > 0)
        sock.sendall(ASK)
        await eventually(lambda: app.memory() == 0)
        sock.close()

    asyncio.run(connected(app, talk, head_seconds_max=60.0, close_seconds_max=0.1, all_gone=True))


def test_what_is_no_http_is_closed_although_its_rejection_is_not_read():
    kept: list[socket.socket] = []
    answered = asyncio.Event()

    async def respond(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100000")]})
        await send({"type": "http.response.body", "body": b"x" * 100_000})
        answered.set()

    async def talk(host, port) -> None:
        kept.append(unread(host, port, ASK))
        await answered.wait()
        kept[0].sendall(b"\x00nonsense\r\n\r\n")

    asyncio.run(connected(respond, talk, head_seconds_max=60.0, close_seconds_max=0.1, all_gone=True))
    kept[0].close()
