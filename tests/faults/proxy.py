"""A bad network: a proxy in front of a hub or a store that cuts, delays and repeats requests as configured, and records what passed through.

One request per connection. Threads, so that it works beside any client. Every trouble counts how often it has happened: one that
never did is a failure of the test.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

SECONDS_MAX = 300.0
HEAD_BYTES_MAX = 1 << 16
CHUNK = 1 << 16

What = Literal["cut_request", "cut_answer", "lose_answer", "refuse", "delay", "twice", "hold", "answer"]


@dataclass(kw_only=True)
class Trouble:
    """Something that goes wrong with requests whose first line matches, `times` times, leaving out `between` after each."""

    what: What
    where: str
    """A regular expression for `METHOD path`."""
    times: int = 1
    between: int = 0
    share: float = 0.5
    """How much of a body or an answer gets through before it is cut."""
    delay_s: float = 0.05
    answer: bytes = b""
    """Of `answer`: what the proxy answers by itself."""
    happened: int = 0
    seen: int = 0
    released: threading.Event = field(default_factory=threading.Event)
    """Of `hold`: set it, and the requests that are held go on."""

    def applies(self, line: str) -> bool:
        """Whether it is this request's turn; counts it."""
        if self.happened >= self.times or not re.search(self.where, line):
            return False
        self.seen += 1
        if (self.seen - 1) % (self.between + 1):
            return False
        self.happened += 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request as it came, to be sent again at any time."""

    method: str
    path: str
    raw: bytes
    body: bytes


class Proxy:
    """Listens on a port of its own."""

    def __init__(self, port: int, *troubles: Trouble) -> None:
        """`port`: where the hub is, on this machine."""
        self.port = port
        self.troubles = list(troubles)
        self.sent: list[Sent] = []
        self._mutex = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended = False
        self._listener = socket.create_server(("127.0.0.1", 0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def begin(self) -> None:
        thread = threading.Thread(target=self._listen, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """Close all connections; no request passes any more."""
        self._ended = True
        for trouble in self.troubles:
            trouble.released.set()
        # Closing alone does not wake the thread that waits for a connection.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def commits(self) -> list[Sent]:
        """The commits that came through, in order."""
        return [one for one in self.sent if one.method == "POST" and "/epochs/" in one.path]

    def send(self, one: Sent, *, body: bytes | None = None, path: str | None = None) -> tuple[int, bytes]:
        """Send a request once more, as it was or with another body or path: status and body of the answer."""
        raw = one.raw if body is None and path is None else _again(one, body=body, path=path)
        answer = self._ask(raw)
        head, _, rest = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), rest

    def happened(self) -> dict[str, int]:
        """How often each trouble has happened."""
        counts: dict[str, int] = {}
        for trouble in self.troubles:
            counts[trouble.what] = counts.get(trouble.what, 0) + trouble.happened
        return counts

    def _listen(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.settimeout(SECONDS_MAX)
            one = _request(client)
            if one is None:
                return
            line = f"{one.method} {one.path}"
            with self._mutex:
                # One trouble a request: several at once would hide each other.
                trouble = next((trouble for trouble in self.troubles if trouble.applies(line)), None)
                self.sent.append(one)
            self._pass(client, one, trouble)

    def _pass(self, client: socket.socket, one: Sent, trouble: Trouble | None) -> None:
        what = trouble.what if trouble is not None else None
        if trouble is None:
            self._relay(client, one.raw)
        elif what == "cut_request":
            head = len(one.raw) - len(one.body)
            self._send_part(one.raw[: head + int(len(one.body) * trouble.share)])
            _reset(client)
        elif what == "refuse":
            _reset(client)
        elif trouble.what == "answer":
            client.sendall(trouble.answer)
        elif what == "cut_answer":
            answer = self._ask(one.raw)
            client.sendall(answer[: max(1, int(len(answer) * trouble.share))])
            _reset(client)
        elif what == "lose_answer":
            self._ask(one.raw)
            _reset(client)
        elif what == "twice":
            self._ask(one.raw)
            self._relay(client, one.raw)
        elif what == "hold":
            trouble.released.wait(SECONDS_MAX)
            self._relay(client, one.raw)
        else:
            threading.Event().wait(trouble.delay_s)  # the delay is the trouble
            self._relay(client, one.raw)

    def _ask(self, raw: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), SECONDS_MAX) as hub:
            hub.sendall(raw)
            parts = []
            while data := hub.recv(CHUNK):
                parts.append(data)
        return b"".join(parts)

    def _relay(self, client: socket.socket, raw: bytes) -> None:
        client.sendall(self._ask(raw))

    def _send_part(self, raw: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self.port), SECONDS_MAX) as hub:
            hub.sendall(raw)


@contextlib.contextmanager
def proxied(port: int, *troubles: Trouble) -> Iterator[Proxy]:
    """A proxy that ends with the block."""
    proxy = Proxy(port, *troubles)
    proxy.begin()
    try:
        yield proxy
    finally:
        proxy.end()


def _request(client: socket.socket) -> Sent | None:
    """Read one request to its end; None if there is none. It will ask the hub to close the connection after its response."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(CHUNK)
        if not more or len(data) > HEAD_BYTES_MAX:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))]
    if any(line.lower() == b"expect: 100-continue" for line in lines):
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    length = next((int(line.partition(b":")[2]) for line in kept if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        more = client.recv(CHUNK)
        if not more:
            return None
        body += more
    method, path, _ = first.decode("latin-1").split(" ", 2)
    raw = b"\r\n".join([first, *kept, b"Connection: close", b"", b""]) + body
    return Sent(method=method, path=path, raw=raw, body=body)


def _again(one: Sent, *, body: bytes | None, path: str | None) -> bytes:
    head = one.raw[: len(one.raw) - len(one.body)]
    body = one.body if body is None else body
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if path is not None:
        first = first.replace(one.path.encode(), path.encode())
    lines = [line for line in lines if not line.lower().startswith(b"content-length:")]
    return b"\r\n".join([first, *lines, b"Content-Length: %d" % len(body), b"", b""]) + body


def _reset(client: socket.socket) -> None:
    """End a connection as a broken line does: without a goodbye."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
