"""Nodes that are not read on: set, released and skipped in the log (rule 25).

`protocol.quarantine` decides; this module keeps. Each change takes a number of the log as a commit does, so that readers that wait
for news get it. Each change is one event in the hub's log of events.
"""

from __future__ import annotations

import logging
from typing import Final, assert_never

from fordstone.hub.messages import (
    Quarantine,
    QuarantineChange,
    QuarantineRequest,
    Rejection,
    SkippedEpochs,
    SkipRequest,
)
from fordstone.hub.store.log import Transaction
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_records import NodeRecord
from fordstone.protocol.quarantine import (
    NothingToSkip,
    Skip,
    SkipFacts,
    SkipTooFar,
    SkipTooShort,
    decide_skip,
)

_events = logging.getLogger(__name__)
SKIPS_MAX: Final = 1_000
"""Maximum number of ranges of a node; ranges that follow each other are one."""


def quarantine(tx: Transaction, pipeline: str, node: str, request: QuarantineRequest) -> QuarantineChange:
    """Stop reading a node at an epoch, unless it is stopped before that already, or the epoch is skipped."""
    known = _known(tx.log, pipeline, node)
    current = tx.log.quarantine(known.node_id)
    skips = tx.log.skips(known.node_id)
    if any(skip.first <= request.epoch <= skip.last for skip in skips) or (
        current is not None and current.epoch <= request.epoch
    ):
        # It was reported twice, or late: by now the node is stopped, or may go on.
        return QuarantineChange(quarantine=current, changed=False, seq=tx.log.newest_seq())
    now = Quarantine(epoch=request.epoch, reason=request.reason, since_us=tx.now_us, by=request.by)
    tx.log.set_quarantine(known.node_id, now)
    _events.warning(
        "node in quarantine",
        extra={"pipeline": pipeline, "node": node, "epoch": now.epoch, "by": now.by, "problem": now.reason},
    )
    return QuarantineChange(quarantine=now, changed=True, seq=_announce(tx, pipeline, known))


def release(tx: Transaction, pipeline: str, node: str) -> QuarantineChange:
    """Let readers try a node again."""
    known = _known(tx.log, pipeline, node)
    current = tx.log.quarantine(known.node_id)
    if current is None:
        return QuarantineChange(quarantine=None, changed=False, seq=tx.log.newest_seq())
    tx.log.set_quarantine(known.node_id, None)
    _events.warning("node released", extra={"pipeline": pipeline, "node": node, "epoch": current.epoch})
    return QuarantineChange(quarantine=None, changed=True, seq=_announce(tx, pipeline, known))


def skip(tx: Transaction, pipeline: str, node: str, request: SkipRequest) -> SkippedEpochs:
    """Let readers pass over the epochs at which they stop, and read the node on."""
    known = _known(tx.log, pipeline, node)
    current, skips = tx.log.quarantine(known.node_id), tx.log.skips(known.node_id)
    facts = SkipFacts(
        head=known.head,
        quarantined=0 if current is None else current.epoch,
        lost=tx.log.lost_epochs(known.node_id),
        skips=[one.span for one in skips],
    )
    decision = decide_skip(facts, request.until)
    where = f"pipeline {pipeline} on node {node}"
    match decision:
        case NothingToSkip():
            raise Rejection(
                "bad_request",
                f"{where} is not in quarantine, and no epoch of it was lost, so there is nothing to skip. To skip epochs nonetheless, put it "
                "into quarantine first: fordstone hub quarantine NODE --epoch E.",
            )
        case SkipTooFar(last_max=last_max):
            raise Rejection(
                "bad_request", f"{where} has no epoch {request.until} yet. Skip up to epoch {last_max} at most."
            )
        case SkipTooShort(last_min=last_min):
            raise Rejection(
                "bad_request",
                f"readers of {where} would stop again if they skipped up to epoch {request.until}. Skip up to epoch {last_min} at least.",
            )
        case Skip():
            pass
        case _:
            assert_never(decision)
    rows = tx.log.rows_between(known.node_id, decision.first, decision.last)
    skipped = SkippedEpochs(first=decision.first, last=decision.last, rows=rows, at_us=tx.now_us)
    merged = _merged((*skips, skipped))
    if len(merged) > SKIPS_MAX:
        raise Rejection("limit_reached", f"{where} has {SKIPS_MAX} ranges of skipped epochs, which is the maximum.")
    tx.log.set_skips(known.node_id, merged)
    tx.log.set_quarantine(known.node_id, None)
    _announce(tx, pipeline, known)
    _events.warning(
        "epochs skipped",
        extra={"pipeline": pipeline, "node": node, "first": skipped.first, "last": skipped.last, "rows": rows},
    )
    return skipped


def _merged(skips: tuple[SkippedEpochs, ...]) -> list[SkippedEpochs]:
    """The ranges in order; those that touch are one."""
    found: list[SkippedEpochs] = []
    for one in sorted(skips, key=lambda skip: (skip.first, skip.last)):
        if found and one.first <= found[-1].last + 1:
            before = found.pop()
            one = SkippedEpochs(  # noqa: PLW2901 - both together
                first=before.first,
                last=max(before.last, one.last),
                rows=before.rows + one.rows,
                at_us=max(before.at_us, one.at_us),
            )
        found.append(one)
    return found


def _announce(tx: Transaction, pipeline: str, known: NodeRecord) -> int:
    tx.changed.update(("stream", pipeline, stream) for stream in tx.log.streams_of(known.node_id))
    return tx.log.touch(known.node_id)


def _known(log: LogReader, pipeline: str, node: str) -> NodeRecord:
    known = log.node(pipeline, node)
    if known is None:
        raise Rejection(
            "not_found",
            f"the hub has no pipeline {pipeline} on node {node}. `fordstone nodes` lists them.",
        )
    return known
