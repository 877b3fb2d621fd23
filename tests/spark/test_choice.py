"""Which way a plan runs on Spark, and the sentence that says why."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fordstone import Pipeline, tumbling
from fordstone.api.stream import Stream
from fordstone.connectors import MemorySink, files, generator, memory
from fordstone.connectors.files.settings import FileSettings
from fordstone.errors import ConfigError
from fordstone.plan.plan import Plan
from fordstone.spark.native.choice import choose
from fordstone.spark.native.parquet import refusal, spark_glob

SCHEMA = {"k": "string", "ts": "timestamp", "x": "double"}


def rows(pipeline: Pipeline, path: str = "in/*.parquet", *, timed: bool = True, **options: Any) -> Stream:
    if timed:
        options = {"time": "ts", "on_error": "fail", **options}
    return pipeline.source(f"rows{len(pipeline.functions)}", files(path), schema=SCHEMA, **options)


def out() -> Any:
    return memory(MemorySink())


def running() -> Plan:
    pipeline = Pipeline("running")
    totals = rows(pipeline).filter("x > 0").map(lambda row: row).group_by("k").agg(n="count(*)")
    totals.filter("n > 3").sink("out", out())
    totals.filter("n > 3", name="not_read")
    return pipeline.plan()


def windows(**options: Any) -> Plan:
    pipeline = Pipeline("windows")
    rows(pipeline, **options).group_by("k").window(tumbling("1s")).agg(name="win", n="count(*)").sink("out", out())
    return pipeline.plan()


def test_one_running_aggregate_over_parquet_files_is_native():
    choice = choose(running())
    assert choice.native
    assert [(step.step, step.way) for step in choice.steps] == [("agg_k", "native")]
    assert choice.of("agg_k").why == "Spark's own aggregate means the same."
    assert choice.obstacles == ()


def test_a_plan_without_state_is_native_too():
    pipeline = Pipeline("stateless")
    rows(pipeline, timed=False).filter("x > 0").sink("out", out())
    assert choose(pipeline.plan()).native
    assert choose(pipeline.plan(), streaming=False).native


def test_never_is_hosted_and_says_that_it_was_asked_for():
    choice = choose(running(), native="never")
    assert not choice.native
    assert choice.of("agg_k").way == "hosted"
    assert choice.why == choice.of("agg_k").why == "Asked for with native='never'."


def test_another_word_is_an_error():
    with pytest.raises(ConfigError, match="native='perhaps': it is 'auto', 'never', 'always'"):
        choose(running(), native="perhaps")  # type: ignore[arg-type]  # on purpose


def test_windows_are_hosted_because_of_late_rows_and_native_only_when_asked_for():
    choice = choose(windows())
    assert not choice.native
    assert choice.of("win").why.startswith("Spark judges lateness by micro-batch and by the furthest file")
    asked = choose(windows(), native="always")
    assert asked.native
    assert asked.of("win").way == "native"
    assert asked.of("win").why.startswith("As asked for, although Spark judges lateness")
    assert [obstacle.step for obstacle in asked.obstacles] == ["win"]


def test_windows_of_a_batch_job_are_hosted_because_it_has_no_late_rows():
    assert choose(windows(), streaming=False).of("win").why == "A batch job on Spark has no late rows: all count."


def test_a_source_that_keeps_rows_without_a_time_as_dead_letters_is_hosted():
    choice = choose(windows(on_error="keep"))
    assert "natively rows without a time in ts are dropped, not kept as dead letters" in choice.why
    assert choose(windows(on_error="keep"), native="always").native


def test_state_of_an_edge_checkpoint_needs_our_operators():
    choice = choose(running(), seeded=True)
    assert not choice.native
    assert "the state of an edge checkpoint" in choice.of("agg_k").why
    with pytest.raises(ConfigError, match="state of an edge checkpoint"):
        choose(running(), seeded=True, native="always")


def test_several_streams_with_sinks_are_hosted_so_that_they_stay_together():
    pipeline = Pipeline("several")
    stream = rows(pipeline, timed=False)
    stream.filter("x > 0", name="high").sink("one", out())
    stream.filter("x < 0", name="low").sink("two", out())
    choice = choose(pipeline.plan())
    assert not choice.native
    assert choice.why.startswith("Sinks read high, low, and natively each would be a query of its own")
    assert choose(pipeline.plan(), native="always").native


def test_several_sinks_of_one_stream_are_native():
    pipeline = Pipeline("shared")
    stream = rows(pipeline, timed=False)
    stream.sink("one", out())
    stream.sink("two", out())
    assert choose(pipeline.plan()).native


def late(pipeline: Pipeline) -> None:
    closed = rows(pipeline).group_by("k").window(tumbling("1s")).agg(name="win", n="count(*)")
    closed.sink("out", out())
    closed.late.sink("late", out())


def smoothed(pipeline: Pipeline) -> None:
    rows(pipeline).group_by("k").ewma(alpha=0.5, name="smooth", mean="x").sink("out", out())


def looped(pipeline: Pipeline) -> None:
    stream = rows(pipeline, timed=False)
    again = stream.iterate(lambda inside: (inside.filter("x > 1"), inside.filter("x <= 1")), name="round")
    again.sink("out", out())


def json(pipeline: Pipeline) -> None:
    rows(pipeline, "in/*.jsonl").group_by("k").agg(n="count(*)").sink("out", out())


def csv(pipeline: Pipeline) -> None:
    rows(pipeline, "in/*.csv").group_by("k").agg(n="count(*)").sink("out", out())


def made_up(pipeline: Pipeline) -> None:
    pipeline.source("made", generator(rows=1), schema=SCHEMA).sink("out", out())


def chained(pipeline: Pipeline) -> None:
    first = rows(pipeline).group_by("k").window(tumbling("1s")).agg(name="first", n="count(*)")
    first.group_by("k").window(tumbling("1m")).agg(name="second", n="sum(n)").sink("out", out())


def beside(pipeline: Pipeline) -> None:
    stream = rows(pipeline)
    one = stream.group_by("k").window(tumbling("1s")).agg(name="first", n="count(*)")
    one.union(stream.group_by("k").window(tumbling("1m")).agg(name="second", n="count(*)")).sink("out", out())


def at_once(pipeline: Pipeline) -> None:
    rows(pipeline, timed=False).sink("out", out(), release="at_once")


def touched(pipeline: Pipeline) -> None:
    stream = rows(pipeline).map_batches(lambda frame: frame)
    stream.group_by("k").window(tumbling("1s")).agg(name="win", n="count(*)").sink("out", out())


def untyped(pipeline: Pipeline) -> None:
    rows(pipeline, timed=False).select("NULL AS nothing", name="bare").sink("out", out())


@pytest.mark.parametrize(
    ("build", "step", "why"),
    [
        (late, "win", "its late rows are wanted, and Spark drops them"),
        (smoothed, "smooth", "its results depend on the order of rows"),
        (looped, "round", "it is a loop, and a Spark query has no way back"),
        (json, "rows0", "it reads JSON lines, where rows that cannot be read become dead letters"),
        (csv, "rows0", "it reads CSV"),
        (made_up, "made", "its rows come from 'generator', for which Spark has no reader of its own"),
        (chained, "second", "it shares the way to a sink with first"),
        (beside, "second", "it shares the way to a sink with first"),
        (at_once, "out", "release='at_once' needs ids that our reader gives"),
        (touched, "win", "a function stands before it, behind which Spark knows no watermark"),
        (untyped, "bare", "column nothing has no type but null"),
    ],
)
def test_what_spark_cannot_do_is_hosted_and_asking_for_it_is_an_error_that_names_the_step(build, step, why):
    pipeline = Pipeline("hard")
    build(pipeline)
    choice = choose(pipeline.plan())
    assert not choice.native
    assert any(obstacle.hard and obstacle.step == step and why in obstacle.why for obstacle in choice.obstacles)
    with pytest.raises(ConfigError) as error:
        choose(pipeline.plan(), native="always")
    assert str(error.value).startswith(f"native='always': step {step}: {why}")


@pytest.mark.parametrize("build", [chained, beside, touched])
def test_a_batch_job_may_be_native_with_several_stateful_steps_and_functions_before_windows(build):
    pipeline = Pipeline("batch")
    build(pipeline)
    assert choose(pipeline.plan(), native="always", streaming=False).native


def test_a_stateful_step_without_an_obstacle_of_its_own_names_that_of_the_pipeline():
    pipeline = Pipeline("one")
    json(pipeline)
    why = choose(pipeline.plan()).of("agg_k").why
    assert why.startswith("The pipeline runs as one, and cannot be native: step rows0: it reads JSON lines")


# Patterns of files.


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("in/**/*.parquet", "'**' finds other directories"),
        ("in/one.parquet", "is one file"),
        ("in/{a,b}*.parquet", "means something else to Spark"),
        ("in/a\\*.parquet", "means something else to Spark"),
        ("in:1/*.parquet", "means something else to Spark"),
        ("in/[!x]*.parquet", "means something else to Spark"),
        ("in/a[.]*.parquet", "means something else to Spark"),
        ("in/_*.parquet", "begins with '_'"),
        ("in/.x*.parquet", "begins with '.'"),
    ],
)
def test_a_stream_of_files_that_spark_would_find_otherwise_is_refused_and_a_batch_is_not(path, why):
    assert why in (refusal(FileSettings(path=path), streaming=True) or "")
    assert refusal(FileSettings(path=path), streaming=False) is None


@pytest.mark.parametrize("path", ["in/*", "in/*.*", "in/*.txt"])
def test_files_whose_name_does_not_say_the_format_are_refused_unless_the_source_says_it(path):
    assert "format='parquet' would" in (refusal(FileSettings(path=path), streaming=True) or "")
    assert refusal(FileSettings(path=path, format="parquet"), streaming=True) is None


def test_compressed_files_are_refused():
    assert "compressed" in (refusal(FileSettings(path="in/*.gz", format="parquet"), streaming=False) or "")


@pytest.mark.parametrize(
    ("path", "spelt"),
    [
        ("/in/*.parquet", "/in/[^._]*.parquet"),
        ("/in/*/part-?.pq", "/in/[^.]*/part-?.pq"),
        ("/in/?ay/a[0-9]*.parquet", "/in/[^.]ay/a[0-9]*.parquet"),
        ("/in/a[!0-9].parquet", "/in/a[^0-9].parquet"),
    ],
)
def test_patterns_are_spelt_so_that_hidden_files_stay_hidden(path, spelt):
    assert refusal(FileSettings(path=path), streaming=True) is None
    assert spark_glob(FileSettings(path=path)) == spelt


def test_the_working_directory_is_no_pattern(tmp_path, monkeypatch):
    odd = tmp_path / "a[1]"
    odd.mkdir()
    monkeypatch.chdir(odd)
    assert spark_glob(FileSettings(path="in/*.parquet")) == f"{tmp_path}/a\\[1\\]/in/[^._]*.parquet"


def test_choosing_and_explaining_need_no_pyspark():
    # The package itself is left out: it is for users who run on Spark, and may load what they need.
    code = (
        "import sys, types, importlib.util\n"
        "spec = importlib.util.find_spec('fordstone')\n"
        "package = types.ModuleType('fordstone.spark')\n"
        "package.__path__ = [spec.submodule_search_locations[0] + '/spark']\n"
        "sys.modules['fordstone.spark'] = package\n"
        "import fordstone.spark.native.choice, fordstone.spark.explain\n"
        "sys.exit('pyspark' in sys.modules or 'pyarrow' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
