"""Control tables at the hub: publishing versions, and reading them. Decisions are made in `protocol.publication` and `protocol.chain`.

Invariants: versions of a table are chained, and their numbers only grow, also across a restore from a backup, so that a reader's position
is (number, chain); a reader whose position is not one of this log gets the whole table, with the reason. One (owner, batch) is one version,
however often it is sent and with whatever bytes; an owner that another one has superseded publishes nothing more.
"""

from __future__ import annotations

from typing import Final, assert_never

from msgspec.structs import replace

from fordstone.hub.messages import RUNBOOK, ControlPage, ControlPublish, ControlVersion, Rejection
from fordstone.hub.store.commits import check_limit, not_stored
from fordstone.hub.store.log import Transaction
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_records import ControlTable, Publisher
from fordstone.protocol.chain import CHAIN_START, ChainFacts, PositionJudgement, chained, judge_position
from fordstone.protocol.publication import (
    Add,
    AlreadyPublished,
    LaterBatches,
    OtherRows,
    PublishFacts,
    Superseded,
    decide_publish,
)

STARTS_KEPT: Final = 32
"""Starts of a publisher that are remembered, so that a former one is fenced."""


def publish(tx: Transaction, pipeline: str, control: str, body: ControlPublish) -> tuple[ControlVersion, bool]:
    """Number a version of a control table; return it, and whether it is new."""
    where = f"control table {control} of pipeline {pipeline}"
    known = tx.log.publisher(pipeline, control, body.owner, body.batch)
    changes = body.changes or body.blob.digest
    decision = decide_publish(
        PublishFacts(
            leader=known.leader,
            generation=known.generation,
            newest=known.batch,
            starts=known.starts,
            start=body.start or "",
            batch=body.batch,
            same=None if known.changes is None else known.changes == changes,
            resumes_after=body.resumes_after,
            discard=body.discard_later,
        )
    )
    starts = known.starts
    if body.start is not None and body.start not in starts:
        starts = (*starts, body.start)[-STARTS_KEPT:]
    match decision:
        case Add(generation=generation):
            version = _next_version(tx, pipeline, control, body, known)
            tx.log.add_control_version(
                pipeline, control, version, changes=changes, generation=generation, starts=starts
            )
            tx.changed.add(("control", pipeline, control))
            return version, True
        case AlreadyPublished(newest=newest):
            assert known.published is not None  # noqa: S101 - of an owner that has published
            if (newest, starts) != (known.batch, known.starts):
                tx.log.save_publisher(pipeline, control, body.owner, batch=newest, starts=starts)
            return known.published, False
        case Superseded(by_copy=False):
            raise Rejection(
                "stale_generation",
                f"{where}: another publisher has superseded this one. Stop this one, or start it with a checkpoint of its own.",
            )
        case Superseded():
            raise Rejection(
                "stale_generation",
                f"{where}: its publisher was started again since, from this checkpoint or from a copy of it. Stop one of the two, or start "
                "it with a checkpoint of its own.",
            )
        case LaterBatches(newest=newest) | OtherRows(newest=newest):
            raise Rejection("other_content", f"{where}: {_describe_other(body, newest)}")
        case _:
            assert_never(decision)


def _describe_other(body: ControlPublish, newest: int) -> str:
    if body.resumes_after is not None:
        return (
            f"its publisher has published up to epoch {newest}, and was started from state that ends with epoch {body.resumes_after}: the state is "
            "an older copy. The rows of the epochs after that would be lost, because what was published never changes."
        )
    return (
        f"batch {body.batch} was published before, with other rows or long ago, and batches up to {newest} followed: the checkpoint of "
        "this publisher is older than what it has published, as after a power cut or if a copy was brought back. Nothing was published."
    )


def _next_version(
    tx: Transaction, pipeline: str, control: str, body: ControlPublish, known: Publisher
) -> ControlVersion:
    if not_stored(tx.log, [body.blob]):
        raise Rejection(
            "missing_blobs",
            "the blob of this version is not at the hub. Upload it first.",
            missing=(body.blob.digest,),
        )
    if known.leader == 0:
        where = f"control table {control} of pipeline {pipeline}"
        remedy = "Control tables stay for as long as the hub's data: publish to one that is there"
        of_pipeline, in_all = tx.log.count_controls(pipeline) + 1, tx.log.count_controls(None) + 1
        check_limit(where, of_pipeline, tx.limits.controls_per_pipeline, "control tables of a pipeline", remedy)
        check_limit(where, in_all, tx.limits.controls, "control tables", remedy)
    version = ControlVersion(
        version=known.reached + 1,
        blob=body.blob,
        snapshot=body.snapshot,
        published_us=tx.now_us,
        owner=body.owner,
        batch=body.batch,
    )
    return replace(version, chain=chained(known.chain, version.digest()))


def control_page(
    log: LogReader, pipeline: str, control: str, *, after: int, limit: int, chain: str | None = None
) -> ControlPage:
    """Return versions after one; from the newest snapshot on for a new reader, or if the log does not have the reader's position.

    `chain`: what the reader has seen at `after`; None: it is not compared.
    """
    table = log.control_table(pipeline, control)
    facts = _chain_facts(log, table, after)
    judgement = PositionJudgement.FITS
    if chain is not None:
        judgement = judge_position(after, chain, facts)
    elif after > facts.head:
        judgement = PositionJudgement.BEYOND
    if judgement is PositionJudgement.BEYOND or (judgement is PositionJudgement.DIFFERS and after == facts.head):
        # In the second case too a reader has no number for the table as it is here.
        raise Rejection(
            "gone",
            f"control table {control} of pipeline {pipeline} ends at version {facts.head} here, and version {after} that was read from it is "
            "not one of its versions: the hub's data was restored from an older copy, or this is another hub. If it was restored, stop the "
            f"hub, run `fordstone hub restore --data DIR`, and start it again; {RUNBOOK} says what follows. Until then the table stays "
            "as it was.",
        )
    fits = judgement is PositionJudgement.FITS
    restart = "" if fits else _describe_restart(log, table, judgement, after)
    found: tuple[ControlVersion, ...] = ()
    if table is not None:
        start = after + 1
        if after == 0 or not fits or (table.oldest is not None and start < table.oldest):
            start = max(table.snapshot or 0, table.oldest or 0)
        found = log.control_versions(table.table_id, start=start, limit=limit)
    return ControlPage(
        versions=found,
        newest=0 if table is None else table.newest,
        reached=facts.head,
        restart=restart,
    )


def _chain_facts(log: LogReader, table: ControlTable | None, number: int) -> ChainFacts:
    """What the log has of a table around a number. Numbers between two versions, which a restore skips, stand for the earlier one."""
    if table is None:
        return ChainFacts(head=log.controls_reached(), head_chain=CHAIN_START, chain=CHAIN_START)
    at = log.control_version_at(table.table_id, number)
    return ChainFacts(head=table.reached, head_chain=table.chain, chain=None if at is None else at.chain)


def _describe_restart(log: LogReader, table: ControlTable | None, judgement: PositionJudgement, after: int) -> str:
    if judgement is PositionJudgement.UNKNOWN:
        return f"the hub no longer keeps version {after}, nor what came before it"
    at = None if table is None else log.control_version_at(table.table_id, after)
    known = 0 if at is None else at.version
    if known < after:
        return f"versions {known + 1} to {after} are not in the hub's log: they were lost when it was restored from a backup"
    return f"the hub's log has other versions up to {after}: it was restored from a backup, or is that of another hub"
