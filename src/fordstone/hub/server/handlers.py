"""Handlers of the routes, which `routes` lists: they read and write the log, upload and download blobs.

The event loop is never blocked: the log is read and blobs are touched on small pools of threads, the log is written on its own.
A long poll registers before it reads, so that it misses no change. A request that ends early leaves nothing stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fordstone.epochs.run_file import is_digest
from fordstone.errors import PipelineError
from fordstone.hub.messages import (
    BLOB_BYTES_MAX,
    EPOCHS_PER_COMMIT_MAX,
    LIST_ROWS_MAX,
    LIST_STREAMS_MAX,
    NUMBER_MAX,
    PAGE_ENTRIES_MAX,
    POSITIONS_PER_REQUEST_MAX,
    REASON_CHARS_MAX,
    RUNS_PER_COMMIT_MAX,
    WAIT_SECONDS_MAX,
    Acknowledged,
    Commit,
    ConsumerPosition,
    ControlPublish,
    DamagedBlob,
    DamagedBlobs,
    Digests,
    Epochs,
    EpochsRequest,
    ForgetRequest,
    Health,
    LeaseRequest,
    Message,
    Nodes,
    QuarantineRequest,
    Rejection,
    ScrubPage,
    SkipRequest,
    Streams,
)
from fordstone.hub.server.auth import TOKEN, Token
from fordstone.hub.server.health import HubHealth
from fordstone.hub.server.limits import DiskQuota
from fordstone.hub.server.metrics import CONTENT_TYPE, HubMetrics, LogMetrics
from fordstone.hub.server.uploads import NodeUploads
from fordstone.hub.store import commits, controls, forget, quarantine
from fordstone.hub.store.blobs import CHUNK_BYTES, BlobLocks, BlobStore, Stored, Upload
from fordstone.hub.store.log import HubLog, Key, Transaction
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_schema import SEGMENT_LOG_BYTES
from fordstone.hub.store.scrub import Scrub
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan.ids import checked_name
from fordstone.state.base import RunRef
from fordstone.storage.failpoint import Failpoints

INLINE_BYTES_MAX: Final = 32 << 10
"""Bodies up to this size are decoded on the event loop, which is quicker than handing them to a thread."""
SMALL_BYTES_MAX: Final = 16 << 10
"""Blobs up to this size are kept in the log, and not in the blob store.

A file costs two syncs, an object in a store a round trip; a row costs a share of a sync that happens anyway. Most blobs that
nodes send are small, so this decides how many nodes a hub can serve. Readers that access the blob store directly do not find
them there, and ask the hub.
"""
LOG_SECONDS_MAX: Final = 60.0
"""Timeout for reading or writing the log."""
PAGE_ENTRIES: Final = 1_000
VERSIONS_PER_PAGE: Final = 1_000
TEXT_CHARS_MAX: Final = 2_000
VERSION_CHARS_MAX: Final = 100
SEGMENTS_PER_COMMIT_MAX: Final = 20_000
"""Each costs the one writing thread some rows, even if it has no run."""
OBJECTS_PER_COMMIT_MAX: Final = 3 + 3 * EPOCHS_PER_COMMIT_MAX + SEGMENTS_PER_COMMIT_MAX + RUNS_PER_COMMIT_MAX
"""Maximum number of JSON objects in a commit within these bounds. Decoded, an empty one takes ten times its bytes."""
MEMBERS_PER_COMMIT_MAX: Final = 300_000
"""Maximum number of names with a value in a commit. The largest single epoch has half of them. Decoding takes about a microsecond per name, and
nothing else runs meanwhile."""
_DIGITS_MAX: Final = 19
_RANGE: Final = re.compile(r"([1-9][0-9]{0,17})-([1-9][0-9]{0,17})")
BLOB_TYPE: Final = "application/octet-stream"
DAMAGED_LISTED: Final = 50
"""Damaged blobs on one page: for each page all segments are read."""
REFERENCES_LISTED: Final = 10
_events = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """Called on the event loop, with the names in the path as arguments."""

    log: HubLog
    blobs: BlobStore
    locks: BlobLocks
    polls: LongPolls
    quota: DiskQuota
    health: HubHealth
    uploads: NodeUploads
    scrub: Scrub
    metrics: HubMetrics
    log_metrics: LogMetrics
    readers: Executor
    """For what may take long: pages, lists, positions of many nodes, large bodies."""
    quick_readers: Executor
    """For what nodes wait for."""
    blob_threads: Executor
    direct_url: str | None
    small_bytes_max: int
    failpoints: Failpoints

    # The log.

    async def commit(self, request: Request, pipeline: str, node: str, epochs: str) -> Response:
        first, last = range_in(epochs)
        self.quota.check_epochs()
        body = await request.body()
        check_parts(body)

        def prepared() -> tuple[Commit, list[str]]:
            commit = decoded(body, Commit)
            check_commit(commit, first, last)
            return commit, [entry.digest() for entry in commit.epochs]

        commit, digests = prepared() if len(body) <= INLINE_BYTES_MAX else await self._on_reader(prepared)
        uploader = node_of(request)
        if uploader is None:
            committed = await self._write(lambda tx: commits.commit(tx, pipeline, node, commit, digests))
        else:
            named = {run.digest for run in runs_of(commit)}
            foreign = {digest for digest in named if not self.uploads.has(uploader, digest)}
            # The body has all that the log will have of the runs.
            log_bytes = len(body) + SEGMENT_LOG_BYTES * sum(len(entry.streams) for entry in commit.epochs)
            await self._read_bytes(uploader, log_bytes)
            with self.uploads.coming(uploader, log_bytes):
                committed = await self._write(
                    lambda tx: commits.commit(tx, pipeline, node, commit, digests, foreign=foreign)
                )
            self.uploads.commit(uploader, named, log_bytes=0 if committed.already else log_bytes)
        return json_response(committed, 200 if committed.already else 201)

    async def _read_bytes(self, node: str, size_bytes: int) -> None:
        """Find out what a node has at the hub, if that is not known well enough to take more."""
        if self.uploads.is_unread(node, size_bytes):
            self.uploads.read(node, await self._read_own(node, lambda: self.log.read(lambda log: log.node_bytes(node))))

    async def lease(self, request: Request, pipeline: str, node: str) -> Response:
        asked = decoded(await request.body(), LeaseRequest)
        return json_response(await self._write(lambda tx: commits.lease(tx, pipeline, node, asked)))

    async def head(self, _: Request, pipeline: str, node: str) -> Response:
        return json_response(await self._read_quickly(lambda log: commits.head(log, pipeline, node)))

    async def checkpoint(self, _: Request, pipeline: str, node: str) -> Response:
        return json_response(await self._read_quickly(lambda log: commits.newest_checkpoint(log, pipeline, node)))

    async def stream_nodes(self, request: Request, pipeline: str, stream: str) -> Response:
        after = integer_in_query(request, "after", 0)
        limit = max(integer_in_query(request, "limit", PAGE_ENTRIES, most=PAGE_ENTRIES_MAX), 1)
        log_id = request.query_params.get("log")
        page = await self._poll(
            request,
            ("stream", pipeline, stream),
            lambda log: commits.stream_nodes(log, pipeline, stream, after=after, limit=limit, log_id=log_id),
            # A reader of another log has to know at once.
            lambda page: bool(page.nodes) or page.next < after,
        )
        return await self._encode(msgspec.structs.replace(page, blobs=self.direct_url))

    async def stream_epochs(self, request: Request, pipeline: str, stream: str) -> Response:
        asked = decoded(await request.body(), EpochsRequest)

        def respond() -> Response:
            found = self.log.read(lambda log: commits.stream_epochs(log, pipeline, stream, asked))
            return json_response(msgspec.structs.replace(found, blobs=self.direct_url))

        return await self._on_reader(respond)

    async def control_page(self, request: Request, pipeline: str, control: str) -> Response:
        after = integer_in_query(request, "after", 0)
        chain = digest_in_query(request, "chain") if "chain" in request.query_params else None
        page = await self._poll(
            request,
            ("control", pipeline, control),
            lambda log: controls.control_page(
                log, pipeline, control, after=after, chain=chain, limit=VERSIONS_PER_PAGE
            ),
            lambda page: bool(page.versions or page.restart),
        )
        return await self._encode(msgspec.structs.replace(page, blobs=self.direct_url))

    async def publish(self, request: Request, pipeline: str, control: str) -> Response:
        body = decoded(await request.body(), ControlPublish)
        check_runs((body.blob,))
        version, new = await self._write(lambda tx: controls.publish(tx, pipeline, control, body))
        return json_response(version, 201 if new else 200)

    async def save_position(self, request: Request, pipeline: str, consumer: str) -> Response:
        position = decoded(await request.body(), ConsumerPosition)
        count = sum(len(nodes) for nodes in position.streams.values())
        if count > POSITIONS_PER_REQUEST_MAX:
            raise Rejection(
                "bad_request",
                f"a request has at most {POSITIONS_PER_REQUEST_MAX} positions, this one {count}: send several.",
            )
        kept, refused = await self._read(lambda log: commits.check_positions(log, pipeline, position))
        await self._write(lambda tx: commits.save_position(tx, pipeline, consumer, kept))
        return json_response(Acknowledged(refused=refused))

    async def position(self, _: Request, pipeline: str, consumer: str) -> Response:
        return json_response(await self._read(lambda log: commits.position(log, pipeline, consumer)))

    async def remove_consumer(self, _: Request, pipeline: str, consumer: str) -> Response:
        """Its positions no longer hold segments."""
        await self._write(lambda tx: tx.log.remove_consumer(pipeline, consumer))
        return Response(status_code=204)

    async def quarantine(self, request: Request, pipeline: str, node: str) -> Response:
        asked = decoded(await request.body(), QuarantineRequest)
        asked = msgspec.structs.replace(asked, reason=_printable(asked.reason, REASON_CHARS_MAX))
        return json_response(await self._write(lambda tx: quarantine.quarantine(tx, pipeline, node, asked)))

    async def release(self, _: Request, pipeline: str, node: str) -> Response:
        return json_response(await self._write(lambda tx: quarantine.release(tx, pipeline, node)))

    async def skip(self, request: Request, pipeline: str, node: str) -> Response:
        asked = decoded(await request.body(), SkipRequest)
        return json_response(await self._write(lambda tx: quarantine.skip(tx, pipeline, node, asked)))

    async def forget_node(self, request: Request, pipeline: str, node: str) -> Response:
        asked = decoded(await request.body(), ForgetRequest)
        forgotten = await self._write(lambda tx: forget.forget_node(tx, pipeline, node, asked))
        self.uploads.read_again(node)
        return json_response(forgotten)

    async def forget_stream(self, request: Request, pipeline: str, stream: str) -> Response:
        asked = decoded(await request.body(), ForgetRequest)
        forgotten = await self._write(lambda tx: forget.forget_stream(tx, pipeline, stream, asked))
        self.uploads.read_again()
        return json_response(forgotten)

    async def save_health(self, request: Request, pipeline: str, node: str) -> Response:
        health = decoded(await request.body(), Health)
        for what, number in msgspec.structs.asdict(health.progress).items():
            if number is not None and not (TIME_MIN_US if what == "watermark_us" else 0) <= number <= NUMBER_MAX:
                raise Rejection("bad_request", f"{what} is {number}, which the log cannot hold.")
        kept = msgspec.structs.replace(
            health,
            problem=_printable(health.problem, TEXT_CHARS_MAX),
            version=_printable(health.version, VERSION_CHARS_MAX),
        )
        await self._write(lambda tx: commits.save_health(tx, pipeline, node, kept))
        return Response(status_code=204)

    async def nodes(self, request: Request) -> Response:
        pipeline, after = name_in_query(request, "pipeline"), names_in_query(request, "after")
        limit = limit_in_query(request, LIST_ROWS_MAX)
        found = await self._read(lambda log: log.nodes(pipeline=pipeline, after=after or ("", ""), limit=limit))
        last = f"{found[-1].pipeline}/{found[-1].node}" if len(found) == limit else None
        return await self._encode(Nodes(nodes=found, next=last))

    async def streams(self, request: Request) -> Response:
        after, limit = names_in_query(request, "after"), limit_in_query(request, LIST_STREAMS_MAX)
        found = await self._read(lambda log: log.streams(after=after or ("", ""), limit=limit))
        last = f"{found[-1].pipeline}/{found[-1].stream}" if len(found) == limit else None
        return await self._encode(Streams(streams=found, next=last))

    async def epochs(self, request: Request) -> Response:
        pipeline, node = name_in_query(request, "pipeline"), name_in_query(request, "node")
        after, limit = names_in_query(request, "after"), limit_in_query(request, LIST_ROWS_MAX)
        before = None if after is None else (whole_number("after", after[0]), whole_number("after", after[1]))
        found = await self._read(lambda log: log.epochs(pipeline=pipeline, node=node, before=before, limit=limit))
        last = f"{found[-1].seq}/{found[-1].epoch}" if len(found) == limit else None
        return await self._encode(Epochs(epochs=found, next=last))

    async def healthz(self, request: Request) -> Response:
        """Answer whether the hub can take data. Only callers with a token get the details of what is wrong."""
        problem = await self.health.problem()
        if problem is None:
            return json_response({"ok": True})
        details = f": {problem.details}" if problem.details and request.scope.get(TOKEN) is not None else "."
        raise Rejection("failed", f"the hub cannot take data: {problem.reason}{details}", status=503)

    async def render_metrics(self, _: Request) -> Response:
        return Response(await self.log_metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _poll(self, request: Request, key: Key, query: Callable[[LogReader], T], found: Callable[[T], bool]) -> T:
        """Read until there is something, the time is over, the client has disconnected, or the hub stops."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_in_query(request)
        with self.polls.on(key) as event:
            leaving: asyncio.Task[None] | None = None
            try:
                while True:
                    event.clear()
                    result = await self._read(query)
                    if found(result) or loop.time() >= until or self.polls.ended:
                        return result
                    leaving = leaving or asyncio.create_task(_disconnected(request))
                    change = asyncio.create_task(event.wait())
                    await asyncio.wait(
                        {change, leaving}, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED
                    )
                    change.cancel()
                    if leaving.done():
                        return result
            finally:
                if leaving is not None:
                    leaving.cancel()

    async def _encode(self, message: Message) -> Response:
        """Encode on a thread what may be long."""
        return await self._on_reader(lambda: json_response(message))

    async def _write(self, job: Callable[[Transaction], T]) -> T:
        return await _in_time(asyncio.wrap_future(self.log.write(job)))

    async def _read(self, query: Callable[[LogReader], T]) -> T:
        return await _in_time(self._on_reader(lambda: self.log.read(query)))

    async def _read_quickly(self, query: Callable[[LogReader], T]) -> T:
        """Read what a node waits for, and what takes a few lookups: it does not wait for what takes long."""
        reading = asyncio.get_running_loop().run_in_executor(self.quick_readers, lambda: self.log.read(query))
        return await _in_time(reading)

    async def _read_own(self, node: str, work: Callable[[], T]) -> T:
        """Read what takes the longer the more a node has at the hub: once at a time for each node, so that others do not wait for it."""

        async def in_turn() -> T:
            async with self.uploads.reading(node):
                return await self._on_thread(work)

        return await _in_time(in_turn())

    async def _on_reader(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.readers, work)

    async def scrub_piece(self, request: Request) -> Response:
        """Check some blobs, at once and at full speed."""
        after = digest_in_query(request, "after")
        found = await self._on_thread(lambda: self.scrub.piece(after))
        return json_response(
            ScrubPage(blobs=found.blobs, size_bytes=found.size_bytes, damaged=found.damaged, next=found.after)
        )

    async def damaged_blobs(self, request: Request) -> Response:
        after = digest_in_query(request, "after")

        def look(log: LogReader) -> DamagedBlobs:
            found = log.damaged_blobs(after=after, limit=DAMAGED_LISTED)
            places = log.blob_references([one.digest for one in found if one.refs], limit=REFERENCES_LISTED)
            blobs = tuple(
                DamagedBlob(
                    digest=one.digest,
                    size_bytes=one.size_bytes,
                    references=one.refs,
                    named_by=tuple(places.get(one.digest, ())),
                )
                for one in found
            )
            return DamagedBlobs(blobs=blobs, next=found[-1].digest if len(found) == DAMAGED_LISTED else None)

        return await self._encode(await self._read(look))

    # Blobs.

    async def put_blob(self, request: Request, digest: str) -> Response:
        """201: stored; 200: it was there already (what came is checked all the same). A node learns that of its own blobs only."""
        self.quota.check_blob()
        node = node_of(request)
        if node is None:
            stored, _ = await self._receive(request, digest)
            return Response(status_code=200 if stored is Stored.KNOWN else 201)
        announced_bytes = int(request.headers.get("content-length", BLOB_BYTES_MAX))
        await self._read_bytes(node, announced_bytes)
        with self.uploads.upload(node, announced_bytes):
            stored, size_bytes = await self._receive(request, digest)
            known = self.uploads.has(node, digest)
            self.uploads.add(node, digest, size_bytes, new=stored is Stored.NEW)
        return Response(status_code=200 if known else 201)

    async def _receive(self, request: Request, digest: str) -> tuple[Stored, int]:
        """Store a blob; return what became of it, and its size."""
        upload = Upload(self.blobs.beside())
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
            if size_bytes <= self.small_bytes_max:
                upload.write(*parts)
                stored = await self._keep_small(upload, digest)
            else:
                stored = await self._on_thread(lambda: self._store(upload, digest, parts))
            if stored is Stored.REPAIRED:
                self.metrics.repaired_blobs.inc()
                _events.warning("hub blob repaired", extra={"digest": digest, "bytes": size_bytes})
            return stored, size_bytes
        finally:
            if writing is not None:
                await _finish(writing)
            upload.close()

    async def head_blob(self, request: Request, digest: str) -> Response:
        """Answer whether a commit may name it."""
        await self._check_reader(request, digest)
        sizes = await self._on_thread(lambda: self.log.blob_sizes((digest,)))
        if digest not in sizes:
            raise _no_blob(digest)
        return Response(headers={"content-length": str(sizes[digest])}, media_type=BLOB_TYPE)

    async def get_blob(self, request: Request, digest: str) -> Response:
        """Send a blob. It is hashed on the way: of a damaged one, the last bytes are never sent, so that none takes it for whole."""
        await self._check_reader(request, digest)

        def begin() -> tuple[IO[bytes], bytes, int]:
            if self.log.is_damaged(digest):
                raise _damaged(digest)
            small = self.log.read(lambda log: log.small_blob(digest))
            file = self.blobs.open(digest) if small is None else io.BytesIO(small)
            first = file.read(CHUNK_BYTES)
            size_bytes = len(first)
            if size_bytes == CHUNK_BYTES:
                size_bytes = file.seek(0, 2)
                file.seek(len(first))
            else:
                file.close()
                self._check_content(digest, hashlib.sha256(first))
            return file, first, size_bytes

        file, first, size_bytes = await self._on_thread(begin)
        if file.closed:
            return Response(first, media_type=BLOB_TYPE)
        return _BlobResponse(
            file, self._rest(file, first, digest), headers={"content-length": str(size_bytes)}, media_type=BLOB_TYPE
        )

    def _check_content(self, digest: str, found: hashlib._Hash) -> None:
        """Reject a blob whose content has another digest, and mark it."""
        if found.hexdigest() != digest:
            self.scrub.confirm(digest)
            raise _damaged(digest)

    async def missing_blobs(self, request: Request) -> Response:
        body, token = await request.body(), request.scope.get(TOKEN)
        node = node_of(request)

        def respond() -> Response:
            asked = decoded(body, Digests)
            known = set(self.log.blob_sizes(asked.digests))
            if token is not None and node is not None:
                state = self.log.read(lambda log: log.state_blobs(node, token.pipelines))
                known = {digest for digest in known if digest in state or self.uploads.has(node, digest)}
            return json_response(Digests(digests=tuple(digest for digest in asked.digests if digest not in known)))

        return await (self._on_thread(respond) if node is None else self._read_own(node, respond))

    async def _check_reader(self, request: Request, digest: str) -> None:
        """Reject a node that may not read this blob as if there were none."""
        token, node = request.scope.get(TOKEN), node_of(request)
        if token is None or node is None or self.uploads.has(node, digest):
            return
        may_read = await self._read_own(
            node, lambda: self.log.read(lambda log: log.may_read_blob(node, token.pipelines, digest))
        )
        if not may_read:
            raise _no_blob(digest)

    async def _keep_small(self, upload: Upload, digest: str) -> Stored:
        """Keep it in the log, in the same transaction as everything else that is written now."""
        upload.verify(digest)
        self.failpoints.hit("hub.blob-written")
        data = bytes(upload.data)
        stored = await self._write(lambda tx: tx.log.save_small_blob(digest, data, ran_us=tx.ran_us))
        self.failpoints.hit("hub.blob-renamed")
        return stored

    def _store(self, upload: Upload, digest: str, rest: list[bytes]) -> Stored:
        upload.write(*rest)
        with self.locks.arrival(digest):
            stored = upload.store(self.blobs, digest)
            self.log.record_blob(digest, upload.size_bytes)
        return stored

    async def _rest(self, file: IO[bytes], first: bytes, digest: str) -> AsyncIterator[bytes]:
        found = hashlib.sha256()
        data = first

        def following() -> bytes:
            found.update(data)
            more = file.read(CHUNK_BYTES)
            if not more:
                self._check_content(digest, found)
            return more

        while data:
            more = await self._on_thread(following)
            yield data
            data = more

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Run work to its end even if the request is cancelled, because the work uses the upload."""
        working = self._start(work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait({working})
            raise

    def _start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.blob_threads, work)


async def _in_time(outcome: Awaitable[T]) -> T:
    """Bound the wait for the log, whose disk may hang. What was handed in and not begun is dropped."""
    try:
        async with asyncio.timeout(LOG_SECONDS_MAX):
            return await outcome
    except TimeoutError:
        raise Rejection(
            "failed",
            f"the hub's log did not answer within {LOG_SECONDS_MAX:g} s. Whether it kept this is unknown; trying again is safe.",
            status=503,
            headers={"retry-after": "10"},
        ) from None


class _BlobResponse(StreamingResponse):
    """Streams a file, and closes it even if nothing could be sent."""

    def __init__(self, file: IO[bytes], content: AsyncIterator[bytes], **more: Any) -> None:
        super().__init__(content, **more)
        self._file = file

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


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


def _printable(text: str, chars_max: int) -> str:
    """Bound a text that a node sent, and remove what would control the terminal in which it is listed."""
    return "".join(char if char.isprintable() else " " for char in text[:chars_max])


# What requests have beyond their types. Names in the path are checked by `routes`, sizes of bodies by `middleware`.


def node_of(request: Request) -> str | None:
    """Return the node whose token the request has; None: it has none, or one that is for many nodes."""
    token: Token | None = request.scope.get(TOKEN)
    return None if token is None else token.node


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Rejection("bad_request", f"the body is not a {kind.__name__}: {error}.") from error


def check_name(value: str) -> None:
    """Check a name in the query."""
    try:
        checked_name(value, "name")
    except PipelineError as error:
        raise Rejection("bad_name", str(error)) from error


def name_in_query(request: Request, what: str) -> str | None:
    """Read a name from the query; None: there is none."""
    value = request.query_params.get(what)
    if value is not None:
        check_name(value)
    return value


def names_in_query(request: Request, what: str) -> tuple[str, str] | None:
    """Read the place in a list that a page has named, `a/b`; None: there is none."""
    value = request.query_params.get(what)
    if value is None:
        return None
    first, _, second = value.partition("/")
    check_name(first)
    check_name(second)
    return first, second


def digest_in_query(request: Request, what: str) -> str:
    """Read a digest from the query; empty: there is none."""
    value = request.query_params.get(what, "")
    if value and not is_digest(value):
        raise Rejection("bad_name", f"{what} is a digest, 64 hex digits in lower case, not {value[:80]!r}.")
    return value


def limit_in_query(request: Request, most: int) -> int:
    """Read the number of rows that a page of a list may have; more than the maximum counts as the maximum."""
    return min(max(integer_in_query(request, "limit", most), 1), most)


def range_in(value: str) -> tuple[int, int]:
    """Parse `a-b`."""
    match = _RANGE.fullmatch(value)
    if match is None or int(match[1]) > int(match[2]):
        raise Rejection("bad_request", f"a range of epochs is A-B with 1 <= A <= B, not {value[:80]!r}.")
    return int(match[1]), int(match[2])


def integer_in_query(request: Request, what: str, default: int, *, most: int = NUMBER_MAX) -> int:
    """Read a whole number from the query, or reject it."""
    text = request.query_params.get(what)
    return default if text is None else whole_number(what, text, most=most)


def whole_number(what: str, text: str, *, most: int = NUMBER_MAX) -> int:
    """Parse a whole number, or reject it."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX and int(text) <= most):
        raise Rejection("bad_request", f"{what} must be a whole number from 0 to {most}, not {text[:40]!r}.")
    return int(text)


def wait_in_query(request: Request) -> float:
    """Read the seconds that a long poll waits; more than the maximum counts as the maximum."""
    text = request.query_params.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise Rejection("bad_request", f"wait must be a number of seconds from 0 on, not {text[:40]!r}.")
    return min(seconds, WAIT_SECONDS_MAX)


def check_parts(body: bytes) -> None:
    """Reject a commit that has too many parts before it is decoded. No text in a commit may have a brace or a colon."""
    count = body.count(b"{")
    if count > OBJECTS_PER_COMMIT_MAX:
        raise Rejection(
            "bad_request",
            f"a commit has at most {OBJECTS_PER_COMMIT_MAX} JSON objects, this one {count}: commit fewer epochs.",
        )
    count = body.count(b":")
    if count > MEMBERS_PER_COMMIT_MAX:
        # Nodes answer this by sending fewer epochs at a time.
        raise Rejection(
            "too_large",
            f"a commit has at most {MEMBERS_PER_COMMIT_MAX} JSON names, this one {count}: commit fewer epochs.",
        )


def check_commit(commit: Commit, first: int, last: int) -> None:
    """Check that a commit has the epochs of its path, a checkpoint of the last one, and segments and runs within bounds."""
    if [entry.epoch for entry in commit.epochs] != [*range(first, min(last, first + EPOCHS_PER_COMMIT_MAX) + 1)]:
        raise Rejection(
            "bad_request", f"the address says epochs {first} to {last}; the body must have exactly these, in order."
        )
    checkpoint = commit.checkpoint
    if checkpoint is not None and checkpoint.epoch != last:
        raise Rejection(
            "bad_request", f"only the last epoch, {last}, may have a checkpoint; this one is of {checkpoint.epoch}."
        )
    segments = [segment for entry in commit.epochs for segment in entry.streams.values()]
    runs = runs_of(commit)
    for what, count, count_max in (
        ("segments", len(segments), SEGMENTS_PER_COMMIT_MAX),
        ("runs", len(runs), RUNS_PER_COMMIT_MAX),
    ):
        if count > count_max:
            raise Rejection(
                "bad_request", f"a commit has at most {count_max} {what}, this one {count}: commit fewer epochs."
            )
    check_runs(runs)


def runs_of(commit: Commit) -> list[RunRef]:
    """Return every reference to a blob in a commit."""
    segments = (segment for entry in commit.epochs for segment in entry.streams.values())
    state = () if commit.checkpoint is None else commit.checkpoint.runs()
    return [*(run for segment in segments for run in segment.runs), *state]


def check_runs(runs: Iterable[RunRef]) -> None:
    """Check references to blobs."""
    for run in runs:
        if not is_digest(run.digest):
            raise Rejection("bad_name", f"a digest is 64 hex digits in lower case, not {run.digest[:80]!r}.")
        if not (0 <= run.size_bytes <= BLOB_BYTES_MAX and 0 <= run.rows <= NUMBER_MAX):
            raise Rejection(
                "bad_request",
                f"run {run.digest} has {run.size_bytes} bytes and {run.rows} rows; a blob has 0 to {BLOB_BYTES_MAX} bytes.",
            )


def _damaged(digest: str) -> Rejection:
    return Rejection(
        "gone",
        f"blob {digest} is damaged at the hub, which does not send it. If its node still has it, the node sends it again with its next "
        "commit that names it; else restore it from a copy of the hub's blobs. `fordstone hub scrub` lists what names it.",
    )


def _no_blob(digest: str) -> Rejection:
    return Rejection("not_found", f"the hub has no blob {digest}.")


def json_response(message: Any, status: int = 200) -> Response:
    """Encode a message as the body of a response."""
    return Response(msgspec.json.encode(message), status, media_type="application/json")
