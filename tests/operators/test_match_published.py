"""Examples that the documentation of other engines gives for patterns: described inputs, described results."""

from __future__ import annotations

import pytest
from tests.operators.pattern_rows import matches, of, timeouts

from fordstone.api.pattern import Pattern


def pattern(**how):
    """An `a`, then any one or more `b`s (which follow each other as `how` says), then a `c`."""
    return (
        Pattern("p").start("a", of("a")).then_any("b", of("b"), one_or_more=True, **how).then("c", of("c")).within("1h")
    )


# How stages follow each other: a c b1 b2


def two(follow: str) -> Pattern:
    found: Pattern = getattr(Pattern("p").start("a", of("a")), follow)("b", of("b"))
    return found


@pytest.mark.parametrize(("follow", "found"), [("next", []), ("then", ["a b1"]), ("then_any", ["a b1", "a b2"])])
def test_a_pair_is_found_as_its_contiguity_says(follow, found):
    assert matches(two(follow), "a c b1 b2", skip="none") == found


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ({"consecutive": True}, ["a b1 c", "a b2 c", "a b3 c"]),
        ({}, ["a b1 b2 b3 c", "a b1 b2 c", "a b1 c", "a b2 b3 c", "a b2 c", "a b3 c"]),
        ({"combinations": True}, ["a b1 b2 b3 c", "a b1 b2 c", "a b1 b3 c", "a b1 c", "a b2 b3 c", "a b2 c", "a b3 c"]),
    ],
)
def test_rows_of_a_loop_follow_each_other_as_declared(how, found):
    assert matches(pattern(**how), "a b1 d1 b2 d2 b3 c", skip="none") == found


def loop(**how):
    return Pattern("p").start("c", of("c")).then("a", of("a"), **how).then("b", of("b")).within("1h")


def test_consecutive_rows_of_a_loop_end_where_another_row_comes():
    word = "c d a1 a2 a3 d2 a4 b"
    found = matches(loop(one_or_more=True, consecutive=True), word, skip="none")
    assert found == ["c a1 a2 a3 b", "c a1 a2 b", "c a1 b"]
    relaxed = matches(loop(one_or_more=True), word, skip="none")
    assert relaxed == ["c a1 a2 a3 a4 b", "c a1 a2 a3 b", "c a1 a2 b", "c a1 b"]


def test_combinations_of_a_loop_leave_out_rows_that_would_fit():
    found = matches(loop(one_or_more=True, combinations=True), "c d a1 a2 a3 d2 a4 b", skip="none")
    assert found == sorted(
        [
            "c a1 b",
            "c a1 a2 b",
            "c a1 a3 b",
            "c a1 a4 b",
            "c a1 a2 a3 b",
            "c a1 a2 a4 b",
            "c a1 a3 a4 b",
            "c a1 a2 a3 a4 b",
        ]
    )


def test_a_loop_takes_no_rows_from_its_until_on():
    one = Pattern("p").start("a", of("a"), one_or_more=True, until=of("b"))
    assert matches(one, "a1 c a2 b a3", skip="none") == ["a1", "a1 a2", "a2", "a3"]


# Where to go on after a match


def bs(**how):
    return Pattern("p").start("b", of("b"), one_or_more=True, consecutive=True, **how).next("c", of("c"))


@pytest.mark.parametrize(
    ("skip", "found"),
    [
        ("none", ["b1 b2 b3 c", "b2 b3 c", "b3 c"]),
        ("next", ["b1 b2 b3 c", "b2 b3 c", "b3 c"]),
        ("past_last", ["b1 b2 b3 c"]),
        (("first", "b"), ["b1 b2 b3 c", "b2 b3 c", "b3 c"]),
        (("last", "b"), ["b1 b2 b3 c", "b3 c"]),
    ],
)
def test_after_a_match_it_goes_on_where_skip_says(skip, found):
    assert matches(bs(), "b1 b2 b3 c", skip=skip) == found


@pytest.mark.parametrize(
    ("skip", "found"),
    [
        ("none", ["a b c1 c2 c3 d", "b c1 c2 c3 d", "c1 c2 c3 d"]),
        (("first", "c"), ["a b c1 c2 c3 d", "c1 c2 c3 d"]),
    ],
)
def test_matches_that_began_before_the_stage_skipped_to_are_left_out(skip, found):
    three = (
        Pattern("p").start("s", of("abc")).next("m", of("bc")).next("c", of("c"), one_or_more=True, consecutive=True, greedy=True)
        .next("d", of("d"))
    )  # fmt: skip
    assert matches(three, "a b c1 c2 c3 d", skip=skip) == found


@pytest.mark.parametrize(("skip", "found"), [("none", ["a b1", "a b1 b2", "a b1 b2 b3"]), ("next", ["a b1"])])
def test_one_first_row_has_one_match_unless_all_count(skip, found):
    ab = Pattern("p").start("a", of("a")).then("b", of("b"), one_or_more=True).within("1h")
    assert matches(ab, "a b1 b2 b3", skip=skip) == found


# Greedy


def test_a_greedy_loop_is_not_left_while_it_could_take_more():
    greedy = (
        Pattern("p")
        .start("c", of("c"))
        .then("a", of("a"), one_or_more=True, greedy=True)
        .then("d", of("d"))
        .within("1h")
    )
    assert matches(greedy, "c a1 a2 a3 d", skip="none") == ["c a1 a2 a3 d"]
    each = Pattern("p").start("c", of("c")).then("a", of("a"), one_or_more=True).then("d", of("d")).within("1h")
    assert matches(each, "c a1 a2 a3 d", skip="none") == ["c a1 a2 a3 d", "c a1 a2 d", "c a1 d"]


# Negation


def test_a_row_that_must_not_come_ends_the_match():
    absent = Pattern("p").start("a", of("a")).not_followed_by("n", of("b")).then("c", of("c"))
    assert matches(absent, "a1 b a2 d c", skip="none") == ["a2 c"]
    assert matches(absent, "a1 d c b", skip="none") == ["a1 c"]


def test_not_next_looks_at_one_row():
    absent = Pattern("p").start("a", of("a")).not_next("n", of("b")).then("c", of("c"))
    assert matches(absent, "a1 b c", skip="none") == []
    assert matches(absent, "a1 d b c", skip="none") == ["a1 c"]


def test_at_the_end_nothing_may_come_until_time_is_over():
    silent = Pattern("p").start("a", of("a")).not_followed_by("n", of("b")).within("10us")
    assert matches(silent, "a1@0 b@5 a2@20 b@30 a3@40", skip="none") == ["a2", "a3"]
    assert timeouts(silent, "a1@0 b@5 a2@20") == []


# Time


def test_what_is_not_complete_in_time_is_given_as_it_is():
    abc = Pattern("p").start("a", of("a")).then("b", of("b")).then("c", of("c")).within("10us")
    assert matches(abc, "a@0 b@3 c@9", skip="none") == ["a b c"]
    assert matches(abc, "a@0 b@3 c@10", skip="none") == []
    assert timeouts(abc, "a@0 b@3 c@10 a@20") == [(0, "a, b"), (20, "a")]
