"""Run a hub until a signal: the ASGI app over its log and blob store, the data directory, the socket, TLS, and connections.

One process, one event loop. Nothing blocks it: reading the log and touching blobs happen on small pools of threads, writing
on the log's own. Rejected before anything listens: a data directory that another hub has locked, and an address that
other machines reach without TLS or without a token. There is no option to turn this off.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import uvicorn
from starlette.routing import Router

from fordstone.errors import ConfigError, StorageError
from fordstone.hub.listen import bound, parse_listen
from fordstone.hub.messages import Rejection
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.hub.server.connection import Acceptor, Connection, Connections
from fordstone.hub.server.handlers import SMALL_BYTES_MAX, Handlers, LongPolls
from fordstone.hub.server.health import HubHealth
from fordstone.hub.server.limits import DiskQuota, Limits
from fordstone.hub.server.metrics import HubMetrics, LogMetrics
from fordstone.hub.server.middleware import HubMiddleware, Receive, Scope, Send
from fordstone.hub.server.routes import Routes
from fordstone.hub.server.uploads import NodeUploads
from fordstone.hub.store.blobs import BlobLocks, BlobStore, DiskBlobs, claim, open_blobs
from fordstone.hub.store.log import HubLog, LogLimits
from fordstone.hub.store.reserve import Reserve
from fordstone.hub.store.retention import Retention
from fordstone.hub.store.scrub import RATE_BYTES, ReadPace, Scrub, Scrubbed, ScrubStoppedError
from fordstone.hub.store.sqlite import LOG_NAME, SqliteStore
from fordstone.storage.atomic import write_file
from fordstone.storage.clock import boot_clock_us, wall_clock_us
from fordstone.storage.disk import PRIVATE_FILE, OsDisk, make_private
from fordstone.storage.failpoint import Failpoints, NoFailpoints, failpoints_of_process
from fordstone.storage.remote import local_path

READERS: Final = 4
QUICK_READERS: Final = 2
"""They read for nodes, while a center keeps the others busy."""
BLOB_THREADS: Final = 16
"""They mostly wait for the disk."""
KEEP_ALIVE_S: Final = 75
"""Longer than nodes are silent, so that they need no new TLS handshake each time."""
STOP_SECONDS_MAX: Final = 10
"""Timeout for requests in progress when the hub stops."""
SCRUB_RETRY_S: Final = 60.0
"""Pause of the scrub after an error, and between looks whether its next pass is due."""
TICK_S: Final = 5.0
BLOBS_NAME: Final = "blobs"
INCOMING_NAME: Final = "incoming"
"""Uploads on their way to a remote blob store."""
_FILES_WANTED: Final = 65_536
FILES_RESERVED: Final = 200
"""Files that are never used for connections: the log, blobs that are read and written, and what Python opens."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_events = logging.getLogger(__name__)


class HubApp:
    """The hub over an open log and blob store, which the caller closes after it."""

    def __init__(
        self,
        log: HubLog,
        blobs: BlobStore,
        *,
        direct_url: str | None = None,
        failpoints: Failpoints | None = None,
        keep_unread_us: int | None = None,
        small_bytes_max: int = SMALL_BYTES_MAX,
        quota: DiskQuota | None = None,
        tokens: Tokens | None = None,
        limits: Limits | None = None,
        files_max: int | None = None,
        scrubbing: Scrubbing | None = None,
    ) -> None:
        """`direct_url` is given to readers that can reach the blob store. Blobs up to `small_bytes_max` are kept in the log.

        `files_max`: how many files the process may open for connections. `scrubbing`: in the background; None: not at all.
        """
        locks = BlobLocks()
        self._log = log
        self._polls = LongPolls()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="hub-read")
        self._quick_readers = ThreadPoolExecutor(QUICK_READERS, thread_name_prefix="hub-quick")
        self._blob_threads = ThreadPoolExecutor(BLOB_THREADS, thread_name_prefix="hub-blob")
        quota = quota or DiskQuota([])
        self.retention = Retention(
            log, blobs, locks, unread_us=keep_unread_us, short_of_space=quota.is_short, failpoints=failpoints
        )
        metrics, limits = HubMetrics(), limits or Limits()
        self.scrub = Scrub(log, blobs, locks, on_read=metrics.count_scrubbed)
        self._scrubbing = scrubbing
        self._stopping = threading.Event()
        self.connections = Connections(limits, files_max=files_max, closed=metrics.connections_closed.inc)
        metrics.connections.set_function(lambda: self.connections.total)
        metrics.connections_unauthenticated.set_function(lambda: self.connections.unauthenticated)
        handlers = Handlers(
            log=log,
            blobs=blobs,
            locks=locks,
            polls=self._polls,
            quota=quota,
            health=HubHealth(log, quota),
            uploads=NodeUploads(free_bytes=quota.free_bytes, blobs_on_disk=isinstance(blobs, DiskBlobs)),
            scrub=self.scrub,
            metrics=metrics,
            log_metrics=LogMetrics(log, metrics),
            readers=self._readers,
            quick_readers=self._quick_readers,
            blob_threads=self._blob_threads,
            direct_url=direct_url,
            small_bytes_max=small_bytes_max,
            failpoints=failpoints or NoFailpoints(),
        )
        self._app = HubMiddleware(
            Routes(handlers),
            lifespan=Router(lifespan=self._lifespan),
            tokens=tokens,
            limits=limits,
            metrics=metrics,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def log_left_out(self) -> None:
        """Log how many rejections were not logged since the last call."""
        self._app.log_left_out()

    def stop_polls(self) -> None:
        """End long polls at once. Called from any thread."""
        self._polls.end()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:  # noqa: ARG002 - the framework's form
        self._polls.begin()
        self._log.listen(self._polls.notify)
        tasks = [asyncio.create_task(self._retain())]
        if self._scrubbing is not None:
            tasks.append(asyncio.create_task(self._check_blobs(self._scrubbing)))
        try:
            yield
        finally:
            self._polls.end()
            self._stopping.set()
            self._log.unlisten(self._polls.notify)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._readers.shutdown()
            self._quick_readers.shutdown()
            self._blob_threads.shutdown()

    async def _retain(self) -> None:
        """Run retention, round after round, on a thread of its own."""
        loop, retention = asyncio.get_running_loop(), self.retention
        with ThreadPoolExecutor(1, thread_name_prefix="hub-retention") as thread:
            while not self._polls.ended:
                more = False
                try:
                    more = (await loop.run_in_executor(thread, retention.round)).more
                    if not more:
                        await loop.run_in_executor(thread, retention.sweep)
                except Rejection as rejection:
                    _events.warning("hub retention failed", extra={"reason": str(rejection)})
                except Exception:  # noqa: BLE001 - a bug here must not end retention; it is logged
                    _events.exception("hub retention failed")
                if not more:
                    await asyncio.sleep(retention.every_s)

    async def _check_blobs(self, scrubbing: Scrubbing) -> None:
        """Read blobs slowly and compare their digests, pass after pass, on a thread of its own."""
        loop, pace = asyncio.get_running_loop(), ReadPace(scrubbing.bytes_per_s, self._stopping).wait
        with ThreadPoolExecutor(1, thread_name_prefix="hub-scrub") as thread:
            while not self._polls.ended:
                found: Scrubbed | None = None
                try:
                    found = await loop.run_in_executor(
                        thread, lambda: self.scrub.next_piece(pace, small_only=scrubbing.small_only)
                    )
                except ScrubStoppedError:
                    return
                except Rejection as rejection:
                    _events.warning("hub scrub failed", extra={"reason": str(rejection)})
                except Exception:  # noqa: BLE001 - a damaged log, or a bug: neither must end the scrub; it is logged
                    _events.exception("hub scrub failed")
                if found is None:
                    await asyncio.sleep(SCRUB_RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbing:
    """How blobs are checked in the background."""

    bytes_per_s: int = RATE_BYTES
    small_only: bool = False
    """Only those in the log: others are in a remote store, which has its own checks, and where reading costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """How a hub is run."""

    listen: str = "127.0.0.1:7411"
    data: Path = Path("hub")
    blobs: str | None = None
    """Any fsspec URL; None: below `data`."""
    direct_blobs: bool | None = None
    """Whether readers get the URL of the blob store, to read from it. None: unless the URL has a password in it."""
    scrub_bytes_per_s: int | None = None
    """Bytes of blobs per second that are checked in the background; 0: none. None: the default rate, without blobs in a remote store."""
    keep_unread_us: int | None = None
    """Epochs received longer ago are removed even if they were not read; None: never."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ready_file: Path | None = None
    limits: Limits = field(default_factory=Limits)
    log_limits: LogLimits = field(default_factory=LogLimits)


def serve(
    options: HubOptions, *, on_ready: Callable[[str], None], stop_requested: Callable[[], bool] = lambda: False
) -> None:
    """Run until SIGINT or SIGTERM; the second one stops at once. `on_ready` gets the URL once requests are answered.

    In a thread, which gets no signals, it runs until `stop_requested`; that is asked about ten times per second.

    `ConfigError`, `StoreLockedError` or `StorageError` before that, if it cannot be.
    """
    host, port = parse_listen(options.listen)
    context = tls_context(options.tls_cert, options.tls_key)
    disk = OsDisk(options.data, private=True)
    try:
        disk.lock()
        _make_private(options.data)
        if options.ready_file is not None:
            # One that a killed hub has left names an address that no hub listens at.
            options.ready_file.unlink(missing_ok=True)
        tokens = Tokens(TokenFile(options.data), clock_s=time.monotonic, clock_us=wall_clock_us)
        with contextlib.closing(bound(host, port)) as sock:
            check_exposure(sock, tls=context is not None, tokens=tokens.valid, options=options)
            with (
                _open(options, tokens, _raise_file_limit()) as app,
                asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
            ):
                runner.run(_run(options, sock, context, tokens, app, on_ready, stop_requested))
            tokens.write_used()
    finally:
        disk.close()


@contextlib.contextmanager
def _open(options: HubOptions, tokens: Tokens, files_max: int) -> Iterator[HubApp]:
    """Open the data directory, which is locked, with the app over it."""
    data, failpoints = options.data, failpoints_of_process()
    url = options.blobs or str(data / BLOBS_NAME)
    if "://" not in url:
        url = Path(url).resolve().as_uri()
    direct = options.direct_blobs if options.direct_blobs is not None else "@" not in urlsplit(url).netloc
    if options.blobs is not None:
        local = local_path(url)
        if local is not None:
            with contextlib.suppress(OSError):  # it is reported below
                Path(unquote(local)).mkdir(mode=0o700, parents=True, exist_ok=True)
        claim(url, data)
    try:
        store = open_blobs(url, beside=data / INCOMING_NAME, failpoints=failpoints)
    except Rejection as rejection:
        raise StorageError(str(rejection)) from rejection
    sqlite = SqliteStore(data / LOG_NAME, reserve=Reserve(data))
    with contextlib.closing(
        HubLog(
            sqlite, clock_us=wall_clock_us, monotonic_us=boot_clock_us, limits=options.log_limits, failpoints=failpoints
        )
    ) as log:
        yield HubApp(
            log,
            store,
            direct_url=url if direct else None,
            failpoints=failpoints,
            keep_unread_us=options.keep_unread_us,
            scrubbing=_scrubbing(options, store),
            quota=DiskQuota(
                [data, *([store.root] if isinstance(store, DiskBlobs) else [])], has_reserve=log.has_reserve
            ),
            tokens=tokens,
            limits=options.limits,
            files_max=max(1, (files_max - FILES_RESERVED) // 2),  # a connection may read a blob
        )


def _make_private(data: Path) -> None:
    """Let no other user read what is in the hub's directory: it has rows of all nodes, and hashes of tokens.

    The files of SQLite get the mode of the log, which is made here if it is new.
    """
    with contextlib.suppress(OSError):  # it is reported when the log is opened
        os.close(os.open(data / LOG_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))
        for path in data.iterdir():
            if not path.is_symlink():
                make_private(path)


def _scrubbing(options: HubOptions, store: BlobStore) -> Scrubbing | None:
    if options.scrub_bytes_per_s is None:
        return Scrubbing(small_only=not isinstance(store, DiskBlobs))
    return Scrubbing(bytes_per_s=options.scrub_bytes_per_s) if options.scrub_bytes_per_s else None


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


async def _run(
    options: HubOptions,
    sock: socket.socket,
    context: ssl.SSLContext | None,
    tokens: Tokens,
    app: HubApp,
    on_ready: Callable[[str], None],
    stop_requested: Callable[[], bool],
) -> None:
    url = _url(sock, tls=context is not None)

    def ready() -> None:
        on_ready(url)  # before the file: a script that waits for the file then reads this line
        if options.ready_file is not None:
            _write_ready(options.ready_file, url)

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
    )
    config.load()
    server = _Server(config, app, sock, context, ready=ready, stop_requested=stop_requested)
    ticking = asyncio.create_task(_tick(tokens, app))
    try:
        await server.serve(sockets=[sock])
    finally:
        ticking.cancel()
        app.log_left_out()
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)
    _events.info("hub stopped")


class _Server(uvicorn.Server):
    """Uvicorn's server with other handling of signals and of new connections, which it has no options for.

    The first signal ends long polls at once and waits for other requests, the second ends all. Uvicorn raises the signal again at its
    end, which would kill the process before the log is closed. Connections are accepted by our `Acceptor`.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: HubApp,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        *,
        ready: Callable[[], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(config)
        self._app = app
        self._acceptor = Acceptor(sock, self._connection, app.connections, tls=tls)
        self._ready = ready
        self._stop_requested = stop_requested

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._stop_requested()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        del sockets
        await super().startup(sockets=[])
        if self.started:
            self._acceptor.start()
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._acceptor.stop()
        self._app.stop_polls()
        await super().shutdown(sockets=sockets)

    def _connection(self) -> Connection:
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            connections=self._app.connections,
        )

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


async def _tick(tokens: Tokens, app: HubApp) -> None:
    """Write when tokens were used, about once a minute, and how many rejections were not logged."""
    while True:
        await asyncio.sleep(TICK_S)
        app.log_left_out()
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


def _raise_file_limit() -> int:
    """Raise the limit of open files, and return it: every connection is one, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, _FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _FILES_WANTED if soft == resource.RLIM_INFINITY else soft
