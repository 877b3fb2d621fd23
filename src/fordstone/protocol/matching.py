"""Decide whether the state in a checkpoint fits a plan.

Pure. State belongs to the step's name; a step whose meaning changed cannot use it. Nothing is dropped unless asked for (rule 22).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
        """What matches, what does not, and what `--allow-new-state` would do."""
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
