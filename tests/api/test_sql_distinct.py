"""SELECT DISTINCT and UNION, and what else a query of rows is made of: CASE, IN, BETWEEN, LIKE, WITH, and queries in FROM."""

from __future__ import annotations

import pytest
from tests.api.sql_runs import answer, refused, same_plan

from fordstone import Stream
from fordstone.plan import plan as p


def test_every_distinct_row_comes_once():
    assert answer("SELECT DISTINCT device FROM readings") == [("A",), ("a",), ("b",)]
    assert answer("SELECT DISTINCT lower(device) AS d, temp > 4 AS warm FROM readings WHERE temp < 6") == [
        ("a", False),
        ("a", True),
    ]
    same_plan(
        "SELECT DISTINCT device, ts FROM readings",
        lambda made: Stream(made._graph, p.Input("readings")).select("device", "ts").distinct(),
    )


def test_distinct_rows_with_a_time_may_be_put_in_windows():
    query = """
        SELECT window_start, count(*) AS n FROM (SELECT DISTINCT ts FROM readings)
        GROUP BY TUMBLE(ts, INTERVAL '10' SECOND)
    """
    assert answer(query) == [("00:00:00", 3), ("00:00:10", 2), ("00:00:20", 1)]


def test_a_union_without_all_gives_distinct_rows():
    both = "SELECT device FROM readings {} SELECT device FROM alarms"
    assert answer(both.format("UNION")) == answer(both.format("UNION DISTINCT")) == [("A",), ("a",), ("b",), ("c",)]
    assert len(answer(both.format("UNION ALL"))) == 9
    query = "SELECT 'x' AS d FROM readings UNION SELECT device FROM alarms UNION ALL SELECT device FROM alarms"
    assert answer(query) == [("a",), ("a",), ("b",), ("b",), ("c",), ("c",), ("x",)]


def test_distinct_with_limit_is_refused():
    window = "GROUP BY device, TUMBLE(ts, INTERVAL '10' SECOND)"
    refused(f"SELECT DISTINCT device FROM readings {window} ORDER BY device LIMIT 1", "DISTINCT with LIMIT", "SELECT")


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("SELECT CASE WHEN temp > 10 THEN 'hot' WHEN temp > 4 THEN 'warm' ELSE 'cold' END AS w FROM readings WHERE device = 'a'", [("cold",), ("cold",), ("warm",)]),
        ("SELECT CASE device WHEN 'A' THEN 1 END AS x FROM readings WHERE temp >= 7", [(None,), (1,)]),
        ("SELECT temp FROM readings WHERE device IN ('A', 'b') AND temp IS NOT NULL", [(7.0,), (20.0,)]),
        ("SELECT temp FROM readings WHERE device NOT IN ('a', 'b')", [(7.0,)]),
        ("SELECT temp FROM readings WHERE temp BETWEEN 3 AND 5", [(3.0,), (5.0,)]),
        ("SELECT temp FROM readings WHERE temp NOT BETWEEN 3 AND 7", [(1.0,), (20.0,)]),
        ("SELECT DISTINCT device FROM readings WHERE device LIKE 'a%' OR device NOT LIKE '%'", [("a",)]),
        ("WITH x AS (SELECT temp FROM readings), y AS (SELECT temp FROM x WHERE temp > 3) SELECT * FROM y", [(5.0,), (7.0,), (20.0,)]),
        ("WITH x AS (WITH x AS (SELECT temp FROM readings) SELECT temp + 1 AS temp FROM x) SELECT * FROM x WHERE temp > 7", [(8.0,), (21.0,)]),
        ("WITH readings AS (SELECT device AS d FROM readings WHERE temp > 10) SELECT * FROM readings", [("b",)]),
        ("SELECT q.* FROM (SELECT r.device AS d FROM (SELECT * FROM readings) r WHERE r.temp > 10) q", [("b",)]),
        ("SELECT d, max(m) AS m FROM (SELECT device AS d, temp AS m FROM readings) GROUP BY d HAVING max(m) > 6", [("A", 7.0), ("b", 20.0)]),
    ],
)  # fmt: skip
def test_queries_of_rows_mean_what_they_mean_in_sql(query: str, rows: list[tuple[object, ...]]):
    assert answer(query) == rows
