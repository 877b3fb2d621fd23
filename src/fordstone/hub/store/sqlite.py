"""The storage of the hub's log, in one SQLite file. The schema and all SQL of the hub are in this module alone.

`commits` and `retention` work with the `LogReader` or `LogWriter` that they are given, and see no database. Methods return
facts and carry out changes; they reject no request. Ids (`node_id`, `stream_id`, `table_id`) mean nothing outside of it.

Invariants: a transaction becomes visible and durable as a whole or not at all; a snapshot shows whole transactions only. A file
of a newer version is rejected, never changed. `blobs.refs` is the number of references that rows of other tables hold.
Rows of `segments` and
`entries` stay for a while after their node or stream was forgotten, as `discarded` says; ids are never used again.
`blobs.stored_us` is in the hub's running time (`ran_us`), which nobody sets. `blobs.small`: the content is in `small_blobs` rather than in the blob store. `blobs.damaged`: the content has another digest, or is
gone; such a blob counts as missing until it is stored again.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from fordstone.errors import ConfigError, StorageError
from fordstone.hub.messages import (
    NUMBER_MAX,
    Checkpoint,
    ConsumerPosition,
    ControlVersion,
    EpochEntry,
    EpochInfo,
    Generation,
    Health,
    NodeInfo,
    NodePosition,
    Quarantine,
    SkippedEpochs,
    StreamEpoch,
    StreamInfo,
    StreamNode,
    StreamSegment,
)
from fordstone.hub.store.blobs import Stored
from fordstone.hub.store.reserve import Reserve
from fordstone.lang.duration import TIME_MIN_US
from fordstone.protocol.chain import CHAIN_START, ChainFacts
from fordstone.protocol.forget import Unread
from fordstone.protocol.retention import Mark
from fordstone.state.base import RunRef

SCHEMA_VERSION: Final = 3
BUSY_MS: Final = 10_000
PAGE_BYTES: Final = 4_096
WAL_PAGES: Final = 4_000
"""Pages in the write-ahead log before SQLite copies them into the file: rarely, because a commit waits for it."""
CACHE_BYTES: Final = 64 << 20
FORMER_LOGS_MAX: Final = 16
"""Maximum number of restores that are looked back to."""
GENERATIONS_SKIPPED: Final = 1_000
"""Take-overs of one node that may have happened between a backup and its restore: the next hub generation is beyond them."""
_FULL: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})
"""Errors of a full disk; the second one is of the index of the write-ahead log."""
_ENTRIES: Final = 0
"""Stands in `discarded` for the entries of a node, in place of a stream."""
PARAMETERS_MAX: Final = 500
"""Maximum number of values in one `IN (...)`."""
_CONSUMER_READS_STREAM: Final = (
    "(EXISTS (SELECT 1 FROM consumer_streams cs WHERE cs.consumer_id = c.id AND cs.stream = s.stream) "
    "OR NOT EXISTS (SELECT 1 FROM consumer_streams cs WHERE cs.consumer_id = c.id))"
)
"""A consumer that has named streams reads these only; one that has named none reads all of its pipeline."""
_READ_BY_ALL: Final = (
    "coalesce((SELECT min(coalesce(p.epoch, 0)) FROM consumers c "  # noqa: S608 - a constant
    "LEFT JOIN passed p ON p.consumer_id = c.id AND p.stream = s.stream AND p.node = n.node "
    f"WHERE c.pipeline = s.pipeline AND {_CONSUMER_READS_STREAM}), 0)"
)
"""The epoch up to which every consumer of a stream has read a node; 0 while no consumer is registered."""

_DIGEST: Final = re.compile(rb"[0-9a-f]{64}")
_REFERENCES: Final = (
    (
        "stream {1} of pipeline {0}, node {2}, epoch {3}",
        """SELECT g.runs, s.pipeline, s.stream, n.node, g.epoch FROM segments g
        JOIN streams s ON s.id = g.stream_id JOIN nodes n ON n.id = g.node_id WHERE g.size_bytes > 0""",
    ),
    (
        "checkpoint {2} of pipeline {0}, node {1}",
        "SELECT c.content, n.pipeline, n.node, c.epoch FROM checkpoints c JOIN nodes n ON n.id = c.node_id",
    ),
    (
        "control table {1} of pipeline {0}, version {2}",
        "SELECT v.content, c.pipeline, c.control, v.version FROM versions v JOIN controls c ON c.id = v.control_id",
    ),
)
"""What references blobs: how it is described, and the query of its content with the names for that."""

SCHEMA: Final = """
CREATE TABLE counter (
  only INTEGER PRIMARY KEY CHECK (only = 1),
  seq INTEGER NOT NULL DEFAULT 0,
  log_id TEXT NOT NULL,
  ran_us INTEGER NOT NULL DEFAULT 0,
  scrub_after TEXT NOT NULL DEFAULT '',
  scrub_due_us INTEGER NOT NULL DEFAULT 0
);
INSERT INTO counter (only, log_id) VALUES (1, lower(hex(randomblob(16))));
CREATE TABLE marks (ran_us INTEGER PRIMARY KEY, seq INTEGER NOT NULL);
CREATE TABLE former_logs (log_id TEXT PRIMARY KEY, restored_us INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE nodes (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  pipeline TEXT NOT NULL,
  node TEXT NOT NULL,
  holder TEXT,
  hub_generation INTEGER,
  local_generation INTEGER,
  start TEXT,
  head INTEGER NOT NULL DEFAULT 0,
  head_chain TEXT NOT NULL DEFAULT '',
  seen_us INTEGER NOT NULL,
  committed_us INTEGER,
  controls BLOB NOT NULL DEFAULT '{}',
  health BLOB,
  resync INTEGER NOT NULL DEFAULT 0,
  UNIQUE (pipeline, node)
);
CREATE INDEX nodes_by_name ON nodes (node);

CREATE TABLE entries (
  node_id INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  digest TEXT NOT NULL,
  chain TEXT NOT NULL,
  hub_generation INTEGER NOT NULL,
  local_generation INTEGER NOT NULL,
  created_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  segments INTEGER NOT NULL,
  PRIMARY KEY (node_id, epoch)
) WITHOUT ROWID;
CREATE INDEX entries_by_seq ON entries (seq);
CREATE INDEX entries_read ON entries (node_id, epoch) WHERE segments = 0;

CREATE TABLE gaps (
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  PRIMARY KEY (node_id, first)
) WITHOUT ROWID;

CREATE TABLE quarantines (
  node_id INTEGER PRIMARY KEY REFERENCES nodes (id) ON DELETE CASCADE,
  epoch INTEGER NOT NULL,
  reason TEXT NOT NULL,
  since_us INTEGER NOT NULL,
  by TEXT NOT NULL
);
CREATE TABLE skips (
  node_id INTEGER NOT NULL REFERENCES nodes (id) ON DELETE CASCADE,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  at_us INTEGER NOT NULL,
  PRIMARY KEY (node_id, first)
) WITHOUT ROWID;

CREATE TABLE streams (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  pipeline TEXT NOT NULL,
  stream TEXT NOT NULL,
  UNIQUE (pipeline, stream)
);

CREATE TABLE stream_nodes (
  stream_id INTEGER NOT NULL REFERENCES streams (id),
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  epochs INTEGER NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  watermark_us INTEGER NOT NULL,
  removed INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  chain TEXT NOT NULL,
  newest_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  PRIMARY KEY (stream_id, node_id)
) WITHOUT ROWID;
CREATE INDEX stream_nodes_by_node ON stream_nodes (node_id);
CREATE INDEX stream_nodes_by_seq ON stream_nodes (stream_id, seq);

CREATE TABLE segments (
  stream_id INTEGER NOT NULL,
  node_id INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  runs BLOB NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  watermark_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  PRIMARY KEY (stream_id, node_id, epoch)
) WITHOUT ROWID;

CREATE TABLE forgotten_nodes (
  pipeline TEXT NOT NULL,
  node TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  chain TEXT NOT NULL,
  seq INTEGER NOT NULL,
  at_us INTEGER NOT NULL,
  PRIMARY KEY (pipeline, node)
) WITHOUT ROWID;
CREATE INDEX forgotten_nodes_by_seq ON forgotten_nodes (pipeline, seq);
CREATE TABLE forgotten_streams (
  pipeline TEXT NOT NULL,
  stream TEXT NOT NULL,
  at_us INTEGER NOT NULL,
  PRIMARY KEY (pipeline, stream)
) WITHOUT ROWID;
CREATE TABLE discarded (
  node_id INTEGER NOT NULL,
  stream_id INTEGER NOT NULL,
  PRIMARY KEY (node_id, stream_id)
) WITHOUT ROWID;

CREATE TABLE checkpoints (
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  epoch INTEGER NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (node_id, epoch)
);

CREATE TABLE consumers (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  consumer TEXT NOT NULL,
  seen_us INTEGER NOT NULL,
  UNIQUE (pipeline, consumer)
);
CREATE TABLE consumer_streams (
  consumer_id INTEGER NOT NULL REFERENCES consumers (id) ON DELETE CASCADE,
  stream TEXT NOT NULL,
  PRIMARY KEY (consumer_id, stream)
) WITHOUT ROWID;
CREATE TABLE passed (
  consumer_id INTEGER NOT NULL REFERENCES consumers (id) ON DELETE CASCADE,
  stream TEXT NOT NULL,
  node TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  chain TEXT NOT NULL,
  PRIMARY KEY (consumer_id, stream, node)
) WITHOUT ROWID;

CREATE TABLE controls (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  control TEXT NOT NULL,
  newest INTEGER NOT NULL DEFAULT 0,
  UNIQUE (pipeline, control)
);
CREATE TABLE publishers (
  control_id INTEGER NOT NULL REFERENCES controls (id),
  owner TEXT NOT NULL,
  generation INTEGER NOT NULL,
  batch INTEGER NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (control_id, owner)
) WITHOUT ROWID;
CREATE TABLE versions (
  control_id INTEGER NOT NULL REFERENCES controls (id),
  version INTEGER NOT NULL,
  owner TEXT NOT NULL,
  batch INTEGER NOT NULL,
  snapshot INTEGER NOT NULL,
  digest TEXT NOT NULL,
  content BLOB NOT NULL,
  PRIMARY KEY (control_id, version)
) WITHOUT ROWID;
CREATE UNIQUE INDEX versions_by_batch ON versions (control_id, owner, batch);
CREATE INDEX versions_by_digest ON versions (digest);

CREATE TABLE blobs (
  digest TEXT PRIMARY KEY,
  size_bytes INTEGER NOT NULL,
  stored_us INTEGER NOT NULL,
  refs INTEGER NOT NULL DEFAULT 0 CHECK (refs >= 0),
  small INTEGER NOT NULL DEFAULT 0,
  damaged INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX blobs_unnamed ON blobs (stored_us) WHERE refs = 0;
CREATE INDEX blobs_damaged ON blobs (digest) WHERE damaged;
CREATE TABLE small_blobs (
  digest TEXT PRIMARY KEY REFERENCES blobs (digest) ON DELETE CASCADE,
  data BLOB NOT NULL
);
"""


class ChainedEntry(NamedTuple):
    """An epoch as it is added, with the digest of its content and the chain at it."""

    entry: EpochEntry
    digest: str
    chain: str


class StoreFailedError(Exception):
    """The database failed (a full disk, a damaged file). Nothing of the open transaction is kept. The text says why."""


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
    oldest: int | None
    snapshot: int | None
    """The newest snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """An owner of a control table, and the state of the table. The owner with the highest generation may publish."""

    newest: int = 0
    """The version published last, by any owner."""
    leader: int = 0
    """The highest generation of any owner; 0: nothing was published."""
    generation: int | None = None
    """None: this owner has published nothing."""
    published: ControlVersion | None = None
    """What the batch became, if it or a later one was published; the owner's last version if that is no longer kept."""


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


class NodeLag(NamedTuple):
    """When a pipeline on a node has last committed, and its newest epoch."""

    pipeline: str
    node: str
    head: int
    committed_us: int


class LogReader:
    """One consistent view. Used by one thread, and only within the context that gave it."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def newest_seq(self) -> int:
        """Return the sequence number of the newest commit; 0: there is none."""
        return int(self._db.execute("SELECT seq FROM counter").fetchone()[0])

    def ran_us(self) -> int:
        """Return how long the hub had run, in all its life, when that was saved last."""
        return int(self._db.execute("SELECT ran_us FROM counter").fetchone()[0])

    def marks(self) -> list[Mark]:
        """List moments of the running time, in order, with the newest commit at each."""
        return [Mark(*row) for row in self._db.execute("SELECT ran_us, seq FROM marks ORDER BY ran_us")]

    def log_id(self) -> str:
        """Return the random word that tells this log from others, and from what it was before a restore."""
        return str(self._db.execute("SELECT log_id FROM counter").fetchone()[0])

    def former_logs(self) -> tuple[str, ...]:
        """Return the ids that this log had before it was restored from a backup, the newest first."""
        rows = self._db.execute("SELECT log_id FROM former_logs ORDER BY restored_us DESC LIMIT ?", (FORMER_LOGS_MAX,))
        return tuple(log_id for (log_id,) in rows)

    def node(self, pipeline: str, node: str) -> NodeRecord | None:
        row = self._db.execute(
            "SELECT id, holder, hub_generation, local_generation, start, head, head_chain, resync FROM nodes "
            "WHERE pipeline = ? AND node = ?",
            (pipeline, node),
        ).fetchone()
        if row is None:
            return None
        return NodeRecord(
            node_id=row[0], holder=row[1], generation=_generation(row[2], row[3]), start=row[4], head=row[5],
            head_chain=row[6], resync=bool(row[7]),
        )  # fmt: skip

    def entry_digests(self, node_id: int, first: int, last: int) -> dict[int, str]:
        """Return the digests of the epochs from `first` to `last` that are kept."""
        rows = self._db.execute(
            "SELECT epoch, digest FROM entries WHERE node_id = ? AND epoch BETWEEN ? AND ?", (node_id, first, last)
        )
        return dict(rows.fetchall())

    def chain_facts(self, pipeline: str, node: str, epoch: int) -> ChainFacts:
        """Return what the log has of a node around an epoch."""
        row = self._db.execute(
            "SELECT n.head, n.head_chain, e.chain, x.digest, x.chain FROM nodes n "
            "LEFT JOIN entries e ON e.node_id = n.id AND e.epoch = :epoch "
            "LEFT JOIN entries x ON x.node_id = n.id AND x.epoch = :epoch + 1 "
            "WHERE n.pipeline = :pipeline AND n.node = :node",
            {"pipeline": pipeline, "node": node, "epoch": epoch},
        ).fetchone()
        if row is None:
            return ChainFacts()
        following = None if row[3] is None else (row[3], row[4])
        return ChainFacts(head=row[0], head_chain=row[1], chain=row[2], following=following)

    def lost_epochs(self, node_id: int) -> tuple[tuple[int, int], ...]:
        """Return first and last of each range of epochs that was lost when the log was restored from a backup."""
        rows = self._db.execute("SELECT first, last FROM gaps WHERE node_id = ? ORDER BY first", (node_id,))
        return tuple((first, last) for first, last in rows)

    def quarantine(self, node_id: int) -> Quarantine | None:
        """Return why a node is not read on; None: it is read."""
        row = self._db.execute(
            "SELECT epoch, reason, since_us, by FROM quarantines WHERE node_id = ?", (node_id,)
        ).fetchone()
        return None if row is None else Quarantine(epoch=row[0], reason=row[1], since_us=row[2], by=row[3])

    def skips(self, node_id: int) -> tuple[SkippedEpochs, ...]:
        """Return the epochs of a node that readers pass over."""
        rows = self._db.execute(
            "SELECT first, last, rows, at_us FROM skips WHERE node_id = ? ORDER BY first", (node_id,)
        )
        return tuple(SkippedEpochs(first=row[0], last=row[1], rows=row[2], at_us=row[3]) for row in rows)

    def rows_between(self, node_id: int, first: int, last: int) -> int:
        """Return the number of rows of these epochs, as far as they are known."""
        return self._count(
            "SELECT coalesce(sum(rows), 0) FROM entries WHERE node_id = ? AND epoch BETWEEN ? AND ?",
            node_id,
            first,
            last,
        )

    def quarantined_nodes(self, limit: int) -> list[tuple[str, str, int]]:
        """Return pipeline, node and epoch of the nodes in quarantine, those first that were put there last."""
        rows = self._db.execute(
            "SELECT n.pipeline, n.node, q.epoch FROM quarantines q JOIN nodes n ON n.id = q.node_id ORDER BY q.since_us DESC LIMIT ?",
            (limit,),
        )
        return [(pipeline, node, epoch) for pipeline, node, epoch in rows]

    def checkpoints(self, node_id: int) -> dict[int, Checkpoint]:
        rows = self._db.execute("SELECT epoch, content FROM checkpoints WHERE node_id = ?", (node_id,))
        return {epoch: msgspec.json.decode(content, type=Checkpoint) for epoch, content in rows}

    def nodes(
        self, *, pipeline: str | None = None, after: tuple[str, str] = ("", ""), limit: int = -1
    ) -> tuple[NodeInfo, ...]:
        """List pipelines on nodes by pipeline, then node: those later in this order than `after`."""
        chosen = "" if pipeline is None else "AND pipeline = :pipeline "
        rows = self._db.execute(
            "SELECT id, node, pipeline, head, hub_generation, local_generation, seen_us, committed_us, health, resync FROM nodes "  # noqa: S608 - a constant or nothing
            f"WHERE (pipeline, node) > (:first, :second) {chosen}ORDER BY pipeline, node LIMIT :limit",
            {"first": after[0], "second": after[1], "pipeline": pipeline, "limit": limit},
        ).fetchall()
        return tuple(
            NodeInfo(
                node=node, pipeline=pipeline, head=head, seen_us=seen_us, committed_us=committed_us,
                generation=_generation(hub, local),
                health=None if health is None else msgspec.json.decode(health, type=Health),
                lost=self.lost_epochs(node_id), resync=bool(resync), quarantine=self.quarantine(node_id),
                skips=self.skips(node_id),
            )
            for node_id, node, pipeline, head, hub, local, seen_us, committed_us, health, resync in rows
        )  # fmt: skip

    def epochs(
        self, *, pipeline: str | None, node: str | None, before: tuple[int, int] | None = None, limit: int
    ) -> tuple[EpochInfo, ...]:
        """List epochs, newest first; of one pipeline or node if given. `before`: only those older than this `seq` and epoch."""
        if pipeline is not None and node is not None:
            # One node's rows are contiguous, in this order.
            chosen = (
                "e.node_id = (SELECT id FROM nodes WHERE pipeline = :pipeline AND node = :node) AND e.epoch < :epoch "
                "ORDER BY e.node_id DESC, e.epoch DESC"
            )
        else:
            chosen = (
                "(e.seq, e.epoch) < (:seq, :epoch) AND (:pipeline IS NULL OR n.pipeline = :pipeline) "
                "AND (:node IS NULL OR n.node = :node) ORDER BY e.seq DESC, e.epoch DESC"
            )
        seq, epoch = before or (NUMBER_MAX, NUMBER_MAX)
        rows = self._db.execute(
            "SELECT e.seq, n.pipeline, n.node, e.epoch, e.first, e.last, e.rows, e.size_bytes, e.received_us, e.created_us, "  # noqa: S608 - one of two constants
            "e.hub_generation, e.local_generation FROM entries e JOIN nodes n ON n.id = e.node_id "
            f"WHERE {chosen} LIMIT :limit",
            {"pipeline": pipeline, "node": node, "seq": seq, "epoch": epoch, "limit": limit},
        )
        return tuple(
            EpochInfo(
                seq=row[0], pipeline=row[1], node=row[2], epoch=row[3], first=row[4], last=row[5], rows=row[6], size_bytes=row[7],
                received_us=row[8], created_us=row[9], generation=Generation(hub=row[10], local=row[11]),
            )
            for row in rows
        )  # fmt: skip

    def stream_nodes(self, pipeline: str, stream: str, *, after: int, limit: int) -> tuple[StreamNode, ...]:
        """List the nodes of a stream with a commit later than `after`, in order of `seq`.

        A node that was forgotten has ended, for readers that may know it: those that go on from a commit, and consumers with a position.
        """
        rows = self._db.execute(
            "SELECT * FROM (SELECT n.node, sn.seq AS seq, sn.last, sn.chain, sn.newest_us, sn.received_us, sn.ended, sn.removed, sn.size_bytes, "
            "sn.stream_id, sn.node_id, q.epoch "
            "FROM stream_nodes sn JOIN nodes n ON n.id = sn.node_id LEFT JOIN quarantines q ON q.node_id = n.id "
            "WHERE sn.stream_id = (SELECT id FROM streams WHERE pipeline = :pipeline AND stream = :stream) AND sn.seq > :after "
            "ORDER BY sn.seq LIMIT :limit) "
            "UNION ALL SELECT * FROM (SELECT f.node, f.seq, f.epoch, f.chain, :time, f.at_us, 1, f.epoch - 1, 0, 0, 0, NULL FROM forgotten_nodes f "
            "WHERE f.pipeline = :pipeline AND f.seq > :after AND (:after > 0 OR EXISTS (SELECT 1 FROM consumers c JOIN passed p "
            "ON p.consumer_id = c.id WHERE c.pipeline = f.pipeline AND p.stream = :stream AND p.node = f.node)) "
            "ORDER BY f.seq LIMIT :limit) ORDER BY seq LIMIT :limit",
            {"pipeline": pipeline, "stream": stream, "after": after, "limit": limit, "time": TIME_MIN_US},
        )
        found: list[StreamNode] = []
        for node, seq, last, chain, newest_us, received_us, ended, removed, size_bytes, stream_id, node_id, at in rows:
            epoch, newest = last, [chain, newest_us, received_us, ended]
            if at is not None and at <= last:
                epoch, *newest = self._newest_before(stream_id, node_id, at)
            found.append(
                StreamNode(
                    node=node, seq=seq, epoch=epoch, chain=newest[0], watermark_us=newest[1], received_us=newest[2],
                    ended=bool(newest[3]), removed=removed, size_bytes=size_bytes, quarantined=at or 0,
                )
            )  # fmt: skip
        return tuple(found)

    def _newest_before(self, stream_id: int, node_id: int, epoch: int) -> tuple[int, str, int, int, int]:
        """Epoch, chain, watermark, time of receipt and end of the newest epoch before one; epoch 0 if none is kept."""
        row = self._db.execute(
            "SELECT s.epoch, e.chain, s.watermark_us, s.received_us, s.ended FROM segments s "
            "JOIN entries e ON e.node_id = s.node_id AND e.epoch = s.epoch "
            "WHERE s.stream_id = ? AND s.node_id = ? AND s.epoch < ? ORDER BY s.epoch DESC LIMIT 1",
            (stream_id, node_id, epoch),
        ).fetchone()
        return (0, CHAIN_START, TIME_MIN_US, 0, 0) if row is None else row

    def segments(self, pipeline: str, stream: str, node: str) -> NodeSegments | None:
        """Return what the log has of one stream of one node; None: nothing, and it never had."""
        row = self._db.execute(
            "SELECT sn.stream_id, sn.node_id, sn.removed FROM stream_nodes sn "
            "WHERE sn.stream_id = (SELECT id FROM streams WHERE pipeline = :pipeline AND stream = :stream) "
            "AND sn.node_id = (SELECT id FROM nodes WHERE pipeline = :pipeline AND node = :node)",
            {"pipeline": pipeline, "stream": stream, "node": node},
        ).fetchone()
        return None if row is None else NodeSegments(stream_id=row[0], node_id=row[1], node=node, removed=row[2])

    def stream_epochs(self, of: NodeSegments, *, after: int, until: int) -> Iterator[tuple[StreamEpoch, int]]:
        """Yield the epochs later than `after` up to `until`, each with the encoded size of its runs."""
        rows = self._db.execute(
            "SELECT s.seq, s.epoch, e.chain, s.runs, s.watermark_us, s.received_us, s.ended FROM segments s "
            "JOIN entries e ON e.node_id = s.node_id AND e.epoch = s.epoch "
            "WHERE s.stream_id = ? AND s.node_id = ? AND s.epoch > ? AND s.epoch <= ? ORDER BY s.epoch",
            (of.stream_id, of.node_id, after, until),
        )
        for seq, epoch, chain, runs, watermark_us, received_us, ended in rows:
            yield (
                StreamEpoch(
                    seq=seq, node=of.node, epoch=epoch, chain=chain, runs=_decode_runs(runs), watermark_us=watermark_us,
                    received_us=received_us, ended=bool(ended),
                ),
                len(runs),
            )  # fmt: skip

    def epoch_rows(self, of: NodeSegments, *, after: int, until: int) -> Iterator[tuple[int, int]]:
        """Yield the epochs later than `after` up to `until`, each with its number of rows."""
        yield from self._db.execute(
            "SELECT epoch, rows FROM segments WHERE stream_id = ? AND node_id = ? AND epoch > ? AND epoch <= ? ORDER BY epoch",
            (of.stream_id, of.node_id, after, until),
        )

    def forgotten_node(self, pipeline: str, node: str) -> ForgottenNode | None:
        """Return what is left of a node that was forgotten; None: it was not, or it had no epochs."""
        row = self._db.execute(
            "SELECT epoch, chain, seq, at_us FROM forgotten_nodes WHERE pipeline = ? AND node = ?", (pipeline, node)
        ).fetchone()
        return None if row is None else ForgottenNode(node=node, epoch=row[0], chain=row[1], seq=row[2], at_us=row[3])

    def is_stream_forgotten(self, pipeline: str, stream: str) -> bool:
        """Whether a stream was forgotten, and no node has written to it since."""
        return bool(
            self._count("SELECT count(*) FROM forgotten_streams WHERE pipeline = ? AND stream = ?", pipeline, stream)
        )

    def last_contact(self, node_id: int) -> tuple[int, Health | None]:
        """Return when a node was last in contact, and its last report."""
        seen_us, health = self._db.execute("SELECT seen_us, health FROM nodes WHERE id = ?", (node_id,)).fetchone()
        return seen_us, None if health is None else msgspec.json.decode(health, type=Health)

    def stream_id(self, pipeline: str, stream: str) -> int | None:
        row = self._db.execute(
            "SELECT id FROM streams WHERE pipeline = ? AND stream = ?", (pipeline, stream)
        ).fetchone()
        return None if row is None else int(row[0])

    def newest_writers(self, stream_id: int) -> list[str]:
        """List the nodes whose newest epoch has a stream."""
        rows = self._db.execute(
            "SELECT n.node FROM stream_nodes sn JOIN nodes n ON n.id = sn.node_id WHERE sn.stream_id = ? AND sn.last = n.head "
            "ORDER BY n.node",
            (stream_id,),
        )
        return [node for (node,) in rows]

    def unread_of_node(self, node_id: int) -> Unread:
        """Count the epochs of a node that not all consumers have read, of any of its streams, and their rows."""
        return self._unread("count(DISTINCT g.epoch)", "sn.node_id = ?", node_id)

    def unread_of_stream(self, stream_id: int) -> Unread:
        """Count the epochs of all nodes of a stream that not all consumers have read, and their rows."""
        return self._unread("count(*)", "sn.stream_id = ?", stream_id)

    def _unread(self, epochs: str, chosen: str, value: int) -> Unread:
        row = self._db.execute(
            f"SELECT {epochs}, coalesce(sum(g.rows), 0) FROM (SELECT sn.stream_id, sn.node_id, "  # noqa: S608 - constants
            f"{_READ_BY_ALL} AS read FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id "
            f"JOIN nodes n ON n.id = sn.node_id WHERE {chosen}) t "
            "JOIN segments g ON g.stream_id = t.stream_id AND g.node_id = t.node_id AND g.epoch > t.read",
            (value,),
        ).fetchone()
        return Unread(epochs=row[0], rows=row[1])

    def entry_chain(self, node_id: int, epoch: int) -> str | None:
        """Return the chain at an epoch; None: its entry is not kept."""
        row = self._db.execute("SELECT chain FROM entries WHERE node_id = ? AND epoch = ?", (node_id, epoch)).fetchone()
        return None if row is None else str(row[0])

    def streams(self, *, after: tuple[str, str] = ("", ""), limit: int = -1) -> tuple[StreamInfo, ...]:
        """List streams by pipeline, then name: those later in this order than `after`."""
        return self._stream_infos(
            "SELECT id, pipeline, stream FROM streams WHERE (pipeline, stream) > (?, ?) ORDER BY pipeline, stream LIMIT ?",
            (*after, limit),
        )

    def _stream_infos(self, chosen: str, values: Sequence[object]) -> tuple[StreamInfo, ...]:
        """Sum up the streams that a query of `id`, `pipeline` and `stream` chooses."""
        rows = self._db.execute(
            "SELECT s.id, s.pipeline, s.stream, count(sn.node_id), coalesce(sum(sn.epochs), 0), coalesce(sum(sn.rows), 0), "  # noqa: S608 - a constant
            f"coalesce(sum(sn.size_bytes), 0), coalesce(min(sn.watermark_us), ?) FROM ({chosen}) s "
            "LEFT JOIN stream_nodes sn ON sn.stream_id = s.id GROUP BY s.id ORDER BY s.pipeline, s.stream",
            (TIME_MIN_US, *values),
        ).fetchall()
        return tuple(
            StreamInfo(
                pipeline=pipeline, stream=stream, nodes=nodes, epochs=epochs, rows=count, size_bytes=size_bytes,
                watermark_us=watermark_us, consumers=self._unread_epochs(stream_id),
            )
            for stream_id, pipeline, stream, nodes, epochs, count, size_bytes, watermark_us in rows
        )  # fmt: skip

    def _unread_epochs(self, stream_id: int) -> dict[str, int]:
        """Return the number of epochs of a stream that each of its consumers has still to read."""
        rows = self._db.execute(
            "SELECT c.consumer, sum(max(sn.last - max(coalesce(p.epoch, 0), sn.first - 1), 0)) "  # noqa: S608 - a constant
            "FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id JOIN nodes n ON n.id = sn.node_id "
            "JOIN consumers c ON c.pipeline = s.pipeline "
            "LEFT JOIN passed p ON p.consumer_id = c.id AND p.stream = s.stream AND p.node = n.node "
            f"WHERE sn.stream_id = ? AND sn.epochs > 0 AND {_CONSUMER_READS_STREAM} GROUP BY c.consumer",
            (stream_id,),
        )
        return dict(rows.fetchall())

    # Numbers of what clients add by name: only looked at when something is added.

    def count_nodes_of(self, pipeline: str) -> int:
        return self._count("SELECT count(*) FROM nodes WHERE pipeline = ?", pipeline)

    def count_pipelines_of(self, node: str) -> int:
        return self._count("SELECT count(*) FROM nodes WHERE node = ?", node)

    def streams_of(self, node_id: int) -> set[str]:
        """Return the streams that a node has written to."""
        rows = self._db.execute(
            "SELECT s.stream FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id WHERE sn.node_id = ?",
            (node_id,),
        )
        return {stream for (stream,) in rows}

    def count_streams_with(self, pipeline: str, names: Collection[str]) -> int:
        """Return how many streams a pipeline has with these, of which some may be there."""
        there = sum(
            self._count("SELECT count(*) FROM streams WHERE pipeline = ? AND stream = ?", pipeline, name)
            for name in names
        )
        return self._count("SELECT count(*) FROM streams WHERE pipeline = ?", pipeline) + len(names) - there

    def count_controls(self, pipeline: str | None) -> int:
        """Count the control tables of a pipeline, or of all."""
        return self._count("SELECT count(*) FROM controls WHERE ?1 IS NULL OR pipeline = ?1", pipeline)

    def count_consumers(self, pipeline: str | None) -> int:
        """Count the consumers of a pipeline, or of all."""
        return self._count("SELECT count(*) FROM consumers WHERE ?1 IS NULL OR pipeline = ?1", pipeline)

    def has_consumer(self, pipeline: str, consumer: str) -> bool:
        return bool(
            self._count("SELECT count(*) FROM consumers WHERE pipeline = ? AND consumer = ?", pipeline, consumer)
        )

    def _count(self, query: str, *values: object) -> int:
        return int(self._db.execute(query, values).fetchone()[0])

    def consumer_position(self, pipeline: str, consumer: str) -> ConsumerPosition | None:
        """Return what a consumer has passed; None: it is not registered."""
        row = self._db.execute(
            "SELECT id FROM consumers WHERE pipeline = ? AND consumer = ?", (pipeline, consumer)
        ).fetchone()
        if row is None:
            return None
        found: dict[str, dict[str, NodePosition]] = {
            stream: {}
            for (stream,) in self._db.execute("SELECT stream FROM consumer_streams WHERE consumer_id = ?", row)
        }
        for stream, node, epoch, chain in self._db.execute(
            "SELECT stream, node, epoch, chain FROM passed WHERE consumer_id = ?", row
        ):
            found[stream][node] = NodePosition(epoch, chain)
        return ConsumerPosition(streams=found)

    def passed_segments(
        self, *, unread_seq: int, after: tuple[int, int], limit: int, piece: int
    ) -> tuple[list[tuple[int, int, int]], tuple[int, int] | None]:
        """Look at up to `limit` pairs of stream and node with segments, those after one pair, in order.

        Return those with segments that every consumer of the stream has passed, each with the epoch up to which; and the last pair
        looked at, None at the end. Segments of commits up to `unread_seq` count as passed, `piece` of each pair at a time.
        None is passed while no consumer is registered.
        """
        rows = self._db.execute(
            f"SELECT sn.stream_id, sn.node_id, sn.first, {_READ_BY_ALL}, "  # noqa: S608 - a constant
            "CASE :unread WHEN 0 THEN 0 ELSE coalesce((SELECT max(epoch) FROM (SELECT g.epoch, g.seq FROM segments g "
            "WHERE g.stream_id = sn.stream_id AND g.node_id = sn.node_id ORDER BY g.epoch LIMIT :piece) WHERE seq <= :unread), 0) END "
            "FROM (SELECT * FROM stream_nodes WHERE (stream_id, node_id) > (:stream_id, :node_id) AND epochs > 0 "
            "ORDER BY stream_id, node_id LIMIT :limit) sn JOIN streams s ON s.id = sn.stream_id JOIN nodes n ON n.id = sn.node_id "
            "ORDER BY sn.stream_id, sn.node_id",
            {"unread": unread_seq, "stream_id": after[0], "node_id": after[1], "limit": limit, "piece": piece},
        ).fetchall()
        passed = [
            (stream_id, node_id, max(read, expired))
            for stream_id, node_id, first, read, expired in rows
            if max(read, expired) >= first
        ]
        return passed, (rows[-1][0], rows[-1][1]) if len(rows) == limit else None

    def control_table(self, pipeline: str, control: str) -> ControlTable | None:
        row = self._db.execute(
            "SELECT c.id, c.newest, (SELECT min(version) FROM versions WHERE control_id = c.id), "
            "(SELECT max(version) FROM versions WHERE control_id = c.id AND snapshot) "
            "FROM controls c WHERE c.pipeline = ? AND c.control = ?",
            (pipeline, control),
        ).fetchone()
        return None if row is None else ControlTable(table_id=row[0], newest=row[1], oldest=row[2], snapshot=row[3])

    def control_versions(self, table_id: int, *, start: int, limit: int) -> tuple[ControlVersion, ...]:
        rows = self._db.execute(
            "SELECT content FROM versions WHERE control_id = ? AND version >= ? ORDER BY version LIMIT ?",
            (table_id, start, limit),
        )
        return tuple(_decode_version(content) for (content,) in rows)

    def publisher(self, pipeline: str, control: str, owner: str, batch: int) -> Publisher:
        """Return what an owner has published of a control table, and whether it became a batch already."""
        row = self._db.execute(
            "SELECT c.newest, coalesce((SELECT max(generation) FROM publishers WHERE control_id = c.id), 0), p.generation, "
            "p.batch, coalesce(v.content, p.content) FROM controls c "
            "LEFT JOIN publishers p ON p.control_id = c.id AND p.owner = :owner "
            "LEFT JOIN versions v ON v.control_id = c.id AND v.owner = :owner AND v.batch = :batch "
            "WHERE c.pipeline = :pipeline AND c.control = :control",
            {"pipeline": pipeline, "control": control, "owner": owner, "batch": batch},
        ).fetchone()
        if row is None:
            return Publisher()
        published = None if row[3] is None or row[3] < batch else _decode_version(row[4])
        return Publisher(newest=row[0], leader=row[1], generation=row[2], published=published)

    def superseded_publishers(self, *, kept: int, limit: int) -> list[tuple[int, str]]:
        """List owners of control tables that were superseded, with the table, but none of the `kept` newest ones of a table."""
        return self._db.execute(
            "SELECT p.control_id, p.owner FROM (SELECT control_id, max(generation) AS newest FROM publishers GROUP BY control_id "
            "HAVING count(*) > ?1) t JOIN publishers p ON p.control_id = t.control_id AND p.generation <= t.newest - ?1 LIMIT ?2",
            (kept, limit),
        ).fetchall()

    def old_versions(self) -> list[tuple[int, str, str]]:
        """List control tables that have versions older than a snapshot: table, pipeline and name."""
        return self._db.execute(
            "SELECT c.id, c.pipeline, c.control FROM controls c WHERE (SELECT min(version) FROM versions WHERE control_id = c.id) < "
            "(SELECT max(version) FROM versions WHERE control_id = c.id AND snapshot)"
        ).fetchall()

    def versions_read(self, pipeline: str, *, seen_since_us: int) -> dict[str, int]:
        """Return the least version of each control table that a node of the pipeline, seen since a time, has read."""
        rows = self._db.execute(
            "SELECT r.key, min(r.value) FROM nodes n, json_each(CAST(n.controls AS TEXT)) r WHERE n.pipeline = ? AND n.seen_us >= ? "
            "GROUP BY r.key",
            (pipeline, seen_since_us),
        )
        return dict(rows.fetchall())

    def newest_snapshot(self, table_id: int, *, until: int | None) -> int:
        """Return the newest snapshot of a control table, up to a version if given; 0: there is none."""
        row = self._db.execute(
            "SELECT coalesce(max(version), 0) FROM versions WHERE control_id = ?1 AND snapshot AND (?2 IS NULL OR version <= ?2)",
            (table_id, until),
        ).fetchone()
        return int(row[0])

    def blob_sizes(self, digests: Iterable[str]) -> dict[str, int]:
        """Return the sizes of those blobs that are recorded and not damaged."""
        return self._look_up("SELECT digest, size_bytes FROM blobs WHERE NOT damaged AND digest", digests)

    def recorded_blobs(self, digests: Iterable[str]) -> set[str]:
        """Return those blobs that are recorded, damaged or not."""
        return set(self._look_up("SELECT digest, size_bytes FROM blobs WHERE digest", digests))

    def _look_up(self, query: str, digests: Iterable[str]) -> dict[str, int]:
        wanted = list(digests)
        found: dict[str, int] = {}
        for start in range(0, len(wanted), PARAMETERS_MAX):
            part = wanted[start : start + PARAMETERS_MAX]
            found.update(self._db.execute(f"{query} IN ({','.join('?' * len(part))})", part))
        return found

    def blob_at(self, digest: str) -> BlobRecord | None:
        """Return the record of one blob; None: there is none."""
        row = self._db.execute(
            "SELECT digest, size_bytes, small, damaged, refs FROM blobs WHERE digest = ?", (digest,)
        ).fetchone()
        return None if row is None else _blob_record(row)

    def blobs_after(self, digest: str, *, limit: int) -> list[BlobRecord]:
        """List blobs in order of their digest, those after one."""
        rows = self._db.execute(
            "SELECT digest, size_bytes, small, damaged, refs FROM blobs WHERE digest > ? ORDER BY digest LIMIT ?",
            (digest, limit),
        )
        return [_blob_record(row) for row in rows]

    def damaged_blobs(self, *, after: str = "", limit: int = -1) -> list[BlobRecord]:
        """List damaged blobs in order of their digest, those after one."""
        rows = self._db.execute(
            "SELECT digest, size_bytes, small, damaged, refs FROM blobs WHERE damaged AND digest > ? ORDER BY digest LIMIT ?",
            (after, limit),
        )
        return [_blob_record(row) for row in rows]

    def blob_references(self, digests: Collection[str], *, limit: int) -> dict[str, list[str]]:
        """Describe what references these blobs, up to `limit` places of each. Reads all segments: for a person who asks."""
        found: dict[str, list[str]] = {digest: [] for digest in digests}
        for what, query in _REFERENCES:
            for content, *names in self._db.execute(query):
                for digest in _DIGEST.findall(content):
                    text = digest.decode()
                    if text in found and len(found[text]) < limit:
                        found[text].append(what.format(*names))
        return found

    def scrub_state(self) -> tuple[str, int]:
        """Return the last blob that the scrub has looked at, and the running time from which on it may begin anew."""
        after, due_us = self._db.execute("SELECT scrub_after, scrub_due_us FROM counter").fetchone()
        return str(after), int(due_us)

    def node_bytes(self, node: str) -> int:
        """Return the bytes of the blobs that a node's segments and checkpoints reference, in all pipelines."""
        (segments,) = self._db.execute(
            "SELECT coalesce(sum(s.size_bytes), 0) FROM stream_nodes s JOIN nodes n ON n.id = s.node_id WHERE n.node = ?",
            (node,),
        ).fetchone()
        return int(segments) + sum(self.state_blobs(node, None).values())

    def state_blobs(self, node: str, pipelines: Sequence[str] | None) -> dict[str, int]:
        """Return digests and sizes of the blobs of a node's checkpoints, in these pipelines; None: in all."""
        rows = self._db.execute(
            "SELECT c.content FROM checkpoints c JOIN nodes n ON n.id = c.node_id WHERE n.node = ? "
            "AND (? IS NULL OR n.pipeline IN (SELECT value FROM json_each(?)))",
            (node, *_json_twice(pipelines)),
        )
        return {
            run.digest: run.size_bytes
            for (content,) in rows
            for run in msgspec.json.decode(content, type=Checkpoint).runs()
        }

    def may_read_blob(self, node: str, pipelines: Sequence[str] | None, digest: str) -> bool:
        """Whether a checkpoint of the node, or a control table, of these pipelines has this blob; None: of any."""
        chosen = _json_twice(pipelines)
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM versions v JOIN controls t ON t.id = v.control_id WHERE v.digest = ? "
            "AND (? IS NULL OR t.pipeline IN (SELECT value FROM json_each(?)))) "
            "OR EXISTS (SELECT 1 FROM checkpoints c JOIN nodes n ON n.id = c.node_id WHERE n.node = ? "
            "AND (? IS NULL OR n.pipeline IN (SELECT value FROM json_each(?))) AND instr(CAST(c.content AS TEXT), ?))",
            (digest, *chosen, node, *chosen, digest),
        ).fetchone()
        return bool(row[0])

    def small_blob(self, digest: str) -> bytes | None:
        """Return the content of a small blob; None: it is not small, or not recorded. `StoreFailedError`: the file is damaged."""
        try:
            row = self._db.execute("SELECT data FROM small_blobs WHERE digest = ?", (digest,)).fetchone()
        except sqlite3.DatabaseError as error:
            raise StoreFailedError(_describe(error)) from error
        return None if row is None else row[0]

    def unreferenced_blobs(self, *, before_us: int, limit: int) -> list[str]:
        """List blobs without references that were stored before a time, oldest first."""
        rows = self._db.execute(
            "SELECT digest FROM blobs WHERE refs = 0 AND stored_us < ? ORDER BY stored_us LIMIT ?", (before_us, limit)
        )
        return [digest for (digest,) in rows]

    def pages(self) -> LogPages:
        return LogPages(
            pages=self._db.execute("PRAGMA page_count").fetchone()[0],
            free=self._db.execute("PRAGMA freelist_count").fetchone()[0],
        )

    def totals(self, *, after_seq: int) -> LogTotals:
        rows, seq = self._db.execute(
            "SELECT coalesce(sum(rows), 0), coalesce(max(seq), :seq) FROM entries WHERE seq > :seq", {"seq": after_seq}
        ).fetchone()
        blobs, blob_bytes = self._db.execute("SELECT count(*), coalesce(sum(size_bytes), 0) FROM blobs").fetchone()
        nodes, streams, damaged = self._db.execute(
            "SELECT (SELECT count(*) FROM nodes), (SELECT count(*) FROM streams), (SELECT count(*) FROM blobs WHERE damaged)"
        ).fetchone()
        return LogTotals(
            nodes=nodes, streams=streams, blobs=blobs, blob_bytes=blob_bytes, damaged_blobs=damaged, rows=rows, seq=seq
        )

    def slowest_nodes(self, limit: int) -> list[NodeLag]:
        """List the nodes that have committed least recently."""
        rows = self._db.execute(
            "SELECT pipeline, node, head, committed_us FROM nodes WHERE committed_us IS NOT NULL ORDER BY committed_us LIMIT ?",
            (limit,),
        )
        return [NodeLag(*row) for row in rows]

    def largest_streams(self, limit: int) -> tuple[StreamInfo, ...]:
        """List the streams of which most epochs are kept."""
        return self._stream_infos(
            "SELECT s.id, s.pipeline, s.stream FROM streams s JOIN stream_nodes sn ON sn.stream_id = s.id "
            "GROUP BY s.id ORDER BY sum(sn.epochs) DESC LIMIT ?",
            (limit,),
        )


class LogWriter(LogReader):
    """An open transaction, which sees its own changes. Used by the writing thread only.

    Each method keeps the references of the blobs right that its rows name.
    """

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what is done within if it raises, and raise on.

        `StoreFailedError`: the file failed, other than by a broken constraint, and the whole transaction with it.
        """
        try:
            self._db.execute("SAVEPOINT job")
            try:
                yield
            except Exception as error:
                if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.IntegrityError):
                    self._db.execute("ROLLBACK TO job")
                    self._db.execute("RELEASE job")
                raise
            self._db.execute("RELEASE job")
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            raise StoreFailedError(_describe(error)) from error

    def mark_restored(self, *, now_us: int) -> str:
        """Turn a log that was restored from a backup into another one, and return its new id.

        Leases end, and every node compares its epochs with the log's before it commits again. Hub generations skip what may
        have been granted since the backup.
        """
        self._db.execute("INSERT INTO former_logs SELECT log_id, ? FROM counter", (now_us,))
        self._db.execute("UPDATE counter SET log_id = lower(hex(randomblob(16)))")
        self._db.execute(
            "UPDATE nodes SET resync = 1, start = NULL, hub_generation = hub_generation + ?", (GENERATIONS_SKIPPED,)
        )
        return self.log_id()

    def probe(self) -> None:
        """Write something that changes nothing: whether it becomes durable tells whether the file can be written."""
        self._db.execute("UPDATE counter SET seq = seq")

    def grant_lease(
        self, pipeline: str, node: str, *, holder: str, start: str, generation: Generation, resync: bool, now_us: int
    ) -> None:
        """Record the holder of a lease; the node is added if it is new."""
        self._db.execute(
            "INSERT INTO nodes (pipeline, node, holder, hub_generation, local_generation, start, resync, seen_us) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (pipeline, node) DO UPDATE SET holder = excluded.holder, hub_generation = excluded.hub_generation, "
            "local_generation = excluded.local_generation, start = excluded.start, resync = excluded.resync, "
            "seen_us = excluded.seen_us",
            (pipeline, node, holder, generation.hub, generation.local, start, resync, now_us),
        )

    def add_epochs(
        self,
        pipeline: str,
        node_id: int,
        epochs: Sequence[ChainedEntry],
        generation: Generation,
        *,
        now_us: int,
        lost_from: int | None = None,
    ) -> None:
        """Add epochs under the next sequence number; the last one becomes the node's newest.

        After a restore from a backup, the epochs from `lost_from` to the one before the first are recorded as lost.
        """
        seq = self._db.execute("UPDATE counter SET seq = seq + 1 RETURNING seq").fetchone()[0]
        first, newest = epochs[0].entry.epoch, epochs[-1]
        if lost_from is not None:
            self._db.execute("INSERT INTO gaps VALUES (?, ?, ?)", (node_id, lost_from, first - 1))
        references: Counter[str] = Counter()
        for entry, digest, chain in epochs:
            runs = [run for segment in entry.streams.values() for run in segment.runs]
            references.update(run.digest for run in runs)
            self._db.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (node_id, entry.epoch, seq, first, newest.entry.epoch, digest, chain, generation.hub, generation.local,
                 entry.created_us, now_us, *_sums(runs), len(entry.streams)),
            )  # fmt: skip
            for name, segment in entry.streams.items():
                self._add_segment(self._stream_id(pipeline, name), node_id, seq, entry, chain, segment, now_us)
        self._add_references(references)
        self._db.execute(
            "UPDATE nodes SET head = ?, head_chain = ?, seen_us = ?, committed_us = ?, controls = ?, "
            "resync = 0 WHERE id = ?",
            (newest.entry.epoch, newest.chain, now_us, now_us, msgspec.json.encode(newest.entry.controls),
             node_id),
        )  # fmt: skip

    def add_checkpoint(self, node_id: int, checkpoint: Checkpoint, *, replaced: Iterable[Checkpoint]) -> None:
        """Keep a checkpoint in place of others. Only the difference is counted: most of the state stays."""
        references = Counter(run.digest for run in checkpoint.runs())
        for old in replaced:
            references.subtract(run.digest for run in old.runs())
            self._db.execute("DELETE FROM checkpoints WHERE node_id = ? AND epoch = ?", (node_id, old.epoch))
        content = msgspec.json.encode(checkpoint)
        self._db.execute("INSERT INTO checkpoints VALUES (?, ?, ?)", (node_id, checkpoint.epoch, content))
        self._add_references(references)

    def set_quarantine(self, node_id: int, quarantine: Quarantine | None) -> None:
        """Put a node into quarantine, or release it."""
        self._db.execute("DELETE FROM quarantines WHERE node_id = ?", (node_id,))
        if quarantine is not None:
            self._db.execute(
                "INSERT INTO quarantines VALUES (?, ?, ?, ?, ?)",
                (node_id, quarantine.epoch, quarantine.reason, quarantine.since_us, quarantine.by),
            )

    def touch(self, node_id: int) -> int:
        """Take a sequence number for a change of a node that is no commit. Readers of its streams list it as news."""
        seq = int(self._db.execute("UPDATE counter SET seq = seq + 1 RETURNING seq").fetchone()[0])
        self._db.execute("UPDATE stream_nodes SET seq = ? WHERE node_id = ?", (seq, node_id))
        return seq

    def set_skips(self, node_id: int, skips: Iterable[SkippedEpochs]) -> None:
        """Replace the epochs of a node that readers pass over."""
        self._db.execute("DELETE FROM skips WHERE node_id = ?", (node_id,))
        self._db.executemany(
            "INSERT INTO skips VALUES (?, ?, ?, ?, ?)",
            [(node_id, skip.first, skip.last, skip.rows, skip.at_us) for skip in skips],
        )

    def remove_node(
        self, pipeline: str, node: str, known: NodeRecord, *, closing_chain: str | None, now_us: int
    ) -> None:
        """Forget a node, and the streams that no other one has; segments and entries are left to `remove_discarded`.

        With a chain, its closing epoch is kept.
        """
        node_id = known.node_id
        seq = self.touch(node_id)
        self._db.execute(
            "INSERT INTO discarded SELECT node_id, stream_id FROM stream_nodes WHERE node_id = ?", (node_id,)
        )
        self._db.execute("INSERT INTO discarded VALUES (?, ?)", (node_id, _ENTRIES))
        self._drop_references(run.digest for kept in self.checkpoints(node_id).values() for run in kept.runs())
        for table in ("checkpoints", "gaps", "stream_nodes"):
            self._db.execute(f"DELETE FROM {table} WHERE node_id = ?", (node_id,))  # noqa: S608 - constants
        self._db.execute("DELETE FROM nodes WHERE id = ?", (node_id,))
        self._db.execute(
            "DELETE FROM streams WHERE id IN (SELECT stream_id FROM discarded WHERE node_id = ?) "
            "AND NOT EXISTS (SELECT 1 FROM stream_nodes sn WHERE sn.stream_id = streams.id)",
            (node_id,),
        )
        if closing_chain is not None:
            self._db.execute(
                "INSERT INTO forgotten_nodes VALUES (?, ?, ?, ?, ?, ?)",
                (pipeline, node, known.head + 1, closing_chain, seq, now_us),
            )

    def remove_stream(self, pipeline: str, stream: str, stream_id: int, *, now_us: int) -> None:
        """Forget a stream; its segments are left to `remove_discarded`."""
        self._db.execute(
            "INSERT OR IGNORE INTO discarded SELECT node_id, stream_id FROM stream_nodes WHERE stream_id = ?",
            (stream_id,),
        )
        self._db.execute("DELETE FROM stream_nodes WHERE stream_id = ?", (stream_id,))
        self._db.execute("DELETE FROM streams WHERE id = ?", (stream_id,))
        self._db.execute("INSERT OR REPLACE INTO forgotten_streams VALUES (?, ?, ?)", (pipeline, stream, now_us))

    def save_health(self, pipeline: str, node: str, health: Health, *, now_us: int) -> bool:
        """Keep a node's newest report; False: the node has no lease."""
        row = self._db.execute(
            "UPDATE nodes SET seen_us = ?, health = ? WHERE pipeline = ? AND node = ? AND holder IS NOT NULL RETURNING id",
            (now_us, msgspec.json.encode(health), pipeline, node),
        ).fetchone()
        return row is not None

    def save_position(self, pipeline: str, consumer: str, position: ConsumerPosition, *, now_us: int) -> None:
        """Register a consumer, add the streams that it names, and advance its positions. They never go back."""
        consumer_id = self._db.execute(
            "INSERT INTO consumers (pipeline, consumer, seen_us) VALUES (?, ?, ?) "
            "ON CONFLICT (pipeline, consumer) DO UPDATE SET seen_us = excluded.seen_us RETURNING id",
            (pipeline, consumer, now_us),
        ).fetchone()[0]
        self._db.executemany(
            "INSERT OR IGNORE INTO consumer_streams VALUES (?, ?)",
            [(consumer_id, stream) for stream in position.streams],
        )
        self._db.executemany(
            "INSERT INTO passed VALUES (?, ?, ?, ?, ?) ON CONFLICT (consumer_id, stream, node) DO UPDATE SET "
            "epoch = excluded.epoch, chain = excluded.chain WHERE excluded.epoch > epoch",
            [
                (consumer_id, stream, node, passed.epoch, passed.chain)
                for stream, nodes in position.streams.items()
                for node, passed in nodes.items()
            ],
        )

    def remove_consumer(self, pipeline: str, consumer: str) -> None:
        """Remove a consumer and its positions (by the foreign keys); it may be gone already."""
        self._db.execute("DELETE FROM consumers WHERE pipeline = ? AND consumer = ?", (pipeline, consumer))

    def add_control_version(self, pipeline: str, control: str, version: ControlVersion, *, generation: int) -> None:
        """Add a version as the newest one. `generation` is the owner's if it has published before, else a new one."""
        (table_id,) = self._db.execute(
            "INSERT INTO controls (pipeline, control, newest) VALUES (?, ?, ?) "
            "ON CONFLICT (pipeline, control) DO UPDATE SET newest = excluded.newest RETURNING id",
            (pipeline, control, version.version),
        ).fetchone()
        content = msgspec.json.encode(version)
        self._db.execute(
            "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (table_id, version.version, version.owner, version.batch, version.snapshot, version.blob.digest, content),
        )
        self._db.execute(
            "INSERT INTO publishers VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (control_id, owner) DO UPDATE SET batch = excluded.batch, content = excluded.content",
            (table_id, version.owner, generation, version.batch, content),
        )
        self._add_references({version.blob.digest: 1})

    def record_blobs(self, blobs: Mapping[str, tuple[int, int]]) -> None:
        """Record sizes and times of stored blobs; what is recorded already is replaced, with its references kept."""
        self._db.executemany(
            "INSERT INTO blobs (digest, size_bytes, stored_us) VALUES (?, ?, ?) ON CONFLICT (digest) DO UPDATE SET "
            "size_bytes = excluded.size_bytes, stored_us = excluded.stored_us, damaged = 0",
            [(digest, size_bytes, stored_us) for digest, (size_bytes, stored_us) in blobs.items()],
        )

    def save_small_blob(self, digest: str, data: bytes, *, ran_us: int) -> Stored:
        """Record a verified blob with its content, in place of what is there under its digest. Its grace time begins again."""
        known = self.blob_at(digest)
        if known is not None and known.small and not known.damaged and self.small_blob(digest) == data:
            self._db.execute("UPDATE blobs SET stored_us = ? WHERE digest = ?", (ran_us, digest))
            return Stored.KNOWN
        self._db.execute(
            "INSERT INTO blobs (digest, size_bytes, stored_us, small) VALUES (?, ?, ?, 1) ON CONFLICT (digest) DO UPDATE SET "
            "size_bytes = excluded.size_bytes, stored_us = excluded.stored_us, small = 1, damaged = 0",
            (digest, len(data), ran_us),
        )
        self._db.execute("INSERT OR REPLACE INTO small_blobs VALUES (?, ?)", (digest, data))
        if known is None:
            return Stored.NEW
        whole_file = not (known.small or known.damaged) and known.size_bytes == len(data)
        return Stored.KNOWN if whole_file else Stored.REPAIRED

    def mark_damaged(self, digest: str, *, damaged: bool) -> None:
        """A blob's content is not what its digest says: it counts as missing until it is stored again. Or it is whole again."""
        self._db.execute("UPDATE blobs SET damaged = ? WHERE digest = ?", (damaged, digest))

    def save_scrub(self, after: str, *, due_us: int) -> None:
        """Save how far the scrub has come, and the running time from which on it may begin anew."""
        self._db.execute("UPDATE counter SET scrub_after = ?, scrub_due_us = ?", (after, due_us))

    # Retention. Each call removes at most `limit` rows, and returns how many.

    def remove_segments(self, stream_id: int, node_id: int, until: int, *, limit: int) -> int:
        rows = self._db.execute(
            "SELECT epoch, runs, rows, size_bytes FROM segments WHERE stream_id = ? AND node_id = ? AND epoch <= ? "
            "ORDER BY epoch LIMIT ?",
            (stream_id, node_id, until, limit),
        ).fetchall()
        if not rows:
            return 0
        epochs, runs, counts, sizes = zip(*rows, strict=True)
        self._db.execute(
            "DELETE FROM segments WHERE stream_id = ? AND node_id = ? AND epoch <= ?", (stream_id, node_id, epochs[-1])
        )
        self._db.executemany(
            "UPDATE entries SET segments = segments - 1 WHERE node_id = ? AND epoch = ?",
            [(node_id, epoch) for epoch in epochs],
        )
        self._db.execute(
            "UPDATE stream_nodes SET first = ?, removed = ?, epochs = epochs - ?, rows = rows - ?, size_bytes = size_bytes - ? "
            "WHERE stream_id = ? AND node_id = ?",
            (epochs[-1] + 1, epochs[-1], len(rows), sum(counts), sum(sizes), stream_id, node_id),
        )
        self._drop_references(run.digest for encoded in runs for run in _decode_runs(encoded))
        return len(rows)

    def remove_discarded(self, *, limit: int) -> int:
        """Remove segments and entries of nodes and streams that were forgotten."""
        removed = 0
        while removed < limit:
            row = self._db.execute("SELECT node_id, stream_id FROM discarded LIMIT 1").fetchone()
            if row is None:
                break
            node_id, stream_id = row
            if stream_id == _ENTRIES:
                count = self._db.execute(
                    "DELETE FROM entries WHERE node_id = ?1 AND epoch IN "
                    "(SELECT epoch FROM entries WHERE node_id = ?1 ORDER BY epoch LIMIT ?2)",
                    (node_id, limit - removed),
                ).rowcount
            else:
                count = self.remove_segments(stream_id, node_id, NUMBER_MAX, limit=limit - removed)
            removed += count
            if removed < limit:
                self._db.execute("DELETE FROM discarded WHERE node_id = ? AND stream_id = ?", row)
        return removed

    def remove_entries(self, *, kept: int, after: int, nodes: int, limit: int) -> tuple[int, int | None]:
        """Remove epochs without segments, but none of the newest `kept` of a node, and none that a consumer stands at.

        Looks at up to `nodes` nodes after one, in order of their id; returns also the last of them, None at the end.
        """
        ids = self._db.execute("SELECT id FROM nodes WHERE id > ? ORDER BY id LIMIT ?", (after, nodes)).fetchall()
        if not ids:
            return 0, None
        last = ids[-1][0]
        rows = self._db.execute(
            "SELECT e.node_id, e.epoch FROM nodes n CROSS JOIN entries e ON e.node_id = n.id AND e.epoch <= n.head - ? "
            "WHERE n.id > ? AND n.id <= ? AND e.segments = 0 AND NOT EXISTS (SELECT 1 FROM consumers c JOIN passed p ON p.consumer_id = c.id "
            "WHERE c.pipeline = n.pipeline AND p.node = n.node AND p.epoch = e.epoch) LIMIT ?",
            (kept, after, last, limit),
        ).fetchall()
        self._db.executemany("DELETE FROM entries WHERE node_id = ? AND epoch = ?", rows)
        if len(rows) == limit:
            return limit, after
        return len(rows), last if len(ids) == nodes else None

    def remove_control_versions(self, table_id: int, before: int, *, limit: int) -> int:
        rows = self._db.execute(
            "SELECT version, digest FROM versions WHERE control_id = ? AND version < ? ORDER BY version LIMIT ?",
            (table_id, before, limit),
        ).fetchall()
        self._db.executemany(
            "DELETE FROM versions WHERE control_id = ? AND version = ?", [(table_id, version) for version, _ in rows]
        )
        self._drop_references(digest for _, digest in rows)
        return len(rows)

    def remove_publisher(self, table_id: int, owner: str) -> None:
        self._db.execute("DELETE FROM publishers WHERE control_id = ? AND owner = ?", (table_id, owner))

    def save_ran(self, ran_us: int) -> None:
        """Save how long the hub has run in all its life."""
        self._db.execute("UPDATE counter SET ran_us = max(ran_us, ?)", (ran_us,))

    def add_mark(self, ran_us: int, *, before_us: int) -> None:
        """Note the newest commit at a moment of the running time; remove marks from before another moment."""
        self._db.execute("INSERT OR REPLACE INTO marks SELECT ?, seq FROM counter", (ran_us,))
        self._db.execute("DELETE FROM marks WHERE ran_us < ?", (before_us,))

    def remove_blobs(self, digests: Iterable[str], *, before_us: int) -> list[tuple[str, bool]]:
        """Remove the records of those that are unreferenced and were stored before a time; return each, and whether it was small.

        The content of small ones is removed too, by the foreign key.
        """
        removed: list[tuple[str, bool]] = []
        for digest in digests:
            removed += self._db.execute(
                "DELETE FROM blobs WHERE digest = ? AND refs = 0 AND stored_us < ? RETURNING digest, small",
                (digest, before_us),
            ).fetchall()
        return removed

    def _add_segment(
        self, stream_id: int, node_id: int, seq: int, entry: EpochEntry, chain: str, segment: StreamSegment, now_us: int
    ) -> None:
        rows, size_bytes = _sums(segment.runs)
        self._db.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (stream_id, node_id, entry.epoch, seq, msgspec.json.encode(segment.runs), rows, size_bytes,
             segment.watermark_us, now_us, entry.ended),
        )  # fmt: skip
        self._db.execute(
            "INSERT INTO stream_nodes VALUES (?, ?, ?, ?, 1, ?, ?, ?, 0, ?, ?, ?, ?, ?) "
            "ON CONFLICT (stream_id, node_id) DO UPDATE SET "
            "first = CASE epochs WHEN 0 THEN excluded.first ELSE first END, last = excluded.last, epochs = epochs + 1, "
            "rows = rows + excluded.rows, size_bytes = size_bytes + excluded.size_bytes, "
            "watermark_us = max(watermark_us, excluded.watermark_us), seq = excluded.seq, chain = excluded.chain, "
            "newest_us = excluded.newest_us, received_us = excluded.received_us, ended = excluded.ended",
            (stream_id, node_id, entry.epoch, entry.epoch, rows, size_bytes, segment.watermark_us, seq, chain,
             segment.watermark_us, now_us, entry.ended),
        )  # fmt: skip

    def _add_references(self, changes: Mapping[str, int]) -> None:
        """Update `refs`, which a constraint keeps from going below zero."""
        self._db.executemany(
            "UPDATE blobs SET refs = refs + ? WHERE digest = ?",
            [(change, digest) for digest, change in changes.items() if change],
        )

    def _drop_references(self, digests: Iterable[str]) -> None:
        self._add_references({digest: -count for digest, count in Counter(digests).items()})

    def _stream_id(self, pipeline: str, name: str) -> int:
        row = self._db.execute("SELECT id FROM streams WHERE pipeline = ? AND stream = ?", (pipeline, name)).fetchone()
        if row is None:
            row = self._db.execute(
                "INSERT INTO streams (pipeline, stream) VALUES (?, ?) RETURNING id", (pipeline, name)
            ).fetchone()
            self._db.execute("DELETE FROM forgotten_streams WHERE pipeline = ? AND stream = ?", (pipeline, name))
        return int(row[0])


class SqliteStore:
    """One file: one connection writes, a pool of connections reads. The lock of the hub's directory keeps other hubs away."""

    def __init__(
        self,
        path: Path,
        *,
        reserve: Reserve | None = None,
        open_file: Callable[[Path], sqlite3.Connection] | None = None,
    ) -> None:
        """Open the file, or make it. `StorageError` if that fails, `ConfigError` if a newer version has written it.

        The reserve is given up when the disk is full. `open_file`: opens a connection; simulations have a disk of their own.
        """
        self.path = path
        self._reserve = reserve
        self._open_file = open_file or _open_file
        try:
            self._db = _open_for_writing(path, self._open_file, wal_pages=self._wal_pages())
        except StorageError:
            if reserve is None or not reserve.held:
                raise
            reserve.give_up()
            self._db = _open_for_writing(path, self._open_file, wal_pages=self._wal_pages())
        self._mutex = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[LogWriter]:
        """Open a transaction, which is synced when the context ends. If it raises, nothing of it is kept.

        Called by one thread, one transaction at a time. `StoreFailedError` if the database fails.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield LogWriter(self._db)
            self._db.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            self._make_room(error)
            if isinstance(error, sqlite3.Error):
                raise StoreFailedError(_describe(error)) from error
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[LogReader]:
        """Open a consistent view, on a connection that no other thread has. Called by any thread; blocks."""
        with self._mutex:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _set_up(self._open_file(self.path))
        try:
            connection.execute("BEGIN")
            try:
                yield LogReader(connection)
            finally:
                connection.execute("ROLLBACK")
        finally:
            with self._mutex:
                keep = not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def empty_wal(self) -> bool:
        """Copy the write-ahead log into the file, and cut it to nothing; False: readers still need a part of it.

        Called by the writing thread, between transactions. Waits for no reader.
        """
        try:
            self._db.execute("PRAGMA busy_timeout = 0")
            try:
                return not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        except sqlite3.Error as error:
            raise StoreFailedError(_describe(error)) from error

    def shrink(self, pages_max: int) -> None:
        """Cut free pages off the file, durably. Called by the writing thread, between transactions."""
        try:
            # Every step of the statement frees one page, and `execute` would take one step only.
            self._db.executescript(f"PRAGMA incremental_vacuum({pages_max})")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            self._make_room(error)
            raise StoreFailedError(_describe(error)) from error

    def has_reserve(self) -> bool:
        """Whether the disk had space for all writes so far, or has it again. Called by any thread."""
        return self._reserve is None or self._reserve.held

    def restore_reserve(self) -> bool:
        """Hold the reserve again if the disk has space for it. Called by the writing thread."""
        return self._reserve is None or self._reserve.take()

    def _make_room(self, error: BaseException) -> None:
        """Give the reserve up if the disk is full, and use it to empty the write-ahead log."""
        cause = error.__cause__ if isinstance(error, StoreFailedError) else error
        full = isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorcode", None) in _FULL
        if full and self._reserve is not None and self._reserve.held:
            self._reserve.give_up()
            with contextlib.suppress(StoreFailedError):
                self.empty_wal()

    def _wal_pages(self) -> int:
        """On a small disk the write-ahead log, and what it adds to the file, must fit into the reserve."""
        if self._reserve is None:
            return WAL_PAGES
        return max(1, min(WAL_PAGES, self._reserve.size_bytes // 2 // PAGE_BYTES))

    def size_bytes(self) -> int:
        """Return the size of the file and its write-ahead log."""
        return _file_size(self.path) + _file_size(self.path.with_name(f"{self.path.name}-wal"))

    def close(self) -> None:
        """Close all connections; one that is still reading is closed when it has ended."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in (self._db, *idle):
            connection.close()


def _open_file(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)


def _set_up(connection: sqlite3.Connection, *, wal_pages: int | None = None) -> sqlite3.Connection:
    """Prepare a connection: to write if `wal_pages` are given. Every commit is synced, because nothing is answered that is not durable."""
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    if wal_pages is not None:
        # Both hold for a new file only, and before its first page is written.
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {wal_pages * PAGE_BYTES}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {wal_pages}")
        connection.execute(f"PRAGMA cache_size = -{CACHE_BYTES >> 10}")
        connection.execute("PRAGMA foreign_keys = ON")
        # Some builds of SQLite overwrite what is deleted with zeros: then removing a blob writes as much as storing it.
        connection.execute("PRAGMA secure_delete = OFF")
    else:
        connection.execute("PRAGMA query_only = ON")
    return connection


def _open_for_writing(
    path: Path, open_file: Callable[[Path], sqlite3.Connection], *, wal_pages: int
) -> sqlite3.Connection:
    try:
        connection = _set_up(open_file(path), wal_pages=wal_pages)
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
    except sqlite3.Error as error:
        raise StorageError(
            f"the hub's log {path} cannot be opened: {error}. Check the disk and the directory's permissions."
        ) from error
    if 0 < found < SCHEMA_VERSION:
        connection.close()
        raise ConfigError(
            f"the hub's log {path} has version {found}, from before the first release; this program reads version {SCHEMA_VERSION} and has "
            "changed nothing.\nStart the hub with an empty directory; nodes and centers then start with empty ones too."
        )
    if found > SCHEMA_VERSION:
        connection.close()
        raise ConfigError(
            f"the hub's log {path} has version {found}; this program reads version {SCHEMA_VERSION} and has changed nothing.\n"
            "Install the newer fordstone that wrote it."
        )
    return connection


def _describe(error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", None) in _FULL:
        return "its disk is full. Free space there, or let consumers read on"
    return str(error)


def _blob_record(row: tuple[str, int, int, int, int]) -> BlobRecord:
    digest, size_bytes, small, damaged, refs = row
    return BlobRecord(digest, size_bytes, bool(small), bool(damaged), refs)


def _file_size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _generation(hub: int | None, local: int | None) -> Generation | None:
    return None if hub is None or local is None else Generation(hub=hub, local=local)


def _json_twice(names: Sequence[str] | None) -> tuple[str | None, str | None]:
    text = None if names is None else msgspec.json.encode(names).decode()
    return text, text


def _decode_runs(data: bytes) -> tuple[RunRef, ...]:
    return msgspec.json.decode(data, type=tuple[RunRef, ...])


def _decode_version(data: bytes) -> ControlVersion:
    return msgspec.json.decode(data, type=ControlVersion)


def _sums(runs: Sequence[RunRef]) -> tuple[int, int]:
    return sum(run.rows for run in runs), sum(run.size_bytes for run in runs)
