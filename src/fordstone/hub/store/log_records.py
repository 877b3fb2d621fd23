"""What `LogReader` returns of the hub's log, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fordstone.hub.messages import ControlVersion, Generation
from fordstone.protocol.chain import CHAIN_START, ChainFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPages:
    """Pages of the file; free ones hold nothing."""

    pages: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One pipeline on one node."""

    node_id: int
    holder: str | None
    """The holder of the lease; None: it was never granted."""
    generation: Generation | None
    start: str | None
    """The random word of the start that has the lease; None: it was never granted, or the log was restored from a backup since."""
    head: int
    """The newest epoch; 0: none."""
    head_chain: str
    """The chain at `head` (`protocol.chain`)."""
    resync: bool
    """The log was restored from a backup, and the node has not been in contact since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgottenNode:
    """What is left of a node that was forgotten: its closing epoch, which comes after all that it had."""

    node: str
    epoch: int
    chain: str
    seq: int
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSegments:
    """The segments of one stream of one node."""

    stream_id: int
    node_id: int
    node: str
    removed: int
    """The newest epoch whose segment was removed; 0: none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTable:
    """What is kept of one control table."""

    table_id: int
    newest: int
    """The version published last."""
    reached: int
    """The number after which versions go on."""
    chain: str
    """At `newest`."""
    oldest: int | None
    snapshot: int | None
    """The newest snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """An owner of a control table, and the state of the table. The owner with the highest generation may publish."""

    reached: int
    """The number after which versions go on."""
    chain: str = CHAIN_START
    """At the newest version."""
    leader: int = 0
    """The highest generation of any owner; 0: nothing was published."""
    generation: int | None = None
    """None: this owner has published nothing."""
    batch: int = 0
    """The newest one of this owner that counts."""
    starts: tuple[str, ...] = ()
    """Of this owner, the newest last."""
    published: ControlVersion | None = None
    """What the batch became; the owner's last version if that is no longer kept."""
    changes: str | None = None
    """The digest of the rows of the batch as they were published; None: the batch is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTotals:
    """Sizes for metrics."""

    nodes: int
    streams: int
    blobs: int
    blob_bytes: int
    damaged_blobs: int
    rows: int
    """In epochs with a sequence number above the one asked for."""
    seq: int


class BlobRecord(NamedTuple):
    """What is known of a blob."""

    digest: str
    size_bytes: int
    small: bool
    damaged: bool
    refs: int
    """How many rows of the log reference it."""


class NodeBytes(NamedTuple):
    """What a node has at the hub."""

    blobs: int
    """Bytes of the blobs that it references, as often as it references them."""
    log: int
    """About what its rows take in the log."""


class PositionFacts(NamedTuple):
    """What the log has of a node around a position of a consumer."""

    chain: ChainFacts
    """Of a node that was forgotten, its closing epoch."""
    forgotten: bool
    in_stream: bool
    """Whether the node has written to the stream."""


class NodeLag(NamedTuple):
    """When a pipeline on a node has last committed, and its newest epoch."""

    pipeline: str
    node: str
    head: int
    committed_us: int
