"""Names with anything in them: they stay names, in every clause that can hold one."""

from __future__ import annotations

import pytest
from tests.api.sql_runs import rows_of

from fordstone import Pipeline
from fordstone.connectors import memory
from fordstone.errors import FordstoneError
from fordstone.plan.plan import read_plan
from fordstone.planner.check import stream_types

NAMES = [
    'a"; DROP TABLE t; --',
    "a'; DROP TABLE t; --",
    "we`ird",
    "`",
    "x AS y, 1",
    "temp) FROM secret --",
    "a /* b */",
    "select",
    "from",
    "1",
    "NULL",
    "count(*)",
    "a b\tc\nd",
    "日本語 🚀",
    "a\\",
    "left:k",
    "{{x}}",
]
TEN = "INTERVAL '10' SECOND"


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def made(name: str) -> Pipeline:
    pipeline = Pipeline("p")
    rows = [("k", "2026-01-01T00:00:01Z", 1), ("k", "2026-01-01T00:00:02Z", 5)]
    pipeline.source("t", memory([rows]), schema={name: "string", "ts": "timestamp", "n": "bigint"}, time="ts")
    return pipeline


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_a_name_in_every_clause(name: str):
    it = quoted(name)
    for query, expected in (
        (f"SELECT {it}, n FROM t WHERE {it} = 'k' AND t.{it} <> 'x'", [("k", 1), ("k", 5)]),
        (f"SELECT n AS {it} FROM t", [(1,), (5,)]),
        (f"SELECT * EXCEPT ({it}, ts) FROM t", [(1,), (5,)]),
        (f"SELECT {it}, count(*) AS c FROM t GROUP BY {it} HAVING max({it}) = 'k'", [("k", 2)]),
        (f"SELECT upper({it}) AS u, sum(n) AS s FROM t GROUP BY upper({it})", [("K", 6)]),
        (f"SELECT {it} AS key, sum(n) AS {quoted(name + '!')} FROM t GROUP BY {it}, TUMBLE(ts, {TEN})", [("k", 6)]),
        (f"SELECT n AS {it} FROM t WHERE n > 1 UNION ALL SELECT n + 1 FROM t WHERE n > 1", [(5,), (6,)]),
        (f"WITH {it} AS (SELECT n FROM t) SELECT q.n FROM {it} AS q", [(1,), (5,)]),
        (f"SELECT {quoted(name + 'q')}.n FROM t AS {quoted(name + 'q')}", [(1,), (5,)]),
        (f"SELECT a.{it}, b.n FROM t a JOIN t b ON a.{it} = b.{it} AND a.ts = b.ts", [("k", 1), ("k", 5)]),
        (f"SELECT b.{it} AS x, b.n FROM t a LEFT JOIN t b ON a.{it} = b.{it} AND a.ts = b.ts", [("k", 1), ("k", 5)]),
    ):  # fmt: skip
        pipeline = made(name)
        stream = pipeline.sql(query)
        assert rows_of(stream) == expected, query


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_with_such_names_reads_back_as_the_same(name: str):
    it = quoted(name)
    pipeline = made(name)
    stream = pipeline.sql(f"SELECT {it}, n + 1 AS {quoted(name + '2')} FROM t WHERE {it} = 'k'")
    stream.sink("out", memory([]))
    again = read_plan(pipeline.plan().to_json())
    assert again.to_json() == pipeline.plan().to_json()
    assert dict(stream_types(again)) == dict(stream_types(pipeline.plan()))


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_with_such_names_is_a_pattern_of_these_names(name: str):
    it, variable = quoted(name), quoted(f"{name} v")
    query = f"""
        SELECT * FROM t MATCH_RECOGNIZE (
            PARTITION BY {it} ORDER BY ts
            MEASURES last({variable}.n) AS {quoted(name + " m")}
            PATTERN (A {variable}) DEFINE {variable} AS {variable}.n > A.n AND {variable}.{it} = 'k'
        )
    """
    assert rows_of(made(name).sql(query)) == [("k", 5)]


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_may_be_called_anything_for_a_query(name: str):
    pipeline = made("k")
    tables = {name: pipeline.sql("SELECT * FROM t")}
    assert rows_of(pipeline.sql(f"SELECT n FROM {quoted(name)}", tables=tables)) == [(1,), (5,)]


@pytest.mark.parametrize("name", ["*", "^.*$", "^n$"])
def test_a_name_that_the_engine_would_take_for_a_pattern_is_refused(name: str):
    pipeline = made("k")
    with pytest.raises(FordstoneError, match="would take this name for a pattern"):
        pipeline.sql(f"SELECT n AS {quoted(name)} FROM t")


@pytest.mark.parametrize(
    "text",
    [
        "SELECT n FROM t WHERE `k` = '' OR 1=1; DROP TABLE t",
        "SELECT n FROM t WHERE k = 'x'' OR ''1''=''1' EXCEPT SELECT n FROM t",
        "SELECT `n` `; DROP TABLE t` FROM t; --\nDELETE FROM t",
        "SELECT n FROM `t`; ;",
        "SELECT n FROM t /* never closed",
    ],
)
def test_more_than_one_query_is_never_read(text: str):
    pipeline = made("k")
    before = list(pipeline._graph.steps)
    with pytest.raises(FordstoneError):
        pipeline.sql(text)
    assert pipeline._graph.steps == before
