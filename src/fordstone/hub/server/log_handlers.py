"""Handlers of the routes that read and write the log, and long polls.

The event loop is never blocked: the log is read on a small pool of threads and written on its own thread. A long poll
registers before it reads, so that it misses no change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fordstone.hub.messages import (
    PAGE_ENTRIES_MAX,
    Commit,
    ConsumerPosition,
    ControlPublish,
    Epochs,
    Health,
    LeaseRequest,
    Message,
    Nodes,
    Streams,
)
from fordstone.hub.rejection import Rejection
from fordstone.hub.server.checks import (
    check_commit,
    check_names,
    check_run,
    check_time,
    decoded,
    holder_in,
    integer_in_query,
    json_response,
    number_in,
    range_in,
    wait_in_query,
)
from fordstone.hub.server.limits import DiskQuota
from fordstone.hub.store import commits, control, streams
from fordstone.hub.store.base import LogReader
from fordstone.hub.store.log import HubLog, Key, Transaction

INLINE_BYTES_MAX: Final = 32 << 10
"""Bodies up to this size are decoded on the event loop, which is quicker than handing them to a thread."""
PAGE_ENTRIES: Final = 1_000
VERSIONS_PER_PAGE: Final = 1_000
TEXT_CHARS_MAX: Final = 2_000

T = TypeVar("T")


class LongPolls:
    """Wakes handlers when the log changes. Everything but `notify` and `end` is called on the event loop."""

    def __init__(self) -> None:
        self._events: dict[Key, set[asyncio.Event]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = False

    def begin(self) -> None:
        """Called once, on the event loop, before the first request."""
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def on(self, key: Key) -> Iterator[asyncio.Event]:
        """Give an event that is set when `key` changes, or at the end."""
        event = asyncio.Event()
        if self.ended:
            event.set()
        self._events.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            events = self._events[key]
            events.discard(event)
            if not events:
                del self._events[key]

    def notify(self, keys: frozenset[Key]) -> None:
        """Wake those that wait for one of these. Called from any thread."""
        self._call(lambda: self._wake(keys))

    def end(self) -> None:
        """Wake all, for good. Called from any thread when the hub stops, so that no poll delays it."""
        self.ended = True
        self._call(lambda: self._wake(None))

    def _call(self, wake: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wake)

    def _wake(self, keys: frozenset[Key] | None) -> None:
        for key in list(self._events) if keys is None else keys:
            for event in self._events.get(key, ()):
                event.set()


class LogHandlers:
    """Called on the event loop."""

    def __init__(
        self, log: HubLog, polls: LongPolls, readers: Executor, quota: DiskQuota, *, direct_url: str | None
    ) -> None:
        self._log = log
        self._quota = quota
        self._polls = polls
        self._readers = readers
        self._direct_url = direct_url

    async def commit(self, request: Request) -> Response:
        """`POST /pipelines/{p}/nodes/{node}/epochs/{a}-{b}`."""
        pipeline, node = request.path_params["pipeline"], request.path_params["node"]
        first, last = range_in(request.path_params["epochs"])
        self._quota.check_epochs()
        body = await request.body()

        def prepared() -> commits.Prepared:
            commit = decoded(body, Commit)
            check_commit(commit, first, last)
            return commits.prepare(commit)

        ready = prepared() if len(body) <= INLINE_BYTES_MAX else await self._on_thread(prepared)
        committed = await self._write(lambda tx: commits.commit(tx, pipeline, node, ready))
        return json_response(committed, 200 if committed.already else 201)

    async def lease(self, request: Request) -> Response:
        """`POST /pipelines/{p}/nodes/{node}/lease`."""
        pipeline, node = request.path_params["pipeline"], request.path_params["node"]
        asked = decoded(await request.body(), LeaseRequest)
        holder_in(asked.holder, "holder")
        number_in(asked.local, "local")
        return json_response(await self._write(lambda tx: commits.lease(tx, pipeline, node, asked)))

    async def head(self, request: Request) -> Response:
        """`GET /pipelines/{p}/nodes/{node}/head`."""
        pipeline, node = request.path_params["pipeline"], request.path_params["node"]
        return json_response(await self._read(lambda log: commits.head(log, pipeline, node)))

    async def checkpoint(self, request: Request) -> Response:
        """`GET /pipelines/{p}/nodes/{node}/checkpoint`."""
        pipeline, node = request.path_params["pipeline"], request.path_params["node"]
        return json_response(await self._read(lambda log: commits.newest_checkpoint(log, pipeline, node)))

    async def stream_page(self, request: Request) -> Response:
        """`GET /pipelines/{p}/streams/{s}/epochs` (long poll)."""
        pipeline, stream = request.path_params["pipeline"], request.path_params["stream"]
        after = integer_in_query(request, "after", 0)
        limit = max(integer_in_query(request, "limit", PAGE_ENTRIES, most=PAGE_ENTRIES_MAX), 1)
        page = await self._poll(
            request,
            ("stream", pipeline, stream),
            lambda log: streams.page(log, pipeline, stream, after=after, limit=limit),
            lambda page: bool(page.epochs),
        )
        return await self._encode(msgspec.structs.replace(page, blobs=self._direct_url))

    async def control_page(self, request: Request) -> Response:
        """`GET /pipelines/{p}/control/{name}` (long poll)."""
        pipeline, name = request.path_params["pipeline"], request.path_params["control"]
        after = integer_in_query(request, "after", 0)
        page = await self._poll(
            request,
            ("control", pipeline, name),
            lambda log: control.page(log, pipeline, name, after=after, limit=VERSIONS_PER_PAGE),
            lambda page: bool(page.versions),
        )
        return await self._encode(msgspec.structs.replace(page, blobs=self._direct_url))

    async def publish(self, request: Request) -> Response:
        """`POST /pipelines/{p}/control/{name}`."""
        pipeline, name = request.path_params["pipeline"], request.path_params["control"]
        body = decoded(await request.body(), ControlPublish)
        holder_in(body.owner, "owner")
        number_in(body.batch, "batch")
        check_run(body.blob)
        version, new = await self._write(lambda tx: control.publish(tx, pipeline, name, body))
        return json_response(version, 201 if new else 200)

    async def save_position(self, request: Request) -> Response:
        """`PUT /pipelines/{p}/consumers/{c}`."""
        pipeline, consumer = request.path_params["pipeline"], request.path_params["consumer"]
        position = decoded(await request.body(), ConsumerPosition)
        check_names(position.streams, "stream")
        for nodes in position.streams.values():
            if len(nodes) > PAGE_ENTRIES_MAX:
                raise Rejection(
                    "bad_request", f"more than {PAGE_ENTRIES_MAX} nodes of one stream: send them in several calls."
                )
            for node, epoch in nodes.items():
                check_names((node,), "node")
                number_in(epoch, "epoch")
        await self._write(lambda tx: tx.log.save_position(pipeline, consumer, position, now_us=tx.now_us))
        return Response(status_code=204)

    async def positions(self, request: Request) -> Response:
        """`GET /pipelines/{p}/consumers/{c}`."""
        pipeline, consumer = request.path_params["pipeline"], request.path_params["consumer"]
        return json_response(await self._read(lambda log: streams.positions(log, pipeline, consumer)))

    async def remove_consumer(self, request: Request) -> Response:
        """`DELETE /pipelines/{p}/consumers/{c}`: its positions no longer hold segments."""
        pipeline, consumer = request.path_params["pipeline"], request.path_params["consumer"]
        await self._write(lambda tx: tx.log.remove_consumer(pipeline, consumer))
        return Response(status_code=204)

    async def save_health(self, request: Request) -> Response:
        """`PUT /nodes/{node}/health/{pipeline}`."""
        pipeline, node = request.path_params["pipeline"], request.path_params["node"]
        health = decoded(await request.body(), Health)
        check_time(health.sent_us, "sent_us")
        for what, number in msgspec.structs.asdict(health.progress).items():
            if number is not None:
                (check_time if what == "watermark_us" else number_in)(number, what)
        kept = msgspec.structs.replace(health, problem=_printable(health.problem), version=_printable(health.version))
        await self._write(lambda tx: tx.log.save_health(pipeline, node, kept, now_us=tx.now_us))
        return Response(status_code=204)

    async def nodes(self, request: Request) -> Response:  # noqa: ARG002 - the framework's form
        """`GET /nodes`."""
        return await self._encode(Nodes(nodes=await self._read(lambda log: log.nodes())))

    async def streams(self, request: Request) -> Response:  # noqa: ARG002 - the framework's form
        """`GET /streams`."""
        return await self._encode(Streams(streams=await self._read(lambda log: log.streams())))

    async def epochs(self, request: Request) -> Response:
        """`GET /epochs?pipeline=&node=&limit=`."""
        pipeline, node = request.query_params.get("pipeline"), request.query_params.get("node")
        check_names([name for name in (pipeline, node) if name is not None], "name")
        limit = integer_in_query(request, "limit", 100, most=PAGE_ENTRIES_MAX)
        found = await self._read(lambda log: log.epochs(pipeline=pipeline, node=node, limit=limit))
        return await self._encode(Epochs(epochs=found))

    async def healthz(self, request: Request) -> Response:  # noqa: ARG002 - the framework's form
        """`GET /healthz`: the log can be read."""
        await self._read(lambda log: log.newest_seq())
        return json_response({"ok": True})

    async def _poll(self, request: Request, key: Key, query: Callable[[LogReader], T], found: Callable[[T], bool]) -> T:
        """Read until there is something, the time is over, the client has disconnected, or the hub stops."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_in_query(request)
        with self._polls.on(key) as event:
            leaving: asyncio.Task[None] | None = None
            try:
                while True:
                    event.clear()
                    answer = await self._read(query)
                    if found(answer) or loop.time() >= until or self._polls.ended:
                        return answer
                    leaving = leaving or asyncio.create_task(_disconnected(request))
                    change = asyncio.create_task(event.wait())
                    await asyncio.wait(
                        {change, leaving}, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED
                    )
                    change.cancel()
                    if leaving.done():
                        return answer
            finally:
                if leaving is not None:
                    leaving.cancel()

    async def _encode(self, message: Message) -> Response:
        """Encode on a thread what may be long."""
        return await self._on_thread(lambda: json_response(message))

    async def _write(self, job: Callable[[Transaction], T]) -> T:
        return await asyncio.wrap_future(self._log.write(job))

    async def _read(self, query: Callable[[LogReader], T]) -> T:
        return await self._on_thread(lambda: self._log.read(query))

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)


async def _disconnected(request: Request) -> None:
    """End when the client has closed the connection, or sends what it may not."""
    with contextlib.suppress(Rejection):
        while (await request.receive())["type"] != "http.disconnect":
            pass


def _printable(text: str) -> str:
    """Bound a text that a node sent, and remove what would control the terminal in which it is listed."""
    return "".join(char if char.isprintable() else " " for char in text[:TEXT_CHARS_MAX])
