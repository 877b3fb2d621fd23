"""Snapshots: what `explain --on spark` prints is read by people and compared by machines, so every change of it shows here."""

from __future__ import annotations

import pytest

from fordstone import Pipeline, tumbling
from fordstone.api.stream import Stream
from fordstone.connectors import files, stdout
from fordstone.errors import ConfigError
from fordstone.plan.plan import Plan
from fordstone.spark.explain import explain

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double"}


def cold_chain() -> Plan:
    p = Pipeline("cold-chain")
    readings = p.source("readings", files("in/*.jsonl"), schema=SCHEMA, time="ts", lateness="5s")
    more = p.source("more", files("more/*.parquet"), schema=SCHEMA, time="ts", lateness="5s", on_error="fail")
    both = readings.union(more)
    both.filter("temp > 40", name="hot").sink("alarms", files("out/alarms", format="jsonl"), release="at_once")
    windows = both.group_by("device").window(tumbling("10s")).agg(n="count(*)")
    windows.group_by("device").ewma(alpha=0.5, mean="n").sink("trend", files("out/trend", format="parquet"))
    windows.late.sink("late", files("out/late", format="parquet"))
    return p.plan()


def parquet(p: Pipeline) -> Stream:
    return p.source("rows", files("in/*.parquet"), schema=SCHEMA, time="ts", lateness="5s")


def totals() -> Plan:
    p = Pipeline("totals")
    rows = p.source("rows", files("in/*.parquet"), schema=SCHEMA)
    rows.group_by().agg(n="count(*)", hi="max(temp)").filter("n > 1").sink("out", stdout())
    return p.plan()


def two_queries() -> Plan:
    p = Pipeline("two")
    parquet(p).group_by("device").window(tumbling("10s")).agg(n="count(*)").sink("windows", files("out", format="csv"))
    p.source("other", files("other/*.parquet"), schema=SCHEMA).sink("copy", files("copy", format="parquet"))
    return p.plan()


def looped() -> Plan:
    p = Pipeline("rounds")
    again = parquet(p).iterate(lambda rows: (rows.filter("temp > 1"), rows.filter("temp <= 1")), name="round")
    again.sink("out", stdout())
    return p.plan()


COLD_CHAIN = """\
pipeline cold-chain
  guarantee  exactly_once
  runs       on Spark: hosted, as one query; a micro-batch is an epoch
  because    step readings: it reads JSON lines, where rows that cannot be read become dead letters: that takes our reader
             step alarms: release='at_once' needs ids that our reader gives
             step agg_device: its late rows are wanted, and Spark drops them
             step agg_device: Spark judges lateness by micro-batch and by the furthest file, and drops late rows
             step ewma_device: its results depend on the order of rows, which Spark's own operators do not keep
             step ewma_device: it shares the way to a sink with agg_device, and Spark's streams take one stateful step on a way
             sinks read hot, ewma_device, agg_device.late, and natively each would be a query of its own, whose results would not become visible together

readers: our operators run where rows are read
  readings: source files('in/*.jsonl')
  │  columns   device string, ts timestamp, temp double
  │  time      ts, rows may be 5s behind, and 1h ahead of the clock
  │  bad rows  go to the dead letters
  │  keeps     the position of every partition
  └─ union: union of readings, more
     ├─ hot: keep rows where temp > 40
     │  └─ alarms: sink files('out/alarms', format='jsonl')
     │        releases  with the micro-batch, with ids (__id) to deduplicate by
     └─ → stage 1, agg_device: rows, shuffled by device (not combined first: late rows are wanted as they came)
  more: source files('more/*.parquet')
  │  columns   device string, ts timestamp, temp double
  │  time      ts, rows may be 5s behind, and 1h ahead of the clock
  │  bad rows  stop the pipeline
  │  keeps     the position of every partition
  └─ union: as above

stage 1, behind a shuffle: our operators, in 4 shards
  agg_device: 10s windows for each device
  │  runs      hosted. Its late rows are wanted, and Spark drops them.
  │  computes  count(*) AS n
  │  columns   device string, window_start timestamp, window_end timestamp, n bigint
  │  time      window_end
  │  keeps     partial aggregates of open windows
  ├─ → stage 2, ewma_device: rows, shuffled by device
  └─ late rows: late: sink files('out/late', format='parquet')
        releases  with the micro-batch

stage 2, behind a shuffle: our operators, in 4 shards
  ewma_device: exponentially weighted mean for each device, alpha 0.5
  │  runs     hosted. Its results depend on the order of rows, which Spark's own operators do not keep.
  │  smooths  CAST(n AS DOUBLE) AS mean
  │  columns  device string, window_start timestamp, window_end timestamp, n bigint, mean double
  │  keeps    the rows that wait for time, and one number a key and column
  └─ trend: sink files('out/trend', format='parquet')
        releases  with the micro-batch

guarantees
  more → alarms      exactly_once  rows carry ids (__id) by which the receiver drops what it has seen
  readings → alarms  exactly_once  rows carry ids (__id) by which the receiver drops what it has seen
  more → trend       exactly_once  replay and one commit per epoch
  readings → trend   exactly_once  replay and one commit per epoch
  more → late        exactly_once  replay and one commit per epoch
  readings → late    exactly_once  replay and one commit per epoch
"""

TOTALS = """\
pipeline totals
  guarantee  exactly_once
  runs       on Spark: native, as one query; a micro-batch is an epoch
  because    Spark's own operators give the same results here.

readers
  rows: source files('in/*.parquet')
  │  columns   device string, ts timestamp, temp double
  │  time      none
  │  bad rows  stop the query
  │  keeps     the names of the files that were read
  └─ → stage 1, agg: partial aggregates, all to one shard (combined first)

stage 1, behind a shuffle: Spark's own operators
  agg: running aggregate over all rows
  │  runs      native. Spark's own aggregate means the same.
  │  computes  count(*) AS n, max(temp) AS hi
  │  columns   n bigint, hi double
  │  rows      each replaces the one before
  │  keeps     one row
  └─ filter: keep rows where n > 1
     └─ out: sink stdout(format='jsonl')
           releases  with the micro-batch

guarantees
  rows → out  at_least_once  sink out (stdout) cannot tell what it has already shown
"""

TWO_QUERIES = """\
pipeline two
  guarantee  exactly_once
  runs       on Spark: native, as 2 queries, which know nothing of each other; a micro-batch is an epoch
  because    Asked for with native='always'.
  differs    step rows: natively rows without a time in ts are dropped, not kept as dead letters
             step agg_device: Spark judges lateness by micro-batch and by the furthest file, and drops late rows
             sinks read agg_device, other, and natively each would be a query of its own, whose results would not become visible together

readers
  rows: source files('in/*.parquet')
  │  columns   device string, ts timestamp, temp double
  │  time      ts, rows may be 5s behind, and 1h ahead of the clock
  │  bad rows  stop the query; those without a time in ts are left out
  │  keeps     the names of the files that were read
  └─ → stage 1, agg_device: partial aggregates, shuffled by device (combined first)
  other: source files('other/*.parquet')
  │  columns   device string, ts timestamp, temp double
  │  time      none
  │  bad rows  stop the query
  │  keeps     the names of the files that were read
  └─ copy: sink files('copy', format='parquet')
        releases  with the micro-batch

stage 1, behind a shuffle: Spark's own operators
  agg_device: 10s windows for each device
  │  runs      native. As asked for, although Spark judges lateness by micro-batch and by the furthest file, and drops late rows.
  │  computes  count(*) AS n
  │  columns   device string, window_start timestamp, window_end timestamp, n bigint
  │  time      window_end
  │  keeps     partial aggregates of open windows
  └─ windows: sink files('out', format='csv')
        releases  with the micro-batch

guarantees
  rows → windows  exactly_once  replay and one commit per epoch
  other → copy    exactly_once  replay and one commit per epoch
"""

ROUNDS = """\
pipeline rounds
  guarantee  exactly_once
  runs       on the edge only: loop round cannot run on Spark: a Spark query has no way back. Run this pipeline on the edge engine, or write the loop out as the steps of a few rounds.
"""


def test_a_hosted_pipeline_shows_its_stages_and_why_each_stateful_step_is_ours():
    assert explain(cold_chain(), shards=4) == COLD_CHAIN


def test_a_native_pipeline_says_that_results_are_the_same():
    assert explain(totals()) == TOTALS


def test_native_because_it_was_asked_for_says_what_differs():
    assert explain(two_queries(), native="always") == TWO_QUERIES


def test_a_loop_cannot_run_on_spark_and_the_text_says_why():
    assert explain(looped()) == ROUNDS


def test_a_batch_job_lets_all_out_at_its_end():
    text = explain(totals(), bounded=True, native="never")
    assert "  runs       on Spark: hosted, as a batch job; all is let out at its end\n" in text
    assert "  because    Asked for with native='never'.\n" in text
    assert "  │  runs      hosted. Asked for with native='never'.\n" in text
    assert "           releases  at the end\n" in text


def test_a_seed_from_the_edge_makes_a_native_pipeline_hosted():
    text = explain(totals(), seeded=True)
    assert "runs       on Spark: hosted" in text
    assert "runs      hosted. The pipeline runs as one, and cannot be native: it begins with the state" in text


def test_what_cannot_be_native_is_an_error_when_asked_for():
    with pytest.raises(ConfigError, match="native='always': step readings"):
        explain(cold_chain(), native="always")
