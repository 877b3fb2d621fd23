"""Results do not depend on how rows are batched, on the number of tasks, on restarts or on the barrier mode.

The oracle is a plain Polars query over the rows that are not late.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples

from fordstone import Pipeline, tumbling
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.errors import CheckpointError, PipelineError

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double", "i": "bigint"}
START = datetime(1969, 12, 31, 23, 59, 30, tzinfo=UTC)
LATENESS_S = 5

row = st.tuples(
    st.sampled_from(["a", "b", "é", "", None]),
    st.integers(0, 90),
    st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.nan), st.just(-0.0)),
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
)
partitions = st.lists(st.lists(row, max_size=30), min_size=1, max_size=3)


def record(given):
    k, second, x, i = given
    return (k, START + timedelta(seconds=second), x, i)


def in_open_windows(partition):
    newest, kept = None, []
    for one in partition:
        if newest is None or one[1] // 10 * 10 + 10 > newest - LATENESS_S:
            kept.append(one)
        newest = one[1] if newest is None else max(newest, one[1])
    return kept


def frame_of(rows) -> pl.DataFrame:
    schema: dict[str, Any] = {"k": pl.String, "ts": pl.Datetime("us", "UTC"), "x": pl.Float64, "i": pl.Int64}
    return pl.DataFrame([record(one) for one in rows], schema=schema, orient="row")


def oracle(frame: pl.DataFrame, *keys) -> pl.DataFrame:
    x, i = pl.col("x"), pl.col("i")
    known = x.count() > 0
    return frame.group_by(*keys).agg(
        n=pl.len().cast(pl.Int64),
        s=pl.when(known).then(x.sum()),
        mean=pl.when(known).then(x.mean()),
        lo=x.min(),
        hi=pl.when(x.is_nan().any()).then(math.nan).otherwise(x.max()),
        isum=pl.when(i.count() > 0).then(i.sum()),
    )


AGGREGATES = {"n": "count(*)", "s": "sum(x)", "mean": "avg(x)", "lo": "min(x)", "hi": "max(x)", "isum": "sum(i)"}


def both_nan(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isnan(one) and math.isnan(other)


def same(got: pl.DataFrame, wanted: pl.DataFrame, keys: list[str]) -> None:
    got, wanted = got.select(wanted.columns).sort(keys), wanted.sort(keys)
    assert got.select(*keys, "n", "isum").equals(wanted.select(*keys, "n", "isum"))
    for name in ("s", "mean", "lo", "hi"):
        for one, other in zip(got[name], wanted[name], strict=True):
            assert one == other or both_nan(one, other) or math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize(("parallelism", "mode"), [(1, "aligned"), (3, "aligned"), (2, "unaligned"), (2, "blocking")])
@examples(12, HealthCheck.function_scoped_fixture)
@given(given_partitions=partitions, batch_rows=st.sampled_from([1, 3, 1000]))
def test_windows_and_running_results_equal_one_query(tmp_path_factory, parallelism, mode, given_partitions, batch_rows):
    windows, running, late = MemorySink(), MemorySink(), MemorySink()
    pipeline = Pipeline("results", mode=mode)
    rows = MemorySource([[record(one) for one in partition] for partition in given_partitions])
    stream = pipeline.source("rows", memory(rows), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
    closed = stream.group_by("k").window(tumbling("10s")).agg(**AGGREGATES)
    closed.sink("windows", memory(windows))
    if batch_rows == 3:
        closed.late.sink("late", memory(late))
    stream.group_by("k").agg(**AGGREGATES).sink("running", memory(running))
    state = tmp_path_factory.mktemp("state")
    pipeline.run(state=state, bounded=True, parallelism=parallelism, batch_rows=batch_rows, interval="5ms")

    kept = frame_of([one for partition in given_partitions for one in in_open_windows(partition)])
    start = pl.col("ts").dt.truncate("10s").alias("window_start")
    same(windows.rows(), oracle(kept, "k", start), ["k", "window_start"])
    everything = frame_of([one for partition in given_partitions for one in partition])
    latest = running.rows().group_by("k", maintain_order=True).last() if running.rows().height else running.rows()
    same(latest, oracle(everything, "k"), ["k"])
    if batch_rows == 3:
        assert late.rows().height == everything.height - kept.height


def test_an_aggregate_without_keys_is_one_row(tmp_path):
    windows, running = MemorySink(), MemorySink()
    pipeline = Pipeline("keyless")
    rows = MemorySource([[record(("a", second, 1.0, second)) for second in range(25)]])
    stream = pipeline.source("rows", memory(rows), schema=SCHEMA, time="ts")
    stream.group_by().window(tumbling("10s")).agg(n="count(*)").sink("windows", memory(windows))
    stream.group_by().agg(n="count(*)", top="max(i)").sink("running", memory(running))
    pipeline.run(state=tmp_path, bounded=True, parallelism=3, interval="1h")
    assert windows.rows().sort("window_start")["n"].to_list() == [10, 10, 5]
    assert running.rows().select("n", "top").rows() == [(25, 24)]


def test_zero_and_minus_zero_are_one_key_shown_without_a_sign(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("zeros")
    stream = pipeline.source("rows", memory([[(-0.0,), (0.0,), (math.nan,), (math.nan,)]]), schema={"x": "double"})
    stream.group_by("x").agg(n="count(*)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    found = {str(x): n for x, n in out.rows().select("x", "n").iter_rows()}
    assert found == {"0.0": 2, "nan": 2}


def test_windows_of_windows_hold_exactly_those_that_lie_in_them(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("cascade")
    rows = MemorySource([[record(("a", second, 1.0, 1)) for second in range(90)]])
    stream = pipeline.source("rows", memory(rows), schema=SCHEMA, time="ts")
    tens = stream.group_by("k").window(tumbling("10s")).agg(n="count(*)")
    tens.group_by("k").window(tumbling("30s")).agg(windows="count(*)", n="sum(n)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    assert out.rows().sort("window_start").select("windows", "n").rows() == [(3, 30), (3, 30), (3, 30)]


def test_a_filter_on_running_results_deletes_keys_that_no_longer_pass(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("deletes")
    source = MemorySource([[(1,)]])
    stream = pipeline.source("rows", memory(source), schema={"k": "bigint"})
    stream.group_by("k").agg(n="count(*)").filter("n < 2").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    assert out.rows().select("k", "n", "__op").rows() == [(1, 1, "upsert")]


def test_rows_with_a_null_time_go_to_the_dead_letters(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("timeless")
    stream = pipeline.source(
        "rows", memory([[record(("a", 1, 1.0, 1)), ("b", None, 2.0, 2)]]), schema=SCHEMA, time="ts"
    )
    stream.sink("out", memory(out))
    report = pipeline.run(state=tmp_path, bounded=True)
    assert out.rows()["k"].to_list() == ["a"]
    assert report.progress.rows_rejected == 1
    (letters,) = (tmp_path / "timeless" / "node" / "dead-letters" / "rows").glob("epoch-*.jsonl")
    assert "is null" in letters.read_text()


def test_a_loop_sends_rows_around_until_they_may_leave(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("countdown")
    stream = pipeline.source("rows", memory([[(3,), (0,), (5,)]]), schema={"n": "bigint"})
    done = stream.with_columns("0 AS rounds").iterate(
        lambda s: (s.filter("n > 0").select("n - 1 AS n", "rounds + 1 AS rounds"), s.filter("n = 0", name="done"))
    )
    done.sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True, interval="5ms")
    assert sorted(out.rows()["rounds"].to_list()) == [0, 3, 5]


def test_a_run_that_has_ended_says_so_and_lets_nothing_out_again(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("twice")
    rows = MemorySource([[record(("a", 1, 1.0, 1)), record(("a", 2, 1.0, 2))]])
    pipeline.source("rows", memory(rows), schema=SCHEMA, time="ts").sink("out", memory(out))
    assert pipeline.run(state=tmp_path, bounded=True).outcome == "ended"
    again = pipeline.run(state=tmp_path, bounded=True)
    assert (again.outcome, again.progress.rows_in) == ("already_ended", 0)
    assert out.rows()["i"].to_list() == [1, 2]


def test_without_event_time_a_bounded_run_goes_on_with_what_has_come_since(tmp_path):
    out, source = MemorySink(), MemorySource([[(1,), (2,)]])
    pipeline = Pipeline("grows")
    stream = pipeline.source("rows", memory(source), schema={"n": "bigint"})
    around = stream.iterate(lambda s: (s.filter("n > 1").select("n - 1 AS n"), s.filter("n <= 1", name="leaves")))
    around.group_by("n").agg(c="count(*)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    source.append(0, [(3,)])
    source.append(source.add_partition(), [(4,)])
    report = pipeline.run(state=tmp_path, bounded=True)
    assert (report.outcome, report.progress.rows_in) == ("ended", 2)
    assert out.rows().select("n", "c").rows() == [(1, 2), (1, 4)]


def test_with_event_time_an_ended_pipeline_cannot_go_on(tmp_path):
    pipeline = Pipeline("timed")
    rows = MemorySource([[record(("a", 1, 1.0, 1))]])
    pipeline.source("rows", memory(rows), schema=SCHEMA, time="ts").sink("out", memory(MemorySink()))
    pipeline.run(state=tmp_path, bounded=True)
    with pytest.raises(CheckpointError, match="every further row would be late"):
        pipeline.run(state=tmp_path)


def test_the_mean_of_large_integers_does_not_wrap(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("mean")
    stream = pipeline.source("rows", memory([[(2**63 - 1,), (2**63 - 1,)]]), schema={"n": "bigint"})
    stream.group_by().agg(mean="avg(n)", total="sum(n)").sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    assert out.rows().select("mean", "total").rows() == [(float(2**63), -2)]


def test_ids_of_rows_released_at_once_are_different_for_different_rows(tmp_path):
    rows, windows = MemorySink(), MemorySink()
    pipeline = Pipeline("ids")
    schema = {"a": "string", "b": "string", "ts": "timestamp"}
    given = [("a|b", "c", START), ("a", "b|c", START), (None, "x", START), ("", "x", START), ("-", "x", START)]
    one = pipeline.source("one", memory([given]), schema=schema, time="ts")
    two = pipeline.source("two", memory([given]), schema=schema, time="ts")
    both = one.union(one.filter("b = 'x'"), two)
    both.sink("rows", memory(rows), release="at_once")
    both.group_by("a", "b").window(tumbling("10s")).agg(n="count(*)").sink(
        "windows", memory(windows), release="at_once"
    )
    pipeline.run(state=tmp_path, bounded=True)
    assert rows.rows().height == 13
    assert rows.rows()["__id"].n_unique() == 13
    assert windows.rows()["__id"].n_unique() == windows.rows().height == 5


def test_rows_that_a_function_left_without_a_time_are_late(tmp_path):
    out, late = MemorySink(), MemorySink()
    pipeline = Pipeline("nulls")
    stream = pipeline.source(
        "rows", memory([[record(("a", 1, 1.0, 1)), record(("b", 2, 2.0, 2))]]), schema=SCHEMA, time="ts"
    )
    mapped = stream.map(lambda row: row | {"ts": None} if row["k"] == "b" else row)
    windows = mapped.group_by("k").window(tumbling("10s")).agg(n="count(*)")
    windows.sink("out", memory(out))
    windows.late.sink("late", memory(late))
    report = pipeline.run(state=tmp_path, bounded=True)
    assert (out.rows()["k"].to_list(), late.rows()["k"].to_list(), report.progress.rows_late) == (["a"], ["b"], 1)


def test_an_absurd_time_goes_to_the_dead_letters(tmp_path):
    out = MemorySink()
    pipeline = Pipeline("absurd")
    times = pl.Series("ts", [0, 2**63 - 1], dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
    source = MemorySource([])
    source.append(source.add_partition(), pl.DataFrame([times]))
    stream = pipeline.source("rows", memory(source), schema={"ts": "timestamp"}, time="ts")
    stream.group_by().window(tumbling("10s")).agg(n="count(*)").sink("out", memory(out))
    report = pipeline.run(state=tmp_path, bounded=True)
    assert (out.rows()["n"].to_list(), report.progress.rows_rejected) == ([1], 1)


def test_loops_cannot_be_nested():
    stream = Pipeline("nested").source("rows", memory([[(1,)]]), schema={"n": "bigint"})
    with pytest.raises(PipelineError, match="cannot be nested"):
        stream.iterate(lambda outer: (outer.iterate(lambda inner: (inner, inner)), outer))


@pytest.mark.parametrize("late", [False, True])
def test_a_row_out_of_order_counts_while_its_window_is_open(tmp_path, late):
    """Without any lateness, every second row of ten a second out of order."""
    out, missed = MemorySink(), MemorySink()
    pipeline = Pipeline("disorder")
    seconds = [at + (1 if at % 2 == 0 else -1) for at in range(10)]
    rows = [record(("a", 30 + second, 1.0, 1)) for second in [*seconds, 3_600, 5]]
    stream = pipeline.source("rows", memory([rows]), schema=SCHEMA, time="ts", check_time_unit=False)
    windows = stream.group_by("k").window(tumbling("1h")).agg(n="count(*)")
    windows.sink("out", memory(out))
    if late:
        windows.late.sink("late", memory(missed))
    report = pipeline.run(state=tmp_path, bounded=True, batch_rows=3)
    assert out.rows().sort("window_start")["n"].to_list() == [10, 1]
    assert report.progress.rows_late == 1
    assert report.progress.late == 'up to 1us too late; lateness="1us" at source rows would have counted them'
    if late:
        assert missed.rows().columns == list(SCHEMA)
        assert missed.rows().height == 1
