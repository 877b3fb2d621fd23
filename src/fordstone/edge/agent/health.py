"""Report a node's health to the hub: about every ten seconds, and at once when its state or problem changes.

Reports are best-effort: a hub that does not respond, or rejects them, changes nothing for the pipeline.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Self

from fordstone.errors import HubError
from fordstone.hub.messages import Health, HealthState
from fordstone.protocol.progress import Counters

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient
    from fordstone.protocol.progress import Progress
    from fordstone.runtime.clock import Clock

log = logging.getLogger(__name__)

HEALTH_EVERY_US: Final = 10_000_000
PROBLEM_CHARS_MAX: Final = 500
CHANGES_EVERY_S: Final = 1.0
"""Minimum interval between two reports."""
LAST_REPORT_S: Final = 5.0
"""Timeout of the last report, at the end of a run."""


class HealthReporter:
    """Receives progress from the thread that runs the pipeline, and sends from its own. Used as a context around the run."""

    def __init__(self, hub: HubClient, *, node: str, pipeline: str, clock: Clock, version: str = "") -> None:
        self._hub = hub
        self._node = node
        self._pipeline = pipeline
        self._clock = clock
        self._version = version
        self._progress: Progress | None = None
        self._end: tuple[HealthState, str] | None = None
        self._sent: Health | None = None
        self._sent_us: int | None = None
        self._failing = False
        self._changed = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, progress: Progress) -> None:
        """Record the newest progress. Called about 20 times a second; does no I/O."""
        before, self._progress = self._progress, progress
        if before is None or _state_of(before) != _state_of(progress):
            self._changed.set()

    def failed(self, error: BaseException) -> None:
        self._end = ("failed", str(error))

    def stopped(self) -> None:
        self._end = ("stopped", "")

    def step(self) -> None:
        """Send a report if one is due, or if something changed. Errors of the hub and the network are logged, not raised."""
        now_us = self._clock.monotonic_us()
        health = self.now()
        due = self._sent_us is None or now_us - self._sent_us >= HEALTH_EVERY_US
        if not due and self._sent is not None and _reported(health) == _reported(self._sent):
            return
        self._sent, self._sent_us = health, now_us
        try:
            self._hub.report_health(self._node, self._pipeline, health)
        except HubError as error:
            if not self._failing:
                log.info("health not reported", extra={"problem": str(error)})
            self._failing = True
        else:
            self._failing = False

    def now(self) -> Health:
        """Return the report that would be sent now."""
        state, problem = self._end or _state_of(self._progress)
        return Health(
            state=state,
            sent_us=self._clock.wall_us(),
            version=self._version,
            progress=Counters() if self._progress is None else self._progress.counters(),
            problem=" ".join(problem.split())[:PROBLEM_CHARS_MAX],
        )

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._end is None:
            if error is not None:
                self.failed(error)
            else:
                self.stopped()
        self._over.set()
        self._changed.set()
        if self._thread is not None:
            # The thread is a daemon and its calls have timeouts: a slow hub does not delay the end.
            self._thread.join(LAST_REPORT_S)

    def _run(self) -> None:
        while True:
            # In this order, so that a change during `step` is not missed.
            self._changed.clear()
            over = self._over.is_set()
            self.step()
            if over:
                return
            self._over.wait(CHANGES_EVERY_S)
            self._changed.wait(HEALTH_EVERY_US / 1e6)


def _state_of(progress: Progress | None) -> tuple[HealthState, str]:
    """Return the node's state and its problem."""
    if progress is None:
        return "starting", ""
    if progress.stalled is not None:
        return "waiting", progress.stalled
    problems = [problem for problem in (progress.hub_problem, *(one.problem for one in progress.away)) if problem]
    if progress.damaged_runs:
        problems.insert(0, f"the disk has damaged {progress.damaged_runs} runs of its checkpoints.")
    return "running", " ".join(problems)


def _reported(health: Health) -> tuple[str, str]:
    return health.state, health.problem
