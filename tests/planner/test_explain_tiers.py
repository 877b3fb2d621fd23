"""Snapshots: what `explain` prints of a pipeline for two tiers is read by people, so every change of it shows here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.planner.fleets import above, cold_chain, sunk

from fordstone import Pipeline, session
from fordstone.cli.main import cli
from fordstone.connectors import files
from fordstone.errors import ConfigError
from fordstone.plan.plan import Plan
from fordstone.planner.explain import WIDTH, explain
from fordstone.planner.guarantee import end_to_end
from fordstone.spark.explain import describe_center

CROSSES = """\
  readings_to_center: partial rows of agg_device, instead of rows
     at the cut   device string, ts timestamp, temp double
     crosses      device string, __end bigint, __rows_5d88c63a bigint, __n0 bigint, __s0 double,
                  __hi0 double
     pushed down  the partial aggregates of agg_device
     why no more  agg_device aggregates the rows of all nodes, so it and the steps after it run at
                  the center
     saves        a row is about 33 bytes, a partial row about 56
                  fewer bytes from 2 rows per key, window and epoch on; with 100 of them, 98 % less

  bytes are estimated from the types of columns, before compression, text as 16 bytes
"""

CONTROL = """\
  thresholds: device string, threshold double
     key         device: rows replace each other by it
     written by  thresholds_to_edges, from select, at the center
     read by     join_control, on every node: a version that came in one epoch counts from the next
                 on
"""

GUARANTEES = """\
  readings → alarms              exactly_once  rows carry ids (__id) by which the receiver drops
                                               repeats
  readings → per_device          exactly_once  replay, one commit per epoch, and the hub takes each
                                               epoch of a node once
  readings → control thresholds  exactly_once  the hub takes each epoch and each version of the
                                               table once; nodes take versions over at barriers
"""

PRUNED = """\
  cut: rows
     at the cut   device string, ts timestamp, temp double, n bigint, tags array<string>, note
                  string
     crosses      device string, ts timestamp, temp double
     not read     n, tags, note
     pushed down  nothing
     why no more  the sessions of tops need the rows themselves: where one ends is known only over
                  all nodes
     saves        a row is about 33 bytes instead of 185: 82 % less
"""

CENTER_ON_SPARK = """\
── center, on Spark ────────────────────────────────────────────────────────────────────────────────

  runs       as one query; a micro-batch is an epoch

readers: operators run where rows are read
  readings_to_center: what all nodes sent as readings_to_center, from the hub
  │  columns  device string, __end bigint, __rows_5d88c63a bigint, __n0 bigint, __s0 double, __hi0 double
  │  time     as far as every node has come; one away for 1d (offline=) is not waited for
  │  keeps    the epoch that each node's rows were read up to
  └─ → stage 1, agg_device: partial aggregates, shuffled by device
"""


def parts(text: str) -> dict[str, str]:
    """The text by its titles."""
    found, title = dict[str, str](), ""
    for line in text.splitlines(keepends=True):
        if line.startswith("── "):
            title = line.strip("─ \n")
            found[title] = ""
        elif title:
            found[title] += line
    return {title: body.strip("\n") + "\n" for title, body in found.items()}


def test_what_crosses_who_steers_and_what_is_guaranteed_stand_in_the_text():
    found = parts(explain(cold_chain().plan()))
    assert list(found) == [
        "edge, on every node", "what crosses", "center, on our own engine", "control tables", "guarantees, end to end",
    ]  # fmt: skip
    assert found["what crosses"] == CROSSES
    assert found["control tables"] == CONTROL
    assert found["guarantees, end to end"] == GUARANTEES


def test_each_half_is_worded_as_an_ordinary_plan():
    found = parts(explain(cold_chain().plan(), parallelism=2))
    assert "task readings x2: 2 steps fused\n" in found["edge, on every node"]
    assert (
        "└─ → task agg_device_partials: partial aggregates, shuffled by device (combined first)\n"
        in found["edge, on every node"]
    )
    assert (
        "agg_device_partials: partial rows of 10s windows for each device, once per epoch\n"
        in found["edge, on every node"]
    )
    assert "agg_device: 10s windows for each device, merged from partial rows\n" in found["center, on our own engine"]
    assert "thresholds_to_edges: to every node as control table thresholds\n" in found["center, on our own engine"]


def test_columns_that_nobody_reads_are_named():
    plan = above(lambda stream: sunk(stream.group_by("device").window(session("5s")).agg(top="max(temp)", name="tops")))
    assert PRUNED in explain(plan)


def test_the_center_can_be_worded_as_on_spark():
    assert CENTER_ON_SPARK in explain(cold_chain().plan(), center=describe_center)


def test_a_center_that_spark_cannot_run_says_so():
    plan = above(lambda stream: sunk(stream.select("device", "n").iterate(lambda back: (back.filter("n > 9"), back))))
    text = explain(plan, center=describe_center)
    assert "center, on our own engine only" in text
    assert "cannot run on Spark" in text


def test_our_own_lines_fit_a_terminal():
    found = parts(explain(cold_chain().plan()))
    for title in ("what crosses", "control tables", "guarantees, end to end"):
        assert max(map(len, found[title].splitlines())) <= WIDTH


def test_a_pipeline_explains_itself_by_tiers():
    pipeline = cold_chain()
    assert pipeline.explain() == explain(pipeline.plan())
    assert pipeline.explain(format="mermaid") == explain(pipeline.plan(), format="mermaid")


def test_the_flowchart_joins_both_halves():
    lines = explain(cold_chain().plan(), format="mermaid").splitlines()
    assert lines[0] == "flowchart TD"
    assert '  subgraph e["edge, on every node"]' in lines
    assert '  subgraph c["center"]' in lines
    assert '  es7 ==>|"readings_to_center: partial rows"| cs0' in lines
    assert '  cs4 -.->|"control table thresholds"| es1' in lines
    ids = [line.split("[")[0].strip() for line in lines if line.strip().startswith(("es", "cs")) and "[" in line]
    assert len(ids) == len(set(ids)) == 13


def test_json_is_the_plan_and_what_becomes_of_it():
    plan = cold_chain().plan()
    found = json.loads(explain(plan, format="json"))
    assert {name: found[name] for name in ("pipeline", "steps")} == {
        "pipeline": "cold-chain",
        "steps": json.loads(plan.to_json())["steps"],
    }
    (crossing,) = found["crossings"]
    assert (crossing["stream"], crossing["partial"], crossing["row_bytes"]) == ("readings_to_center", True, 33)
    assert [step["op"] for step in found["center"]["steps"]] == ["source", "aggregate", "sink", "select", "sink"]
    assert found["edge"]["pipeline"] == "cold-chain"


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="'text', 'mermaid' or 'json'"):
        explain(cold_chain().plan(), format="dot")


def without_center() -> Plan:
    pipeline = Pipeline("fleet", guarantee="at_least_once")
    stream = pipeline.source("rows", files("in/*.jsonl"), schema={"device": "string", "top": "double"})
    limits = pipeline.control("limits", schema={"device": "string", "limit": "double"}, key="device")
    sunk(stream.join_control(limits, on="device"))
    return pipeline.plan()


def test_a_table_that_nobody_writes_says_so_and_there_is_no_center():
    text = explain(without_center())
    assert "written by  no step of this pipeline" in text
    assert "── center" not in text
    assert "── what crosses" not in text
    assert not [line for line in explain(without_center(), format="mermaid").splitlines() if "subgraph c[" in line]


def test_a_weaker_pipeline_gives_tables_no_more_than_it_is():
    pipeline = Pipeline("fleet", guarantee="at_least_once")
    stream = pipeline.source("rows", files("in/*.jsonl"), schema={"device": "string", "top": "double"})
    pipeline.control("limits", schema={"device": "string", "top": "double"}, key="device")
    stream.to_center().group_by("device").agg(top="max(top)").to_edges("limits")
    (path,) = end_to_end(pipeline.plan())
    assert (path.sink, path.gives, path.why) == ("control limits", "at_least_once", "the pipeline is at_least_once")


COLD_CHAIN = """
from tests.planner.fleets import cold_chain

p = cold_chain()
"""


def on_the_command_line(tmp_path: Path, *options: str) -> str:
    (tmp_path / "two_tiers.py").write_text(COLD_CHAIN)
    result = CliRunner().invoke(cli, ["explain", str(tmp_path / "two_tiers.py"), *options], prog_name="fordstone")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_words_the_center_as_on_spark_unless_set_otherwise(tmp_path: Path):
    plan = cold_chain().plan()
    assert on_the_command_line(tmp_path) == explain(plan, center=describe_center)
    assert on_the_command_line(tmp_path, "--on", "edge", "--parallelism", "2") == explain(plan, parallelism=2)
    assert json.loads(on_the_command_line(tmp_path, "--format", "json"))["crossings"]
    assert on_the_command_line(tmp_path, "--format", "mermaid") == explain(plan, format="mermaid")
