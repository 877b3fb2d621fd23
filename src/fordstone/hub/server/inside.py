"""What stands behind the guard: log, blob store and app of one data directory, opened and closed together.

And what can be seen of them from outside, for metrics.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.applications import Starlette

from fordstone.errors import StorageError
from fordstone.hub.refused import Refused
from fordstone.hub.server.app import make_app
from fordstone.hub.server.metrics import Looked
from fordstone.hub.store.blob_owner import claim
from fordstone.hub.store.blobs import open_blobs
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.retention import Keeping
from fordstone.hub.store.streams import list_nodes, list_streams
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
        self._log = HubLog(data / LOG_NAME, clock_us=clock_us, failpoints=failpoints)
        self.app: Starlette = make_app(
            self._log,
            store,
            direct_url=url if direct else None,
            failpoints=failpoints,
            keeping=keeping,
        )
        self._rows = 0
        self._seq: int = self._log.read(lambda db: db.execute("SELECT seq FROM counter").fetchone()[0])

    def stop(self) -> None:
        """End what waits for news, at once. Called on the event loop."""
        self.app.state.waiting.end()

    def look(self) -> Looked:
        """What metrics want to know. Blocks; one call at a time."""
        looked = self._log.read(self._looked)
        self._rows, self._seq = looked[0], looked[1]
        return looked[2]

    def close(self) -> None:
        """Close the log; nothing asks any more."""
        self._log.close()

    def _looked(self, db: sqlite3.Connection) -> tuple[int, int, Looked]:
        new_rows, seq = db.execute(
            "SELECT coalesce(sum(rows), 0), coalesce(max(seq), :seq) FROM entries WHERE seq > :seq", {"seq": self._seq}
        ).fetchone()
        blobs, blob_bytes = db.execute("SELECT count(*), coalesce(sum(size_bytes), 0) FROM blobs").fetchone()
        rows = self._rows + new_rows
        looked = Looked(
            now_us=self._log.now_us(),
            nodes=list_nodes(db),
            streams=list_streams(db),
            log_bytes=_size(self._log.path) + _size(self._log.path.with_name(f"{self._log.path.name}-wal")),
            blobs=blobs,
            blob_bytes=blob_bytes,
            rows=rows,
        )
        return rows, seq, looked


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
