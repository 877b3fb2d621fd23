"""How far a query has read a stream of a hub, and what its next batch is: pure decisions about offsets.

An offset is, for every node, the newest epoch that was read, with the hub's number of the commits that are read whole and
a time up to which all nodes have come. Spark compares offsets as text: the same offset always has the same text.

Invariants: a batch is made of whole epochs, of each node in order and without gaps; offsets only grow; an offset differs
from the one before only if there are epochs in between.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fordstone.errors import SourceError
from fordstone.hub.messages import StreamEpoch
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US

MAX_AHEAD_US: Final = 3_600_000_000
"""A node's time counts so far beyond the hub's clock at most."""
_FIELDS: Final = frozenset({"nodes", "seq", "watermark_us"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Where a query stands in a stream."""

    nodes: Mapping[str, int] = field(default_factory=dict)
    seq: int = 0
    """The hub's number: of every commit up to it all epochs are read."""
    watermark_us: int = TIME_MIN_US
    """All nodes that were known had come at least so far."""

    def to_json(self) -> dict[str, Any]:
        """For Spark. Equal offsets give equal text: names are in order."""
        nodes = {node: self.nodes[node] for node in sorted(self.nodes)}
        return {"nodes": nodes, "seq": self.seq, "watermark_us": self.watermark_us}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Offset:
        """Back from Spark's checkpoint.

        Raises:
            SourceError: Something else wrote it.
        """
        nodes = value.get("nodes")
        if (
            set(value) != _FIELDS
            or not isinstance(nodes, dict)
            or not all(type(number) is int for number in (*nodes.values(), value["seq"], value["watermark_us"]))
        ):
            raise SourceError(
                f"the query's checkpoint has an offset that format 'fordstone' did not write: {str(value)[:200]}. "
                "Use a checkpoint location of this query's own."
            )
        return cls(nodes=dict(nodes), seq=value["seq"], watermark_us=value["watermark_us"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How much a batch may have. Its first epoch is always in it, however large."""

    rows: int | None = None
    size_bytes: int | None = None
    epochs: int | None = None

    def allows(self, rows: int, size_bytes: int, epochs: int) -> bool:
        """Whether a batch may be so large."""
        return (
            (self.rows is None or rows <= self.rows)
            and (self.size_bytes is None or size_bytes <= self.size_bytes)
            and (self.epochs is None or epochs <= self.epochs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Epochs of a node that the hub no longer has."""

    node: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRead:
    """One run to be read, and whose it is."""

    node: str
    epoch: int
    digest: str
    size_bytes: int
    rows: int


def unread(start: Offset, entries: Iterable[StreamEpoch]) -> list[StreamEpoch]:
    """Those entries that lie behind the offset, in the hub's order."""
    found = [entry for entry in entries if entry.epoch > start.nodes.get(entry.node, 0)]
    return sorted(found, key=lambda entry: (entry.seq, entry.node, entry.epoch))


def next_offset(start: Offset, entries: Iterable[StreamEpoch], *, read_to: int, limit: Limit) -> Offset:
    """The end of the next batch; `start` itself if there is nothing to read.

    Args:
        start: The end of the batch before.
        entries: All that the hub has committed behind `start.seq` and up to `read_to`.
        read_to: The hub's number up to which `entries` go.
        limit: How much the batch may have.
    """
    waiting = unread(start, entries)
    taken = within(waiting, limit)
    if not taken:
        return start
    nodes = dict(start.nodes)
    times_us: dict[str, int] = {}
    for entry in taken:
        nodes[entry.node] = entry.epoch
        times_us[entry.node] = max(times_us.get(entry.node, TIME_MIN_US), time_of(entry))
    seq = read_to if len(taken) == len(waiting) else waiting[len(taken)].seq - 1
    # Of a node that says nothing new all that is known is that it was no further back than the watermark.
    silent = [start.watermark_us] if any(node not in times_us for node in nodes) else []
    watermark_us = max(start.watermark_us, min([*times_us.values(), *silent]))
    return Offset(nodes=nodes, seq=max(start.seq, seq), watermark_us=watermark_us)


def within(waiting: Sequence[StreamEpoch], limit: Limit) -> list[StreamEpoch]:
    """As many of the first as the limit allows, and one at least."""
    rows = size_bytes = 0
    for number, entry in enumerate(waiting):
        rows += sum(run.rows for run in entry.runs)
        size_bytes += sum(run.size_bytes for run in entry.runs)
        if number and not limit.allows(rows, size_bytes, number + 1):
            return list(waiting[:number])
    return list(waiting)


def time_of(entry: StreamEpoch) -> int:
    """How far the node's time has come, as far as it counts: a clock that runs ahead does not take the others along."""
    if entry.ended or entry.watermark_us == TIME_MAX_US:
        return entry.watermark_us
    return min(entry.watermark_us, entry.received_us + MAX_AHEAD_US)


def gaps(start: Offset, waiting: Iterable[StreamEpoch]) -> list[Gap]:
    """Where epochs are missing between what was read and what is there. A node that was never read begins anywhere."""
    found, at = [], dict(start.nodes)
    for entry in waiting:
        if entry.node in at and entry.epoch > at[entry.node] + 1:
            found.append(Gap(node=entry.node, first=at[entry.node] + 1, last=entry.epoch - 1))
        at[entry.node] = entry.epoch
    return found


def batch(start: Offset, end: Offset, entries: Iterable[StreamEpoch]) -> list[StreamEpoch]:
    """The epochs of a batch that was planned, perhaps by a query before this one."""
    return [entry for entry in unread(start, entries) if entry.epoch <= end.nodes.get(entry.node, 0)]


def lost(start: Offset, end: Offset, found: Iterable[StreamEpoch]) -> list[Gap]:
    """What of a planned batch is not among `found`."""
    held = list(found)
    missing = gaps(start, held)
    newest = dict(start.nodes)
    for entry in held:
        newest[entry.node] = max(newest.get(entry.node, 0), entry.epoch)
    for node, epoch in sorted(end.nodes.items()):
        if newest.get(node, 0) < epoch:
            missing.append(Gap(node=node, first=newest.get(node, 0) + 1, last=epoch))
    return missing


def reads_of(entries: Iterable[StreamEpoch]) -> list[RunRead]:
    """The runs with rows of these epochs."""
    return [
        RunRead(node=entry.node, epoch=entry.epoch, digest=run.digest, size_bytes=run.size_bytes, rows=run.rows)
        for entry in entries
        for run in entry.runs
        if run.rows
    ]


def assign(reads: Sequence[RunRead], tasks: int) -> list[tuple[RunRead, ...]]:
    """Runs for at most so many tasks: large ones first, each to the task with least. No task is without."""
    hands: list[list[RunRead]] = [[] for _ in range(min(tasks, len(reads)))]
    least = [(0, number) for number in range(len(hands))]
    for read in sorted(reads, key=lambda read: (-read.size_bytes, read.node, read.epoch, read.digest)):
        size_bytes, number = heapq.heappop(least)
        hands[number].append(read)
        heapq.heappush(least, (size_bytes + read.size_bytes, number))
    return [tuple(sorted(hand, key=lambda read: (read.node, read.epoch))) for hand in hands]
