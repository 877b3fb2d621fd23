"""Sources that end while an unbounded run reads them, after which the run ends; and a bounded run that always ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.edge.test_ahead import Node, at
from tests.waiting import until

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.errors import ConfigError, EndedError

WAIT_SECONDS = 180.0
ROWS = [{"k": "a", "ts": f"2026-01-01T00:00:{second:02d}Z"} for second in range(15)]
COUNTS = [("a", 5), ("a", 10)]


def counting(*sources: object, sink: MemorySink, **options: Any) -> Pipeline:
    """Rows per key and ten seconds. The last window closes only when time ends."""
    pipeline = Pipeline("p", **options)
    schema = {"k": "string", "ts": "timestamp"}
    streams = [
        pipeline.source(f"s{number}", memory(source), schema=schema, time="ts") for number, source in enumerate(sources)
    ]
    rows = streams[0].union(*streams[1:]) if len(streams) > 1 else streams[0]
    rows.group_by("k").window(tumbling("10s")).agg(n="count(*)").select("k", "n").sink("out", memory(sink))
    return pipeline


@pytest.mark.parametrize("mode", ["aligned", "unaligned", "blocking"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_the_run_ends_when_its_source_has_ended(mode: Any, parallelism: int):
    source, found = MemorySource([ROWS[::2], ROWS[1::2]]), MemorySink()
    run = counting(source, sink=found, mode=mode).start(interval="5ms", parallelism=parallelism)
    source.end()
    report = run.wait(WAIT_SECONDS)
    assert (report.outcome, report.progress.rows_in, report.progress.rows_late) == ("ended", 15, 0)
    assert sorted(found.rows().rows()) == COUNTS


def test_a_source_that_has_ended_does_not_wait_for_the_interval():
    source, found = MemorySource([ROWS]), MemorySink()
    run = counting(source, sink=found).start(interval="1h")
    source.end()
    assert run.wait(WAIT_SECONDS).outcome == "ended"
    assert sorted(found.rows().rows()) == COUNTS


def test_one_of_two_sources_ends_nothing_and_holds_no_time_back():
    first, second, found = MemorySource([ROWS[:3]]), MemorySource([[]]), MemorySink()
    run = counting(first, second, sink=found).start(interval="5ms")
    first.end()
    second.append(0, ROWS[3:])
    until(lambda: found.rows().height == 1, "the first window", alive=lambda: run.running)
    assert found.rows().rows() == [("a", 10)]
    second.end()
    assert run.wait(WAIT_SECONDS).outcome == "ended"
    assert sorted(found.rows().rows()) == COUNTS


def test_a_partition_that_has_ended_does_not_end_its_source():
    source, found = MemorySource([ROWS]), MemorySink()
    run = counting(source, sink=found).start(interval="5ms")
    source.end(0)
    until(lambda: found.rows().height == 1, "the first window", alive=lambda: run.running)
    source.append(source.add_partition(), [{"k": "b", "ts": "2026-01-01T00:00:16Z"}])
    source.end()
    assert run.wait(WAIT_SECONDS).outcome == "ended"
    assert sorted(found.rows().rows()) == [*COUNTS, ("b", 1)]
    with pytest.raises(ConfigError, match="partitions can no longer be added"):
        source.add_partition()


def test_a_source_without_partitions_can_end():
    source = MemorySource()
    source.end()
    assert counting(source, sink=MemorySink()).start(interval="5ms").wait(WAIT_SECONDS).outcome == "ended"


def given() -> Iterator[dict[str, str]]:
    yield from ROWS


async def given_async() -> AsyncIterator[dict[str, str]]:
    for row in ROWS:
        yield row


@pytest.mark.parametrize("rows", [given, given_async])
def test_the_run_ends_when_a_generator_is_exhausted(rows: Any):
    found = MemorySink()
    assert counting(rows(), sink=found).run(interval="5ms").outcome == "ended"
    assert sorted(found.rows().rows()) == COUNTS


def test_at_most_once_ends_as_well(tmp_path: Path):
    source, found = MemorySource([ROWS]), MemorySink()
    source.end()
    pipeline = counting(source, sink=found, guarantee="at_most_once")
    assert pipeline.run(state=tmp_path, interval="5ms").outcome == "ended"
    assert sorted(found.rows().rows()) == COUNTS


def test_a_later_run_with_state_finds_the_end_and_says_so(tmp_path: Path):
    source, found = MemorySource([ROWS]), MemorySink()
    source.end()
    assert counting(source, sink=found).run(state=tmp_path, interval="5ms").outcome == "ended"
    assert counting(source, sink=found).run(state=tmp_path).outcome == "already_ended"
    assert counting(source, sink=found).run(state=tmp_path, bounded=True).outcome == "already_ended"
    with pytest.raises(EndedError, match=r"input was read to the end .* every further row would be late"):
        counting(MemorySource([ROWS]), sink=found).run(state=tmp_path)
    assert sorted(found.rows().rows()) == COUNTS


def test_the_epoch_of_the_end_is_replayed_as_it_was(tmp_path: Path):
    source, found = MemorySource([ROWS]), MemorySink()
    source.end()
    report = counting(source, sink=found).run(state=tmp_path, interval="5ms", keep=10)
    manifests = sorted(tmp_path.rglob("manifests/*.json"))
    assert len(manifests) == report.progress.epoch >= 2
    for manifest in manifests[1:]:
        manifest.write_bytes(b"damaged")
    again = counting(source, sink=found).run(state=tmp_path)
    assert (again.outcome, again.progress.epoch) == ("already_ended", report.progress.epoch)
    assert sorted(found.rows().rows()) == COUNTS


def test_a_bounded_run_ends_although_its_timeout_is_too_short_for_any_checkpoint():
    node = Node(
        source=MemorySource([[(number, at(number)) for number in range(5)]]), bounded=True, checkpoint_timeout="100us"
    )
    for _ in range(200):
        node.clock.now_us += 100
        # Against the stream: a barrier needs one round per task.
        for one in reversed(node.engine.steppables()):
            one.step()
    assert node.engine.over
    assert node.engine.coordinator.given_up > 0
    assert node.found()[0] == [[0, 1, 2, 3, 4]]
