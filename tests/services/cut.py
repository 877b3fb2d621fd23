"""A proxy in front of a server that cuts a connection around a message: before the server has it, or after, so that its answer is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
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
        self._left = 0
        self.cuts = 0
        """How often a connection was cut. A test that never sees one has tested nothing."""
        threading.Thread(target=self._listen, name="cut-proxy", daemon=True).start()

    def arm(self, pattern: bytes, when: Literal["before", "after"], *, times: int = 1) -> None:
        """Cut the connection on which the client sends these bytes, `times` times: with `after`, once the server has answered them."""
        self._pattern, self._when, self._left = pattern, when, times

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
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as server:
            threading.Thread(target=self._hand_on, args=(server, client), daemon=True).start()
            self._watch(client, server)

    def _watch(self, client: socket.socket, server: socket.socket) -> None:
        """Hand on what the client sends, up to the cut."""
        while data := client.recv(CHUNK):
            if self._left and self._pattern in data:
                self._left -= 1
                if self._when == "after":
                    # The client gets nothing any more; the server has read all there is when it sees the end.
                    _shut(client)
                    server.sendall(data)
                    server.shutdown(socket.SHUT_WR)
                    while server.recv(CHUNK):
                        pass
                _shut(server)
                _shut(client)
                self.cuts += 1
                return
            server.sendall(data)

    def _hand_on(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK):
                client.sendall(data)
        _shut(client)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
