"""Where a server listens: the address from an option, and a socket that has it. For the hub, and for the health of a pipeline."""

from __future__ import annotations

import socket

from fordstone.errors import ConfigError


def parse_listen(text: str, *, option: str = "--listen") -> tuple[str, int]:
    """Split `host:port`, or `[v6]:port`. `option` is named in errors."""
    host, colon, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or ("[" in host) != (":" in bare) or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{option} {text!r} is not HOST:PORT, such as 127.0.0.1:7411 or [::1]:7411.")
    if int(port[:6]) > 65_535:  # noqa: PLR2004 - the largest port
        raise ConfigError(f"{option} {text!r}: ports go up to 65535; 0 takes one that is free.")
    return bare, int(port)


def bound(host: str, port: int, *, option: str = "--listen") -> socket.socket:
    """Make a socket that has its address and does not listen yet; port 0 takes a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # With the protocol named, asyncio sends at once; without, every answer waits 40 ms for an acknowledgement.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setblocking(False)  # noqa: FBT003 - the name of the argument is `flag`
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror or error}. Choose another address with {option}; port 0 takes a free one."
        ) from error
    return sock
