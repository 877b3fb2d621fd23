"""A state that is larger than its limit: only what holds time back is read, nothing is lost, and the run says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.edge.declared import SECOND_US
from tests.edge.test_ahead import NOW_US, SCHEMA, Node, at
from tests.simulation.simulator import NoDeadLetters, SimClock

from fordstone import Pipeline, Stream, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.edge import config
from fordstone.edge.config import RunConfig, default_state_bytes
from fordstone.edge.engine.engine import Environment
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import ConfigError, TaskError
from fordstone.protocol.progress import Progress
from fordstone.testing.memory_disk import MemoryDisk

MINUTE_S = 60


def minutes(first_id: int, count: int) -> list[tuple[int, object]]:
    return [(first_id + number, at(number * MINUTE_S * SECOND_US)) for number in range(count)]


def test_a_silent_partition_stops_the_others_at_the_limit_and_its_rows_let_them_go_on():
    node = Node(source=MemorySource([[], [(0, at(0))]]), state_bytes_max=4_900, max_ahead=None)
    node.step()
    node.source.append(1, minutes(100, 100))
    node.step()
    node.source.append(1, minutes(200, 3))
    node.step()
    progress = node.engine.progress()
    read = progress.rows_in
    assert read == 101
    assert progress.stalled is not None
    assert progress.waits_for == "state"
    assert "memory-000000" in progress.stalled
    assert "--state-max" in progress.stalled
    node.source.append(0, minutes(20, 100))
    node.step(rounds=2_000)
    assert node.engine.progress().rows_in == 204
    assert node.found()[0][:2] == [[0, 20, 100], [21, 101]]


# Beyond it.

ROWS = 5_000
LIMIT = 50_000
BATCH = 10


def rows_of(first_id: int, count: int, *, step_s: int = MINUTE_S) -> list[tuple[int, object]]:
    return [(first_id + number, at(number * step_s * SECOND_US)) for number in range(count)]


def counted_for_ever(rows: Stream) -> Stream:
    return rows.group_by("id").agg(n="count(*)")


def counted_by_day(rows: Stream) -> Stream:
    return rows.group_by("id").window(tumbling("1d")).agg(n="count(*)")


def counted_by_minute(rows: Stream) -> Stream:
    return rows.group_by().window(tumbling("1m")).agg(n="count(*)")


class Run:
    """An engine over one source with a limit, stepped by hand. The clock moves by a millisecond per round."""

    limited = False

    def __init__(
        self,
        source: MemorySource,
        count: Callable[[Stream], Stream],
        *,
        timed: bool = True,
        disk: MemoryDisk | None = None,
        **options: Any,
    ) -> None:
        pipeline = Pipeline("limited")
        time: dict[str, Any] = {"time": "ts", "max_ahead": None} if timed else {}
        rows = pipeline.source("rows", memory(source), schema=SCHEMA, **time)
        self.sink = MemorySink()
        count(rows).sink("out", memory(self.sink))
        self.clock, self.disk = SimClock(NOW_US), disk or MemoryDisk()
        given: dict[str, Any] = {
            "node": "n", "interval": "20ms", "checkpoint_timeout": "1s", "batch_rows": BATCH, "state_bytes_max": LIMIT
        }  # fmt: skip
        environment = Environment(
            clock=self.clock, disk=self.disk, choose=lambda _: 0, dead_letters=lambda _: NoDeadLetters()
        )
        store = CheckpointStore(self.disk, pipeline="limited", node="n", keep=3)
        self.engine = recovered_engine(
            pipeline.plan(), {}, RunConfig(**given | options), environment, store, None
        )  # fmt: skip

    def step(self, rounds: int) -> Progress:
        for _ in range(rounds):
            self.clock.now_us += 1_000
            for one in self.engine.steppables():
                one.step()
            if self.engine.over:
                break
        return self.engine.progress()

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(row for frame in self.sink.frames() for row in frame.rows())

    def until_nothing_is_read(self) -> Progress:
        """Step until no row has been read for a second by the clock."""
        read = -1
        while (progress := self.step(1_010)).rows_in > read:
            read = progress.rows_in
        return progress


@pytest.mark.parametrize("parallelism", [1, 2])
def test_bounded_input_is_read_to_its_end_above_the_limit(parallelism: int):
    def peak(run: Run) -> int:
        most = 0
        while not run.engine.over:
            progress = run.step(1)
            most = max(most, progress.state_bytes)
            run.limited = run.limited or progress.waits_for == "state"
        return most

    def run(limit: int | None) -> Run:
        source = MemorySource([rows_of(first, 200) for first in (1_000, 2_000, 3_000)])
        return Run(
            source,
            counted_by_minute,
            bounded=True,
            parallelism=parallelism,
            state_bytes_max=limit,
            interval="2ms",
            batch_rows=2,
        )

    unlimited = run(None)
    limited = run(int(peak(unlimited) / 1.2))
    peak(limited)
    # With two tasks the state is largest when all has been read.
    assert limited.limited or parallelism > 1
    assert limited.rows() == unlimited.rows()


ENDLESS = [
    pytest.param(counted_for_ever, MINUTE_S, True, "have not let the state shrink", id="keys that are never forgotten"),
    pytest.param(counted_by_day, 0, True, "have not let the state shrink", id="rows of one time"),
    pytest.param(counted_for_ever, MINUTE_S, False, "no source has event time", id="no event time"),
]


@pytest.mark.parametrize(("count", "step_s", "timed", "reason"), ENDLESS)
def test_state_that_cannot_shrink_stops_all_sources(
    count: Callable[[Stream], Stream], step_s: int, timed: bool, reason: str
):
    run = Run(MemorySource([rows_of(0, ROWS, step_s=step_s)]), count, timed=timed)
    progress = run.until_nothing_is_read()
    assert progress.state_bytes > LIMIT
    assert progress.rows_in < ROWS * 0.8
    assert progress.waits_for == "state"
    assert progress.stalled is not None
    assert "Nothing is read" in progress.stalled
    assert reason in progress.stalled


@pytest.mark.parametrize("ending", ["bounded", "available_now"])
@pytest.mark.parametrize(("count", "step_s", "timed", "reason"), ENDLESS)
def test_a_run_that_has_to_end_stops_with_an_error_when_nothing_may_be_read_any_more(
    count: Callable[[Stream], Stream], step_s: int, timed: bool, reason: str, ending: str
):
    source = MemorySource([rows_of(0, ROWS, step_s=step_s)])
    options: dict[str, Any] = {ending: True}
    run = Run(source, count, timed=timed, **options)
    with pytest.raises(
        TaskError, match=r"its limit is 0\.0 MiB \(--state-max\).*a run with a larger --state-max continues"
    ):
        run.step(5_000)
    sealed = run.engine.writer.epoch
    run.engine.close()
    again = Run(source, count, timed=timed, disk=run.disk, state_bytes_max=None, **options)
    assert again.engine.resumption.resumed_from == sealed
    again.step(5_000)
    assert again.engine.over


def test_available_now_ends_although_a_partition_that_was_read_to_its_target_holds_time_back():
    found = []
    for limit in (13_000, None):
        source = MemorySource([rows_of(0, 5), rows_of(1_000, 900)])
        run = Run(source, counted_by_minute, available_now=True, state_bytes_max=limit)
        reached = False
        while not run.engine.over:
            reached = run.step(20).waits_for == "state" or reached
        assert reached == (limit is not None)
        found.append(run.engine.progress().rows_in)
    assert found == [905, 905]


def test_the_state_is_measured_at_the_start_and_every_second_not_only_at_epochs():
    source = MemorySource([rows_of(0, ROWS, step_s=0)])
    options: dict[str, Any] = {"interval": "1h", "checkpoint_timeout": "1h"}
    run = Run(source, counted_by_day, batch_rows=3, **options)
    progress = run.until_nothing_is_read()
    assert progress.epoch == 0
    assert progress.rows_in < ROWS
    assert progress.waits_for == "state"
    run.engine.stop()
    run.step(100)
    assert run.engine.over
    again = Run(source, counted_by_day, disk=run.disk, **options)
    assert again.engine.progress().state_bytes > LIMIT
    assert again.step(100).rows_in == 0


def test_a_row_of_an_idle_partition_is_read_above_the_limit_and_moves_time_on():
    node = Node(source=MemorySource([[]]), state_bytes_max=80, max_ahead=None, idle_after="10ms")
    node.source.append(0, [(number, at(number)) for number in range(3)] + [(4, at(1))])
    node.step(rounds=1_000)
    progress = node.engine.progress()
    assert progress.stalled is not None
    assert "all are idle" in progress.stalled
    node.source.append(0, minutes(20, 5))
    node.step(rounds=2_000)
    assert node.engine.progress().rows_in == 9


def test_the_limit_is_half_of_the_memory_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(config, "CGROUP_LIMIT", limit)
    whole = default_state_bytes()
    limit.write_text("max\n")
    assert default_state_bytes() == whole
    limit.write_text(f"{64 << 20}\n")
    assert default_state_bytes() == 32 << 20
    with pytest.raises(ConfigError, match="state_bytes_max=0 must be at least 1"):
        RunConfig(state_bytes_max=0)
    with pytest.raises(ConfigError, match="not a whole number"):
        RunConfig(state_bytes_max="1GiB")  # type: ignore[arg-type]
