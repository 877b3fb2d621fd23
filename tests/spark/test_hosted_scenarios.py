"""The pipelines of the simulation, from files, hosted: judged by the simulation's own oracle."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from tests.simulation.rows import LATENESS_S, SCHEMA, second_of
from tests.simulation.scenario import WINDOW_S, Scenario, Shape, _shaped, expect, timed_source
from tests.spark.micro import MicroSpark
from tests.spark.small_batches import run_with_deaths

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, files, memory

pytestmark = pytest.mark.usefixtures("quick_disk")


def hosted(scenario: Scenario, root: Path) -> dict[str, MemorySink]:
    pipeline = Pipeline("scenario")
    sinks = {name: MemorySink() for name in ("rows", "running", "windows", "late")}
    streams = []
    for number, partitions in enumerate(scenario.partitions):
        directory = root / f"in{number}"
        directory.mkdir(parents=True)
        for index, rows in enumerate(partitions):
            records = [(row.id, row.k, row.record()[2].isoformat(), row.n) for row in rows]
            lines = [json.dumps(dict(zip(SCHEMA, record, strict=True))) + "\n" for record in records]
            (directory / f"{index}.jsonl").write_text("".join(lines))
        connector, timing = files(str(directory / "*")), {"lateness": f"{LATENESS_S}s"}
        streams.append(timed_source(pipeline, f"source{number}", connector, timing, assigned=scenario.assigns))
    stream = _shaped(scenario.shape, streams)
    stream.sink("rows", memory(sinks["rows"]))
    stream.group_by("k").agg(n="count(*)", top="max(id)").sink("running", memory(sinks["running"]))
    windows = stream.group_by("k").window(tumbling(f"{WINDOW_S}s")).agg(n="count(*)", total="sum(id)")
    windows.sink("windows", memory(sinks["windows"]))
    if scenario.late_sink:
        windows.late.sink("late", memory(sinks["late"]))
    run_with_deaths(
        MicroSpark(scenario.seed),
        pipeline,
        Random(scenario.seed),
        deaths=scenario.crashes_max,
        state=root / "state",
        shards=scenario.parallelism,
        rows_max=scenario.batch_rows * 10,
        batch_rows=scenario.batch_rows,
    )
    return sinks


@pytest.mark.parametrize("shape", ["chain", "diamond", "union"])
def test_a_scenario_of_the_simulation_comes_out_the_same_on_spark(shape: Shape, tmp_path: Path) -> None:
    for seed in range(5):
        scenario = Scenario.of(seed, guarantee="exactly_once", shape=shape)
        sinks, expected = hosted(scenario, tmp_path / str(seed)), expect(scenario)
        assert Counter(sinks["rows"].rows()["id"].to_list()) == expected.ids, f"seed {seed}"
        counts = {k: n for frame in sinks["running"].frames() for k, n in frame.select("k", "n").iter_rows()}
        assert counts == dict(expected.counts), f"seed {seed}"
        found = sinks["windows"].rows().select("k", "window_start", "n", "total").rows()
        assert len(found) == len(expected.windows), f"seed {seed}"
        assert {(k, second_of(start)): (n, total) for k, start, n, total in found} == expected.windows, f"seed {seed}"
        if scenario.late_sink:
            assert Counter(sinks["late"].rows()["id"].to_list()) == expected.late, f"seed {seed}"
