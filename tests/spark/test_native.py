"""Spark's own operators give the rows that the edge engine gives, from the same files.

One random table with everything that is easily got wrong: nulls, NaN, both zeros, infinities, integers beyond 2^53 and sums
that wrap, decimals, unicode and empty keys, times before 1970.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark.sql import DataFrame, SparkSession

from fordstone import Pipeline, tumbling
from fordstone.api.stream import Stream
from fordstone.connectors import MemorySink, files, memory
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.spark.native.column_types import spark_type
from fordstone.spark.native.native import lower, output_mode

SCHEMA = {
    "k": "string",
    "ts": "timestamp",
    "x": "double",
    "f": "float",
    "i": "bigint",
    "s": "smallint",
    "d": "decimal(12,2)",
    "b": "boolean",
    "day": "date",
    "raw": "binary",
    "tags": "array<string>",
    "a `quoted` name": "int",
}
LATENESS_S = 4
STREAM_SECONDS_MAX = 60
Build = Callable[[Stream], Stream]


def table(
    seed: int, *, rows: int = 400, start: datetime = datetime(1969, 12, 31, 23, 58, 0, tzinfo=UTC)
) -> pl.DataFrame:
    """Rows in order of time, but for some that are a little behind."""
    dice = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if dice.random() < 0.15 else value

    def row(at: int) -> tuple[Any, ...]:
        return (
            maybe(dice.choice(["a", "b", "é", "", "日本", "🙂"])),
            start + timedelta(seconds=at / 2 - dice.choice([0, 0, 0, LATENESS_S]), microseconds=dice.randrange(1000)),
            maybe(dice.choice([0.0, -0.0, math.nan, math.inf, dice.uniform(-1e6, 1e6)])),
            maybe(dice.choice([0.5, -0.0, math.nan, dice.randrange(1000) / 8])),
            maybe(dice.choice([2**53 + 1, -(2**63), 2**63 - 1, dice.randrange(100)])),
            maybe(dice.choice([-32768, 32767, 5])),
            maybe(Decimal(dice.randrange(-(10**11), 10**11)) / 100),
            maybe(dice.random() < 0.5),
            maybe(date(1960, 1, 1) + timedelta(days=dice.randrange(9000))),
            maybe(bytes([dice.randrange(256), 0xFF])),
            maybe([maybe(dice.choice(["u", "é"])) for _ in range(dice.randrange(3))]),
            maybe(dice.randrange(5)),
        )

    return pl.DataFrame([row(at) for at in range(rows)], schema=Schema.of(SCHEMA).polars, orient="row")


def write(frames: Iterable[pl.DataFrame], directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames):
        frame.write_parquet(directory / f"{number}.parquet", row_group_size=64)
    return f"{directory}/*.parquet"


@pytest.fixture(scope="module")
def pattern(tmp_path_factory) -> str:
    """The table, cut into files by time."""
    frame = table(1)
    return write([frame.slice(at, 200) for at in (0, 200)], tmp_path_factory.mktemp("input"))


def read(pipeline: Pipeline, pattern: str, name: str = "rows", **options: Any) -> Stream:
    return pipeline.source(name, files(pattern), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S + 1}s", **options)


def on_edge(pipeline: Pipeline, out: MemorySink, state: Path) -> pl.DataFrame:
    pipeline.run(state=state, bounded=True)
    return out.rows()


def in_batch(pipeline: Pipeline, spark: SparkSession) -> pl.DataFrame:
    (frame,) = lower(pipeline.plan(), spark, functions=pipeline.functions, streaming=False).values()
    return collected(frame)


def collected(frame: DataFrame) -> pl.DataFrame:
    found = pl.from_arrow(frame.toArrow())
    assert isinstance(found, pl.DataFrame)
    return found


def in_stream(pipeline: Pipeline, spark: SparkSession, checkpoint: Path) -> tuple[list[pl.DataFrame], Any]:
    """What came of each micro-batch of one file, and the query."""
    ((stream, frame),) = lower(
        pipeline.plan(), spark, functions=pipeline.functions, streaming=True, files_max=1
    ).items()
    found: list[pl.DataFrame] = []
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: found.append(collected(batch)))
        .outputMode(output_mode(pipeline.plan(), stream))
        .trigger(availableNow=True)
        .option("checkpointLocation", str(checkpoint))
        .start()
    )
    try:
        assert query.awaitTermination(STREAM_SECONDS_MAX), "the stream did not end"
    finally:
        query.stop()
    return found, query


def comparable(frame: pl.DataFrame) -> list[tuple[Any, ...]]:
    """Rows in an order of their own; floats by ten digits, because sums of floats depend on the order (rule 10)."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and math.isfinite(value):
            return float(f"{value:.9e}") + 0.0
        return [plain(item) for item in value] if isinstance(value, list) else value

    return sorted((tuple(plain(value) for value in row) for row in frame.iter_rows()), key=repr)


def assert_same(got: pl.DataFrame, wanted: pl.DataFrame) -> None:
    assert got.columns == wanted.columns
    assert list(map(repr, comparable(got))) == list(map(repr, comparable(wanted)))
    assert wanted.height > 0, "nothing was compared"


def latest(frames: Iterable[pl.DataFrame], keys: list[str]) -> pl.DataFrame:
    """The last row of each key."""
    every = pl.concat(frames)
    return every.group_by(keys, maintain_order=True).last().select(every.columns) if keys else every.tail(1)


def piped(pattern: str, build: Build, **options: Any) -> tuple[Pipeline, MemorySink]:
    pipeline, out = Pipeline("native"), MemorySink()
    build(read(pipeline, pattern, **options)).sink("out", memory(out))
    return pipeline, out


EXPRESSIONS = (
    "k",
    "upper(k) AS `the key`",
    "length(k) AS len",
    "x / f AS quotient",
    "i + 1 AS wrapped",
    "s * s AS square",
    "d / 3 AS third",
    "d * d AS product",
    "CAST(x AS bigint) AS whole",
    "coalesce(x, 0.0) > 1 AS large",
    "greatest(x, f) AS most",
    "round(x, 1) AS rounded",
    "hour(ts) AS hour",
    "ts + INTERVAL '90' MINUTE AS later",
    "day",
    "raw",
    "tags",
    "`a ``quoted`` name` % 0 AS nothing",
    "concat(k, '`', CAST(i AS string)) AS text",
)
TOTALS = {
    "n": "count(*)",
    "known": "count(x)",
    "total": "sum(x)",
    "mean": "avg(x)",
    "floats": "sum(f)",
    "lo": "min(x)",
    "hi": "max(x)",
    "isum": "sum(i)",
    "imean": "avg(i)",
    "ssum": "sum(s)",
    "dsum": "sum(d)",
    "dmean": "avg(d)",
    "first": "min(k)",
    "last": "max(raw)",
    "newest": "max(ts)",
    "any": "max(b)",
    "ratio": "sum(x) / count(*)",
    "spread": "max(i) - min(i)",
    "scaled": "round(sum(d) * 3, 1)",
}


@pytest.mark.parametrize(
    ("what", "build"),
    [
        ("filter", lambda rows: rows.filter("x > 0 OR k = 'é'")),
        ("select", lambda rows: rows.select(*EXPRESSIONS)),
        ("columns", lambda rows: rows.with_columns("i * 2 AS i", "x IS NULL AS unknown")),
        ("elements", lambda rows: rows.flat_map("tags AS tag").filter("k IS NOT NULL")),
        ("in place", lambda rows: rows.flat_map("tags").select("tags", "i")),
        ("map", lambda rows: rows.map(lambda row: {**row, "k": f"{row['k']}!"})),
        (
            "flat_map",
            lambda rows: rows.flat_map(
                lambda row: [{"k": row["k"], "n": n, "tags": row["tags"], "d": row["d"]} for n in range(2)],
                schema={"k": "string", "n": "int", "tags": "array<string>", "d": "decimal(12,2)"},
            ),
        ),
        ("map_batches", lambda rows: rows.map_batches(lambda frame: frame.with_columns(pl.col("i").fill_null(0)))),
        ("union", lambda rows: rows.filter("x > 0").union(rows.filter("i > 0"), rows)),
    ],
)
def test_steps_without_state_give_the_same_rows(spark, pattern, tmp_path, what, build):
    pipeline, out = piped(pattern, build)
    assert_same(in_batch(pipeline, spark), on_edge(pipeline, out, tmp_path))


@pytest.mark.parametrize("keys", [["k"], ["f"], ["x"], ["k", "b", "s"], ["d"], ["raw", "day"], []])
def test_running_totals_are_the_same_for_every_key(spark, pattern, tmp_path, keys):
    pipeline, out = piped(pattern, lambda rows: rows.group_by(*keys).agg(**TOTALS))
    found = in_batch(pipeline, spark)
    assert_same(found, latest([on_edge(pipeline, out, tmp_path)], keys))
    assert "-0.0" not in repr(found.select(keys).rows()), "both zeros are one key, shown without a sign"


def test_running_totals_of_a_stream_are_updated_with_each_micro_batch(spark, pattern, tmp_path):
    pipeline, out = piped(
        pattern,
        lambda rows: rows.map_batches(lambda frame: frame.filter(pl.col("k") != "b")).group_by("k").agg(**TOTALS),
    )
    found, _ = in_stream(pipeline, spark, tmp_path / "checkpoint")
    assert len([frame for frame in found if frame.height]) == 2
    assert_same(latest(found, ["k"]), latest([on_edge(pipeline, out, tmp_path / "edge")], ["k"]))


def test_keys_whose_totals_no_longer_pass_are_deleted(spark, pattern, tmp_path):
    pipeline, out = piped(
        pattern, lambda rows: rows.group_by("k").agg(n="count(*)").filter("n < 30").select("k AS key", "n + 1 AS n")
    )
    found, _ = in_stream(pipeline, spark, tmp_path / "checkpoint")
    assert {"upsert", "delete"} == set(pl.concat(found)["__op"])
    assert_same(latest(found, ["key"]), latest([on_edge(pipeline, out, tmp_path / "edge")], ["key"]))


def test_totals_over_nothing_have_no_row(spark, pattern, tmp_path):
    pipeline, _ = piped(pattern, lambda rows: rows.filter("x < -1e300").group_by().agg(n="count(*)", s="sum(x)"))
    assert in_batch(pipeline, spark).height == 0
    found, _ = in_stream(pipeline, spark, tmp_path)
    assert sum(frame.height for frame in found) == 0


WINDOWS: list[tuple[str, Build]] = [
    ("by key", lambda rows: rows.group_by("k").window(tumbling("7s")).agg(**TOTALS)),
    ("over all", lambda rows: rows.group_by().window(tumbling("1m")).agg(n="count(*)", top="max(ts)")),
    ("shifted", lambda rows: rows.group_by("b").window(tumbling("10s", offset="3s")).agg(n="count(*)", s="sum(i)")),
    (
        "selected",
        lambda rows: (
            rows.filter("i IS NOT NULL")
            .select("ts AS at", "k", "x")
            .flat_map("split(concat(k, ' all'), ' ') AS key")
            .group_by("key")
            .window(tumbling("2500ms"))
            .agg(n="count(*)", hi="max(x)")
            .filter("n > 1")
            .select("key", "window_end", "n")
        ),
    ),
    ("united", lambda rows: rows.union(rows.filter("x > 0")).group_by("k").window(tumbling("9s")).agg(n="count(*)")),
]


@pytest.mark.parametrize(("what", "build"), WINDOWS)
def test_windows_in_batch_are_the_same_before_and_after_1970(spark, pattern, tmp_path, what, build):
    pipeline, out = piped(pattern, build)
    assert_same(in_batch(pipeline, spark), on_edge(pipeline, out, tmp_path))


@pytest.mark.parametrize(("what", "build"), [WINDOWS[0], WINDOWS[3]])
def test_windows_of_a_stream_are_the_same_once_closed_and_no_row_is_dropped(spark, pattern, tmp_path, what, build):
    pipeline, out = piped(pattern, build)
    found, query = in_stream(pipeline, spark, tmp_path / "checkpoint")
    newest = table(1)["ts"].max()
    assert isinstance(newest, datetime)
    closed = pl.col("window_end") <= newest - timedelta(seconds=LATENESS_S + 1)
    got = pl.concat(found)
    assert_same(got, on_edge(pipeline, out, tmp_path / "edge").filter(closed))
    assert got["window_end"].min() < datetime(1970, 1, 1, tzinfo=UTC) < got["window_end"].max()  # type: ignore[operator]  # times
    dropped = [
        state.numRowsDroppedByWatermark for progress in query.recentProgress for state in progress.stateOperators
    ]
    assert dropped
    assert sum(dropped) == 0


def test_windows_of_windows_in_batch_hold_those_that_lie_in_them(spark, pattern, tmp_path):
    pipeline, out = piped(
        pattern,
        lambda rows: (
            rows.group_by("k")
            .window(tumbling("5s"))
            .agg(n="count(*)")
            .group_by("k")
            .window(tumbling("15s"))
            .agg(windows="count(*)", n="sum(n)")
        ),
    )
    assert_same(in_batch(pipeline, spark), on_edge(pipeline, out, tmp_path))


def test_a_slow_source_holds_the_windows_of_a_union_open(spark, tmp_path):
    fast = write([table(2)], tmp_path / "fast")
    slow = write([table(3).slice(0, 40)], tmp_path / "slow")
    pipeline, out = Pipeline("union"), MemorySink()
    both = read(pipeline, fast, "fast").union(read(pipeline, slow, "slow"))
    both.group_by("k").window(tumbling("5s")).agg(n="count(*)").sink("out", memory(out))
    found, _ = in_stream(pipeline, spark, tmp_path / "checkpoint")
    newest = table(3).slice(0, 40)["ts"].max()
    assert isinstance(newest, datetime)
    closed = pl.col("window_end") <= newest - timedelta(seconds=LATENESS_S + 1)
    assert_same(pl.concat(found), on_edge(pipeline, out, tmp_path / "edge").filter(closed))


def test_types_are_exactly_those_of_the_plan(spark, pattern):
    for build in (
        lambda rows: rows.select(*EXPRESSIONS),
        lambda rows: rows.group_by("k", "f").agg(**TOTALS),
        lambda rows: rows.group_by("d").window(tumbling("1s")).agg(**TOTALS),
    ):
        plan = piped(pattern, build)[0].plan()
        for streaming in (False, True):
            ((stream, frame),) = lower(plan, spark, functions={}, streaming=streaming).items()
            wanted = {name: spark_type(kind) for name, kind in stream_types(plan)[stream].schema.items()}
            given = {field.name: field.dataType for field in frame.schema if not field.name.startswith("__")}
            assert given == wanted


def test_every_stream_with_sinks_is_a_frame_of_its_own(spark, pattern):
    pipeline = Pipeline("several")
    rows = read(pipeline, pattern)
    rows.filter("x > 0", name="positive").sink("one", memory(MemorySink()))
    rows.group_by("k").agg(name="totals", n="count(*)").sink("two", memory(MemorySink()))
    plan = pipeline.plan()
    frames = lower(plan, spark, functions={}, streaming=True)
    assert set(frames) == {p.Input("positive"), p.Input("totals")}
    assert [output_mode(plan, stream) for stream in frames] == ["append", "update"]
    assert all(frame.isStreaming for frame in frames.values())


# Files, and what is not a row.


def numbers(pipeline: Pipeline, pattern: str, schema: dict[str, str], **options: Any) -> MemorySink:
    out = MemorySink()
    pipeline.source("rows", files(pattern), schema=schema, **options).sink("out", memory(out))
    return out


def test_columns_are_matched_by_name_and_widened_as_by_our_reader(spark, tmp_path):
    narrow = pl.DataFrame({"i": pl.Series([1, None], dtype=pl.Int16), "t": pl.Series([200, 7], dtype=pl.UInt8)})
    narrow = narrow.with_columns(x=pl.Series([1.5, None], dtype=pl.Float32), other=pl.lit("not read"))
    naive = pl.Series([datetime(1969, 5, 1, 1, 2, 3, 4000), None], dtype=pl.Datetime("ms"))
    pattern = write([narrow, pl.DataFrame({"i": [2**60, 5], "at": naive})], tmp_path / "in")
    pipeline = Pipeline("widened")
    out = numbers(pipeline, pattern, {"at": "timestamp", "i": "bigint", "x": "double", "t": "smallint", "gone": "date"})
    assert_same(in_batch(pipeline, spark), on_edge(pipeline, out, tmp_path / "state"))


@pytest.mark.parametrize("kind", ["tinyint", "array<tinyint>"])
def test_a_number_that_does_not_fit_stops_the_query_instead_of_changing(spark, tmp_path, kind):
    values = pl.Series([[300]] if "array" in kind else [300], dtype=pl.List(pl.Int32) if "array" in kind else pl.Int32)
    pattern = write([pl.DataFrame({"t": values})], tmp_path)
    pipeline = Pipeline("large")
    numbers(pipeline, pattern, {"t": kind})
    with pytest.raises(Exception, match=f"a value of column t does not fit {kind}"):
        in_batch(pipeline, spark)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pl.Series([1]), "int"),
        (pl.Series([1]), "double"),
        (pl.Series([1.0]), "float"),
        (pl.Series([b"x"]), "string"),
        (pl.Series([Decimal("1.25")], dtype=pl.Decimal(10, 2)), "decimal(10,1)"),
        (pl.Series([datetime(2020, 1, 1)], dtype=pl.Datetime("ns")), "timestamp"),
        (pl.Series([timedelta(1)]), "bigint"),
    ],
)
def test_a_file_that_spark_does_not_read_as_we_do_is_refused_by_name(spark, tmp_path, values, kind):
    pipeline = Pipeline("types")
    numbers(pipeline, write([pl.DataFrame({"v": values})], tmp_path), {"v": kind})
    for streaming in (False, True):
        with pytest.raises(SourceError, match=r"0\.parquet: column 'v' is .* does not read as"):
            lower(pipeline.plan(), spark, functions={}, streaming=streaming)


def test_a_file_with_none_of_the_columns_is_refused(spark, tmp_path):
    pipeline = Pipeline("none")
    numbers(pipeline, write([pl.DataFrame({"other": [1]})], tmp_path), {"v": "int"})
    with pytest.raises(SourceError, match="none of those declared"):
        lower(pipeline.plan(), spark, functions={}, streaming=True)


def test_the_same_files_are_found_whatever_their_names(spark, tmp_path):
    names = ["a b.parquet", "ü[1].parquet", "{x}.parquet", "%41.parquet", ".hidden.parquet", "_draft.parquet"]
    names += [
        "_k=1.parquet",
        "deep/c.parquet",
        ".dot/d.parquet",
        "_low/e.parquet",
        "k=1/f.parquet",
        "z.pq",
        "q?.parquet",
    ]
    for number, name in enumerate(names):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        pl.DataFrame({"v": [number], "k": ["own"]}).write_parquet(tmp_path / "in" / name)
    for at, pattern in enumerate(["in/*.parquet", "in/*/*.parquet", "in/[!x]*.parquet", "in/?*/?.parquet", "in/?.pq"]):
        pipeline = Pipeline("names")
        out = numbers(pipeline, str(tmp_path / pattern), {"v": "bigint", "k": "string"})
        wanted = on_edge(pipeline, out, tmp_path / f"state{at}")
        assert_same(in_batch(pipeline, spark), wanted)
        if at < 2:
            found, _ = in_stream(pipeline, spark, tmp_path / f"checkpoint{at}")
            assert_same(pl.concat(found), wanted)
    pipeline = Pipeline("deep")
    out = numbers(pipeline, str(tmp_path / "in/**/*.parquet"), {"v": "bigint", "k": "string"})
    assert_same(in_batch(pipeline, spark), on_edge(pipeline, out, tmp_path / "deep"))


def test_a_stream_refuses_a_pattern_that_matches_directories(spark, tmp_path):
    write([pl.DataFrame({"v": [1]})], tmp_path / "in" / "old.parquet")
    pipeline = Pipeline("directory")
    numbers(pipeline, f"{tmp_path}/in/*.parquet", {"v": "bigint"})
    with pytest.raises(SourceError, match=r"matches the directory .*old\.parquet"):
        lower(pipeline.plan(), spark, functions={}, streaming=True)


def test_rows_without_a_time_are_left_out_or_stop_the_query(spark, tmp_path):
    times = [datetime(2026, 1, 1, tzinfo=UTC), None]
    pattern = write([pl.DataFrame({"ts": times, "v": [1, 2]})], tmp_path / "in")
    kept = Pipeline("kept")
    out = numbers(kept, pattern, {"ts": "timestamp", "v": "bigint"}, time="ts")
    assert_same(in_batch(kept, spark), on_edge(kept, out, tmp_path / "state"))
    stopped = Pipeline("stopped")
    numbers(stopped, pattern, {"ts": "timestamp", "v": "bigint"}, time="ts", on_error="fail")
    with pytest.raises(Exception, match=r"column ts .* is null or out of range"):
        in_batch(stopped, spark)


def test_a_session_of_another_meaning_is_refused(spark, pattern):
    other = spark.newSession()
    other.conf.set("spark.sql.ansi.enabled", "true")
    pipeline, _ = piped(pattern, lambda rows: rows.filter("x > 0"))
    with pytest.raises(ConfigError, match=r"spark\.sql\.ansi\.enabled=true"):
        lower(pipeline.plan(), other, functions={}, streaming=False)


def test_what_cannot_be_native_is_an_error_that_names_the_step(spark, pattern):
    pipeline, _ = piped(
        pattern,
        lambda rows: rows.map(lambda row: row, name="touch").group_by("k").window(tumbling("1s")).agg(n="count(*)"),
    )
    with pytest.raises(ConfigError, match="step agg_k: a function stands before it"):
        lower(pipeline.plan(), spark, functions=pipeline.functions, streaming=True)
