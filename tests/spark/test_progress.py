"""The progress of a run on Spark, from the outcomes of its batches."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.plan import plan as p
from fordstone.planner.split import split
from fordstone.protocol.progress import HeldBack
from fordstone.spark.hosted.commit import BatchOutcome
from fordstone.spark.run import _Tally

SECOND_US = 1_000_000


@dataclass
class Clock:
    us: int = 0

    def __call__(self) -> int:
        return self.us


def plan(*, tiered: bool) -> p.Plan:
    pipeline = Pipeline("rooms")
    readings = pipeline.source(
        "readings", memory(MemorySource([[]])), schema={"k": "string", "ts": "timestamp"}, time="ts", lateness="5s"
    )
    stream = readings.to_center(name="cut") if tiered else readings
    stream.group_by("k").window(tumbling("10s")).agg(n="count(*)").sink("out", memory(MemorySink()))
    found = split(pipeline.plan()).center if tiered else pipeline.plan()
    assert found is not None
    return found


def outcome(epoch: int, source: str, rows_late: int = 0, late_by_us: int = 0, **seconds: int) -> BatchOutcome:
    """After a batch: of each partition the position and the largest time, both the same number."""
    cuts = {name: PartitionCut(position=at, max_time_us=at * SECOND_US) for name, at in seconds.items()}
    cut = Cut(epoch=epoch, sources={source: SourceCut(partitions=cuts)})
    return BatchOutcome(epoch=epoch, cut=cut, rows_late=rows_late, late_by_us=late_by_us)


def test_the_partition_that_lags_is_named_and_its_silence_goes_on_between_batches():
    clock = Clock()
    tally = _Tally(plan(tiered=False), SECOND_US, now_us=clock)
    tally.add(outcome(1, "readings", a=10, b=10))
    assert tally.progress(stopping=False).held_back is None
    clock.us = 20 * SECOND_US
    tally.add(outcome(2, "readings", a=10, b=40))
    clock.us = 25 * SECOND_US
    assert tally.progress(stopping=False).held_back == HeldBack(
        source="readings", partition="a", lag_us=30 * SECOND_US, silent_us=25 * SECOND_US
    )


@pytest.mark.parametrize(
    ("active", "available", "busy"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_batch_that_runs_is_seen_in_the_progress(active: bool, available: bool, busy: bool):
    tally = _Tally(plan(tiered=False), SECOND_US, now_us=Clock())
    status = {"isTriggerActive": active, "isDataAvailable": available, "message": ""}
    tally.look(SimpleNamespace(status=status, lastProgress=None))  # type: ignore[arg-type]
    assert tally.progress(stopping=False).busy is busy


def test_the_center_names_the_node_that_lags():
    tally = _Tally(plan(tiered=True), SECOND_US, now_us=Clock())
    tally.add(outcome(1, "cut", gateway=10, other=100))
    assert tally.progress(stopping=False).held_back == HeldBack(
        source="cut", partition="gateway", lag_us=90 * SECOND_US, silent_us=0, is_node=True
    )


def test_late_rows_are_explained_by_the_lateness_of_the_source_or_at_the_center_by_that_of_the_edge():
    texts = []
    for tiered, source in ((False, "readings"), (True, "cut")):
        tally = _Tally(plan(tiered=tiered), SECOND_US, now_us=Clock())
        tally.add(outcome(1, source, a=10))
        assert tally.progress(stopping=False).late is None
        tally.add(outcome(2, source, rows_late=3, late_by_us=2 * SECOND_US, a=20))
        texts.append(tally.progress(stopping=False).late or "")
    assert texts[0] == 'up to 2s too late; lateness="7s" at source readings would have counted them'
    assert texts[1].startswith("up to 2s too late; a lateness of the edge's sources that is longer by this")
