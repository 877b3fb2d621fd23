from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import duckdb
import polars as pl
import pytest
from tests.api.sql_runs import answer, columns, pipeline, rows_of, same_plan

from fordstone import Pipeline, Stream, tumbling
from fordstone.api.windows import session, sliding
from fordstone.connectors import memory
from fordstone.errors import ExpressionError, PipelineError

TEN = "INTERVAL '10' SECOND"


# SELECT and WHERE


def test_columns_are_selected_renamed_and_computed():
    query = "SELECT device, temp * 2 AS twice, r.temp + 1 FROM readings AS r WHERE r.temp >= 7"
    assert columns(query) == ["device", "twice", "temp + 1"]
    assert answer(query) == [("A", 14.0, 8.0), ("b", 40.0, 21.0)]


def test_names_of_columns_may_stand_without_as():
    assert columns("SELECT device d, temp t FROM readings r") == ["d", "t"]


def test_a_star_alone_adds_no_step():
    made = pipeline()
    assert made.sql("SELECT * FROM readings").name == "readings"


def test_a_star_beside_others_and_less_some_columns():
    assert columns("SELECT *, temp AS t FROM readings") == ["device", "ts", "temp", "t"]
    assert columns("SELECT * EXCEPT (ts, temp) FROM readings") == ["device"]
    assert columns("SELECT r.*, 1 AS one FROM readings r") == ["device", "ts", "temp", "one"]


def test_the_plan_is_the_one_written_by_hand():
    same_plan(
        "SELECT device, temp * 9 / 5 + 32 AS f FROM readings r WHERE r.temp > 2",
        lambda p: _readings(p).filter("temp > 2").select("device", "temp * 9 / 5 + 32 AS f"),
    )


def test_clause_words_may_name_columns_where_no_clause_can_begin():
    made = Pipeline("p")
    made.source("t", memory([[(1, 2, 3)]]), schema={"offset": "int", "limit": "int", "comment": "int"})
    assert rows_of(made.sql("SELECT offset, comment AS c, `limit` FROM t WHERE offset < limit")) == [(1, 3, 2)]


def test_is_distinct_from_is_no_from_clause():
    assert answer("SELECT temp FROM readings WHERE temp IS NOT DISTINCT FROM NULL") == [(None,)]


def test_functions_named_like_joins_and_keywords_are_functions():
    assert answer("SELECT CASE WHEN temp > 6 THEN 'hot' ELSE 'cold' END AS c FROM readings WHERE device = 'A'") == [
        ("hot",)
    ]


def test_comments_and_a_semicolon_are_no_part_of_a_query():
    assert answer("SELECT device -- the device\nFROM readings /* all */ WHERE temp = 7.0;") == [("A",)]


# Names of streams


def test_streams_are_found_by_step_and_by_the_names_given():
    made = pipeline()
    hot = made.sql("SELECT * FROM readings WHERE temp > 6", name="hot")
    assert hot.name == "hot"
    assert rows_of(made.sql("SELECT h.device FROM hot h")) == [("A",), ("b",)]
    made = pipeline()
    other = made.sql("SELECT device FROM readings")
    assert list(made.sql("SELECT x.device AS d FROM `a table` x", tables={"a table": other}).schema) == ["d"]


def test_the_last_step_has_the_given_name():
    made = pipeline()
    assert made.sql("SELECT * FROM readings", name="copy").name == "copy"
    assert made.sql("SELECT device FROM readings WHERE temp > 1", name="one").name == "one"
    assert made.sql("SELECT * FROM readings WHERE temp > 1", name="two").name == "two"
    assert (
        made.sql(f"SELECT device, count(*) AS n FROM readings GROUP BY device, TUMBLE(ts, {TEN})", name="n").name == "n"
    )
    query = f"SELECT device, window_start, window_end, count(*) AS n FROM readings GROUP BY device, TUMBLE(ts, {TEN})"
    assert made.sql(query, name="plain").name == "plain"
    assert made.sql(f"{query} HAVING count(*) > 1", name="having").name == "having"
    assert made.sql("SELECT device FROM readings UNION ALL SELECT device FROM alarms", name="both").name == "both"


def test_late_rows_are_a_stream_of_their_own():
    made = pipeline()
    made.sql(f"SELECT device, count(*) AS n FROM readings GROUP BY device, TUMBLE(ts, {TEN})")
    assert list(made.sql("SELECT temp FROM agg_device.late").schema) == ["temp"]


def test_a_table_must_be_a_stream_of_the_same_pipeline():
    with pytest.raises(PipelineError, match="belongs to another pipeline"):
        pipeline().sql("SELECT * FROM x", tables={"x": pipeline().sql("SELECT * FROM readings")})


def test_a_sink_is_no_stream():
    made = pipeline()
    made.sql("SELECT * FROM readings").sink("out", memory([]))
    with pytest.raises(ExpressionError, match="there is no stream 'out'"):
        made.sql("SELECT * FROM out")


# GROUP BY


def test_a_tumbling_window_in_the_function_form():
    query = f"SELECT device, count(*) AS n, sum(temp) AS s FROM readings GROUP BY device, TUMBLE(ts, {TEN})"
    assert answer(query) == [("A", 1, 7.0), ("a", 1, 5.0), ("a", 2, 4.0), ("b", 1, None), ("b", 1, 20.0)]
    same_plan(
        query,
        lambda p: (
            _readings(p)
            .group_by("device")
            .window(tumbling("10s"))
            .agg(n="count(*)", s="sum(temp)")
            .select("device", "n", "s")
        ),
    )


def test_no_select_step_where_the_columns_are_those_of_the_window():
    same_plan(
        f"SELECT device, window_start, window_end, avg(temp) AS mean FROM readings GROUP BY device, TUMBLE(ts, {TEN})",
        lambda p: _readings(p).group_by("device").window(tumbling("10s")).agg(mean="avg(temp)"),
    )


def test_the_table_form_and_the_function_form_are_the_same_plan():
    for window, made in (
        (f"TUMBLE(TABLE readings, DESCRIPTOR(ts), {TEN})", f"TUMBLE(ts, {TEN})"),
        (f"TUMBLE(DATA => TABLE readings, TIMECOL => DESCRIPTOR(ts), SIZE => {TEN})", f"TUMBLE(ts, {TEN})"),
        (f"TUMBLE(TABLE readings, DESCRIPTOR(ts), {TEN}, INTERVAL '3' SECOND)", f"TUMBLE(ts, {TEN}, INTERVAL '3' SECOND)"),
        (f"HOP(TABLE readings, DESCRIPTOR(ts), INTERVAL '5' SECOND, {TEN})", f"HOP(ts, INTERVAL '5' SECOND, {TEN})"),
        (f"HOP(TABLE readings, DESCRIPTOR(ts), SIZE => {TEN}, SLIDE => INTERVAL '5' SECOND)", f"HOP(ts, INTERVAL '5' SECOND, {TEN})"),
        (f"SESSION(TABLE readings PARTITION BY device, DESCRIPTOR(ts), {TEN})", f"SESSION(ts, {TEN})"),
    ):  # fmt: skip
        table = f"SELECT device, window_end, count(*) AS n FROM TABLE({window}) AS w WHERE w.temp > 1 GROUP BY w.device, window_start, window_end"
        function = f"SELECT device, window_end, count(*) AS n FROM readings WHERE temp > 1 GROUP BY device, {made}"
        same_plan(table, partial(Pipeline.sql, query=function))


def test_hop_and_session_are_those_of_the_api():
    same_plan(
        f"SELECT device, window_start, window_end, count(*) AS n FROM readings GROUP BY device, HOP(ts, INTERVAL '5' SECOND, {TEN})",
        lambda p: _readings(p).group_by("device").window(sliding("10s", every="5s")).agg(n="count(*)"),
    )
    same_plan(
        f"SELECT device, window_start, window_end, count(*) AS n FROM readings GROUP BY device, SESSION(ts, {TEN})",
        lambda p: _readings(p).group_by("device").window(session("10s")).agg(n="count(*)"),
    )


def test_sessions_end_after_the_gap():
    query = "SELECT device, SESSION_START(ts, INTERVAL '5' SECOND) AS s, SESSION_END() AS e, count(*) AS n FROM readings WHERE device = 'a' GROUP BY device, SESSION(ts, INTERVAL '5' SECOND)"
    assert answer(query) == [("a", "00:00:01", "00:00:09", 2), ("a", "00:00:12", "00:00:17", 1)]


def test_the_bounds_of_a_window_are_functions_or_columns():
    query = (
        f"SELECT TUMBLE_START(ts, {TEN}) AS s, window_end AS e, count(*) AS n FROM readings GROUP BY TUMBLE(ts, {TEN})"
    )
    assert answer(query) == [("00:00:00", "00:00:10", 3), ("00:00:10", "00:00:20", 2), ("00:00:20", "00:00:30", 1)]


def test_keys_may_be_expressions_numbers_of_items_and_names_of_items():
    expected = [("a", 4), ("b", 2)]
    for key in ("lower(device)", "1", "d", "LOWER(r.device)"):
        assert answer(f"SELECT lower(device) AS d, count(*) AS n FROM readings r GROUP BY {key}") == expected


def test_a_key_may_be_called_like_the_column_it_is_made_of():
    query = "SELECT lower(device) AS device, max(device) AS last FROM readings GROUP BY lower(device)"
    assert answer(query) == [("a", "a"), ("b", "b")]


def test_expressions_over_aggregates_and_keys():
    query = "SELECT device, sum(temp) / count(*) AS m, concat(device, '-', cast(count(*) AS string)) AS t FROM readings GROUP BY device"
    assert answer(query) == [("A", 7.0, "A-1"), ("a", 3.0, "a-3"), ("b", 10.0, "b-2")]


def test_having_sees_aggregates_keys_windows_and_names():
    assert answer("SELECT device, count(*) AS n FROM readings GROUP BY device HAVING n > 1 AND device < 'b'") == [
        ("a", 3)
    ]
    assert answer("SELECT device FROM readings GROUP BY device HAVING max(temp) > 6") == [("A",), ("b",)]
    query = f"SELECT device, window_start FROM readings GROUP BY device, TUMBLE(ts, {TEN}) HAVING window_start > TIMESTAMP '2026-01-01 00:00:05Z' AND count(temp) > 0"
    assert answer(query) == [("A", "00:00:10"), ("a", "00:00:10")]


def test_a_running_result_that_no_longer_passes_having_is_deleted():
    assert answer("SELECT device, count(*) AS n FROM readings GROUP BY device HAVING count(*) < 3") == [
        ("A", 1),
        ("b", 2),
    ]


def test_aggregates_alone_make_one_group():
    assert answer("SELECT count(*) AS n, max(temp) AS top FROM readings") == [(6, 20.0)]


def test_group_by_without_aggregates_gives_each_key_once():
    assert answer("SELECT device FROM readings GROUP BY device") == [("A",), ("a",), ("b",)]


def test_an_aggregate_may_be_called_as_an_argument_of_agg_or_as_a_key_is():
    assert answer("SELECT device AS d, count(*) AS name, max(temp) AS device FROM readings GROUP BY device") == [
        ("A", 1, 7.0),
        ("a", 3, 5.0),
        ("b", 2, 20.0),
    ]


def test_windows_of_windows():
    query = f"""
        WITH ten AS (SELECT device, window_end, count(*) AS n FROM readings GROUP BY device, TUMBLE(ts, {TEN}))
        SELECT window_start, sum(n) AS n FROM ten GROUP BY TUMBLE(window_end, INTERVAL '1' MINUTE)
    """
    assert answer(query) == [("00:00:00", 6)]


# UNION ALL, subqueries, WITH


def test_union_all_goes_by_position_and_has_the_first_names():
    query = (
        "SELECT device AS d, level FROM alarms UNION ALL SELECT device, CAST(temp AS int) FROM readings WHERE temp > 6"
    )
    assert columns(query) == ["d", "level"]
    assert answer(query) == [("A", 7), ("a", 1), ("b", 2), ("b", 20), ("c", 3)]


def test_several_unions_are_one_step():
    same_plan(
        "SELECT device FROM readings UNION ALL (SELECT device FROM alarms) UNION ALL SELECT device FROM readings",
        lambda p: _union(p.sql("SELECT device FROM readings"), p),
    )


def test_a_query_in_from_and_one_in_with():
    inner = "SELECT device, temp + 1 AS t FROM readings WHERE temp < 6"
    expected = [("a", 4.0), ("a", 6.0)]
    assert answer(f"SELECT q.device, q.t FROM ({inner}) AS q WHERE t > 2") == expected
    assert answer(f"WITH q AS ({inner}), u AS (SELECT * FROM q WHERE t > 2) SELECT device, t FROM u") == expected


def test_a_query_that_with_names_is_built_once_and_only_if_it_is_read():
    made = pipeline()
    made.sql(
        "WITH q AS (SELECT device FROM readings), never AS (SELECT nothing FROM nowhere) SELECT * FROM q UNION ALL SELECT * FROM q"
    )
    assert [step.name for step in made._graph.steps] == ["readings", "alarms", "select", "union"]


def test_a_name_of_with_comes_before_a_stream():
    assert answer("WITH readings AS (SELECT device FROM readings WHERE temp = 7) SELECT * FROM readings") == [("A",)]


# Against DuckDB

QUERIES = [
    ("SELECT k, x, x * 2 + n AS y FROM t WHERE x > 3 AND k <> 'b'", None),
    ("SELECT k, count(*) AS c, sum(n) AS s, min(x) AS lo, max(x) AS hi FROM t GROUP BY k", None),
    ("SELECT n % 3 AS m, count(x) AS c FROM t GROUP BY n % 3 HAVING count(*) > 10", None),
    ("SELECT count(*) AS c, sum(n) AS s FROM t WHERE x IS NOT NULL", None),
    ("SELECT k FROM t WHERE n < 5 UNION ALL SELECT upper(k) FROM t WHERE n > 90", None),
    ("SELECT q.k, q.y FROM (SELECT k, x + n AS y FROM t WHERE n BETWEEN 20 AND 60) q WHERE q.y > 40", None),
    (
        "SELECT k, count(*) AS c, sum(n) AS s FROM t GROUP BY k, TUMBLE(ts, INTERVAL '7' SECOND)",
        "SELECT k, count(*) AS c, sum(n) AS s FROM t GROUP BY k, time_bucket(INTERVAL '7 seconds', ts, TIMESTAMPTZ '1970-01-01 00:00:00Z')",
    ),
    (
        "SELECT l.n AS a, r.n AS b FROM t l JOIN t r ON l.k = r.k AND r.ts BETWEEN l.ts - INTERVAL '2' SECOND AND l.ts + INTERVAL '3' SECOND WHERE l.n <> r.n",
        "SELECT l.n AS a, r.n AS b FROM t l JOIN t r ON l.k = r.k AND r.ts BETWEEN l.ts - INTERVAL '2 seconds' AND l.ts + INTERVAL '3 seconds' WHERE l.n <> r.n",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("query", "theirs"), QUERIES)
def test_results_are_those_of_duckdb(query: str, theirs: str | None):
    frame = _random_rows()
    made = Pipeline("p")
    schema = {"k": "string", "ts": "timestamp", "n": "bigint", "x": "double"}
    made.source("t", memory([frame]), schema=schema, time="ts", lateness="1h")
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("CREATE TABLE t (k VARCHAR, ts TIMESTAMPTZ, n BIGINT, x DOUBLE)")
    connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", frame.rows())
    expected = connection.execute(theirs or query).fetchall()
    assert expected
    assert rows_of(made.sql(query)) == sorted(expected, key=_ordered)


def _random_rows() -> pl.DataFrame:
    chance = random.Random(5)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        (
            chance.choice("abc"),
            start + timedelta(seconds=chance.randrange(60)),
            number,
            None if chance.random() < 0.1 else chance.randrange(0, 40) / 4,
        )
        for number in range(100)
    ]
    return pl.DataFrame(
        rows, schema={"k": pl.String, "ts": pl.Datetime("us", "UTC"), "n": pl.Int64, "x": pl.Float64}, orient="row"
    )


def _ordered(row: tuple[Any, ...]) -> list[Any]:
    return [(value is not None, str(type(value)), value) for value in row]


def _readings(made: Pipeline) -> Stream:
    return made.sql("SELECT * FROM readings")


def _union(first: Stream, made: Pipeline) -> Stream:
    return first.union(made.sql("SELECT device FROM alarms"), made.sql("SELECT device FROM readings"))
