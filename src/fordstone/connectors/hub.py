"""Kinds `hub` (a stream at a hub as a source: nodes are partitions, epochs are positions) and `center` (the same stream as a sink).

`hub.client.reader` asks the hub, checks the rows and decides about time; here they become partitions and chunks. Whole epochs
are read. While the hub is away there is nothing to read, and nothing fails; only a read that was planned (`until`) waits for
it, for a bounded time. Addresses and tokens are in the spec's `at`, beside what the plan means.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import (
    Capability,
    Chunk,
    ClockUs,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    Idleness,
    OpenContext,
    Reader,
    ReadPlan,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
)
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, HubAwayError, HubError, SourceError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient, client_of
from fordstone.hub.client.reader import (
    EPOCHS_PER_READ_MAX,
    Follower,
    StreamIndex,
    StreamReader,
    declared_us,
    find_gaps,
)
from fordstone.hub.messages import StreamEpoch
from fordstone.lang.schema import Schema
from fordstone.operators.base import ROW_WATERMARK
from fordstone.plan.ids import PartitionId, Position, checked_name

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS: Final = 10.0
"""Timeout for the hub's first answer, so that all nodes join together."""
QUIET_US: Final = 1_000_000
"""Pause after a blob could not be read."""
STREAMS_MAX: Final = 32
"""Maximum number of streams whose index a process keeps for planned reads."""
_ORDINAL_BITS: Final = 31


class HubOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options in the plan."""

    pipeline: str
    stream: str
    consumer: str = "center"
    """The name under which the hub keeps rows for this reader."""


class HubKind(ConnectorKind):
    """The kind `hub`."""

    capabilities = frozenset({Capability.AT_HUB, Capability.DECLARES_TIME})

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        _options(spec)
        return Delivery.EXACTLY_ONCE

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        named = _options(spec)
        if spec.at is msgspec.UNSET or "url" not in spec.at:
            raise ConfigError(f"stream {named.stream} of pipeline {named.pipeline} is at a hub. Say which: --hub URL.")
        address = HubAddress.from_at(spec.at)
        planned = _planned_index(address, named.pipeline, named.stream)
        if planned.is_stale():
            _planned_index.cache_clear()
            planned = _planned_index(address, named.pipeline, named.stream)
        return HubSource(
            client_of(address),
            named,
            options.schema,
            bounded=options.bounded,
            clock_us=context.clock_us,
            planned=planned,
        )


class CenterKind(ConnectorKind):
    """The kind `center`: the far end of the cut. The edge engine's outbox takes its rows, so it is never opened."""

    capabilities = frozenset({Capability.AT_HUB, Capability.CROSSES})

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.EXACTLY_ONCE

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        del spec, context
        raise ConfigError(
            f"step {stream.step}: rows for the center leave through the edge engine's outbox. "
            "Run this part with: fordstone run FILE --part edge --hub URL."
        )


def _options(spec: ConnectorSpec) -> HubOptions:
    try:
        options = msgspec.convert(spec.options, HubOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"hub: {error}. Options are: {', '.join(HubOptions.__struct_fields__)}.") from error
    for name in HubOptions.__struct_fields__:
        checked_name(getattr(options, name), name)
    return options


class HubSource(Source):
    """The nodes of a stream as partitions.

    A process that plans (the edge engine, Spark's planner) follows the hub in the background. One that only makes planned
    reads (a task of Spark) lists what it needs.
    """

    def __init__(
        self,
        client: HubClient,
        options: HubOptions,
        schema: Schema,
        *,
        bounded: bool,
        clock_us: ClockUs,
        planned: StreamIndex | None = None,
        pause: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = random.random,
        follower: Callable[..., Follower] = Follower,
    ) -> None:
        """`planned`: the index for reads that were planned elsewhere, shared within the process."""
        self.options = options
        self.schema = schema
        self.bounded = bounded
        self.reader = StreamReader(client, options.pipeline, options.stream, pause=pause, chance=chance)
        self._clock_us = clock_us
        self._make_follower = follower
        self._planned = planned if planned is not None else StreamIndex()
        self._own: StreamIndex | None = None
        self._ends: dict[str, int] = {}
        """Of bounded input, the last epoch of each node."""
        self._follower: Follower | None = None
        self._quiet_until_us: int | None = None
        self._readers = 0
        self._mutex = threading.RLock()

    def partitions(self) -> Sequence[PartitionId]:
        """Nodes, by name. The first call waits for the hub's answer, unless the hub is away."""
        index = self._index()
        if self._follower is not None and (refusal := self._follower.refusal()) is not None:
            raise self.reader.refused(refusal)
        return [PartitionId(node) for node in (self._ends if self.bounded else index.nodes())]

    def open(self, partition: PartitionId, position: Position, *, with_positions: bool) -> Reader:
        with self._mutex:
            self._readers += 1
        return HubReader(self, partition, int(position), with_positions=with_positions)

    def plan_read(self, partition: PartitionId, position: Position, rows_max: int) -> ReadPlan:
        """From the index. While the hub is away there is nothing: what was planned then could not be read."""
        found = self.available(partition, int(position), max(1, rows_max), epochs_max=None)
        end = found[-1].epoch if found else int(position)
        return ReadPlan(position=Position(end), ended=self.ends_at(partition, end))

    def idleness(self, partition: PartitionId, position: Position) -> Idleness:
        """A finished node is not waited for; it may be started again. While the hub is away, nothing is known."""
        index = self._index()
        if self._follower is not None and (self._follower.away or not index.complete):
            return Idleness.UNKNOWN
        return Idleness.FINISHED if index.is_finished(partition, int(position)) else Idleness.EXPECTED

    def ack(self, cuts: Mapping[str, PartitionCut]) -> None:
        """Report the positions to the hub, in the background. Those that do not arrive are reported the next time."""
        positions = {node: cut.position for node, cut in cuts.items() if cut.position > 0}
        if self._own is not None:
            self._own.forget(positions)
        if self._follower is not None:
            self._follower.acknowledge(positions)
        elif self.bounded and self._own is not None and not self._is_quiet():
            try:
                self.reader.acknowledge(self.options.consumer, positions)
            except HubError as error:
                self._be_quiet()
                log.warning("position not acknowledged", extra={"stream": self.options.stream, "problem": str(error)})

    def share_read(self, cuts: Mapping[str, PartitionCut]) -> float | None:
        epochs = sum(self._ends.values())
        read = sum(min(cut.position, self._ends.get(node, 0)) for node, cut in cuts.items())
        return read / epochs if epochs else None

    def close(self) -> None:
        """Stop following, until something is asked again. Garbage collection does it too."""
        with self._mutex:
            if self._follower is not None:
                self._follower.stop()
            self._follower = None

    # For the readers.

    def reader_closed(self) -> None:
        """Stop following with the last reader of a run."""
        with self._mutex:
            self._readers -= 1
            if self._readers == 0:
                self.close()

    def available(
        self, node: str, position: int, rows_max: int, *, epochs_max: int | None = EPOCHS_PER_READ_MAX
    ) -> list[StreamEpoch]:
        index = self._index()
        away = self._follower is not None and self._follower.away
        if not index.complete or self._is_quiet() or (away and index.blobs is None):
            return []
        if 0 < (last := index.last(node)) < position:  # the hub drops the oldest epochs first, so it was set back
            raise self.reader.set_back(node, last, f"{position} has been read from it")
        until = self._ends.get(node, 0) if self.bounded else None
        return index.epochs_after(node, position, rows_max, until=until, epochs_max=epochs_max)

    def ends_at(self, node: str, position: int) -> bool:
        """Whether bounded input is known to end there."""
        return self.bounded and self._own is not None and position >= self._ends.get(node, 0)

    def read_now(self, node: str, position: int, rows_max: int) -> list[tuple[StreamEpoch, list[pl.DataFrame]]]:
        """The next epochs with their rows, as far as they can be had now."""
        try:
            return self._rows(node, position, self.available(node, position, rows_max), self._index())
        except HubAwayError:
            self._be_quiet()
            return []

    def read_planned(
        self, node: str, position: int, rows_max: int, until: int
    ) -> list[tuple[StreamEpoch, list[pl.DataFrame]]]:
        """The next epochs with their rows, up to one that was there when the read was planned."""
        index = self._own if self._own is not None else self._planned
        self.reader.list_until(index, node, until)
        entries = index.epochs_after(node, position, rows_max, until=until)
        if not entries:
            raise self._lost(node, position, None)
        return self.reader.retry(lambda: self._rows(node, position, entries, index))

    def _rows(
        self, node: str, position: int, entries: Sequence[StreamEpoch], index: StreamIndex
    ) -> list[tuple[StreamEpoch, list[pl.DataFrame]]]:
        if position and find_gaps({node: position}, entries):
            raise self._lost(node, position, entries[0].epoch)
        if entries and entries[0].epoch > position + 1:
            # The stream may have begun with a later epoch; or another center had read the others.
            log.warning(
                "first epochs of node no longer at hub",
                extra={"stream": self.reader.title, "node": node, "epoch": entries[0].epoch},
            )
        frames: dict[int, list[pl.DataFrame]] = {entry.epoch: [] for entry in entries}
        for entry, frame in self.reader.frames(entries, self.schema, index.blobs):
            frames[entry.epoch].append(frame)
        return [(entry, frames[entry.epoch]) for entry in entries]

    def _lost(self, node: str, position: int, first: int | None) -> SourceError:
        return SourceError(
            f"{self.reader.title}: of node {node} epoch {position + 1} is to be read, and the hub no longer has it"
            + ("." if first is None else f": its next one is {first}.")
            + " Another reader with the same consumer name may have acknowledged it. Restore the hub's data, or start over with "
            "another state directory."
        )

    def _be_quiet(self) -> None:
        self._quiet_until_us = self._clock_us() + QUIET_US

    def _is_quiet(self) -> bool:
        return self._quiet_until_us is not None and self._clock_us() < self._quiet_until_us

    def _index(self) -> StreamIndex:
        """The index of a process that plans: listed once if input is bounded, else followed from here on."""
        with self._mutex:
            if self._own is None:
                self._own = self._list() if self.bounded else StreamIndex()
            if self._follower is None and not self.bounded:
                self._follower = self._make_follower(self.reader, self._own, consumer=self.options.consumer)
                weakref.finalize(self, self._follower.stop)
                self._follower.start()
                self._follower.wait_until_listed(FIRST_WAIT_SECONDS)
            return self._own

    def _list(self) -> StreamIndex:
        index = StreamIndex()
        self.reader.retry(lambda: self.reader.acknowledge(self.options.consumer, {}))
        for page in self.reader.pages():
            index.add(page)
        self._ends = {node: index.last(node) for node in index.nodes()}
        return index


class HubReader(Reader):
    """Reads the epochs of one node."""

    def __init__(self, source: HubSource, node: str, position: int, *, with_positions: bool) -> None:
        self._source: HubSource | None = source
        self._node = node
        self._position = position
        self._with_positions = with_positions

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        """Whole epochs: small ones together up to `rows_max` rows, a large one alone."""
        source, rows_max = self._source, max(1, rows_max)
        if source is None:
            raise AssertionError("a closed reader was asked to read")
        if until is None:
            found = source.read_now(self._node, self._position, rows_max)
        elif self._position >= until:
            return None
        else:
            found = source.read_planned(self._node, self._position, rows_max, int(until))
        if found:
            return self._chunk(source, found)
        if source.ends_at(self._node, self._position):
            return Chunk(frame=source.schema.empty(), position=Position(self._position), ended=True)
        return None

    def close(self) -> None:
        if self._source is not None:
            self._source.reader_closed()
        self._source = None

    def _chunk(self, source: HubSource, found: Sequence[tuple[StreamEpoch, list[pl.DataFrame]]]) -> Chunk:
        frames: list[pl.DataFrame] = []
        late: list[pl.Series] = []
        places: list[pl.Series] = []
        for entry, runs in found:
            first = entry.epoch << _ORDINAL_BITS
            for rows in runs:
                frames.append(rows.select(list(source.schema)))
                late.append(_watermarks_of(rows))
                places.append(pl.int_range(first, first + rows.height, eager=True))
                first += rows.height
        self._position = found[-1][0].epoch
        watermarks = pl.concat([pl.Series(dtype=pl.Int64), *late])
        return Chunk(
            frame=pl.concat([source.schema.empty(), *frames]),
            position=Position(self._position),
            row_positions=pl.concat([pl.Series(dtype=pl.Int64), *places]) if self._with_positions else None,
            ended=source.ends_at(self._node, self._position),
            watermark_us=max(declared_us(entry) for entry, _ in found),
            late=watermarks if watermarks.null_count() < watermarks.len() else None,
        )


def _watermarks_of(rows: pl.DataFrame) -> pl.Series:
    if ROW_WATERMARK not in rows.columns:
        return pl.repeat(None, rows.height, dtype=pl.Int64, eager=True).rename("")
    return rows.get_column(ROW_WATERMARK).rename("")


@lru_cache(maxsize=STREAMS_MAX)
def _planned_index(address: HubAddress, pipeline: str, stream: str) -> StreamIndex:  # noqa: ARG001 - the key of the cache
    """The index of planned reads, one per stream and process: Spark's workers open a source for each read."""
    return StreamIndex()
