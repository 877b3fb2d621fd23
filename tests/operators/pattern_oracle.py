"""Patterns by definition: every choice of rows is tried, and judged as a whole.

Nothing here goes through rows one by one: a path is a list of (stage, place), and each of its steps is judged by looking at
all rows between. Slow, and unlike the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fordstone.plan import plan as p

Row = tuple[Any, ...]
"""Key, time, name, x."""
Path = list[tuple[int, int]]
"""Stage (among those that take rows) and place of each row."""
Judge = Callable[[Row, dict[str, list[Row]]], bool]
"""Whether a row fulfils a condition, given the rows of each stage so far."""
Options = tuple[list[int], set[tuple[int, int]]]
END = -1


@dataclass(frozen=True)
class Rule:
    """A stage with its conditions in Python."""

    stage: p.Stage
    holds: Judge
    until: Judge | None = None


@dataclass(frozen=True)
class Oracle:
    """A pattern over the rows of one key, in order."""

    rules: Sequence[Rule]
    rows: Sequence[Row]
    within: int | None
    preferred: bool

    @property
    def taking(self) -> list[int]:
        return [at for at, rule in enumerate(self.rules) if not rule.stage.negated]

    def rule(self, number: int) -> Rule:
        return self.rules[self.taking[number]]

    def taken(self, path: Path) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {rule.stage.name: [] for rule in self.rules}
        for number, place in path:
            found[self.rule(number).stage.name].append(self.rows[place])
        return found

    # Options at the end of a path, in order of preference; and which of them beat which.

    def entering(self, number: int) -> tuple[list[int], set[tuple[int, int]]]:
        if number == len(self.taking):
            return [END], set()
        stage = self.rule(number).stage
        if not stage.optional:
            return [number], set()
        return self.chosen(stage, number, self.entering(number + 1))

    def chosen(self, stage: p.Stage, more: int, on: Options) -> Options:
        options, beats = on
        reluctant = stage.quantifier == "reluctant"
        new = set()
        if stage.quantifier != "each" and not self.preferred:
            new = {(other, more) if reluctant else (more, other) for other in options}
        return ([*options, more] if reluctant else [more, *options]), beats | new

    def options(self, path: Path) -> tuple[list[int], set[tuple[int, int]]]:
        if not path:
            return self.entering(0)
        number = path[-1][0]
        count = sum(1 for other, _ in path if other == number)
        stage = self.rule(number).stage
        if count < stage.times_min:
            return [number], set()
        on = self.entering(number + 1)
        if stage.times_max is not None and count >= stage.times_max:
            return on
        return self.chosen(stage, number, on)

    # Whether an option may take a row, on its own.

    def guards(self, path: Path, target: int) -> list[Rule]:
        start = self.taking[path[-1][0]] if path else -1
        end = len(self.rules) if target == END else self.taking[target]
        return (
            [rule for rule in self.rules[start + 1 : end] if rule.stage.negated]
            if not self.repeats(path, target)
            else []
        )

    def repeats(self, path: Path, target: int) -> bool:
        return bool(path) and path[-1][0] == target

    def can_take(self, path: Path, target: int, place: int) -> bool:
        rule, taken = self.rule(target), self.taken(path)
        last = path[-1][1]
        between = range(last + 1, place)
        follows = rule.stage.repeats if self.repeats(path, target) else rule.stage.follows
        if not self.in_time(path, place) or not rule.holds(self.rows[place], taken):
            return False
        if follows == "next" and place != last + 1:
            return False
        if follows == "then" and any(rule.holds(self.rows[at], taken) for at in between):
            return False
        if rule.until is not None and any(rule.until(self.rows[at], taken) for at in range(last + 1, place + 1)):
            return False
        return self.unguarded(path, target, between, last + 1)

    def unguarded(self, path: Path, target: int, between: range, following: int) -> bool:
        """Whether no row is one that must not be."""
        taken = self.taken(path)
        for guard in self.guards(path, target):
            if guard.stage.follows == "next":
                if (
                    following < len(self.rows)
                    and self.in_time(path, following)
                    and guard.holds(self.rows[following], taken)
                ):
                    return False
            elif any(guard.holds(self.rows[at], taken) for at in between):
                return False
        return True

    def in_time(self, path: Path, place: int) -> bool:
        return self.within is None or self.rows[place][1] - self.rows[path[0][1]][1] < self.within

    def plan_read(self, path: Path) -> range:
        """The places after a path that are in time."""
        last = path[-1][1]
        return range(
            last + 1, next((at for at in range(last + 1, len(self.rows)) if not self.in_time(path, at)), len(self.rows))
        )

    def takes_by(self, path: Path, target: int, place: int) -> bool:
        """Whether an option can take some row up to a place, or is the end and comes up to there."""
        last = path[-1][1]
        if target != END:
            return any(self.can_take(path, target, at) for at in range(last + 1, place + 1))
        guards = self.guards(path, END)
        if not guards:
            return True
        if any(guard.stage.follows == "then" for guard in guards):
            return False
        return place > last and self.unguarded(path, END, range(0), last + 1)

    def allowed(self, path: Path, target: int, place: int) -> bool:
        """Whether no option that beats this one could have been taken up to a place."""
        beats = self.options(path)[1]
        return not any(loser == target and self.takes_by(path, winner, place) for winner, loser in beats)

    # Paths

    def starts(self, start: int) -> Iterator[Path]:
        row = self.rows[start]
        options, beats = self.options([])
        fit = []
        for number in options:
            rule = self.rule(number)
            nothing = self.taken([])
            if rule.holds(row, nothing) and not (rule.until is not None and rule.until(row, nothing)):
                fit.append(number)
        for number in fit:
            if not any(loser == number and winner in fit for winner, loser in beats):
                yield [(number, start)]

    def paths(self, start: int) -> Iterator[Path]:
        """All partial matches from a row."""
        stack = list(self.starts(start))
        while stack:
            path = stack.pop()
            yield path
            for target in self.options(path)[0]:
                if target == END:
                    continue
                stack += [
                    [*path, (target, place)]
                    for place in self.plan_read(path)
                    if self.can_take(path, target, place) and self.allowed(path, target, place)
                ]

    def ends(self, path: Path) -> tuple[float, int] | None:
        """When a path is a whole match, as a place to compare by; None: it is none."""
        if END not in self.options(path)[0]:
            return None
        last, guards = path[-1][1], self.guards(path, END)
        if not guards:
            return (last, 0) if self.allowed(path, END, last) else None
        reach = self.plan_read(path)
        over = (float("inf"), 0)
        if any(guard.stage.follows == "then" for guard in guards):
            return (
                over if self.unguarded(path, END, reach, last + 1) and self.allowed(path, END, reach.stop - 1) else None
            )
        if not self.unguarded(path, END, range(0), last + 1):
            return None
        following = (last + 1, 0) if len(reach) else over
        return following if self.allowed(path, END, reach[0] if len(reach) else last) else None

    def preference(self, path: Path) -> list[tuple[int, int]]:
        key = [(self.options(path[:length])[0].index(number), place) for length, (number, place) in enumerate(path)]
        return [*key, (self.options(path)[0].index(END) if END in self.options(path)[0] else 99, 0)]

    def waits(self, path: Path) -> bool:
        """Whether a partial match still waits for a row when its time is over."""
        reach, last = self.plan_read(path), path[-1][1]
        if END in self.options(path)[0] and not self.guards(path, END):
            return False  # it was a match
        for target in self.options(path)[0]:
            if target == END:
                continue
            rule, taken = self.rule(target), self.taken(path)
            follows = rule.stage.repeats if self.repeats(path, target) else rule.stage.follows
            if follows == "next" and len(reach):
                continue
            if follows == "then" and any(self.can_take(path, target, at) for at in reach):
                continue
            if rule.until is not None and any(rule.until(self.rows[at], taken) for at in reach):
                continue
            if not self.unguarded(path, target, reach, last + 1):
                continue
            if not len(reach) or self.allowed(path, target, reach[-1]):
                return True
        return False


def oracle_run(step: p.Match, rules: Sequence[Rule], rows: Sequence[Row]) -> tuple[list[Path], list[Path]]:
    """All matches and all partial matches that timed out, of one key's rows in order."""
    oracle = Oracle(rules=rules, rows=rows, within=step.within_us, preferred=step.choose == "preferred")
    found: list[Path] = []
    timed_out: list[Path] = []
    free = 0
    for start in range(len(rows)):
        if start < free:
            continue
        paths = list(oracle.paths(start))
        whole = [(oracle.ends(path), oracle.preference(path), path) for path in paths]
        whole = [one for one in whole if one[0] is not None]
        left = [path for path in paths if oracle.within is not None and oracle.waits(path)]
        if step.skip == "none":
            found += [path for _, _, path in whole]
            late = any(end is not None and end[0] == float("inf") for end, _, _ in whole)
            timed_out += [] if late else left
            continue
        if whole:
            best = min(whole, key=lambda one: one[1] if step.choose == "preferred" else (one[0], one[1]))[2]
            found.append(best)
            free = max(free, goes_on(step, oracle, best))
        elif left:
            timed_out.append(min(left, key=lambda path: (-len(path), oracle.preference(path))))
    return found, timed_out


def goes_on(step: p.Match, oracle: Oracle, path: Path) -> int:
    if step.skip == "past_last":
        return path[-1][1] + 1
    if step.skip == "next":
        return 0
    places = [place for number, place in path if oracle.rule(number).stage.name == step.skip_to]
    return 0 if not places else places[0] if step.skip == "first" else places[-1]
