"""The hub as an ASGI app over its log and its blob store.

Nothing blocks the event loop: reading the log and touching blobs happen on small pools of threads, writing on the log's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from starlette.routing import Router

from fordstone.hub.messages import Rejection
from fordstone.hub.server.auth import Tokens
from fordstone.hub.server.handlers import SMALL_BYTES_MAX, Handlers, LongPolls
from fordstone.hub.server.limits import DiskQuota, Limits
from fordstone.hub.server.metrics import HubMetrics, LogMetrics
from fordstone.hub.server.middleware import HubMiddleware, Receive, Scope, Send
from fordstone.hub.server.routes import Routes
from fordstone.hub.store.blobs import BlobStore, Gate
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.retention import Keeping, Retention
from fordstone.storage.failpoint import Failpoints, NoFailpoints

READERS: Final = 4
BLOB_THREADS: Final = 16
"""They mostly wait for the disk."""
_log = logging.getLogger(__name__)


class HubApp:
    """The hub over an open log and blob store, which the caller closes after it."""

    def __init__(
        self,
        log: HubLog,
        blobs: BlobStore,
        *,
        direct_url: str | None = None,
        failpoints: Failpoints | None = None,
        keeping: Keeping | None = None,
        small_bytes_max: int = SMALL_BYTES_MAX,
        quota: DiskQuota | None = None,
        tokens: Tokens | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`direct_url` is given to readers that can reach the blob store. Blobs up to `small_bytes_max` are kept in the log."""
        gate = Gate()
        self._log = log
        self._polls = LongPolls()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="hub-read")
        self._blob_threads = ThreadPoolExecutor(BLOB_THREADS, thread_name_prefix="hub-blob")
        self.retention = Retention(log, blobs, gate, keeping=keeping or Keeping(), failpoints=failpoints)
        metrics = HubMetrics()
        handlers = Handlers(
            log=log,
            blobs=blobs,
            gate=gate,
            polls=self._polls,
            quota=quota or DiskQuota([]),
            log_metrics=LogMetrics(log, metrics),
            readers=self._readers,
            blob_threads=self._blob_threads,
            direct_url=direct_url,
            small_bytes_max=small_bytes_max,
            failpoints=failpoints or NoFailpoints(),
        )
        self._app = HubMiddleware(
            Routes(handlers),
            lifespan=Router(lifespan=self._lifespan),
            tokens=tokens,
            limits=limits or Limits(),
            metrics=metrics,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def stop_polls(self) -> None:
        """End long polls at once. Called from any thread."""
        self._polls.end()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:  # noqa: ARG002 - the framework's form
        self._polls.begin()
        self._log.listen(self._polls.notify)
        removing = asyncio.create_task(self._retain())
        try:
            yield
        finally:
            self._polls.end()
            self._log.unlisten(self._polls.notify)
            removing.cancel()
            await asyncio.gather(removing, return_exceptions=True)
            self._readers.shutdown()
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
                    _log.warning("hub retention failed", extra={"reason": str(rejection)})
                except Exception:  # noqa: BLE001 - a bug here must not end retention; it is logged
                    _log.exception("hub retention failed")
                if not more:
                    await asyncio.sleep(retention.keeping.every_s)
