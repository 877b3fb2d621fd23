"""A hub in memory, as far as readers of streams use one: it can be away, lose blobs, and answer in small pages."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from fordstone.epochs.run_file import encode_run
from fordstone.errors import HubAwayError, HubRefusedError
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.reader import StreamIndex
from fordstone.hub.messages import ConsumerPosition, StreamEpoch, StreamPage
from fordstone.lang.duration import TIME_MIN_US
from fordstone.state.base import RunRef

PIPELINE, STREAM = "p", "s"
WAIT_SECONDS = 10.0
"""No test waits longer for something that should have come."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch that a node commits: its runs, and what it says of its time."""

    runs: Sequence[pl.DataFrame] = ()
    watermark_us: int = TIME_MIN_US
    ended: bool = False


@dataclass
class FakeHub(HubClient):
    """Answers what readers of streams ask; a test fills it."""

    page_commits: int = 1000
    away: bool = False
    away_for_blobs: bool = False
    refuses: HubRefusedError | None = None
    now_us: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    entries: list[StreamEpoch] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    passed: dict[str, dict[str, int]] = field(default_factory=dict)
    """The position of each consumer, by node."""

    def __post_init__(self) -> None:
        self._grown = threading.Condition()
        self._heads: dict[str, int] = {}
        self._seq = 0

    # What a test does.

    def add(self, node: str, *epochs: Epoch) -> int:
        """Commit epochs of a node together; gives the last one's number."""
        with self._grown:
            self._seq += 1
            seq, number = self._seq, self._heads.get(node, 0)
            for number, epoch in enumerate(epochs, number + 1):  # noqa: B020 - it goes on from there
                refs = []
                for frame in epoch.runs:
                    ref, data = encode_run(frame, "none")
                    self.blobs[ref.digest] = bytes(data)
                    refs.append(ref)
                self.entries.append(
                    StreamEpoch(
                        seq=seq,
                        node=node,
                        epoch=number,
                        runs=tuple(refs),
                        watermark_us=epoch.watermark_us,
                        received_us=self.now_us,
                        ended=epoch.ended,
                    )
                )
            self._heads[node] = number
            self._grown.notify_all()
            return number

    def reset(self) -> None:
        """Be a new hub."""
        self.entries.clear()
        self._heads.clear()
        self._seq = 0

    def remove_epochs(self, node: str, epoch: int) -> None:
        """Remove the epochs of a node up to and including `epoch`."""
        self.entries = [entry for entry in self.entries if entry.node != node or entry.epoch > epoch]

    def goes(self, *, away: bool) -> None:
        """Go away, or come back."""
        with self._grown:
            self.away = away
            self._grown.notify_all()

    def wait_for_passed(self, consumer: str, positions: dict[str, int]) -> bool:
        """Wait until a consumer has said that it passed these."""
        with self._grown:
            return self._grown.wait_for(lambda: self.passed.get(consumer) == positions, WAIT_SECONDS)

    # What a reader calls.

    def stream_page(
        self, pipeline: str, stream: str, *, after: int = 0, wait_s: float = 0.0, limit: int | None = None
    ) -> StreamPage:
        assert (pipeline, stream, limit) == (PIPELINE, STREAM, None)
        with self._grown:
            self.calls.append("page")
            self._grown.wait_for(lambda: self.away or any(one.seq > after for one in self.entries), min(wait_s, 1.0))
            self._check(away=self.away)
            seqs = sorted({entry.seq for entry in self.entries if entry.seq > after})
            taken = seqs[: self.page_commits]
            found = [entry for entry in self.entries if entry.seq in taken]
            return StreamPage(epochs=tuple(found), next=taken[-1] if taken else after, more=len(taken) < len(seqs))

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        self.calls.append("blob")
        self._check(away=self.away or self.away_for_blobs)
        if ref.digest not in self.blobs:
            raise HubRefusedError("there is no such blob.", status=404, code="not_found")
        return self.blobs[ref.digest]

    def consumer(self, pipeline: str, consumer: str, position: ConsumerPosition) -> None:
        assert pipeline == PIPELINE
        with self._grown:
            self.calls.append("consumer")
            self._check(away=self.away)
            self.passed.setdefault(consumer, {}).update(position.streams[STREAM])
            self._grown.notify_all()

    def _check(self, *, away: bool) -> None:
        if away:
            raise HubAwayError("the hub does not answer.")
        if self.refuses is not None:
            raise self.refuses


def wait_until_listed(index: StreamIndex, node: str, epoch: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while index.last(node) < epoch:
        assert time.monotonic() < deadline, f"epoch {epoch} of {node} was not listed"
        threading.Event().wait(0.001)
