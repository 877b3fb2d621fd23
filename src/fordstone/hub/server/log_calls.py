"""The calls that read and write the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from fordstone.hub.refused import Refused
from fordstone.hub.server.bodies import body_of, json_answer, name_of, no_content, number_of, seconds_of
from fordstone.hub.server.checks import (
    check_commit,
    check_names,
    check_run,
    check_time,
    decoded,
    holder_in,
    number_in,
    range_in,
)
from fordstone.hub.server.room import Room
from fordstone.hub.server.waiting import Waiting
from fordstone.hub.store import commits, control, streams
from fordstone.hub.store.base import LogReader
from fordstone.hub.store.log import HubLog, Key, Transaction

INLINE_BYTES_MAX: Final = 32 << 10
"""Bodies up to this size are decoded on the event loop: that takes less than handing them to a thread."""
PAGE_ENTRIES: Final = 1_000
VERSIONS_A_PAGE: Final = 1_000
TEXT_CHARS_MAX: Final = 2_000

T = TypeVar("T")


class LogCalls:
    """Called on the event loop."""

    def __init__(self, log: HubLog, waiting: Waiting, readers: Executor, room: Room, *, direct_url: str | None) -> None:
        self._log = log
        self._room = room
        self._waiting = waiting
        self._readers = readers
        self._direct_url = direct_url

    async def commit(self, request: Request) -> Response:
        """`POST /pipelines/{p}/nodes/{node}/epochs/{a}-{b}`."""
        pipeline, node = name_of(request, "pipeline"), name_of(request, "node")
        first, last = range_in(request.path_params["epochs"])
        self._room.for_epochs()
        body = await body_of(request)

        def prepared() -> commits.Prepared:
            commit = decoded(body, Commit)
            check_commit(commit, first, last)
            return commits.prepare(commit)

        ready = prepared() if len(body) <= INLINE_BYTES_MAX else await self._on_thread(prepared)
        committed = await self._write(lambda tx: commits.commit(tx, pipeline, node, ready))
        return json_answer(committed, 200 if committed.already else 201)

    async def lease(self, request: Request) -> Response:
        """`POST /pipelines/{p}/nodes/{node}/lease`."""
        pipeline, node = name_of(request, "pipeline"), name_of(request, "node")
        asked = decoded(await body_of(request), LeaseRequest)
        holder_in(asked.holder, "holder")
        number_in(asked.local, "local")
        return json_answer(await self._write(lambda tx: commits.lease(tx, pipeline, node, asked)))

    async def head(self, request: Request) -> Response:
        """`GET /pipelines/{p}/nodes/{node}/head`."""
        pipeline, node = name_of(request, "pipeline"), name_of(request, "node")
        return json_answer(await self._read(lambda log: commits.head(log, pipeline, node)))

    async def checkpoint(self, request: Request) -> Response:
        """`GET /pipelines/{p}/nodes/{node}/checkpoint`."""
        pipeline, node = name_of(request, "pipeline"), name_of(request, "node")
        return json_answer(await self._read(lambda log: commits.newest_checkpoint(log, pipeline, node)))

    async def stream_page(self, request: Request) -> Response:
        """`GET /pipelines/{p}/streams/{s}/epochs` (long poll)."""
        pipeline, stream = name_of(request, "pipeline"), name_of(request, "stream")
        after = number_of(request, "after", 0)
        limit = max(number_of(request, "limit", PAGE_ENTRIES, most=PAGE_ENTRIES_MAX), 1)
        page = await self._poll(
            request,
            ("stream", pipeline, stream),
            lambda log: streams.page(log, pipeline, stream, after=after, limit=limit),
            lambda page: bool(page.epochs),
        )
        return await self._answer(msgspec.structs.replace(page, blobs=self._direct_url))

    async def control_page(self, request: Request) -> Response:
        """`GET /pipelines/{p}/control/{name}` (long poll)."""
        pipeline, name = name_of(request, "pipeline"), name_of(request, "control")
        after = number_of(request, "after", 0)
        page = await self._poll(
            request,
            ("control", pipeline, name),
            lambda log: control.page(log, pipeline, name, after=after, limit=VERSIONS_A_PAGE),
            lambda page: bool(page.versions),
        )
        return await self._answer(msgspec.structs.replace(page, blobs=self._direct_url))

    async def publish(self, request: Request) -> Response:
        """`POST /pipelines/{p}/control/{name}`."""
        pipeline, name = name_of(request, "pipeline"), name_of(request, "control")
        body = decoded(await body_of(request), ControlPublish)
        holder_in(body.owner, "owner")
        number_in(body.batch, "batch")
        check_run(body.blob)
        version, new = await self._write(lambda tx: control.publish(tx, pipeline, name, body))
        return json_answer(version, 201 if new else 200)

    async def keep_position(self, request: Request) -> Response:
        """`PUT /pipelines/{p}/consumers/{c}`."""
        pipeline, consumer = name_of(request, "pipeline"), name_of(request, "consumer")
        position = decoded(await body_of(request), ConsumerPosition)
        check_names(position.streams, "stream")
        for nodes in position.streams.values():
            if len(nodes) > PAGE_ENTRIES_MAX:
                raise Refused(
                    "bad_request", f"more than {PAGE_ENTRIES_MAX} nodes of one stream: send them in several calls."
                )
            for node, epoch in nodes.items():
                check_names((node,), "node")
                number_in(epoch, "epoch")
        await self._write(lambda tx: tx.log.save_position(pipeline, consumer, position, now_us=tx.now_us))
        return no_content()

    async def positions(self, request: Request) -> Response:
        """`GET /pipelines/{p}/consumers/{c}`."""
        pipeline, consumer = name_of(request, "pipeline"), name_of(request, "consumer")
        return json_answer(await self._read(lambda log: streams.positions(log, pipeline, consumer)))

    async def forget_consumer(self, request: Request) -> Response:
        """`DELETE /pipelines/{p}/consumers/{c}`: segments no longer wait for it."""
        pipeline, consumer = name_of(request, "pipeline"), name_of(request, "consumer")
        await self._write(lambda tx: tx.log.remove_consumer(pipeline, consumer))
        return no_content()

    async def keep_health(self, request: Request) -> Response:
        """`PUT /nodes/{node}/health/{pipeline}`."""
        pipeline, node = name_of(request, "pipeline"), name_of(request, "node")
        health = decoded(await body_of(request), Health)
        check_time(health.sent_us, "sent_us")
        for what in ("epoch", "rows_in", "rows_late", "outbox_epochs", "outbox_bytes", "restarts"):
            number_in(getattr(health, what), what)
        if health.watermark_us is not None:
            check_time(health.watermark_us, "watermark_us")
        kept = msgspec.structs.replace(health, problem=_shown(health.problem), version=_shown(health.version))
        await self._write(lambda tx: tx.log.save_health(pipeline, node, kept, now_us=tx.now_us))
        return no_content()

    async def nodes(self, request: Request) -> Response:  # noqa: ARG002 - the framework's form
        """`GET /nodes`."""
        return await self._answer(Nodes(nodes=await self._read(lambda log: log.nodes())))

    async def streams(self, request: Request) -> Response:  # noqa: ARG002 - the framework's form
        """`GET /streams`."""
        return await self._answer(Streams(streams=await self._read(lambda log: log.streams())))

    async def epochs(self, request: Request) -> Response:
        """`GET /epochs?pipeline=&node=&limit=`."""
        pipeline, node = request.query_params.get("pipeline"), request.query_params.get("node")
        check_names([name for name in (pipeline, node) if name is not None], "name")
        limit = number_of(request, "limit", 100, most=PAGE_ENTRIES_MAX)
        found = await self._read(lambda log: log.epochs(pipeline=pipeline, node=node, limit=limit))
        return await self._answer(Epochs(epochs=found))

    async def healthz(self, request: Request) -> Response:  # noqa: ARG002 - the framework's form
        """`GET /healthz`: the log can be read."""
        await self._read(lambda log: log.newest_seq())
        return json_answer({"ok": True})

    async def _poll(self, request: Request, key: Key, query: Callable[[LogReader], T], found: Callable[[T], bool]) -> T:
        """Ask until there is something, the time is over, the asker has left, or the hub stops."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds_of(request)
        with self._waiting.on(key) as event:
            leaving: asyncio.Task[None] | None = None
            try:
                while True:
                    event.clear()
                    answer = await self._read(query)
                    if found(answer) or loop.time() >= until or self._waiting.ended:
                        return answer
                    leaving = leaving or asyncio.create_task(_left(request))
                    news = asyncio.create_task(event.wait())
                    await asyncio.wait(
                        {news, leaving}, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED
                    )
                    news.cancel()
                    if leaving.done():
                        return answer
            finally:
                if leaving is not None:
                    leaving.cancel()

    async def _answer(self, message: Message) -> Response:
        """What may be long is encoded on a thread."""
        return await self._on_thread(lambda: json_answer(message))

    async def _write(self, job: Callable[[Transaction], T]) -> T:
        return await asyncio.wrap_future(self._log.write(job))

    async def _read(self, query: Callable[[LogReader], T]) -> T:
        return await self._on_thread(lambda: self._log.read(query))

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)


async def _left(request: Request) -> None:
    """Ends when the asker has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _shown(text: str) -> str:
    """A node's words, bounded, and without what would command the terminal of whoever lists the nodes."""
    return "".join(char if char.isprintable() else " " for char in text[:TEXT_CHARS_MAX])
