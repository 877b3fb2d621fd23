from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests.api.sql_runs import pipeline, rows_of

from fordstone import Pipeline
from fordstone.connectors import memory
from fordstone.lang.sql.syntax import SqlError
from fordstone.plan import plan as p

PRICES = [12, 17, 19, 21, 25, 18, 15, 14, 24, 25, 19]
"""One a second, of one symbol."""


def ticker() -> Pipeline:
    made = Pipeline("ticker")
    rows = [("ACME", f"2026-01-01T10:00:{at:02}Z", price, at % 3 + 1) for at, price in enumerate(PRICES)]
    schema = {"symbol": "string", "rowtime": "timestamp", "price": "int", "tax": "int"}
    made.source("ticker", memory([rows]), schema=schema, time="rowtime", lateness="5s")
    return made


def matches(body: str) -> list[tuple[Any, ...]]:
    return rows_of(ticker().sql(f"SELECT * FROM ticker MATCH_RECOGNIZE (PARTITION BY symbol ORDER BY rowtime {body})"))


def step_of(body: str) -> p.Match:
    made = ticker()
    made.sql(f"SELECT * FROM ticker MATCH_RECOGNIZE (PARTITION BY symbol ORDER BY rowtime {body})")
    step = made._graph.steps[-1]
    assert isinstance(step, p.Match)
    return step


def test_a_falling_price_and_its_rise():
    found = matches("""
        MEASURES START_ROW.rowtime AS start_at, LAST(DOWN.rowtime) AS bottom_at, LAST(UP.price) AS end_price
        ONE ROW PER MATCH
        AFTER MATCH SKIP TO LAST UP
        PATTERN (START_ROW DOWN+ UP)
        DEFINE
            DOWN AS (LAST(DOWN.price, 1) IS NULL AND DOWN.price < START_ROW.price) OR DOWN.price < LAST(DOWN.price, 1),
            UP AS UP.price > LAST(DOWN.price, 0)
    """)
    assert found == [("ACME", "10:00:04", "10:00:07", 24)]


def test_an_average_of_the_rows_so_far():
    found = matches("""
        MEASURES FIRST(A.rowtime) AS start_at, LAST(A.rowtime) AS end_at, AVG(A.price) AS mean, COUNT(A.*) AS n
        ONE ROW PER MATCH
        AFTER MATCH SKIP PAST LAST ROW
        PATTERN (A+ B)
        DEFINE A AS AVG(A.price) < 15
    """)
    assert found == [("ACME", "10:00:00", "10:00:01", 14.5, 2), ("ACME", "10:00:07", "10:00:07", 14.0, 1)]


def test_greedy_and_reluctant():
    body = "MEASURES FIRST(A.price) AS a, COUNT(A.*) AS n, C.price AS c PATTERN (A B{quantifier} C) DEFINE A AS price = 12, B AS price < 22, C AS price > 18"
    assert matches(body.replace("{quantifier}", "*")) == [("ACME", 12, 1, 25)]
    assert matches(body.replace("{quantifier}", "*?")) == [("ACME", 12, 1, 19)]


def test_all_rows_of_a_match():
    found = rows_of(
        ticker().sql("""
            SELECT price, c, top, so_far FROM ticker MATCH_RECOGNIZE (
                PARTITION BY symbol ORDER BY rowtime
                MEASURES CLASSIFIER() AS c, FINAL LAST(UP.price) AS top, COUNT(UP.*) AS so_far
                ALL ROWS PER MATCH
                PATTERN (LOW UP{2})
                DEFINE LOW AS price = 14, UP AS price > 20
            ) AS m
        """)
    )
    assert found == [(14, "LOW", 25, 0), (24, "UP", 25, 1), (25, "UP", 25, 2)]


def test_after_match_skip():
    body = "MEASURES A.price AS a, B.price AS b {skip} PATTERN (A B) DEFINE B AS B.price > A.price"
    past = matches(body.replace("{skip}", ""))
    assert past == matches(body.replace("{skip}", "AFTER MATCH SKIP PAST LAST ROW"))
    assert past == [("ACME", 12, 17), ("ACME", 14, 24), ("ACME", 19, 21)]
    following = matches(body.replace("{skip}", "AFTER MATCH SKIP TO NEXT ROW"))
    assert following == sorted(("ACME", a, b) for a, b in pairwise(PRICES) if b > a)
    assert following == matches(body.replace("{skip}", "AFTER MATCH SKIP TO FIRST B"))
    assert following == matches(body.replace("{skip}", "AFTER MATCH SKIP TO B"))


def test_within_bounds_the_time_of_a_match():
    body = "MEASURES A.price AS a, B.price AS b PATTERN (A M* B) WITHIN INTERVAL '3' SECOND DEFINE A AS price = {a}, M AS price > 13, B AS price = {b}"
    assert matches(body.replace("{a}", "12").replace("{b}", "19")) == [("ACME", 12, 19)]
    assert matches(body.replace("{a}", "12").replace("{b}", "21")) == []


def test_quantifiers_become_those_of_the_plan():
    body = "MEASURES COUNT(*) AS n PATTERN (A B* C+ D? E{2} F{2,3}? G{2,} H{,4} I??) WITHIN INTERVAL '1' MINUTE"
    found = [
        (stage.name, stage.times_min, stage.times_max, stage.optional, stage.quantifier)
        for stage in step_of(body).stages
    ]
    assert found == [
        ("A", 1, 1, False, "greedy"),
        ("B", 1, None, True, "greedy"),
        ("C", 1, None, False, "greedy"),
        ("D", 1, 1, True, "greedy"),
        ("E", 2, 2, False, "greedy"),
        ("F", 2, 3, False, "reluctant"),
        ("G", 2, None, False, "greedy"),
        ("H", 1, 4, True, "greedy"),
        ("I", 1, 1, True, "reluctant"),
    ]


def test_variables_are_the_same_in_any_case_and_columns_are_not():
    step = step_of(
        "MEASURES last(b.price) AS x PATTERN (A B) AFTER".replace(" AFTER", "") + " DEFINE b AS B.price > a.price"
    )
    assert step.stages[1].predicate == "B.price > A.price"
    assert step.measures == ("last(B.price) AS x",)


def test_rows_of_one_time_are_ordered_by_further_columns():
    made = ticker()
    made.sql(
        "SELECT * FROM ticker t MATCH_RECOGNIZE (ORDER BY t.rowtime ASC, tax, price MEASURES A.price AS x PATTERN (A))"
    )
    step = made._graph.steps[-1]
    assert isinstance(step, p.Match)
    assert (step.keys, step.order) == ((), ("tax", "price"))


def test_matches_are_a_table_like_any_other():
    found = rows_of(
        ticker().sql("""
            SELECT m.symbol, m.b - m.a AS rise FROM (SELECT * FROM ticker WHERE price < 25) MATCH_RECOGNIZE (
                PARTITION BY symbol ORDER BY rowtime MEASURES A.price AS a, B.price AS b PATTERN (A B)
                DEFINE B AS B.price > A.price + 4
            ) AS m WHERE m.b > 20
        """)
    )
    assert found == [("ACME", 10)]


MISTAKES = [
    ("PATTERN (A | B)", "alternatives (|) are not supported", "|"),
    ("PATTERN (A (B C)+)", "groups are not supported", "(B"),
    ("PATTERN (A {- B -})", "exclusions ({- -}) are not supported", "{-"),
    ("PATTERN (PERMUTE(A, B))", "PERMUTE is not supported", "PERMUTE"),
    ("PATTERN (^ A)", "anchors (^) are not supported", "^"),
    ("PATTERN (A $)", "anchors ($) are not supported", "$"),
    ("PATTERN ()", "the pattern is empty", ""),
    ("PATTERN (+ A)", "has nothing to repeat", "+"),
    ("PATTERN (A*+ B)", "one quantifier follows another", "+"),
    ("PATTERN (A{3,2} B)", "this repetition is impossible", "{3,2}"),
    ("PATTERN (A{} B)", "a number is missing between these braces", "{}"),
    ("PATTERN (A{,} B)", "a number is missing between these braces", "{,}"),
    ("PATTERN (A{1000001} B)", "at most 1,000,000 rows", "{1000001}"),
    ("PATTERN (A{x} B)", ", was expected here", "x}"),
    ("PATTERN (A B A)", "A stands twice in the pattern", "A)"),
    ("PATTERN (A, B)", "separated by blanks", ", B"),
    ("PATTERN (A* B?)", "every stage is optional", "A*"),
    ("PATTERN (A+ B)", "never ends", "A+"),
    ("PATTERN (A B", ") was expected here", ""),
    ("PATTERN (A B) SUBSET S = (A, B)", "SUBSET is not supported", "SUBSET"),
    ("PATTERN (A B) WITHIN 5", "an interval is needed here", "5"),
    ("PATTERN (A B) DEFINE C AS price > 1", "C is not in the pattern. Its variables are A, B.", "C AS"),
    ("PATTERN (A B) DEFINE B AS X.price > 1", "X is not in the pattern", "X.price"),
    ("PATTERN (A B) DEFINE B AS B.prize > 1", "there is no column 'prize'. Did you mean 'price'?", "prize"),
    ("PATTERN (A B) DEFINE B AS price", "a condition is needed here", "price"),
    ("PATTERN (A B) DEFINE B AS PREV(B.price) > 1", "PREV is not supported. Write LAST(A.x, 1)", "PREV"),
    ("PATTERN (A B) DEFINE A AS A.price > B.price", "'B' comes after 'A'", "B.price"),
    ("PATTERN (A B) DEFINE B AS price > 1, b AS price > 2", "b is defined twice", "b AS"),
    ("AFTER MATCH SKIP TO LAST C PATTERN (A B)", "C is not in the pattern", "C PATTERN"),
    ("MEASURES A.price PATTERN (A B)", "a measure needs a name", "A.price"),
    ("MEASURES A.price AS symbol PATTERN (A B)", "'symbol' is given twice", "A B"),
    ("MEASURES A.prize AS x PATTERN (A B)", "there is no column 'prize'", "prize"),
    ("ALL ROWS PER MATCH SHOW EMPTY MATCHES PATTERN (A B)", "takes no options here", "SHOW"),
    ("DEFINE A AS price > 1", "PATTERN was expected here", "DEFINE"),
]


@pytest.mark.parametrize(("body", "message", "under"), MISTAKES)
def test_a_pattern_that_cannot_be_is_refused_with_its_place(body: str, message: str, under: str):
    if "MEASURES" not in body and body.startswith("PATTERN"):
        body = f"MEASURES COUNT(*) AS n {body}"
    query = f"SELECT * FROM ticker MATCH_RECOGNIZE (PARTITION BY symbol ORDER BY rowtime {body})"
    with pytest.raises(SqlError) as caught:
        ticker().sql(query)
    assert message in caught.value.message, str(caught.value)
    if under:
        assert caught.value.offset == query.index(under, query.index("rowtime")), str(caught.value)


@pytest.mark.parametrize(
    ("head", "message", "under"),
    [
        ("PARTITION BY symbol", "ORDER BY is missing", "MEASURES"),
        ("PARTITION BY symbol ORDER BY price", "ORDER BY begins with rowtime", "price"),
        ("PARTITION BY symbol ORDER BY rowtime DESC", "rows are taken in order of time", "DESC"),
        ("PARTITION BY lower(symbol) ORDER BY rowtime", "PARTITION BY names columns here", "lower"),
        ("PARTITION BY nope ORDER BY rowtime", "there is no column 'nope'", "nope"),
    ],
)
def test_partition_and_order_that_cannot_be_are_refused(head: str, message: str, under: str):
    query = f"SELECT * FROM ticker MATCH_RECOGNIZE ({head} MEASURES A.tax AS n PATTERN (A))"
    with pytest.raises(SqlError) as caught:
        ticker().sql(query)
    assert message in caught.value.message
    assert caught.value.offset == query.index(under)


def test_a_pattern_needs_event_time():
    with pytest.raises(SqlError, match="MATCH_RECOGNIZE needs event time"):
        pipeline().sql(
            "SELECT * FROM (SELECT device FROM readings) MATCH_RECOGNIZE (ORDER BY ts MEASURES A.x AS x PATTERN (A))"
        )
