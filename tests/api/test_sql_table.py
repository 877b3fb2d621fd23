"""JOIN in SQL of a stream with a table and with a control table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.api.sql_runs import READINGS, ROWS, rows_of

from fordstone import Pipeline, Stream
from fordstone.connectors import files, memory
from fordstone.errors import PipelineError
from fordstone.lang.sql.syntax import SqlError
from fordstone.plan import plan as p

SITES = [{"id": "a", "site": "north", "temp": 2.0}, {"id": "b", "site": "south", "temp": 9.0}]
LIMITS = {"device": "string", "high": "double"}


def pipeline(*, control: bool = False) -> Pipeline:
    made = Pipeline("queries")
    made.source("readings", memory([ROWS]), schema=READINGS, time="ts", lateness="1m")
    made.table("sites", SITES)
    made.table("owners", [{"device": "a", "owner": "Ann"}])
    if control:
        made.control("limits", schema=LIMITS, key="device")
    return made


def test_rows_find_their_row_in_a_table_by_key():
    query = "SELECT r.device, s.site, r.temp, s.temp AS usual FROM readings r JOIN sites s ON s.id = r.device WHERE r.temp < 4"
    assert rows_of(pipeline().sql(query)) == [("a", "north", 1.0, 2.0), ("a", "north", 3.0, 2.0)]


def test_in_a_left_join_rows_without_a_partner_have_nulls():
    query = "SELECT r.device, site FROM readings r LEFT JOIN sites ON r.device = sites.id WHERE sites.id IS NULL"
    assert rows_of(pipeline().sql(query)) == [("A", None)]


def test_in_a_left_join_a_key_of_one_name_is_null_on_the_right_only():
    query = "SELECT r.device, o.device AS found, owner FROM readings r LEFT JOIN owners o ON r.device = o.device WHERE ts > TIMESTAMP '2026-01-01 00:00:10Z'"
    assert rows_of(pipeline().sql(query)) == [("A", None, None), ("a", "a", "Ann"), ("b", None, None)]
    assert list(pipeline().sql("SELECT * FROM readings r LEFT JOIN owners o ON r.device = o.device").schema) == [
        "device", "ts", "temp", "device_right", "owner",
    ]  # fmt: skip


def test_other_conditions_of_an_inner_join_filter_what_it_gives():
    query = (
        "SELECT r.device, r.temp FROM readings r JOIN sites s ON r.device = s.id AND r.temp > s.temp AND s.site <> 'x'"
    )
    assert rows_of(pipeline().sql(query)) == [("a", 3.0), ("a", 5.0), ("b", 20.0)]


def test_the_time_stays_so_that_windows_may_follow_and_several_tables_are_joined():
    query = """
        SELECT s.site, o.owner, window_start, count(*) AS n FROM readings r
        JOIN sites s ON r.device = s.id LEFT JOIN owners o ON o.device = r.device
        GROUP BY s.site, o.owner, TUMBLE(ts, INTERVAL '10' SECOND)
    """
    assert rows_of(pipeline().sql(query)) == [
        ("north", "Ann", "00:00:00", 2),
        ("north", "Ann", "00:00:10", 1),
        ("south", None, "00:00:00", 1),
        ("south", None, "00:00:20", 1),
    ]


@pytest.mark.parametrize("kind", ["rows", "frame", "declared"])
def test_a_table_may_be_given_for_one_query(kind: str, tmp_path: Path):
    (tmp_path / "sites.csv").write_text("id,site,temp\na,north,2.0\n")
    made = pipeline()
    columns = {"id": "string", "site": "string", "temp": "double"}
    given: dict[str, Any] = {
        "rows": SITES[:1],
        "frame": pl.DataFrame(SITES[:1]),
        "declared": made.table("csv", files(str(tmp_path / "sites.csv")), schema=columns),
    }
    query = "SELECT site, r.temp FROM readings r JOIN t ON t.id = r.device WHERE r.temp > 3"
    assert rows_of(made.sql(query, tables={"t": given[kind]})) == [("north", 5.0)]


def test_a_declared_table_is_looked_up_in_from_python_too():
    made = pipeline()
    readings = Stream(made._graph, p.Input("readings"))
    found = readings.lookup(made._graph.tables["owners"], on="device", how="inner").select("owner", "temp")
    assert rows_of(found) == [("Ann", 1.0), ("Ann", 3.0), ("Ann", 5.0)]


def test_a_join_with_a_control_table_is_join_control():
    made = pipeline(control=True)
    query = "SELECT r.device, r.temp, l.high FROM readings r JOIN limits l ON l.device = r.device AND r.temp > l.high"
    assert list(made.sql(query).schema) == ["device", "temp", "high"]
    (joined,) = [step for step in made._graph.steps if isinstance(step, p.LookupLatest)]
    assert (joined.control, joined.keys, joined.how, joined.waits) == (p.Input("limits"), ("device",), "inner", False)
    left = pipeline(control=True).sql("SELECT ts, high FROM readings r LEFT JOIN limits ON r.device = limits.device")
    assert left._type.time is not None, "rows go on at once and keep their time"


REFUSED = [
    ("SELECT * FROM sites", "sites is a table, which rows of a stream are joined with", "sites"),
    ("SELECT * FROM limits", "Write the stream first: FROM readings JOIN limits", "limits"),
    ("SELECT * FROM sites s JOIN readings r ON r.device = s.id", "Write the stream first", "sites"),
    ("SELECT * FROM readings r RIGHT JOIN sites s ON r.device = s.id", "RIGHT JOIN with a table is not supported", "RIGHT"),
    ("SELECT * FROM readings r FULL JOIN limits s ON r.device = s.device", "Use JOIN or LEFT JOIN", "FULL"),
    ("SELECT * FROM readings r JOIN sites s ON r.temp > s.temp", "ON names no columns that are equal", "r.temp"),
    ("SELECT * FROM readings r LEFT JOIN sites s ON r.device = s.id AND r.temp > 1", "holds equal columns only", "r.temp"),
    ("SELECT * FROM readings r JOIN sites s ON r.temp = s.id", "has type double on the left", "JOIN"),
    ("SELECT * FROM readings r JOIN limits l ON r.temp = l.high", "does not name the key of limits, which is (device)", "JOIN"),
    ("SELECT s.nope FROM readings r JOIN sites s ON r.device = s.id", "there is no column 'nope' in s", "s.nope"),
    ("SELECT * FROM readings r JOIN sitse s ON r.device = s.id", "Did you mean sites?", "sitse"),
    ("SELECT * FROM readings r JOIN limits FOR SYSTEM_TIME AS OF r.ts AS l ON l.device = r.device", "leave FOR SYSTEM_TIME out", "FOR"),
]  # fmt: skip


@pytest.mark.parametrize(("query", "message", "under"), REFUSED)
def test_what_cannot_be_joined_is_refused_with_its_place(query: str, message: str, under: str):
    with pytest.raises(SqlError) as caught:
        pipeline(control=True).sql(query)
    assert message in caught.value.message, str(caught.value)
    assert caught.value.offset == query.index(under), str(caught.value)


def test_tables_that_cannot_be_are_refused():
    made = pipeline()
    with pytest.raises(PipelineError, match="there is a table or a step 'sites' already"):
        made.table("sites", SITES)
    with pytest.raises(PipelineError, match="there is a table or a step 'readings' already"):
        made.table("readings", SITES)
    with pytest.raises(PipelineError, match="step 'sites' has the name of a table"):
        made.source("sites", memory([]), schema=READINGS)
    with pytest.raises(PipelineError, match="table other: a lookup needs the columns of its table"):
        made.table("other", files("sites.csv"))
    with pytest.raises(
        PipelineError, match=r"tables\['t'\] is neither a stream of this pipeline nor a table: .* with p.table"
    ):
        made.sql("SELECT * FROM t", tables={"t": 1})  # type: ignore[dict-item]  # the mistake
    with pytest.raises(PipelineError, match=r"tables\['t'\] belongs to another pipeline"):
        made.sql("SELECT * FROM t", tables={"t": Stream(pipeline()._graph, p.Input("readings"))})
