"""Joins and lookups at the end of a random pipeline: of two sources, or of a stream with a part of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.simulation.rows import Row, SimulationError, check_equal
from tests.simulation.tails import OUT, STEP, Given, Sinks, Tail, attach_sinks

from fordstone.api.stream import Stream


@dataclass(frozen=True, slots=True)
class _TwoSided(Tail):
    """Takes two streams."""

    def sides(self, stream: Stream, sources: Sequence[Stream]) -> tuple[Stream, Stream]:
        """The first two sources, or the stream and a part of it."""
        if len(sources) > 1:
            return sources[0], sources[1]
        return stream, stream.filter("id % 2 = 0", name=f"{STEP}_half")

    def rows(self, given: Given) -> tuple[list[Row], list[Row]]:
        """What these two have."""
        if len(given.by_source) > 1:
            return list(given.by_source[0]), list(given.by_source[1])
        return list(given.rows), [row for row in given.rows if row.id % 2 == 0]


@dataclass(frozen=True, slots=True)
class JoinTail(_TwoSided):
    """Pairs of rows close in time."""

    how: Literal["inner", "left", "right", "full"]
    least: int
    most: int
    """How many seconds the right may be later."""

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to both sides."""
        left, right = self.sides(stream, sources)
        made = left.join(right, on="k", between=(f"{self.least}s", f"{self.most}s"), how=self.how, name=STEP)
        attach_sinks(sinks, made, late=made.late)

    def judge(self, given: Given) -> None:
        """All pairs, and the rows that met nobody."""
        left, right = self.rows(given)
        left, right = given.in_time(left, "id"), given.in_time(right, "id_right")
        pairs: Counter[tuple[int | None, int | None]] = Counter(
            (one.id, other.id)
            for one in left
            for other in right
            if one.k == other.k and self.least <= other.second - one.second <= self.most
        )
        met, met_right = {one for one, _ in pairs}, {other for _, other in pairs}
        if self.how in {"left", "full"}:
            pairs.update((row.id, None) for row in left if row.id not in met)
        if self.how in {"right", "full"}:
            pairs.update((None, row.id) for row in right if row.id not in met_right)
        check_equal("pairs of the tail", Counter(given.found(OUT, "id", "id_right")), pairs)


@dataclass(frozen=True, slots=True)
class LatestTail(_TwoSided):
    """The newest row of another stream beside each. Which one that is goes by the epochs that rows were read in."""

    waits: bool

    @property
    def goes_by_barriers(self) -> bool:
        """Control rows are taken in there."""
        return True

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to both sides."""
        left, right = self.sides(stream, sources)
        made = left.join_latest(right, on="k", wait=self.waits, name=STEP)
        attach_sinks(sinks, made, late=None)

    def judge(self, given: Given) -> None:
        """Every row once, beside what was the newest by the end of its epoch, or of the one before.

        In an epoch with more barriers than one, it may be what was the newest at any of them.
        """
        left, control = self.rows(given)
        epochs = given.epochs
        found = given.found(OUT, "id", "id_right")
        check_equal("rows of the tail", Counter(one for one, _ in found), Counter(row.id for row in left))
        met = dict(found)
        for row in left:
            at = epochs[row.id]
            ages = [(other.second, epochs[other.id], other.id) for other in control if other.k == row.k]
            before = max((age for age in ages if age[1] < at), default=None)
            within = max((age for age in ages if age[1] <= at), default=None)
            allowed = {within if self.waits else before}
            if at in given.uneven:
                allowed |= {before, *(age for age in ages if age[1] == at and (before is None or age > before))}
            if met[row.id] not in {None if age is None else age[2] for age in allowed}:
                raise SimulationError(f"row {row} of epoch {at} met {met[row.id]}, not any of {allowed}")

    def judge_loosely(self, given: Given, *, least: bool) -> None:
        """Every row at least or at most once."""
        left, _ = self.rows(given)
        counted = given.ids(OUT)
        wrong = [row.id for row in left if (counted[row.id] < 1 if least else counted[row.id] > 1)]
        check_equal("rows that the tail lost or doubled", wrong, [])
