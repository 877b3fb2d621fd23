"""What the planner of a query knows of a stream at the hub: the entries behind where it stands.

Lives in the one Python process beside the driver that plans batches. Fetches no rows. Which epochs make a batch: `hub_offsets`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from fordstone.errors import SourceError
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import StreamEpoch, StreamPage
from fordstone.spark.formats.offsets import Gap, Limit, Offset, batch, gaps, lost, next_offset, unread, within

HELD_MAX: Final = 50_000
"""So many epochs make a batch at most: that many entries are held."""
SCHEMA_LOOKS_MAX: Final = 50
"""In so many of the newest commits rows are looked for, before the stream is gone through from its beginning."""


class StreamTail:
    """The entries of one stream behind an offset. One thread. Every call may raise `HubAwayError` and change nothing."""

    def __init__(self, client: HubClient, pipeline: str, stream: str, *, fail_on_loss: bool = True) -> None:
        self._client = client
        self._pipeline = pipeline
        self._stream = stream
        self._fail_on_loss = fail_on_loss
        self._held: deque[StreamEpoch] = deque()
        self._from = 0
        """The hub's number behind which all entries are held ..."""
        self._to = 0
        """... up to this one."""
        self.blobs: str | None = None
        """Where blobs lie, by the hub's last word."""

    def end(self) -> int:
        """The hub's number of the newest commit now. Goes through what is not known yet, without holding it."""
        after = self._to
        while True:
            page = self._page(after)
            after = page.next
            if not page.more:
                return after

    def skipped(self) -> Offset:
        """The offset behind all that is there now."""
        offset, after = Offset(), 0
        while True:
            page = self._page(after)
            offset = next_offset(offset, page.epochs, read_to=page.next, limit=Limit())
            after = page.next
            if not page.more:
                return offset

    def latest(self, start: Offset, limit: Limit, *, until: int | None = None, wait_s: float = 0.0) -> Offset:
        """The end of the next batch; `start`: there is nothing to read.

        Args:
            start: Where the last batch ended.
            limit: How much the batch may have.
            until: Nothing of commits behind this number of the hub's is read.
            wait_s: So long the hub may wait for something to come.
        """
        self._begin(start)
        self._fill(start, limit, until, wait_s)
        entries = [entry for entry in self._held if until is None or entry.seq <= until]
        waiting = unread(start, entries)
        self._whole(gaps(start, waiting))
        read_to = self._to if until is None else min(self._to, until)
        return next_offset(start, waiting, read_to=read_to, limit=limit)

    def batch(self, start: Offset, end: Offset) -> list[StreamEpoch]:
        """The epochs between two offsets.

        Raises:
            SourceError: The hub no longer has some of them.
        """
        self._begin(start)
        found = batch(start, end, self._held)
        while lost(start, end, found):
            page = self._take(0.0)
            found = batch(start, end, self._held)
            if not page.more and not page.epochs:
                break
        self._whole(lost(start, end, found))
        return found

    def all(self) -> list[StreamEpoch]:
        """All epochs that the hub keeps."""
        found: list[StreamEpoch] = []
        after = 0
        while True:
            page = self._page(after)
            found += page.epochs
            after = page.next
            if not page.more:
                return found

    def example(self) -> StreamEpoch | None:
        """A new epoch that has a run; None: there is none at all."""
        told = self._client.epochs(pipeline=self._pipeline, limit=SCHEMA_LOOKS_MAX).epochs
        for seq in sorted({entry.seq for entry in told if entry.size_bytes}, reverse=True):
            page = self._page(seq - 1, limit=1)
            found = [entry for entry in page.epochs if entry.runs and entry.seq == seq]
            if found:
                return found[-1]
        return next((entry for entry in reversed(self.all()) if entry.runs), None)

    def _begin(self, start: Offset) -> None:
        """Hold what is behind the start, and nothing before it."""
        if not self._from <= start.seq <= self._to:
            self._held.clear()
            self._from = self._to = start.seq
        while self._held and self._held[0].seq <= start.seq:
            self._held.popleft()
        self._from = start.seq

    def _fill(self, start: Offset, limit: Limit, until: int | None, wait_s: float) -> None:
        while len(self._held) < HELD_MAX and (until is None or self._to < until):
            waiting = unread(start, self._held)
            if len(within(waiting, limit)) < len(waiting):
                return
            page = self._take(0.0 if waiting else wait_s)
            if not page.more:
                return

    def _take(self, wait_s: float) -> StreamPage:
        page = self._page(self._to, wait_s=wait_s)
        self._held.extend(page.epochs)
        self._to = max(self._to, page.next)
        return page

    def _page(self, after: int, *, wait_s: float = 0.0, limit: int | None = None) -> StreamPage:
        page = self._client.stream_page(self._pipeline, self._stream, after=after, wait_s=wait_s, limit=limit)
        self.blobs = page.blobs
        return page

    def _whole(self, missing: list[Gap]) -> None:
        if not missing or not self._fail_on_loss:
            return
        told = "; ".join(f"node {gap.node}: {gap.first} to {gap.last}" for gap in missing[:5])
        raise SourceError(
            f"the hub no longer has epochs of stream {self._stream} of pipeline {self._pipeline} that this query has not read "
            f"({told}{'; ...' if len(missing) > 5 else ''}). "  # noqa: PLR2004 - as many as are shown
            "All consumers that the hub knows of had passed them. To go on with what is there: option 'failOnDataLoss' = 'false'. To be "
            "waited for from now on: option 'consumer' with a name of this query's own."
        )
