"""Handlers of the routes that upload and download blobs. A request that ends early leaves nothing stored."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from typing import IO, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fordstone.hub.messages import Digests
from fordstone.hub.rejection import Rejection
from fordstone.hub.server.checks import decoded, digest_in, json_response
from fordstone.hub.server.limits import DiskQuota
from fordstone.hub.store.blob_index import SMALL_BYTES_MAX, save_small
from fordstone.hub.store.blobs import CHUNK_BYTES, BlobStore, Gate, Upload
from fordstone.hub.store.log import HubLog
from fordstone.storage.failpoint import Failpoints, NoFailpoints

DIGESTS_MAX: Final = 100_000
BLOB_TYPE: Final = "application/octet-stream"

T = TypeVar("T")


class BlobHandlers:
    """Called on the event loop."""

    def __init__(
        self,
        log: HubLog,
        blobs: BlobStore,
        gate: Gate,
        threads: Executor,
        quota: DiskQuota,
        *,
        small_bytes_max: int = SMALL_BYTES_MAX,
        failpoints: Failpoints | None = None,
    ) -> None:
        self._log = log
        self._blobs = blobs
        self._gate = gate
        self._threads = threads
        self._quota = quota
        self._small_bytes_max = small_bytes_max
        self._failpoints = failpoints or NoFailpoints()

    async def put(self, request: Request) -> Response:
        """`PUT /blobs/{sha256}`: 201 stored, 200 there already (what came is checked all the same)."""
        digest = request.path_params["digest"]
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

    async def head(self, request: Request) -> Response:
        """`HEAD /blobs/{sha256}`: whether a commit may name it."""
        digest = request.path_params["digest"]
        sizes = await self._on_thread(lambda: self._log.blob_sizes((digest,)))
        if digest not in sizes:
            raise Rejection("not_found", f"the hub has no blob {digest}.")
        return Response(headers={"content-length": str(sizes[digest])}, media_type=BLOB_TYPE)

    async def get(self, request: Request) -> Response:
        """`GET /blobs/{sha256}`."""
        digest = request.path_params["digest"]

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

    async def missing(self, request: Request) -> Response:
        """`POST /blobs/missing`."""
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
        new = await asyncio.wrap_future(self._log.write(lambda tx: save_small(tx, digest, bytes(upload.data))))
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
        return asyncio.get_running_loop().run_in_executor(self._threads, work)


async def _finish(writing: asyncio.Future[None]) -> None:
    """Wait until a thread is done. Whether it failed was raised before, or does not matter any more."""
    await asyncio.wait({writing})
    if not writing.cancelled():
        writing.exception()
