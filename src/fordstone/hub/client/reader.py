"""Reads one stream at a hub: which epochs there are, how far the time of each node has come, and the rows.

`StreamReader` asks the hub for pages and blobs. `StreamIndex` keeps the listed epochs in memory, by node. `Follower` keeps an
index up to date in the background. What a position looks like (partitions of a source, an offset of Spark) is left to callers.

Invariants: the epochs of a node grow; an index shows nodes only once it was complete, so that all nodes known at the start are
seen together; rows have the digest and size that the hub listed, and exactly the columns that were asked for.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, TypeVar

import polars as pl

from fordstone.epochs.run_file import decode_run
from fordstone.errors import DamagedError, HubAwayError, HubRefusedError, SourceError
from fordstone.hub.client.client import HubClient, retry
from fordstone.hub.messages import ENDED_US, ConsumerPosition, StreamEpoch, StreamPage
from fordstone.lang.duration import TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import ROW_WATERMARK
from fordstone.protocol.retry import Backoff
from fordstone.state.base import RunRef

log = logging.getLogger(__name__)

MAX_AHEAD_US: Final = 3_600_000_000
"""Maximum by which the time of a node may be ahead of the hub's clock."""
EPOCHS_PER_READ_MAX: Final = 1_000
STALE_ENTRIES_MAX: Final = 100_000
POLL_SECONDS: Final = 20.0
"""Timeout of a long poll."""
GATHER_SECONDS: Final = 0.05
"""Pause between two polls, so that a thousand commits per second are not a thousand polls."""
BACK_OFF: Final = Backoff(first_us=400_000, max_us=15_000_000)
"""Waits of a follower while the hub is away."""
FETCH_THREADS: Final = 4
"""Through the hub, the round trip costs time and not the bytes."""
FETCH_THREADS_RUNS_MIN: Final = 8
"""Fewer runs are read without threads."""
EXAMPLE_COMMITS_MAX: Final = 50
"""Maximum number of the newest commits in which rows are looked for before the whole stream is listed."""
_NOT_ALLOWED: Final = frozenset({401, 403})
_EPOCH: Final = attrgetter("epoch")
T = TypeVar("T")


# Time, and epochs that are missing: pure decisions.


def is_finished(entry: StreamEpoch) -> bool:
    """Whether the node's input for this stream had ended with this epoch. It may be started again, with a later epoch."""
    return entry.ended or entry.watermark_us >= ENDED_US


def declared_us(entry: StreamEpoch) -> int:
    """How far the node's time has come with an epoch, as far as the hub's clock allows (rule 7); `TIME_MIN_US`: it says nothing.

    The end of a node is not the end of time: others may join, and the node may be started again. So a finished epoch declares
    no time, for every reader. A live reader does not wait for the node until its next epoch (`StreamIndex.is_finished`); a
    bounded one ends time itself, after the last epoch that it reads.
    """
    if is_finished(entry):
        return TIME_MIN_US
    return min(entry.watermark_us, entry.received_us + MAX_AHEAD_US)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Epochs of a node that the hub no longer has."""

    node: str
    first: int
    last: int


def find_gaps(positions: Mapping[str, int], entries: Iterable[StreamEpoch]) -> list[Gap]:
    """Where epochs are missing between what was read and what is listed. A node that was never read may begin anywhere."""
    gaps, newest = [], dict(positions)
    for entry in entries:
        if entry.node in newest and entry.epoch > newest[entry.node] + 1:
            gaps.append(Gap(node=entry.node, first=newest[entry.node] + 1, last=entry.epoch - 1))
        newest[entry.node] = entry.epoch
    return gaps


# What the hub has.


class StreamIndex:
    """Epochs of one stream, by node. May be used from several threads. Filled page by page; it asks nothing itself."""

    def __init__(self, after: int = 0) -> None:
        """`after`: the hub's number of the last commit before the index."""
        self._mutex = threading.Lock()
        self._epochs: dict[str, list[StreamEpoch]] = {}
        self._newest: dict[str, StreamEpoch] = {}
        self._nodes: tuple[str, ...] = ()
        self.after = after
        """Up to which commit, by the hub's number, everything is listed."""
        self.complete = False
        """Whether all that the hub had has been listed, at least once."""
        self.blobs: str | None = None
        """Where the hub's blobs can be read directly, if anywhere."""
        self.entries = 0
        self._first_entries = 0
        """Number of entries when it was first complete."""

    def add(self, page: StreamPage) -> None:
        """Add a page. Epochs that are known already change nothing."""
        with self._mutex:
            for entry in page.epochs:
                if entry.epoch > self._last(entry.node):
                    self._epochs.setdefault(entry.node, []).append(entry)
                    self._newest[entry.node] = entry
                    self.entries += 1
            if len(self._nodes) != len(self._newest):
                self._nodes = tuple(sorted(self._newest))
            self.after = max(self.after, page.next)
            self.blobs = page.blobs
            if not page.more and not self.complete:
                self.complete, self._first_entries = True, self.entries

    def nodes(self) -> tuple[str, ...]:
        """All nodes that have or had epochs, sorted; none before the index is complete."""
        with self._mutex:
            return self._nodes if self.complete else ()

    def last(self, node: str) -> int:
        """The newest epoch of a node; 0: none."""
        with self._mutex:
            return self._last(node)

    def is_finished(self, node: str, position: int) -> bool:
        """Whether the newest epoch of a node is one in which it finished, and has been read."""
        with self._mutex:
            newest = self._newest.get(node)
            return newest is not None and is_finished(newest) and position >= newest.epoch

    def epochs_after(
        self,
        node: str,
        position: int,
        rows_max: int,
        *,
        until: int | None = None,
        epochs_max: int | None = EPOCHS_PER_READ_MAX,
    ) -> list[StreamEpoch]:
        """The epochs of a node after `position`, up to about `rows_max` rows; at least one if there is one."""
        with self._mutex:
            known = self._epochs.get(node, [])
            found: list[StreamEpoch] = []
            rows = 0
            for number in range(bisect_right(known, position, key=_EPOCH), len(known)):
                entry = known[number]
                rows += sum(run.rows for run in entry.runs)
                full = found and (rows > rows_max or (epochs_max is not None and len(found) >= epochs_max))
                if full or (until is not None and entry.epoch > until):
                    break
                found.append(entry)
                if rows >= rows_max:
                    break
            return found

    def unread(self, positions: Mapping[str, int]) -> list[StreamEpoch]:
        """The epochs of all nodes after these positions, in the hub's order."""
        with self._mutex:
            found = [
                entry
                for node, known in self._epochs.items()
                for entry in known[bisect_right(known, positions.get(node, 0), key=_EPOCH) :]
            ]
        return sorted(found, key=lambda entry: (entry.seq, entry.node, entry.epoch))

    def forget(self, positions: Mapping[str, int]) -> None:
        """Drop the epochs up to these positions. Their nodes stay."""
        with self._mutex:
            for node, position in positions.items():
                known = self._epochs.get(node)
                if known:
                    count = bisect_right(known, position, key=_EPOCH)
                    del known[:count]
                    self.entries -= count

    def is_stale(self) -> bool:
        """Whether most of it is probably no longer at the hub, because nothing was forgotten."""
        return self.complete and self.entries > 2 * self._first_entries + STALE_ENTRIES_MAX

    def _last(self, node: str) -> int:
        newest = self._newest.get(node)
        return 0 if newest is None else newest.epoch


class StreamReader:
    """Asks a hub for the epochs of one stream and for their rows. May be used from several threads."""

    def __init__(
        self,
        client: HubClient,
        pipeline: str,
        stream: str,
        *,
        pause: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`chance`: random numbers from 0 to 1, for the jitter of retries."""
        self.client = client
        self.pipeline = pipeline
        self.stream = stream
        self._pause = pause
        self.chance = chance

    @property
    def title(self) -> str:
        return f"stream {self.stream} of pipeline {self.pipeline}"

    def page(self, after: int, *, wait_s: float = 0.0, limit: int | None = None) -> StreamPage:
        """What was committed after a commit; asks once, and may raise `HubAwayError` and `HubRefusedError`."""
        return self.client.stream_page(self.pipeline, self.stream, after=after, wait_s=wait_s, limit=limit)

    def pages(self, after: int = 0) -> Iterator[StreamPage]:
        """All pages that there are now.

        Raises:
            SourceError: The hub stays away, or refuses.
        """
        more = True
        while more:
            page = self.retry(lambda after=after: self.page(after))  # type: ignore[misc]  # mypy cannot infer it
            after, more = page.next, page.more
            yield page

    def list_until(self, index: StreamIndex, node: str, epoch: int) -> None:
        """List more until an epoch is in the index that was there before.

        Raises:
            SourceError: The hub does not have it, stays away, or refuses.
        """
        while index.last(node) < epoch:
            page = self.retry(lambda: self.page(index.after))
            index.add(page)
            if not page.more and not page.epochs:
                raise self.set_back(node, index.last(node), f"{epoch} was there when this read was planned")

    def example(self) -> tuple[StreamEpoch, str | None] | None:
        """A recent epoch that has rows, and where its blobs can be read directly; None: no epoch has any."""
        newest = self.client.epochs(pipeline=self.pipeline, limit=EXAMPLE_COMMITS_MAX).epochs
        for seq in sorted({entry.seq for entry in newest if entry.size_bytes}, reverse=True):
            page = self.page(seq - 1, limit=1)
            found = [entry for entry in page.epochs if entry.runs and entry.seq == seq]
            if found:
                return found[-1], page.blobs
        every = [(entry, page.blobs) for page in self.pages() for entry in page.epochs if entry.runs]
        return every[-1] if every else None

    def acknowledge(self, consumer: str, positions: Mapping[str, int]) -> None:
        """Register a consumer, or report up to which epochs it needs nothing any more."""
        self.client.consumer(self.pipeline, consumer, ConsumerPosition(streams={self.stream: dict(positions)}))

    def blob(self, ref: RunRef, where: str, direct_url: str | None) -> bytes:
        """The bytes of a run, checked; asks once.

        Raises:
            HubAwayError: The hub does not answer.
            SourceError: It does not have the run, or has other bytes.
        """
        try:
            return self.client.read_blob(ref, direct_url)
        except HubRefusedError as error:
            if error.code not in {"not_found", "gone"}:
                raise self.refused(error) from error
            raise SourceError(
                f"{where}: the hub lists it, but its rows (blob {ref.digest[:12]}) are gone. If the hub has dropped them since, start "
                "again, with a consumer name: the hub keeps what a named consumer has not read. Else restore the hub's blobs."
            ) from error
        except DamagedError as error:
            raise SourceError(f"{where}: {error} Restore the hub's blobs from a copy.") from error

    def frames(
        self, entries: Sequence[StreamEpoch], schema: Schema, direct_url: str | None
    ) -> Iterator[tuple[StreamEpoch, pl.DataFrame]]:
        """The runs of epochs in order, each with the columns of `schema` and perhaps `ROW_WATERMARK`; fails as `blob` does."""
        wanted = [(entry, run) for entry in entries for run in entry.runs]

        def read(one: tuple[StreamEpoch, RunRef]) -> pl.DataFrame:
            return self._frame(*one, schema, direct_url)

        if len(wanted) < FETCH_THREADS_RUNS_MIN:
            yield from ((one[0], read(one)) for one in wanted)
            return
        with ThreadPoolExecutor(FETCH_THREADS, "hub-blobs") as threads:
            try:
                yield from zip((entry for entry, _ in wanted), threads.map(read, wanted), strict=True)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)  # after a failure the others are not needed

    def retry(self, work: Callable[[], T]) -> T:
        """Do what was possible when it was planned, trying again for a bounded time while the hub is away.

        Raises:
            SourceError: The hub stays away, or refuses.
        """
        try:
            return retry(work, pause=self._pause, chance=self.chance)
        except HubAwayError as error:
            raise SourceError(
                f"{self.title}: {error} It was tried again and again. Nothing has changed: start the hub again, or make sure that it "
                "can be reached from here, then run this again."
            ) from error
        except HubRefusedError as error:
            raise self.refused(error) from error

    def refused(self, error: HubRefusedError) -> SourceError:
        """The error for a user whose request the hub rejected."""
        hint = (
            " Is the token one for centers (fordstone hub token add NAME --center)?"
            if error.status in _NOT_ALLOWED
            else ""
        )
        return SourceError(f"{self.title}: {error}{hint}")

    def set_back(self, node: str, last: int, but: str) -> SourceError:
        """The error for a hub that has fewer epochs than it had."""
        return SourceError(
            f"{self.title}: the hub has epochs of node {node} up to {last}, but {but}. Was the hub's data restored from an older "
            "copy, or is it another hub? Bring the data back."
        )

    def _frame(self, entry: StreamEpoch, ref: RunRef, schema: Schema, direct_url: str | None) -> pl.DataFrame:
        where = f"{self.title}, epoch {entry.epoch} of node {entry.node}"
        data = self.blob(ref, where, direct_url)
        try:
            return _exact(decode_run(data, ref), schema)
        except DamagedError as error:
            raise SourceError(f"{where}: {error} Restore the hub's blobs from a copy.") from error
        except (pl.exceptions.PolarsError, KeyError) as error:
            raise SourceError(
                f"{where}: its rows are not what this plan says ({str(error).partition(chr(10))[0]}). Do the node and the center run "
                "the same version of the pipeline? If what crosses was changed on purpose, let the previous version read what it sent, "
                "or give the cut another name: to_center(name=...)."
            ) from error


def _exact(rows: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """The rows with exactly these columns and types, and `ROW_WATERMARK` if they have it."""
    wanted = dict(schema.polars)
    if ROW_WATERMARK in rows.columns:
        wanted.setdefault(ROW_WATERMARK, pl.Int64())
    if rows.schema == pl.Schema(wanted):
        return rows
    return rows.select(list(wanted)).cast(wanted)  # type: ignore[arg-type]  # names to types, as Polars has them


class Follower:
    """A thread that keeps an index up to date, and reports the positions of its consumer to the hub. Used once."""

    def __init__(self, reader: StreamReader, index: StreamIndex, *, consumer: str) -> None:
        self._reader = reader
        self._index = index
        self._consumer = consumer
        self._fields = {"pipeline": reader.pipeline, "stream": reader.stream}
        self._stopped = threading.Event()
        self._listed = threading.Event()
        self._mutex = threading.Lock()
        self._acknowledged: dict[str, int] = {}
        self._pending: dict[str, int] | None = {}
        """Positions that the hub does not know yet. At first it does not know of the consumer."""
        self.away = False
        """Whether the hub did not answer when it was last asked."""
        self._failures = 0
        self._refused: HubRefusedError | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"hub-{reader.stream}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop soon, without waiting for a poll that is under way."""
        self._stopped.set()

    def refusal(self) -> HubRefusedError | None:
        """The hub's refusal when it was last asked, if it refused. Raises what the thread failed with, which is a bug."""
        if self._failure is not None:
            raise self._failure
        return self._refused

    @property
    def listed(self) -> bool:
        """Whether everything that the hub had was listed, or the hub turned out to be away."""
        return self._listed.is_set()

    def wait_until_listed(self, seconds: float) -> None:
        """Wait for `listed`, for at most `seconds`."""
        self._listed.wait(seconds)

    def acknowledge(self, positions: Mapping[str, int]) -> None:
        """Report, with the next poll, that epochs up to these positions are not needed any more."""
        with self._mutex:
            news = {node: epoch for node, epoch in positions.items() if epoch > self._acknowledged.get(node, 0)}
            if news:
                self._pending = {**(self._pending or {}), **news}

    def step(self) -> float:
        """Report and ask once; return the seconds until the next time. Called by the thread, or by a test without one."""
        try:
            self._report()
            wait_s = POLL_SECONDS if self._index.complete and self.listed else 0.0
            page = self._reader.page(self._index.after, wait_s=wait_s)
        except (HubAwayError, HubRefusedError) as error:
            if not self.away:
                log.warning("hub away", extra={**self._fields, "problem": str(error)})
            self._refused = error if isinstance(error, HubRefusedError) else None
            self.away = True
            self._listed.set()
            self._failures += 1
            return BACK_OFF.wait_s(self._failures, chance=self._reader.chance())
        self._index.add(page)
        if self.away:
            log.info("hub back", extra=self._fields)
        self.away, self._refused, self._failures = False, None, 0
        if page.more:
            return 0.0
        self._listed.set()
        return GATHER_SECONDS

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._stopped.wait(self.step())
        except Exception as error:
            log.exception("following the hub failed", extra=self._fields)
            self._failure = error
            self._listed.set()

    def _report(self) -> None:
        """Report pending positions; those that do not arrive stay pending."""
        with self._mutex:
            news, self._pending = self._pending, None
        if news is None:
            return
        try:
            self._reader.acknowledge(self._consumer, news)
        except HubAwayError:
            with self._mutex:
                self._pending = {**news, **(self._pending or {})}
            raise
        except HubRefusedError as error:
            # Rows stay at the hub for longer than they need to. That is no reason to stop.
            log.warning("hub refused a position", extra={"consumer": self._consumer, "problem": str(error)})
            return
        self._acknowledged |= news
