"""Forget nodes and streams that are gone for good.

`protocol.forget` decides; this module gathers the facts and carries the decision out, in one transaction. Names, counts and quotas are
given back with it. The rows of epochs are removed by `retention`, a piece at a time, because there may be millions.

A node that had epochs leaves one record: its name and its closing epoch. `commits` shows that epoch to readers as the end of the node,
and rejects a node that comes back under the name.
"""

from __future__ import annotations

import logging
from typing import assert_never

from fordstone.hub.messages import ForgetRequest, Forgotten, Rejection
from fordstone.hub.store.log import Transaction
from fordstone.hub.store.log_records import NodeRecord
from fordstone.protocol.forget import (
    Forget,
    ForgetNodeFacts,
    ForgetStreamFacts,
    HasUnread,
    NodeContact,
    StillRunning,
    closing_chain,
    decide_forget_node,
    decide_forget_stream,
    is_running,
)

_events = logging.getLogger(__name__)


def forget_node(tx: Transaction, pipeline: str, node: str, request: ForgetRequest) -> Forgotten:
    """Remove a node with its epochs, checkpoints, lease and reports."""
    known = tx.log.node(pipeline, node)
    where = f"pipeline {pipeline} on node {node}"
    if known is None:
        if tx.log.forgotten_node(pipeline, node) is not None:
            return Forgotten(changed=False)
        raise Rejection("not_found", f"the hub has no {where}. `fordstone nodes` lists them.")
    facts = ForgetNodeFacts(head=known.head, contact=_contact(tx, known), unread=tx.log.unread_of_node(known.node_id))
    decision = decide_forget_node(facts, discard_unread=request.discard_unread)
    match decision:
        case StillRunning():
            raise Rejection(
                "held",
                f"{where} is running: it was in contact {max(0, facts.contact.silent_us) // 1_000_000} s ago. Stop it there first. A node "
                "that was killed can be forgotten a minute after its last contact.",
            )
        case HasUnread():
            raise _has_unread(where, decision)
        case Forget():
            tx.changed.update(("stream", pipeline, stream) for stream in tx.log.streams_of(known.node_id))
            chain = closing_chain(known.head_chain, at_us=tx.now_us) if decision.retired else None
            tx.log.remove_node(pipeline, node, known, closing_chain=chain, now_us=tx.now_us)
        case _:
            assert_never(decision)
    discarded = decision.discarded
    _events.warning(
        "node forgotten",
        extra={
            "pipeline": pipeline,
            "node": node,
            "head": known.head,
            "epochs": discarded.epochs,
            "rows": discarded.rows,
        },
    )
    return Forgotten(epochs=discarded.epochs, rows=discarded.rows, retired=decision.retired)


def forget_stream(tx: Transaction, pipeline: str, stream: str, request: ForgetRequest) -> Forgotten:
    """Remove a stream with the segments of all nodes. The nodes, and the positions of consumers, stay."""
    stream_id = tx.log.stream_id(pipeline, stream)
    where = f"stream {stream} of pipeline {pipeline}"
    if stream_id is None:
        if tx.log.is_stream_forgotten(pipeline, stream):
            return Forgotten(changed=False)
        raise Rejection("not_found", f"the hub has no {where}. `fordstone streams` lists them.")
    writers = [
        node
        for node in tx.log.newest_writers(stream_id)
        if (known := tx.log.node(pipeline, node)) is not None and is_running(_contact(tx, known))
    ]
    facts = ForgetStreamFacts(writers=tuple(writers), unread=tx.log.unread_of_stream(stream_id))
    decision = decide_forget_stream(facts, discard_unread=request.discard_unread)
    match decision:
        case StillRunning(nodes=nodes):
            more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""  # noqa: PLR2004 - some are enough
            raise Rejection(
                "held",
                f"{where} is still written to by {', '.join(nodes[:3])}{more}, so it would come back at once. Stop these nodes, or let them "
                "run a version of the pipeline without it.",
            )
        case HasUnread():
            raise _has_unread(where, decision)
        case Forget():
            tx.changed.add(("stream", pipeline, stream))
            tx.log.remove_stream(pipeline, stream, stream_id, now_us=tx.now_us)
        case _:
            assert_never(decision)
    discarded = decision.discarded
    _events.warning(
        "stream forgotten",
        extra={"pipeline": pipeline, "stream": stream, "epochs": discarded.epochs, "rows": discarded.rows},
    )
    return Forgotten(epochs=discarded.epochs, rows=discarded.rows)


def _contact(tx: Transaction, known: NodeRecord) -> NodeContact:
    seen_us, health = tx.log.last_contact(known.node_id)
    return NodeContact(
        has_lease=known.holder is not None and known.start is not None,
        stopped=health is not None and health.state == "stopped",
        silent_us=tx.now_us - seen_us,
    )


def _has_unread(where: str, found: HasUnread) -> Rejection:
    unread = found.unread
    return Rejection(
        "unread",
        f"{where} has {unread.epochs} epochs with {unread.rows} rows at the hub that not all of its consumers have read, or that nobody "
        "reads. Let them read on (`fordstone streams` shows which consumer lags), remove a consumer that is gone for good (fordstone hub forget "
        "consumer), or discard the rows: --discard-unread.",
    )
