"""Threads of a run: the first failure stops all, and nothing runs beside a thread that hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import fordstone.edge.run
from fordstone import Pipeline
from fordstone.connectors import MemorySource, memory
from fordstone.edge.run import HungError, ThreadScheduler
from fordstone.errors import StoreLockedError
from fordstone.protocol.retry import RestartPolicy
from fordstone.storage.disk import OsDisk

QUICK = RestartPolicy(wait_first_us=1_000, wait_max_us=1_000)
SCHEMA = {"n": "bigint"}
SECONDS_MAX = 180.0


class Hanging:
    """Waits until the test is over."""

    idle_wait_us = None
    id = "hanging"

    def __init__(self) -> None:
        self.wake: Any = lambda: None
        self.entered, self.leave = threading.Event(), threading.Event()

    def step(self) -> bool:
        self.entered.set()
        self.leave.wait(SECONDS_MAX)
        return False


class Failing:
    """Fails as soon as the other one hangs."""

    idle_wait_us = None
    id = "failing"

    def __init__(self, other: Hanging) -> None:
        self.wake: Any = lambda: None
        self._other = other

    def step(self) -> bool:
        self._other.entered.wait(SECONDS_MAX)
        raise ValueError("the first failure")


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.leave.set()


def test_a_thread_that_hangs_after_a_failure_is_named_with_the_failure(hanging: Hanging) -> None:
    scheduler = ThreadScheduler([hanging, Failing(hanging)], join_seconds=0.01)
    with pytest.raises(HungError, match=r"(?s)fordstone-hanging-0.*the first failure.*End this process") as caught:
        scheduler.run(lambda: False)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_thread_that_hangs_after_the_end_is_an_error_too(hanging: Hanging) -> None:
    scheduler = ThreadScheduler([hanging], join_seconds=0.01)
    with pytest.raises(HungError, match="fordstone-hanging-0"):
        scheduler.run(hanging.entered.is_set)


def test_the_failure_itself_is_raised_when_all_threads_end(hanging: Hanging) -> None:
    hanging.leave.set()
    with pytest.raises(ValueError, match="the first failure"):
        ThreadScheduler([hanging, Failing(hanging)]).run(lambda: False)


def test_a_run_beside_a_hanging_writer_is_never_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last step could put a manifest over a newer one."""
    monkeypatch.setattr(fordstone.edge.run, "JOIN_SECONDS", 0.01)
    source = MemorySource([[{"n": 0}]])
    leave, left = threading.Event(), threading.Event()
    failed: list[object] = []

    def hangs(_: pl.DataFrame) -> None:
        source.append(0, [{"n": 1}])
        leave.wait(SECONDS_MAX)
        left.set()

    def fails_later(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 1:
            failed.append(row)
            raise ConnectionError("away")
        return row

    pipeline = Pipeline("p")
    pipeline.source("rows", memory(source), schema=SCHEMA).map(fails_later).sink("out", hangs)
    manifests = tmp_path / "p" / "node" / "manifests"
    try:
        with pytest.raises(HungError, match=r"fordstone-writer.*away"):
            pipeline.run(state=tmp_path, interval="1ms", restart=QUICK)
        assert len(failed) == 1, "the pipeline was not started again"
        with closing(OsDisk(tmp_path)) as other, pytest.raises(StoreLockedError):
            other.lock()
        before = sorted(manifests.iterdir())
    finally:
        leave.set()
    assert left.wait(SECONDS_MAX)
    assert sorted(manifests.iterdir()) == before
