"""Pipelines of two tiers in one process: a hub, nodes and a center."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from fordstone import Pipeline, tumbling
from fordstone.api.run import Run
from fordstone.connectors import MemorySink, MemorySource, files, latest, memory, rows
from fordstone.errors import ConfigError, SinkError, TaskError
from fordstone.protocol.retry import RestartPolicy

SCHEMA = {"device": "string", "ts": "timestamp", "temp": "double"}


def readings(device: str, count: int = 20) -> list[dict[str, Any]]:
    return [{"device": device, "ts": f"2026-01-01T00:00:{at:02d}Z", "temp": float(at)} for at in range(count)]


def counted(source: Any, sink: Any) -> Pipeline:
    pipeline = Pipeline("fleet")
    stream = pipeline.source("readings", source, schema=SCHEMA, time="ts")
    windows = stream.to_center().group_by("device").window(tumbling("10s")).agg(n="count(*)", top="max(temp)")
    windows.final().sink("counts", sink)
    return pipeline


@pytest.mark.parametrize("nodes", [None, 1, 3, 5])
def test_a_bounded_run_gives_the_rows_of_all_nodes_at_the_center(nodes: int | None):
    found = MemorySink()
    pipeline = counted(memory([readings("a"), readings("b"), readings("c")]), memory(found))
    report = pipeline.run(bounded=True, nodes=nodes)
    assert (report.outcome, report.progress.rows_in) == ("ended", 60)
    assert sorted(found.rows().select("device", "n", "top").rows()) == [
        (device, 10, top) for device in "abc" for top in (9.0, 19.0)
    ]


def test_nothing_runs_on_after_it():
    counted(memory(readings("a")), memory(MemorySink())).run(bounded=True, nodes=2)
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("fordstone")], "end of all threads")


def test_files_are_divided_among_nodes_and_each_writes_its_own_directory(tmp_path: Path):
    for device in "abc":
        (tmp_path / f"{device}.csv").write_text(f"device,temp\n{device},1.0\n")
    pipeline = Pipeline("fleet")
    schema = {"device": "string", "temp": "double"}
    stream = pipeline.source("readings", files(str(tmp_path / "*.csv")), schema=schema)
    stream.sink("kept", files(str(tmp_path / "kept"), format="jsonl"))
    stream.to_center().group_by().agg(n="count(*)").sink("counts", files(str(tmp_path / "counts"), format="jsonl"))
    pipeline.run(bounded=True, nodes=2)
    assert latest(tmp_path / "counts")["n"].to_list() == [3]
    kept = {node: rows(tmp_path / "kept" / node)["device"].to_list() for node in ("node-1", "node-2")}
    assert {node: sorted(devices) for node, devices in kept.items()} == {"node-1": ["a", "c"], "node-2": ["b"]}
    with pytest.raises(SinkError, match=r"counts: .*is there already"):
        pipeline.run(bounded=True, nodes=2)
    pipeline.run(bounded=True, nodes=2, fresh=True)
    assert latest(tmp_path / "counts")["n"].to_list() == [3]


def test_a_control_table_comes_back_to_every_node():
    source, alarms = MemorySource([[], []]), MemorySink()
    pipeline = Pipeline("loop")
    limits = pipeline.control("limits", schema={"device": "string", "top": "double"}, key="device")
    stream = pipeline.source("readings", memory(source), schema={"device": "string", "temp": "double"})
    stream.to_center().group_by("device").agg(top="max(temp)").to_edges(limits)
    stream.join_control(limits, on="device", how="inner").sink("alarms", memory(alarms))
    with pipeline.start(nodes=2, interval="10ms") as run:
        for partition in (0, 1):
            source.append(partition, [{"device": f"d{partition}", "temp": 5.0}])

        def answered(device: str, partition: int) -> bool:
            source.append(partition, [{"device": device, "temp": 1.0}])
            return device in alarms.rows()["device"].to_list() if alarms.rows().height else False

        for partition in (0, 1):
            until(lambda partition=partition: answered(f"d{partition}", partition), "alarm")  # type: ignore[misc]
    assert run.report is not None
    assert run.report.outcome == "stopped"
    assert set(alarms.rows()["top"].to_list()) == {5.0}


def test_a_second_run_starts_empty():
    found = MemorySink()
    pipeline = Pipeline("fleet")
    stream = pipeline.source("readings", memory([readings("a"), readings("b")]), schema=SCHEMA)
    stream.sink("kept", memory(found))
    stream.to_center().group_by().agg(n="count(*)").sink("counts", memory(MemorySink()))
    for _ in range(2):
        pipeline.run(bounded=True, nodes=2)
        assert found.rows().height == 40


def boom(record: dict[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError(f"no {record['n']}")


@pytest.mark.parametrize("bounded", [True, False])
def test_a_part_that_fails_stops_the_others(bounded: bool):
    pipeline = Pipeline("fails")
    stream = pipeline.source("numbers", memory([{"n": 1}])).to_center()
    stream.map(boom).sink("out", memory(MemorySink()))
    with pytest.raises(TaskError, match="no 1"):
        pipeline.run(bounded=bounded, nodes=2, interval="10ms", restart=RestartPolicy(failures_max=0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nodes": 0}, "nodes=0 must be at least 1"),
        ({"available_now": True}, "available_now: pipeline fleet has two tiers"),
        ({"state": "here"}, "state=: pipeline fleet has two tiers"),
    ],
)
def test_options_that_do_not_go_with_two_tiers_are_refused_at_once(options: Any, says: str):
    pipeline = counted(memory(readings("a")), memory(MemorySink()))
    with pytest.raises(ConfigError, match=says):
        pipeline.run(**options)
    with pytest.raises(ConfigError, match=says):
        pipeline.start(**options)


def test_a_pipeline_of_one_tier_has_no_nodes():
    pipeline = Pipeline("one")
    pipeline.source("numbers", memory([{"n": 1}])).sink("out", memory(MemorySink()))
    with pytest.raises(ConfigError, match="one tier, which runs as one node"):
        pipeline.run(bounded=True, nodes=2)


def test_progress_says_which_node_the_center_waits_for():
    source, found = MemorySource([readings("a", 10), readings("b", 10)]), MemorySink()
    pipeline = Pipeline("fleet")
    pipeline.source("readings", memory(source), schema=SCHEMA, time="ts").to_center().sink("all", memory(found))
    with pipeline.start(nodes=2, interval="10ms") as run:
        # Only then is the center waiting for both: a node that joins later joins at the time of the other.
        until(lambda: found.rows().height == 20, "rows of both nodes")
        source.append(1, readings("b", 50)[10:])
        until(lambda: held(run) == ("node-1", True, 40_000_000), "held_back", report=lambda: run.progress)


def held(run: Run) -> tuple[str, bool, int | None] | None:
    found = run.progress.held_back if run.progress is not None else None
    return None if found is None else (found.partition, found.is_node, found.lag_us)


def test_progress_says_which_partition_a_node_waits_for_if_the_center_waits_for_none():
    source = MemorySource([[], []])
    with counted(memory(source), memory(MemorySink())).start(interval="10ms") as run:
        source.append(0, readings("a", 10))
        source.append(1, readings("b", 50))
        until(lambda: held(run) == ("memory-000000", False, 40_000_000), "held_back", report=lambda: run.progress)


def test_progress_explains_late_rows_and_counts_rows_that_failed_at_the_nodes():
    def checked(row: dict[str, Any]) -> dict[str, Any]:
        if row["temp"] == 3.0:
            raise ValueError("3")
        return row

    pipeline = Pipeline("fleet")
    rows_in = [*readings("a"), *readings("a", 2)]
    stream = pipeline.source("readings", memory([rows_in]), schema=SCHEMA, time="ts")
    kept = stream.map(checked, schema=SCHEMA, on_error="dead_letter")
    kept.to_center().group_by("device").window(tumbling("5s")).agg(n="count(*)").sink("counts", memory(MemorySink()))
    progress = pipeline.run(bounded=True).progress
    assert (progress.rows_late, progress.rows_failed) == (2, 1)
    assert progress.late == 'up to 15s too late; lateness="15s" at source readings would have counted them'


def test_rolled_files_close_windows_as_in_one_tier(tmp_path: Path):
    for minute in range(3):
        lines = [
            f'{{"device": "a", "ts": "2026-01-01T00:0{minute}:{second:02d}Z", "temp": 1.0}}\n' for second in (0, 30)
        ]
        (tmp_path / f"h{minute:02d}.jsonl").write_text("".join(lines))
    found = MemorySink()
    run = counted(files(str(tmp_path / "*.jsonl")), memory(found)).start(nodes=1, interval="10ms")
    until(lambda: found.rows().height == 5, "all windows but the last", alive=lambda: run.running)
    run.stop()


def test_an_unbounded_run_ends_when_the_sources_of_all_nodes_have_ended():
    source, found = MemorySource([readings("a"), []]), MemorySink()
    run = counted(memory(source), memory(found)).start(nodes=3, interval="10ms")
    until(lambda: run.progress is not None and run.progress.rows_in == 20, "rows", alive=lambda: run.running)
    source.append(1, readings("b"))
    source.end()
    report = run.wait(180.0)
    assert (report.outcome, report.progress.rows_in) == ("ended", 40)
    assert sorted(found.rows().select("device", "n").rows()) == [("a", 10), ("a", 10), ("b", 10), ("b", 10)]
