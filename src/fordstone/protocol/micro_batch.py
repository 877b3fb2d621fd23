"""Decide how a query on Spark continues from what is left of its files (rule 23). Pure.

Spark syncs none of the files that it writes, so after a power cut its logs may end earlier than our records of sealed epochs, and
the newest of its files may be empty. `spark.hosted` gathers the facts, and carries the decisions out.

Invariants: an epoch that has a record is only ever planned as it was recorded; no batch is planned again that may have been released.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class NextPlan(Enum):
    """How the next micro-batch is planned."""

    NEW = "new"
    """From what there is to read now."""
    RECORDED = "recorded"
    """Exactly as the record of its epoch says."""
    LOST = "lost"
    """Not at all: it was planned before, and its record is no longer kept."""


def decide_plan(epoch: int, *, recorded: bool, newest: int) -> NextPlan:
    """Decide how to plan an epoch. `recorded`: there is a record of it. `newest`: the newest epoch that has a record, or 0."""
    if recorded:
        return NextPlan.RECORDED
    return NextPlan.LOST if epoch <= newest else NextPlan.NEW


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRepair:
    """Which entries of Spark's logs are set aside, so that Spark continues after its newest usable batch."""

    committed: int
    """The newest batch that Spark has planned and committed; -1: none."""
    offsets: tuple[int, ...]
    commits: tuple[int, ...]


def decide_log_repair(offsets: Mapping[int, bool], commits: Mapping[int, bool]) -> LogRepair:
    """Decide from the entries of both logs, by batch, and whether each can be read.

    Spark starts after its newest commit, and needs the offset of that batch. It executes the next batch again if that has an
    offset. It refuses to start if its newest entry cannot be read, and if there are commits without offsets; offsets further ahead
    would let it skip the batches between.
    """
    usable = (batch for batch, readable in commits.items() if readable and offsets.get(batch, False))
    committed = max(usable, default=-1)
    return LogRepair(
        committed=committed,
        offsets=tuple(sorted(batch for batch, readable in offsets.items() if not readable or batch > committed + 1)),
        commits=tuple(sorted(batch for batch, readable in commits.items() if not readable or batch > committed)),
    )
