"""Run a hub until a signal: the data directory, the socket, TLS and the server.

One process, one event loop. Rejected before anything listens: a data directory that another hub has locked, and an address
that other machines reach without TLS or without a token. There is no option to turn this off.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

import uvicorn

from fordstone.errors import ConfigError, StorageError
from fordstone.hub.server.app import HubApp, open_hub
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.hub.server.connection import Connection
from fordstone.hub.server.limits import Limits
from fordstone.hub.store.retention import Keeping
from fordstone.storage.atomic import write_file
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import parse_failpoints

log = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 75
"""Longer than nodes are silent, so that they need no new TLS handshake each time."""
STOP_SECONDS_MAX: Final = 10
"""Timeout for requests in progress when the hub stops."""
TICK_S: Final = 5.0
FAILPOINT_VARIABLE: Final = "FORDSTONE_FAILPOINT"
_BACKLOG: Final = 2_048
_FILES_WANTED: Final = 65_536
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """How a hub is run."""

    listen: str = "127.0.0.1:7411"
    data: Path = Path("hub")
    blobs: str | None = None
    """Any fsspec URL; None: below `data`."""
    blobs_direct: bool | None = None
    """Whether readers get the URL of the blob store, to read from it. None: unless the URL has a password in it."""
    keep_unread_us: int | None = None
    """Epochs received longer ago are removed even if they were not read; None: never."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ready_file: Path | None = None
    limits: Limits = field(default_factory=Limits)


def serve(options: HubOptions, *, on_ready: Callable[[str], None]) -> None:
    """Run until SIGINT or SIGTERM; the second one stops at once. `on_ready` gets the URL once requests are answered.

    `ConfigError`, `StoreLockedError` or `StorageError` before that, if it cannot be.
    """
    host, port = parse_listen(options.listen)
    context = tls_context(options.tls_cert, options.tls_key)
    disk = OsDisk(options.data)
    try:
        disk.lock()
        if options.ready_file is not None:
            # One that a killed hub has left names an address that no hub listens at.
            options.ready_file.unlink(missing_ok=True)
        tokens = Tokens(TokenFile(options.data), clock_s=time.monotonic, clock_us=now_us)
        with contextlib.closing(bound(host, port)) as sock:
            check_exposure(sock, tls=context is not None, tokens=tokens.holding, options=options)
            _raise_file_limit()
            with _open(options, tokens) as app, asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(_run(options, sock, context, tokens, app, on_ready))
            tokens.write_used()
    finally:
        disk.close()


def _open(options: HubOptions, tokens: Tokens) -> contextlib.AbstractContextManager[HubApp]:
    return open_hub(
        options.data,
        blobs=options.blobs,
        direct=options.blobs_direct,
        keeping=Keeping(unread_us=options.keep_unread_us),
        tokens=tokens,
        limits=options.limits,
        clock_us=now_us,
        failpoints=parse_failpoints(os.environ.get(FAILPOINT_VARIABLE, "")),
    )


def parse_listen(text: str) -> tuple[str, int]:
    """Split `host:port`, or `[v6]:port`."""
    host, colon, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or ("[" in host) != (":" in bare) or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"--listen {text!r} is not HOST:PORT, such as 127.0.0.1:7411 or [::1]:7411.")
    if int(port[:6]) > 65_535:  # noqa: PLR2004 - the largest port
        raise ConfigError(f"--listen {text!r}: ports go up to 65535; 0 takes one that is free.")
    return bare, int(port)


def tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Make a context for TLS 1.2 and later with this certificate; None if there is none."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError("TLS needs a certificate and its key: give both --tls-cert and --tls-key.")
    for what, path in (("--tls-cert", cert), ("--tls-key", key)):
        if not path.is_file():
            raise ConfigError(f"{what}: there is no file {path}.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def no_password() -> str:
        raise ConfigError(f"the key {key} is locked with a password. Unlock it: openssl pkey -in {key} -out open.key")

    try:
        context.load_cert_chain(cert, key, password=no_password)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{cert} and {key} are not a certificate and its key in PEM form: {error.strerror or error}."
        ) from error
    return context


def bound(host: str, port: int) -> socket.socket:
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
            f"cannot listen at {host}:{port}: {error.strerror or error}. Choose another address with --listen; port 0 takes a free one."
        ) from error
    return sock


def check_exposure(sock: socket.socket, *, tls: bool, tokens: int, options: HubOptions) -> None:
    """Reject an address that other machines reach, unless there is TLS and a token."""
    host = sock.getsockname()[0]
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback or (tls and tokens):
        return
    missing = []
    if not tls:
        missing.append(
            "TLS is missing. Give --tls-cert and --tls-key; a certificate for a test is made by\n"
            "    openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=HOST -addext subjectAltName=DNS:HOST "
            "-addext keyUsage=critical,digitalSignature,keyCertSign -keyout hub.key -out hub.crt"
        )
    if not tokens:
        missing.append(
            "There is no token. Make one for each node, and one for the center:\n"
            f"    fordstone hub token add NAME --node ID --data {options.data}\n"
            f"    fordstone hub token add center --center --data {options.data}"
        )
    raise ConfigError(
        f"{options.listen} can be reached from other machines, so the hub asks for TLS and tokens.\n"
        + "\n".join(missing)
    )


def now_us() -> int:
    """Return the time of the hub's clock."""
    return time.time_ns() // 1_000


async def _run(
    options: HubOptions,
    sock: socket.socket,
    context: ssl.SSLContext | None,
    tokens: Tokens,
    app: HubApp,
    on_ready: Callable[[str], None],
) -> None:
    url = _url(sock, tls=context is not None)

    def ready() -> None:
        if options.ready_file is not None:
            _write_ready(options.ready_file, url)
        on_ready(url)

    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_SECONDS_MAX,
        backlog=_BACKLOG,
    )
    config.load()
    config.ssl = context
    connection = functools.partial(Connection, connections_max=options.limits.connections_max)
    config.http_protocol_class = connection  # type: ignore[assignment]  # it is only called
    ticking = asyncio.create_task(_tick(tokens))
    try:
        await _Server(config, ready=ready, stop=app.stop_polls).serve(sockets=[sock])
    finally:
        ticking.cancel()
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)
    log.info("hub stopped")


class _Server(uvicorn.Server):
    """Uvicorn's server with other handling of signals, which it has no option for.

    The first signal ends long polls at once and waits for other requests, the second ends all. Uvicorn raises the signal again at its
    end, which would kill the process before the log is closed.
    """

    def __init__(self, config: uvicorn.Config, *, ready: Callable[[], None], stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._stop = stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Call `ready` when requests are answered."""
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End long polls first."""
        self._stop()
        await super().shutdown(sockets=sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let a signal end the server, not the process: the log must be closed after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in _SIGNALS}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; on the second signal, at once."""
        del sig, frame
        self.force_exit = self.should_exit
        self.should_exit = True


async def _tick(tokens: Tokens) -> None:
    """Write when tokens were used, about once a minute."""
    while True:
        await asyncio.sleep(TICK_S)
        if tokens.due():
            await asyncio.to_thread(tokens.write_used)


def _url(sock: socket.socket, *, tls: bool) -> str:
    host, port = sock.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _write_ready(path: Path, url: str) -> None:
    """Write the hub's address atomically: a reader that sees the file sees all of it."""
    try:
        write_file(path, f"{url}\n".encode(), durable=False)
    except StorageError as error:
        raise StorageError(f"--ready-file {path}: {error}") from error


def _raise_file_limit() -> None:
    """Raise the limit of open files: every connection is one, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
