"""How nodes are, and which epochs came lately."""

from __future__ import annotations

import sqlite3

import msgspec

from fordstone.hub.log import Turn
from fordstone.hub.messages import EpochInfo, Generation, Health, NodeInfo


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
