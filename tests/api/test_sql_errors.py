from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.sql_runs import pipeline, refused
from tests.examples import examples

from fordstone import Pipeline
from fordstone.connectors import memory
from fordstone.errors import PipelineError
from fordstone.lang.sql.syntax import SHOWN_CHARS_MAX, SqlError

TEN = "INTERVAL '10' SECOND"

NOT_SUPPORTED = [
    ("SELECT DISTINCT ON (device) temp FROM readings", "DISTINCT ON is not supported", "ON", "ROW_NUMBER"),
    ("SELECT device FROM readings ORDER BY device", "ORDER BY is not supported", "ORDER BY", "Sort where you read"),
    ("SELECT device FROM readings LIMIT 3", "LIMIT is not supported", "LIMIT", "Take as many rows"),
    ("SELECT device FROM readings WHERE temp > 1 OFFSET 3", "OFFSET is not supported", "OFFSET", "Skip rows"),
    ("SELECT device FROM readings FETCH FIRST 3 ROWS ONLY", "FETCH is not supported", "FETCH", "write LIMIT"),
    ("SELECT device FROM readings SORT BY device", "SORT BY is not supported", "SORT BY", "Sort where you read"),
    (
        "SELECT ntile(2) OVER (PARTITION BY device ORDER BY ts) FROM readings",
        "ntile is not supported with OVER",
        "ntile",
        "ROW_NUMBER",
    ),
    ("SELECT (SELECT 1) FROM readings", "subqueries in expressions", "SELECT 1", "JOIN"),
    ("SELECT temp FROM readings WHERE device IN (SELECT device FROM alarms)", "subqueries in", "SELECT device", "JOIN"),
    ("SELECT temp FROM readings WHERE EXISTS (SELECT 1 FROM alarms)", "subqueries in", "SELECT 1", "JOIN"),
    ("SELECT temp FROM readings CROSS JOIN alarms", "CROSS JOIN is not supported", "CROSS", "JOIN ... ON"),
    ("SELECT temp FROM readings NATURAL JOIN alarms", "NATURAL JOIN is not supported", "NATURAL", "JOIN ... ON"),
    (
        "SELECT temp FROM readings LEFT ANTI JOIN alarms ON true",
        "LEFT ANTI JOIN is not supported",
        "ANTI",
        "inner, left",
    ),
    ("SELECT temp FROM readings, alarms", "several streams in FROM", ",", "JOIN ... ON"),
    ("SELECT temp FROM readings JOIN alarms USING (device)", "USING is not supported", "USING", "Write ON"),
    ("SELECT device FROM readings UNION BY NAME SELECT device FROM alarms", "UNION BY NAME", "BY", "in the same order"),
    ("SELECT device FROM readings EXCEPT SELECT device FROM alarms", "EXCEPT is not supported", "EXCEPT", "UNION"),
    (
        "SELECT device FROM readings INTERSECT SELECT device FROM alarms",
        "INTERSECT is not",
        "INTERSECT",
        "join the two",
    ),
    ("SELECT device FROM readings QUALIFY 1 = 1", "QUALIFY is about window functions", "1", "Write WHERE"),
    ("SELECT device FROM readings TABLESAMPLE (10 PERCENT)", "TABLESAMPLE is not supported", "TABLESAMPLE", "hash"),
    (
        "SELECT device FROM readings LATERAL VIEW explode(x) AS y",
        "LATERAL is not supported",
        "LATERAL",
        "explode(items)",
    ),
    ("SELECT x FROM (VALUES (1)) AS t", "a query was expected", "VALUES", ""),
    (
        "WITH RECURSIVE r AS (SELECT 1 FROM readings) SELECT * FROM r",
        "RECURSIVE is not supported",
        "RECURSIVE",
        "iterate",
    ),
    (
        "SELECT first(temp) FILTER (WHERE temp > 1) FROM readings",
        "first is not supported with FILTER",
        "first",
        "CASE WHEN",
    ),
    ("SELECT device FROM readings GROUP BY ROLLUP (device)", "GROUP BY ROLLUP is not supported", "ROLLUP", "List"),
    ("SELECT device FROM readings GROUP BY ALL", "GROUP BY ALL is not supported", "ALL", "List"),
    ("INSERT INTO t SELECT device FROM readings", "INSERT is not supported", "INSERT", "sink"),
    ("CREATE TABLE t (a int)", "CREATE is not supported", "CREATE", "Pipeline.source"),
    ("DROP TABLE readings", "DROP is not supported", "DROP", "begins with SELECT"),
    ("SELECT device FROM readings; DROP TABLE readings", "one query was expected", "DROP", ""),
    (
        "SELECT device FROM generate_series(1, 3)",
        "there is no table function",
        "generate_series",
        "TUMBLE, HOP, SESSION",
    ),
    (
        f"SELECT device, count(*) FROM readings GROUP BY device, CUMULATE(ts, {TEN})",
        "cumulate is not supported",
        "CUMULATE",
        "TUMBLE",
    ),
    (
        "SELECT count(*) FROM readings GROUP BY window(ts, '10 seconds')",
        "window is not supported",
        "window",
        "TUMBLE",
    ),
]


@pytest.mark.parametrize(("query", "message", "under", "advice"), NOT_SUPPORTED)
def test_what_is_not_supported_is_named_with_its_place_and_what_to_use(
    query: str, message: str, under: str, advice: str
):
    refused(query, message, under)
    with pytest.raises(SqlError) as caught:
        pipeline().sql(query)
    assert advice in caught.value.message


MISTAKES = [
    ("SELECT tmp FROM readings", "there is no column 'tmp'. Did you mean 'temp'?", "tmp"),
    ("SELECT r.tmp FROM readings r", "there is no column 'tmp' in r", "r.tmp"),
    ("SELECT readings.temp FROM readings r", "there is no stream 'readings' in FROM. There is r.", "readings.temp"),
    ("SELECT a.b.c FROM readings", "there is no stream 'a' in FROM", "a.b.c"),
    ("SELECT temp FROM reading", "there is no stream 'reading'. Did you mean readings?", "reading"),
    ("SELECT temp FROM readings.nothing", "a stream has no part 'nothing'", "nothing"),
    ("SELECT temp, temp FROM readings", "two columns are called 'temp'", "temp FROM"),
    ("SELECT device + 1 AS d, temp FROM readings WHERE temp", "a condition is needed here", "temp"),
    ("SELECT temp FROM readings WHERE count(*) > 1", "Write HAVING", "count"),
    ("SELECT temp FROM readings WHERE temp > 1 x", "a condition has no name", "x"),
    ("SELECT temp, count(*) FROM readings GROUP BY device", "neither in GROUP BY nor inside an aggregate", "temp"),
    ("SELECT device, summ(temp) FROM readings GROUP BY device", "there is no function summ. Did you mean sum?", "summ"),
    ("SELECT cout(*) AS n FROM readings", "there is no function cout. Did you mean count?", "cout"),
    ("SELECT device, max(tmp) FROM readings GROUP BY device", "there is no column 'tmp'", "tmp"),
    ("SELECT device FROM readings GROUP BY max(temp)", "no aggregate stands in GROUP BY", "max(temp)"),
    ("SELECT device, max(temp) FROM readings GROUP BY 3", "SELECT has no item 3", "3"),
    ("SELECT device, max(sum(temp)) AS m FROM readings GROUP BY device", "stands inside another", "sum"),
    ("SELECT *, max(temp) FROM readings", "* does not stand beside aggregates", "*"),
    ("SELECT count(*) AS n FROM readings GROUP BY device", "SELECT must list device", "SELECT"),
    ("SELECT device, count(*) AS device FROM readings GROUP BY device", "two columns are called 'device'", "count"),
    ("SELECT device, window_start, count(*) FROM readings GROUP BY device", "belongs to a window", "window_start"),
    ("SELECT device, TUMBLE_START() FROM readings", "belongs to a window", "TUMBLE_START"),
    ("SELECT device FROM readings GROUP BY device HAVING cnt > 1", "there is no column 'cnt'", "cnt"),
    ("SELECT * EXCEPT (nope) FROM readings", "there is no column 'nope' to leave out", "nope"),
    ("SELECT device, level FROM alarms UNION ALL SELECT device FROM readings", "as many columns", "SELECT device FROM"),
    ("SELECT level FROM alarms UNION ALL SELECT temp FROM readings", "CAST(temp AS int)", "SELECT temp"),
    ("SELECT device FROM (SELECT device, count(*) AS n FROM readings GROUP BY device) GROUP BY device", "replace each other", "device"),
    ("SELECT device", "FROM is missing", ""),
    ("SELECT FROM readings", "an expression is missing", "FROM"),
    ("SELECT temp FROM readings WHERE", "an expression is missing", ""),
    ("SELECT 1 + FROM readings", "something is missing after '+'", "+"),
    ("SELECT (temp FROM readings", "')' is missing", ""),
    ("SELECT temp) FROM readings", "FROM is missing", ")"),
    ("SELECT temp FROM readings) x", "this was not expected here", ")"),
    ("SELECT temp FROM readings WHERE temp = 'a", "ends inside a quoted string", "'a"),
    ("SELECT temp FROM 'readings'", "Names are quoted with backticks", "'readings'"),
    ("WITH q AS SELECT 1 FROM readings SELECT * FROM q", "( was expected here", "SELECT 1"),
    ("   ", "the query is empty", ""),
]  # fmt: skip


@pytest.mark.parametrize(("query", "message", "under"), MISTAKES)
def test_a_mistake_is_shown_where_it_is(query: str, message: str, under: str):
    if under:
        nth = -1 if query.startswith(("SELECT device + 1", "SELECT device FROM (", "SELECT device, level")) else 0
        refused(query, message, under, nth=nth)
        return
    with pytest.raises(SqlError) as caught:
        pipeline().sql(query)
    assert message in caught.value.message
    assert caught.value.offset is not None


WINDOWS = [
    (f"TUMBLE(temp, {TEN})", "windows go by the stream's event time, which is ts", "temp"),
    (f"TUMBLE(nope, {TEN})", "there is no column 'nope'", "nope"),
    (f"TUMBLE(ts + {TEN}, {TEN})", "which is ts. Write that here.", "ts"),
    (f"TUMBLE(date_trunc('hour', ts), {TEN})", "is the column of the event time, ts", "date_trunc"),
    ("TUMBLE(ts, 10)", "an interval is needed here", "10"),
    ("TUMBLE(ts, INTERVAL '0' SECOND)", "must be longer than zero", "'0'"),
    ("TUMBLE(ts, INTERVAL '-5' SECOND)", "must be longer than zero", "'-5'"),
    ("TUMBLE(ts, INTERVAL '1' MONTH)", "months and years differ", "'1'"),
    ("TUMBLE(ts)", "TUMBLE is called with 1 arguments", "TUMBLE"),
    (f"HOP(ts, {TEN})", "with the slide before the size", "HOP"),
    (f"SESSION(ts, {TEN}, {TEN})", "SESSION is called with 3 arguments", "SESSION"),
    (f"TUMBLE(ts, {TEN}), HOP(ts, {TEN}, {TEN})", "there is a window already", "HOP"),
]


@pytest.mark.parametrize(("window", "message", "under"), WINDOWS)
def test_a_window_that_cannot_be_is_refused(window: str, message: str, under: str):
    refused(f"SELECT count(*) AS n FROM readings GROUP BY {window}", message, under)


TABLES = [
    (f"TUMBLE(TABLE readings, {TEN})", "GROUP BY window_start", "DESCRIPTOR was expected here", "INTERVAL"),
    ("TUMBLE(TABLE readings, DESCRIPTOR(ts))", "GROUP BY window_start", "an argument of TUMBLE is missing", ")) "),
    (f"TUMBLE(TABLE readings PARTITION BY device, DESCRIPTOR(ts), {TEN})", "", "TUMBLE has no PARTITION BY", "PARTITION BY"),
    (f"TUMBLE(TABLE readings, DESCRIPTOR(ts), {TEN}, {TEN}, {TEN})", "", "TUMBLE has no further argument", f"{TEN})"),
    (f"TUMBLE(TABLE readings, DESCRIPTOR(temp), {TEN})", "GROUP BY window_start", "which is ts", "temp), "),
    (f"TUMBLE(TABLE readings, DESCRIPTOR(ts), {TEN})", "GROUP BY device", "the windows are missing in GROUP BY", "device"),
    (f"TUMBLE(TABLE readings, DESCRIPTOR(ts), {TEN})", "WHERE window_start > ts GROUP BY window_start", "in HAVING", "window_start >"),
    (f"SESSION(TABLE readings, DESCRIPTOR(ts), {TEN})", "GROUP BY device, window_start", "Write PARTITION BY device", "TABLE("),
    (f"CUMULATE(TABLE readings, DESCRIPTOR(ts), {TEN})", "", "TUMBLE, HOP or SESSION was expected", "CUMULATE"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "rest", "message", "under"), TABLES)
def test_a_table_of_windows_that_cannot_be_is_refused(table: str, rest: str, message: str, under: str):
    refused(f"SELECT max(temp) AS m FROM TABLE({table}) {rest}", message, under)


def test_windows_of_windows_go_by_their_end():
    below = f"SELECT window_start, count(*) AS n FROM readings GROUP BY TUMBLE(ts, {TEN})"
    query = f"SELECT sum(n) AS n FROM ({below}) GROUP BY TUMBLE(window_start, INTERVAL '1' MINUTE)"
    refused(query, "Keep window_end in SELECT of the query below", "window_start", nth=1)


def test_windows_of_a_table_are_there_to_be_aggregated():
    refused(
        f"SELECT * FROM TABLE(TUMBLE(TABLE readings, DESCRIPTOR(ts), {TEN}))", "Add GROUP BY window_start", "TABLE("
    )


def test_a_window_needs_event_time_and_says_how_to_get_it():
    made = Pipeline("p")
    made.source("t", memory([]), schema={"ts": "timestamp"})
    with pytest.raises(SqlError, match='Declare it at the source \\(time="ts"'):
        made.sql(f"SELECT count(*) AS n FROM t GROUP BY TUMBLE(ts, {TEN})")


def test_the_line_with_the_mistake_is_shown_with_its_number():
    with pytest.raises(SqlError) as caught:
        pipeline().sql("SELECT device,\n\t tmp\nFROM readings")
    assert str(caught.value).splitlines()[1:] == ["  2:   tmp", "       ^"]


def test_of_a_long_line_the_part_around_the_mistake_is_shown():
    items = ", ".join(f"temp + {number} AS t{number}" for number in range(50))
    with pytest.raises(SqlError) as caught:
        pipeline().sql(f"SELECT {items}, tmp, {items} FROM readings")
    _, line, caret = str(caught.value).splitlines()
    assert len(line) <= SHOWN_CHARS_MAX + 10
    assert line[caret.index("^") :].startswith("tmp")


def test_the_caret_stands_under_the_place_after_wide_characters():
    with pytest.raises(SqlError) as caught:
        pipeline().sql("SELECT '東京' AS city, tmp FROM readings")
    _, line, caret = str(caught.value).splitlines()
    assert line.index("tmp") + 2 == caret.index("^")  # two characters are two places wide


def test_queries_may_not_stand_inside_each_other_without_end():
    depth = 500
    with pytest.raises(SqlError, match="stand inside each other"):
        pipeline().sql("SELECT * FROM (" * depth + "SELECT * FROM readings" + ")" * depth)


@pytest.mark.parametrize(
    "query",
    [
        f"SELECT {'(' * 3000}1{')' * 3000} FROM readings",
        f"SELECT temp FROM readings WHERE {' AND '.join(['temp > 1'] * 5000)}",
    ],
)
def test_a_query_too_deep_for_its_reader_is_refused(query: str):
    with pytest.raises(SqlError, match="nested too deeply"):
        pipeline().sql(query)


def test_a_query_is_text():
    with pytest.raises(PipelineError, match="5 is not a query"):
        pipeline().sql(5)  # type: ignore[arg-type]


WHOLE = [
    f"SELECT device , count ( * ) AS n FROM readings r WHERE r . temp > 1 GROUP BY device , TUMBLE ( ts , {TEN} ) HAVING count ( * ) > 1",
    f"SELECT r . temp FROM readings r LEFT JOIN alarms x ON r . device = x . device AND x . at BETWEEN r . ts AND r . ts + {TEN}",
    f"SELECT * FROM readings MATCH_RECOGNIZE ( ORDER BY ts MEASURES A . ts AS s PATTERN ( A B + ) WITHIN {TEN} DEFINE B AS B . temp > A . temp )",
    f"WITH q AS ( SELECT * FROM readings ) SELECT device FROM TABLE ( HOP ( TABLE q , DESCRIPTOR ( ts ) , {TEN} , {TEN} ) ) GROUP BY device , window_end",
]
WORDS = [*sorted({word for query in WHOLE for word in query.split()}), "NULL", "?", "[", "::", "`", "'", "@", ";", "UNION", "ALL", "OVER", "=>"]  # fmt: skip


@examples(300)
@given(
    query=st.sampled_from(WHOLE),
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(["", *WORDS])), min_size=1, max_size=4
    ),
)
def test_whatever_is_wrong_is_an_error_with_a_place_and_adds_nothing(query: str, changes: list[tuple[float, str]]):
    words = query.split()
    for where, word in changes:
        words[int(where * len(words))] = word
    made, error = pipeline(), None
    try:
        made.sql(" ".join(words))
    except SqlError as raised:
        error = raised
    if error is not None:
        assert error.offset is not None
        assert len(made._graph.steps) == 2
