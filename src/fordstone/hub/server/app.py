"""The hub's calls over HTTP: every call of `hub.messages`, behind authentication (`guard` stands before it).

Reads bodies, checks them, hands jobs to the log and blobs to the store, and says no in a `Refusal`. Nothing blocks the event
loop: reading the log and touching blobs happen on small pools of threads, writing on the log's own.

Invariants: nothing from a client becomes a path (names and digests are checked first); a request that ends early leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fordstone.hub.messages import API
from fordstone.hub.refused import Refused
from fordstone.hub.server.blob_calls import BlobCalls
from fordstone.hub.server.log_calls import LogCalls
from fordstone.hub.server.room import Room
from fordstone.hub.server.waiting import Waiting
from fordstone.hub.store.blob_index import SMALL_BYTES_MAX
from fordstone.hub.store.blobs import BlobStore, Gate
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.retention import Keeping, Retention
from fordstone.storage.failpoint import Failpoints

READERS: Final = 4
BLOB_THREADS: Final = 16
"""They mostly wait for the disk."""
_log = logging.getLogger(__name__)

Call = Callable[[Request], Awaitable[Response]]


def make_app(
    log: HubLog,
    blobs: BlobStore,
    *,
    direct_url: str | None = None,
    failpoints: Failpoints | None = None,
    keeping: Keeping | None = None,
    small_bytes_max: int = SMALL_BYTES_MAX,
    room: Room | None = None,
) -> Starlette:
    """The hub over an open log and store, which the caller closes after it. `app.state.waiting.end()` ends long polls at once.

    `direct_url` is told to readers who may reach the store without the hub. Blobs up to `small_bytes_max` are kept in the log.
    """
    room = room or Room([])
    waiting, gate = Waiting(), Gate()
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="hub-read")
    blob_threads = ThreadPoolExecutor(BLOB_THREADS, thread_name_prefix="hub-blob")
    calls = LogCalls(log, waiting, readers, room, direct_url=direct_url)
    blob_calls = BlobCalls(log, blobs, gate, blob_threads, room, small_bytes_max=small_bytes_max, failpoints=failpoints)
    retention = Retention(log, blobs, gate, keeping=keeping or Keeping(), failpoints=failpoints)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:  # noqa: ARG001 - the framework's form
        waiting.begin()
        log.listen(waiting.tell)
        letting_go = asyncio.create_task(_let_go(retention, waiting))
        try:
            yield
        finally:
            waiting.end()
            log.unlisten(waiting.tell)
            letting_go.cancel()
            await asyncio.gather(letting_go, return_exceptions=True)
            readers.shutdown()
            blob_threads.shutdown()

    app = Starlette(
        routes=_routes(calls, blob_calls),
        lifespan=lifespan,
        exception_handlers={
            Refused: _refused,
            HTTPException: _not_ours,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )
    app.state.waiting = waiting
    app.state.retention = retention
    return app


def _routes(calls: LogCalls, blobs: BlobCalls) -> list[Route]:
    node = f"{API}/pipelines/{{pipeline}}/nodes/{{node}}"
    control = f"{API}/pipelines/{{pipeline}}/control/{{control}}"
    consumer = f"{API}/pipelines/{{pipeline}}/consumers/{{consumer}}"

    def route(method: str, path: str, call: Call) -> Route:
        return Route(path, call, methods=[method])

    return [
        route("POST", f"{node}/epochs/{{epochs}}", calls.commit),
        route("POST", f"{API}/blobs/missing", blobs.missing),
        route("PUT", f"{API}/blobs/{{digest}}", blobs.put),
        route("HEAD", f"{API}/blobs/{{digest}}", blobs.head),
        route("GET", f"{API}/blobs/{{digest}}", blobs.get),
        route("POST", f"{node}/lease", calls.lease),
        route("GET", f"{node}/head", calls.head),
        route("GET", f"{node}/checkpoint", calls.checkpoint),
        route("GET", f"{API}/pipelines/{{pipeline}}/streams/{{stream}}/epochs", calls.stream_page),
        route("PUT", consumer, calls.keep_position),
        route("GET", consumer, calls.positions),
        route("DELETE", consumer, calls.forget_consumer),
        route("POST", control, calls.publish),
        route("GET", control, calls.control_page),
        route("PUT", f"{API}/nodes/{{node}}/health/{{pipeline}}", calls.keep_health),
        route("GET", f"{API}/nodes", calls.nodes),
        route("GET", f"{API}/streams", calls.streams),
        route("GET", f"{API}/epochs", calls.epochs),
        route("GET", "/healthz", calls.healthz),
    ]


async def _let_go(retention: Retention, waiting: Waiting) -> None:
    """Retention, round after round, on a thread of its own."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="hub-retention") as thread:
        while not waiting.ended:
            more = False
            try:
                more = (await loop.run_in_executor(thread, retention.round)).more
                if not more:
                    await loop.run_in_executor(thread, retention.sweep)
            except Refused as refused:
                _log.warning("hub retention failed", extra={"reason": str(refused)})
            except Exception:  # noqa: BLE001 - a bug here must not end the letting go; it is logged
                _log.exception("hub retention failed")
            if not more:
                await asyncio.sleep(retention.keeping.every_s)


async def _refused(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the framework's form
    assert isinstance(error, Refused)  # noqa: S101 - registered for nothing else
    return Response(msgspec.json.encode(error.refusal), error.status, media_type="application/json")


async def _not_ours(request: Request, error: Exception) -> Response:
    """What the framework says by itself: no such call, or not with this method."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    headers: dict[str, Any] = dict(error.headers or {})
    if error.status_code == 404:  # noqa: PLR2004 - not found
        refused = Refused("not_found", "the hub has no such call. Is the URL right?")
    else:
        refused = Refused("bad_request", f"{request.method} is not for this: {error.detail}.", status=error.status_code)
    return Response(msgspec.json.encode(refused.refusal), refused.status, headers, "application/json")


async def _gone(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the framework's form
    """Whoever asked has left: nobody reads this."""
    return await _refused(request, Refused("bad_request", "the body ended early."))


async def _failed(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the framework's form
    """A bug of ours; the server logs it."""
    return await _refused(request, Refused("failed", "the hub failed; its log says how. Trying again may help."))
