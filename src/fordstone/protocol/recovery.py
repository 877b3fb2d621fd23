"""Decide what a restarted node resumes from, and whether the state of a checkpoint fits the plan. Pure.

`epochs.store` and `epochs.copies` gather the facts. State belongs to the name of a step; a step whose meaning changed
cannot use it, and nothing is dropped unless the user asks for it (rule 22).

Invariants: an epoch is sealed as soon as any manifest of it exists anywhere, damaged or not, and the content of a sealed
epoch never changes: the epochs between the newest whole checkpoint and the newest sealed one are replayed from their
recorded cuts, or nothing is resumed at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Literal

Place = Literal["local", "remote"]
_SPANS_SHOWN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFact:
    """One manifest that exists, and what is wrong with it."""

    epoch: int
    where: Place = "local"
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEmpty:
    """Nothing was ever sealed: start with epoch 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Load checkpoint `epoch` from `where`, then compute the epochs in `replay` again from their cuts, in order.

    `epoch` 0 from `empty` means: no checkpoint is whole, but every cut is there, so all is replayed from the beginning.
    New work starts at `next_epoch`. `damaged` are the checkpoints to set aside and to report.
    """

    epoch: int
    where: Place | Literal["empty"]
    replay: tuple[int, ...] = ()
    damaged: tuple[CheckpointFact, ...] = ()

    @property
    def next_epoch(self) -> int:
        """The first epoch that is not sealed."""
        return self.replay[-1] + 1 if self.replay else self.epoch + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotResume:
    """Sealed epochs can be neither read nor replayed. A resume would change output that may be released already."""

    reason: str
    newest_whole: int
    newest_sealed: int
    missing_cuts: tuple[tuple[int, int], ...]
    """First and last of each stretch of epochs without a readable cut."""
    damaged: tuple[CheckpointFact, ...] = ()


RecoveryDecision = StartEmpty | Resume | CannotResume


def decide_recovery(facts: Iterable[CheckpointFact], cuts: AbstractSet[int]) -> RecoveryDecision:
    """Decide which checkpoint to load and which epochs to replay, or why that is impossible. `cuts`: epochs with a readable cut."""
    facts = sorted(facts, key=lambda fact: (fact.epoch, fact.where))
    if not facts:
        return StartEmpty()
    damaged = tuple(fact for fact in facts if fact.problem is not None)
    whole = {(fact.epoch, fact.where) for fact in facts if fact.problem is None}
    newest_whole = max((epoch for epoch, _ in whole), default=0)
    newest_sealed = facts[-1].epoch
    missing = _gaps(newest_whole + 1, newest_sealed, cuts)
    if missing:
        return CannotResume(
            reason=_why_not(newest_whole, newest_sealed, missing, damaged),
            newest_whole=newest_whole,
            newest_sealed=newest_sealed,
            missing_cuts=missing,
            damaged=damaged,
        )
    where: Place | Literal["empty"] = "empty"
    if newest_whole:
        where = "local" if (newest_whole, "local") in whole else "remote"
    replay = tuple(range(newest_whole + 1, newest_sealed + 1))
    return Resume(epoch=newest_whole, where=where, replay=replay, damaged=damaged)


def _gaps(first: int, last: int, present: AbstractSet[int]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of first..last that are not in `present`, in time that depends only on the size of `present`."""
    gaps: list[tuple[int, int]] = []
    expected = first
    for epoch in [*sorted(epoch for epoch in present if first <= epoch <= last), last + 1]:
        if epoch > expected:
            gaps.append((expected, epoch - 1))
        expected = epoch + 1
    return tuple(gaps)


def _why_not(
    newest_whole: int, newest_sealed: int, missing: tuple[tuple[int, int], ...], damaged: tuple[CheckpointFact, ...]
) -> str:
    base = f"the newest whole checkpoint is {newest_whole}" if newest_whole else "no checkpoint is whole"
    spans = [str(first) if first == last else f"{first} to {last}" for first, last in missing[:_SPANS_SHOWN]]
    if len(missing) > _SPANS_SHOWN:
        spans.append(f"{len(missing) - _SPANS_SHOWN} more stretches")
    faults = [
        f"  checkpoint {fact.epoch} ({fact.where}): {fact.problem}" for fact in damaged if fact.epoch > newest_whole
    ]
    head = (
        f"{base}, but epoch {newest_sealed} is sealed and its output may already have been released. "
        f"To replay it, the cuts of epochs {', '.join(spans)} are needed, but they cannot be read."
    )
    advice = "Restore the files from a copy, or start over with an empty state directory and new sinks."
    return "\n".join([head, *faults, advice])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMatch:
    """How the stateful steps of a checkpoint and of a plan compare, by name."""

    same: tuple[str, ...]
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    """In the checkpoint only."""
    new: tuple[str, ...]
    """In the plan only."""

    @property
    def whole(self) -> bool:
        """Whether every stateful step of either side finds itself in the other."""
        return not (self.changed or self.gone or self.new)

    def explain(self) -> str:
        """Describe what matches, what does not, and what `--allow-new-state` would do."""
        lines = [f"  matches: {', '.join(self.same) or 'nothing'}"]
        for title, names in (
            ("changed", self.changed),
            ("no longer in the plan", self.gone),
            ("not in the checkpoint", self.new),
        ):
            if names:
                lines.append(f"  {title}: {', '.join(names)}")
        dropped = sorted({*self.changed, *self.gone})
        begins = sorted({*self.changed, *self.new})
        if dropped:
            lines.append(f"--allow-new-state would drop the state of: {', '.join(dropped)}.")
        if begins:
            lines.append(f"--allow-new-state would begin with empty state: {', '.join(begins)}.")
        return "\n".join(lines)


def match_plan(checkpoint: Mapping[str, str], plan: Mapping[str, str]) -> PlanMatch:
    """Compare the digests of stateful steps."""
    both = sorted(checkpoint.keys() & plan.keys())
    return PlanMatch(
        same=tuple(name for name in both if checkpoint[name] == plan[name]),
        changed=tuple(name for name in both if checkpoint[name] != plan[name]),
        gone=tuple(sorted(checkpoint.keys() - plan.keys())),
        new=tuple(sorted(plan.keys() - checkpoint.keys())),
    )
