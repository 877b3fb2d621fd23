"""The storage seam of the hub's log: what a database must be able to do to hold it.

`HubLog` calls a `LogStore`: one thread opens transactions, any thread opens snapshots. The logic modules (`commits`, `streams`,
`control`, `blob_index`, `retention`) work with the `LogReader` or `LogWriter` that they are given and see no database. Methods
return facts and carry out changes; they decide nothing and never reject a request.

Invariants that every implementation keeps: a transaction becomes visible and durable as a whole or not at all; a snapshot
shows whole transactions only. Ids (`node_id`, `stream_id`, `table_id`) are the store's own and mean nothing outside of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from fordstone.hub.messages import (
    Checkpoint,
    ConsumerPosition,
    ControlVersion,
    EpochEntry,
    EpochInfo,
    Generation,
    Health,
    NodeInfo,
    StreamEpoch,
    StreamInfo,
)
from fordstone.state.base import RunRef


class StoreFailedError(Exception):
    """The database failed (a full disk, a lost connection). Nothing of the open transaction is kept. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One pipeline on one node."""

    node_id: int
    holder: str | None
    """The holder of the lease; None: it was never granted."""
    generation: Generation | None
    head: int
    """The newest epoch; 0: none."""
    head_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One new epoch of a commit."""

    seq: int
    entry: EpochEntry
    digest: str
    first: int
    """The first new epoch of the commit."""
    last: int
    generation: Generation
    received_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTable:
    """One control table and what is kept of it."""

    table_id: int
    pipeline: str
    control: str
    newest: int
    """The version published last; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """One owner that publishes a control table. The owner with the highest generation may publish."""

    generation: int
    batch: int
    last: ControlVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShare:
    """What is kept of one stream from one node, and what its consumers have passed."""

    stream_id: int
    node_id: int
    first: int
    """The oldest epoch kept."""
    passed: int
    """Every consumer has passed this epoch; 0: some consumer has passed none, or there is no consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTotals:
    """Sizes for metrics."""

    blobs: int
    blob_bytes: int
    rows: int
    """In epochs with a sequence number above the one asked for."""
    seq: int


class LogReader(ABC):
    """One consistent view. Used by one thread, and only within the context that gave it."""

    @abstractmethod
    def newest_seq(self) -> int:
        """Return the sequence number of the newest commit; 0: there is none."""

    # Nodes.

    @abstractmethod
    def node(self, pipeline: str, node: str) -> NodeRecord | None:
        """Find a pipeline on a node."""

    @abstractmethod
    def entry_digests(self, node_id: int, first: int, last: int) -> dict[int, str]:
        """Return the digests of the epochs from `first` to `last` that are kept."""

    @abstractmethod
    def checkpoints(self, node_id: int) -> dict[int, Checkpoint]:
        """Return the checkpoints that are kept, by epoch."""

    @abstractmethod
    def nodes(self) -> tuple[NodeInfo, ...]:
        """List every pipeline on every node, by pipeline, then node."""

    @abstractmethod
    def epochs(self, *, pipeline: str | None, node: str | None, limit: int) -> tuple[EpochInfo, ...]:
        """List epochs, newest first; of one pipeline or node if given."""

    # Streams and consumers.

    @abstractmethod
    def stream_epochs(self, pipeline: str, stream: str, *, after: int) -> Iterator[tuple[StreamEpoch, int]]:
        """Yield the epochs of commits later than `after` in order of `seq`, each with the encoded size of its runs.

        The caller stops early, so an implementation must not fetch everything at once.
        """

    @abstractmethod
    def streams(self) -> tuple[StreamInfo, ...]:
        """List every stream, by pipeline, then name."""

    @abstractmethod
    def consumer_position(self, pipeline: str, consumer: str) -> ConsumerPosition | None:
        """Return what a consumer has passed; None: it is not registered."""

    @abstractmethod
    def stream_shares(self) -> list[StreamShare]:
        """List each stream and node of which segments are kept.

        A consumer that has named streams counts for these only; one that has named none counts for all of its pipeline.
        """

    @abstractmethod
    def newest_epoch_received_before(self, stream_id: int, node_id: int, before_us: int) -> int:
        """Return the newest kept epoch that was received before a time; 0: none."""

    # Control tables.

    @abstractmethod
    def control_tables(self) -> list[ControlTable]:
        """List all control tables."""

    @abstractmethod
    def control_table(self, pipeline: str, control: str) -> ControlTable | None:
        """Find a control table."""

    @abstractmethod
    def control_range(self, table_id: int, *, snapshot_until: int) -> tuple[int | None, int | None]:
        """Return the oldest version that is kept, and the newest snapshot up to a version; None: there is none."""

    @abstractmethod
    def control_versions(self, table_id: int, *, start: int, limit: int) -> tuple[ControlVersion, ...]:
        """Return versions from `start` on, in order."""

    @abstractmethod
    def control_version_of_batch(self, table_id: int, owner: str, batch: int) -> ControlVersion | None:
        """Find the version that an owner's batch became."""

    @abstractmethod
    def publisher(self, table_id: int, owner: str) -> Publisher | None:
        """Find an owner that has published before."""

    @abstractmethod
    def newest_publisher_generation(self, table_id: int) -> int:
        """Return the highest generation of any owner; 0: nothing was published."""

    @abstractmethod
    def controls_read_since(self, since_us: int) -> list[tuple[str, dict[str, int]]]:
        """Return, for each node seen since a time, its pipeline and the control versions that it has read."""

    # Blobs.

    @abstractmethod
    def blob_sizes(self, digests: Iterable[str]) -> dict[str, int]:
        """Return the sizes of those blobs that are recorded."""

    @abstractmethod
    def small_blob(self, digest: str) -> bytes | None:
        """Return the content of a small blob; None: it is not small, or not recorded."""

    @abstractmethod
    def unreferenced_blobs(self, *, before_us: int, limit: int) -> list[str]:
        """List blobs without references that were stored before a time, oldest first."""

    @abstractmethod
    def totals(self, *, after_seq: int) -> LogTotals:
        """Return counts for metrics."""


class LogWriter(LogReader):
    """An open transaction, which sees its own changes. Used by the writing thread only."""

    @abstractmethod
    def savepoint(self) -> AbstractContextManager[None]:
        """Undo what is done within if it raises, and raise on. `StoreFailedError`: the whole transaction has failed."""

    # Nodes.

    @abstractmethod
    def grant_lease(self, pipeline: str, node: str, *, holder: str, generation: Generation, now_us: int) -> None:
        """Record the holder of a lease; the node is added if it is new."""

    @abstractmethod
    def next_seq(self) -> int:
        """Take the next sequence number. Numbers grow, and are given out once."""

    @abstractmethod
    def add_epoch(self, pipeline: str, node_id: int, record: EpochRecord) -> None:
        """Add an epoch with a segment for each of its streams. References of blobs are counted by the caller."""

    @abstractmethod
    def move_head(
        self, node_id: int, *, epoch: int, digest: str, controls: Mapping[str, int], committed_us: int
    ) -> None:
        """Record a node's newest epoch and the control versions that it has read."""

    @abstractmethod
    def add_checkpoint(self, node_id: int, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint."""

    @abstractmethod
    def remove_checkpoint(self, node_id: int, epoch: int) -> None:
        """Remove the checkpoint of an epoch."""

    @abstractmethod
    def save_health(self, pipeline: str, node: str, health: Health, *, now_us: int) -> None:
        """Keep a node's newest report; the node is added if it is new."""

    # Consumers.

    @abstractmethod
    def save_position(self, pipeline: str, consumer: str, position: ConsumerPosition, *, now_us: int) -> None:
        """Register a consumer, add the streams that it names, and advance its positions. They never go back."""

    @abstractmethod
    def remove_consumer(self, pipeline: str, consumer: str) -> None:
        """Remove a consumer and its positions; it may be gone already."""

    # Control tables.

    @abstractmethod
    def ensure_control_table(self, pipeline: str, control: str) -> ControlTable:
        """Find a control table, or add it."""

    @abstractmethod
    def add_control_version(self, table_id: int, version: ControlVersion, *, generation: int) -> None:
        """Add a version as the newest one. `generation` is the owner's if it has published before, else a new one."""

    # Blobs.

    @abstractmethod
    def record_blobs(self, blobs: Mapping[str, tuple[int, int]]) -> None:
        """Record sizes and times of stored blobs; what is recorded already is replaced, with its references kept."""

    @abstractmethod
    def save_small_blob(self, digest: str, data: bytes, *, now_us: int) -> None:
        """Record a blob together with its content."""

    @abstractmethod
    def touch_blob(self, digest: str, *, now_us: int) -> None:
        """Record that a blob was stored again now."""

    @abstractmethod
    def add_references(self, changes: Mapping[str, int]) -> None:
        """Add to the number of references of each blob; negative numbers remove some."""

    # Retention. Each call removes at most `limit` rows.

    @abstractmethod
    def remove_segments(self, stream_id: int, node_id: int, *, until: int, limit: int) -> list[Sequence[RunRef]]:
        """Remove a node's oldest segments up to an epoch, and return the runs of each."""

    @abstractmethod
    def remove_entries(self, *, kept: int, limit: int) -> int:
        """Remove epochs without segments, but none of the newest `kept` of a node. Return the number removed."""

    @abstractmethod
    def remove_control_versions(self, table_id: int, *, before: int, limit: int) -> list[str]:
        """Remove the oldest versions before one, and return the digests of their blobs."""

    @abstractmethod
    def remove_blob_if_unreferenced(self, digest: str, *, before_us: int) -> bool | None:
        """Remove the record of a blob without references that was stored before a time, with its content if it is small.

        Return whether it was small; None: nothing was removed.
        """


class LogStore(ABC):
    """A database that holds one hub's log. It has one hub at a time; the hub's directory lock sees to that."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[LogWriter]:
        """Open a transaction, which is durable when the context ends. If it raises, nothing of it is kept.

        Called by one thread, one transaction at a time. `StoreFailedError` if the database fails.
        """

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[LogReader]:
        """Open a consistent view. Called by any thread, many at a time; blocks."""

    @abstractmethod
    def size_bytes(self) -> int:
        """Return the size of the log in storage, for metrics."""

    @abstractmethod
    def close(self) -> None:
        """Release connections. Called once, when nothing is open; it may not be called at all."""
