"""What `memory(...)` takes, what it refuses at once, and rows that a generator gives while the pipeline runs."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.waiting import until

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.connectors.feed import UNREAD_ROWS_MAX, FedSource
from fordstone.errors import ConfigError, FordstoneError, SchemaError, SourceError, TaskError

ROWS = [{"n": 1, "name": "a"}, {"n": 2, "name": "b"}]
COLUMNS = {"n": [1, 2], "name": ["a", "b"]}
SCHEMA = {"n": "bigint", "name": "string"}
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def generated(rows: list[Any] = ROWS) -> Iterator[Any]:
    yield from rows


async def awaited(rows: list[Any] = ROWS) -> AsyncIterator[Any]:
    for row in rows:
        await asyncio.sleep(0)
        yield row


def copied(given: object, schema: dict[str, str] | None = SCHEMA, **options: Any) -> pl.DataFrame:
    sink, pipeline = MemorySink(), Pipeline("copy")
    pipeline.source("rows", memory(given), schema=schema).sink("out", memory(sink))
    pipeline.run(bounded=True, **options)
    return sink.rows()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ROWS,
        lambda: tuple(ROWS),
        lambda: [ROWS],
        lambda: [ROWS[:1], ROWS[1:]],
        lambda: [(1, "a"), (2, "b")],
        lambda: [[(1, "a"), (2, "b")]],
        lambda: [((1, "a"), (2, "b"))],
        lambda: [ROWS[:1], pl.DataFrame(ROWS[1:])],
        lambda: pl.DataFrame(COLUMNS),
        lambda: pl.LazyFrame(COLUMNS),
        lambda: pd.DataFrame(COLUMNS),
        lambda: [pd.DataFrame(COLUMNS)],
        lambda: pa.table(COLUMNS),
        lambda: pa.RecordBatch.from_pydict(COLUMNS),
        {row["n"]: row for row in ROWS}.values,
        generated,
        lambda: generated([ROWS]),
        lambda: generated([pl.DataFrame(COLUMNS)]),
        lambda: generated([pd.DataFrame(COLUMNS)]),
        lambda: generated([(1, "a"), ROWS[1:]]),
        lambda: map(dict, ROWS),
        awaited,
    ],
)
def test_rows_frames_partitions_and_generators_are_read(make: Callable[[], object]):
    assert copied(make()).sort("n").to_dicts() == ROWS


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("rows.csv", "'rows.csv'.*no source of rows"),
        ({"n": 1}, "no source of rows"),
        (7, r"memory\(7\): .*no source of rows"),
        (None, "no source of rows"),
        (generated, r"Call it: memory\(rows\(\)\)"),
        ([1, 2], "1 is neither a list of rows nor a frame"),
        (["a"], "'a' is neither a list of rows nor a frame"),
        ([["a", 1], ["b", 2]], "row 0 is 'a'. A row is a mapping"),
        ([[{"n": 1}, 2]], "row 1 is 2. A row is a mapping"),
        ([{"n": 1}, [{"n": 2}]], "item 0 is a row, and item 1 is not"),
        (pl.Series([1]), "1 is neither"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(given: object, says: str):
    with pytest.raises(ConfigError, match=says):
        memory(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"n": 1, "nam": "a"}], "source rows: no row has the column 'name'. Did you mean 'nam'?"),
        ([{"n": 1}], "source rows: no row has the column 'name'. The rows have: n."),
        (pl.DataFrame({"x": [1]}), "source rows: no row has the column 'n'. The rows have: x."),
        (
            pl.DataFrame({"n": ["one"], "name": ["a"]}),
            "source rows: memory source: a frame does not have the declared types",
        ),
        (
            [(1, "a", True)],
            r"source rows: row 0 does not fit the schema: the row \(1, 'a', True\) has 3 values, and the schema 2 columns.",
        ),
        (
            [{"n": 1, "name": "a"}, {"n": 2.5, "name": "b"}],
            "row 1 does not fit the schema: column n: 2.5 is not a whole number.",
        ),
        ([{"n": "3", "name": "a"}], "row 0 does not fit the schema: column n: '3' is not a whole number."),
        (
            [{"n": True, "name": "a"}, {"n": 1 << 70, "name": "a"}],
            "n: True is not a whole number. It is the first of 2 rows",
        ),
        ([{"n": 1, "name": 2}], "row 0 does not fit the schema: column name: 2 is not a string."),
        (
            pl.DataFrame({"n": [2.5], "name": ["a"]}),
            "column 'n' of a frame is double, and not all of its values are bigint",
        ),
        (
            pl.DataFrame({"n": ["3"], "name": ["a"]}),
            "column 'n' of a frame is string, and not all of its values are bigint",
        ),
        (
            pl.DataFrame({"n": [True], "name": ["a"]}),
            "column 'n' of a frame is boolean, and not all of its values are bigint",
        ),
    ],
)
def test_rows_that_cannot_be_of_the_schema_are_refused_when_the_source_is_declared(given: object, says: str):
    with pytest.raises(SchemaError, match=says):
        Pipeline("p").source("rows", memory(given), schema=SCHEMA)


def test_a_column_may_be_missing_in_some_rows_and_rows_may_have_more():
    assert copied([{"n": 1, "more": True}, {"n": 2, "name": "b"}])["name"].to_list() == [None, "b"]


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        (ROWS, "n bigint, name string"),
        (pl.DataFrame(COLUMNS), "n bigint, name string"),
        (pa.table(COLUMNS), "n bigint, name string"),
        (pd.DataFrame({"ts": pd.to_datetime(["2026-01-01T12:00:00"]), "x": [1.5]}), "ts timestamp, x double"),
        ([[], [{"tags": ["a"], "ts": NOON}]], "tags array<string>, ts timestamp"),
    ],
)
def test_the_schema_may_be_that_of_the_rows(given: object, schema: str):
    stream = Pipeline("p").source("rows", memory(given))
    assert repr(stream) == f"Stream(rows: {schema})"


def test_times_of_pandas_are_in_utc():
    frame = pd.DataFrame({"ts": pd.to_datetime(["2026-01-01T12:00:00"])})
    assert copied(frame, None)["ts"].to_list() == [NOON]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([(1, "a")], "source rows: rows without names have no columns of their own. Add schema=."),
        ([], "source rows: no rows are there yet"),
        (generated(), "source rows: no rows are there yet"),
        ([{"n": 1}, {"n": "a"}], "source rows: the rows are not of one kind: column 'n' has text and other values"),
    ],
)
def test_without_rows_by_name_a_schema_is_needed(given: object, says: str):
    with pytest.raises(ConfigError, match=says):
        Pipeline("p").source("rows", memory(given))


# While it runs.


def test_a_live_source_ends_a_bounded_run_when_it_is_ended():
    source, sink, pipeline = MemorySource([[]], live=True), MemorySink(), Pipeline("live")
    pipeline.source("rows", memory(source), schema={"n": "bigint"}).sink("out", memory(sink))
    with pipeline.start(bounded=True, interval="5ms") as run:
        for number in range(3):
            source.append(0, [{"n": number}])
            until(lambda number=number: sink.rows().height == number + 1, "row")  # type: ignore[misc]
        assert run.running
        source.end()
        assert run.wait(60).outcome == "ended"


def test_rows_of_a_generator_come_while_it_still_waits():
    more, sink, pipeline = threading.Event(), MemorySink(), Pipeline("slow")

    def slow() -> Iterator[dict[str, int]]:
        yield {"n": 1}
        more.wait()
        yield {"n": 2}

    pipeline.source("rows", memory(slow()), schema={"n": "bigint"}).sink("out", memory(sink))
    with pipeline.start(bounded=True, interval="5ms") as run:
        until(lambda: sink.rows().height == 1, "first row")
        more.set()
        assert run.wait(60).outcome == "ended"
    assert sink.rows()["n"].to_list() == [1, 2]


def test_a_generator_without_end_is_not_read_ahead_of_the_run_and_what_was_sealed_is_not_kept():
    asked = 0

    def endless() -> Iterator[pl.DataFrame]:
        nonlocal asked
        for number in itertools.count():
            asked += 1_000
            yield pl.DataFrame({"n": range(number * 1_000, (number + 1) * 1_000)})

    live = FedSource(endless())
    sink, pipeline = MemorySink(), Pipeline("endless")
    pipeline.source("rows", memory(live), schema={"n": "bigint"}).filter("n % 1000 = 0").sink("out", memory(sink))
    with pipeline.start(interval="5ms", keep=1) as run:
        until(lambda: sink.rows().height > 300 and live._first_row > 100_000, "rows")
    assert run.report is not None
    numbers = sink.rows()["n"].to_list()
    assert numbers == list(range(0, len(numbers) * 1_000, 1_000))
    assert asked - run.report.progress.rows_in <= 3 * UNREAD_ROWS_MAX
    with pytest.raises(SourceError, match=r"were read by an earlier run, .*\n.*Declare the pipeline again"):
        pipeline.run()


def test_a_restart_reads_the_rows_of_a_generator_again():
    failed: list[bool] = []

    def fails_once(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] == 2 and not failed:
            failed.append(True)
            raise ConnectionError("away")
        return record

    sink, pipeline = MemorySink(), Pipeline("again")
    rows = ({"n": number} for number in range(4))
    pipeline.source("rows", memory(rows), schema={"n": "bigint"}).map(fails_once).sink("out", memory(sink))
    assert pipeline.run(bounded=True).progress.restarts == 1
    assert sink.rows()["n"].to_list() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ({"n": 1 // number} for number in (1, 0)), SourceError, "the generator failed: ZeroDivisionError"),
        (lambda: iter(["text"]), ConfigError, "'text' is neither a list of rows nor a frame"),
    ],
)
def test_a_generator_that_fails_stops_the_run(make: Callable[[], Any], error: type[FordstoneError], says: str):
    with pytest.raises(error, match=says) as caught:
        copied(make(), {"n": "bigint"})
    assert not isinstance(caught.value, TaskError), "it is not tried again"


def test_a_run_with_state_cannot_read_a_generator(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"a generator can be read once.*without state="):
        copied(generated(), state=tmp_path)


# Sinks.


def test_the_newest_rows_of_keys_and_pandas():
    sink, pipeline = MemorySink(), Pipeline("counts")
    rows = [{"k": "a"}, {"k": "b"}, {"k": "a"}]
    pipeline.source("rows", memory(rows)).group_by("k").agg(n="count(*)").filter("n > 1").sink("out", memory(sink))
    pipeline.run(bounded=True, batch_rows=1, interval="1ms")
    assert sink.latest().to_dicts() == [{"k": "a", "n": 2}]
    frame = sink.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert frame.columns.to_list() == sink.rows().columns


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    def missing(_: pl.DataFrame) -> None:
        raise ModuleNotFoundError("pandas")

    monkeypatch.setattr(pl.DataFrame, "to_pandas", missing)
    with pytest.raises(FordstoneError, match="pip install pandas pyarrow"):
        MemorySink().to_pandas()


@pytest.mark.parametrize("other", [[{"n": 3}, {"n": 2}], [{"n": 1}, {"n": 3}], [{"n": 1}], [{"n": 3}] * 3, []])
@pytest.mark.parametrize("options", [{"bounded": True}, {"available_now": True}], ids=str)
def test_state_is_not_continued_with_other_rows(tmp_path: Path, other: list[dict[str, int]], options: dict[str, Any]):
    def run(rows: object) -> MemorySink:
        sink = MemorySink()
        pipeline = Pipeline("p")
        pipeline.source("rows", memory([rows]), schema={"n": "bigint"}).sink("out", memory(sink))
        pipeline.run(state=str(tmp_path), **options)
        return sink

    rows = [{"n": 1}, {"n": 2}]
    assert run(rows).rows().height == 2
    with pytest.raises(SourceError, match="memory-000000 does not begin with the 2 rows that the state was made of"):
        run(other)
    assert run(pl.DataFrame([*rows, {"n": 3}])).rows().get_column("n").to_list()[-1] == 3
