"""Decide which state directory may commit for a pipeline on a node. Pure.

The hub gathers what it has granted and what is requested, and stores the outcome before it responds.

Invariants: a fence never decreases; two holders never have the same hub generation; a request that is repeated after a
lost response gets the same fence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Fence(NamedTuple):
    """A generation in the order of comparison: the hub's number first, then the local incarnation (rule 18)."""

    hub: int
    local: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """This holder now has the lease."""

    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldByOther:
    """Another state directory has the lease, and the request does not take it over."""

    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderIncarnation:
    """The same state directory was started again since: this process is an old one, or the directory is an old copy."""

    by: Fence


LeaseDecision: TypeAlias = Granted | HeldByOther | OlderIncarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The last lease that was granted."""

    holder: str
    fence: Fence


def decide_lease(holding: Holding | None, *, holder: str, local: int, take_over: bool = False) -> LeaseDecision:
    """Judge one request; `holding` is what was granted before, None if nothing ever was.

    A take-over by the present holder changes nothing, so the request may be repeated.
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
