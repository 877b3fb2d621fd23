"""A proxy in front of a server that cuts a connection around a message: before the server has it, or after, so that its answer is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Literal

CHUNK = 1 << 16


class CutProxy:
    """Listens on a port of its own, and hands on what comes. `arm` sets a cut."""

    def __init__(self, port: int) -> None:
        """`port`: where the server is, on this machine."""
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pattern = b""
        self._when: Literal["before", "after"] = "before"
        self._left = self._passing = 0
        self._meanwhile: Callable[[], object] = lambda: None
        self._silent: set[socket.socket] = set()
        self._reworded: dict[bytes, bytes] = {}
        self.connections = 0
        """How many have come."""
        self.cuts = 0
        """How often a connection was cut. A test that never sees one has tested nothing."""
        threading.Thread(target=self._listen, name="cut-proxy", daemon=True).start()

    def arm(
        self,
        pattern: bytes,
        when: Literal["before", "after"],
        *,
        times: int = 1,
        skip: int = 0,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Cut the connection on which the client sends these bytes, `times` times: with `after`, once the server has answered them.

        `skip`: how often they pass before. `meanwhile` is called at the cut, before the client notices it.
        """
        self._pattern, self._when, self._left, self._passing, self._meanwhile = pattern, when, times, skip, meanwhile

    def reword(self, text: bytes, other: bytes) -> None:
        """Change what the server says, as one in another language would. `other` may not be longer, because messages begin with their length."""
        assert len(other) <= len(text)
        self._reworded[text] = other.ljust(len(text))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as server:
            threading.Thread(target=self._hand_on, args=(server, client), daemon=True).start()
            self._watch(client, server)

    def _watch(self, client: socket.socket, server: socket.socket) -> None:
        """Hand on what the client sends, up to the cut."""
        while data := client.recv(CHUNK):
            if self._left and self._pattern in data:
                if self._passing:
                    self._passing -= 1
                else:
                    self._left -= 1
                    self._cut(client, server, data)
                    return
            server.sendall(data)

    def _cut(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        if self._when == "after":
            # The client gets no answer; the server sees the end of the connection when it has done what it was sent.
            self._silent.add(client)
            server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            while server.recv(CHUNK):
                pass
        self._meanwhile()
        self.cuts += 1  # before the client notices, so that a test never counts too early
        _shut(server)
        _shut(client)

    def _hand_on(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                for text, other in self._reworded.items():
                    data = data.replace(text, other)
                if client not in self._silent:
                    client.sendall(data)
        if client not in self._silent:
            _shut(client)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
