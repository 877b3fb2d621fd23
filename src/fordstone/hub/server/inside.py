"""What stands behind the guard: log, blob store and app of one data directory, opened and closed together.

And what can be seen of them from outside, for metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.applications import Starlette

from fordstone.errors import StorageError
from fordstone.hub.refused import Refused
from fordstone.hub.server.app import make_app
from fordstone.hub.server.metrics import Looked
from fordstone.hub.server.room import Room
from fordstone.hub.store.base import LogReader
from fordstone.hub.store.blob_owner import claim
from fordstone.hub.store.blobs import DiskBlobs, open_blobs
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.retention import Keeping
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.storage.failpoint import Failpoints

LOG_NAME: Final = "log.sqlite"
BLOBS_NAME: Final = "blobs"
INCOMING_NAME: Final = "incoming"
"""Uploads on their way to a store elsewhere."""


class Inside:
    """An open data directory and the app over it. One process has it; whoever opens it has locked the directory."""

    def __init__(
        self,
        data: Path,
        *,
        blobs: str | None,
        direct: bool | None,
        keeping: Keeping,
        clock_us: Callable[[], int],
        failpoints: Failpoints,
    ) -> None:
        """`direct`: whether readers are told where blobs lie; None: unless the URL has a password in it."""
        url = blobs or str(data / BLOBS_NAME)
        if "://" not in url:
            url = Path(url).resolve().as_uri()
        if direct is None:
            direct = "@" not in urlsplit(url).netloc
        if blobs is not None:
            claim(url, data)
        try:
            store = open_blobs(url, beside=data / INCOMING_NAME, failpoints=failpoints)
        except Refused as refused:
            raise StorageError(str(refused)) from refused
        self._log = HubLog(SqliteStore(data / LOG_NAME), clock_us=clock_us, failpoints=failpoints)
        self.app: Starlette = make_app(
            self._log,
            store,
            direct_url=url if direct else None,
            failpoints=failpoints,
            keeping=keeping,
            room=Room([data, *([store.root] if isinstance(store, DiskBlobs) else [])]),
        )
        self._rows = 0
        self._seq: int = self._log.read(lambda log: log.newest_seq())

    def stop(self) -> None:
        """End what waits for news, at once. Called on the event loop."""
        self.app.state.waiting.end()

    def look(self) -> Looked:
        """What metrics want to know. Blocks; one call at a time."""
        return self._log.read(self._looked)

    def close(self) -> None:
        """Close the log; nothing asks any more."""
        self._log.close()

    def _looked(self, log: LogReader) -> Looked:
        totals = log.totals(after_seq=self._seq)
        self._rows, self._seq = self._rows + totals.rows, totals.seq
        return Looked(
            now_us=self._log.now_us(),
            nodes=log.nodes(),
            streams=log.streams(),
            log_bytes=self._log.size_bytes(),
            blobs=totals.blobs,
            blob_bytes=totals.blob_bytes,
            rows=self._rows,
        )
