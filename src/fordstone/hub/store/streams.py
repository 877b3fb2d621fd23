"""How nodes are, and which epochs came lately.

What readers of streams ask: pages of the log, positions of consumers, and how streams stand.
"""

from __future__ import annotations

import sqlite3
from itertools import groupby
from typing import Final

import msgspec

from fordstone.hub.messages import (
    ConsumerPosition,
    EpochInfo,
    Generation,
    Health,
    NodeInfo,
    StreamEpoch,
    StreamInfo,
    StreamPage,
)
from fordstone.hub.refused import Refused
from fordstone.hub.store.log import Turn
from fordstone.state.base import RunRef

PAGE_BYTES_MAX: Final = 4 << 20
"""Of the lists of runs on one page; one commit may be larger than that."""


def page(db: sqlite3.Connection, pipeline: str, stream: str, *, after: int, limit: int) -> StreamPage:
    """Whole commits behind `after`, about `limit` epochs, at least one commit if there is any."""
    newest = db.execute("SELECT seq FROM counter").fetchone()[0]
    if after > newest:
        raise Refused(
            "gone",
            f"the hub's log ends at {newest}; somebody asks for what comes after {after}. The hub's data was set back: "
            "read the stream anew.",
        )
    rows = db.execute(
        "SELECT s.seq, n.node, s.epoch, s.runs, s.watermark_us, s.received_us, s.ended FROM segments s "
        "JOIN nodes n ON n.id = s.node_id "
        "WHERE s.stream_id = (SELECT id FROM streams WHERE pipeline = ? AND stream = ?) AND s.seq > ? "
        "ORDER BY s.seq, s.epoch",
        (pipeline, stream, after),
    )
    taken: list[StreamEpoch] = []
    size_bytes, more = 0, False
    for _, together in groupby(rows, key=lambda row: row[0]):
        commit = list(together)
        size_bytes += sum(len(row[3]) for row in commit)
        if taken and (len(taken) + len(commit) > limit or size_bytes > PAGE_BYTES_MAX):
            more = True
            break
        taken += [_epoch(row) for row in commit]
    return StreamPage(epochs=tuple(taken), next=taken[-1].seq if taken else after, more=more)


def keep_position(turn: Turn, pipeline: str, consumer: str, position: ConsumerPosition) -> None:
    """Register a consumer and what it has passed. Positions never go back; streams that it names are its own from then on."""
    consumer_id = turn.db.execute(
        "INSERT INTO consumers (pipeline, consumer, seen_us) VALUES (?, ?, ?) "
        "ON CONFLICT (pipeline, consumer) DO UPDATE SET seen_us = excluded.seen_us RETURNING id",
        (pipeline, consumer, turn.now_us),
    ).fetchone()[0]
    turn.db.executemany(
        "INSERT OR IGNORE INTO consumer_streams VALUES (?, ?)", [(consumer_id, stream) for stream in position.streams]
    )
    turn.db.executemany(
        "INSERT INTO passed VALUES (?, ?, ?, ?) "
        "ON CONFLICT (consumer_id, stream, node) DO UPDATE SET epoch = max(epoch, excluded.epoch)",
        [
            (consumer_id, stream, node, epoch)
            for stream, nodes in position.streams.items()
            for node, epoch in nodes.items()
        ],
    )


def forget_consumer(turn: Turn, pipeline: str, consumer: str) -> None:
    """Wait for a consumer no more. It may be gone already."""
    turn.db.execute("DELETE FROM consumers WHERE pipeline = ? AND consumer = ?", (pipeline, consumer))


def positions(db: sqlite3.Connection, pipeline: str, consumer: str) -> ConsumerPosition:
    """What a consumer has passed."""
    row = db.execute("SELECT id FROM consumers WHERE pipeline = ? AND consumer = ?", (pipeline, consumer)).fetchone()
    if row is None:
        raise Refused("not_found", f"pipeline {pipeline} has no consumer {consumer}.")
    found: dict[str, dict[str, int]] = {
        stream: {} for (stream,) in db.execute("SELECT stream FROM consumer_streams WHERE consumer_id = ?", row)
    }
    for stream, node, epoch in db.execute("SELECT stream, node, epoch FROM passed WHERE consumer_id = ?", row):
        found[stream][node] = epoch
    return ConsumerPosition(streams=found)


def list_streams(db: sqlite3.Connection) -> tuple[StreamInfo, ...]:
    """How every stream stands."""
    backlog: dict[int, dict[str, int]] = {}
    rows = db.execute(
        "SELECT sn.stream_id, c.consumer, sum(max(sn.last - max(coalesce(p.epoch, 0), sn.first - 1), 0)) "
        "FROM stream_nodes sn JOIN streams s ON s.id = sn.stream_id JOIN nodes n ON n.id = sn.node_id "
        "JOIN consumers c ON c.pipeline = s.pipeline "
        "LEFT JOIN passed p ON p.consumer_id = c.id AND p.stream = s.stream AND p.node = n.node "
        "WHERE sn.epochs > 0 AND (EXISTS (SELECT 1 FROM consumer_streams cs WHERE cs.consumer_id = c.id AND cs.stream = s.stream) "
        "OR NOT EXISTS (SELECT 1 FROM consumer_streams cs WHERE cs.consumer_id = c.id)) "
        "GROUP BY sn.stream_id, c.consumer"
    )
    for stream_id, consumer, epochs in rows:
        backlog.setdefault(stream_id, {})[consumer] = epochs
    return tuple(
        StreamInfo(
            pipeline=pipeline, stream=stream, nodes=nodes, epochs=epochs, rows=count, size_bytes=size_bytes,
            watermark_us=watermark_us, consumers=backlog.get(stream_id, {}),
        )
        for stream_id, pipeline, stream, nodes, epochs, count, size_bytes, watermark_us in db.execute(
            "SELECT s.id, s.pipeline, s.stream, count(*), sum(sn.epochs), sum(sn.rows), sum(sn.size_bytes), min(sn.watermark_us) "
            "FROM streams s JOIN stream_nodes sn ON sn.stream_id = s.id GROUP BY s.id ORDER BY s.pipeline, s.stream"
        )
    )  # fmt: skip


def _epoch(row: tuple[int, str, int, bytes, int, int, int]) -> StreamEpoch:
    seq, node, epoch, runs, watermark_us, received_us, ended = row
    return StreamEpoch(
        seq=seq,
        node=node,
        epoch=epoch,
        runs=msgspec.json.decode(runs, type=tuple[RunRef, ...]),
        watermark_us=watermark_us,
        received_us=received_us,
        ended=bool(ended),
    )


def keep_health(turn: Turn, pipeline: str, node: str, health: Health) -> None:
    """Keep a node's newest word about itself."""
    turn.db.execute(
        "INSERT INTO nodes (pipeline, node, seen_us, health) VALUES (?, ?, ?, ?) ON CONFLICT (pipeline, node) DO UPDATE SET "
        "seen_us = excluded.seen_us, health = excluded.health",
        (pipeline, node, turn.now_us, msgspec.json.encode(health)),
    )


def list_nodes(db: sqlite3.Connection) -> tuple[NodeInfo, ...]:
    """Every pipeline on every node that was ever heard of."""
    return tuple(
        NodeInfo(
            node=node, pipeline=pipeline, head=head, seen_us=seen_us, committed_us=committed_us,
            generation=None if hub is None else Generation(hub=hub, local=local),
            health=None if health is None else msgspec.json.decode(health, type=Health),
        )
        for node, pipeline, head, hub, local, seen_us, committed_us, health in db.execute(
            "SELECT node, pipeline, head, hub_generation, local_generation, seen_us, committed_us, health FROM nodes "
            "ORDER BY pipeline, node"
        )
    )  # fmt: skip


def list_epochs(db: sqlite3.Connection, *, pipeline: str | None, node: str | None, limit: int) -> tuple[EpochInfo, ...]:
    """The newest epochs first; of one pipeline or node if given."""
    if pipeline is not None and node is not None:
        # They lie together, in this order.
        chosen = "e.node_id = (SELECT id FROM nodes WHERE pipeline = :pipeline AND node = :node) ORDER BY e.node_id DESC, e.epoch DESC"
    else:
        chosen = (
            "(:pipeline IS NULL OR n.pipeline = :pipeline) AND (:node IS NULL OR n.node = :node) "
            "ORDER BY e.seq DESC, e.epoch DESC"
        )
    rows = db.execute(
        "SELECT e.seq, n.pipeline, n.node, e.epoch, e.first, e.last, e.rows, e.size_bytes, e.received_us, e.created_us, "  # noqa: S608 - one of two, ours
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
