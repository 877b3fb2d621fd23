"""What the hub decides within a transaction or a snapshot of its log: leases, commits, pages of streams, positions of consumers.

`protocol.lease`, `protocol.delivery`, `protocol.chain` and `protocol.quarantine` decide; this module gathers their facts and carries
the decision out. Bodies were checked before (`handlers`).

Invariants: an epoch's segments, its entry, the node's head and the checkpoint become visible together; the last two
checkpoints of a node are kept whole; nothing references a blob that is not stored whole.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, assert_never

from msgspec.structs import replace

from fordstone.hub.messages import (
    NUMBER_MAX,
    PAGE_ENTRIES_MAX,
    RUNBOOK,
    Checkpoint,
    Commit,
    Committed,
    ConsumerPosition,
    EpochRange,
    EpochsRequest,
    Generation,
    Head,
    Health,
    Lease,
    LeaseRequest,
    NodeEpochs,
    NodePosition,
    NodeStop,
    Rejection,
    StopCode,
    StreamEpoch,
    StreamEpochs,
    StreamNodes,
)
from fordstone.hub.store.log import Transaction
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_records import ForgottenNode, NodeSegments
from fordstone.hub.store.log_writer import ChainedEntry
from fordstone.lang.duration import TIME_MIN_US
from fordstone.protocol.chain import CHAIN_START, ChainFacts, PositionJudgement, chained, judge_position
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
from fordstone.protocol.lease import (
    Fence,
    Granted,
    HeldByOther,
    Holding,
    LeaseFacts,
    NotHead,
    OlderIncarnation,
    Position,
    Superseded,
    decide_lease,
)
from fordstone.protocol.quarantine import ReadLimits, is_waived, readable
from fordstone.protocol.restored import is_former
from fordstone.state.base import RunRef

_events = logging.getLogger(__name__)
CHECKPOINTS_KEPT: Final = 2
MISSING_NAMED_MAX: Final = 1_000
"""Maximum number of missing blobs in one response."""
PAGE_BYTES_MAX: Final = 4 << 20
"""Maximum encoded size of the runs in one response; a single epoch may be larger."""
PLANNED_EPOCHS_MAX: Final = 100_000
"""Maximum number of epochs that are looked at to plan a read."""


def lease(tx: Transaction, pipeline: str, node: str, request: LeaseRequest) -> Lease:
    """Grant, renew or reject the right to commit."""
    known = tx.log.node(pipeline, node)
    if known is None:
        _check_not_forgotten(tx.log, pipeline, node)
    holding = None
    if known is not None and known.holder is not None and known.generation is not None:
        holding = Holding(holder=known.holder, fence=_fence(known.generation), start=known.start)
    facts = LeaseFacts(
        holding=holding,
        head=Position(0, CHAIN_START) if known is None else Position(known.head, known.head_chain),
        holder=request.holder,
        local=request.local,
        start=request.start,
        claimed=Position(request.head, request.chain),
        granted=request.granted,
        restored=is_former(request.log_id, tx.log.log_id()),
        resync=known is not None and known.resync,
        take_over=request.take_over,
        first=tx.log.first_generation(),
    )
    decision = decide_lease(facts)
    match decision:
        case Granted(fence=fence):
            if known is None:
                _check_new_node(tx, pipeline, node)
            generation = _generation(fence)
            # A node that has the head has lost nothing. One that joined after the backup is not in the restored log.
            resync = not facts.knows_head and (facts.restored if known is None else known.resync)
            tx.log.grant_lease(
                pipeline,
                node,
                holder=request.holder,
                start=request.start,
                generation=generation,
                resync=resync,
                now_us=tx.now_us,
            )
            return Lease(generation=generation, head=facts.head.epoch, chain=facts.head.chain, log_id=tx.log.log_id())
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
                f"pipeline {pipeline} on node {node} was started since, from a copy of this state directory: the hub "
                f"knows incarnation {by.local}, this is {request.local}.\nStop one of the two.",
                generation=_generation(by),
            )
        case Superseded(by=by):
            raise Rejection(
                "stale_generation",
                f"pipeline {pipeline} on node {node} was taken over from this state directory, the hub was restored from a backup, and the new "
                f"owner's epochs, up to {facts.head.epoch}, are at the hub. The later epochs of this directory do not follow them.\n"
                "Keep this directory if you need its rows. To use this machine, start it with another node name and an empty state directory.",
                generation=_generation(by),
            )
        case NotHead(head=newest):
            raise Rejection(
                "not_head",
                f"pipeline {pipeline} on node {node}: the hub's newest epoch is {newest}, and this state directory has not shown that it "
                f"has that epoch (it names epoch {request.head}). It may be an old copy of the directory that committed it.",
                next_epoch=newest + 1,
            )
        case _:
            assert_never(decision)


def commit(
    tx: Transaction,
    pipeline: str,
    node: str,
    body: Commit,
    digests: Sequence[str],
    *,
    foreign: Container[str] = frozenset(),
) -> Committed:
    """Commit epochs, or reject them. `digests`: of the entries, computed outside of the transaction.

    `foreign`: blobs that the node has not uploaded. Unless one of its checkpoints has them, they are missing, stored or not.
    """
    known = tx.log.node(pipeline, node)
    granted = None if known is None or known.start is None else known.generation
    first, last = body.epochs[0].epoch, body.epochs[-1].epoch
    facts = CommitFacts(
        fence=_fence(body.generation),
        granted=None if granted is None else _fence(granted),
        head=known.head if known is not None else 0,
        sent=tuple(Sent(entry.epoch, digest) for entry, digest in zip(body.epochs, digests, strict=True)),
        known={} if known is None or first > known.head else tx.log.entry_digests(known.node_id, first, last),
        after=None
        if body.after is None
        else judge_position(first - 1, body.after, tx.log.chain_facts(pipeline, node, first - 1)),
        resync=known is not None and known.resync,
    )
    decision = decide_order(facts)
    kept: dict[int, Checkpoint] = {}
    if isinstance(decision, Accept) and known is not None:
        kept = tx.log.checkpoints(known.node_id)
        decision = decide_commit(facts, absent=_missing(tx.log, body, decision.first_new, kept, foreign))
    match decision:
        case Accept(first_new=first_new, lost_from=lost_from):
            assert known is not None  # noqa: S101 - a commit without a lease is not accepted
            new: list[ChainedEntry] = []
            chain = known.head_chain if lost_from is None else body.after or CHAIN_START
            for entry, digest in zip(body.epochs, digests, strict=True):
                if entry.epoch >= first_new:
                    chain = chained(chain, digest)
                    new.append(ChainedEntry(entry, digest, chain))
            _check_new_streams(tx, pipeline, node, known.node_id, {name for one in new for name in one.entry.streams})
            tx.log.add_epochs(pipeline, known.node_id, new, body.generation, now_us=tx.now_us, lost_from=lost_from)
            if lost_from is not None:
                _events.warning(
                    "epochs lost", extra={"pipeline": pipeline, "node": node, "first": lost_from, "last": first_new - 1}
                )
            if body.checkpoint is not None:
                replaced = sorted(kept)[: len(kept) + 1 - CHECKPOINTS_KEPT]
                tx.log.add_checkpoint(known.node_id, body.checkpoint, replaced=[kept[epoch] for epoch in replaced])
            tx.changed.update(("stream", pipeline, name) for one in new for name in one.entry.streams)
            tx.epochs += len(new)
            return Committed(head=last, chain=chain)
        case AlreadyDone():
            assert known is not None  # noqa: S101 - without a node nothing is there
            return Committed(head=known.head, chain=known.head_chain, already=True)
        case _:
            raise _rejection(decision, pipeline, node, facts)


def save_health(tx: Transaction, pipeline: str, node: str, health: Health) -> None:
    """Keep the newest report of a node that has had a lease."""
    if not tx.log.save_health(pipeline, node, health, now_us=tx.now_us):
        raise Rejection(
            "not_found",
            f"pipeline {pipeline} on node {node} has no lease at this hub, so it has no health. Request one.",
        )


def save_position(tx: Transaction, pipeline: str, consumer: str, position: ConsumerPosition) -> None:
    """Register a consumer, and advance its positions, which were checked before (`check_positions`)."""
    where = f"consumer {consumer} of pipeline {pipeline}"
    if not tx.log.has_consumer(pipeline, consumer):
        remedy = "Remove those that are gone for good: fordstone hub forget consumer"
        of_pipeline, in_all = tx.log.count_consumers(pipeline) + 1, tx.log.count_consumers(None) + 1
        check_limit(where, of_pipeline, tx.limits.consumers_per_pipeline, "consumers of a pipeline", remedy)
        check_limit(where, in_all, tx.limits.consumers, "consumers", remedy)
    streams = len(tx.log.streams_of_consumer(pipeline, consumer) | position.streams.keys())
    remedy = "Read the others under another consumer name"
    check_limit(where, streams, tx.limits.streams_per_pipeline, "streams of a consumer", remedy)
    tx.log.save_position(pipeline, consumer, position, now_us=tx.now_us)


def head(log: LogReader, pipeline: str, node: str) -> Head:
    """Return a node's newest epoch; epoch 0 if the node is unknown. A node that was forgotten is rejected."""
    known = log.node(pipeline, node)
    if known is None:
        _check_not_forgotten(log, pipeline, node)
        return Head(log_id=log.log_id())
    return Head(
        epoch=known.head,
        chain=known.head_chain,
        generation=None if known.start is None else known.generation,
        log_id=log.log_id(),
        resync=known.resync,
    )


def newest_checkpoint(log: LogReader, pipeline: str, node: str) -> Checkpoint:
    """Return the checkpoint from which a node that has lost its state resumes."""
    known = log.node(pipeline, node)
    kept = {} if known is None else log.checkpoints(known.node_id)
    if not kept:
        raise Rejection("not_found", f"the hub has no checkpoint of pipeline {pipeline} on node {node}.")
    return kept[max(kept)]


def stream_nodes(
    log: LogReader, pipeline: str, stream: str, *, after: int, limit: int, log_id: str | None
) -> StreamNodes:
    """Return the nodes with a commit after `after`; all of them to a reader of another log."""
    own, newest = log.log_id(), log.newest_seq()
    if log_id not in {None, own}:
        after = 0
    elif after > newest:
        raise Rejection(
            "gone",
            f"the hub's log ends at commit {newest}, but commit {after} was read from it: the hub's data was restored from an older copy. "
            f"Stop the hub, run `fordstone hub restore --data DIR`, and start it again; {RUNBOOK} says what follows.",
        )
    found = log.stream_nodes(pipeline, stream, after=after, limit=limit + 1)
    nodes = found[:limit]
    return StreamNodes(nodes=nodes, next=nodes[-1].seq if nodes else after, more=len(found) > limit, log_id=own)


def stream_epochs(log: LogReader, pipeline: str, stream: str, request: EpochsRequest) -> StreamEpochs:
    """Return the next epochs of nodes, after what a reader has seen of each was compared with the log (rule 24).

    The response is bounded in epochs and bytes, the work in epochs. One node is always in it.
    """
    nodes: dict[str, NodeEpochs] = {}
    room = Room(epochs=PAGE_ENTRIES_MAX if request.listed else PLANNED_EPOCHS_MAX, size_bytes=PAGE_BYTES_MAX)
    for node, wanted in request.nodes.items():
        if nodes and room.is_full:
            break
        nodes[node] = _node_epochs(log, pipeline, stream, node, wanted, request, room)
    return StreamEpochs(nodes=nodes, log_id=log.log_id())


@dataclass(slots=True, kw_only=True)
class Room:
    """What is left of the bounds of a response."""

    epochs: int
    size_bytes: int

    @property
    def is_full(self) -> bool:
        return self.epochs <= 0 or self.size_bytes <= 0


def _node_epochs(
    log: LogReader, pipeline: str, stream: str, node: str, wanted: EpochRange, request: EpochsRequest, room: Room
) -> NodeEpochs:
    gone = log.forgotten_node(pipeline, node)
    if gone is not None:
        if wanted.seen.epoch > gone.epoch and log.was_restored():
            return _none_until(wanted, None)  # it was forgotten instead of waited for
        return _closing_epoch(gone, wanted, request)
    facts = log.chain_facts(pipeline, node, wanted.seen.epoch)
    if wanted.seen.epoch > facts.head and _is_awaited(log, pipeline, node):
        return NodeEpochs(awaited=_describe_wait(node, wanted.seen, facts.head))
    segments = log.segments(pipeline, stream, node)
    removed, lost = (0, ()) if segments is None else (segments.removed, log.lost_epochs(segments.node_id))
    limits = ReadLimits() if segments is None else _read_limits(log, segments.node_id, planned=wanted.until is not None)
    waived = is_waived(wanted.seen.epoch, limits.skips)
    find = _listed if request.listed else _planned
    after, end = wanted.after, NUMBER_MAX if wanted.until is None else wanted.until
    while True:
        where = readable(after, limits)
        until = end if where.until is None else min(end, where.until)
        after = max(after, min(where.after, until))
        gap = next((gap for gap in lost if gap[1] > after), None)
        stopped = _stopped(wanted, after, until, facts, removed, gap, waived=waived)
        if stopped is None and segments is None and log.is_stream_forgotten(pipeline, stream):
            return _none_until(wanted, log.chain_facts(pipeline, node, wanted.until or 0))
        if stopped is not None or segments is None:
            return NodeEpochs(stopped=stopped)
        if gap is not None:
            until = min(until, gap[0] - 1)
        found = find(log, segments, max(after, removed), until, request, room)
        if found.first or until >= end or readable(until, limits).after <= until:
            break
        after = until  # there is nothing before the epochs that are skipped next
    if not found.first:
        passed = removed if wanted.earliest and after < removed <= until else after
        found = _passed_over(log, segments, wanted.after, passed, facts)
    skipped = sum(
        skip.last - max(skip.first - 1, wanted.after) for skip in limits.skips if wanted.after < skip.last <= after
    )
    return replace(found, skipped=skipped) if skipped else found


def _read_limits(log: LogReader, node_id: int, *, planned: bool) -> ReadLimits:
    """What is not read of a node. What was planned before its quarantine is read: it may have been read before."""
    current = None if planned else log.quarantine(node_id)
    return ReadLimits(
        quarantined=0 if current is None else current.epoch,
        skips=tuple(one.span for one in log.skips(node_id)),
    )


def _closing_epoch(gone: ForgottenNode, wanted: EpochRange, request: EpochsRequest) -> NodeEpochs:
    """Return the end of a node that was forgotten: one epoch without rows, after all that it had."""
    facts = ChainFacts(head=gone.epoch, head_chain=gone.chain)
    judgement = judge_position(wanted.seen.epoch, wanted.seen.chain, facts)
    if judgement is PositionJudgement.BEYOND or judgement is PositionJudgement.DIFFERS:
        reason = describe_misfit(judgement, wanted.seen, gone.epoch)
        code: StopCode = "beyond" if judgement is PositionJudgement.BEYOND else "differs"
        return NodeEpochs(stopped=NodeStop(code=code, reason=reason))
    if wanted.until is not None and wanted.until < gone.epoch:
        return _none_until(wanted, None)
    if wanted.after >= gone.epoch:
        return NodeEpochs()
    closing = StreamEpoch(
        seq=gone.seq,
        node=gone.node,
        epoch=gone.epoch,
        chain=gone.chain,
        runs=(),
        watermark_us=TIME_MIN_US,
        received_us=gone.at_us,
        ended=True,
    )
    return NodeEpochs(
        epochs=(closing,) if request.listed else (), first=gone.epoch, end=NodePosition(gone.epoch, gone.chain)
    )


def _none_until(wanted: EpochRange, facts: ChainFacts | None) -> NodeEpochs:
    """Let a read that was planned before its epochs were discarded pass over them. `facts`: at its end, if the log has the node."""
    if wanted.until is None or wanted.until <= wanted.after:
        return NodeEpochs()
    chain = wanted.seen.chain if wanted.seen.epoch == wanted.until else CHAIN_START
    if facts is not None:
        chain = (facts.head_chain if wanted.until == facts.head else facts.chain) or chain
    return NodeEpochs(end=NodePosition(wanted.until, chain))


def _is_awaited(log: LogReader, pipeline: str, node: str) -> bool:
    """Whether a node may still bring back epochs that a restored log lacks."""
    known = log.node(pipeline, node)
    return log.was_restored() if known is None else known.resync


def _describe_wait(node: str, seen: NodePosition, head: int) -> str:
    return (
        f"the hub was restored from a backup: its log of node {node} ends at epoch {head}, and epoch {seen.epoch} was read from it. The node "
        f"has not been in contact since, and may have the epochs. If it does not come back: `fordstone hub quarantine {node}` to go on "
        f"without it for now, or `fordstone hub forget node {node}` for good; see {RUNBOOK}"
    )


def _listed(
    log: LogReader, segments: NodeSegments, after: int, until: int, request: EpochsRequest, room: Room
) -> NodeEpochs:
    rows, found = 0, list[StreamEpoch]()
    for entry, size_bytes in log.stream_epochs(segments, after=after, until=until):
        rows += sum(run.rows for run in entry.runs)
        if found and (rows > request.rows_max or size_bytes > room.size_bytes or room.epochs <= 0):
            break
        found.append(entry)
        room.epochs -= 1
        room.size_bytes -= size_bytes
        if rows >= request.rows_max or len(found) >= request.epochs_max:
            break
    if not found:
        return NodeEpochs()
    return NodeEpochs(epochs=tuple(found), first=found[0].epoch, end=NodePosition(found[-1].epoch, found[-1].chain))


def _planned(
    log: LogReader, segments: NodeSegments, after: int, until: int, request: EpochsRequest, room: Room
) -> NodeEpochs:
    rows, count, first, end = 0, 0, 0, 0
    for epoch, epoch_rows in log.epoch_rows(segments, after=after, until=until):
        rows += epoch_rows
        if count and (rows > request.rows_max or room.epochs <= 0):
            break
        first, end, count = first or epoch, epoch, count + 1
        room.epochs -= 1
        if rows >= request.rows_max or count >= request.epochs_max:
            break
    chain = log.entry_chain(segments.node_id, end) if end else None
    return NodeEpochs(first=first, end=NodePosition(end, chain or CHAIN_START))


def _passed_over(log: LogReader, segments: NodeSegments, after: int, passed: int, facts: ChainFacts) -> NodeEpochs:
    """Let a reader pass over epochs that were skipped, or removed before it began, where none is kept after them."""
    if after < passed:
        chain = facts.head_chain if passed == facts.head else log.entry_chain(segments.node_id, passed)
        if chain is not None:
            return NodeEpochs(end=NodePosition(passed, chain))
    return NodeEpochs()


def _stopped(
    wanted: EpochRange,
    after: int,
    until: int,
    facts: ChainFacts,
    removed: int,
    gap: tuple[int, int] | None,
    *,
    waived: bool,
) -> NodeStop | None:
    """Decide whether a reader may not go on with a node.

    `after`: its position, after the epochs that are skipped from there. `until`: the last epoch that it may read now. `gap`: the next
    epochs that were lost with a restored log. `waived`: the position is not compared with the log, because a skip says that the reader goes on after it.
    """
    if waived:
        wanted = replace(wanted, seen=NodePosition())
    judgement = judge_position(wanted.seen.epoch, wanted.seen.chain, facts)
    misfit = describe_misfit(judgement, wanted.seen, facts.head)
    if judgement is PositionJudgement.BEYOND:
        return NodeStop(code="beyond", reason=misfit, seen=wanted.seen.epoch)
    if judgement is PositionJudgement.DIFFERS:
        return NodeStop(code="differs", reason=misfit, seen=wanted.seen.epoch)
    if after >= until:
        return None  # what was removed or lost after it is not read now: the node is in quarantine, or a planned read has ended
    if gap is not None and after + 1 >= gap[0]:
        return NodeStop(
            code="lost",
            reason=f"epochs {after + 1} to {gap[1]} of this node were lost when the hub was restored",
        )
    if wanted.earliest:
        return None
    if after < removed:
        first = after + 1
        lost = f"epoch {first} of this node is" if first == removed else f"epochs {first} to {removed} of this node are"
        return NodeStop(code="gone", reason=f"{lost} no longer at the hub, and not all were read")
    return NodeStop(code="unknown", reason=misfit) if judgement is PositionJudgement.UNKNOWN else None


def check_positions(
    log: LogReader, pipeline: str, position: ConsumerPosition
) -> tuple[ConsumerPosition, dict[str, dict[str, str]]]:
    """Divide the positions of a consumer into those of this log, and the others with the reason.

    Those of nodes that have nothing in the stream are in neither. A position that was in the log stays in it, so this may be asked
    before the transaction that keeps the positions.
    """
    kept: dict[str, dict[str, NodePosition]] = {}
    refused: dict[str, dict[str, str]] = {}
    for stream, nodes in position.streams.items():
        kept[stream] = {}
        for node, at in nodes.items():
            found = log.position_facts(pipeline, stream, node, at.epoch)
            judgement = judge_position(at.epoch, at.chain, found.chain)
            if judgement is not PositionJudgement.FITS and not (found.forgotten and at.epoch < found.chain.head):
                refused.setdefault(stream, {})[node] = describe_misfit(judgement, at, found.chain.head)
            elif found.forgotten or found.in_stream:
                kept[stream][node] = at
    return ConsumerPosition(streams=kept), refused


def describe_misfit(judgement: PositionJudgement, at: NodePosition, head: int) -> str:
    """Say why a position is not one of this log."""
    match judgement:
        case PositionJudgement.BEYOND:
            return f"the hub's log of this node ends at epoch {head}, but epoch {at.epoch} was read from it"
        case PositionJudgement.DIFFERS:
            return f"the hub's log of this node has other content up to epoch {at.epoch} than what was read from it"
        case _:
            return f"the hub no longer keeps what epoch {at.epoch} of this node could be compared with"


def position(log: LogReader, pipeline: str, consumer: str) -> ConsumerPosition:
    """Return what a consumer has passed."""
    found = log.consumer_position(pipeline, consumer)
    if found is None:
        raise Rejection("not_found", f"pipeline {pipeline} has no consumer {consumer}.")
    return found


def _check_not_forgotten(log: LogReader, pipeline: str, node: str) -> None:
    gone = log.forgotten_node(pipeline, node)
    if gone is not None:
        at = datetime.fromtimestamp(gone.at_us // 1_000_000, UTC)
        raise Rejection(
            "forgotten",
            f"pipeline {pipeline} on node {node} was forgotten at {at:%Y-%m-%d %H:%M:%S} UTC, with its epochs up to {gone.epoch - 1} "
            "(fordstone hub forget node). Its name is not used again, because readers have positions in what it had sent.\n"
            "To let this machine send again, start it with another node name (--node). Under that name it begins with an empty state, "
            "so rows that its sources still have are read, and sent, again.",
        )


def _check_new_node(tx: Transaction, pipeline: str, node: str) -> None:
    where = f"pipeline {pipeline} on node {node}"
    remedy = "Remove nodes that are gone for good (fordstone hub forget node), or start the hub with a higher"
    pipelines, nodes = tx.log.count_pipelines_of(node) + 1, tx.log.count_nodes_of(pipeline) + 1
    check_limit(where, pipelines, tx.limits.pipelines_per_node, "pipelines of a node", f"{remedy} --pipelines-max")
    check_limit(where, nodes, tx.limits.nodes_per_pipeline, "nodes of a pipeline", f"{remedy} --nodes-max")


def _check_new_streams(tx: Transaction, pipeline: str, node: str, node_id: int, names: set[str]) -> None:
    known = tx.log.streams_of(node_id)
    if names <= known:
        return
    where = f"pipeline {pipeline} on node {node}"
    remedy = "Remove streams that are gone for good (fordstone hub forget stream), or start the hub with a higher --streams-max"
    check_limit(where, len(known | names), tx.limits.streams_per_node, "streams of a node", remedy)
    of_pipeline = tx.log.count_streams_with(pipeline, names - known)
    check_limit(where, of_pipeline, tx.limits.streams_per_pipeline, "streams of a pipeline", remedy)


def check_limit(where: str, wanted: int, count_max: int, what: str, remedy: str) -> None:
    """Reject what would be more than the hub keeps."""
    if wanted > count_max:
        raise Rejection("limit_reached", f"{where}: the hub keeps at most {count_max} {what}. {remedy}.")


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
                f"{where}: the epochs up to {epoch} have other content at the hub, and what was committed never changes.\n"
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


def _missing(
    log: LogReader, body: Commit, first_new: int, kept: dict[int, Checkpoint], foreign: Container[str]
) -> set[str]:
    """Find blobs that must be uploaded first. What a kept checkpoint references is stored, and not looked up again, unless damaged."""
    damaged = {one.digest for one in log.damaged_blobs()}
    stored = {run for checkpoint in kept.values() for run in checkpoint.runs() if run.digest not in damaged}
    wanted = [
        run
        for entry in body.epochs
        if entry.epoch >= first_new
        for segment in entry.streams.values()
        for run in segment.runs
    ]
    if body.checkpoint is not None:
        wanted += body.checkpoint.runs()
    wanted = [run for run in wanted if run not in stored]
    return not_stored(log, wanted) | {run.digest for run in wanted if run.digest in foreign}


def not_stored(log: LogReader, runs: Sequence[RunRef]) -> set[str]:
    """Return which of these blobs are not stored with exactly this size."""
    wanted = {run.digest: run.size_bytes for run in runs}
    ambiguous = {run.digest for run in runs if wanted[run.digest] != run.size_bytes}
    sizes = log.blob_sizes(wanted)
    return ambiguous | {digest for digest, size_bytes in wanted.items() if sizes.get(digest) != size_bytes}


def _fence(generation: Generation) -> Fence:
    return Fence(generation.hub, generation.local)


def _generation(fence: Fence) -> Generation:
    return Generation(hub=fence.hub, local=fence.local)
