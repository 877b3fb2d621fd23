"""Changes of the hub's log: `LogWriter`. Methods carry out changes; they reject no request."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from fordstone.hub.messages import (
    NUMBER_MAX,
    Checkpoint,
    ConsumerPosition,
    ControlVersion,
    EpochEntry,
    Generation,
    Health,
    Quarantine,
    SkippedEpochs,
    StreamSegment,
)
from fordstone.hub.store.blobs import Stored
from fordstone.hub.store.log_reader import LogReader, decode_runs
from fordstone.hub.store.log_records import NodeRecord
from fordstone.hub.store.log_schema import SEGMENT_LOG_BYTES, StoreFailedError, describe_failure
from fordstone.protocol.restored import family_of, number_after_restore
from fordstone.state.base import RunRef

_ENTRIES: Final = 0
"""Stands in `discarded` for the entries of a node, in place of a stream."""


class ChainedEntry(NamedTuple):
    """An epoch as it is added, with the digest of its content and the chain at it."""

    entry: EpochEntry
    digest: str
    chain: str


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
            raise StoreFailedError(describe_failure(error)) from error

    def mark_restored(self, *, now_us: int) -> str:
        """Turn a log that was restored from a backup into another one, and return its new id.

        Leases end, and every node compares its epochs with the log's before it commits again. Hub generations and the versions of
        control tables skip what may have been given since the backup.
        """
        self._db.create_function("skipped", 1, partial(number_after_restore, now_us=now_us), deterministic=True)
        self._db.execute(
            "UPDATE counter SET log_id = ? || '.' || lower(hex(randomblob(8))), restored_us = ?, controls_reached = skipped(controls_reached)",
            (family_of(self.log_id()), now_us),
        )
        self._db.execute(
            "UPDATE nodes SET resync = 1, start = NULL, hub_generation = skipped(hub_generation) WHERE hub_generation IS NOT NULL"
        )
        self._db.execute("UPDATE controls SET reached = skipped(reached)")
        return self.log_id()

    def probe(self) -> None:
        """Write something that changes nothing, to find out whether the file can be written durably."""
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
        """Take a sequence number for a change of a node that is no commit. Readers of its streams then list the node."""
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
        """Register a consumer, add the streams that it names, and advance its positions. They never go back.

        Positions of nodes that have nothing in the stream are passed over: there may be no end of them.
        """
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
            "INSERT INTO passed SELECT ?1, ?2, ?3, ?4, ?5 WHERE EXISTS (SELECT 1 FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id "
            "JOIN nodes n ON n.id = sn.node_id WHERE s.pipeline = ?6 AND s.stream = ?2 AND n.pipeline = ?6 AND n.node = ?3) "
            "OR EXISTS (SELECT 1 FROM forgotten_nodes f WHERE f.pipeline = ?6 AND f.node = ?3) ON CONFLICT (consumer_id, stream, node) DO UPDATE SET "
            "epoch = excluded.epoch, chain = excluded.chain WHERE excluded.epoch > epoch",
            [
                (consumer_id, stream, node, passed.epoch, passed.chain, pipeline)
                for stream, nodes in position.streams.items()
                for node, passed in nodes.items()
            ],
        )

    def remove_consumer(self, pipeline: str, consumer: str) -> None:
        """Remove a consumer and its positions (by the foreign keys); it may be gone already."""
        self._db.execute("DELETE FROM consumers WHERE pipeline = ? AND consumer = ?", (pipeline, consumer))

    def add_control_version(
        self,
        pipeline: str,
        control: str,
        version: ControlVersion,
        *,
        changes: str,
        generation: int,
        starts: Sequence[str],
    ) -> None:
        """Add a version as the newest one.

        `changes`: the digest of the rows as they were published. `generation` is the owner's if it has published before, else a new
        one. `starts`: those of the owner that are remembered.
        """
        (table_id,) = self._db.execute(
            "INSERT INTO controls (pipeline, control, newest, reached, chain) VALUES (?1, ?2, ?3, ?3, ?4) "
            "ON CONFLICT (pipeline, control) DO UPDATE SET newest = ?3, reached = ?3, chain = ?4 RETURNING id",
            (pipeline, control, version.version, version.chain),
        ).fetchone()
        content = msgspec.json.encode(version)
        self._db.execute(
            "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (table_id, version.version, version.owner, version.batch, version.snapshot, version.blob.digest, changes, content),
        )  # fmt: skip
        self._db.execute(
            "INSERT INTO publishers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (control_id, owner) DO UPDATE SET "
            "batch = excluded.batch, content = excluded.content, starts = excluded.starts",
            (table_id, version.owner, generation, version.batch, content, msgspec.json.encode(starts)),
        )
        self._add_references({version.blob.digest: 1})

    def save_publisher(self, pipeline: str, control: str, owner: str, *, batch: int, starts: Sequence[str]) -> None:
        """Save which batch of an owner is its newest one that counts, and which of its starts are remembered."""
        self._db.execute(
            "UPDATE publishers SET batch = ?, starts = ? WHERE owner = ? AND control_id = "
            "(SELECT id FROM controls WHERE pipeline = ? AND control = ?)",
            (batch, msgspec.json.encode(starts), owner, pipeline, control),
        )

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
        """Save how far the scrub has come, and the running time from which on it may begin again."""
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
            "UPDATE stream_nodes SET first = ?, removed = ?, epochs = epochs - ?, rows = rows - ?, size_bytes = size_bytes - ?, "
            "log_bytes = log_bytes - ? WHERE stream_id = ? AND node_id = ?",
            (
                epochs[-1] + 1,
                epochs[-1],
                len(rows),
                sum(counts),
                sum(sizes),
                len(rows) * SEGMENT_LOG_BYTES + sum(map(len, runs)),
                stream_id,
                node_id,
            ),
        )
        self._drop_references(run.digest for encoded in runs for run in decode_runs(encoded))
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
        """Remove epochs without segments, but none of the newest `kept` of a node, and none that is the position of a consumer.

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
        """Save the total time that the hub has run."""
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
        encoded = msgspec.json.encode(segment.runs)
        self._db.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (stream_id, node_id, entry.epoch, seq, encoded, rows, size_bytes,
             segment.watermark_us, now_us, entry.ended),
        )  # fmt: skip
        self._db.execute(
            "INSERT INTO stream_nodes VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?) "
            "ON CONFLICT (stream_id, node_id) DO UPDATE SET "
            "first = CASE epochs WHEN 0 THEN excluded.first ELSE first END, last = excluded.last, epochs = epochs + 1, "
            "rows = rows + excluded.rows, size_bytes = size_bytes + excluded.size_bytes, "
            "log_bytes = log_bytes + excluded.log_bytes, "
            "watermark_us = max(watermark_us, excluded.watermark_us), seq = excluded.seq, chain = excluded.chain, "
            "newest_us = excluded.newest_us, received_us = excluded.received_us, ended = excluded.ended",
            (stream_id, node_id, entry.epoch, entry.epoch, rows, size_bytes, SEGMENT_LOG_BYTES + len(encoded), segment.watermark_us, seq, chain,
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


def _sums(runs: Sequence[RunRef]) -> tuple[int, int]:
    return sum(run.rows for run in runs), sum(run.size_bytes for run in runs)
