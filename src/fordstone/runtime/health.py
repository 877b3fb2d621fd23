"""Serve the health of pipelines at `/healthz` and `/readyz`, for the probes of systemd, Kubernetes and monitoring.

`PipelineWatch` remembers what a pipeline reports, `protocol.health` judges it, and `HealthServer` answers requests from a thread of its own, so
that a pipeline that hangs is still reported. Requests are not authenticated, so responses contain only numbers, names of pipelines and fixed words.

Bounds: connections at a time (a new one replaces the oldest), bytes of a request, and its time in all. A request has no body, and
a connection one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Self

import msgspec

from fordstone.hub.listen import bound, parse_listen
from fordstone.protocol.health import HealthFacts, PipelineState, WaitsFor, judge_health
from fordstone.protocol.http_head import HEAD_END, HeadError, parse_head, response_head
from fordstone.storage.clock import monotonic_clock_us

if TYPE_CHECKING:
    from fordstone.protocol.progress import Progress

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 32
HEAD_BYTES_MAX: Final = 8_192
REQUEST_SECONDS_MAX: Final = 5.0
"""For a whole request, from the connection to the last byte of the response."""
STOP_SECONDS_MAX: Final = 5.0
LOOPBACK: Final = "127.0.0.1"


class PipelineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline in the response."""

    pipeline: str
    state: PipelineState
    healthy: bool
    ready: bool
    problem: str | None
    """Why it is not healthy."""
    epoch: int | None
    """The newest sealed epoch; None: not known yet."""
    since_seal_s: float | None
    """Seconds since an epoch was sealed, in this run; None: none was."""
    waits_for: WaitsFor | None
    waiting_for: tuple[str, ...]
    """The steps whose systems cannot be used now, and `hub`."""
    hub_away_s: float | None
    """For how long the hub could not be reached; None: it can, or there is none."""
    quarantined_nodes: int
    """At the center, the nodes that are not read on. A restart would change nothing, and the others are read: the center is ready."""
    outbox_epochs: int
    restarts: int
    damaged_runs: int
    """Damage on disk, which a restart would make worse: the state in memory is whole. So the pipeline is healthy."""


class Healthz(msgspec.Struct, frozen=True, kw_only=True):
    """The response."""

    healthy: bool
    ready: bool
    pipelines: tuple[PipelineHealth, ...]


class PipelineWatch:
    """What one pipeline has reported. Called by the thread that runs it, and read by that of the server."""

    def __init__(self, pipeline: str, *, monotonic_us: Callable[[], int] | None = None) -> None:
        self._pipeline = pipeline
        self._now_us = monotonic_us or monotonic_clock_us
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._progressed_us: int | None = None
        self._sealed_us: int | None = None
        self._rows_sealed = 0
        self._unsealed_us: int | None = None
        self._waits_us = 0
        self._away_us: int | None = None
        self._restarts = 0
        self._given_up = self._over = False

    def show(self, progress: Progress) -> None:
        """Take the newest progress. Called up to 20 times a second."""
        now_us = self._now_us()
        with self._lock:
            before, self._progress = self._progress, progress
            fresh = self._progressed_us is None
            self._progressed_us = now_us
            if fresh or before is None or progress.epoch != before.epoch:
                if not fresh:
                    self._sealed_us = now_us
                self._rows_sealed, self._unsealed_us = progress.rows_in, None
            unsealed = progress.busy or progress.rows_in > self._rows_sealed
            self._unsealed_us = (self._unsealed_us or now_us) if unsealed else None
            if before is None or progress.waits_for != before.waits_for:
                self._waits_us = now_us
            self._away_us = None if progress.hub_problem is None else (self._away_us or now_us)

    def restarting(self) -> None:
        """The pipeline has failed, and is started again. Until it reports progress, it is not judged by what it did before."""
        with self._lock:
            self._restarts += 1
            self._progressed_us = self._unsealed_us = None

    def give_up(self) -> None:
        """The pipeline has failed, and is not started again."""
        self._given_up = True

    def end(self) -> None:
        """The pipeline has ended as it should."""
        self._over = True

    def health(self) -> PipelineHealth:
        now_us = self._now_us()
        with self._lock:
            progress = self._progress
            facts = HealthFacts(
                now_us=now_us,
                given_up=self._given_up,
                over=self._over,
                stopping=progress is not None and progress.stopping,
                restarts=self._restarts,
                progressed_us=self._progressed_us,
                waits_for=None if progress is None else progress.waits_for,
                waits_since_us=self._waits_us,
                unsealed_since_us=self._unsealed_us,
                interval_us=0 if progress is None else progress.interval_us,
            )
            sealed_us, away_us = self._sealed_us, self._away_us
        verdict = judge_health(facts)
        return PipelineHealth(
            pipeline=self._pipeline,
            state=verdict.state,
            healthy=verdict.problem is None,
            ready=verdict.ready,
            problem=verdict.problem,
            epoch=None if progress is None else progress.epoch,
            since_seal_s=None if sealed_us is None else round((now_us - sealed_us) / 1e6, 1),
            waits_for=facts.waits_for,
            waiting_for=() if progress is None else _names(progress),
            hub_away_s=None if away_us is None else round((now_us - away_us) / 1e6, 1),
            quarantined_nodes=0 if progress is None else len(progress.not_read),
            outbox_epochs=0 if progress is None else progress.outbox_epochs,
            damaged_runs=0 if progress is None else progress.damaged_runs,
            restarts=max(facts.restarts, 0 if progress is None else progress.restarts),
        )


def _names(progress: Progress) -> tuple[str, ...]:
    hub = ("hub",) if progress.hub_problem is not None or progress.waits_for == "hub" else ()
    return (*hub, *(one.name for one in progress.away))


def healthz(watches: Sequence[PipelineWatch]) -> Healthz:
    """The health of all pipelines of this process."""
    found = tuple(watch.health() for watch in watches)
    return Healthz(
        healthy=all(one.healthy for one in found),
        ready=all(one.ready or one.state == "stopped" for one in found),
        pipelines=found,
    )


class HealthServer:
    """Listens from when it is made, and answers while it is entered. `ConfigError` if the address cannot be had."""

    def __init__(
        self,
        address: str,
        watches: Sequence[PipelineWatch],
        *,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`address`: HOST:PORT, or a port of this machine's loopback; port 0 takes one that is free."""
        text = address if ":" in address else f"{LOOPBACK}:{address}"
        self._socket = bound(*parse_listen(text, option="--health"), option="--health")
        self._watches = tuple(watches)
        self._request_seconds_max = request_seconds_max
        self._connections_max = connections_max
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="health-server", daemon=True)
        self._listening = threading.Event()

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening.wait(STOP_SECONDS_MAX)
        log.info("health served", extra={"url": self.url})
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        # The thread is a daemon: it does not delay the end of the process.
        self._thread.join(STOP_SECONDS_MAX)
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            # The pipeline goes on without: probes fail, which is right.
            log.exception("health no longer served", extra={"problem": str(error)})

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=HEAD_BYTES_MAX)
        self._listening.set()
        async with server:
            await self._stop.wait()
            for task in tuple(self._open):
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a connection is handled by a task")
        while len(self._open) >= self._connections_max:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[task] = None
        try:
            async with asyncio.timeout(self._request_seconds_max):
                await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._open.pop(task, None)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            raw = await reader.readuntil(HEAD_END)
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            status, body, method = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"", "GET"
        else:
            status, body, method = self._respond(raw)
        headers = {"cache-control": "no-store"}
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["allow"] = "GET, HEAD"
        writer.write(response_head(status, body, headers) + (b"" if method == "HEAD" else body))
        await writer.drain()

    def _respond(self, raw: bytes) -> tuple[HTTPStatus, bytes, str]:
        """Return the status, the body and the method of a request."""
        try:
            head = parse_head(raw)
        except HeadError:
            return HTTPStatus.BAD_REQUEST, b"", "GET"
        if head.method not in {"GET", "HEAD"}:
            return HTTPStatus.METHOD_NOT_ALLOWED, b"", head.method
        if head.body_bytes != 0:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"", head.method
        if head.path not in {"/healthz", "/readyz"}:
            return HTTPStatus.NOT_FOUND, b"", head.method
        found = healthz(self._watches)
        well = found.ready if head.path == "/readyz" else found.healthy
        body = msgspec.json.encode(found) + b"\n"
        return HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, body, head.method
