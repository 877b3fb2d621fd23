from __future__ import annotations

import pytest
from tests.api.sql_runs import answer, columns, pipeline, refused, same_plan

from fordstone import Pipeline, Stream

WITHIN = "x.at BETWEEN r.ts - INTERVAL '1' SECOND AND r.ts + INTERVAL '8' SECOND"


def test_an_inner_join_is_the_one_of_the_api():
    same_plan(
        f"SELECT r.temp, x.level FROM readings r JOIN alarms x ON r.device = x.device AND {WITHIN}",
        lambda p: _readings(p).join(_alarms(p), on="device", between=("-1s", "8s")).select("temp", "level"),
    )


@pytest.mark.parametrize(
    "bound",
    [
        WITHIN,
        "x.at >= r.ts - INTERVAL '1' SECOND AND x.at <= r.ts + INTERVAL '8' SECOND",
        "r.ts - INTERVAL '1' SECOND <= x.at AND r.ts + INTERVAL '8' SECOND >= x.at",
        "r.ts BETWEEN x.at - INTERVAL '8' SECOND AND x.at + INTERVAL '1' SECOND",
        "(x.at + INTERVAL '1' SECOND) >= r.ts AND (x.at <= INTERVAL '8' SECOND + r.ts)",
        "x.at > r.ts - INTERVAL '1.000001' SECOND AND x.at < r.ts + INTERVAL '8.000001' SECOND",
        "at BETWEEN ts - INTERVAL '1' SECOND AND ts + INTERVAL '3' SECOND + INTERVAL '5' SECOND",
    ],
)
def test_the_bound_on_time_may_be_written_in_many_ways(bound: str):
    same_plan(
        f"SELECT * FROM readings r JOIN alarms x ON x.device = r.device AND {bound}",
        lambda p: _readings(p).join(_alarms(p), on="device", between=("-1s", "8s")),
    )


def test_results_of_an_inner_join():
    query = f"SELECT r.device, r.temp, x.level FROM readings r JOIN alarms x ON r.device = x.device AND {WITHIN}"
    assert answer(query) == [("a", 1.0, 1), ("a", 3.0, 1), ("b", 20.0, 2)]


def test_in_an_outer_join_the_missing_side_is_null_keys_too():
    for how, expected in (
        (
            "LEFT",
            [("A", None, None), ("a", None, None), ("a", "a", 1), ("a", "a", 1), ("b", None, None), ("b", "b", 2)],
        ),
        ("RIGHT OUTER", [(None, "c", 3), ("a", "a", 1), ("a", "a", 1), ("b", "b", 2)]),
        (
            "FULL",
            [
                (None, "c", 3),
                ("A", None, None),
                ("a", None, None),
                ("a", "a", 1),
                ("a", "a", 1),
                ("b", None, None),
                ("b", "b", 2),
            ],
        ),
    ):
        query = f"SELECT r.device, x.device AS d, x.level FROM readings r {how} JOIN alarms x ON r.device = x.device AND {WITHIN}"
        assert answer(query) == expected


def test_rows_without_a_partner_are_found_by_null():
    query = (
        f"SELECT x.level FROM readings r RIGHT JOIN alarms x ON r.device = x.device AND {WITHIN} WHERE r.device IS NULL"
    )
    assert answer(query) == [(3,)]


def test_conditions_on_one_side_filter_before_the_join():
    same_plan(
        f"SELECT * FROM readings r JOIN alarms x ON r.device = x.device AND {WITHIN} AND x.level > 1 AND r.temp < 5",
        _readings_and_alarms,
    )


def test_conditions_on_both_sides_filter_after_an_inner_join():
    query = f"SELECT r.temp FROM readings r JOIN alarms x ON r.device = x.device AND {WITHIN} AND r.temp + x.level > 3"
    assert answer(query) == [(3.0,), (20.0,)]


def test_a_condition_on_the_other_side_of_an_outer_join_filters_that_side():
    query = f"SELECT r.temp, x.level FROM readings r LEFT JOIN alarms x ON r.device = x.device AND {WITHIN} AND x.level > 1 WHERE r.temp > 6"
    assert answer(query) == [(7.0, None), (20.0, 2)]


def test_columns_of_one_name_are_distinguished_by_their_streams():
    query = "SELECT l.temp, r.temp AS later FROM readings l JOIN readings r ON l.device = r.device AND r.ts > l.ts AND r.ts < l.ts + INTERVAL '9' SECOND"
    assert answer(query) == [(1.0, 3.0), (3.0, 5.0)]
    assert columns(query.replace("l.temp, r.temp AS later", "*")) == ["device", "ts", "temp", "ts_right", "temp_right"]
    assert columns(query.replace("l.temp, r.temp AS later", "r.*")) == ["device", "ts", "temp"]


def test_three_streams_are_joined_one_after_the_other():
    query = """
        SELECT a.temp, b.temp AS t2, c.temp AS t3
        FROM readings a
        JOIN readings b ON a.device = b.device AND a.ts = b.ts
        JOIN readings c ON c.device = a.device AND c.ts BETWEEN a.ts AND a.ts + INTERVAL '3' SECOND AND c.temp > b.temp
    """
    assert answer(query) == [(1.0, 1.0, 3.0)]


def test_windows_of_two_streams_are_joined_by_their_ends():
    query = """
        WITH m AS (SELECT device, window_end, max(temp) AS top FROM readings GROUP BY device, TUMBLE(ts, INTERVAL '10' SECOND)),
             n AS (SELECT device, window_end, count(*) AS n FROM alarms GROUP BY device, TUMBLE(at, INTERVAL '10' SECOND))
        SELECT m.device, m.top, n.n FROM m JOIN n ON m.device = n.device AND m.window_end = n.window_end
    """
    assert answer(query) == [("a", 3.0, 1)]


@pytest.mark.parametrize(
    ("on", "message", "under"),
    [
        ("r.device = x.device", "AND x.at BETWEEN r.ts - INTERVAL '5' SECOND AND r.ts + INTERVAL '10' SECOND", "r.device ="),
        ("r.device = x.device AND x.at > r.ts", "a bound on time on both sides", "r.device ="),
        ("r.device = x.device AND x.at > r.ts AND x.at < r.ts", "no rows can be this far apart", "r.device ="),
        (WITHIN, "ON names no columns that are equal", "x.at"),
        (f"r.temp = x.level AND {WITHIN}", "has type double on the left", "JOIN"),
        (f"r.device = x.device AND {WITHIN} AND tmp > 1", "there is no column 'tmp'", "tmp"),
        (f"device = x.device AND {WITHIN}", "column 'device' is in several streams. Write r.device or x.device.", "device ="),
        ("r.device = x.device AND x.at BETWEEN r.ts - INTERVAL '1' MONTH AND r.ts", "months and years", "'1'"),
    ],
)  # fmt: skip
def test_a_join_that_cannot_be_is_refused(on: str, message: str, under: str):
    refused(f"SELECT r.temp FROM readings r JOIN alarms x ON {on}", message, under)


def test_an_outer_join_takes_no_conditions_on_both_sides():
    query = f"SELECT r.temp FROM readings r LEFT JOIN alarms x ON r.device = x.device AND {WITHIN} AND r.temp > x.level"
    refused(query, "ON of a LEFT JOIN holds equal columns", "r.temp >")


def test_two_streams_of_one_name_are_refused():
    refused("SELECT 1 FROM alarms JOIN alarms ON true", "two streams in FROM are called alarms", "alarms", nth=1)


def test_a_stream_without_time_cannot_be_joined():
    query = "SELECT 1 AS one FROM (SELECT device FROM readings) a JOIN alarms b ON a.device = b.device"
    refused(query, "the left side has none", "JOIN")


def test_windows_after_a_join_go_by_the_time_of_the_pairs():
    join = "SELECT r.device, window_end AS e, count(*) AS n FROM readings r JOIN alarms x ON r.device = x.device AND x.at BETWEEN {low} AND r.ts + INTERVAL '8' SECOND GROUP BY r.device, TUMBLE({time}, INTERVAL '10' SECOND)"
    one_sided = join.replace("{low}", "r.ts")
    assert answer(one_sided.replace("{time}", "x.at")) == [("a", "00:00:10", 1), ("b", "00:00:20", 1)]
    both = join.replace("{low}", "r.ts - INTERVAL '1' SECOND")
    refused(both.replace("{time}", "r.ts"), "which is ts + INTERVAL '8' SECOND. Write that here.", "r.ts, INTERVAL")
    assert answer(both.replace("{time}", "r.ts + INTERVAL '8' SECOND")) == [
        ("a", "00:00:10", 1),
        ("a", "00:00:20", 1),
        ("b", "00:00:20", 1),
    ]


def _readings(made: Pipeline) -> Stream:
    return made.sql("SELECT * FROM readings")


def _alarms(made: Pipeline) -> Stream:
    return made.sql("SELECT * FROM alarms")


def _readings_and_alarms(made: Pipeline) -> Stream:
    high = _alarms(made).filter("level > 1")
    return _readings(made).filter("temp < 5").join(high, on="device", between=("-1s", "8s"))


def test_a_refused_join_leaves_no_filter_behind():
    made = pipeline()
    with pytest.raises(Exception, match="both sides"):
        made.sql("SELECT 1 AS one FROM readings r JOIN alarms x ON r.device = x.device AND x.level > 1 AND x.at > r.ts")
    assert len(made._graph.steps) == 2
