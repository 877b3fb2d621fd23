"""Tables of PostgreSQL that rows are looked up in: what is read as what, one snapshot for all, and errors that say what to do."""

import datetime as dt
import math
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.postgres_place import database_of
from tests.services.postgres import PASSWORD, Postgres
from tests.waiting import until

from fordstone import Pipeline
from fordstone.connectors import MemorySink, memory
from fordstone.connectors import postgres as table
from fordstone.connectors.lookup_table import read_table
from fordstone.errors import PipelineError, SourceError
from fordstone.lang.schema import Schema

DEVICES = {"device": "string", "site": "string"}


@pytest.fixture
def place(postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Postgres, str]:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return postgres, database_of(postgres, tmp_path)


def run(place: tuple[Postgres, str], *statements: str) -> str:
    server, dsn = place
    server.execute(*statements, database=dsn.split("dbname=")[1].split()[0])
    return dsn


READ: dict[str, tuple[str, str, Any]] = {
    "boolean": ("boolean", "true", True),
    "smallint": ("smallint", "-32768", -(2**15)),
    "int": ("smallint", "7", 7),
    "bigint": ("integer", "7", 7),
    "double": ("numeric(10,3)", "1.125", 1.125),
    "float": ("real", "'-Infinity'", -math.inf),
    "string": ("uuid", "'6f1c3a6e-0d63-4a36-9d4b-0c7a2f0e2a11'", "6f1c3a6e-0d63-4a36-9d4b-0c7a2f0e2a11"),
    "binary": ("bytea", "'\\x00ff'", b"\x00\xff"),
    "date": ("date", "'2026-02-03'", dt.date(2026, 2, 3)),
    "timestamp": ("timestamp", "'2026-02-03 04:05:06.000007'", dt.datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=dt.UTC)),
    "decimal(10,2)": ("integer", "3", Decimal("3.00")),
    "array<string>": ("text[]", "ARRAY['a', NULL, '']", ["a", None, ""]),
    "array<double>": ("real[]", "ARRAY[0.5]", [0.5]),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_values_of_every_type_are_read(kind: str, place: tuple[Postgres, str]) -> None:
    made, written, value = READ[kind]
    dsn = run(place, f"CREATE TABLE t (v {made})", f"INSERT INTO t VALUES ({written}), (NULL)")
    found = read_table(table("t", dsn), Schema.of({"v": kind}))
    assert found.schema == Schema.of({"v": kind}).polars
    assert sorted(found["v"].to_list(), key=lambda one: one is None) == [value, None]


def test_a_timestamp_with_a_zone_and_an_enum_are_read_whatever_the_zone_of_the_server_is(
    place: tuple[Postgres, str],
) -> None:
    dsn = run(
        place,
        "CREATE TYPE colour AS ENUM ('red')",
        "CREATE TABLE t (c colour, at timestamptz)",
        "INSERT INTO t VALUES ('red', '2026-02-03 04:05:06+02')",
    )
    schema = Schema.of({"c": "string", "at": "timestamp"})
    found = read_table(table("t", f"{dsn} options='-c timezone=Asia/Tokyo'"), schema)
    assert found.rows() == [("red", dt.datetime(2026, 2, 3, 2, 5, 6, tzinfo=dt.UTC))]


@pytest.mark.parametrize(
    ("made", "schema", "says"),
    [
        ("device text", DEVICES, r"it has no column 'site'(.|\n)*database: device text"),
        (
            "device text, site bigint",
            {**DEVICES, "site": "int"},
            r"column 'site' is int in the pipeline, and bigint in the database",
        ),
        ("device text, site jsonb", {**DEVICES, "site": "struct<a: int>"}, r"cast the column in query="),
    ],
)
def test_a_table_that_does_not_fit_is_an_error_that_shows_both(
    made: str, schema: dict[str, str], says: str, place: tuple[Postgres, str]
) -> None:
    dsn = run(place, f"CREATE TABLE devices ({made})")
    with pytest.raises(SourceError, match=says):
        read_table(table("devices", dsn), Schema.of(schema))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"table": "nowhere"}, r"postgres\('nowhere'\) cannot be read: relation \"nowhere\" does not exist"),
        ({"query": "SELEC 1"}, r"syntax error at or near"),
        ({"query": "SELECT 'infinity'::timestamptz AS device"}, "does not fit|timestamp too large"),
    ],
)
def test_what_cannot_be_read_is_an_error(spec: dict[str, str], says: str, place: tuple[Postgres, str]) -> None:
    schema = Schema.of({"device": "timestamp"})
    with pytest.raises(SourceError, match=says):
        read_table(table(dsn=place[1], **spec), schema)


def test_rows_are_looked_up_in_a_query(place: tuple[Postgres, str]) -> None:
    dsn = run(
        place,
        "CREATE TABLE devices (device text, site text, active bool)",
        "INSERT INTO devices VALUES ('a', 'north', true), ('b', 'south', false)",
    )
    pipeline, found = Pipeline("looked_up"), MemorySink()
    rows = pipeline.source("rows", memory([{"device": "a"}, {"device": "b"}, {"device": "x"}]))
    active = table(query="SELECT device, site FROM devices WHERE active; ", dsn=dsn)
    rows.lookup(active, on="device", schema=DEVICES).sink("out", memory(found))
    pipeline.run(bounded=True)
    assert sorted(found.rows().rows(), key=str) == [("a", "north"), ("b", None), ("x", None)]


def test_all_subtasks_of_a_run_look_rows_up_in_the_same_rows_and_the_next_run_in_newer_ones(
    place: tuple[Postgres, str],
) -> None:
    query = "SELECT d.device, s.n FROM (SELECT random() AS n) s, (VALUES ('a'), ('b'), ('c'), ('d')) d (device)"
    seen: list[set[float]] = []
    for _ in range(2):
        pipeline, found = Pipeline("looked_up"), MemorySink()
        parts: list[Any] = [[{"device": name}] for name in "abcd"]
        rows = pipeline.source("rows", memory(parts), schema={"device": "string"})
        drawn = rows.lookup(table(query=query, dsn=place[1]), on="device", schema={"device": "string", "n": "double"})
        drawn.sink("out", memory(found))
        pipeline.run(bounded=True, parallelism=4)
        assert found.rows().height == 4
        seen.append(set(found.rows()["n"].to_list()))
    assert [len(numbers) for numbers in seen] == [1, 1]
    assert seen[0] != seen[1]


def test_a_query_that_writes_is_refused(place: tuple[Postgres, str]) -> None:
    dsn = run(place, "CREATE SEQUENCE reads")
    with pytest.raises(SourceError, match="in a read-only transaction"):
        read_table(table(query="SELECT nextval('reads') AS n", dsn=dsn), Schema.of({"n": "bigint"}))


def test_more_rows_than_are_fetched_at_a_time_are_read(place: tuple[Postgres, str]) -> None:
    spec = table(query="SELECT n FROM generate_series(1, 100000) n", dsn=place[1])
    assert read_table(spec, Schema.of({"n": "bigint"}))["n"].sum() == 5_000_050_000


def test_a_table_is_no_stream(place: tuple[Postgres, str]) -> None:
    with pytest.raises(
        PipelineError, match=r"source devices: postgres gives the rows of a table.*stream\.lookup\(postgres"
    ):
        Pipeline("p").source("devices", table("devices", place[1]), schema=DEVICES)


def test_two_rows_of_a_key_are_an_error_that_names_it(place: tuple[Postgres, str]) -> None:
    dsn = run(place, "CREATE TABLE devices AS SELECT 'a' AS device, n::text AS site FROM generate_series(1, 2) n")
    pipeline = Pipeline("looked_up")
    rows = pipeline.source("rows", memory(pl.DataFrame({"device": ["a"]})))
    rows.lookup(table("devices", dsn), on="device", schema=DEVICES).sink("out", memory(MemorySink()))
    with pytest.raises(SourceError, match="more than one row for device='a'"):
        pipeline.run(bounded=True)


def test_a_table_that_is_truncated_and_filled_while_it_is_read_is_not_found_empty(place: tuple[Postgres, str]) -> None:
    dsn = run(place, "CREATE TABLE devices (device text, site text)", "INSERT INTO devices VALUES ('a', 'north')")
    server, database = place[0], dsn.split("dbname=")[1].split()[0]
    found: list[pl.DataFrame] = []
    reads = threading.Thread(target=lambda: found.append(read_table(table("devices", dsn), Schema.of(DEVICES))))
    waiting = f"SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE d.datname = '{database}' AND NOT l.granted"
    with server.connect(database) as other:
        with other.transaction():
            other.execute("TRUNCATE devices")
            reads.start()
            until(lambda: server.rows(waiting)[0][0] == 1, "a reader that waits for the table", seconds_max=60)
            other.execute("INSERT INTO devices VALUES ('a', 'south')")
        reads.join(60)
    assert found[0].rows() == [("a", "south")]
