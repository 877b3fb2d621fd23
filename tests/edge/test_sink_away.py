"""A sink whose system is away: the pipeline waits for it, says so, and can be stopped meanwhile."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from tests.waiting import until

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.connectors.base import SinkDelayedError

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
