"""Uploading as the engine drives it: a steppable of its own, so that a slow network holds up nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from fordstone.checkpoint.fetch import fetch_checkpoint, survey_remote
from fordstone.checkpoint.report import Survey
from fordstone.checkpoint.store import CheckpointStore
from fordstone.checkpoint.upload import Uploader
from fordstone.edge.clock import Clock
from fordstone.edge.recovery import Remote

log = logging.getLogger(__name__)

LOOK_EVERY_US: Final = 100_000
FINISH_UNITS_MAX: Final = 100_000
"""How many files at most are still sent when the pipeline has ended."""


class Upload:
    """Copies each new checkpoint to a URL."""

    def __init__(self, url: str, store: CheckpointStore, clock: Clock, *, keep: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._store = store
        self._uploader = Uploader(store, url, keep=keep, clock_us=clock.monotonic_us)
        self._told: str | None = None

    @property
    def idle_wait_us(self) -> int | None:
        """Look for new checkpoints now and then."""
        return LOOK_EVERY_US

    @property
    def problem(self) -> str | None:
        """Why the last try failed."""
        return self._uploader.status.last_error

    def acknowledged(self) -> int | None:
        """The newest epoch that is whole at the remote: its runs are kept here as long."""
        return self._uploader.status.uploaded

    def step(self) -> bool:
        """Send one file."""
        epochs = self._store.epochs()
        if epochs:
            self._uploader.offer(epochs[-1])
        did = self._uploader.step()
        if self.problem != self._told:
            self._told = self.problem
            if self.problem is not None:
                log.warning("checkpoint not copied", extra={"problem": self.problem})
        return did

    def finish(self) -> None:
        """Send what is left, unless the remote refuses."""
        for _ in range(FINISH_UNITS_MAX):
            if not self.step():
                return


def remote_checkpoints(url: str, store: CheckpointStore) -> Remote:
    """What recovery needs to know of the copies at a URL."""

    def survey() -> Survey:
        return survey_remote(url, store)

    def fetch(epoch: int) -> None:
        fetch_checkpoint(url, store, epoch)

    return Remote(survey=survey, fetch=fetch)
