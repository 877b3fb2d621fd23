"""Patterns against a matcher that tries every choice of rows; whatever the batches, barriers, restores and subtasks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import polars as pl
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.operators.pattern_oracle import Judge, Row, Rule, oracle_run
from tests.operators.pattern_rows import STREAM, frame
from tests.operators.subtasks import Subtasks, events_of, rank

from fordstone.errors import PipelineError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.base import Moment
from fordstone.operators.match.check import derive_match
from fordstone.operators.match.step import TIMEOUT, MatchRows
from fordstone.plan import plan as p
from fordstone.state.base import Table
from fordstone.state.memory import IN_MEMORY

MEASURES = (
    "count(*) AS n",
    "first(x) AS fx",
    "last(name) AS ln",
    "sum(x) AS total",
    "first(ts) AS since",
    "last(ts) AS till",
)


def letters(names: str) -> tuple[str, Judge]:
    return f"name IN ({', '.join(repr(one) for one in names)})", lambda row, _: row[2] in names


def above_last(stage: str, names: str) -> tuple[str, Judge]:
    def judge(row: Row, taken: dict[str, list[Row]]) -> bool:
        last = taken[stage][-1][3] if taken[stage] else None
        return row[2] in names and last is not None and row[3] is not None and row[3] > last

    return f"x > {stage}.x AND {letters(names)[0]}", judge


def below_sum(stage: str) -> tuple[str, Judge]:
    def judge(row: Row, taken: dict[str, list[Row]]) -> bool:
        known = [other[3] for other in taken[stage] if other[3] is not None]
        return row[3] is not None and row[3] <= (sum(known) if known else 1)

    return f"x <= coalesce(sum({stage}.x), 1)", judge


def few_yet(most: int) -> tuple[str, Judge]:
    return (
        f"count(*) < {most} AND x IS NOT NULL",
        lambda row, taken: sum(map(len, taken.values())) < most and row[3] is not None,
    )


@st.composite
def stages(draw: Any, *, preferred: bool) -> list[Rule]:
    names = "pqrs"[: draw(st.integers(1, 4))]
    found: list[Rule] = []
    taking: list[tuple[str, bool]] = []
    for at, name in enumerate(names):
        negated = not preferred and at > 0 and not found[-1].stage.negated and draw(st.integers(0, 4)) == 0
        least = 1 if negated else draw(st.sampled_from([1, 1, 1, 2]))
        most = 1 if negated else draw(st.sampled_from([least, least, least + 1, 3, None]))
        many = most != 1
        options = [letters(names) for names in ("abc", "abc", "ab", "bc", "a", "b", "c")] + [few_yet(3)]
        options += [above_last(other, "abc") for other, _ in taking] + [below_sum(other) for other, _ in taking]
        if many and not negated:
            options += [below_sum(name)]
        sql, holds = draw(st.sampled_from(options))
        until = draw(st.sampled_from([None, None, letters("c")])) if many and not negated else None
        contiguity = (
            st.just("next") if preferred and draw(st.booleans()) else st.sampled_from(["next", "then", "then", "any"])
        )
        follows = draw(st.sampled_from(["next", "then"])) if negated else draw(contiguity)
        stage = p.Stage(
            name=name,
            predicate=sql,
            follows=follows,
            times_min=least,
            times_max=most,
            optional=not negated and draw(st.integers(0, 3)) == 0,
            repeats=draw(contiguity),
            quantifier=draw(st.sampled_from(["each", "greedy", "reluctant"])),
            negated=negated,
            until=None if until is None else until[0],
        )
        found.append(Rule(stage, holds, None if until is None else until[1]))
        if not negated:
            taking.append((name, many))
    return found


@st.composite
def patterns(draw: Any) -> tuple[p.Match, list[Rule]]:
    preferred = draw(st.booleans())
    rules = draw(stages(preferred=preferred))
    names = [rule.stage.name for rule in rules if not rule.stage.negated]
    skips = ["next", "past_last", "first", "last"] + ([] if preferred else ["none", "none"])
    skip = draw(st.sampled_from(skips))
    step = p.Match(
        name="m",
        input=p.Input("rows"),
        keys=("k",),
        pattern="m",
        stages=tuple(rule.stage for rule in rules),
        within_us=draw(st.sampled_from([None, 2, 3, 5, 50])),
        skip=skip,
        skip_to=draw(st.sampled_from(names)) if skip in {"first", "last"} else None,
        choose="preferred" if preferred else "earliest",
        measures=MEASURES,
        order=("name", "x"),
    )
    return step, rules


rows_of_any_kind = st.tuples(
    st.sampled_from(["k", "k", "k", "é", None]),
    st.integers(0, 9),
    st.sampled_from("aabbcdd"),
    st.sampled_from([None, 0.0, 1.0, 2.0, 3.0]),
)
rows_of_one_key = st.tuples(
    st.just("k"), st.integers(0, 9), st.sampled_from("aabbcdd"), st.sampled_from([None, 0.0, 1.0, 2.0, 3.0])
)
events = events_of(st.lists(rows_of_any_kind, min_size=3, max_size=9), steps=(9, 1, 2, 3), most=9)


def allowed(step: p.Match) -> bool:
    try:
        derive_match(step, {p.Input("rows"): STREAM})
    except PipelineError:
        return False
    return True


def expected(step: p.Match, rules: list[Rule], rows: list[Row]) -> tuple[Counter[Any], Counter[Any]]:
    main: Counter[Any] = Counter()
    timed_out: Counter[Any] = Counter()
    for key in {row[0] for row in rows}:
        mine = sorted((row for row in rows if row[0] == key), key=lambda row: (row[1], rank(row[2]), rank(row[3])))
        names = [rule.stage.name for rule in rules if not rule.stage.negated]
        for paths, out, timeout in zip(oracle_run(step, rules, mine), (main, timed_out), (False, True), strict=True):
            for path in paths:
                taken = [mine[place] for _, place in path]
                known = [row[3] for row in taken if row[3] is not None]
                measures = (
                    len(taken),
                    taken[0][3],
                    taken[-1][2],
                    sum(known) if known else None,
                    taken[0][1],
                    taken[-1][1],
                )
                said = (taken[0][1], ", ".join(dict.fromkeys(names[number] for number, _ in path))) if timeout else ()
                out[(key, *said, *measures)] += 1
    return main, timed_out


def shown(frames: list[pl.DataFrame]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for one in frames:
        found.update(one.with_columns(pl.col(pl.Datetime).cast(pl.Int64)).iter_rows())
    return found


@examples(150)
@given(pattern=patterns(), rows=st.lists(rows_of_one_key, min_size=4, max_size=9))
def test_matches_are_those_that_trying_every_choice_of_rows_finds(pattern, rows):
    step, rules = pattern
    assume(allowed(step))
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    operator.on_batch(frame(rows), late=False)
    emits = operator.on_watermark(TIME_MAX_US)
    main, timed_out = expected(step, rules, rows)
    assert shown([emit.frame for emit in emits if emit.port == "main"]) == main
    assert shown([emit.frame for emit in emits if emit.port == TIMEOUT]) == timed_out
    operator.on_barrier(Moment(now_us=1, before_us=0))
    table = operator.states()["open"]
    assert isinstance(table, Table)
    assert len(table) == 0


@examples(60)
@given(
    pattern=patterns(),
    happens=events,
    all_rows=st.booleans(),
    own_row=st.booleans(),
    limit=st.sampled_from([2, 5, 10_000, 10_000]),
)
def test_matches_do_not_depend_on_batches_watermarks_barriers_restores_and_subtasks(
    pattern, happens, all_rows, own_row, limit
):
    asked = (*MEASURES, "match_time() AS at", "match_number() AS number", "final(classifier()) AS ended")
    named = asked if not all_rows else tuple(text.replace(" AS ", " AS m_") for text in asked)
    step = msgspec.structs.replace(
        pattern[0], measures=named, all_rows=all_rows, own_row=own_row, partial_matches_max=limit
    )
    assume(allowed(step))
    subtasks = Subtasks(make=lambda: MatchRows(step, STREAM, state=IN_MEMORY), frame=frame)
    happened = subtasks.live_through(happens)
    for watermark_us in (subtasks.watermark_us, TIME_MAX_US):
        if watermark_us == TIME_MAX_US:
            subtasks.watermark(watermark_us)
        at_once = MatchRows(step, STREAM, state=IN_MEMORY)
        if happened.taken:
            at_once.on_batch(frame(happened.taken), late=False)
        emits = at_once.on_watermark(watermark_us) if watermark_us > TIME_MIN_US else []
        for port in ("main", TIMEOUT):
            wanted = shown([emit.frame for emit in emits if emit.port == port])
            assert shown(subtasks.ports.get(port, [])) == wanted
    assert sum(one.height for one in subtasks.late) == len(happened.late)
