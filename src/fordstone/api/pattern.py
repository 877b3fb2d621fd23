"""Patterns as a pipeline declares them: stages in order, and how matches are emitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypedDict

import msgspec
from sqlglot import exp

from fordstone.api.column import Column, expression_source
from fordstone.errors import ExpressionError, PipelineError
from fordstone.lang.choices import check_word
from fordstone.lang.dialect import DIALECT, quoted_name
from fordstone.lang.duration import positive_us
from fordstone.lang.expression import split_alias
from fordstone.operators.match.check import tree_of
from fordstone.plan import plan as p

Condition = str | Column
Times = int | tuple[int, int | None]
Skip = Literal["none", "next", "past_last"] | tuple[Literal["first", "last"], str]


class MatchOptions(TypedDict, total=False):
    """How matches are emitted; see `Grouped.match`."""

    rows: Literal["one", "all"]
    skip: Skip
    choose: Literal["earliest", "preferred"]
    order: str | Sequence[str]
    limit: int
    name: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Pattern:
    """A sequence of rows to look for. Every method gives a new pattern, with one thing more.

    `Pattern("overheat").start("hot", "temp > 80").then("hotter", "temp > hot.temp", times=(2, None)).within("5s")`

    In a condition a bare column is of the row that is looked at, `hot.temp` is of the last row that stage `hot` took, and
    aggregates such as `avg(hot.temp)` are over all rows that it took so far.
    """

    name: str
    stages: tuple[p.Stage, ...] = ()
    within_us: int | None = None

    def start(self, name: str, condition: Condition | None = None, **how: Any) -> Pattern:
        """The first stage. Options are those of `then`."""
        if self.stages:
            raise PipelineError(
                f"pattern {self.name} already has a start; add the next stage with then, next or then_any."
            )
        return self._with(name, condition, "next", starts=True, **how)

    def then(self, name: str, condition: Condition | None = None, **how: Any) -> Pattern:
        """A stage whose first row comes later: rows that do not fulfil its condition may stand between.

        `times`: how many rows it takes: `3`, `(2, 4)`, or `(2, None)` without bound; `one_or_more=True` is `(1, None)`.
        `optional=True`: it may be left out. Its rows may have others between them, which do not fulfil the condition;
        `consecutive=True`: none; `combinations=True`: any, so that every choice of rows counts. `until`: a condition from
        whose first row on it takes no more. `greedy=True`: it is not left while it could take the row; `reluctant=True`:
        it takes no row with which it could be left.
        """
        return self._with(name, condition, "then", **how)

    def next(self, name: str, condition: Condition | None = None, **how: Any) -> Pattern:
        """A stage whose first row follows immediately. It takes the same options as `then`."""
        return self._with(name, condition, "next", **how)

    def then_any(self, name: str, condition: Condition | None = None, **how: Any) -> Pattern:
        """A stage whose first row comes later, whatever stands between: each row that fits is a match of its own."""
        return self._with(name, condition, "any", **how)

    def not_next(self, name: str, condition: Condition) -> Pattern:
        """The next row must not fulfil this. At the end of a pattern it needs `within`."""
        return self._add(p.Stage(name=name, predicate=_sql(condition), follows="next", negated=True))

    def not_followed_by(self, name: str, condition: Condition) -> Pattern:
        """No row before that of the next stage may fulfil this; at the end of a pattern: none until `within` is over."""
        return self._add(p.Stage(name=name, predicate=_sql(condition), follows="then", negated=True))

    def within(self, span: str | timedelta) -> Pattern:
        """The last row of a match comes less than this after its first."""
        return replace(self, within_us=positive_us(span, what=f"pattern {self.name}: within"))

    def _with(
        self,
        name: str,
        condition: Condition | None,
        follows: p.Contiguity,
        *,
        starts: bool = False,
        times: Times | None = None,
        one_or_more: bool = False,
        optional: bool = False,
        consecutive: bool = False,
        combinations: bool = False,
        greedy: bool = False,
        reluctant: bool = False,
        until: Condition | None = None,
    ) -> Pattern:
        where = f"pattern {self.name}: stage {name!r}"
        if not self.stages and not starts:
            raise PipelineError(f"{where} has none before it. Begin the pattern with start({name!r}, ...).")
        for both, options in (
            (greedy and reluctant, "greedy=True and reluctant=True"),
            (consecutive and combinations, "consecutive=True and combinations=True"),
        ):
            if both:
                raise PipelineError(f"{where}: {options} exclude each other. Drop one.")
        if one_or_more and times is not None:
            raise PipelineError(f"{where}: one_or_more=True is times=(1, None). Drop one of them.")
        least, most = _times((1, None) if one_or_more else 1 if times is None else times, where)
        return self._add(
            p.Stage(
                name=name,
                predicate=None if condition is None else _sql(condition),
                follows=follows,
                times_min=max(least, 1),
                times_max=most,
                optional=optional or least == 0,
                repeats="next" if consecutive else "any" if combinations else "then",
                quantifier="greedy" if greedy else "reluctant" if reluctant else "each",
                until=None if until is None else _sql(until),
            )
        )

    def _add(self, stage: p.Stage) -> Pattern:
        if not isinstance(stage.name, str) or not stage.name:
            raise PipelineError(f"pattern {self.name}: a stage has a name, not {stage.name!r}.")
        return replace(self, stages=(*self.stages, stage))

    def __repr__(self) -> str:
        return f"Pattern({self.name}: {', '.join(stage.name for stage in self.stages)})"


def match_step(
    named: str,
    given: p.Input,
    keys: tuple[str, ...],
    pattern: Pattern,
    measures: Mapping[str, Condition],
    options: MatchOptions,
) -> p.Match:
    """The step of `match(...)`."""
    if not isinstance(pattern, Pattern):
        raise PipelineError(f"step {named}: {pattern!r} is not a pattern. Write Pattern('name').start(...).")
    if not isinstance(measures, Mapping):
        raise PipelineError(
            f"step {named}: measures={measures!r} must name a column for each expression, as in measures={{'peak': 'max(b.temp)'}}."
        )
    if not pattern.stages:
        raise PipelineError(f"step {named}: pattern {pattern.name} has no stages. Begin it with start(...).")
    skip = options.get("skip", "past_last")
    kind, to = skip if isinstance(skip, tuple) and len(skip) == 2 else (skip, None)  # noqa: PLR2004 - a word and a name
    order = options.get("order", ())
    rows = options.get("rows", "one")
    for what, value, known in (
        ("rows", rows, ("one", "all")),
        ("choose", options.get("choose", "earliest"), ("earliest", "preferred")),
        ("skip", kind, ("none", "next", "past_last", "first", "last")),
    ):
        check_word(what, value, known, where=f"step {named}: ", error=PipelineError)
    try:
        return msgspec.convert(
            {
                "op": "match",
                "name": named,
                "input": msgspec.to_builtins(given),
                "keys": keys,
                "pattern": pattern.name,
                "stages": msgspec.to_builtins(pattern.stages),
                "within_us": pattern.within_us,
                "skip": kind,
                "skip_to": to,
                "choose": options.get("choose", "earliest"),
                "measures": [_measure(name, sql) for name, sql in measures.items()],
                "all_rows": rows == "all",
                "partial_matches_max": options.get("limit", 10_000),
                "order": (order,) if isinstance(order, str) else tuple(order),
            },
            p.Match,
        )
    except msgspec.ValidationError as error:
        raise PipelineError(f"step {named}: pattern {pattern.name}: {error}.") from None


def _measure(name: str, source: Condition) -> str:
    """A measure with its name, as it stands in a plan."""
    tree, text = tree_of(expression_source(source))
    body, alias = split_alias(tree)
    if alias is not None and alias != name:
        raise ExpressionError(f"the column is called {name!r} and also AS {alias}; drop one.", text=text)
    return f"{_written(body)} AS {quoted_name(name)}"


def _sql(source: Condition) -> str:
    return _written(tree_of(expression_source(source))[0])


def _written(tree: exp.Expr) -> str:
    """A tree as text: names in quotes where they need them, and only there."""
    for name in tree.find_all(exp.Identifier):
        name.set("quoted", quoted_name(name.name) != name.name)
    return tree.sql(dialect=DIALECT, normalize_functions=False)


def _times(times: Times, where: str) -> tuple[int, int | None]:
    least, most = times if isinstance(times, tuple) and len(times) == 2 else (times, times)  # noqa: PLR2004 - least and most
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (least, 0 if most is None else most))
    if not whole or least < 0 or (most is not None and most < 1):
        raise PipelineError(f"{where}: times={times!r}: write how many rows it takes, such as 3, (2, 4) or (2, None).")
    return least, most
