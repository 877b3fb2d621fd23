"""What the store reports: facts for recovery, the outcome of retention, the findings of a check."""

from __future__ import annotations

from dataclasses import dataclass

from fordstone.protocol.recovery import CheckpointFact


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The facts that `protocol.recovery.decide_recovery` judges."""

    checkpoints: tuple[CheckpointFact, ...]
    cuts: frozenset[int]
    damaged_cut_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What retention took away."""

    manifests: tuple[int, ...] = ()
    runs: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `fordstone checkpoints verify` prints: every byte was read."""

    checkpoints: tuple[CheckpointFact, ...]
    damaged_runs: tuple[tuple[str, str], ...]
    """Digest, and what is wrong with it."""
    runs_checked: int
    checked_bytes: int
    damaged_cut_lines: int
    aside: tuple[str, ...]
    """The names of what was set aside earlier."""

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong with what is in place."""
        return not self.damaged_cut_lines and all(fact.problem is None for fact in self.checkpoints)
