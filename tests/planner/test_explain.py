"""Snapshots: what `explain` prints is read by people and compared by machines, so every change of it shows here."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fordstone import Pipeline, tumbling
from fordstone.connectors import ConnectorSpec, files, memory, stdout
from fordstone.connectors.memory import MemorySink, MemorySource
from fordstone.errors import ConfigError
from fordstone.operators.base import connector_text
from fordstone.plan.plan import Plan
from fordstone.planner.explain import explain


def cold_chain() -> Pipeline:
    p = Pipeline("cold-chain")
    readings = p.source(
        "readings",
        files("in/*.jsonl"),
        schema={"device": "string", "ts": "timestamp", "temp": "double"},
        time="ts",
        lateness="5s",
        idle_after="1m",
    )
    hot = readings.filter("temp > -40").with_columns("temp * 9 / 5 + 32 AS f")
    hot.sink("alarms", files("out/alarms", format="jsonl"), release="at_once")
    fleet = readings.group_by("device").window(tumbling("10s")).agg(n="count(*)", mean="avg(temp)")
    fleet.sink("per_device", files("out/per_device", format="parquet"))
    return p


def looped() -> Plan:
    p = Pipeline("rounds", mode="blocking")
    schema = {"device": "string", "n": "bigint"}
    first = p.source("first", memory(MemorySource()), schema=schema, on_error="fail")
    both = first.union(p.source("second", memory(MemorySource()), schema=schema))
    rest = both.iterate(
        lambda rows: (
            rows.select("device", "n - 1 AS n").filter("n > 0", name="again"),
            rows.filter("n <= 1", name="done"),
        )
    )
    rest.group_by("device").agg(n="count(*)").sink("counts", stdout())
    rest.group_by().agg(total="sum(n)").filter("total > 3", name="many").sink("totals", stdout())
    return p.plan()


COLD_CHAIN = """\
pipeline cold-chain
  guarantee  exactly_once
  barriers   aligned: a task waits for the barrier on every input
  runs       on the edge, as 2 tasks

task readings: 4 steps fused
  readings: source files('in/*.jsonl')
  │  columns   device string, ts timestamp, temp double
  │  time      ts, rows may be 5s out of order, and 1h ahead of the clock; a partition silent for 1m (idle_after=) is not waited for
  │  bad rows  go to the dead letters
  │  keeps     the position of every partition
  │  series    files that differ in their numbers and follow one another in time are rolled: only the newest is waited for
  ├─ filter: keep rows where temp > -40
  │  └─ with_columns: add temp * 9 / 5 + 32 AS f
  │     │  columns  device string, ts timestamp, temp double, f double
  │     └─ alarms: sink files('out/alarms', format='jsonl')
  │           releases  at once, with ids (__id) to deduplicate by
  └─ → task agg_device: partial aggregates, shuffled by device (combined first)

task agg_device: 2 steps fused
  agg_device: 10s windows for each device
  │  computes  count(*) AS n, mean(temp) AS mean
  │  columns   device string, window_start timestamp, window_end timestamp, n bigint, mean double
  │  time      window_end
  │  keeps     partial aggregates of open windows
  └─ per_device: sink files('out/per_device', format='parquet')
        releases  when the epoch is sealed

guarantees
  readings → alarms      exactly_once  rows carry ids (__id) by which the receiver drops repeats
  readings → per_device  exactly_once  replay and one commit per epoch
"""

ROUNDS = """\
pipeline rounds
  guarantee  exactly_once
  barriers   blocking: sources stop until the checkpoint is sealed
  runs       on the edge, as 6 tasks

task first x2
  first: source memory()
  │  columns   device string, n bigint
  │  time      none
  │  bad rows  stop the pipeline
  │  keeps     the position of every partition
  └─ → task union: rows

task second x2
  second: source memory()
  │  columns   device string, n bigint
  │  time      none
  │  bad rows  go to the dead letters
  │  keeps     the position of every partition
  └─ → task union: rows

task union x2
  union: union of first, second
  └─ → task iterate: rows

task iterate: 4 steps fused
  iterate: loop, fed back from again
  │  keeps  rows that are on their way back at a barrier
  ├─ select: select device, n - 1 AS n
  │  └─ again: keep rows where n > 0
  │     └─ → task iterate: rows, back to the loop's head
  └─ done: keep rows where n <= 1
     ├─ → task agg_device: partial aggregates, shuffled by device (combined first)
     └─ → task agg: partial aggregates, all to one subtask (combined first)

task agg_device x2: 2 steps fused
  agg_device: running aggregate for each device
  │  computes  count(*) AS n
  │  columns   device string, n bigint
  │  rows      replace each other by device
  │  keeps     one row per key
  └─ counts: sink stdout(format='jsonl')
        releases  when the epoch is sealed

task agg: 3 steps fused
  agg: running aggregate over all rows
  │  computes  sum(n) AS total
  │  columns   total bigint
  │  rows      each replaces the one before
  │  keeps     one row
  └─ many: keep rows where total > 3
     └─ totals: sink stdout(format='jsonl')
           releases  when the epoch is sealed

guarantees
  first → counts   at_least_once  sink counts (stdout) keeps no record of emitted epochs
  second → counts  at_least_once  sink counts (stdout) keeps no record of emitted epochs
  first → totals   at_least_once  sink totals (stdout) keeps no record of emitted epochs
  second → totals  at_least_once  sink totals (stdout) keeps no record of emitted epochs
"""

MERMAID = """\
flowchart TD
  subgraph t0["task readings: 4 steps fused"]
    s0[/"readings<br/>source files('in/*.jsonl')"/]
    s1["filter<br/>keep rows where temp #gt; -40"]
    s2["with_columns<br/>add temp * 9 / 5 + 32 AS f"]
    s3[/"alarms<br/>sink files('out/alarms', format='jsonl')"/]
  end
  subgraph t1["task agg_device: 2 steps fused"]
    s4[("agg_device<br/>10s windows for each device")]
    s5[/"per_device<br/>sink files('out/per_device', format='parquet')"/]
  end
  s0 ==>|"partial aggregates, shuffled by device (combined first)"| s4
  s0 --> s1
  s1 --> s2
  s2 --> s3
  s4 --> s5
  %% readings → alarms: exactly_once: rows carry ids (__id) by which the receiver drops repeats
  %% readings → per_device: exactly_once: replay and one commit per epoch
"""


def test_a_pipeline_is_explained_as_text():
    assert cold_chain().explain() == COLD_CHAIN


def test_loops_unions_and_running_results_are_explained_for_several_subtasks():
    assert explain(looped(), parallelism=2) == ROUNDS


def test_a_pipeline_is_drawn_as_mermaid():
    assert cold_chain().explain(format="mermaid") == MERMAID


def test_late_rows_are_shown_and_why_nothing_is_combined():
    p = Pipeline("late")
    rows = p.source("rows", memory(MemorySource()), schema={"k": "string", "ts": "timestamp"}, time="ts")
    windows = rows.group_by("k").window(tumbling("1s", offset="250ms")).agg(n="count(*)")
    windows.sink("out", stdout())
    windows.late.sink("missed", stdout())
    text = p.explain()
    assert "→ task agg_k: rows, shuffled by k (not combined first: late rows are wanted as they came)" in text
    assert "agg_k: 1s windows shifted by 250ms for each k" in text
    assert "late rows: missed: sink stdout" in text
    assert '-->|"late rows"|' in p.explain(format="mermaid")


def test_functions_are_named_and_local_ones_called_so():
    p = Pipeline("functions")
    rows = p.source("rows", memory(MemorySource()), schema={"k": "string"})
    rows.map(lambda row: row).flat_map("split(k, ' ') AS word").select("word").sink("out", stdout())
    text = p.explain()
    assert "map: map <lambda> (defined in place: cannot be found from another program)" in text
    assert "flat_map: a row for each element of split(k, ' ') AS word" in text
    assert "select: select word" in text


@pytest.mark.parametrize(
    ("connector", "options", "said"),
    [
        (files("s3://bucket/out", format="jsonl"), {}, True),
        (files("s3://bucket/out", format="jsonl"), {"release": "at_once"}, False),
        (files("out", format="jsonl"), {}, False),
        (memory(MemorySink()), {}, False),
    ],
    ids=["at a URL", "with ids", "in a directory", "in this process"],
)
def test_a_sink_that_cannot_refuse_an_older_generation_is_named(
    connector: ConnectorSpec, options: Any, said: bool
) -> None:
    pipeline = Pipeline("p", guarantee="exactly_once")
    source = pipeline.source("src", memory(MemorySource()), schema={"n": "bigint"})
    source.sink("out", connector, **options)
    line = "at-least-once on takeover: sink out (files) cannot refuse an older generation"
    assert (line in " ".join(pipeline.explain().split())) is said


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_weaker_guarantees_let_rows_out_at_once(guarantee: str):
    p = Pipeline("weak", guarantee=guarantee)  # type: ignore[arg-type]  # one of the words it takes
    p.source("rows", memory(MemorySource()), schema={"k": "string"}).sink("out", stdout())
    text = p.explain()
    assert "releases  at once\n" in text
    assert f"rows → out  {guarantee}" in text


def test_secrets_in_a_connector_are_not_shown():
    spec = ConnectorSpec(kind="kafka", options={"brokers": "b:9092", "topic": "t", "sasl_password": "hunter2"})
    assert connector_text(spec) == "kafka('t', brokers='b:9092', sasl_password='***')"


def test_marks_of_mermaid_in_names_and_expressions_are_quoted():
    p = Pipeline("marks")
    rows = p.source("rows", memory(MemorySource()), schema={"k": "string"})
    rows.filter("""k <> 'a"#'""").sink("out", stdout())
    drawn = p.explain(format="mermaid")
    assert "k #lt;#gt; 'a#quot;#35;'" in drawn


def test_another_format_is_refused():
    with pytest.raises(ConfigError, match="'text', 'mermaid' or 'json'"):
        cold_chain().explain(format="svg")


def test_explaining_loads_no_rich():
    code = (
        "import sys; from fordstone import Pipeline; from fordstone.connectors import files, stdout\n"
        "p = Pipeline('x'); p.source('a', files('a.jsonl'), schema={'k': 'string'}).sink('b', stdout())\n"
        "p.explain(); assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
