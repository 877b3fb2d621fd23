"""Handlers of the routes, which `routes` lists: they read and write the log, upload and download blobs.

The event loop is never blocked: the log is read and blobs are touched on small pools of threads, the log is written on its own.
A long poll registers before it reads, so that it misses no change. A request that ends early leaves nothing stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import IO, Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fordstone.hub.messages import (
    PAGE_ENTRIES_MAX,
    Commit,
    ConsumerPosition,
    ControlPublish,
    Digests,
    Epochs,
    Health,
    LeaseRequest,
    Message,
    Nodes,
    Rejection,
    Streams,
)
from fordstone.hub.server.checks import (
    check_commit,
    check_names,
    check_run,
    check_time,
    decoded,
    digest_in,
    holder_in,
    integer_in_query,
    number_in,
    range_in,
    wait_in_query,
)
from fordstone.hub.server.limits import DiskQuota
from fordstone.hub.server.metrics import CONTENT_TYPE, LogMetrics
from fordstone.hub.store import commits
from fordstone.hub.store.blobs import CHUNK_BYTES, BlobStore, Gate, Upload
from fordstone.hub.store.log import HubLog, Key, Transaction
from fordstone.hub.store.sqlite import LogReader
from fordstone.storage.failpoint import Failpoints, NoFailpoints

INLINE_BYTES_MAX: Final = 32 << 10
"""Bodies up to this size are decoded on the event loop, which is quicker than handing them to a thread."""
SMALL_BYTES_MAX: Final = 16 << 10
"""Blobs up to this size are kept in the log, and not in the blob store.

A file costs two syncs, an object in a store a round trip; a row costs a share of a sync that happens anyway. Most blobs that
nodes send are small, so this decides how many nodes a hub can serve. Readers that access the blob store directly do not find
them there, and ask the hub.
"""
PAGE_ENTRIES: Final = 1_000
VERSIONS_PER_PAGE: Final = 1_000
TEXT_CHARS_MAX: Final = 2_000
DIGESTS_MAX: Final = 100_000
BLOB_TYPE: Final = "application/octet-stream"

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


class Handlers:
    """Called on the event loop, with the names in the path as arguments."""

    def __init__(
        self,
        log: HubLog,
        blobs: BlobStore,
        gate: Gate,
        polls: LongPolls,
        quota: DiskQuota,
        metrics: LogMetrics,
        *,
        readers: Executor,
        blob_threads: Executor,
        direct_url: str | None,
        small_bytes_max: int,
        failpoints: Failpoints | None,
    ) -> None:
        self._log = log
        self._blobs = blobs
        self._gate = gate
        self._polls = polls
        self._quota = quota
        self._metrics = metrics
        self._readers = readers
        self._blob_threads = blob_threads
        self._direct_url = direct_url
        self._small_bytes_max = small_bytes_max
        self._failpoints = failpoints or NoFailpoints()

    # The log.

    async def commit(self, request: Request, pipeline: str, node: str, epochs: str) -> Response:
        first, last = range_in(epochs)
        self._quota.check_epochs()
        body = await request.body()

        def prepared() -> tuple[Commit, list[str]]:
            commit = decoded(body, Commit)
            check_commit(commit, first, last)
            return commit, [entry.digest() for entry in commit.epochs]

        commit, digests = prepared() if len(body) <= INLINE_BYTES_MAX else await self._on_reader(prepared)
        committed = await self._write(lambda tx: commits.commit(tx, pipeline, node, commit, digests))
        return json_response(committed, 200 if committed.already else 201)

    async def lease(self, request: Request, pipeline: str, node: str) -> Response:
        asked = decoded(await request.body(), LeaseRequest)
        holder_in(asked.holder, "holder")
        number_in(asked.local, "local")
        return json_response(await self._write(lambda tx: commits.lease(tx, pipeline, node, asked)))

    async def head(self, _: Request, pipeline: str, node: str) -> Response:
        return json_response(await self._read(lambda log: commits.head(log, pipeline, node)))

    async def checkpoint(self, _: Request, pipeline: str, node: str) -> Response:
        return json_response(await self._read(lambda log: commits.newest_checkpoint(log, pipeline, node)))

    async def stream_page(self, request: Request, pipeline: str, stream: str) -> Response:
        after = integer_in_query(request, "after", 0)
        limit = max(integer_in_query(request, "limit", PAGE_ENTRIES, most=PAGE_ENTRIES_MAX), 1)
        page = await self._poll(
            request,
            ("stream", pipeline, stream),
            lambda log: commits.stream_page(log, pipeline, stream, after=after, limit=limit),
            lambda page: bool(page.epochs),
        )
        return await self._encode(msgspec.structs.replace(page, blobs=self._direct_url))

    async def control_page(self, request: Request, pipeline: str, control: str) -> Response:
        after = integer_in_query(request, "after", 0)
        page = await self._poll(
            request,
            ("control", pipeline, control),
            lambda log: commits.control_page(log, pipeline, control, after=after, limit=VERSIONS_PER_PAGE),
            lambda page: bool(page.versions),
        )
        return await self._encode(msgspec.structs.replace(page, blobs=self._direct_url))

    async def publish(self, request: Request, pipeline: str, control: str) -> Response:
        body = decoded(await request.body(), ControlPublish)
        holder_in(body.owner, "owner")
        number_in(body.batch, "batch")
        check_run(body.blob)
        version, new = await self._write(lambda tx: commits.publish(tx, pipeline, control, body))
        return json_response(version, 201 if new else 200)

    async def save_position(self, request: Request, pipeline: str, consumer: str) -> Response:
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

    async def position(self, _: Request, pipeline: str, consumer: str) -> Response:
        return json_response(await self._read(lambda log: commits.position(log, pipeline, consumer)))

    async def remove_consumer(self, _: Request, pipeline: str, consumer: str) -> Response:
        """Its positions no longer hold segments."""
        await self._write(lambda tx: tx.log.remove_consumer(pipeline, consumer))
        return Response(status_code=204)

    async def save_health(self, request: Request, pipeline: str, node: str) -> Response:
        health = decoded(await request.body(), Health)
        check_time(health.sent_us, "sent_us")
        for what, number in msgspec.structs.asdict(health.progress).items():
            if number is not None:
                (check_time if what == "watermark_us" else number_in)(number, what)
        kept = msgspec.structs.replace(health, problem=_printable(health.problem), version=_printable(health.version))
        await self._write(lambda tx: tx.log.save_health(pipeline, node, kept, now_us=tx.now_us))
        return Response(status_code=204)

    async def nodes(self, _: Request) -> Response:
        return await self._encode(Nodes(nodes=await self._read(lambda log: log.nodes())))

    async def streams(self, _: Request) -> Response:
        return await self._encode(Streams(streams=await self._read(lambda log: log.streams())))

    async def epochs(self, request: Request) -> Response:
        pipeline, node = request.query_params.get("pipeline"), request.query_params.get("node")
        check_names([name for name in (pipeline, node) if name is not None], "name")
        limit = integer_in_query(request, "limit", 100, most=PAGE_ENTRIES_MAX)
        found = await self._read(lambda log: log.epochs(pipeline=pipeline, node=node, limit=limit))
        return await self._encode(Epochs(epochs=found))

    async def healthz(self, _: Request) -> Response:
        """Answer if the log can be read."""
        await self._read(lambda log: log.newest_seq())
        return json_response({"ok": True})

    async def metrics(self, _: Request) -> Response:
        return Response(await self._metrics.render(), headers={"content-type": CONTENT_TYPE})

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
        return await self._on_reader(lambda: json_response(message))

    async def _write(self, job: Callable[[Transaction], T]) -> T:
        return await asyncio.wrap_future(self._log.write(job))

    async def _read(self, query: Callable[[LogReader], T]) -> T:
        return await self._on_reader(lambda: self._log.read(query))

    async def _on_reader(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    # Blobs.

    async def put_blob(self, request: Request, digest: str) -> Response:
        """201: stored; 200: it was there already (what came is checked all the same)."""
        self._quota.check_blob()
        upload = Upload(self._blobs.beside())
        writing: asyncio.Future[None] | None = None
        try:
            parts, held_bytes, size_bytes = list[bytes](), 0, 0
            async for part in request.stream():
                size_bytes += len(part)
                parts.append(part)
                held_bytes += len(part)
                if held_bytes >= CHUNK_BYTES:
                    if writing is not None:
                        await asyncio.shield(writing)
                    # The next piece comes while this one is hashed and written.
                    writing = self._start(partial(upload.write, *parts))
                    parts, held_bytes = [], 0
            if writing is not None:
                await asyncio.shield(writing)
            if size_bytes <= self._small_bytes_max:
                upload.write(*parts)
                new = await self._keep_small(upload, digest)
            else:
                new = await self._on_thread(lambda: self._store(upload, digest, parts))
        finally:
            if writing is not None:
                await _finish(writing)
            upload.close()
        return Response(status_code=201 if new else 200)

    async def head_blob(self, _: Request, digest: str) -> Response:
        """Answer whether a commit may name it."""
        sizes = await self._on_thread(lambda: self._log.blob_sizes((digest,)))
        if digest not in sizes:
            raise Rejection("not_found", f"the hub has no blob {digest}.")
        return Response(headers={"content-length": str(sizes[digest])}, media_type=BLOB_TYPE)

    async def get_blob(self, _: Request, digest: str) -> Response:
        def begin() -> tuple[IO[bytes], bytes, int]:
            small = self._log.read(lambda log: log.small_blob(digest))
            file = self._blobs.open(digest) if small is None else io.BytesIO(small)
            first = file.read(CHUNK_BYTES)
            size_bytes = len(first)
            if size_bytes == CHUNK_BYTES:
                size_bytes = file.seek(0, 2)
                file.seek(len(first))
            else:
                file.close()
            return file, first, size_bytes

        file, first, size_bytes = await self._on_thread(begin)
        if file.closed:
            return Response(first, media_type=BLOB_TYPE)
        return StreamingResponse(
            self._rest(file, first), headers={"content-length": str(size_bytes)}, media_type=BLOB_TYPE
        )

    async def missing_blobs(self, request: Request) -> Response:
        body = await request.body()

        def answer() -> Response:
            asked = decoded(body, Digests)
            if len(asked.digests) > DIGESTS_MAX:
                raise Rejection("bad_request", f"more than {DIGESTS_MAX} digests: ask in several requests.")
            for digest in asked.digests:
                digest_in(digest)
            sizes = self._log.blob_sizes(asked.digests)
            return json_response(Digests(digests=tuple(digest for digest in asked.digests if digest not in sizes)))

        return await self._on_thread(answer)

    async def _keep_small(self, upload: Upload, digest: str) -> bool:
        """Keep it in the log, in the same transaction as everything else that is written now."""
        upload.verify(digest)
        self._failpoints.hit("hub.blob-written")
        data = bytes(upload.data)
        new = await self._write(lambda tx: tx.log.save_small_blob(digest, data, now_us=tx.now_us))
        self._failpoints.hit("hub.blob-renamed")
        return new

    def _store(self, upload: Upload, digest: str, rest: list[bytes]) -> bool:
        upload.write(*rest)
        with self._gate.arrival(digest):
            new = upload.store(self._blobs, digest)
            self._log.record_blob(digest, upload.size_bytes)
        return new

    async def _rest(self, file: IO[bytes], first: bytes) -> AsyncIterator[bytes]:
        try:
            data = first
            while data:
                yield data
                data = await self._on_thread(lambda: file.read(CHUNK_BYTES))
        finally:
            file.close()

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Run work to its end even if the request is cancelled, because the work uses the upload."""
        working = self._start(work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait({working})
            raise

    def _start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._blob_threads, work)


async def _finish(writing: asyncio.Future[None]) -> None:
    """Wait until a thread is done. Whether it failed was raised before, or does not matter any more."""
    await asyncio.wait({writing})
    if not writing.cancelled():
        writing.exception()


async def _disconnected(request: Request) -> None:
    """End when the client has closed the connection, or sends what it may not."""
    with contextlib.suppress(Rejection):
        while (await request.receive())["type"] != "http.disconnect":
            pass


def _printable(text: str) -> str:
    """Bound a text that a node sent, and remove what would control the terminal in which it is listed."""
    return "".join(char if char.isprintable() else " " for char in text[:TEXT_CHARS_MAX])


def json_response(message: Any, status: int = 200) -> Response:
    """Encode a message as the body of a response."""
    return Response(msgspec.json.encode(message), status, media_type="application/json")
