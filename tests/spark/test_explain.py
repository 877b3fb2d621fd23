"""Snapshots: what `explain --on spark` prints is read by people so every change of it shows here."""

from __future__ import annotations

import subprocess
import sys

from fordstone import Pipeline, tumbling
from fordstone.api.stream import Stream
from fordstone.connectors import files, stdout
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


def looped() -> Plan:
    p = Pipeline("rounds")
    again = parquet(p).iterate(lambda rows: (rows.filter("temp > 1"), rows.filter("temp <= 1")), name="round")
    again.sink("out", stdout())
    return p.plan()


COLD_CHAIN = """\
pipeline cold-chain
  guarantee  exactly_once
  runs       on Spark, as one query; a micro-batch is an epoch

readers: operators run where rows are read
  readings: source files('in/*.jsonl')
  │  columns   device string, ts timestamp, temp double
  │  time      ts, rows may be 5s out of order, and 1h ahead of the clock; a silent partition holds time back (idle_after= would end that)
  │  bad rows  go to the dead letters
  │  keeps     the position of every partition
  │  series    files that differ in their numbers and follow one another in time are rolled: only the newest is waited for
  └─ union: union of readings, more
     ├─ hot: keep rows where temp > 40
     │  └─ alarms: sink files('out/alarms', format='jsonl')
     │        releases  with the micro-batch, with ids (__id) to deduplicate by
     └─ → stage 1, agg_device: rows, shuffled by device (not combined first: late rows are wanted as they came)
  more: source files('more/*.parquet')
  │  columns   device string, ts timestamp, temp double
  │  time      ts, rows may be 5s out of order, and 1h ahead of the clock; a silent partition holds time back (idle_after= would end that)
  │  bad rows  stop the pipeline
  │  keeps     the position of every partition
  │  series    files that differ in their numbers and follow one another in time are rolled: only the newest is waited for
  └─ union: as above

stage 1, after a shuffle: operators in 4 shards
  agg_device: 10s windows for each device
  │  computes  count(*) AS n
  │  columns   device string, window_start timestamp, window_end timestamp, n bigint
  │  time      window_end
  │  keeps     partial aggregates of open windows
  ├─ → stage 2, ewma_device: rows, shuffled by device
  └─ late rows: late: sink files('out/late', format='parquet')
        releases  with the micro-batch

stage 2, after a shuffle: operators in 4 shards
  ewma_device: exponentially weighted mean for each device, alpha 0.5
  │  smooths  CAST(n AS DOUBLE) AS mean
  │  columns  device string, window_start timestamp, window_end timestamp, n bigint, mean double
  │  keeps    the rows that wait for time, and one number per key and column
  └─ trend: sink files('out/trend', format='parquet')
        releases  with the micro-batch

guarantees
  more → alarms      exactly_once  rows carry ids (__id) by which the receiver drops repeats
  readings → alarms  exactly_once  rows carry ids (__id) by which the receiver drops repeats
  more → trend       exactly_once  replay and one commit per epoch
  readings → trend   exactly_once  replay and one commit per epoch
  more → late        exactly_once  replay and one commit per epoch
  readings → late    exactly_once  replay and one commit per epoch
"""

ROUNDS = """\
pipeline rounds
  guarantee  exactly_once
  runs       on the edge only: loop round cannot run on Spark: a Spark query has no way back. Run this pipeline on the edge engine, or write the loop out as the steps of a few rounds.
"""


def test_a_pipeline_shows_its_stages_and_where_rows_are_shuffled():
    assert explain(cold_chain(), shards=4) == COLD_CHAIN


def test_a_loop_cannot_run_on_spark_and_the_text_says_why():
    assert explain(looped()) == ROUNDS


def test_results_of_a_batch_job_become_visible_at_its_end():
    text = explain(totals(), bounded=True)
    assert "  runs       on Spark, as a batch job; all results become visible at its end\n" in text
    assert "           releases  at the end\n" in text


def test_explaining_needs_no_pyspark():
    # The package itself is left out: it is for users who run on Spark, and may load what they need.
    code = (
        "import sys, types, importlib.util\n"
        "spec = importlib.util.find_spec('fordstone')\n"
        "package = types.ModuleType('fordstone.spark')\n"
        "package.__path__ = [spec.submodule_search_locations[0] + '/spark']\n"
        "sys.modules['fordstone.spark'] = package\n"
        "import fordstone.spark.explain\n"
        "sys.exit('pyspark' in sys.modules or 'pyarrow' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
