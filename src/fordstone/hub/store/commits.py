"""Leases, commits, heads and checkpoints in the log.

`protocol.lease` and `protocol.delivery` decide; this module gathers their facts and carries the decision out within one
transaction. Bodies were checked before (`checks`).

Invariants: an epoch's segments, its entry, the node's head and the checkpoint become visible together; the last two
checkpoints of a node are kept whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, assert_never

from fordstone.hub.messages import Checkpoint, Commit, Committed, Generation, Head, Lease, LeaseRequest
from fordstone.hub.rejection import Rejection
from fordstone.hub.store.base import EpochRecord, LogReader, LogWriter
from fordstone.hub.store.blob_index import count_references, missing_blobs
from fordstone.hub.store.log import Transaction
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
"""Maximum number of missing blobs in one response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked commit with what is computed outside of the transaction."""

    commit: Commit
    digests: tuple[str, ...]
    """Of the entries."""


def prepare(commit: Commit) -> Prepared:
    """Compute the digests."""
    return Prepared(commit=commit, digests=tuple(entry.digest() for entry in commit.epochs))


def lease(tx: Transaction, pipeline: str, node: str, request: LeaseRequest) -> Lease:
    """Grant, renew or reject the right to commit."""
    known = tx.log.node(pipeline, node)
    holding = None
    if known is not None and known.holder is not None and known.generation is not None:
        holding = Holding(holder=known.holder, fence=_fence(known.generation))
    decision = decide_lease(holding, holder=request.holder, local=request.local, take_over=request.take_over)
    match decision:
        case Granted(fence=fence):
            generation = _generation(fence)
            tx.log.grant_lease(pipeline, node, holder=request.holder, generation=generation, now_us=tx.now_us)
            return Lease(generation=generation, head=known.head if known is not None else 0)
        case HeldByOther(fence=fence):
            raise Rejection(
                "held",
                f"pipeline {pipeline} on node {node} belongs to another state directory (generation {fence.hub}.{fence.local}).\n"
                "If that one is gone for good, take it over (--take-over); else give this node another id.",
                generation=_generation(fence),
            )
        case OlderIncarnation(by=by):
            raise Rejection(
                "stale_generation",
                f"pipeline {pipeline} on node {node} was started again since, from a copy of this state directory: the hub "
                f"knows incarnation {by.local}, this is {request.local}.\nStop one of the two.",
                generation=_generation(by),
            )
        case _:
            assert_never(decision)


def commit(tx: Transaction, pipeline: str, node: str, prepared: Prepared) -> Committed:
    """Commit epochs, or reject them."""
    known = tx.log.node(pipeline, node)
    body = prepared.commit
    first, last = body.epochs[0].epoch, body.epochs[-1].epoch
    facts = CommitFacts(
        fence=_fence(body.generation),
        granted=None if known is None or known.generation is None else _fence(known.generation),
        head=known.head if known is not None else 0,
        sent=tuple(Sent(entry.epoch, digest) for entry, digest in zip(body.epochs, prepared.digests, strict=True)),
        known={} if known is None or first > known.head else tx.log.entry_digests(known.node_id, first, last),
    )
    decision = decide_order(facts)
    kept: dict[int, Checkpoint] = {}
    if isinstance(decision, Accept) and known is not None:
        kept = tx.log.checkpoints(known.node_id)
        decision = decide_commit(facts, absent=_missing(tx.log, body, decision.first_new, kept))
    match decision:
        case Accept(first_new=first_new):
            assert known is not None  # noqa: S101 - a commit without a lease is not accepted
            _add_epochs(tx, known.node_id, pipeline, prepared, first_new)
            _keep_checkpoint(tx.log, known.node_id, body.checkpoint, kept)
            return Committed(head=last)
        case AlreadyDone():
            return Committed(head=facts.head, already=True)
        case _:
            raise _refusal(decision, pipeline, node, facts)


def head(log: LogReader, pipeline: str, node: str) -> Head:
    """Return a node's newest epoch; epoch 0 if the node is unknown."""
    known = log.node(pipeline, node)
    if known is None:
        return Head()
    return Head(epoch=known.head, digest=known.head_digest, generation=known.generation)


def newest_checkpoint(log: LogReader, pipeline: str, node: str) -> Checkpoint:
    """Return the checkpoint from which a node that has lost its state resumes."""
    known = log.node(pipeline, node)
    kept = {} if known is None else log.checkpoints(known.node_id)
    if not kept:
        raise Rejection("not_found", f"the hub has no checkpoint of pipeline {pipeline} on node {node}.")
    return kept[max(kept)]


def _refusal(
    decision: Gap | OtherContent | Stale | NotGranted | Missing, pipeline: str, node: str, facts: CommitFacts
) -> Rejection:
    where = f"pipeline {pipeline} on node {node}"
    match decision:
        case Gap(next_epoch=next_epoch):
            return Rejection(
                "gap", f"{where}: epoch {next_epoch} is next, {facts.sent[0].epoch} came.", next_epoch=next_epoch
            )
        case OtherContent(epoch=epoch):
            return Rejection(
                "other_content",
                f"{where}: the hub has epoch {epoch} with other content, and what was committed never changes.\n"
                "Two nodes have one id, or a state directory was set back: give one another id, or go on from the hub's checkpoint.",
                next_epoch=facts.head + 1,
            )
        case Stale(by=by):
            return Rejection(
                "stale_generation",
                f"{where}: generation {by.hub}.{by.local} has taken over from {facts.fence.hub}.{facts.fence.local}.",
                generation=_generation(by),
            )
        case NotGranted():
            return Rejection(
                "not_found",
                f"{where}: this hub has not given out generation {facts.fence.hub}.{facts.fence.local}. Ask for a lease first.",
                generation=None if facts.granted is None else _generation(facts.granted),
            )
        case Missing(digests=digests):
            return Rejection(
                "missing_blobs",
                f"{where}: {len(digests)} blobs are not at the hub. Put them, then commit again.",
                missing=digests[:MISSING_NAMED_MAX],
            )
        case _:
            assert_never(decision)


def _missing(log: LogReader, body: Commit, first_new: int, kept: dict[int, Checkpoint]) -> set[str]:
    """Find blobs that must be uploaded first. What a kept checkpoint references is stored, and not looked up again."""
    stored = {run for checkpoint in kept.values() for run in runs_of(checkpoint)}
    wanted = [
        run
        for entry in body.epochs
        if entry.epoch >= first_new
        for segment in entry.streams.values()
        for run in segment.runs
    ]
    if body.checkpoint is not None:
        wanted += runs_of(body.checkpoint)
    return missing_blobs(log, [run for run in wanted if run not in stored])


def _add_epochs(tx: Transaction, node_id: int, pipeline: str, prepared: Prepared, first_new: int) -> None:
    """Add the new epochs under the next sequence number."""
    body, seq = prepared.commit, tx.log.next_seq()
    references: Counter[str] = Counter()
    last = body.epochs[-1]
    for entry, digest in zip(body.epochs, prepared.digests, strict=True):
        if entry.epoch < first_new:
            continue
        record = EpochRecord(
            seq=seq,
            entry=entry,
            digest=digest,
            first=first_new,
            last=last.epoch,
            generation=body.generation,
            received_us=tx.now_us,
        )
        tx.log.add_epoch(pipeline, node_id, record)
        for name, segment in entry.streams.items():
            references.update(count_references(segment.runs))
            tx.changed.add(("stream", pipeline, name))
    tx.log.add_references(references)
    tx.log.move_head(
        node_id, epoch=last.epoch, digest=prepared.digests[-1], controls=last.controls, committed_us=tx.now_us
    )
    tx.epochs += last.epoch - first_new + 1


def _keep_checkpoint(log: LogWriter, node_id: int, new: Checkpoint | None, kept: dict[int, Checkpoint]) -> None:
    """Add a checkpoint and remove the oldest. Only the difference is counted: most of the state stays."""
    if new is None:
        return
    changes = count_references(runs_of(new))
    for epoch in sorted(kept)[: len(kept) + 1 - CHECKPOINTS_KEPT]:
        changes.subtract(count_references(runs_of(kept[epoch])))
        log.remove_checkpoint(node_id, epoch)
    log.add_checkpoint(node_id, new)
    log.add_references(changes)


def runs_of(checkpoint: Checkpoint) -> tuple[RunRef, ...]:
    """Return every blob that a checkpoint needs."""
    return (checkpoint.manifest, *checkpoint.state)


def _fence(generation: Generation) -> Fence:
    return Fence(generation.hub, generation.local)


def _generation(fence: Fence) -> Generation:
    return Generation(hub=fence.hub, local=fence.local)
