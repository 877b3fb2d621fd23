"""Tell the hub how this node is: about every ten seconds, and at once when something changed.

It is by the way: a hub that does not answer, or says no, changes nothing for the pipeline. What the hub knows for certain are
the epochs that it has; health is a node's own word.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Protocol, Self

from fordstone.errors import HubError
from fordstone.hub.messages import Health

if TYPE_CHECKING:
    from fordstone.runtime.clock import Clock
    from fordstone.runtime.progress import Progress

log = logging.getLogger(__name__)

HEALTH_EVERY_US: Final = 10_000_000
PROBLEM_CHARS_MAX: Final = 500
NEWS_EVERY_S: Final = 1.0
"""News is not sent more often."""
LAST_WORD_S: Final = 2.0
"""So long the end of a run waits for its last report."""


class Reports(Protocol):
    """The part of `hub.client.HubClient` that is needed here."""

    def report_health(self, node: str, pipeline: str, health: Health) -> None:
        """Send it; raises `HubError`."""
        ...


class HealthReporter:
    """Takes progress from the thread that runs the pipeline, and sends from one of its own. Enter it for the time of the run."""

    def __init__(self, hub: Reports, *, node: str, pipeline: str, clock: Clock, version: str = "") -> None:
        self._hub = hub
        self._node = node
        self._pipeline = pipeline
        self._clock = clock
        self._version = version
        self._progress: Progress | None = None
        self._end: tuple[str, str] | None = None
        self._sent: Health | None = None
        self._sent_us: int | None = None
        self._silent = False
        self._news = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, progress: Progress) -> None:
        """Take the newest progress in. Called about 20 times a second; does no I/O."""
        before, self._progress = self._progress, progress
        if before is None or _kind(before) != _kind(progress):
            self._news.set()

    def failed(self, error: BaseException) -> None:
        """The run is over, and not as it should be."""
        self._end = ("failed", str(error))

    def stopped(self) -> None:
        """The run is over, as it should be."""
        self._end = ("stopped", "")

    def step(self) -> None:
        """Send if it is time, or if there is news. Never raises what the hub or the network says."""
        now_us = self._clock.monotonic_us()
        health = self.now()
        due = self._sent_us is None or now_us - self._sent_us >= HEALTH_EVERY_US
        if not due and self._sent is not None and _said(health) == _said(self._sent):
            return
        self._sent, self._sent_us = health, now_us
        try:
            self._hub.report_health(self._node, self._pipeline, health)
        except HubError as error:
            if not self._silent:
                log.info("health not reported", extra={"problem": str(error)})
            self._silent = True
        else:
            self._silent = False

    def now(self) -> Health:
        """How the node is, as it would be sent."""
        state, problem = self._end or _kind(self._progress)
        facts = self._progress
        common = {"state": state, "sent_us": self._clock.wall_us(), "version": self._version}
        problem = " ".join(problem.split())[:PROBLEM_CHARS_MAX]
        if facts is None:
            return Health(**common, problem=problem)  # type: ignore[arg-type]  # one of the words that there are
        return Health(
            **common,  # type: ignore[arg-type]  # likewise
            epoch=facts.epoch,
            rows_in=facts.rows_in,
            rows_late=facts.rows_late,
            watermark_us=facts.watermark_us,
            outbox_epochs=facts.outbox_epochs,
            outbox_bytes=facts.outbox_bytes,
            restarts=facts.restarts,
            problem=problem,
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
        self._news.set()
        if self._thread is not None:
            # The thread is a daemon and its calls are bounded: a hub that is slow to answer does not hold the end up.
            self._thread.join(LAST_WORD_S)

    def _run(self) -> None:
        while True:
            # In this order: news that comes in between is looked at once more, not missed.
            self._news.clear()
            over = self._over.is_set()
            self.step()
            if over:
                return
            self._over.wait(NEWS_EVERY_S)
            self._news.wait(HEALTH_EVERY_US / 1e6)


def _kind(progress: Progress | None) -> tuple[str, str]:
    """The node's state in a word, and its problem."""
    if progress is None:
        return "starting", ""
    if progress.stalled is not None:
        return "waiting", progress.stalled
    return "running", progress.hub_problem or ""


def _said(health: Health) -> tuple[str, str]:
    return health.state, health.problem
