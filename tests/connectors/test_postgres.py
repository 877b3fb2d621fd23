"""The sink of PostgreSQL against a real server: types, keys, what it refuses and how it says so, and commits that are cut off."""

import datetime as dt
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import psycopg
import pytest
from tests.connectors.postgres_place import database_of
from tests.services.cut import CutProxy
from tests.services.postgres import PASSWORD, Postgres
from tests.waiting import until

from fordstone.connectors import postgres as table
from fordstone.connectors.base import ConnectorSpec, Sink, SinkDelayedError, SinkStream
from fordstone.connectors.postgres import server as postgres_server
from fordstone.connectors.registry import open_sink, sink_delivery, source_delivery
from fordstone.errors import ConfigError, FencedError, SinkError
from fordstone.lang.schema import Schema
from fordstone.protocol.lease import Fence

SCHEMA = Schema.of({"device": "string", "n": "bigint"})
STREAM = SinkStream(step="results", schema=SCHEMA, pipeline="p", node="n1", owner="state", start="1")
COMMIT = b"COMMIT\0"
"""As it is sent."""
UPSERTS = replace(STREAM, upsert_key=("device",))


class Place:
    """An empty database, and what is done in it."""

    def __init__(self, server: Postgres, dsn: str) -> None:
        self.server = server
        self.dsn = dsn
        self.name = dsn.split("dbname=")[1].split(maxsplit=1)[0]
        self.opened: list[Sink] = []

    def open(self, spec: ConnectorSpec | None = None, stream: SinkStream = STREAM) -> Sink:
        self.opened.append(open_sink(spec or table("results", self.dsn), stream))
        return self.opened[-1]

    def run(self, *statements: str) -> None:
        self.server.execute(*statements, database=self.name)

    def rows(self, query: str = "SELECT device, n FROM results ORDER BY n") -> list[tuple[Any, ...]]:
        return self.server.rows(query, self.name)

    @contextmanager
    def proxy(self) -> Iterator[tuple[CutProxy, str]]:
        """A proxy that cuts, and the dsn through it."""
        proxy = CutProxy(self.server.port)
        yield proxy, self.dsn.replace(f"port={self.server.port}", f"port={proxy.port}")
        proxy.close()


@pytest.fixture
def place(postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    made = Place(postgres, database_of(postgres, tmp_path))
    yield made
    for sink in made.opened:
        sink.close()


def frame(*numbers: int) -> pl.DataFrame:
    return pl.DataFrame({"device": [f"d{number % 3}" for number in numbers], "n": list(numbers)}, schema=SCHEMA.polars)


def changes(*found: tuple[Any, ...]) -> pl.DataFrame:
    return pl.DataFrame(list(found), schema=SCHEMA.polars | {"__op": pl.String}, orient="row")


# Types

TEXTS = ["", "a\tb\nc\rd\\e", "\\N", "\\.", '"', "a,b", "ä€😀", "{}", "NULL", "  ", None]
TIMES = [dt.datetime(1, 1, 1, tzinfo=dt.UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC), None]
VALUES: dict[str, tuple[list[Any], str]] = {
    "boolean": ([True, False, None], "boolean"),
    "tinyint": ([-128, 127, None], "smallint"),
    "smallint": ([-(2**15), 2**15 - 1, None], "smallint"),
    "int": ([-(2**31), 2**31 - 1, None], "integer"),
    "bigint": ([-(2**63), 2**63 - 1, None], "bigint"),
    "float": ([0.5, math.inf, -math.inf, None], "real"),
    "double": ([0.1, 1e-320, 1.7976931348623157e308, math.inf, -math.inf, None], "double precision"),
    "string": (TEXTS, "text"),
    "binary": ([b"", b"\x00\xff\\", None], "bytea"),
    "date": ([dt.date(1, 1, 1), dt.date(9999, 12, 31), None], "date"),
    "timestamp": (TIMES, "timestamp with time zone"),
    "decimal(38,10)": ([Decimal("1234567890123456789012345678.0123456789"), Decimal("-0.0000000001"), None], "numeric(38,10)"),
    "array<string>": ([[*TEXTS], [], None], "text[]"),
    "array<double>": ([[0.1, None, -math.inf], []], "double precision[]"),
    "array<boolean>": ([[True, False, None]], "boolean[]"),
    "array<binary>": ([[b"\x00\\", None]], "bytea[]"),
    "array<timestamp>": ([TIMES], "timestamp with time zone[]"),
    "array<date>": ([[dt.date(2026, 1, 1), None]], "date[]"),
    "array<decimal(5,2)>": ([[Decimal("1.50"), None]], "numeric(5,2)[]"),
    "array<array<int>>": ([[[1, None], []], None], "jsonb"),
    "struct<a: int, b: string>": ([{"a": 1, "b": 'x"\\\n'}, None], "jsonb"),
    "map<string, double>": ([{"a": 0.5, "b": None}, {}], "jsonb"),
}  # fmt: skip


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_type_arrive_as_they_were(kind: str, place: Place) -> None:
    values, made = VALUES[kind]
    schema = Schema.of({"value": kind, "at": "int"})
    rows = pl.DataFrame({"value": values, "at": range(len(values))}, schema=schema.polars)
    place.open(stream=replace(STREAM, schema=schema)).release(1, rows)
    found = [value for (value,) in place.rows("SELECT value FROM results ORDER BY at")]
    assert found == values
    asked = "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'results'::regclass AND attname = 'value'"
    assert place.rows(asked) == [(made,)]


def test_nan_and_the_sign_of_zero_are_kept(place: Place) -> None:
    schema = Schema.of({"value": "double"})
    rows = pl.DataFrame({"value": [math.nan, -0.0]}, schema=schema.polars)
    place.open(stream=replace(STREAM, schema=schema)).release(1, rows)
    assert place.rows("SELECT value::text FROM results") == [("NaN",), ("-0",)]


def test_more_rows_than_are_encoded_at_a_time_arrive(place: Place) -> None:
    place.open().release(1, frame(*range(70_000)))
    assert place.rows("SELECT count(*), sum(n) FROM results") == [(70_000, sum(range(70_000)))]


def test_columns_are_named_exactly_and_tables_as_in_sql(place: Place) -> None:
    schema = Schema.of({'Sel"ect': "int", "ORDER": "int"})
    rows = pl.DataFrame({'Sel"ect': [1], "ORDER": [2]}, schema=schema.polars)
    place.run('CREATE SCHEMA "Plant"')
    for name, there in (("Alarms", "alarms"), ('"Plant"."A.b"', '"Plant"."A.b"')):
        sink = place.open(table(name, place.dsn), replace(STREAM, schema=schema))
        sink.release(1, rows)
        assert place.rows(f'SELECT "Sel""ect", "ORDER" FROM {there}') == [(1, 2)]
    assert place.rows('SELECT target, sink FROM "Plant".fordstone_epochs') == [('"Plant"."A.b"', "p/n1/results")]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("device text", r"no column 'n'"),
        ("device text, n int", r"column 'n' is bigint in the stream, and integer in the table"),
        ("device int, n bigint", r"column 'device' is string in the stream, and integer"),
        ("device text, n numeric(10,2)", r"'n' is bigint in the stream, and numeric\(10,2\)"),
        ("device text, n bigint, site text NOT NULL", r"no column 'site', which may not be null"),
    ],
)
def test_a_table_that_does_not_take_the_rows_is_an_error_that_shows_both(made: str, says: str, place: Place) -> None:
    place.run(f"CREATE TABLE results ({made})")
    with pytest.raises(SinkError, match=says) as raised:
        place.open()
    assert "stream: device string, n bigint\n" in str(raised.value)
    assert "table:  device" in str(raised.value)


def test_an_existing_table_may_have_wider_types_more_columns_and_another_order(place: Place) -> None:
    place.run(
        "CREATE DOMAIN label AS varchar(20)",
        "CREATE TABLE results (id bigint GENERATED ALWAYS AS IDENTITY, n numeric NOT NULL, site text NOT NULL DEFAULT 'x', device label)",
    )
    place.open().release(1, frame(1, 2))
    assert place.rows("SELECT id, n, site, device FROM results ORDER BY id") == [
        (1, Decimal(1), "x", "d1"),
        (2, Decimal(2), "x", "d2"),
    ]


def test_what_is_no_lasting_table_is_refused(place: Place) -> None:
    place.run("CREATE VIEW results AS SELECT 'a' AS device, 1::bigint AS n")
    with pytest.raises(SinkError, match="is not a table"):
        place.open()
    place.run("DROP VIEW results", "CREATE UNLOGGED TABLE results (device text, n bigint)")
    with pytest.raises(SinkError, match=r'UNLOGGED(.|\n)*ALTER TABLE "public"\."results" SET LOGGED'):
        place.open()


# Keys


def test_rows_of_a_key_replace_each_other_and_the_last_of_an_epoch_wins(place: Place) -> None:
    sink = place.open(stream=UPSERTS)
    sink.release(1, changes(("a", 1, "upsert"), ("b", 2, "upsert"), ("a", 3, "delete"), ("a", 4, "upsert")))
    sink.release(2, changes(("b", 5, "delete"), ("c", 6, "upsert"), ("c", 7, "delete"), ("nobody", 8, "delete")))
    assert place.rows() == [("a", 4)]


def test_a_sink_with_a_key_replaces_rows_of_a_stream_that_only_appends(place: Place) -> None:
    sink = place.open(table("results", place.dsn, key="device"))
    sink.release(1, frame(1, 2, 4))
    sink.release(2, frame(5))
    assert place.rows() == [("d1", 4), ("d2", 5)]


def test_columns_that_the_stream_does_not_have_keep_their_values(place: Place) -> None:
    place.run("CREATE TABLE results (device text PRIMARY KEY, n bigint, note text)")
    sink = place.open(stream=UPSERTS)
    sink.release(1, changes(("a", 1, "upsert")))
    place.run("UPDATE results SET note = 'seen'")
    sink.release(2, changes(("a", 2, "upsert")))
    assert place.rows("SELECT n, note FROM results") == [(2, "seen")]


def test_a_null_in_the_key_is_a_key_where_an_index_takes_nulls_for_distinct(place: Place) -> None:
    place.run("CREATE TABLE results (device text UNIQUE, n bigint)")
    sink = place.open(stream=UPSERTS)
    for epoch in (1, 2):
        sink.release(epoch, changes((None, epoch, "upsert"), ("a", epoch, "upsert")))
    assert place.rows("SELECT device, n FROM results ORDER BY device") == [("a", 2), (None, 2)]
    sink.release(3, changes((None, 3, "delete")))
    assert place.rows() == [("a", 2)]


def test_an_aggregate_over_all_rows_is_one_row(place: Place) -> None:
    sink = place.open(stream=replace(STREAM, upsert_key=()))
    sink.release(1, changes(("a", 1, "upsert"), ("a", 2, "upsert")))
    sink.release(2, changes(("a", 3, "upsert")))
    assert place.rows() == [("a", 3)]
    sink.release(3, changes(("a", 3, "delete")))
    assert place.rows() == []


def test_a_table_without_an_index_on_the_key_is_an_error_that_shows_how_to_make_one(place: Place) -> None:
    place.run("CREATE TABLE results (device text, n bigint)", "CREATE UNIQUE INDEX ON results (device) WHERE n > 0")
    with pytest.raises(SinkError, match="no unique index") as raised:
        place.open(stream=UPSERTS)
    place.run(str(raised.value).partition("Make one: ")[2])
    place.open(stream=UPSERTS).release(1, changes(("a", 1, "upsert")))
    assert place.rows() == [("a", 1)]


@pytest.mark.parametrize(
    ("spec", "stream", "says"),
    [
        (
            table("results", key="n"),
            UPSERTS,
            r"has key=\['n'\], but the rows of the stream replace each other by \['device'\]",
        ),
        (table("results", key="site"), STREAM, r"key column 'site' is not among device, n"),
        (table("results", epoch_column="n"), STREAM, r"the stream has a column 'n'"),
    ],
)
def test_keys_that_do_not_fit_the_stream_are_refused(spec: ConnectorSpec, stream: SinkStream, says: str) -> None:
    with pytest.raises(SinkError, match=says):
        open_sink(spec, stream)


# Once


def test_sinks_of_two_nodes_write_to_one_table(place: Place) -> None:
    other = replace(STREAM, node="n2", owner="other")
    one, two = place.open(), place.open(stream=other)
    for epoch in (1, 2):
        one.release(epoch, frame(epoch))
        two.release(epoch, frame(10 + epoch))
    two.release(2, frame(12))
    assert [n for _, n in place.rows()] == [1, 2, 11, 12]


def test_an_epoch_that_is_there_with_other_rows_is_an_error(place: Place) -> None:
    sink = place.open(stream=replace(STREAM, owner=""))
    sink.release(1, frame(1, 2))
    sink.release(2, frame(3))
    for epoch, rows in ((2, frame(4)), (2, frame(3, 3)), (1, frame(1, 2))):
        with pytest.raises(SinkError, match=r"already has epoch 2 of 'p/n1/results'"):
            sink.release(epoch, rows)
    assert [n for _, n in place.rows()] == [1, 2, 3]


def test_epochs_without_rows_write_nothing(place: Place) -> None:
    sink = place.open()
    sink.release(1, frame(1))
    before = place.rows("SELECT xmin, epoch FROM fordstone_epochs")
    sink.release(2, frame())
    assert place.rows("SELECT xmin, epoch FROM fordstone_epochs") == before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("upserts", [False, True])
def test_a_commit_that_is_cut_off_is_made_once(when: Any, upserts: bool, place: Place) -> None:
    rows = changes(("a", 1, "upsert"), ("b", 2, "upsert")) if upserts else frame(1, 2)
    with place.proxy() as (proxy, dsn):
        sink = place.open(table("results", dsn), UPSERTS if upserts else STREAM)
        proxy.arm(COMMIT, when)
        with pytest.raises(SinkDelayedError, match=r"could not write to postgres\('results'\)"):
            sink.release(1, rows)
        until(lambda: proxy.cuts == 1, "cut")
        assert len(place.rows()) == (2 if when == "after" else 0)
        sink.release(1, rows)
        sink.release(2, rows.tail(1).with_columns(n=pl.lit(9, dtype=pl.Int64)))
    assert [n for _, n in place.rows()] == ([1, 9] if upserts else [1, 2, 9])


def test_a_release_waits_for_a_commit_of_the_same_sink_that_is_still_under_way(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_server, "LOCK_TIMEOUT_MS", 200)
    sink = place.open()
    with psycopg.connect(f"{place.dsn} password={PASSWORD}") as under_way:
        under_way.execute("UPDATE fordstone_epochs SET epoch = 1, rows = 0, digest = ''")
        with pytest.raises(SinkDelayedError, match="lock timeout"):
            sink.release(1, frame(1))
        under_way.commit()
    with pytest.raises(SinkError, match="already has epoch 1"):
        sink.release(1, frame(1))


def test_a_replaced_writer_is_refused_in_the_transaction_that_would_show_its_rows(place: Place) -> None:
    old = place.open(stream=replace(STREAM, generation=Fence(1, 1)))
    old.release(1, frame(1))
    with psycopg.connect(f"{place.dsn} password={PASSWORD}") as under_way:
        # The new one has begun to take over, and the release of the old one waits for the lock.
        writer = replace(STREAM, owner="new", generation=Fence(2, 1)).writer
        under_way.execute("UPDATE fordstone_epochs SET writer = %s", [msgspec.json.encode(writer).decode()])
        found: list[BaseException] = []

        def release() -> None:
            try:
                old.release(2, frame(2))
            except FencedError as error:
                found.append(error)

        waiting = threading.Thread(target=release)
        waiting.start()
        until(lambda: bool(place.rows("SELECT 1 FROM pg_locks WHERE NOT granted")), "release that waits")
        under_way.commit()
        waiting.join(60)
    assert len(found) == 1
    assert place.rows() == [("d1", 1)]


def test_a_record_that_was_removed_is_an_error(place: Place) -> None:
    sink = place.open()
    sink.release(1, frame(1))
    place.run("DELETE FROM fordstone_epochs")
    with pytest.raises(SinkError, match=r'record of its epochs is gone from "public"\."fordstone_epochs"'):
        sink.release(2, frame(2))
    assert place.rows() == [("d1", 1)]


def test_commits_are_durable_where_the_server_would_confirm_them_too_early(place: Place) -> None:
    place.run(f"ALTER DATABASE {place.name} SET synchronous_commit = off")
    place.run("CREATE TABLE results (device text, n bigint, mode text DEFAULT current_setting('synchronous_commit'))")
    place.open().release(1, frame(1))
    assert place.rows("SELECT mode FROM results") == [("on",)]


# Later epochs than those of the state


def later(place: Place, stream: SinkStream, **options: Any) -> Sink:
    sink = place.open(table("results", place.dsn, **options), stream)
    for epoch in (1, 2, 3):
        sink.release(epoch, frame(epoch) if stream.upsert_key is None else changes(("a", epoch, "upsert")))
    return sink


def test_rows_of_later_epochs_are_taken_out_by_hand_where_they_do_not_carry_their_epoch(place: Place) -> None:
    later(place, STREAM)
    back = replace(STREAM, resumes_after=1, start="2")
    for discard in (False, True):
        with pytest.raises(SinkError, match=r"has epochs 2 to 3, but(.|\n)*by hand") as raised:
            place.open(stream=replace(back, discard_later=discard))
    statement = str(raised.value).partition("because its rows do not carry their epoch")[2].partition(": ")[2]
    place.run("DELETE FROM results WHERE n > 1", statement.partition(";")[0])
    place.open(stream=back).release(2, frame(2))
    assert [n for _, n in place.rows()] == [1, 2]


def test_rows_that_carry_their_epoch_are_not_taken_out_where_another_sink_numbers_its_epochs_too(place: Place) -> None:
    later(place, STREAM, epoch_column="epoch")
    spec = table("results", place.dsn, epoch_column="epoch")
    place.open(spec, replace(STREAM, node="n2", owner="other")).release(2, frame(20))
    with pytest.raises(SinkError, match="because other sinks write to the table"):
        place.open(spec, replace(STREAM, resumes_after=1, start="2", discard_later=True))
    assert place.rows("SELECT epoch, n FROM results ORDER BY n") == [(1, 1), (2, 2), (3, 3), (2, 20)]


def test_upserts_of_later_epochs_are_overwritten_as_their_input_is_read_again(place: Place) -> None:
    later(place, UPSERTS)
    back = replace(UPSERTS, resumes_after=1, start="2")
    with pytest.raises(SinkError, match="start once with --discard-later-output"):
        place.open(stream=back)
    sink = place.open(stream=replace(back, discard_later=True))
    assert place.rows() == [("a", 3)]
    sink.release(2, changes(("a", 2, "upsert")))
    assert place.rows() == [("a", 2)]


def test_a_fresh_start_is_possible_once_table_and_record_are_empty(place: Place) -> None:
    later(place, STREAM)
    fresh = replace(STREAM, owner="fresh", resumes_after=0)
    with pytest.raises(SinkError, match="--fresh") as raised:
        place.open(stream=fresh)
    place.run("TRUNCATE results", str(raised.value).partition("use --fresh: ")[2].partition(";")[0])
    place.open(stream=fresh).release(1, frame(1))
    assert [n for _, n in place.rows()] == [1]


# What goes wrong


def test_a_row_that_the_table_does_not_take_is_shown_with_the_constraint(place: Place) -> None:
    place.run("CREATE TABLE results (device text, n bigint CONSTRAINT small CHECK (n < 100))")
    sink = place.open()
    with pytest.raises(SinkError) as raised:
        sink.release(1, frame(1, 2, 300, 4))
    text = str(raised.value)
    assert text.startswith("sink results: could not write to postgres('results'): ")
    assert 'violates check constraint "small"' in text
    assert "The row: {'device': 'd0', 'n': 300}" in text
    assert "Nothing of epoch 1 was written" in text
    assert place.rows() == []
    place.run("ALTER TABLE results DROP CONSTRAINT small")
    sink.release(1, frame(1, 2, 300, 4))
    assert len(place.rows()) == 4


def test_a_key_that_is_there_already_is_named(place: Place) -> None:
    place.run("CREATE TABLE results (device text, n bigint PRIMARY KEY)", "INSERT INTO results VALUES ('x', 2)")
    with pytest.raises(SinkError, match=r'"results_pkey"\. Key \(n\)=\(2\) already exists\.\nThe row: .*\'n\': 2'):
        place.open().release(1, frame(1, 2))


def test_a_text_that_postgresql_cannot_store_is_shown(place: Place) -> None:
    rows = pl.DataFrame({"device": ["a", "b\0c"], "n": [1, 2]}, schema=SCHEMA.polars)
    with pytest.raises(SinkError, match=r"0x00(.|\n)*The row: .*'n': 2"):
        place.open().release(1, rows)


def test_of_upserts_the_constraint_and_the_values_are_shown(place: Place) -> None:
    place.run("CREATE TABLE results (device text PRIMARY KEY, n bigint CHECK (n < 100))")
    with pytest.raises(SinkError, match=r"results_n_check.*Failing row contains \(b, 200\)"):
        place.open(stream=UPSERTS).release(1, changes(("a", 1, "upsert"), ("b", 200, "upsert")))
    with pytest.raises(SinkError, match=r'null value in column "device"'):
        place.open(stream=UPSERTS).release(1, changes((None, 1, "upsert")))


def test_a_user_who_may_not_make_tables_is_shown_what_to_make(place: Place) -> None:
    place.run(
        "DROP ROLE IF EXISTS writer",
        f"CREATE ROLE writer LOGIN PASSWORD '{PASSWORD}'",
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
    )
    spec = table("results", place.dsn.replace("user=tester", "user=writer"))
    statements: list[str] = []
    for _ in range(2):  # the table, then that of epochs
        with pytest.raises(SinkError, match=r"cannot be made: permission denied for schema public") as raised:
            place.open(spec, UPSERTS)
        shown = [line.strip() for line in str(raised.value).splitlines() if line.startswith("  CREATE")]
        assert shown
        place.run(*shown)
        statements += shown
    assert statements[0].startswith('CREATE TABLE "public"."results" ("device" text, "n" bigint)')
    with pytest.raises(SinkError, match="permission denied for table fordstone_epochs"):
        place.open(spec, UPSERTS)
    place.run("GRANT SELECT, INSERT, UPDATE, DELETE ON results, fordstone_epochs TO writer")
    place.open(spec, UPSERTS).release(1, changes(("a", 1, "upsert")))
    assert place.rows() == [("a", 1)]


@pytest.mark.parametrize(
    ("change", "password", "says"),
    [
        ("", "wrong", "password authentication failed"),
        ("", None, "no password supplied"),
        ("dbname=nowhere", PASSWORD, 'database "nowhere" does not exist'),
    ],
)
def test_a_server_that_refuses_is_an_error_at_once(
    change: str, password: str | None, says: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSWORD")
    if password is not None:
        monkeypatch.setenv("PGPASSWORD", password)
    with pytest.raises(SinkError, match=rf"could not open postgres\('results'\): .*{says}"):
        place.open(table("results", f"{place.dsn} {change}"))


@pytest.mark.parametrize(
    ("role", "password", "database", "text", "other", "away"),
    [
        ("LOGIN", "wrong", "", b"password authentication failed", "Passwort ungültig", False),
        ("LOGIN", PASSWORD, "nowhere", b'database "nowhere" does not exist', "Datenbank fehlt", False),
        ("NOLOGIN", PASSWORD, "", b"is not permitted to log in", "darf sich nicht anmelden", False),
        ("LOGIN CONNECTION LIMIT 0", PASSWORD, "", b"too many connections", "zu viele Clients", True),
    ],
)
def test_refusals_are_recognized_in_any_language(
    role: str,
    password: str,
    database: str,
    text: bytes,
    other: str,
    away: bool,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place.run("DROP ROLE IF EXISTS foreign_user", f"CREATE ROLE foreign_user {role} PASSWORD '{PASSWORD}'")
    monkeypatch.setenv("PGPASSWORD", password)
    with place.proxy() as (proxy, dsn):
        proxy.reword(text, other.encode())
        spec = table("results", f"{dsn} user=foreign_user dbname={database or place.name}")
        with pytest.raises(SinkDelayedError if away else SinkError, match=rf"could not open .*{other}"):
            place.open(spec)


def test_a_long_statement_is_awaited_while_the_server_answers_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_server, "SILENCE_S", 0.01)
    with place.proxy() as (proxy, dsn), ThreadPoolExecutor() as pool:
        sink = place.open(table("results", dsn))
        with psycopg.connect(f"{place.dsn} password={PASSWORD}") as other:
            other.execute("SELECT * FROM fordstone_epochs FOR UPDATE")
            released = pool.submit(sink.release, 1, frame(1))
            until(lambda: proxy.connections > 2, "two looks at a server that keeps a statement waiting")
            assert not released.done()
        released.result()
    assert [n for _, n in place.rows()] == [1]


def test_a_statement_is_not_awaited_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_server, "STATEMENT_TIMEOUT_S", 0.01)
    sink = place.open()
    with psycopg.connect(f"{place.dsn} password={PASSWORD}") as other:
        other.execute("SELECT * FROM fordstone_epochs FOR UPDATE")
        with pytest.raises(SinkDelayedError, match="not answered within"):
            sink.release(1, frame(1))
    sink.release(1, frame(1))
    assert [n for _, n in place.rows()] == [1]


def test_a_server_that_is_away_delays_the_sink(place: Place) -> None:
    with place.proxy() as (proxy, dsn):
        sink = place.open(table("results", dsn))
        sink.release(1, frame(1))
        proxy.arm(b"SELECT epoch", "before", times=3)
        for _ in range(2):
            with pytest.raises(SinkDelayedError):
                sink.release(2, frame(2))
        with pytest.raises(ConnectionError, match="could not write"):  # which starts the run again from its checkpoint
            sink.write(frame(3))
        assert proxy.cuts == 3
        sink.release(2, frame(2))
    with pytest.raises(SinkDelayedError, match="Connection refused"):
        place.open(table("results", dsn))
    assert [n for _, n in place.rows()] == [1, 2]


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (psycopg.errors.DeadlockDetected, True),
        (psycopg.errors.SerializationFailure, True),
        (psycopg.errors.AdminShutdown, True),
        (psycopg.errors.CannotConnectNow, True),
        (psycopg.errors.TooManyConnections, True),
        (psycopg.errors.DiskFull, True),
        (psycopg.errors.LockNotAvailable, True),
        (psycopg.errors.ReadOnlySqlTransaction, True),
        (psycopg.errors.UniqueViolation, False),
        (psycopg.errors.InsufficientPrivilege, False),
        (psycopg.errors.UndefinedTable, False),
        (psycopg.errors.DataCorrupted, False),
        (psycopg.DataError, False),
    ],
)
def test_an_error_delays_the_sink_if_it_may_go_by_by_itself(error: type[psycopg.Error], away: bool) -> None:
    assert postgres_server.problem_of(error("text")).away is away


# Settings


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (table, "give the name of a table"),
        (lambda: table("t", query="SELECT 1"), "give the name of a table"),
        (lambda: table("t", "host=h password=geheim"), "its dsn has a password"),
        (lambda: table("t", "postgresql://u:geheim@h/db"), "its dsn has a password"),
        (lambda: table("t", "postgresql://u@h/db?sslmode=require&password=geheim"), "its dsn has a password"),
        (lambda: table("t", "host=h", dsn_from="X"), "not both"),
        (lambda: table("t", key=["a", "a"]), "each once"),
        (lambda: table("t", app=" "), "app="),
        (lambda: sink_delivery(table(query="SELECT 1")), "can be read only"),
        (lambda: source_delivery(table("t", key="a")), "key= is for sinks"),
    ],
)
def test_options_that_make_no_sense_are_refused_when_the_pipeline_is_built(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        make()
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize("dsn", ["host=h user=password", "postgresql://u@h/password", "passfile=/p host=h"])
def test_a_dsn_without_a_password_is_taken(dsn: str) -> None:
    assert table("t", dsn).options["dsn"] == dsn


def test_secrets_come_from_the_environment_of_the_process_that_writes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSWORD")
    specs = [table("results", place.dsn, password_from="SHOP_PASSWORD"), table("results", dsn_from="SHOP_DSN")]
    for number, spec in enumerate(specs):
        with pytest.raises(ConfigError, match=r"environment variable SHOP_.* is not set here"):
            place.open(spec)
        monkeypatch.setenv("SHOP_PASSWORD", PASSWORD)
        if number:
            monkeypatch.setenv("SHOP_DSN", f"{place.dsn} password={PASSWORD}")
        place.open(spec).release(number + 1, frame(number))
    assert len(place.rows()) == 2
    monkeypatch.setenv("SHOP_DSN", "host=h passwort=geheim")
    with pytest.raises(ConfigError, match="its dsn cannot be read") as raised:
        place.open(specs[1])
    assert "geheim" not in str(raised.value)


def test_without_the_package_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from fordstone.connectors import postgres\n"
        "from fordstone.connectors.base import SinkStream\n"
        "from fordstone.connectors.registry import open_sink, sink_delivery\n"
        "from fordstone.errors import NotInstalledError\n"
        "from fordstone.lang.schema import Schema\n"
        "print(sink_delivery(postgres('t')))\n"
        "try: open_sink(postgres('t'), SinkStream(step='s', schema=Schema.of({'n': 'int'})))\n"
        "except NotInstalledError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.splitlines()[0] == "exactly_once"
    assert "pip install 'fordstone[postgres]'" in done.stdout
