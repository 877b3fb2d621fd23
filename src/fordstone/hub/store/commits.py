"""What the hub decides within a transaction or a snapshot of its log: leases, commits, pages of streams, control tables.

`protocol.lease` and `protocol.delivery` decide about leases and commits; this module gathers their facts and carries the
decision out. Bodies were checked before (`handlers`).

Invariants: an epoch's segments, its entry, the node's head and the checkpoint become visible together; the last two
checkpoints of a node are kept whole; nothing references a blob that is not stored whole. Versions of a control table are
numbered from 1 without gaps; one (owner, batch) is one version however often it is sent, and with whatever bytes; an owner
that was superseded by another publishes nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final, assert_never

from fordstone.hub.messages import (
    Checkpoint,
    Commit,
    Committed,
    ConsumerPosition,
    ControlPage,
    ControlPublish,
    ControlVersion,
    Generation,
    Head,
    Lease,
    LeaseRequest,
    Rejection,
    StreamEpoch,
    StreamPage,
)
from fordstone.hub.store.log import Transaction
from fordstone.hub.store.sqlite import LogReader
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
PAGE_BYTES_MAX: Final = 4 << 20
"""Maximum encoded size of the runs on one page; a single commit may be larger."""


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


def commit(tx: Transaction, pipeline: str, node: str, body: Commit, digests: Sequence[str]) -> Committed:
    """Commit epochs, or reject them. `digests`: of the entries, computed outside of the transaction."""
    known = tx.log.node(pipeline, node)
    first, last = body.epochs[0].epoch, body.epochs[-1].epoch
    facts = CommitFacts(
        fence=_fence(body.generation),
        granted=None if known is None or known.generation is None else _fence(known.generation),
        head=known.head if known is not None else 0,
        sent=tuple(Sent(entry.epoch, digest) for entry, digest in zip(body.epochs, digests, strict=True)),
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
            new = [pair for pair in zip(body.epochs, digests, strict=True) if pair[0].epoch >= first_new]
            tx.log.add_epochs(pipeline, known.node_id, new, body.generation, now_us=tx.now_us)
            if body.checkpoint is not None:
                replaced = sorted(kept)[: len(kept) + 1 - CHECKPOINTS_KEPT]
                tx.log.add_checkpoint(known.node_id, body.checkpoint, replaced=[kept[epoch] for epoch in replaced])
            tx.changed.update(("stream", pipeline, name) for entry, _ in new for name in entry.streams)
            tx.epochs += len(new)
            return Committed(head=last)
        case AlreadyDone():
            return Committed(head=facts.head, already=True)
        case _:
            raise _rejection(decision, pipeline, node, facts)


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


def stream_page(log: LogReader, pipeline: str, stream: str, *, after: int, limit: int) -> StreamPage:
    """Return whole commits after `after`, about `limit` epochs, at least one commit if there is any."""
    newest = log.newest_seq()
    if after > newest:
        raise Rejection(
            "gone",
            f"the hub's log ends at {newest}, but the request is for commits after {after}. The hub's data was set back: "
            "read the stream from the start.",
        )
    epochs: list[StreamEpoch] = []
    size_bytes, more = 0, False
    for _, group in groupby(log.stream_epochs(pipeline, stream, after=after), key=lambda pair: pair[0].seq):
        together = list(group)
        size_bytes += sum(size for _, size in together)
        if epochs and (len(epochs) + len(together) > limit or size_bytes > PAGE_BYTES_MAX):
            more = True
            break
        epochs += [epoch for epoch, _ in together]
    return StreamPage(epochs=tuple(epochs), next=epochs[-1].seq if epochs else after, more=more)


def position(log: LogReader, pipeline: str, consumer: str) -> ConsumerPosition:
    """Return what a consumer has passed."""
    found = log.consumer_position(pipeline, consumer)
    if found is None:
        raise Rejection("not_found", f"pipeline {pipeline} has no consumer {consumer}.")
    return found


def publish(tx: Transaction, pipeline: str, control: str, body: ControlPublish) -> tuple[ControlVersion, bool]:
    """Number a version of a control table; return it, and whether it is new."""
    known = tx.log.publisher(pipeline, control, body.owner, body.batch)
    if known.generation is not None and known.generation < known.leader:
        raise Rejection(
            "stale_generation",
            f"control table {control} of pipeline {pipeline}: another publisher has superseded this one. "
            "Stop this one, or start it with a checkpoint of its own.",
        )
    if known.published is not None:
        return known.published, False
    missing = _not_stored(tx.log, [body.blob])
    if missing:
        raise Rejection(
            "missing_blobs", "the blob of this version is not at the hub. Upload it first.", missing=tuple(missing)
        )
    version = ControlVersion(
        version=known.newest + 1,
        blob=body.blob,
        snapshot=body.snapshot,
        published_us=tx.now_us,
        owner=body.owner,
        batch=body.batch,
    )
    generation = known.leader + 1 if known.generation is None else known.generation
    tx.log.add_control_version(pipeline, control, version, generation=generation)
    tx.changed.add(("control", pipeline, control))
    return version, True


def control_page(log: LogReader, pipeline: str, control: str, *, after: int, limit: int) -> ControlPage:
    """Return versions after one; from the newest snapshot on for a new reader, or if older versions are gone."""
    table = log.control_table(pipeline, control)
    newest = 0 if table is None else table.newest
    if after > newest:
        raise Rejection(
            "gone",
            f"control table {control} of pipeline {pipeline} ends at version {newest}, but the request is for versions after "
            f"{after}. The hub's data was set back: read the table from the start.",
        )
    if table is None:
        return ControlPage(versions=(), newest=0)
    oldest, start = table.oldest or newest + 1, after + 1
    if after == 0 or start < oldest:
        start = max(start, table.snapshot or 0, oldest)
    return ControlPage(versions=log.control_versions(table.table_id, start=start, limit=limit), newest=newest)


def _rejection(
    decision: Gap | OtherContent | Stale | NotGranted | Missing, pipeline: str, node: str, facts: CommitFacts
) -> Rejection:
    where = f"pipeline {pipeline} on node {node}"
    match decision:
        case Gap(next_epoch=next_epoch):
            return Rejection(
                "gap",
                f"{where}: the hub expects epoch {next_epoch}, but the commit starts at epoch {facts.sent[0].epoch}. Send the epochs between first.",
                next_epoch=next_epoch,
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
                f"{where}: this hub has not granted generation {facts.fence.hub}.{facts.fence.local}. Request a lease first.",
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
    stored = {run for checkpoint in kept.values() for run in checkpoint.runs()}
    wanted = [
        run
        for entry in body.epochs
        if entry.epoch >= first_new
        for segment in entry.streams.values()
        for run in segment.runs
    ]
    if body.checkpoint is not None:
        wanted += body.checkpoint.runs()
    return _not_stored(log, [run for run in wanted if run not in stored])


def _not_stored(log: LogReader, runs: Sequence[RunRef]) -> set[str]:
    """Return which of these blobs are not stored with exactly this size."""
    wanted = {run.digest: run.size_bytes for run in runs}
    ambiguous = {run.digest for run in runs if wanted[run.digest] != run.size_bytes}
    sizes = log.blob_sizes(wanted)
    return ambiguous | {digest for digest, size_bytes in wanted.items() if sizes.get(digest) != size_bytes}


def _fence(generation: Generation) -> Fence:
    return Fence(generation.hub, generation.local)


def _generation(fence: Fence) -> Generation:
    return Generation(hub=fence.hub, local=fence.local)
