from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.place import Invoke, write_rows
from tests.cli.test_tiers import TIERED

from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.spark.hosted.checkpoint import EpochRecord, QueryFiles
from fordstone.spark.hosted.plan_batches import Work


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


def held_section(text: str) -> list[str]:
    lines = text.splitlines()
    return lines[lines.index("what holds time back") + 1 :]


def test_a_state_directory_says_which_partition_held_time_back_at_the_newest_checkpoint(invoke: Invoke, place: Path):
    write_rows(place / "in" / "b.jsonl", range(30, 40))
    assert invoke("run", "flow.py", "--available-now").exit_code == 0
    result = invoke("explain", "flow.py", "--state", "state")
    assert result.exit_code == 0
    where, held, advice = held_section(result.stdout)
    assert where.startswith("  node node, checkpoint ")
    assert held == "    time waits for b.jsonl of readings, which lags by 1 min"
    assert advice == "    idle_after= at source readings would limit the wait"


def test_one_partition_holds_nothing_back_and_neither_does_input_that_ended(invoke: Invoke, place: Path):
    assert invoke("run", "flow.py", "--available-now").exit_code == 0
    assert held_section(invoke("explain", "flow.py", "--state", "state").stdout)[1:] == ["    nothing lags"]
    write_rows(place / "in" / "b.jsonl", range(30, 40))
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    assert held_section(invoke("explain", "flow.py", "--state", "state").stdout)[1:] == ["    nothing lags"]


def test_the_state_of_two_tiers_shows_the_partition_of_the_node_and_the_node_of_the_center(invoke: Invoke, place: Path):
    (place / "two.py").write_text(TIERED)
    (place / "half.py").write_text(TIERED.replace(".to_center()", ""))
    write_rows(place / "in" / "b.jsonl", range(30, 40))
    assert invoke("run", "half.py", "--available-now", "--state", "state/edge").exit_code == 0
    query = place / "state" / "center" / "two-tiers" / "_spark"
    (query / "fordstone").mkdir(parents=True)
    (query / "fordstone" / "query.json").write_text("{}")
    nodes = {name: PartitionCut(position=1, max_time_us=us) for name, us in (("a", 7_200_000_000), ("b", 0))}
    cut = Cut(epoch=5, sources={"rows_to_center": SourceCut(partitions=nodes)})
    QueryFiles(str(query)).write_released(EpochRecord(work=Work(epoch=5), cut=cut))
    assert held_section(invoke("explain", "two.py", "--state", "state").stdout)[1:] == [
        "    time waits for b.jsonl of rows, which lags by 1 min",
        "    idle_after= at source rows would limit the wait",
        "  Spark, checkpoint 5",
        "    time waits for node b, which lags by 2 h",
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--state", "nowhere"], "--state nowhere: there is no checkpoint of pipeline cold-chain"),
        (["--state", "state", "--format", "json"], "--state goes with --format text, not with --format json."),
    ],
)
def test_a_state_directory_without_a_checkpoint_or_for_machines_is_an_error(
    invoke: Invoke, given: list[str], said: str
):
    result = invoke("explain", "flow.py", *given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
