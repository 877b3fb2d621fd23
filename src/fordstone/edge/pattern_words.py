"""A pattern in words, for `explain`."""

from __future__ import annotations

from collections.abc import Iterator

from fordstone.model import plan as p
from fordstone.model.duration import human_us

_FOLLOWS = {"next": "next ", "then": "then ", "any": "then any "}
_REPEATS = {"next": ", consecutive", "then": "", "any": ", in all combinations"}
_SKIP = {
    "none": "all matches count",
    "next": "goes on behind the first row of a match",
    "past_last": "goes on behind the last row of a match",
}


def pattern_details(step: p.Match) -> Iterator[tuple[str, str]]:
    """What more there is to say of a pattern: a label and a text each."""
    stages = ", ".join(_stage(stage, first=at == 0) for at, stage in enumerate(step.stages))
    yield "looks for", stages + ("" if step.within_us is None else f", within {human_us(step.within_us)}")
    skip = _SKIP.get(step.skip, f"goes on at the {step.skip} row of {step.skip_to}")
    chosen = "; of one first row, as SQL prefers" if step.choose == "preferred" else ""
    yield "matches", ("all their rows; " if step.all_rows else "one row each; ") + skip + chosen
    if step.measures:
        yield "computes", ", ".join(step.measures)


def pattern_kept(step: p.Match) -> str:
    """What of a pattern is in a checkpoint."""
    most = f"open beginnings of matches, at most {step.partial_matches_max:,} a key"
    ends = "for as long as it takes" if step.within_us is None else f"for {human_us(step.within_us)}"
    return f"the rows that wait for time, and {most}, {ends}"


def _stage(stage: p.Stage, *, first: bool) -> str:
    lead = "" if first else _FOLLOWS[stage.follows]
    condition = "" if stage.predicate is None else f" ({stage.predicate})"
    if stage.negated:
        return f"{'not next' if stage.follows == 'next' else 'without'} {stage.name}{condition}"
    words = "" if stage.times_max == 1 else f" {_times(stage)}{_REPEATS[stage.repeats]}"
    words += ", optional" if stage.optional else ""
    words += "" if stage.quantifier == "each" else f", {stage.quantifier}"
    until = "" if stage.until is None else f" until {stage.until}"
    return f"{lead}{stage.name}{words}{condition}{until}"


def _times(stage: p.Stage) -> str:
    if stage.times_max is None:
        return f"{stage.times_min} or more times"
    if stage.times_min == stage.times_max:
        return f"{stage.times_min} times"
    return f"{stage.times_min} to {stage.times_max} times"
