"""What patterns cost on long streaks, that saving it decides nothing, and times and spans at the edge of what there is."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import polars as pl
import pytest
from tests.operators.pattern_rows import STREAM, frame, of, run, step_of

from fordstone.api.pattern import Pattern
from fordstone.errors import FordstoneError, PipelineError
from fordstone.lang.duration import TIME_MAX_US
from fordstone.operators.base import Moment
from fordstone.operators.match import matcher as match_start
from fordstone.operators.match import matcher as matching
from fordstone.operators.match.check import derive_match
from fordstone.operators.match.matcher import Transitions
from fordstone.operators.match.step import MatchRows
from fordstone.plan import plan as p
from fordstone.state.memory import IN_MEMORY

MEASURES = {"n": "count(*)", "f": "first(x)", "l": "last(x)", "m": "match_number()", "t": "match_time()"}


def stage(name: str, predicate: str | None, **more: Any) -> p.Stage:
    given: dict[str, Any] = {"follows": "next", "repeats": "next", "quantifier": "greedy", **more}
    return p.Stage(name=name, predicate=predicate, **given)


def as_in_sql(*stages: p.Stage, **more: Any) -> p.Match:
    """A step as MATCH_RECOGNIZE makes it."""
    base = step_of(Pattern("p").start("a", of("a")).then("b", of("b")), MEASURES)
    given = {"choose": "preferred", "own_row": True, "skip": "past_last", **more}
    step = msgspec.structs.replace(base, stages=stages, **given)
    derive_match(step, {p.Input("rows"): STREAM})
    return step


@pytest.mark.parametrize("quantifier", ["greedy", "reluctant"])
def test_a_long_streak_that_comes_to_nothing_costs_each_row_a_few_looks(quantifier):
    step = as_in_sql(stage("a", of("a"), times_max=None, quantifier=quantifier), stage("b", of("b")))
    rows = [("k", at, "a", 0.0) for at in range(1_000)] + [("k", 1_000, "c", 0.0)]
    with patch.object(Transitions, "offer", autospec=True, side_effect=Transitions.offer) as offered:
        assert run(step, rows) == {}
    assert offered.call_count < 2 * matching.STRIDE * len(rows)


def test_a_streak_that_stages_may_part_anywhere_has_no_thread_for_each_way():
    step = as_in_sql(
        stage("a", of("a"), times_max=None), stage("a2", of("a"), times_max=None), stage("b", of("b")), within_us=10**6
    )
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    operator.on_batch(frame([("k", at, "a", 0.0) for at in range(300)]), late=False)
    operator.on_watermark(300)
    (matcher,) = operator._open.values()
    assert len(matcher.candidates[0].threads) <= match_start.FEW_THREADS


def any_step(random: Random) -> p.Match:
    """A pattern of any kind, of those that make sense."""
    contiguity = random.choice([["next"], ["next", "then"], ["then"], ["next", "then", "any"]])
    row, past = [of("a"), of("b"), of("ab"), of("c"), None, "x > 3"], ["x > s0.x", "x > first(s0.x)", "count(s0.*) > 1"]
    while True:
        stages = []
        for at in range(random.randint(2, 4)):
            least, most = random.choice([1, 1, 2]), random.choice([1, None, None, 3])
            stages.append(
                stage(
                    f"s{at}",
                    random.choice(past if at and random.random() < 0.3 else row),
                    follows=random.choice(contiguity) if at else "next",
                    repeats=random.choice(contiguity),
                    times_min=least,
                    times_max=None if most is None else max(least, most),
                    optional=random.random() < 0.25,
                    quantifier=random.choice(["greedy", "reluctant", "each"]),
                )
            )
        skip = random.choice(["past_last", "next", "first", "last"])
        try:
            return as_in_sql(
                *stages,
                choose=random.choice(["preferred", "preferred", "earliest"]),
                own_row=random.random() < 0.5,
                skip=skip,
                skip_to=random.choice(["s0", "s1"]) if skip in {"first", "last"} else None,
                within_us=random.choice([None, 3, 8, 30]),
                partial_matches_max=3_000,
            )
        except FordstoneError:
            continue


def found_of(step: p.Match, rows: list[tuple[Any, ...]], *, merges: bool) -> list[Any] | None:
    """What comes out on each port; None: candidates were dropped, and which ones may differ."""
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    operator._transitions.merges &= merges
    emits = operator.on_batch(frame(rows), late=False)
    for watermark_us in (3, 6, TIME_MAX_US):
        emits += operator.on_watermark(watermark_us)
    if operator._dropped:
        return None
    return sorted((emit.port, repr(row)) for emit in emits for row in emit.frame.rows())


@pytest.mark.parametrize("seed", range(8))
def test_threads_that_stand_alike_are_as_good_as_one(seed, monkeypatch):
    monkeypatch.setattr(match_start, "FEW_THREADS", 1)
    monkeypatch.setattr(matching, "STRIDE", 1 + seed % 3)
    random = Random(seed)
    for _ in range(12):
        step = any_step(random)
        letters, time_us, rows = random.choice(["aab", "abc", "aaaaab"]), 0, []
        for _ in range(random.randint(4, 11)):
            time_us += random.choice([0, 1, 1, 2])
            rows.append(("k", time_us, random.choice(letters), float(random.randint(0, 9))))
        plain = found_of(step, rows, merges=False)
        if plain is not None:
            assert found_of(step, rows, merges=True) == plain, (step, rows)


@pytest.mark.parametrize("within_us", [2**62, 2**63 - 1, 2**70])
def test_a_span_after_which_there_is_no_time_is_refused(within_us):
    with pytest.raises(PipelineError, match="within must be"):
        as_in_sql(stage("a", of("a")), stage("b", of("b")), within_us=within_us)


def test_a_candidate_near_the_end_of_time_is_kept_and_times_out_at_the_end():
    step = as_in_sql(stage("a", of("a")), stage("b", of("b")), within_us=10**6)
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    last = pl.Series("ts", [TIME_MAX_US - 9], dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
    operator.on_batch(frame([("k", 0, "a", 0.0)]).with_columns(last), late=False)
    operator.on_watermark(TIME_MAX_US - 5)
    operator.on_barrier(Moment(now_us=1, before_us=0))
    (emit,) = operator.on_watermark(TIME_MAX_US)
    assert emit.port == "timeout"
    assert emit.frame["t"].cast(pl.Int64).to_list() == [TIME_MAX_US]
