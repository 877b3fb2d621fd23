"""What the hub's log has. `log_records` defines what is returned, where `hub.messages` does not.

Methods return facts; they reject no request. Ids (`node_id`, `stream_id`, `table_id`) mean nothing outside of the log's store.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from fordstone.hub.messages import (
    NUMBER_MAX,
    Checkpoint,
    ConsumerPosition,
    ControlVersion,
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
)
from fordstone.hub.store.log_records import (
    BlobRecord,
    ControlTable,
    ForgottenNode,
    LogPages,
    LogTotals,
    NodeBytes,
    NodeLag,
    NodeRecord,
    NodeSegments,
    PositionFacts,
    Publisher,
)
from fordstone.hub.store.log_schema import StoreFailedError, describe_failure
from fordstone.lang.duration import TIME_MIN_US
from fordstone.protocol.chain import CHAIN_START, ChainFacts
from fordstone.protocol.forget import Unread
from fordstone.protocol.restored import number_after_restore
from fordstone.protocol.retention import Mark
from fordstone.state.base import RunRef

DIGESTS_PER_QUERY: Final = 500
"""Maximum number of digests that are looked up at once."""
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


class LogReader:
    """One consistent view. Used by one thread, and only within the context that gave it."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def newest_seq(self) -> int:
        """Return the sequence number of the newest commit; 0: there is none."""
        return int(self._db.execute("SELECT seq FROM counter").fetchone()[0])

    def ran_us(self) -> int:
        """Return the total time that the hub had run when that was saved last."""
        return int(self._db.execute("SELECT ran_us FROM counter").fetchone()[0])

    def marks(self) -> list[Mark]:
        """List moments of the running time, in order, with the newest commit at each."""
        return [Mark(*row) for row in self._db.execute("SELECT ran_us, seq FROM marks ORDER BY ran_us")]

    def log_id(self) -> str:
        """Return the random word that distinguishes this log from others, and from itself before a restore."""
        return str(self._db.execute("SELECT log_id FROM counter").fetchone()[0])

    def was_restored(self) -> bool:
        """Whether this log was ever restored from a backup."""
        return self._db.execute("SELECT restored_us FROM counter").fetchone()[0] is not None

    def first_generation(self) -> int:
        """Return the hub generation of a new node. Of a restored log it may not be new: then it had a smaller one."""
        restored_us = self._db.execute("SELECT restored_us FROM counter").fetchone()[0]
        return 1 if restored_us is None else number_after_restore(1, now_us=restored_us)

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

    def position_facts(self, pipeline: str, stream: str, node: str, epoch: int) -> PositionFacts:
        """Return what the log has of a node around a position in a stream, in one query: a consumer has thousands of them."""
        row = self._db.execute(
            "SELECT f.epoch, f.chain, n.head, n.head_chain, e.chain, x.digest, x.chain, EXISTS (SELECT 1 FROM stream_nodes sn "
            "JOIN streams s ON s.id = sn.stream_id WHERE s.pipeline = :pipeline AND s.stream = :stream AND sn.node_id = n.id) "
            "FROM (SELECT 1) LEFT JOIN forgotten_nodes f ON f.pipeline = :pipeline AND f.node = :node "
            "LEFT JOIN nodes n ON n.pipeline = :pipeline AND n.node = :node "
            "LEFT JOIN entries e ON e.node_id = n.id AND e.epoch = :epoch "
            "LEFT JOIN entries x ON x.node_id = n.id AND x.epoch = :epoch + 1",
            {"pipeline": pipeline, "stream": stream, "node": node, "epoch": epoch},
        ).fetchone()
        if row[0] is not None:
            return PositionFacts(ChainFacts(head=row[0], head_chain=row[1]), forgotten=True, in_stream=False)
        if row[2] is None:
            return PositionFacts(ChainFacts(), forgotten=False, in_stream=False)
        following = None if row[5] is None else (row[5], row[6])
        facts = ChainFacts(head=row[2], head_chain=row[3], chain=row[4], following=following)
        return PositionFacts(facts, forgotten=False, in_stream=bool(row[7]))

    def streams_of_consumer(self, pipeline: str, consumer: str) -> set[str]:
        """Return the streams that a consumer has named."""
        rows = self._db.execute(
            "SELECT cs.stream FROM consumer_streams cs JOIN consumers c ON c.id = cs.consumer_id WHERE c.pipeline = ? AND c.consumer = ?",
            (pipeline, consumer),
        )
        return {stream for (stream,) in rows}

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

        A node that was forgotten is listed as ended to readers that may have read it: those that go on from a commit, and consumers with a position.
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
                    seq=seq, node=of.node, epoch=epoch, chain=chain, runs=decode_runs(runs), watermark_us=watermark_us,
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
            "SELECT c.id, c.newest, c.reached, c.chain, (SELECT min(version) FROM versions WHERE control_id = c.id), "
            "(SELECT max(version) FROM versions WHERE control_id = c.id AND snapshot) "
            "FROM controls c WHERE c.pipeline = ? AND c.control = ?",
            (pipeline, control),
        ).fetchone()
        if row is None:
            return None
        return ControlTable(
            table_id=row[0], newest=row[1], reached=row[2], chain=row[3], oldest=row[4], snapshot=row[5]
        )

    def control_tables(self) -> list[tuple[str, str, ControlVersion]]:
        """List all control tables: pipeline, name, and the version published last."""
        rows = self._db.execute(
            "SELECT c.pipeline, c.control, v.content FROM controls c JOIN versions v ON v.control_id = c.id AND v.version = c.newest "
            "ORDER BY 1, 2"
        )
        return [(pipeline, control, _decode_version(content)) for pipeline, control, content in rows]

    def controls_reached(self) -> int:
        """Return the number after which the versions of a table begin that has none yet."""
        return int(self._db.execute("SELECT controls_reached FROM counter").fetchone()[0])

    def control_version_at(self, table_id: int, number: int) -> ControlVersion | None:
        """Return the last version up to a number; None: it is not kept."""
        row = self._db.execute(
            "SELECT content FROM versions WHERE control_id = ? AND version <= ? ORDER BY version DESC LIMIT 1",
            (table_id, number),
        ).fetchone()
        return None if row is None else _decode_version(row[0])

    def control_versions(self, table_id: int, *, start: int, limit: int) -> tuple[ControlVersion, ...]:
        rows = self._db.execute(
            "SELECT content FROM versions WHERE control_id = ? AND version >= ? ORDER BY version LIMIT ?",
            (table_id, start, limit),
        )
        return tuple(_decode_version(content) for (content,) in rows)

    def publisher(self, pipeline: str, control: str, owner: str, batch: int) -> Publisher:
        """Return what an owner has published of a control table, and what became of a batch."""
        row = self._db.execute(
            "SELECT c.reached, c.chain, coalesce((SELECT max(generation) FROM publishers WHERE control_id = c.id), 0), p.generation, "
            "p.batch, p.starts, coalesce(v.content, p.content), v.changes FROM controls c "
            "LEFT JOIN publishers p ON p.control_id = c.id AND p.owner = :owner "
            "LEFT JOIN versions v ON v.control_id = c.id AND v.owner = :owner AND v.batch = :batch "
            "WHERE c.pipeline = :pipeline AND c.control = :control ORDER BY v.version DESC LIMIT 1",
            {"pipeline": pipeline, "control": control, "owner": owner, "batch": batch},
        ).fetchone()
        if row is None:
            return Publisher(reached=self.controls_reached())
        reached, chain, leader, generation, newest, starts, content, changes = row
        if generation is None:
            return Publisher(reached=reached, chain=chain, leader=leader)
        return Publisher(
            reached=reached,
            chain=chain,
            leader=leader,
            generation=generation,
            batch=newest,
            starts=msgspec.json.decode(starts, type=tuple[str, ...]),
            published=_decode_version(content),
            changes=changes,
        )

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
        return self._look_up(
            "SELECT digest, size_bytes FROM blobs WHERE NOT damaged AND digest IN (SELECT value FROM json_each(?))",
            digests,
        )

    def recorded_blobs(self, digests: Iterable[str]) -> set[str]:
        """Return those blobs that are recorded, damaged or not."""
        return set(
            self._look_up(
                "SELECT digest, size_bytes FROM blobs WHERE digest IN (SELECT value FROM json_each(?))", digests
            )
        )

    def _look_up(self, query: str, digests: Iterable[str]) -> dict[str, int]:
        """Run a query that takes a list of digests. It has one text for lists of any length: a connection keeps statements by their text."""
        wanted = list(digests)
        found: dict[str, int] = {}
        for start in range(0, len(wanted), DIGESTS_PER_QUERY):
            part = msgspec.json.encode(wanted[start : start + DIGESTS_PER_QUERY]).decode()
            found.update(self._db.execute(query, (part,)))
        return found

    def blob_at(self, digest: str) -> BlobRecord | None:
        """Return the record of one blob; None: there is none."""
        return next(iter(self._blobs("digest = ?", digest)), None)

    def blobs_after(self, digest: str, *, limit: int) -> list[BlobRecord]:
        """List blobs in order of their digest, those after one."""
        return self._blobs("digest > ? ORDER BY digest LIMIT ?", digest, limit)

    def damaged_blobs(self, *, after: str = "", limit: int = -1) -> list[BlobRecord]:
        """List damaged blobs in order of their digest, those after one."""
        return self._blobs("damaged AND digest > ? ORDER BY digest LIMIT ?", after, limit)

    def _blobs(self, chosen: str, *values: object) -> list[BlobRecord]:
        rows = self._db.execute(
            f"SELECT digest, size_bytes, small, damaged, refs FROM blobs WHERE {chosen}",  # noqa: S608 - a constant
            values,
        )
        return [
            BlobRecord(digest, size_bytes, bool(small), bool(damaged), refs)
            for digest, size_bytes, small, damaged, refs in rows
        ]

    def blob_references(self, digests: Collection[str], *, limit: int) -> dict[str, list[str]]:
        """Describe what references these blobs, up to `limit` places of each. Reads all segments: for operators only."""
        found: dict[str, list[str]] = {digest: [] for digest in digests}
        for what, query in _REFERENCES:
            for content, *names in self._db.execute(query):
                for digest in _DIGEST.findall(content):
                    text = digest.decode()
                    if text in found and len(found[text]) < limit:
                        found[text].append(what.format(*names))
        return found

    def scrub_state(self) -> tuple[str, int]:
        """Return the last blob that the scrub has looked at, and the running time from which on it may begin again."""
        after, due_us = self._db.execute("SELECT scrub_after, scrub_due_us FROM counter").fetchone()
        return str(after), int(due_us)

    def node_bytes(self, node: str) -> NodeBytes:
        """Return what a node's segments and checkpoints take, in all pipelines."""
        blobs, log = self._db.execute(
            "SELECT coalesce(sum(s.size_bytes), 0), coalesce(sum(s.log_bytes), 0) FROM stream_nodes s "
            "JOIN nodes n ON n.id = s.node_id WHERE n.node = ?",
            (node,),
        ).fetchone()
        state = sum(self.state_blobs(node, None).values())
        checkpoints = self._count(
            "SELECT coalesce(sum(length(c.content)), 0) FROM checkpoints c JOIN nodes n ON n.id = c.node_id WHERE n.node = ?",
            node,
        )
        return NodeBytes(blobs=blobs + state, log=log + checkpoints)

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
            raise StoreFailedError(describe_failure(error)) from error
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


def _generation(hub: int | None, local: int | None) -> Generation | None:
    return None if hub is None or local is None else Generation(hub=hub, local=local)


def _json_twice(names: Sequence[str] | None) -> tuple[str | None, str | None]:
    text = None if names is None else msgspec.json.encode(names).decode()
    return text, text


def decode_runs(data: bytes) -> tuple[RunRef, ...]:
    """Decode the runs of a segment."""
    return msgspec.json.decode(data, type=tuple[RunRef, ...])


def _decode_version(data: bytes) -> ControlVersion:
    return msgspec.json.decode(data, type=ControlVersion)
