"""The hub's log in one SQLite file: the schema and all SQL of the hub.

Invariants: every transaction is synced before its context ends. A file of a newer version is rejected, never changed.
`blobs.refs` is the number of references that rows of other tables hold; `LogWriter.add_references` changes it in the same
transaction as those rows. `blobs.small`: the content is in `small_blobs` rather than in the blob store.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from fordstone.errors import ConfigError, StorageError
from fordstone.hub.messages import (
    Checkpoint,
    ConsumerPosition,
    ControlVersion,
    EpochInfo,
    Generation,
    Health,
    NodeInfo,
    StreamEpoch,
    StreamInfo,
)
from fordstone.hub.store.base import (
    ControlTable,
    EpochRecord,
    LogReader,
    LogStore,
    LogTotals,
    LogWriter,
    NodeRecord,
    Publisher,
    StoreFailedError,
    StreamShare,
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


class SqliteReader(LogReader):
    """Queries on one connection."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def newest_seq(self) -> int:
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
        """Read a range of the primary key of `entries`."""
        rows = self._db.execute(
            "SELECT epoch, digest FROM entries WHERE node_id = ? AND epoch BETWEEN ? AND ?", (node_id, first, last)
        )
        return dict(rows.fetchall())

    def checkpoints(self, node_id: int) -> dict[int, Checkpoint]:
        """Read and decode the rows of a node."""
        rows = self._db.execute("SELECT epoch, content FROM checkpoints WHERE node_id = ?", (node_id,))
        return {epoch: msgspec.json.decode(content, type=Checkpoint) for epoch, content in rows}

    def nodes(self) -> tuple[NodeInfo, ...]:
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
        """Read `entries` by node if both names are given, else by sequence number."""
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
        """Sum `stream_nodes`, and the backlog of each consumer."""
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

    def stream_shares(self) -> list[StreamShare]:
        rows = self._db.execute(
            "SELECT sn.stream_id, sn.node_id, sn.first, (SELECT min(coalesce(p.epoch, 0)) FROM consumers c "  # noqa: S608 - a constant
            "LEFT JOIN passed p ON p.consumer_id = c.id AND p.stream = s.stream AND p.node = n.node "
            f"WHERE c.pipeline = s.pipeline AND {_CONSUMER_READS_STREAM}) "
            "FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id JOIN nodes n ON n.id = sn.node_id WHERE sn.epochs > 0"
        )
        return [
            StreamShare(stream_id=stream_id, node_id=node_id, first=first, passed=passed or 0)
            for stream_id, node_id, first, passed in rows
        ]

    def newest_epoch_received_before(self, stream_id: int, node_id: int, before_us: int) -> int:
        row = self._db.execute(
            "SELECT max(epoch) FROM segments WHERE stream_id = ? AND node_id = ? AND received_us < ?",
            (stream_id, node_id, before_us),
        ).fetchone()
        return row[0] or 0

    def control_tables(self) -> list[ControlTable]:
        return [
            ControlTable(table_id=table_id, pipeline=pipeline, control=control, newest=newest)
            for table_id, pipeline, control, newest in self._db.execute(
                "SELECT id, pipeline, control, newest FROM controls"
            )
        ]

    def control_table(self, pipeline: str, control: str) -> ControlTable | None:
        row = self._db.execute(
            "SELECT id, newest FROM controls WHERE pipeline = ? AND control = ?", (pipeline, control)
        ).fetchone()
        return None if row is None else ControlTable(table_id=row[0], pipeline=pipeline, control=control, newest=row[1])

    def control_range(self, table_id: int, *, snapshot_until: int) -> tuple[int | None, int | None]:
        row: tuple[int | None, int | None] = self._db.execute(
            "SELECT min(version), max(CASE WHEN snapshot AND version <= ? THEN version END) FROM versions WHERE control_id = ?",
            (snapshot_until, table_id),
        ).fetchone()
        return row

    def control_versions(self, table_id: int, *, start: int, limit: int) -> tuple[ControlVersion, ...]:
        rows = self._db.execute(
            "SELECT content FROM versions WHERE control_id = ? AND version >= ? ORDER BY version LIMIT ?",
            (table_id, start, limit),
        )
        return tuple(_decode_version(content) for (content,) in rows)

    def control_version_of_batch(self, table_id: int, owner: str, batch: int) -> ControlVersion | None:
        row = self._db.execute(
            "SELECT content FROM versions WHERE control_id = ? AND owner = ? AND batch = ?", (table_id, owner, batch)
        ).fetchone()
        return None if row is None else _decode_version(row[0])

    def publisher(self, table_id: int, owner: str) -> Publisher | None:
        row = self._db.execute(
            "SELECT generation, batch, content FROM publishers WHERE control_id = ? AND owner = ?", (table_id, owner)
        ).fetchone()
        return None if row is None else Publisher(generation=row[0], batch=row[1], last=_decode_version(row[2]))

    def newest_publisher_generation(self, table_id: int) -> int:
        row = self._db.execute("SELECT max(generation) FROM publishers WHERE control_id = ?", (table_id,)).fetchone()
        return row[0] or 0

    def controls_read_since(self, since_us: int) -> list[tuple[str, dict[str, int]]]:
        return [
            (pipeline, msgspec.json.decode(controls, type=dict[str, int]))
            for pipeline, controls in self._db.execute(
                "SELECT pipeline, controls FROM nodes WHERE seen_us >= ?", (since_us,)
            )
        ]

    def blob_sizes(self, digests: Iterable[str]) -> dict[str, int]:
        """Ask for a bounded number of digests at a time."""
        wanted = list(digests)
        sizes: dict[str, int] = {}
        for start in range(0, len(wanted), PARAMETERS_MAX):
            part = wanted[start : start + PARAMETERS_MAX]
            marks = ",".join("?" * len(part))
            sizes.update(self._db.execute(f"SELECT digest, size_bytes FROM blobs WHERE digest IN ({marks})", part))  # noqa: S608 - only question marks
        return sizes

    def small_blob(self, digest: str) -> bytes | None:
        row = self._db.execute("SELECT data FROM small_blobs WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else row[0]

    def unreferenced_blobs(self, *, before_us: int, limit: int) -> list[str]:
        """Read the partial index of blobs without references."""
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


class SqliteWriter(SqliteReader, LogWriter):
    """The writing connection, within a transaction."""

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Use SQLite's savepoints. An error of the file, other than a broken constraint, ends the transaction."""
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
        """Insert or update the row of the node."""
        self._db.execute(
            "INSERT INTO nodes (pipeline, node, holder, hub_generation, local_generation, seen_us) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (pipeline, node) DO UPDATE SET holder = excluded.holder, hub_generation = excluded.hub_generation, "
            "local_generation = excluded.local_generation, seen_us = excluded.seen_us",
            (pipeline, node, holder, generation.hub, generation.local, now_us),
        )

    def next_seq(self) -> int:
        return int(self._db.execute("UPDATE counter SET seq = seq + 1 RETURNING seq").fetchone()[0])

    def add_epoch(self, pipeline: str, node_id: int, record: EpochRecord) -> None:
        """Insert the entry and its segments, and update the sums of each stream."""
        entry = record.entry
        rows, size_bytes = _sums([run for segment in entry.streams.values() for run in segment.runs])
        self._db.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (node_id, entry.epoch, record.seq, record.first, record.last, record.digest, record.generation.hub,
             record.generation.local, entry.created_us, record.received_us, rows, size_bytes, len(entry.streams)),
        )  # fmt: skip
        for name, segment in entry.streams.items():
            stream_id = self._stream_id(pipeline, name)
            rows, size_bytes = _sums(segment.runs)
            self._db.execute(
                "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (stream_id, record.seq, entry.epoch, node_id, msgspec.json.encode(segment.runs), rows, size_bytes,
                 segment.watermark_us, record.received_us, entry.ended),
            )  # fmt: skip
            self._db.execute(
                "INSERT INTO stream_nodes VALUES (?, ?, ?, ?, 1, ?, ?, ?) ON CONFLICT (stream_id, node_id) DO UPDATE SET "
                "first = CASE epochs WHEN 0 THEN excluded.first ELSE first END, last = excluded.last, epochs = epochs + 1, "
                "rows = rows + excluded.rows, size_bytes = size_bytes + excluded.size_bytes, "
                "watermark_us = max(watermark_us, excluded.watermark_us)",
                (stream_id, node_id, entry.epoch, entry.epoch, rows, size_bytes, segment.watermark_us),
            )

    def move_head(
        self, node_id: int, *, epoch: int, digest: str, controls: Mapping[str, int], committed_us: int
    ) -> None:
        self._db.execute(
            "UPDATE nodes SET head = ?, head_digest = ?, seen_us = ?, committed_us = ?, controls = ? WHERE id = ?",
            (epoch, digest, committed_us, committed_us, msgspec.json.encode(controls), node_id),
        )

    def add_checkpoint(self, node_id: int, checkpoint: Checkpoint) -> None:
        content = msgspec.json.encode(checkpoint)
        self._db.execute("INSERT INTO checkpoints VALUES (?, ?, ?)", (node_id, checkpoint.epoch, content))

    def remove_checkpoint(self, node_id: int, epoch: int) -> None:
        self._db.execute("DELETE FROM checkpoints WHERE node_id = ? AND epoch = ?", (node_id, epoch))

    def save_health(self, pipeline: str, node: str, health: Health, *, now_us: int) -> None:
        """Insert or update the row of the node."""
        self._db.execute(
            "INSERT INTO nodes (pipeline, node, seen_us, health) VALUES (?, ?, ?, ?) ON CONFLICT (pipeline, node) DO UPDATE SET "
            "seen_us = excluded.seen_us, health = excluded.health",
            (pipeline, node, now_us, msgspec.json.encode(health)),
        )

    def save_position(self, pipeline: str, consumer: str, position: ConsumerPosition, *, now_us: int) -> None:
        """Insert or update the consumer, its streams and its positions."""
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
        """Delete the row; its streams and positions follow by the foreign keys."""
        self._db.execute("DELETE FROM consumers WHERE pipeline = ? AND consumer = ?", (pipeline, consumer))

    def ensure_control_table(self, pipeline: str, control: str) -> ControlTable:
        table_id, newest = self._db.execute(
            "INSERT INTO controls (pipeline, control) VALUES (?, ?) "
            "ON CONFLICT (pipeline, control) DO UPDATE SET newest = newest RETURNING id, newest",
            (pipeline, control),
        ).fetchone()
        return ControlTable(table_id=table_id, pipeline=pipeline, control=control, newest=newest)

    def add_control_version(self, table_id: int, version: ControlVersion, *, generation: int) -> None:
        """Insert the version, and update its table and its publisher."""
        content = msgspec.json.encode(version)
        self._db.execute(
            "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (table_id, version.version, version.owner, version.batch, version.snapshot, version.blob.digest, content),
        )
        self._db.execute("UPDATE controls SET newest = ? WHERE id = ?", (version.version, table_id))
        self._db.execute(
            "INSERT INTO publishers VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (control_id, owner) DO UPDATE SET batch = excluded.batch, content = excluded.content",
            (table_id, version.owner, generation, version.batch, content),
        )

    def record_blobs(self, blobs: Mapping[str, tuple[int, int]]) -> None:
        self._db.executemany(
            "INSERT INTO blobs (digest, size_bytes, stored_us) VALUES (?, ?, ?) "
            "ON CONFLICT (digest) DO UPDATE SET size_bytes = excluded.size_bytes, stored_us = excluded.stored_us",
            [(digest, size_bytes, stored_us) for digest, (size_bytes, stored_us) in blobs.items()],
        )

    def save_small_blob(self, digest: str, data: bytes, *, now_us: int) -> None:
        self._db.execute(
            "INSERT INTO blobs (digest, size_bytes, stored_us, small) VALUES (?, ?, ?, 1) "
            "ON CONFLICT (digest) DO UPDATE SET size_bytes = excluded.size_bytes, stored_us = excluded.stored_us, small = 1",
            (digest, len(data), now_us),
        )
        self._db.execute("INSERT OR REPLACE INTO small_blobs VALUES (?, ?)", (digest, data))

    def touch_blob(self, digest: str, *, now_us: int) -> None:
        self._db.execute("UPDATE blobs SET stored_us = ? WHERE digest = ?", (now_us, digest))

    def add_references(self, changes: Mapping[str, int]) -> None:
        """Update `refs`, which a constraint keeps from going below zero."""
        self._db.executemany(
            "UPDATE blobs SET refs = refs + ? WHERE digest = ?",
            [(change, digest) for digest, change in changes.items() if change],
        )

    def remove_segments(self, stream_id: int, node_id: int, *, until: int, limit: int) -> list[Sequence[RunRef]]:
        """Delete segments, and update their entries and the sums of the stream."""
        rows = self._db.execute(
            "SELECT seq, epoch, runs, rows, size_bytes FROM segments WHERE stream_id = ? AND node_id = ? AND epoch <= ? "
            "ORDER BY epoch LIMIT ?",
            (stream_id, node_id, until, limit),
        ).fetchall()
        if not rows:
            return []
        self._db.executemany(
            "DELETE FROM segments WHERE stream_id = ? AND seq = ? AND epoch = ?",
            [(stream_id, row[0], row[1]) for row in rows],
        )
        self._db.executemany(
            "UPDATE entries SET segments = segments - 1 WHERE node_id = ? AND epoch = ?",
            [(node_id, row[1]) for row in rows],
        )
        self._db.execute(
            "UPDATE stream_nodes SET first = ?, epochs = epochs - ?, rows = rows - ?, size_bytes = size_bytes - ? "
            "WHERE stream_id = ? AND node_id = ?",
            (
                rows[-1][1] + 1,
                len(rows),
                sum(row[3] for row in rows),
                sum(row[4] for row in rows),
                stream_id,
                node_id,
            ),
        )
        return [_decode_runs(row[2]) for row in rows]

    def remove_entries(self, *, kept: int, limit: int) -> int:
        """Delete by the partial index of entries without segments."""
        rows = self._db.execute(
            "SELECT e.node_id, e.epoch FROM nodes n CROSS JOIN entries e ON e.node_id = n.id AND e.epoch <= n.head - ? "
            "WHERE e.segments = 0 LIMIT ?",
            (kept, limit),
        ).fetchall()
        self._db.executemany("DELETE FROM entries WHERE node_id = ? AND epoch = ?", rows)
        return len(rows)

    def remove_control_versions(self, table_id: int, *, before: int, limit: int) -> list[str]:
        rows = self._db.execute(
            "SELECT version, digest FROM versions WHERE control_id = ? AND version < ? ORDER BY version LIMIT ?",
            (table_id, before, limit),
        ).fetchall()
        self._db.executemany(
            "DELETE FROM versions WHERE control_id = ? AND version = ?", [(table_id, version) for version, _ in rows]
        )
        return [digest for _, digest in rows]

    def remove_blob_if_unreferenced(self, digest: str, *, before_us: int) -> bool | None:
        """Delete the row; small content follows by the foreign key."""
        row = self._db.execute(
            "DELETE FROM blobs WHERE digest = ? AND refs = 0 AND stored_us < ? RETURNING small", (digest, before_us)
        ).fetchone()
        return None if row is None else bool(row[0])

    def _stream_id(self, pipeline: str, name: str) -> int:
        row = self._db.execute("SELECT id FROM streams WHERE pipeline = ? AND stream = ?", (pipeline, name)).fetchone()
        if row is None:
            row = self._db.execute(
                "INSERT INTO streams (pipeline, stream) VALUES (?, ?) RETURNING id", (pipeline, name)
            ).fetchone()
        return int(row[0])


class SqliteStore(LogStore):
    """One file: one connection writes, a pool of connections reads."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. `StorageError` if that fails, `ConfigError` if a newer version has written it."""
        self.path = path
        self._db = _open_for_writing(path)
        self._mutex = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    @contextlib.contextmanager
    def transaction(self) -> Iterator[LogWriter]:
        """Take SQLite's write lock, and commit with a sync."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield SqliteWriter(self._db)
            self._db.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise StoreFailedError(_describe(error)) from error
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[LogReader]:
        """Read on a connection that no other thread has."""
        with self._mutex:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _connect(self.path, writes=False)
        try:
            connection.execute("BEGIN")
            try:
                yield SqliteReader(connection)
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
        """Add up the file and its write-ahead log."""
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
