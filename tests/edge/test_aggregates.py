"""Aggregates in whole pipelines on the edge engine: in windows and running, whatever the batches, tasks and restarts."""

from __future__ import annotations

from datetime import datetime, timedelta

from tests.edge.aggregating import SCHEMA, TEXTS, Longest, check, record, some_rows
from tests.edge.runs import START, run_in_parts

from fordstone import Pipeline, by_count, session, tumbling
from fordstone.connectors.memory import MemorySink, MemorySource, memory


def seconds(moment: datetime) -> int:
    return (moment - START) // timedelta(seconds=1)


def test_sessions_and_counts_have_them_too(tmp_path):
    rows = [row for row in some_rows(4, 120) if row[1] % 20 < 14]
    sinks = {name: MemorySink() for name in ("session", "count")}
    pipeline = Pipeline("stretches")
    stream = pipeline.source("rows", memory(MemorySource([[record(row) for row in rows]])), schema=SCHEMA, time="ts")
    stream.group_by("k").window(session("5s")).agg(own=Longest.of("s"), **TEXTS).sink(
        "sessions", memory(sinks["session"])
    )
    stream.group_by().window(by_count(30)).agg(own=Longest.of("s"), **TEXTS).sink("counts", memory(sinks["count"]))
    pipeline.run(state=tmp_path, bounded=True, batch_rows=7)
    found = sinks["session"].rows().to_dicts()
    assert len(found) >= 4
    for row in found:
        start, end = seconds(row["window_start"]), seconds(row["window_end"])
        check(row, [one for one in rows if one[0] == row["k"] and start <= one[1] < end])
    assert [len(row["all"]) > 0 and row["own"].endswith("/30") for row in sinks["count"].rows().to_dicts()] == [
        True
    ] * (len(rows) // 30)


def test_an_aggregator_that_cannot_be_imported_runs_in_the_process_that_built_the_pipeline(tmp_path):
    class Local(Longest):
        """Known here only."""

    out = MemorySink()
    pipeline = Pipeline("local")
    source = MemorySource([[record(row) for row in some_rows(3, 20)]])
    stream = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts")
    stream.group_by().window(session("1m")).agg(own=Local.of("s")).sink("out", memory(out))
    pipeline.run(state=tmp_path, bounded=True)
    assert out.rows()["own"].to_list() == ["long/20"]


def test_a_restart_with_other_subtasks_goes_on_with_every_kind_of_part(tmp_path):
    rows = some_rows(9, 90)
    windows, running, source = MemorySink(), MemorySink(), MemorySource([[]])
    pipeline = Pipeline("restarts")
    stream = pipeline.source("rows", memory(source), schema=SCHEMA, time="ts")
    stream.group_by("k").window(tumbling("30s")).agg(own=Longest.of("s"), **TEXTS).sink("windows", memory(windows))
    stream.group_by("k").agg(own=Longest.of("s"), **TEXTS).sink("running", memory(running))
    run_in_parts(pipeline, source, [[record(row) for row in rows]], tmp_path, out=False)
    assert windows.rows().height >= 4
    for row in windows.rows().to_dicts():
        start, end = seconds(row["window_start"]), seconds(row["window_end"])
        check(row, [one for one in rows if one[0] == row["k"] and start <= one[1] < end])
    for key, row in {row["k"]: row for row in running.rows().to_dicts()}.items():
        check(row, [one for one in rows if one[0] == key])
