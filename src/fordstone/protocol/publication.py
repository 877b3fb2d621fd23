"""Decide what becomes of rows that are published to a control table. Pure.

An owner is a publisher's checkpoint. It numbers its batches, and sends one again if it does not know what became of it. A copy of its
checkpoint is the same owner; the random word of each start tells the two apart.

Invariants: of two owners, the one that published first is fenced; of two starts of one owner too; rows that differ from what was
published under their number are never dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """The rows become the next version."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyPublished:
    """The rows are a version already."""

    newest: int
    """The newest batch of the owner that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """Another publisher has begun to write the table."""

    by_copy: bool
    """It is another start of the same owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterBatches:
    """The owner has published more than the state from which this start resumed has sealed."""

    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """Under this number the owner has published other rows, or it is unknown which, and later batches followed."""

    newest: int


PublishDecision: TypeAlias = Add | AlreadyPublished | Superseded | LaterBatches | OtherRows


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFacts:
    """A batch, and what the hub has of its table and its owner."""

    leader: int
    """The highest generation of any owner; 0: nothing was published."""
    generation: int | None
    """None: this owner has published nothing."""
    newest: int
    """The newest batch of this owner."""
    starts: tuple[str, ...]
    """The starts of this owner that have published, the newest last."""
    start: str
    """The start that sends the batch. Empty: it does not say."""
    batch: int
    same: bool | None
    """Whether the batch was published with these rows; None: it was not, or the hub no longer has it."""
    resumes_after: int | None
    """The newest batch that was sealed when the start began: what is sealed never changes. None: the owner seals nothing."""
    discard: bool
    """Later batches than that are to be published again."""


def decide_publish(facts: PublishFacts) -> PublishDecision:
    """Judge one batch."""
    if facts.generation is None:
        return Add(generation=facts.leader + 1)
    if facts.generation < facts.leader:
        return Superseded(by_copy=False)
    if facts.start in facts.starts[:-1]:
        return Superseded(by_copy=True)
    newest = facts.newest
    if facts.resumes_after is not None and facts.start not in facts.starts and newest > facts.resumes_after:
        if not facts.discard:
            return LaterBatches(newest=newest)
        newest = facts.resumes_after
    if facts.batch > newest:
        return Add(generation=facts.generation)
    if facts.resumes_after is not None or facts.same:
        return AlreadyPublished(newest=newest)
    if facts.batch == newest:
        # A query on Spark whose plan of its newest batch was lost has planned it again, with at least the same rows.
        return Add(generation=facts.generation)
    return OtherRows(newest=newest)
