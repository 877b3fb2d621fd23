from __future__ import annotations

import json

from tests.cli.place import Invoke


def test_text_is_what_the_pipeline_itself_says(invoke: Invoke):
    result = invoke("explain", "flow.py")
    assert result.exit_code == 0
    assert result.stdout.startswith("pipeline cold-chain\n  guarantee  exactly_once\n")
    assert "readings → hot         exactly_once  replay and one commit per epoch" in result.stdout


def test_parallelism_is_shown(invoke: Invoke):
    assert "task agg_device x3" in invoke("explain", "flow.py", "--parallelism", "3").stdout


def test_mermaid_begins_a_flowchart(invoke: Invoke):
    assert invoke("explain", "flow.py", "--format", "mermaid").stdout.startswith("flowchart TD\n")


def test_json_is_the_plan(invoke: Invoke):
    plan = json.loads(invoke("explain", "flow.py", "--format", "json").stdout)
    assert (plan["pipeline"], [step["name"] for step in plan["steps"]]) == (
        "cold-chain",
        ["readings", "filter", "hot", "agg_device", "per_device"],
    )


def test_a_pipeline_without_a_sink_is_a_plain_error(invoke: Invoke, place):
    (place / "bare.py").write_text('from fordstone import Pipeline\np = Pipeline("bare")\n')
    result = invoke("explain", "bare.py")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: pipeline bare has no sink")


def test_on_spark_shows_its_stages_without_starting_it(invoke: Invoke):
    result = invoke("explain", "flow.py", "--on", "spark", "--parallelism", "3")
    assert result.exit_code == 0
    assert "runs       on Spark, as one query; a micro-batch is an epoch\n" in result.stdout
    assert "operators in 3 shards" in result.stdout
    assert "as a batch job" in invoke("explain", "flow.py", "--on", "spark", "--bounded").stdout


def test_no_flowchart_is_drawn_of_spark(invoke: Invoke):
    assert invoke("explain", "flow.py", "--on", "spark", "--format", "mermaid").exit_code == 2
