"""The storage of the hub's log, in one SQLite file. The schema and all SQL of the hub are in this module alone.

`commits` and `retention` work with the `LogReader` or `LogWriter` that they are given, and see no database. Methods return
facts and carry out changes; they reject no request. Ids (`node_id`, `stream_id`, `table_id`) mean nothing outside of it.

Invariants: a transaction becomes visible and durable as a whole or not at all; a snapshot shows whole transactions only. A file
of a newer version is rejected, never changed. `blobs.refs` is the number of references that rows of other tables hold.
`blobs.small`: the content is in `small_blobs` rather than in the blob store.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fordstone.errors import ConfigError, StorageError
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
    StreamSegment,
)
from fordstone.state.base import RunRef

SCHEMA_VERSION: Final = 1
BUSY_MS: Final = 10_000
WAL_BYTES_KEPT: Final = 64 << 20
WAL_PAGES: Final = 4_000
"""Pages in the write-ahead log before SQLite copies them into the file: rarely, because a commit waits for it."""
CACHE_BYTES: Final = 64 << 20
PARAMETERS_MAX: Final = 500
"""Maximum number of values in one `IN (...)`."""
_CONSUMER_READS_STREAM: Final = (
    "(EXISTS (SELECT 1 FROM consumer_streams cs WHERE cs.consumer_id = c.id AND cs.stream = s.stream) "
    "OR NOT EXISTS (SELECT 1 FROM consumer_streams cs WHERE cs.consumer_id = c.id))"
)
"""A consumer that has named streams reads these only; one that has named none reads all of its pipeline."""

SCHEMA: Final = """
CREATE TABLE counter (only INTEGER PRIMARY KEY CHECK (only = 1), seq INTEGER NOT NULL);
INSERT INTO counter VALUES (1, 0);

CREATE TABLE nodes (
  id INTEGER PRIMARY KEY,
  pipeline TEXT NOT NULL,
  node TEXT NOT NULL,
  holder TEXT,
  hub_generation INTEGER,
  local_generation INTEGER,
  head INTEGER NOT NULL DEFAULT 0,
  head_digest TEXT NOT NULL DEFAULT '',
  seen_us INTEGER NOT NULL,
  committed_us INTEGER,
  controls BLOB NOT NULL DEFAULT '{}',
  health BLOB,
  UNIQUE (pipeline, node)
);

CREATE TABLE entries (
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  epoch INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  digest TEXT NOT NULL,
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

CREATE TABLE streams (
  id INTEGER PRIMARY KEY,
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
  PRIMARY KEY (stream_id, node_id)
) WITHOUT ROWID;

CREATE TABLE segments (
  stream_id INTEGER NOT NULL REFERENCES streams (id),
  seq INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  node_id INTEGER NOT NULL REFERENCES nodes (id),
  runs BLOB NOT NULL,
  rows INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL,
  watermark_us INTEGER NOT NULL,
  received_us INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  PRIMARY KEY (stream_id, seq, epoch)
) WITHOUT ROWID;
CREATE INDEX segments_by_node ON segments (stream_id, node_id, epoch);

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

CREATE TABLE blobs (
  digest TEXT PRIMARY KEY,
  size_bytes INTEGER NOT NULL,
  stored_us INTEGER NOT NULL,
  refs INTEGER NOT NULL DEFAULT 0 CHECK (refs >= 0),
  small INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX blobs_unnamed ON blobs (stored_us) WHERE refs = 0;
CREATE TABLE small_blobs (
  digest TEXT PRIMARY KEY REFERENCES blobs (digest) ON DELETE CASCADE,
  data BLOB NOT NULL
);
"""


class StoreFailedError(Exception):
    """The database failed (a full disk, a damaged file). Nothing of the open transaction is kept. The text says why."""


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

    blobs: int
    blob_bytes: int
    rows: int
    """In epochs with a sequence number above the one asked for."""
    seq: int


class LogReader:
    """One consistent view. Used by one thread, and only within the context that gave it."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def newest_seq(self) -> int:
        """Return the sequence number of the newest commit; 0: there is none."""
        return int(self._db.execute("SELECT seq FROM counter").fetchone()[0])

    def node(self, pipeline: str, node: str) -> NodeRecord | None:
        row = self._db.execute(
            "SELECT id, holder, hub_generation, local_generation, head, head_digest FROM nodes WHERE pipeline = ? AND node = ?",
            (pipeline, node),
        ).fetchone()
        if row is None:
            return None
        return NodeRecord(
            node_id=row[0], holder=row[1], generation=_generation(row[2], row[3]), head=row[4], head_digest=row[5]
        )

    def entry_digests(self, node_id: int, first: int, last: int) -> dict[int, str]:
        """Return the digests of the epochs from `first` to `last` that are kept."""
        rows = self._db.execute(
            "SELECT epoch, digest FROM entries WHERE node_id = ? AND epoch BETWEEN ? AND ?", (node_id, first, last)
        )
        return dict(rows.fetchall())

    def checkpoints(self, node_id: int) -> dict[int, Checkpoint]:
        rows = self._db.execute("SELECT epoch, content FROM checkpoints WHERE node_id = ?", (node_id,))
        return {epoch: msgspec.json.decode(content, type=Checkpoint) for epoch, content in rows}

    def nodes(self) -> tuple[NodeInfo, ...]:
        """List every pipeline on every node, by pipeline, then node."""
        return tuple(
            NodeInfo(
                node=node, pipeline=pipeline, head=head, seen_us=seen_us, committed_us=committed_us,
                generation=_generation(hub, local),
                health=None if health is None else msgspec.json.decode(health, type=Health),
            )
            for node, pipeline, head, hub, local, seen_us, committed_us, health in self._db.execute(
                "SELECT node, pipeline, head, hub_generation, local_generation, seen_us, committed_us, health FROM nodes "
                "ORDER BY pipeline, node"
            )
        )  # fmt: skip

    def epochs(self, *, pipeline: str | None, node: str | None, limit: int) -> tuple[EpochInfo, ...]:
        """List epochs, newest first; of one pipeline or node if given."""
        if pipeline is not None and node is not None:
            # One node's rows are contiguous, in this order.
            chosen = "e.node_id = (SELECT id FROM nodes WHERE pipeline = :pipeline AND node = :node) ORDER BY e.node_id DESC, e.epoch DESC"
        else:
            chosen = (
                "(:pipeline IS NULL OR n.pipeline = :pipeline) AND (:node IS NULL OR n.node = :node) "
                "ORDER BY e.seq DESC, e.epoch DESC"
            )
        rows = self._db.execute(
            "SELECT e.seq, n.pipeline, n.node, e.epoch, e.first, e.last, e.rows, e.size_bytes, e.received_us, e.created_us, "  # noqa: S608 - one of two constants
            "e.hub_generation, e.local_generation FROM entries e JOIN nodes n ON n.id = e.node_id "
            f"WHERE {chosen} LIMIT :limit",
            {"pipeline": pipeline, "node": node, "limit": limit},
        )
        return tuple(
            EpochInfo(
                seq=row[0], pipeline=row[1], node=row[2], epoch=row[3], first=row[4], last=row[5], rows=row[6], size_bytes=row[7],
                received_us=row[8], created_us=row[9], generation=Generation(hub=row[10], local=row[11]),
            )
            for row in rows
        )  # fmt: skip

    def stream_epochs(self, pipeline: str, stream: str, *, after: int) -> Iterator[tuple[StreamEpoch, int]]:
        """Yield the epochs of commits later than `after` in order of `seq`, each with the encoded size of its runs."""
        rows = self._db.execute(
            "SELECT s.seq, n.node, s.epoch, s.runs, s.watermark_us, s.received_us, s.ended FROM segments s "
            "JOIN nodes n ON n.id = s.node_id "
            "WHERE s.stream_id = (SELECT id FROM streams WHERE pipeline = ? AND stream = ?) AND s.seq > ? "
            "ORDER BY s.seq, s.epoch",
            (pipeline, stream, after),
        )
        for seq, node, epoch, runs, watermark_us, received_us, ended in rows:
            yield (
                StreamEpoch(
                    seq=seq, node=node, epoch=epoch, runs=_decode_runs(runs), watermark_us=watermark_us,
                    received_us=received_us, ended=bool(ended),
                ),
                len(runs),
            )  # fmt: skip

    def streams(self) -> tuple[StreamInfo, ...]:
        """List every stream, by pipeline, then name."""
        backlog: dict[int, dict[str, int]] = {}
        rows = self._db.execute(
            "SELECT sn.stream_id, c.consumer, sum(max(sn.last - max(coalesce(p.epoch, 0), sn.first - 1), 0)) "  # noqa: S608 - a constant
            "FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id JOIN nodes n ON n.id = sn.node_id "
            "JOIN consumers c ON c.pipeline = s.pipeline "
            "LEFT JOIN passed p ON p.consumer_id = c.id AND p.stream = s.stream AND p.node = n.node "
            f"WHERE sn.epochs > 0 AND {_CONSUMER_READS_STREAM} GROUP BY sn.stream_id, c.consumer"
        )
        for stream_id, consumer, epochs in rows:
            backlog.setdefault(stream_id, {})[consumer] = epochs
        return tuple(
            StreamInfo(
                pipeline=pipeline, stream=stream, nodes=nodes, epochs=epochs, rows=count, size_bytes=size_bytes,
                watermark_us=watermark_us, consumers=backlog.get(stream_id, {}),
            )
            for stream_id, pipeline, stream, nodes, epochs, count, size_bytes, watermark_us in self._db.execute(
                "SELECT s.id, s.pipeline, s.stream, count(*), sum(sn.epochs), sum(sn.rows), sum(sn.size_bytes), min(sn.watermark_us) "
                "FROM streams s JOIN stream_nodes sn ON sn.stream_id = s.id GROUP BY s.id ORDER BY s.pipeline, s.stream"
            )
        )  # fmt: skip

    def consumer_position(self, pipeline: str, consumer: str) -> ConsumerPosition | None:
        """Return what a consumer has passed; None: it is not registered."""
        row = self._db.execute(
            "SELECT id FROM consumers WHERE pipeline = ? AND consumer = ?", (pipeline, consumer)
        ).fetchone()
        if row is None:
            return None
        found: dict[str, dict[str, int]] = {
            stream: {}
            for (stream,) in self._db.execute("SELECT stream FROM consumer_streams WHERE consumer_id = ?", row)
        }
        for stream, node, epoch in self._db.execute(
            "SELECT stream, node, epoch FROM passed WHERE consumer_id = ?", row
        ):
            found[stream][node] = epoch
        return ConsumerPosition(streams=found)

    def passed_segments(self, *, unread_before_us: int | None) -> list[tuple[int, int, int]]:
        """List stream, node and the epoch up to which every consumer of the stream has passed the node's segments.

        There is none while no consumer is registered. Segments received before `unread_before_us` count as passed.
        """
        return self._db.execute(
            "SELECT stream_id, node_id, passed FROM (SELECT sn.stream_id, sn.node_id, sn.first, max(coalesce("  # noqa: S608 - a constant
            "(SELECT min(coalesce(p.epoch, 0)) FROM consumers c "
            "LEFT JOIN passed p ON p.consumer_id = c.id AND p.stream = s.stream AND p.node = n.node "
            f"WHERE c.pipeline = s.pipeline AND {_CONSUMER_READS_STREAM}), 0), CASE WHEN :before IS NULL THEN 0 ELSE coalesce("
            "(SELECT max(epoch) FROM segments g WHERE g.stream_id = s.id AND g.node_id = n.id AND g.received_us < :before), 0) "
            "END) AS passed FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id JOIN nodes n ON n.id = sn.node_id "
            "WHERE sn.epochs > 0) WHERE passed >= first",
            {"before": unread_before_us},
        ).fetchall()

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

    def passed_versions(self, *, seen_since_us: int) -> list[tuple[int, int]]:
        """List control tables with their newest snapshot that every node seen since a time has read, if older versions exist."""
        return self._db.execute(
            "SELECT id, passed FROM (SELECT c.id, (SELECT max(v.version) FROM versions v WHERE v.control_id = c.id AND v.snapshot "
            "AND v.version <= coalesce((SELECT min(r.value) FROM nodes n, json_each(CAST(n.controls AS TEXT)) r "
            "WHERE n.pipeline = c.pipeline AND n.seen_us >= ? AND r.key = c.control), c.newest)) AS passed FROM controls c) t "
            "WHERE EXISTS (SELECT 1 FROM versions v WHERE v.control_id = t.id AND v.version < t.passed)",
            (seen_since_us,),
        ).fetchall()

    def blob_sizes(self, digests: Iterable[str]) -> dict[str, int]:
        """Return the sizes of those blobs that are recorded."""
        wanted = list(digests)
        sizes: dict[str, int] = {}
        for start in range(0, len(wanted), PARAMETERS_MAX):
            part = wanted[start : start + PARAMETERS_MAX]
            marks = ",".join("?" * len(part))
            sizes.update(self._db.execute(f"SELECT digest, size_bytes FROM blobs WHERE digest IN ({marks})", part))  # noqa: S608 - only question marks
        return sizes

    def small_blob(self, digest: str) -> bytes | None:
        """Return the content of a small blob; None: it is not small, or not recorded."""
        row = self._db.execute("SELECT data FROM small_blobs WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else row[0]

    def unreferenced_blobs(self, *, before_us: int, limit: int) -> list[str]:
        """List blobs without references that were stored before a time, oldest first."""
        rows = self._db.execute(
            "SELECT digest FROM blobs WHERE refs = 0 AND stored_us < ? ORDER BY stored_us LIMIT ?", (before_us, limit)
        )
        return [digest for (digest,) in rows]

    def totals(self, *, after_seq: int) -> LogTotals:
        rows, seq = self._db.execute(
            "SELECT coalesce(sum(rows), 0), coalesce(max(seq), :seq) FROM entries WHERE seq > :seq", {"seq": after_seq}
        ).fetchone()
        blobs, blob_bytes = self._db.execute("SELECT count(*), coalesce(sum(size_bytes), 0) FROM blobs").fetchone()
        return LogTotals(blobs=blobs, blob_bytes=blob_bytes, rows=rows, seq=seq)


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

    def grant_lease(self, pipeline: str, node: str, *, holder: str, generation: Generation, now_us: int) -> None:
        """Record the holder of a lease; the node is added if it is new."""
        self._db.execute(
            "INSERT INTO nodes (pipeline, node, holder, hub_generation, local_generation, seen_us) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (pipeline, node) DO UPDATE SET holder = excluded.holder, hub_generation = excluded.hub_generation, "
            "local_generation = excluded.local_generation, seen_us = excluded.seen_us",
            (pipeline, node, holder, generation.hub, generation.local, now_us),
        )

    def add_epochs(
        self,
        pipeline: str,
        node_id: int,
        epochs: Sequence[tuple[EpochEntry, str]],
        generation: Generation,
        *,
        now_us: int,
    ) -> None:
        """Add epochs, each with its digest, under the next sequence number; the last one becomes the node's newest."""
        seq = self._db.execute("UPDATE counter SET seq = seq + 1 RETURNING seq").fetchone()[0]
        first, (newest, head_digest) = epochs[0][0].epoch, epochs[-1]
        references: Counter[str] = Counter()
        for entry, digest in epochs:
            runs = [run for segment in entry.streams.values() for run in segment.runs]
            references.update(run.digest for run in runs)
            self._db.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (node_id, entry.epoch, seq, first, newest.epoch, digest, generation.hub, generation.local, entry.created_us,
                 now_us, *_sums(runs), len(entry.streams)),
            )  # fmt: skip
            for name, segment in entry.streams.items():
                self._add_segment(self._stream_id(pipeline, name), node_id, seq, entry, segment, now_us)
        self._add_references(references)
        self._db.execute(
            "UPDATE nodes SET head = ?, head_digest = ?, seen_us = ?, committed_us = ?, controls = ? WHERE id = ?",
            (newest.epoch, head_digest, now_us, now_us, msgspec.json.encode(newest.controls), node_id),
        )

    def add_checkpoint(self, node_id: int, checkpoint: Checkpoint, *, replaced: Iterable[Checkpoint]) -> None:
        """Keep a checkpoint in place of others. Only the difference is counted: most of the state stays."""
        references = Counter(run.digest for run in checkpoint.runs())
        for old in replaced:
            references.subtract(run.digest for run in old.runs())
            self._db.execute("DELETE FROM checkpoints WHERE node_id = ? AND epoch = ?", (node_id, old.epoch))
        content = msgspec.json.encode(checkpoint)
        self._db.execute("INSERT INTO checkpoints VALUES (?, ?, ?)", (node_id, checkpoint.epoch, content))
        self._add_references(references)

    def save_health(self, pipeline: str, node: str, health: Health, *, now_us: int) -> None:
        """Keep a node's newest report; the node is added if it is new."""
        self._db.execute(
            "INSERT INTO nodes (pipeline, node, seen_us, health) VALUES (?, ?, ?, ?) ON CONFLICT (pipeline, node) DO UPDATE SET "
            "seen_us = excluded.seen_us, health = excluded.health",
            (pipeline, node, now_us, msgspec.json.encode(health)),
        )

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
            "INSERT INTO passed VALUES (?, ?, ?, ?) "
            "ON CONFLICT (consumer_id, stream, node) DO UPDATE SET epoch = max(epoch, excluded.epoch)",
            [
                (consumer_id, stream, node, epoch)
                for stream, nodes in position.streams.items()
                for node, epoch in nodes.items()
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
            "INSERT INTO blobs (digest, size_bytes, stored_us) VALUES (?, ?, ?) "
            "ON CONFLICT (digest) DO UPDATE SET size_bytes = excluded.size_bytes, stored_us = excluded.stored_us",
            [(digest, size_bytes, stored_us) for digest, (size_bytes, stored_us) in blobs.items()],
        )

    def save_small_blob(self, digest: str, data: bytes, *, now_us: int) -> bool:
        """Record a verified blob with its content; False if it was stored already. Its grace time begins again."""
        if self.blob_sizes((digest,)).get(digest) == len(data):
            self._db.execute("UPDATE blobs SET stored_us = ? WHERE digest = ?", (now_us, digest))
            return False
        self._db.execute(
            "INSERT INTO blobs (digest, size_bytes, stored_us, small) VALUES (?, ?, ?, 1) "
            "ON CONFLICT (digest) DO UPDATE SET size_bytes = excluded.size_bytes, stored_us = excluded.stored_us, small = 1",
            (digest, len(data), now_us),
        )
        self._db.execute("INSERT OR REPLACE INTO small_blobs VALUES (?, ?)", (digest, data))
        return True

    # Retention. Each call removes at most `limit` rows, and returns how many.

    def remove_segments(self, stream_id: int, node_id: int, until: int, *, limit: int) -> int:
        rows = self._db.execute(
            "SELECT seq, epoch, runs, rows, size_bytes FROM segments WHERE stream_id = ? AND node_id = ? AND epoch <= ? "
            "ORDER BY epoch LIMIT ?",
            (stream_id, node_id, until, limit),
        ).fetchall()
        if not rows:
            return 0
        seqs, epochs, runs, counts, sizes = zip(*rows, strict=True)
        self._db.executemany(
            "DELETE FROM segments WHERE stream_id = ? AND seq = ? AND epoch = ?",
            [(stream_id, seq, epoch) for seq, epoch in zip(seqs, epochs, strict=True)],
        )
        self._db.executemany(
            "UPDATE entries SET segments = segments - 1 WHERE node_id = ? AND epoch = ?",
            [(node_id, epoch) for epoch in epochs],
        )
        self._db.execute(
            "UPDATE stream_nodes SET first = ?, epochs = epochs - ?, rows = rows - ?, size_bytes = size_bytes - ? "
            "WHERE stream_id = ? AND node_id = ?",
            (epochs[-1] + 1, len(rows), sum(counts), sum(sizes), stream_id, node_id),
        )
        self._drop_references(run.digest for encoded in runs for run in _decode_runs(encoded))
        return len(rows)

    def remove_entries(self, *, kept: int, limit: int) -> int:
        """Remove epochs without segments, but none of the newest `kept` of a node."""
        rows = self._db.execute(
            "SELECT e.node_id, e.epoch FROM nodes n CROSS JOIN entries e ON e.node_id = n.id AND e.epoch <= n.head - ? "
            "WHERE e.segments = 0 LIMIT ?",
            (kept, limit),
        ).fetchall()
        self._db.executemany("DELETE FROM entries WHERE node_id = ? AND epoch = ?", rows)
        return len(rows)

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
        self, stream_id: int, node_id: int, seq: int, entry: EpochEntry, segment: StreamSegment, now_us: int
    ) -> None:
        rows, size_bytes = _sums(segment.runs)
        self._db.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (stream_id, seq, entry.epoch, node_id, msgspec.json.encode(segment.runs), rows, size_bytes,
             segment.watermark_us, now_us, entry.ended),
        )  # fmt: skip
        self._db.execute(
            "INSERT INTO stream_nodes VALUES (?, ?, ?, ?, 1, ?, ?, ?) ON CONFLICT (stream_id, node_id) DO UPDATE SET "
            "first = CASE epochs WHEN 0 THEN excluded.first ELSE first END, last = excluded.last, epochs = epochs + 1, "
            "rows = rows + excluded.rows, size_bytes = size_bytes + excluded.size_bytes, "
            "watermark_us = max(watermark_us, excluded.watermark_us)",
            (stream_id, node_id, entry.epoch, entry.epoch, rows, size_bytes, segment.watermark_us),
        )

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
        return int(row[0])


class SqliteStore:
    """One file: one connection writes, a pool of connections reads. The lock of the hub's directory keeps other hubs away."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. `StorageError` if that fails, `ConfigError` if a newer version has written it."""
        self.path = path
        self._db = _open_for_writing(path)
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
            if isinstance(error, sqlite3.Error):
                raise StoreFailedError(_describe(error)) from error
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[LogReader]:
        """Open a consistent view, on a connection that no other thread has. Called by any thread; blocks."""
        with self._mutex:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _connect(self.path, writes=False)
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


def _connect(path: Path, *, writes: bool) -> sqlite3.Connection:
    """Open a connection. Every commit is synced, because nothing is answered that is not durable."""
    connection = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    if writes:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        connection.execute(f"PRAGMA cache_size = -{CACHE_BYTES >> 10}")
        connection.execute("PRAGMA foreign_keys = ON")
    else:
        connection.execute("PRAGMA query_only = ON")
    return connection


def _open_for_writing(path: Path) -> sqlite3.Connection:
    try:
        connection = _connect(path, writes=True)
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
    except sqlite3.Error as error:
        raise StorageError(
            f"the hub's log {path} cannot be opened: {error}. Check the disk and the directory's permissions."
        ) from error
    if found > SCHEMA_VERSION:
        connection.close()
        raise ConfigError(
            f"the hub's log {path} has version {found}; this program reads version {SCHEMA_VERSION} and has changed nothing.\n"
            "Install the newer fordstone that wrote it."
        )
    return connection


def _describe(error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return "its disk is full. Free space there, or let consumers read on"
    return str(error)


def _file_size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _generation(hub: int | None, local: int | None) -> Generation | None:
    return None if hub is None or local is None else Generation(hub=hub, local=local)


def _decode_runs(data: bytes) -> tuple[RunRef, ...]:
    return msgspec.json.decode(data, type=tuple[RunRef, ...])


def _decode_version(data: bytes) -> ControlVersion:
    return msgspec.json.decode(data, type=ControlVersion)


def _sums(runs: Sequence[RunRef]) -> tuple[int, int]:
    return sum(run.rows for run in runs), sum(run.size_bytes for run in runs)
