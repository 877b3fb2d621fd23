"""A sink whose system is away: the pipeline waits for it, says so, and can be stopped meanwhile."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from tests.services.base import free_port
from tests.waiting import until

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, memory, socket_lines
from fordstone.connectors.base import SinkDelayedError
from fordstone.edge import run as run_module
from fordstone.protocol.progress import Progress
from fordstone.protocol.retry import Backoff
from fordstone.runtime.health import PipelineHealth, PipelineWatch

ROWS = [{"n": number} for number in range(5)]


class AwaySink(MemorySink):
    """Takes rows only while it is there."""

    away = True

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        if self.away:
            raise SinkDelayedError("sink out: away")
        super().release(epoch, frame)


def copying(source: MemorySource, sink: MemorySink) -> Pipeline:
    pipeline = Pipeline("copy")
    pipeline.source("rows", memory(source), schema={"n": "bigint"}).sink("out", memory(sink))
    return pipeline


def test_a_run_whose_sink_is_away_can_be_stopped_and_the_next_one_releases_what_was_sealed(tmp_path: Path) -> None:
    source, sink = MemorySource([ROWS]), AwaySink()
    run = copying(source, sink).start(state=tmp_path, interval="5ms")
    until(lambda: run.progress is not None and run.progress.waits_for == "sink", "wait", alive=lambda: run.running)
    report = run.stop(60)
    assert report.outcome == "stopped"
    assert report.progress.stalled == "sink out: away"
    assert not sink.released
    sink.away = False
    source.append(0, [{"n": 5}])
    source.end()
    assert copying(source, sink).run(state=tmp_path).outcome == "ended"
    assert sorted(sink.rows()["n"]) == list(range(6))


def test_a_bounded_run_that_is_stopped_before_its_last_epoch_was_released_has_not_ended(tmp_path: Path) -> None:
    sink = AwaySink()
    run = copying(MemorySource([ROWS]), sink).start(state=tmp_path, bounded=True)
    until(lambda: run.progress is not None and run.progress.waits_for == "sink", "wait", alive=lambda: run.running)
    assert run.stop(60).outcome == "stopped"
    sink.away = False
    copying(MemorySource([ROWS]), sink).run(state=tmp_path, bounded=True)
    assert sorted(sink.rows()["n"]) == list(range(5))


class Shown:
    """What progress and health have said."""

    def __init__(self) -> None:
        self.watch = PipelineWatch("copy")
        self.all: list[tuple[Progress, PipelineHealth]] = []

    def __call__(self, progress: Progress) -> None:
        self.watch.show(progress)
        self.all.append((progress, self.watch.health()))

    def health(self, *waiting_for: str) -> PipelineHealth | None:
        """The newest that names these."""
        return next((health for _, health in reversed(self.all) if health.waiting_for == waiting_for), None)


def test_a_start_that_waits_for_a_sink_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_module, "HUB_WAIT", Backoff(first_us=1, max_us=1))
    source, sink, shown = MemorySource([ROWS]), AwaySink(), Shown()
    run = copying(source, sink).start(state=tmp_path, interval="5ms")
    until(lambda: run.progress is not None and run.progress.waits_for == "sink", "wait", alive=lambda: run.running)
    run.stop(60)
    run = copying(source, sink).start(state=tmp_path, on_progress=shown)
    until(lambda: len(shown.all) > 1, "two tries", alive=lambda: run.running)
    sink.away = False
    until(lambda: shown.health() is not None, "start", alive=lambda: run.running)
    run.stop(60)
    progress, health = shown.all[0]
    assert [(one.role, one.step, one.kind) for one in progress.away] == [("sink", "out", "memory")]
    assert (progress.stalled, progress.hub_problem) == ("sink out: away", None)
    assert (health.state, health.waits_for, health.waiting_for) == ("waiting", "sink", ("sink out (memory)",))
    assert (health.hub_away_s, health.since_seal_s) == (None, None)
    record = next(one for one in caplog.records if one.getMessage().startswith("waiting for a sink"))
    assert vars(record).items() >= {"pipeline": "copy", "step": "out", "kind": "memory"}.items()


def test_sources_and_sinks_that_are_away_while_it_runs_are_named_and_are_no_hub(tmp_path: Path) -> None:
    source, sink, shown = MemorySource([ROWS]), AwaySink(), Shown()
    pipeline = copying(source, sink)
    lines = socket_lines(connect=f"127.0.0.1:{free_port()}")
    pipeline.source("lines", lines, schema={"n": "bigint"}).sink("none", memory(MemorySink()))
    names = ("source lines (socket_lines)", "sink out (memory)")
    with pipeline.start(state=tmp_path, interval="5ms", on_progress=shown) as run:
        until(
            lambda: shown.health(*names) is not None, "names", alive=lambda: run.running, report=lambda: shown.all[-1]
        )
        sink.away = False
        until(lambda: shown.all[-1][1].waiting_for == names[:1], "end of the wait", alive=lambda: run.running)
    found = shown.health(*names)
    assert found is not None
    assert found.hub_away_s is None
    progress = shown.all[-1][0]
    assert progress.hub_problem is None
    assert "127.0.0.1" in progress.away[0].problem
