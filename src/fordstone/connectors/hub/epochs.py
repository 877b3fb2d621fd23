"""Read a stream at the hub: nodes are partitions, epochs positions.

Whole epochs are read. The far end declares its time: each epoch says how far its node's time has come and which of its rows
are late; the hub's clock bounds what a node may claim (rule 7).

A hub that is away is nothing to read, never a failure; only a read that was promised to be there (`until`) waits for it, for
a bounded time. What is read is checked: digests, and the exact columns and types.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec
import polars as pl

from fordstone.connectors.base import ClockUs, Delivery, Idleness, Reader, ReadPlan, Source
from fordstone.connectors.hub.index import Follower, HubReading, StreamIndex, tell
from fordstone.connectors.hub.reader import LATE, HubReader
from fordstone.epochs.manifest import PartitionCut
from fordstone.epochs.run_file import decode_run
from fordstone.errors import DamagedError, HubAwayError, HubError, HubRefusedError, SourceError
from fordstone.hub.messages import StreamEpoch
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS: Final = 10.0
"""At the start the hub's answer is waited for so long, so that all nodes join together."""
PAUSE_FIRST_SECONDS: Final = 0.1
PAUSE_MAX_SECONDS: Final = 5.0
TRIES: Final = 30
"""How often a promised read is tried while the hub is away: for about two minutes."""
QUIET_US: Final = 1_000_000
"""After a blob could not be had, none is asked for so long."""
FETCHED_AT_ONCE: Final = 4
"""Through the hub, what costs time is its answer's way here, not its bytes."""
FETCHED_ALONE_MAX: Final = 8
"""Fewer runs than this are not worth threads."""
_NOT_LET_IN: Final = frozenset({401, 403})
_ALL_EPOCHS: Final = 1 << 61
T = TypeVar("T")


class HubOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    pipeline: str
    stream: str
    consumer: str = "center"
    """Under which name the hub keeps rows for this reader."""


class HubSource(Source):
    """A stream's nodes as partitions.

    Who plans (the edge engine, Spark's planner) follows the hub in the background; who only reads what was planned
    (Spark's tasks) lists what it needs.
    """

    def __init__(
        self,
        client: HubReading,
        options: HubOptions,
        schema: Schema,
        *,
        bounded: bool,
        clock_us: ClockUs,
        planned: StreamIndex | None = None,
        pause: Callable[[float], None] = time.sleep,
        follower: Callable[..., Follower] = Follower,
    ) -> None:
        """`planned`: the index for reads that were planned elsewhere, shared by whoever makes them in this process.

        `follower`: what hears of new epochs, on a thread of its own.
        """
        self.client = client
        self.options = options
        self.schema = schema
        self.bounded = bounded
        self._clock_us = clock_us
        self._pause = pause
        self._make_follower = follower
        self._planned = planned if planned is not None else StreamIndex()
        self._own: StreamIndex | None = None
        self._ends: dict[str, int] = {}
        """Of bounded input, the last epoch of each node."""
        self._follower: Follower | None = None
        self._quiet_until_us: int | None = None
        self._readers = 0
        self._mutex = threading.RLock()

    @property
    def delivery(self) -> Delivery:
        """Replay is exact."""
        return Delivery.EXACTLY_ONCE

    @property
    def title(self) -> str:
        """As messages name it."""
        return f"stream {self.options.stream} of pipeline {self.options.pipeline}"

    def partitions(self) -> Sequence[PartitionId]:
        """Nodes, by name. The first time, the hub's answer is waited for, unless it is away."""
        index = self._looked_at()
        if self._follower is not None and (refusal := self._follower.refusal()) is not None:
            raise _refused(self.title, refusal)
        return [PartitionId(node) for node in (self._ends if self.bounded else index.nodes())]

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        """Start behind an epoch."""
        with self._mutex:
            self._readers += 1
        return HubReader(self, partition, int(position), with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """From the index. While the hub is away there is nothing: what was planned then could not be read."""
        found = self.now(partition, int(position), max(1, rows_max), epochs_max=_ALL_EPOCHS)
        reached = found[-1].epoch if found else int(position)
        return ReadPlan(position=Position(reached), ended=self.ends_at(partition, reached))

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:
        """A node that has come to its end rests: it may be started again. While the hub is away nobody knows."""
        index = self._looked_at()
        if self._follower is not None and (self._follower.away or not index.complete):
            return Idleness.UNKNOWN
        return Idleness.FINISHED if index.rests(partition, int(position)) else Idleness.EXPECTED

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Tell the hub, in the background. What it does not hear now it hears the next time."""
        positions = {node: cut.position for node, cut in cuts.items() if cut.position > 0}
        if self._own is not None:
            self._own.forget(positions)
        if self._follower is not None:
            self._follower.tell(positions)
        elif self.bounded and self._own is not None and not self._is_quiet():
            try:
                tell(self.client, self.options.pipeline, self.options.stream, self.options.consumer, positions)
            except HubError as error:
                self.be_quiet()
                log.warning("hub not told", extra={"stream": self.options.stream, "problem": str(error)})

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        """By epochs."""
        epochs = sum(self._ends.values())
        read = sum(min(cut.position, self._ends.get(node, 0)) for node, cut in cuts.items())
        return read / epochs if epochs else None

    def close(self) -> None:
        """Follow no longer, until something is asked again. Garbage collection does it too."""
        with self._mutex:
            if self._follower is not None:
                self._follower.stop()
            self._follower = None

    # For the readers.

    def reader_closed(self) -> None:
        """With the last reader of a run, its thread goes too."""
        with self._mutex:
            self._readers -= 1
            if self._readers == 0:
                self.close()

    def now(self, node: str, position: int, rows_max: int, *, epochs_max: int | None = None) -> list[StreamEpoch]:
        """The next epochs that can be read now."""
        index = self._looked_at()
        away = self._follower is not None and self._follower.away
        if not index.complete or self._is_quiet() or (away and index.blobs is None):
            return []
        if (last := index.ends_before(node, position)) is not None:
            raise self._set_back(node, last, f"{position} has been read from it")
        until = self._ends.get(node, 0) if self.bounded else None
        bound = {} if epochs_max is None else {"epochs_max": epochs_max}
        return index.behind(node, position, rows_max, until=until, **bound)

    def ends_at(self, node: str, position: int) -> bool:
        """Whether bounded input has ended there. False also for whoever does not know."""
        return self.bounded and self._own is not None and position >= self._ends.get(node, 0)

    def promised(self, node: str, position: int, rows_max: int, until: int) -> list[StreamEpoch]:
        """The next epochs up to `until`, which were there when the read was planned."""
        index = self._own if self._own is not None else self._planned
        while index.last(node) < until:
            if not self._list_more(index):
                raise self._set_back(node, index.last(node), f"{until} was there when this read was planned")
        return index.behind(node, position, rows_max, until=until)

    def rows_of(self, entries: Sequence[StreamEpoch]) -> Iterator[tuple[StreamEpoch, pl.DataFrame]]:
        """The runs of epochs, in order, each with our columns and perhaps `__late`. Many are asked for at once."""
        index = self._own if self._own is not None else self._planned
        wanted = [(entry, number) for entry in entries for number in range(len(entry.runs))]

        def read(one: tuple[StreamEpoch, int]) -> pl.DataFrame:
            return self._run(*one, index.blobs)

        if len(wanted) < FETCHED_ALONE_MAX:
            yield from ((entry, read((entry, number))) for entry, number in wanted)
            return
        with ThreadPoolExecutor(FETCHED_AT_ONCE, "hub-blobs") as threads:
            try:
                yield from zip((entry for entry, _ in wanted), threads.map(read, wanted), strict=True)
            finally:
                threads.shutdown(
                    wait=False, cancel_futures=True
                )  # one that failed would leave the others waiting for nothing

    def patiently(self, work: Callable[[], T]) -> T:
        """Do what was promised to be possible; while the hub is away, try again for a bounded time."""
        for number in itertools.count(1):
            try:
                return work()
            except HubAwayError as error:
                if number == TRIES:
                    raise SourceError(
                        f"{self.title}: {error} It was tried {TRIES} times. Everything stands as it was: start the hub again, or see "
                        "that it can be reached from here, then run this again."
                    ) from error
                self._pause(min(PAUSE_FIRST_SECONDS * 2 ** min(number - 1, 16), PAUSE_MAX_SECONDS))
        raise AssertionError("it counts without end")

    def _set_back(self, node: str, last: int, but: str) -> SourceError:
        return SourceError(
            f"{self.title}: the hub has epochs of node {node} up to {last}, but {but}. Was the hub's data restored from an older "
            "copy, or is it another hub? Bring the data back."
        )

    def be_quiet(self) -> None:
        """Ask for no more blobs for a while."""
        self._quiet_until_us = self._clock_us() + QUIET_US

    def _is_quiet(self) -> bool:
        return self._quiet_until_us is not None and self._clock_us() < self._quiet_until_us

    def _run(self, entry: StreamEpoch, number: int, blobs: str | None) -> pl.DataFrame:
        ref = entry.runs[number]
        where = f"{self.title}, epoch {entry.epoch} of node {entry.node}"
        try:
            return _exact(decode_run(self.client.read_blob(ref, blobs), ref), self.schema)
        except HubRefusedError as error:
            if error.code not in {"not_found", "gone"}:
                raise _refused(self.title, error) from error
            raise SourceError(
                f"{where}: the hub lists it, but its rows (blob {ref.digest[:12]}) are gone. Bring the hub's blobs back: without "
                "them nobody can go on exactly from here."
            ) from error
        except DamagedError as error:
            raise SourceError(f"{where}: {error} Restore the hub's blobs from a copy.") from error
        except (pl.exceptions.PolarsError, KeyError) as error:
            raise SourceError(
                f"{where}: its rows are not what this plan says ({str(error).partition(chr(10))[0]}). Do the node and the center run "
                "the same version of the pipeline? If what crosses was changed on purpose, let the version before read what it sent, or "
                "give the cut another name: to_center(name=...)."
            ) from error

    # What the hub has.

    def _looked_at(self) -> StreamIndex:
        """The index of whoever plans: listed once if input is bounded, else followed from here on."""
        with self._mutex:
            if self._own is None:
                self._own = self._listed() if self.bounded else StreamIndex()
            if self._follower is None and not self.bounded:
                named = self.options
                self._follower = self._make_follower(
                    self.client, self._own, pipeline=named.pipeline, stream=named.stream, consumer=named.consumer
                )
                weakref.finalize(self, self._follower.stop)
                self._follower.start()
                self._follower.wait_for_first(FIRST_WAIT_SECONDS)
            return self._own

    def _listed(self) -> StreamIndex:
        """All that there is now."""
        index, named = StreamIndex(), self.options
        try:
            self.patiently(lambda: tell(self.client, named.pipeline, named.stream, named.consumer, {}))
        except HubRefusedError as error:
            raise _refused(self.title, error) from error
        while not index.complete:
            self._list_more(index)
        self._ends = {node: index.last(node) for node in index.nodes()}
        return index

    def _list_more(self, index: StreamIndex) -> bool:
        """Ask for another page; says whether anything came, or will."""
        after = index.after
        named = self.options
        try:
            page = self.patiently(lambda: self.client.stream_page(named.pipeline, named.stream, after=after))
        except HubRefusedError as error:
            raise _refused(self.title, error) from error
        index.add(page)
        return page.more or bool(page.epochs)


def _exact(rows: pl.DataFrame, schema: Schema) -> pl.DataFrame:
    """The rows with exactly our columns and types, and `__late` if they have it."""
    wanted = dict(schema.polars)
    if LATE in rows.columns:
        wanted.setdefault(LATE, pl.Boolean())
    if rows.schema == pl.Schema(wanted):
        return rows
    return rows.select(list(wanted)).cast(wanted)  # type: ignore[arg-type]  # names to types, as Polars has them


def _refused(title: str, error: HubRefusedError) -> SourceError:
    hint = (
        " Is the token one for centers (fordstone hub token add NAME --center)?" if error.status in _NOT_LET_IN else ""
    )
    return SourceError(f"{title}: {error}{hint}")
