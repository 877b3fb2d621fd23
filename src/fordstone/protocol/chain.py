"""The chain of a node's epochs at a hub: one digest that stands for every epoch up to a given one (rule 24). Pure.

The hub and the node compute it apart, from the same entries. Two logs with the same chain at an epoch have the same content up
to it; a position in a log is therefore (epoch, chain) rather than a bare number.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

CHAIN_START: Final = ""
"""The chain before the first epoch."""
CHAIN_CHARS: Final = 64
"""Length of the chain after it."""


def chained(previous: str, digest: str) -> str:
    """Return the chain after one more epoch. `digest` is that of its entry; `previous` is the chain at the epoch before."""
    return hashlib.sha256(f"{previous}{digest}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """What a log has of a node around the epoch of a position."""

    head: int = 0
    """The newest epoch; 0: the log has none of the node."""
    head_chain: str = CHAIN_START
    chain: str | None = None
    """At the epoch of the position; None: the log no longer keeps that entry."""
    following: tuple[str, str] | None = None
    """The digest of the entry after it, and the chain at that one; None: the log does not have that entry."""


class PositionJudgement(StrEnum):
    """Whether a position is one of this log."""

    FITS = "fits"
    BEYOND = "beyond"
    """The log ends before it."""
    DIFFERS = "differs"
    """The log has other content up to it."""
    UNKNOWN = "unknown"
    """The log keeps nothing that it could be compared with."""


def judge_position(epoch: int, chain: str, facts: ChainFacts) -> PositionJudgement:
    """Judge whether a reader whose position is an epoch, with the chain that it saw there, has read this log."""
    if epoch == 0:
        return PositionJudgement.FITS
    if epoch > facts.head:
        return PositionJudgement.BEYOND
    if epoch == facts.head:
        known = facts.head_chain
    elif facts.chain is not None:
        known = facts.chain
    elif facts.following is not None:
        digest, known = facts.following
        chain = chained(chain, digest)
    else:
        return PositionJudgement.UNKNOWN
    return PositionJudgement.FITS if chain == known else PositionJudgement.DIFFERS
