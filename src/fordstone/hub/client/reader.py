"""Reads one stream at a hub: how far each node has come, the next epochs of the nodes that are wanted, and their rows.

`StreamReader` asks the hub. `StreamFacts` keeps one record per node, and `Follower` keeps these up to date in the background. Epochs are
listed by need: `EpochBuffer` holds a bounded number of them, however far a reader lags. What a position looks like (partitions of a
source, an offset of Spark) is left to callers.

Invariants: memory grows with the number of nodes, never with the number of unread epochs; facts show nodes only once they were complete,
so that all nodes known at the start are seen together; the hub compares each position with its log before it gives epochs after it
(rule 24); rows have the digest and size that the hub listed, and exactly the columns that were asked for.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from operator import attrgetter
from typing import Final, TypeVar

import polars as pl
from msgspec.structs import replace

from fordstone.epochs.untrusted import DecodeBudget, decode_untrusted
from fordstone.errors import (
    DamagedError,
    HubAwayError,
    HubRefusedError,
    NodeQuarantinedError,
    NodeStoppedError,
    RejectedEpochError,
    RejectedRunError,
    SourceError,
)
from fordstone.hub.client.client import HubClient, retry
from fordstone.hub.messages import (
    ENDED_US,
    NODES_PER_REQUEST_MAX,
    NUMBER_MAX,
    PAGE_ENTRIES_MAX,
    POSITIONS_PER_REQUEST_MAX,
    REASON_CHARS_MAX,
    RUNBOOK,
    ConsumerPosition,
    EpochRange,
    EpochsRequest,
    NodeEpochs,
    NodePosition,
    NodeStop,
    QuarantineChange,
    QuarantineRequest,
    StreamEpoch,
    StreamEpochs,
    StreamNode,
    StreamNodes,
)
from fordstone.lang.duration import TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.operators.base import ROW_WATERMARK
from fordstone.protocol.quarantine import describe_ways_on
from fordstone.protocol.retry import Backoff
from fordstone.state.base import RunRef

_events = logging.getLogger(__name__)

MAX_AHEAD_US: Final = 3_600_000_000
"""Maximum by which the time of a node may be ahead of the hub's clock."""
EPOCHS_PER_READ_MAX: Final = 1_000
EPOCHS_HELD_MAX: Final = 10_000
"""Number of listed epochs in a buffer at which only the node that is read next is asked for."""
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
FETCH_AHEAD_RUNS: Final = 16
FETCH_AHEAD_BYTES: Final = 64 << 20
"""What is fetched and waits to be decoded; one larger run waits alone."""
READ_DECODED_BYTES: Final = 256 << 20
"""A read ends after the epoch with which its rows take this much."""
EXAMPLE_NODES_MAX: Final = 50
"""Maximum number of nodes in whose newest epochs rows are looked for before the whole stream is listed."""
EXAMPLE_EPOCHS_MAX: Final = 50
"""Maximum number of their newest epochs."""
START: Final = NodePosition()
"""The position before the first epoch."""
_NOT_ALLOWED: Final = frozenset({401, 403})
_EPOCH: Final = attrgetter("epoch")
_WRONG_LOG: Final = frozenset({"beyond", "differs", "unknown"})
T = TypeVar("T")


# Time: pure decisions.


def is_finished(entry: StreamEpoch | StreamNode) -> bool:
    """Whether the node's input for this stream had ended with this epoch. It may be started again, with a later epoch."""
    return entry.ended or entry.watermark_us >= ENDED_US


def declared_us(entry: StreamEpoch | StreamNode) -> int:
    """How far the node's time has come with an epoch, as far as the hub's clock allows (rule 7); `TIME_MIN_US`: it says nothing.

    The end of a node is not the end of time: others may join, and the node may be started again. So a finished epoch declares
    no time, for every reader. A live reader does not wait for the node until its next epoch (`StreamFacts.is_finished`); a
    bounded one ends time itself, after the last epoch that it reads.
    """
    if is_finished(entry):
        return TIME_MIN_US
    return min(entry.watermark_us, entry.received_us + MAX_AHEAD_US)


# What the hub has.


class StreamFacts:
    """The newest epoch of each node of one stream. May be used from several threads. Filled page by page; it asks nothing itself."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._newest: dict[str, StreamNode] = {}
        self._listing: dict[str, StreamNode] | None = {}
        """What is known of a log until it was listed once."""
        self._nodes: tuple[str, ...] = ()
        self.after = 0
        """Up to which commit, by the hub's number, everything is known."""
        self.log_id: str | None = None
        self.listed_log: str | None = None
        """The log that the newest epochs of nodes are of; None: none was listed to its end."""
        self.complete = False
        """Whether all nodes that the hub had were listed, at least once."""
        self.blobs: str | None = None
        """Where the hub's blobs can be read directly, if anywhere."""

    def add(self, page: StreamNodes) -> bool:
        """Add a page; return whether there is more already.

        If it is of another log than the pages before, that log is listed from the start, and then takes their place.
        """
        with self._mutex:
            if self.log_id is not None and page.log_id != self.log_id:
                self.log_id, self.after, self._listing = page.log_id, 0, {}
                return True
            self.log_id = page.log_id
            target = self._newest if self._listing is None else self._listing
            target.update((node.node, node) for node in page.nodes)
            self.after, self.blobs = page.next, page.blobs
            listed = not page.more and self._listing is not None
            if not page.more and self._listing is not None:
                self._newest, self._listing, self.complete = self._listing, None, True
                self.listed_log = self.log_id
            if listed or (self.complete and len(self._nodes) != len(self._newest)):
                self._nodes = tuple(sorted(self._newest))
            return page.more

    def nodes(self) -> tuple[str, ...]:
        """All nodes that have or had epochs, sorted; none before the facts are complete."""
        with self._mutex:
            return self._nodes

    def newest(self, node: str) -> StreamNode | None:
        """The newest epoch of a node; None: there is none."""
        with self._mutex:
            return self._newest.get(node)

    def all(self) -> tuple[StreamNode, ...]:
        """The newest epoch of each node, in no order."""
        with self._mutex:
            return tuple(self._newest.values())

    def is_finished(self, node: str, position: int) -> bool:
        """Whether the newest epoch of a node that may be read has been read, and it finished there or is in quarantine."""
        newest = self.newest(node)
        if newest is None or position < newest.epoch:
            return False
        return is_finished(newest) or newest.quarantined > 0


class EpochBuffer:
    """Epochs that were listed and not read yet, of each node those after a position. May be used from several threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held: dict[str, tuple[int, list[StreamEpoch]]] = {}
        self.count = 0
        """Number of all epochs in it. One with several runs counts as that many: each takes as much memory."""

    def put(self, node: str, after: int, epochs: Sequence[StreamEpoch]) -> None:
        """Hold the epochs of a node after a position, in place of those that were held."""
        with self._mutex:
            self._drop(node)
            if epochs:
                self._held[node] = (after, list(epochs))
                self.count += _count(epochs)

    def has(self, node: str, position: int, until: int | None = None) -> bool:
        """Whether the next epoch after a position is here, and not after `until`."""
        with self._mutex:
            after, epochs = self._held.get(node, (0, []))
            following = bisect_right(epochs, position, key=_EPOCH)
            if position < after or following == len(epochs):
                return False
            return until is None or epochs[following].epoch <= until

    def epochs_after(
        self,
        node: str,
        position: int,
        rows_max: int,
        *,
        until: int | None = None,
        epochs_max: int = EPOCHS_PER_READ_MAX,
    ) -> list[StreamEpoch]:
        """The epochs after a position, up to about `rows_max` rows; at least one if there is one."""
        with self._mutex:
            after, epochs = self._held.get(node, (0, []))
            if position < after:
                return []
            following = epochs[bisect_right(epochs, position, key=_EPOCH) :]
            return first_epochs(following, rows_max, until=until, epochs_max=epochs_max)

    def forget(self, positions: Mapping[str, int]) -> None:
        """Drop the epochs up to these positions."""
        with self._mutex:
            for node, position in positions.items():
                after, epochs = self._held.get(node, (0, []))
                passed = bisect_right(epochs, position, key=_EPOCH)
                if passed == len(epochs):
                    self._drop(node)
                elif passed:
                    self._held[node] = (max(after, position), epochs[passed:])
                    self.count -= _count(epochs[:passed])

    def _drop(self, node: str) -> None:
        _, epochs = self._held.pop(node, (0, []))
        self.count -= _count(epochs)


def _count(epochs: Sequence[StreamEpoch]) -> int:
    return sum(max(1, len(entry.runs)) for entry in epochs)


def first_epochs(
    epochs: Sequence[StreamEpoch], rows_max: int, *, until: int | None = None, epochs_max: int = EPOCHS_PER_READ_MAX
) -> list[StreamEpoch]:
    """The first of these epochs, up to about `rows_max` rows; at least one if there is one."""
    found: list[StreamEpoch] = []
    rows = 0
    for entry in epochs:
        rows += sum(run.rows for run in entry.runs)
        if (found and (rows > rows_max or len(found) >= epochs_max)) or (until is not None and entry.epoch > until):
            break
        found.append(entry)
        if rows >= rows_max:
            break
    return found


class Pauses:
    """When a reader that asks now and then, and does not wait, may ask again after the hub was away. One thread."""

    def __init__(self, backoff: Backoff, *, clock_us: Callable[[], int], chance: Callable[[], float]) -> None:
        self._backoff = backoff
        self._clock_us = clock_us
        self._chance = chance
        self._failures = 0
        self._until_us: int | None = None

    def failed(self, error: HubAwayError | None = None) -> None:
        self._failures += 1
        retry_after_s = None if error is None else error.retry_after_s
        wait_s = self._backoff.wait_s(self._failures, chance=self._chance(), retry_after_s=retry_after_s)
        self._until_us = self._clock_us() + int(wait_s * 1e6)

    def succeeded(self) -> None:
        self._failures, self._until_us = 0, None

    @property
    def pausing(self) -> bool:
        return self._until_us is not None and self._clock_us() < self._until_us


class StreamReader:
    """Asks a hub for the nodes of one stream, for their epochs and for their rows. May be used from several threads."""

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

    def update(self, facts: StreamFacts, *, wait_s: float = 0.0) -> bool:
        """Add what was committed since; asks once. Return whether there is more already.

        May raise `HubAwayError` and `HubRefusedError`.
        """
        page = self.client.stream_nodes(
            self.pipeline, self.stream, after=facts.after, log_id=facts.log_id, wait_s=wait_s
        )
        return facts.add(page)

    def facts(self) -> StreamFacts:
        """All nodes that there are now.

        Raises:
            SourceError: The hub stays away, or refuses.
        """
        facts = StreamFacts()
        while self.retry(lambda: self.update(facts)):
            pass
        return facts

    def epochs(
        self, ranges: Mapping[str, EpochRange], *, rows_max: int = NUMBER_MAX, epochs_max: int = PAGE_ENTRIES_MAX
    ) -> StreamEpochs:
        """The next epochs of nodes, the most urgent first; asks once, so that some of many nodes may be missing.

        `rows_max`, `epochs_max`: per node. May raise `HubAwayError` and `HubRefusedError`.
        """
        return self._ask(ranges, rows_max=rows_max, epochs_max=epochs_max, listed=True)

    def plan(self, ranges: Mapping[str, EpochRange], *, rows_max: int) -> dict[str, NodeEpochs]:
        """Where the next epochs of nodes end, for about `rows_max` rows of each. May raise as `epochs` does."""
        found: dict[str, NodeEpochs] = {}
        while left := {node: wanted for node, wanted in ranges.items() if node not in found}:
            found |= self._ask(left, rows_max=rows_max, epochs_max=PAGE_ENTRIES_MAX, listed=False).nodes
        return found

    def epochs_between(
        self,
        ranges: Mapping[str, EpochRange],
        *,
        on_stopped: Callable[[str, int, NodeStop], SourceError] | None = None,
        on_missing: Callable[[str, EpochRange], None] | None = None,
    ) -> Iterator[tuple[StreamEpoch, str | None]]:
        """All epochs of these ranges, node by node, and where their blobs can be read directly. Holds one response at a time.

        Args:
            ranges: What to list of each node.
            on_stopped: The error for a node that is stopped after an epoch; by default that of `stopped`.
            on_missing: Called with what is left of a range if the hub has none of it and nobody said to skip it. It may raise.

        Raises:
            SourceError: The hub stays away, or refuses, or waits for a node; `NodeStoppedError`: a node cannot be read on.
        """
        left = dict(ranges)
        while left:
            page = self.retry(lambda: self.epochs(left))
            for node in [node for node in left if node in page.nodes]:
                one, wanted = page.nodes[node], left.pop(node)
                if one.stopped is not None:
                    raise (on_stopped or self.stopped)(node, wanted.after, one.stopped)
                if one.awaited:
                    raise self.awaited(node, wanted.after, one.awaited)
                if not one.epochs and not one.skipped and on_missing is not None:
                    on_missing(node, wanted)
                yield from ((entry, page.blobs) for entry in one.epochs)
                if one.epochs and (wanted.until is None or one.end.epoch < wanted.until):
                    # The hub compares the furthest position that is known with its log, so that all pages are of one log.
                    seen = max(wanted.seen, one.end, key=_EPOCH)
                    left[node] = replace(wanted, after=one.end.epoch, seen=seen)

    def example(self) -> tuple[StreamEpoch, str | None] | None:
        """A recent epoch that has rows, and where its blobs can be read directly; None: no epoch has any."""
        newest = sorted(self.facts().all(), key=lambda one: one.seq, reverse=True)
        recent = {
            one.node: EpochRange(after=max(0, one.epoch - EXAMPLE_EPOCHS_MAX), until=one.epoch, earliest=True)
            for one in newest[:EXAMPLE_NODES_MAX]
        }
        every = {one.node: EpochRange(until=one.epoch, earliest=True) for one in newest}
        for ranges in (recent, every):
            found = None
            for entry, blobs in self.epochs_between(ranges):
                if entry.runs:
                    found = (entry, blobs)
            if found is not None:
                return found
        return None

    def acknowledge(self, consumer: str, positions: Mapping[str, NodePosition]) -> dict[str, str]:
        """Register a consumer, or report up to which epochs it needs nothing any more; return what the hub refused, by node."""
        left, refused = dict(positions), dict[str, str]()
        while True:
            part = {node: left.pop(node) for node in list(left)[:POSITIONS_PER_REQUEST_MAX]}
            position = ConsumerPosition(streams={self.stream: part})
            refused |= self.client.consumer(self.pipeline, consumer, position).refused.get(self.stream, {})
            if not left:
                return refused

    def blob(self, node: str, epoch: int, ref: RunRef, direct_url: str | None) -> bytes:
        """The bytes of a run of an epoch, checked; asks once. An epoch whose rows are damaged at the hub concerns its node only.

        Raises:
            HubAwayError: The hub does not answer.
            RejectedEpochError: The run is damaged at the hub, or lost.
            SourceError: The hub has removed the epoch since it was listed, or refuses.
        """
        where = self._where(node, epoch)
        try:
            return self.client.read_blob(ref, direct_url)
        except HubRefusedError as error:
            if error.code not in {"gone", "not_found"}:
                raise self.refused(error) from error
            if error.code == "not_found" and not self._is_listed(node, epoch, ref):
                raise SourceError(
                    f"{where}: the hub has removed it since it was listed, blob {ref.digest[:12]} and all. Start again, with a consumer name: "
                    "the hub keeps what a named consumer has not read."
                ) from error
            problem = (
                str(error) if error.code == "gone" else f"The hub lists blob {ref.digest[:12]}, and does not have it."
            )
        except DamagedError as error:
            problem = str(error)
        raise RejectedEpochError(
            f"{where}: its rows are damaged at the hub, or lost. {problem} Restore the hub's blobs from a copy.",
            node=node,
            epoch=epoch,
            reason=f"stream {self.stream}: damaged or lost at the hub: {problem}",
        )

    def _is_listed(self, node: str, epoch: int, ref: RunRef) -> bool:
        """Whether the hub still has an epoch that names a run: it removes epochs before it removes blobs."""
        one = self.epochs({node: EpochRange(after=epoch - 1, until=epoch)}).nodes.get(node, NodeEpochs())
        return any(entry.epoch == epoch and ref in entry.runs for entry in one.epochs)

    def _where(self, node: str, epoch: int) -> str:
        return f"{self.title}, epoch {epoch} of node {node}"

    def quarantine(self, error: RejectedEpochError, consumer: str) -> QuarantineChange:
        """Report to the hub that an epoch of a node cannot be taken, so that no reader waits for the node; asks once."""
        reason = error.reason if len(error.reason) <= REASON_CHARS_MAX else f"{error.reason[: REASON_CHARS_MAX - 1]}…"
        request = QuarantineRequest(epoch=error.epoch, reason=reason, by=consumer)
        change = self.client.quarantine(self.pipeline, error.node, request)
        fields = {"pipeline": self.pipeline, "stream": self.stream, "node": error.node, "epoch": error.epoch}
        _events.warning("epoch rejected", extra={**fields, "problem": error.reason})
        return change

    def quarantined(self, error: RejectedEpochError, consumer: str, what_follows: str) -> NodeQuarantinedError:
        """Report an epoch that cannot be taken, and return the error for a read that must not end before it.

        `what_follows`: a sentence. `SourceError` if the hub stays away, or refuses.
        """
        self.retry(lambda: self.quarantine(error, consumer))
        return NodeQuarantinedError(
            f"{error} The node is in quarantine at the hub from this epoch on. {what_follows} "
            f"{describe_ways_on(self.pipeline, error.node, error.epoch)}"
        )

    def frames(
        self, entries: Sequence[StreamEpoch], schema: Schema, direct_url: str | None
    ) -> Iterator[tuple[StreamEpoch, list[pl.DataFrame]]]:
        """The first of these epochs in order, each with its rows: the columns of `schema` and perhaps `ROW_WATERMARK`.

        It ends after the epoch with which all rows take `READ_DECODED_BYTES`, so it gives at least one.

        Raises:
            RejectedEpochError: An epoch cannot be decoded, has other columns, or is too large. Else as `blob`.
        """
        taken = 0
        # A run that is named several times is read once, and counts as often as it is named.
        named = [(entry, Counter(entry.runs)) for entry in entries]
        with closing(self._fetched([(entry, run) for entry, runs in named for run in runs], direct_url)) as fetched:
            for entry, runs in named:
                budget = DecodeBudget.of_epoch(runs)
                frames = {
                    run: self._frame(entry, run, next(fetched), schema, budget, times=times)
                    for run, times in runs.items()
                }
                yield entry, [frames[run] for run in entry.runs]
                taken += budget.taken
                if taken >= READ_DECODED_BYTES:
                    return

    def _fetched(
        self, wanted: Sequence[tuple[StreamEpoch, RunRef]], direct_url: str | None
    ) -> Generator[bytes, None, None]:
        """The bytes of runs in order, some of them fetched ahead if there are many."""
        if len(wanted) < FETCH_THREADS_RUNS_MIN:
            yield from (self.blob(entry.node, entry.epoch, run, direct_url) for entry, run in wanted)
            return
        left, waiting = deque(wanted), deque[tuple[Future[bytes], int]]()
        ahead_bytes = 0
        with ThreadPoolExecutor(FETCH_THREADS, "hub-blobs") as threads:
            try:
                while left or waiting:
                    while left and len(waiting) < FETCH_AHEAD_RUNS:
                        entry, run = left[0]
                        if waiting and ahead_bytes + run.size_bytes > FETCH_AHEAD_BYTES:
                            break
                        waiting.append(
                            (threads.submit(self.blob, entry.node, entry.epoch, run, direct_url), run.size_bytes)
                        )
                        ahead_bytes += run.size_bytes
                        left.popleft()
                    future, size_bytes = waiting.popleft()
                    ahead_bytes -= size_bytes
                    yield future.result()
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

    def stopped(self, node: str, after: int, stop: NodeStop) -> NodeStoppedError:
        """The error for a node that cannot be read on after an epoch. Every such case becomes one here."""
        if stop.code in _WRONG_LOG:
            advice = (
                "Was the hub's data restored from an older copy, or is it another hub? If it was restored: stop the hub, run "
                f"`fordstone hub restore --data DIR`, and start it again; {RUNBOOK} says what follows, and when `fordstone hub skip` helps."
            )
            if stop.code == "differs" and stop.seen:
                advice += (
                    " If that was done, another machine has gone on from the backup. To go on with its epochs after that one: "
                    f"`fordstone hub quarantine {node} --epoch {stop.seen + 1}`, then `fordstone hub skip {node} --until {stop.seen}`."
                )
        elif stop.code == "lost":
            advice = f"To go on with what follows them: `fordstone hub skip`; see {RUNBOOK}."
        elif after == 0:
            advice = (
                "This reader has no position of its own yet, and other consumers have passed them. To begin with the earliest epochs "
                "that the hub keeps: --from-earliest."
            )
        else:
            advice = (
                "Another reader with the same consumer name may have acknowledged them. Restore the hub's data, or pass over them: "
                "`fordstone hub skip`."
            )
        return NodeStoppedError(
            f"{self.title}: node {node} cannot be read on after epoch {after}: {stop.reason}. {advice}",
            node=node,
            epoch=after + 1,
            reason=stop.reason,
        )

    def awaited(self, node: str, after: int, reason: str) -> SourceError:
        """The error for a reader that cannot wait until a node brings back what a restored hub lacks."""
        return SourceError(
            f"{self.title}: node {node} cannot be read on after epoch {after}: {reason}. Once the node has been in contact, run this again."
        )

    def _ask(self, ranges: Mapping[str, EpochRange], *, rows_max: int, epochs_max: int, listed: bool) -> StreamEpochs:
        some = dict(list(ranges.items())[:NODES_PER_REQUEST_MAX])
        request = EpochsRequest(nodes=some, rows_max=rows_max, epochs_max=epochs_max, listed=listed)
        page = self.client.stream_epochs(self.pipeline, self.stream, request)
        if ranges and not page.nodes.keys() & some.keys():
            raise HubAwayError(f"{self.title}: the hub responded for none of the nodes that were asked for.")
        return page

    def _frame(
        self, entry: StreamEpoch, ref: RunRef, data: bytes, schema: Schema, budget: DecodeBudget, *, times: int
    ) -> pl.DataFrame:
        where = self._where(entry.node, entry.epoch)
        columns = {**schema.polars, ROW_WATERMARK: pl.Int64()}
        try:
            before = budget.taken
            frame = decode_untrusted(data, ref, columns, optional={ROW_WATERMARK}, budget=budget)
            budget.take(ref, (times - 1) * (budget.taken - before))
        except RejectedRunError as error:
            raise RejectedEpochError(
                f"{where}: {error} Do the node and the center run "
                "the same version of the pipeline? If what crosses was changed on purpose, let the previous version read what it sent, "
                "or give the cut another name: to_center(name=...).",
                node=entry.node,
                epoch=entry.epoch,
                reason=f"stream {self.stream}: {error}",
            ) from error
        return frame


class Follower:
    """A thread that keeps the facts of a stream up to date, and reports the positions of its consumer to the hub. Used once."""

    def __init__(self, reader: StreamReader, facts: StreamFacts, *, consumer: str) -> None:
        self._reader = reader
        self._facts = facts
        self._consumer = consumer
        self._fields = {"pipeline": reader.pipeline, "stream": reader.stream}
        self._stopped = threading.Event()
        self._listed = threading.Event()
        self._mutex = threading.Lock()
        self._acknowledged: dict[str, NodePosition] = {}
        self._pending: dict[str, NodePosition] | None = {}
        """Positions that the hub does not know yet. At first it does not know of the consumer."""
        self.away = False
        """Whether the hub did not answer when it was last asked."""
        self.problem: str | None = None
        """Why not."""
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

    def acknowledge(self, positions: Mapping[str, NodePosition]) -> None:
        """Report, with the next poll, that epochs up to these positions are not needed any more."""
        with self._mutex:
            known = self._acknowledged
            news = {node: at for node, at in positions.items() if at.epoch > known.get(node, START).epoch}
            if news:
                self._pending = {**(self._pending or {}), **news}

    def step(self) -> float:
        """Report and ask once; return the seconds until the next time. Called by the thread, or by a test without one."""
        try:
            self._report()
            wait_s = POLL_SECONDS if self._facts.complete and self.listed else 0.0
            more = self._reader.update(self._facts, wait_s=wait_s)
        except (HubAwayError, HubRefusedError) as error:
            if not self.away:
                _events.warning("hub away", extra={**self._fields, "problem": str(error)})
            self._refused = error if isinstance(error, HubRefusedError) else None
            self.away, self.problem = True, str(error)
            self._listed.set()
            self._failures += 1
            retry_after_s = error.retry_after_s if isinstance(error, HubAwayError) else None
            return BACK_OFF.wait_s(self._failures, chance=self._reader.chance(), retry_after_s=retry_after_s)
        if self.away:
            _events.info("hub back", extra=self._fields)
        self.away, self.problem, self._refused, self._failures = False, None, None, 0
        if more:
            return 0.0
        self._listed.set()
        return GATHER_SECONDS

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._stopped.wait(self.step())
        except Exception as error:  # noqa: BLE001 - it is logged, and raised by `refusal`
            _events.exception("following the hub failed", extra=self._fields)
            self._failure = error
            self._listed.set()

    def _report(self) -> None:
        """Report pending positions; those that do not arrive stay pending."""
        with self._mutex:
            news, self._pending = self._pending, None
        if news is None:
            return
        try:
            refused = self._reader.acknowledge(self._consumer, news)
        except HubAwayError:
            with self._mutex:
                self._pending = {**news, **(self._pending or {})}
            raise
        except HubRefusedError as error:
            # Rows stay at the hub for longer than they need to. That is no reason to stop.
            _events.warning("position rejected", extra={"consumer": self._consumer, "problem": str(error)})
            return
        self._acknowledged |= news
        for node, reason in refused.items():
            # Reading the node on finds the same, and reports it.
            _events.warning("position rejected", extra={"consumer": self._consumer, "node": node, "problem": reason})
