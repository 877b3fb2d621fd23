"""Decide which writer may release to a sink (rule 18). Pure.

A sink keeps the name of the writer that opened it last: its claim. The writer of an older generation is refused when it opens
the sink; one whose claim was replaced is refused at its next release. Generations of a hub are ordered for one pipeline on one
node. Without a hub nothing orders two state directories: then the one that opened the sink last may write.

Invariants: of two claims only one can release; a generation that a hub granted is never replaced by an older one of the same
pipeline and node, and by a writer without one only on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from fordstone.protocol.lease import Fence


class SinkWriter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A start of an engine that writes to a sink. Kept by the sink, as JSON."""

    pipeline: str = ""
    node: str = ""
    holder: str = ""
    """Random, kept with the checkpoints: a new state directory is another holder."""
    start: str = ""
    """Random, of this start: a copy of a state directory that is started is another start."""
    hub: int = 0
    """The generation that the hub granted to the holder; 0: none."""
    local: int = 0
    """The incarnation: one more with every start of the holder."""

    @property
    def fence(self) -> Fence:
        return Fence(self.hub, self.local)

    def described(self) -> str:
        """The writer in words, for errors."""
        where = f"node {self.node}" if self.node else "another process"
        granted = f"generation {self.hub}.{self.local}" if self.hub else f"start {self.local}, without a hub"
        return f"{where} ({granted}, state {self.holder[:8] or 'unknown'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """The claim is this writer's already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """The sink is free, or its claims are older or cannot be compared: replace them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedByNewer:
    """A newer generation has the sink."""

    by: SinkWriter


ClaimDecision: TypeAlias = Keep | Take | OwnedByNewer


def decide_claim(found: Iterable[SinkWriter], mine: SinkWriter, *, restored: bool = False) -> ClaimDecision:
    """Judge the claims that a sink has. There may be several after a crash, or while two writers open it at once.

    `restored`: this state is the one that counts, on purpose. Later starts of a directory that was brought back from an older copy do
    not count then; nor does a generation of a hub, for a writer that no hub has granted one.
    """
    found = list(found)
    ignored = restored and not mine.hub
    newer = [
        one for one in found if _is_newer(one, mine) and not ignored and not (restored and one.holder == mine.holder)
    ]
    if newer:
        return OwnedByNewer(by=max(newer, key=lambda one: one.fence))
    return Keep() if found == [mine] else Take()


def _is_newer(one: SinkWriter, other: SinkWriter) -> bool:
    if (one.pipeline, one.node) != (other.pipeline, other.node):
        return False
    return one.fence > other.fence if one.holder == other.holder else one.hub > other.hub
