"""Health reports: when they are sent, what they say, and that nothing of the hub's troubles the run."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from tests.cli.test_view import PROGRESS

from fordstone.edge.agent.health import HealthReporter
from fordstone.errors import HubAwayError, HubRefusedError, StorageError
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Health
from fordstone.protocol.progress import Counters
from fordstone.runtime.clock import SystemClock


class Hub(HubClient):
    """Remembers, or is away."""

    def __init__(self) -> None:
        self.got: list[Health] = []
        self.error: Exception | None = None
        self.came = threading.Event()

    def report_health(self, node: str, pipeline: str, health: Health) -> None:
        assert (node, pipeline) == ("gateway", "cold-chain")
        self.got.append(health)
        self.came.set()
        if self.error is not None:
            raise self.error


class Clock:
    def __init__(self) -> None:
        self.us = 0

    def monotonic_us(self) -> int:
        return self.us

    def wall_us(self) -> int:
        return 1_000 + self.us


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reporter(hub: Hub, clock: Clock) -> HealthReporter:
    return HealthReporter(hub, node="gateway", pipeline="cold-chain", clock=clock, version="1")


def changed(**facts: Any) -> Any:
    return msgspec.structs.replace(PROGRESS, **facts)


def test_it_is_sent_every_ten_seconds_and_at_once_when_it_changed(hub: Hub, clock: Clock, reporter: HealthReporter):
    reporter.step()
    for second in range(1, 31):
        clock.us = second * 1_000_000
        reporter.show(changed(rows_in=second, stalled="the disk is full" if second in {14, 15} else None))
        reporter.step()
    assert [(health.sent_us // 1_000_000, health.state) for health in hub.got] == [
        (0, "starting"),
        (1, "running"),
        (11, "running"),
        (14, "waiting"),
        (16, "running"),
        (26, "running"),
    ]
    assert hub.got[3].problem == "the disk is full"


def test_it_says_what_waits_and_why(hub: Hub, reporter: HealthReporter):
    reporter.show(changed(outbox_epochs=3, outbox_bytes=900, hub_problem="the hub\nis full", rows_late=2, restarts=1))
    reporter.step()
    (got,) = hub.got
    assert (got.state, got.sent_us, got.problem, got.version) == ("running", 1_000, "the hub is full", "1")
    assert got.progress == Counters(
        **{name: getattr(PROGRESS, name) for name in Counters.__struct_fields__}
        | {"outbox_epochs": 3, "outbox_bytes": 900, "rows_late": 2, "restarts": 1}
    )


@pytest.mark.parametrize(
    "error",
    [HubAwayError("nobody answers"), HubRefusedError("no", status=403, code="forbidden")],
    ids=["away", "refused"],
)
def test_a_hub_that_is_away_or_says_no_is_asked_again_in_its_time(
    hub: Hub, clock: Clock, reporter: HealthReporter, error: Exception
):
    hub.error = error
    for second in range(21):
        clock.us = second * 1_000_000
        reporter.step()
    assert len(hub.got) == 3


def test_the_last_word_says_how_the_run_ended(hub: Hub):
    with HealthReporter(hub, node="gateway", pipeline="cold-chain", clock=SystemClock()) as reporter:
        reporter.show(PROGRESS)
    assert hub.got[-1].state == "stopped"
    failing = HealthReporter(hub, node="gateway", pipeline="cold-chain", clock=SystemClock())
    with pytest.raises(StorageError), failing:
        raise StorageError("the disk is gone")
    assert (hub.got[-1].state, hub.got[-1].problem) == ("failed", "the disk is gone")


def test_a_problem_as_long_as_a_book_is_cut(hub: Hub, reporter: HealthReporter):
    reporter.failed(StorageError("x" * 10_000))
    reporter.step()
    assert len(hub.got[0].problem) == 500
