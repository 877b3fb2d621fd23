"""Windows that are kept after their end: corrections while a pipeline runs, what is refused, and what is said of them."""

from __future__ import annotations

import signal
from datetime import timedelta

import polars as pl
import pytest
from tests.edge.runs import TICKS_MAX
from tests.edge.windowing import SCHEMA, START, record

from fordstone import Pipeline, Stream, by_count, session, sliding, tumbling
from fordstone.connectors import stdout
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.errors import FordstoneError, PipelineError
from fordstone.operators.base import OP
from fordstone.plan.plan import Combine, Plan, Window
from fordstone.planner.check import step_digests, stream_types
from fordstone.planner.explain import explain
from fordstone.planner.split import split
from fordstone.protocol.progress import Progress


def counts(sink: MemorySink) -> list[int]:
    """What came for the window that begins at second 20."""
    rows = sink.rows()
    return rows.filter(pl.col("window_start") == START + timedelta(seconds=20))["n"].to_list() if rows.width else []


@pytest.mark.parametrize("window", [tumbling("10s"), sliding("10s", every="5s")], ids=["tumbling", "sliding"])
def test_a_window_has_its_result_after_its_end_and_is_corrected_when_a_late_row_comes(tmp_path, window):
    out, final, late = MemorySink(), MemorySink(), MemorySink()
    pipeline = Pipeline("corrected")
    given = MemorySource([[record(("a", second, 1.0, 1)) for second in (21, 22, 35)]])
    rows = pipeline.source("rows", memory(given), schema=SCHEMA, time="ts")
    windows = rows.group_by("k").window(window, allowed_lateness="1m").agg(n="count(*)")
    windows.sink("out", memory(out))
    windows.final().sink("final", memory(final))
    windows.late.sink("late", memory(late))
    done: set[str] = set()
    ticks = 0

    def correct_when_seen(_: Progress) -> None:
        nonlocal ticks
        ticks += 1
        seen = counts(out)
        if "late" not in done and seen == [2]:
            done.add("late")
            given.append(0, [record(("a", 25, 1.0, 1))])
        if "stop" not in done and (seen == [2, 3] or ticks > TICKS_MAX):
            done.add("stop")
            signal.raise_signal(signal.SIGTERM)

    pipeline.run(state=tmp_path, interval="5ms", on_progress=correct_when_seen)
    assert counts(out) == [2, 3]
    assert set(out.rows().get_column(OP)) == {"upsert"}
    assert final.rows().height == 0
    given.append(0, [record(("a", second, 1.0, 1)) for second in (28, 91, 23)])
    pipeline.run(state=tmp_path, bounded=True, parallelism=2)
    assert counts(final) == [4], "at 91 the window from 20 to 30 is no longer kept"
    assert counts(out) == [2, 3, 4]
    assert late.rows().get_column("ts").to_list() == [record(("a", 23, 1.0, 1))[1]]


def windowed(window: Window, central: bool = False, /, **options: str) -> Stream:
    rows: Stream = Pipeline("kept").source("rows", memory([]), schema=SCHEMA, time="ts")
    grouped = (rows.to_center(name="cut") if central else rows).group_by("k")
    return grouped.window(window, **options).agg(name="windows", n="count(*)")


def plan_of(**options: str) -> Plan:
    stream = windowed(tumbling("10s"), **options)
    (stream.final() if options else stream).sink("out", stdout())
    return stream.pipeline.plan()


@pytest.mark.parametrize(
    ("window", "allowed", "error"),
    [
        (session("10s"), "1h", "A session that is over cannot be corrected.*longer lateness= at the source"),
        (by_count(10), "1h", "A window of rows that is full cannot be corrected.*longer lateness= at the source"),
        (tumbling("10s"), "0s", "allowed_lateness"),
        (tumbling("10s"), "soon", "'soon' is not a"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_a_reason(window, allowed, error):
    with pytest.raises(FordstoneError, match=rf"(?s)step windows: .*{error}"):
        windowed(window, allowed_lateness=allowed)


def test_results_replace_each_other_and_the_final_ones_have_no_event_time():
    windows = windowed(tumbling("10s"), allowed_lateness="1h")
    with pytest.raises(PipelineError, match=r"early= or allowed_lateness=, .final\(\) has only the last result"):
        windows.group_by("k").agg(n="sum(n)")
    assert windows.final().group_by("k").agg(n="sum(n)").schema.to_dict() == {"k": "string", "n": "bigint"}
    with pytest.raises(PipelineError, match="needs event time"):
        windows.final().group_by("k").window(tumbling("1m")).agg(n="sum(n)")


def test_explain_says_how_long_windows_are_kept_and_the_state_depends_on_it():
    assert "correct a window for 1h after its end, at barriers; then its result is final" in explain(
        plan_of(allowed_lateness="1h")
    )
    options: list[dict[str, str]] = [{}, {"allowed_lateness": "1h"}, {"allowed_lateness": "2h"}, {"early": "1s"}]
    plans = [plan_of(**given) for given in options]
    assert len({str(step_digests(plan, stream_types(plan))["windows"]) for plan in plans}) == len(options)


def test_partial_rows_below_the_cut_are_judged_by_the_same_lateness():
    stream = windowed(tumbling("10s"), True, allowed_lateness="1h")
    stream.sink("out", stdout())
    (combine,) = (step for step in split(stream.pipeline.plan()).edge.steps if isinstance(step, Combine))
    assert combine.allowed_lateness_us == 3_600_000_000
