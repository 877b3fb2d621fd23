"""Top-N in SQL: ROW_NUMBER, RANK and DENSE_RANK with OVER, and ORDER BY ... LIMIT within a window."""

from __future__ import annotations

import pytest
from tests.api.sql_runs import answer, columns, pipeline, refused, rows_of, same_plan

from fordstone import Pipeline, Stream, tumbling
from fordstone.connectors import memory
from fordstone.plan import plan as p

WINDOW = "GROUP BY device, TUMBLE(ts, INTERVAL '10' SECOND)"
COUNTS = f"SELECT device, window_start, count(*) AS n FROM readings {WINDOW}"


def _counts(made: Pipeline) -> Stream:
    readings = Stream(made._graph, p.Input("readings"))
    return readings.group_by("device").window(tumbling("10s")).agg(n="count(*)")


def _ranked(rest: str, inner: str = COUNTS, over: str = "PARTITION BY window_start ORDER BY n DESC, device") -> str:
    return f"SELECT * FROM (SELECT *, ROW_NUMBER() OVER ({over}) AS r FROM ({inner})) {rest}"


def test_rows_of_a_window_are_numbered_and_filtered_by_their_number():
    assert answer(_ranked("WHERE r <= 1")) == [
        ("A", "00:00:10", 1, 1),
        ("a", "00:00:00", 2, 1),
        ("b", "00:00:20", 1, 1),
    ]


def test_without_a_condition_all_rows_are_numbered():
    assert [row[0] + str(row[-1]) for row in answer(_ranked(""))] == ["A1", "a1", "a2", "b2", "b1"]


def test_the_number_of_rows_stands_in_the_step_and_the_condition_is_gone():
    same_plan(
        f"""
        WITH counts AS (SELECT device, window_start, window_end, count(*) AS n FROM readings {WINDOW}),
        ranked AS (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start ORDER BY n DESC) AS rank FROM counts)
        SELECT * FROM ranked WHERE rank <= 3
        """,
        lambda made: _counts(made).top(3, by="n DESC", per="window_start"),
    )


@pytest.mark.parametrize(
    ("condition", "n", "filtered"),
    [
        ("r <= 2", 2, False),
        ("r < 3", 2, False),
        ("2 >= q.r", 2, False),
        ("r = 1", 1, False),
        ("r = 2", 2, True),
        ("r BETWEEN 1 AND 2", 2, False),
        ("r BETWEEN 2 AND 3", 3, True),
        ("r <= 2 AND r <= 5", 2, False),
        ("r <= 2 AND n > 1", 2, True),
        ("r <= 2 OR n > 1", None, True),
        ("r > 2", None, True),
    ],
)
def test_how_many_rows_are_wanted_is_read_from_where(condition: str, n: int | None, filtered: bool):
    made = pipeline()
    made.sql(
        f"SELECT r, n FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start ORDER BY n) AS r FROM ({COUNTS})) q WHERE {condition}"
    )
    (top,) = [step for step in made._graph.steps if isinstance(step, p.Top)]
    assert top.n == n
    assert any(isinstance(step, p.Filter) for step in made._graph.steps) is filtered


def test_a_query_of_with_that_is_read_twice_has_the_ranks_that_each_reader_wants():
    query = f"""
        WITH ranked AS (SELECT *, ROW_NUMBER() OVER (PARTITION BY window_start ORDER BY n DESC, device) AS r FROM ({COUNTS}))
        SELECT device, r FROM ranked WHERE r <= 1 UNION ALL SELECT device, r FROM ranked WHERE r = 2
    """
    assert answer(query) == [("A", 1), ("a", 1), ("a", 2), ("b", 1), ("b", 2)]


OVER_WINDOW = "OVER (PARTITION BY window_start ORDER BY n DESC, device)"


@pytest.mark.parametrize(
    ("qualified", "nested"),
    [
        (
            f"SELECT *, ROW_NUMBER() {OVER_WINDOW} AS r FROM ({COUNTS}) QUALIFY r <= 1",
            f"SELECT * FROM (SELECT *, ROW_NUMBER() {OVER_WINDOW} AS r FROM ({COUNTS})) WHERE r <= 1",
        ),
        (
            f"SELECT q.device FROM ({COUNTS}) q QUALIFY row_number() {OVER_WINDOW} = 1 AND q.device <> 'A'",
            f"SELECT * EXCEPT (r) FROM (SELECT device, ROW_NUMBER() {OVER_WINDOW} AS r FROM ({COUNTS})) WHERE r = 1 AND device <> 'A'",
        ),
        (
            f"SELECT device, ROW_NUMBER() {OVER_WINDOW} AS r FROM ({COUNTS}) WHERE n > 0 QUALIFY ROW_NUMBER() {OVER_WINDOW} < 3",
            f"SELECT * FROM (SELECT device, ROW_NUMBER() {OVER_WINDOW} AS r FROM ({COUNTS}) WHERE n > 0) WHERE r < 3",
        ),
        (
            f"SELECT DISTINCT device FROM ({COUNTS}) QUALIFY RANK() {OVER_WINDOW} = 1",
            f"SELECT DISTINCT device FROM (SELECT device, RANK() {OVER_WINDOW} AS rank FROM ({COUNTS})) WHERE rank = 1",
        ),
        (
            "SELECT device, ts FROM readings QUALIFY count(*) OVER (PARTITION BY device ORDER BY ts) > 1",
            "SELECT device, ts FROM (SELECT device, ts, count(*) OVER (PARTITION BY device ORDER BY ts) AS c FROM readings) WHERE c > 1",
        ),
    ],
)
def test_qualify_is_where_outside_of_the_query(qualified: str, nested: str):
    assert columns(qualified) == columns(nested)
    assert answer(qualified) == answer(nested) != []


def test_qualify_has_the_plan_of_where_outside_of_the_query():
    ranked = f"SELECT *, ROW_NUMBER() {OVER_WINDOW} AS r FROM ({COUNTS})"
    qualified, nested = pipeline(), pipeline()
    qualified.sql(f"{ranked} QUALIFY r <= 2 AND n > 1")
    nested.sql(f"SELECT * FROM ({ranked}) WHERE r <= 2 AND n > 1")
    assert qualified._graph.steps == nested._graph.steps


def test_only_the_rows_that_qualify_are_ranked():
    made = pipeline()
    made.sql(f"SELECT device, n FROM ({COUNTS}) QUALIFY ROW_NUMBER() {OVER_WINDOW} <= 2")
    (top,) = [step for step in made._graph.steps if isinstance(step, p.Top)]
    assert top.n == 2
    assert not any(isinstance(step, p.Filter) for step in made._graph.steps)


def test_rank_and_dense_rank_give_equal_rows_one_number():
    made = Pipeline("p")
    rows = [("2026-01-01T00:00:00Z", x) for x in (None, 1, 1, 2, 3, 3)]
    made.source("t", memory([rows]), schema={"ts": "timestamp", "x": "int"}, time="ts")
    over = "OVER (PARTITION BY ts ORDER BY x DESC NULLS FIRST)"
    query = f"SELECT x, ROW_NUMBER() {over} AS a, RANK() {over} AS b, DENSE_RANK() {over} AS c, RANK() {over} + 1 AS d FROM t"
    assert rows_of(made.sql(query)) == [
        (None, 1, 1, 1, 2),
        (1, 5, 5, 4, 6),
        (1, 6, 5, 4, 6),
        (2, 4, 4, 3, 5),
        (3, 2, 2, 2, 3),
        (3, 3, 2, 2, 3),
    ]


def test_without_a_window_a_ranking_is_kept_up_to_date():
    query = """
        SELECT device, temp, r FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY device ORDER BY temp DESC NULLS LAST) AS r FROM readings
        ) WHERE r <= 2
    """
    assert answer(query) == [("A", 7.0, 1), ("a", 3.0, 2), ("a", 5.0, 1), ("b", None, 2), ("b", 20.0, 1)]
    counts = "SELECT device, count(*) AS n FROM readings GROUP BY device"
    leaders = (
        f"SELECT * FROM (SELECT *, ROW_NUMBER() OVER (ORDER BY n DESC, device DESC) AS r FROM ({counts})) WHERE r <= 2"
    )
    assert answer(leaders) == [("a", 3, 1), ("b", 2, 2)]


def test_order_by_and_limit_in_a_query_with_a_window_are_about_each_window():
    query = f"SELECT device, window_start, count(*) AS n FROM readings {WINDOW} ORDER BY n DESC, device LIMIT 1"
    assert columns(query) == ["device", "window_start", "n"]
    assert answer(query.replace("ORDER BY n", "ORDER BY 3")) == answer(query)
    assert answer(query) == [("A", "00:00:10", 1), ("a", "00:00:00", 2), ("b", "00:00:20", 1)]


def test_order_by_may_name_aggregates_keys_and_bounds_that_select_does_not():
    query = f"SELECT max(temp) AS top FROM readings {WINDOW} HAVING count(*) > 0 ORDER BY count(*) DESC, window_end, device DESC LIMIT 1"
    assert answer(query) == [(None,), (3.0,), (5.0,)]


REFUSED = [
    ("SELECT device FROM readings ORDER BY device", "a stream has no end", "ORDER BY"),
    ("SELECT device FROM readings ORDER BY device LIMIT 3", "ORDER BY ... LIMIT after GROUP BY with TUMBLE or HOP", "ORDER BY"),
    ("SELECT device FROM readings LIMIT 3", "a stream has no end", "LIMIT"),
    ("SELECT device, count(*) AS n FROM readings GROUP BY device ORDER BY n LIMIT 3", "a stream has no end", "ORDER BY"),
    (f"SELECT device FROM readings {WINDOW} ORDER BY device", "ORDER BY needs LIMIT", "ORDER BY"),
    (f"SELECT device FROM readings {WINDOW} LIMIT 3", "LIMIT needs ORDER BY", "LIMIT"),
    (f"SELECT device FROM readings {WINDOW} ORDER BY device LIMIT 1.5", "a whole number of at least 1", "1.5"),
    (f"SELECT device FROM readings {WINDOW} ORDER BY 4 LIMIT 3", "SELECT has no item 4", "4"),
    (f"SELECT device FROM readings {WINDOW} ORDER BY tmp LIMIT 3", "there is no column 'tmp'", "tmp"),
    (f"SELECT device FROM readings {WINDOW} ORDER BY temp LIMIT 3", "neither in GROUP BY nor inside", "temp"),
    (f"SELECT 1 AS x FROM readings {WINDOW} UNION ALL SELECT 2 AS x FROM readings LIMIT 3", "a stream has no end", "LIMIT"),
    ("SELECT ROW_NUMBER() OVER (PARTITION BY ts) AS r FROM readings", "ROW_NUMBER needs ORDER BY", "ROW_NUMBER"),
    ("SELECT *, ROW_NUMBER() OVER (PARTITION BY device ORDER BY temp) AS r FROM readings", "WHERE r <= 3 outside", "ROW_NUMBER"),
    ("SELECT * FROM (SELECT *, RANK() OVER (PARTITION BY device ORDER BY temp) AS r FROM readings) WHERE r < 3", "each needs one of its own", "RANK"),
    ("SELECT temp FROM (SELECT *, ROW_NUMBER() OVER (ORDER BY temp) AS r FROM readings) WHERE r < 3", "a select must keep r", "SELECT"),
    ("SELECT ROW_NUMBER(temp) OVER (PARTITION BY ts ORDER BY temp) AS r FROM readings", "has no arguments", "ROW_NUMBER"),
    ("SELECT ROW_NUMBER() OVER w AS r FROM readings", "OVER with the name of a window", "ROW_NUMBER"),
    ("SELECT ROW_NUMBER() OVER (PARTITION BY lower(device) ORDER BY ts) AS r FROM readings", "PARTITION BY names columns", "lower"),
    ("SELECT ROW_NUMBER() OVER (PARTITION BY ts ORDER BY tmp) AS r FROM readings", "there is no column 'tmp'", "tmp"),
    ("SELECT device FROM readings WHERE ROW_NUMBER() OVER (ORDER BY ts) < 2", "OVER stands only in the SELECT list", "ROW_NUMBER"),
    ("SELECT device, ROW_NUMBER() OVER (ORDER BY count(*)) AS r FROM readings GROUP BY device", "OVER does not stand beside GROUP BY", "ROW_NUMBER"),
    ("SELECT temp FROM readings QUALIFY temp > 1", "QUALIFY is about window functions", "temp > 1"),
    ("SELECT device, ROW_NUMBER() OVER (PARTITION BY ts ORDER BY temp) AS r FROM readings WHERE r <= 3", "r is computed after WHERE, by SELECT. Write QUALIFY", "r <= 3"),
    ("SELECT temp * 2 AS d FROM readings WHERE d > 3", "d is computed after WHERE, by SELECT. Write the expression itself", "d > 3"),
    ("SELECT device, count(*) AS n FROM readings WHERE n > 3 GROUP BY device", "n is computed after WHERE, by SELECT. Write HAVING", "n > 3"),
    ("SELECT device FROM readings QUALIFY ROW_NUMBER() OVER (PARTITION BY ts ORDER BY temp) <= nope", "there is no column 'nope'", "nope"),
    ("SELECT device, temp FROM readings QUALIFY ROW_NUMBER() OVER (PARTITION BY device ORDER BY temp) <= 2", "must keep row_number", "SELECT"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "message", "under"), REFUSED)
def test_what_cannot_be_ranked_or_sorted_is_refused_with_its_place(query: str, message: str, under: str):
    refused(query, message, under)
