"""Decide who may commit for a pipeline on a node.

Reads nothing: the hub brings what it has granted and what is asked, and writes the outcome down before it answers.

Invariants: a fence never goes back; two holders never have the same hub generation; asking again after a lost answer
gives the same fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Fence(NamedTuple):
    """A generation as it compares: the hub's number first, then the local incarnation (rule 18)."""

    hub: int
    local: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The right to commit, now this holder's."""

    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldByOther:
    """Another state directory has the right, and nobody asked to take it over."""

    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderIncarnation:
    """The same state directory has been started again since: this process is a leftover, or the directory an old copy."""

    by: Fence


LeaseDecision: TypeAlias = Granted | HeldByOther | OlderIncarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Whom the right to commit was given to last."""

    holder: str
    fence: Fence


def decide_lease(holding: Holding | None, *, holder: str, local: int, take_over: bool = False) -> LeaseDecision:
    """Judge one request; `holding` is what was granted before, None if nothing ever was.

    Taking over what one holds already changes nothing, so that the question may be asked again.
    """
    if holding is None:
        return Granted(fence=Fence(1, local))
    if holding.holder == holder and local >= holding.fence.local:
        return Granted(fence=Fence(holding.fence.hub, local))
    if take_over:
        return Granted(fence=Fence(holding.fence.hub + 1, local))
    if holding.holder == holder:
        return OlderIncarnation(by=holding.fence)
    return HeldByOther(fence=holding.fence)
