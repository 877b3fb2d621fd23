"""Leases, commits, heads and checkpoints in the log.

`protocol.lease` and `protocol.delivery` decide; this gathers their facts and carries out, inside one transaction. Bodies
were checked before (`checks`).

Invariants: an epoch's segments, its entry, the node's head and the checkpoint become visible together; the last two
checkpoints of a node stay whole.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, assert_never

import msgspec

from fordstone.hub.messages import Checkpoint, Commit, Committed, EpochEntry, Generation, Head, Lease, LeaseRequest
from fordstone.hub.refused import Refused
from fordstone.hub.store.blob_refs import absent, counted, rename
from fordstone.hub.store.log import Turn
from fordstone.protocol.delivery import (
    Accept,
    AlreadyDone,
    CommitFacts,
    Gap,
    Missing,
    NotGranted,
    OtherContent,
    Sent,
    Stale,
    decide_commit,
    decide_order,
)
from fordstone.protocol.lease import Fence, Granted, HeldByOther, Holding, OlderIncarnation, decide_lease
from fordstone.state.base import RunRef

CHECKPOINTS_KEPT: Final = 2
MISSING_NAMED_MAX: Final = 1_000
"""So many missing blobs are named in one answer at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked commit with what is reckoned outside of the transaction."""

    commit: Commit
    digests: tuple[str, ...]
    """Of the entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    id: int
    holder: str | None
    fence: Fence | None
    head: int


def prepare(commit: Commit) -> Prepared:
    """Reckon the digests."""
    return Prepared(commit=commit, digests=tuple(entry.digest() for entry in commit.epochs))


def lease(turn: Turn, pipeline: str, node: str, request: LeaseRequest) -> Lease:
    """Give, renew or refuse the right to commit."""
    known = _node(turn.db, pipeline, node)
    holding = None
    if known is not None and known.holder is not None and known.fence is not None:
        holding = Holding(holder=known.holder, fence=known.fence)
    decision = decide_lease(holding, holder=request.holder, local=request.local, take_over=request.take_over)
    match decision:
        case Granted(fence=fence):
            turn.db.execute(
                "INSERT INTO nodes (pipeline, node, holder, hub_generation, local_generation, seen_us) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (pipeline, node) DO UPDATE SET holder = excluded.holder, hub_generation = excluded.hub_generation, "
                "local_generation = excluded.local_generation, seen_us = excluded.seen_us",
                (pipeline, node, request.holder, fence.hub, fence.local, turn.now_us),
            )
            return Lease(generation=_generation(fence), head=known.head if known is not None else 0)
        case HeldByOther(fence=fence):
            raise Refused(
                "held",
                f"pipeline {pipeline} on node {node} belongs to another state directory (generation {fence.hub}.{fence.local}).\n"
                "If that one is gone for good, take it over (--take-over); else give this node another id.",
                generation=_generation(fence),
            )
        case OlderIncarnation(by=by):
            raise Refused(
                "stale_generation",
                f"pipeline {pipeline} on node {node} was started again since, from a copy of this state directory: the hub "
                f"knows incarnation {by.local}, this is {request.local}.\nStop one of the two.",
                generation=_generation(by),
            )
        case _:
            assert_never(decision)


def commit(turn: Turn, pipeline: str, node: str, prepared: Prepared) -> Committed:
    """Take epochs in, or refuse them."""
    known = _node(turn.db, pipeline, node)
    body = prepared.commit
    first, last = body.epochs[0].epoch, body.epochs[-1].epoch
    facts = CommitFacts(
        fence=Fence(body.generation.hub, body.generation.local),
        granted=known.fence if known is not None else None,
        head=known.head if known is not None else 0,
        sent=tuple(Sent(entry.epoch, digest) for entry, digest in zip(body.epochs, prepared.digests, strict=True)),
        known=_digests(turn.db, known, first, last),
    )
    decision = decide_order(facts)
    kept: dict[int, Checkpoint] = {}
    if isinstance(decision, Accept) and known is not None:
        kept = _checkpoints(turn.db, known.id)
        decision = decide_commit(facts, absent=_absent(turn.db, body, decision.first_new, kept))
    match decision:
        case Accept(first_new=first_new):
            assert known is not None  # noqa: S101 - nobody without a lease is accepted
            _take_in(turn, known, pipeline, prepared, first_new)
            _keep_checkpoint(turn.db, known, body.checkpoint, kept)
            return Committed(head=last)
        case AlreadyDone():
            return Committed(head=facts.head, already=True)
        case _:
            raise _refusal(decision, pipeline, node, facts)


def head(db: sqlite3.Connection, pipeline: str, node: str) -> Head:
    """Where a node stands; epoch 0 if it was never heard of."""
    row = db.execute(
        "SELECT head, head_digest, hub_generation, local_generation FROM nodes WHERE pipeline = ? AND node = ?",
        (pipeline, node),
    ).fetchone()
    if row is None:
        return Head()
    generation = None if row[2] is None else Generation(hub=row[2], local=row[3])
    return Head(epoch=row[0], digest=row[1], generation=generation)


def newest_checkpoint(db: sqlite3.Connection, pipeline: str, node: str) -> Checkpoint:
    """What a node that has lost everything goes on from."""
    row = db.execute(
        "SELECT c.content FROM checkpoints c JOIN nodes n ON n.id = c.node_id WHERE n.pipeline = ? AND n.node = ? "
        "ORDER BY c.epoch DESC LIMIT 1",
        (pipeline, node),
    ).fetchone()
    if row is None:
        raise Refused("not_found", f"the hub has no checkpoint of pipeline {pipeline} on node {node}.")
    return msgspec.json.decode(row[0], type=Checkpoint)


def _refusal(
    decision: Gap | OtherContent | Stale | NotGranted | Missing, pipeline: str, node: str, facts: CommitFacts
) -> Refused:
    where = f"pipeline {pipeline} on node {node}"
    match decision:
        case Gap(next_epoch=next_epoch):
            return Refused(
                "gap", f"{where}: epoch {next_epoch} is next, {facts.sent[0].epoch} came.", next_epoch=next_epoch
            )
        case OtherContent(epoch=epoch):
            return Refused(
                "other_content",
                f"{where}: the hub has epoch {epoch} with other content, and what was committed never changes.\n"
                "Two nodes have one id, or a state directory was set back: give one another id, or go on from the hub's checkpoint.",
                next_epoch=facts.head + 1,
            )
        case Stale(by=by):
            return Refused(
                "stale_generation",
                f"{where}: generation {by.hub}.{by.local} has taken over from {facts.fence.hub}.{facts.fence.local}.",
                generation=_generation(by),
            )
        case NotGranted():
            return Refused(
                "not_found",
                f"{where}: this hub has not given out generation {facts.fence.hub}.{facts.fence.local}. Ask for a lease first.",
                generation=None if facts.granted is None else _generation(facts.granted),
            )
        case Missing(digests=digests):
            return Refused(
                "missing_blobs",
                f"{where}: {len(digests)} blobs are not at the hub. Put them, then commit again.",
                missing=digests[:MISSING_NAMED_MAX],
            )
        case _:
            assert_never(decision)


def _node(db: sqlite3.Connection, pipeline: str, node: str) -> _Node | None:
    row = db.execute(
        "SELECT id, holder, hub_generation, local_generation, head FROM nodes WHERE pipeline = ? AND node = ?",
        (pipeline, node),
    ).fetchone()
    if row is None:
        return None
    return _Node(id=row[0], holder=row[1], fence=None if row[2] is None else Fence(row[2], row[3]), head=row[4])


def _digests(db: sqlite3.Connection, node: _Node | None, first: int, last: int) -> dict[int, str]:
    if node is None or first > node.head:
        return {}
    rows = db.execute(
        "SELECT epoch, digest FROM entries WHERE node_id = ? AND epoch BETWEEN ? AND ?", (node.id, first, last)
    )
    return dict(rows.fetchall())


def _checkpoints(db: sqlite3.Connection, node_id: int) -> dict[int, Checkpoint]:
    rows = db.execute("SELECT epoch, content FROM checkpoints WHERE node_id = ?", (node_id,))
    return {epoch: msgspec.json.decode(content, type=Checkpoint) for epoch, content in rows}


def _absent(db: sqlite3.Connection, body: Commit, first_new: int, kept: dict[int, Checkpoint]) -> set[str]:
    """Blobs that must come first. What a kept checkpoint names is there, and not looked for again."""
    there = {run for checkpoint in kept.values() for run in runs_of(checkpoint)}
    wanted = [
        run
        for entry in body.epochs
        if entry.epoch >= first_new
        for segment in entry.streams.values()
        for run in segment.runs
    ]
    if body.checkpoint is not None:
        wanted += runs_of(body.checkpoint)
    return absent(db, [run for run in wanted if run not in there])


def _take_in(turn: Turn, node: _Node, pipeline: str, prepared: Prepared, first_new: int) -> None:
    """Write the new epochs down under the next number of the log."""
    db, body = turn.db, prepared.commit
    seq = db.execute("UPDATE counter SET seq = seq + 1 RETURNING seq").fetchone()[0]
    named: Counter[str] = Counter()
    last = body.epochs[-1]
    for entry, digest in zip(body.epochs, prepared.digests, strict=True):
        if entry.epoch < first_new:
            continue
        runs = [run for segment in entry.streams.values() for run in segment.runs]
        named.update(counted(runs))
        rows, size_bytes = _sums(runs)
        db.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (node.id, entry.epoch, seq, first_new, last.epoch, digest, body.generation.hub, body.generation.local,
             entry.created_us, turn.now_us, rows, size_bytes, len(entry.streams)),
        )  # fmt: skip
        _add_segments(turn, node, pipeline, entry, seq)
    rename(db, named)
    db.execute(
        "UPDATE nodes SET head = ?, head_digest = ?, seen_us = ?, committed_us = ?, controls = ? WHERE id = ?",
        (last.epoch, prepared.digests[-1], turn.now_us, turn.now_us, msgspec.json.encode(last.controls), node.id),
    )
    turn.epochs += last.epoch - first_new + 1


def _add_segments(turn: Turn, node: _Node, pipeline: str, entry: EpochEntry, seq: int) -> None:
    for name, segment in entry.streams.items():
        stream_id = _stream_id(turn.db, pipeline, name)
        rows, size_bytes = _sums(segment.runs)
        turn.db.execute(
            "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (stream_id, seq, entry.epoch, node.id, msgspec.json.encode(segment.runs), rows, size_bytes,
             segment.watermark_us, turn.now_us, entry.ended),
        )  # fmt: skip
        turn.db.execute(
            "INSERT INTO stream_nodes VALUES (?, ?, ?, ?, 1, ?, ?, ?) ON CONFLICT (stream_id, node_id) DO UPDATE SET "
            "first = CASE epochs WHEN 0 THEN excluded.first ELSE first END, last = excluded.last, epochs = epochs + 1, "
            "rows = rows + excluded.rows, size_bytes = size_bytes + excluded.size_bytes, "
            "watermark_us = max(watermark_us, excluded.watermark_us)",
            (stream_id, node.id, entry.epoch, entry.epoch, rows, size_bytes, segment.watermark_us),
        )
        turn.changed.add(("stream", pipeline, name))


def _stream_id(db: sqlite3.Connection, pipeline: str, name: str) -> Any:
    row = db.execute("SELECT id FROM streams WHERE pipeline = ? AND stream = ?", (pipeline, name)).fetchone()
    if row is None:
        row = db.execute(
            "INSERT INTO streams (pipeline, stream) VALUES (?, ?) RETURNING id", (pipeline, name)
        ).fetchone()
    return row[0]


def _keep_checkpoint(db: sqlite3.Connection, node: _Node, new: Checkpoint | None, kept: dict[int, Checkpoint]) -> None:
    """Add a checkpoint and let the oldest go. Only what differs between the two is counted: state mostly stays."""
    if new is None:
        return
    changes = counted(runs_of(new))
    for epoch in sorted(kept)[: len(kept) + 1 - CHECKPOINTS_KEPT]:
        changes.subtract(counted(runs_of(kept[epoch])))
        db.execute("DELETE FROM checkpoints WHERE node_id = ? AND epoch = ?", (node.id, epoch))
    db.execute("INSERT INTO checkpoints VALUES (?, ?, ?)", (node.id, new.epoch, msgspec.json.encode(new)))
    rename(db, changes)


def runs_of(checkpoint: Checkpoint) -> tuple[RunRef, ...]:
    """Every blob that a checkpoint needs."""
    return (checkpoint.manifest, *checkpoint.state)


def _sums(runs: tuple[RunRef, ...] | list[RunRef]) -> tuple[int, int]:
    return sum(run.rows for run in runs), sum(run.size_bytes for run in runs)


def _generation(fence: Fence) -> Generation:
    return Generation(hub=fence.hub, local=fence.local)
