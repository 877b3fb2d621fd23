"""Who follows a run: a URL that gets copies of its checkpoints, the hub that gets its epochs, both, or neither.

Uploading as the engine drives it: a steppable of its own, so that a slow network holds up nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Environment, Steppable
from fordstone.edge.engine.recovery import Remote
from fordstone.edge.engine.writer import Writer
from fordstone.edge.link.hub import HubLink
from fordstone.edge.link.outbox import Outbox
from fordstone.epochs.fetch import fetch_checkpoint, survey_remote
from fordstone.epochs.store import CheckpointStore
from fordstone.epochs.survey import Survey
from fordstone.epochs.upload import Uploader
from fordstone.plan import plan as p
from fordstone.runtime.clock import Clock
from fordstone.runtime.progress import Progress

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient


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


HUB_TIMEOUT_SECONDS: Final = 15.0
"""Of one call: so long a stop may have to wait for a hub that hangs."""


class Followers:
    """Made once a start. Nobody is asked anything before recovery needs it."""

    def __init__(self, plan: p.Plan, config: RunConfig, environment: Environment, store: CheckpointStore) -> None:
        self._config, self._rim, self._store = config, environment, store
        self._upload: Upload | None = None
        self._client: HubClient | None = None
        self._link: HubLink | None = None
        if config.hub is not None:
            from fordstone.hub.client.client import HubClient  # noqa: PLC0415 - who has no hub saves the memory of an HTTP client

            self._client = HubClient(config.hub, timeout_s=HUB_TIMEOUT_SECONDS)
            self._link = HubLink(self._client, plan, config, environment, store)

    @property
    def outbox(self) -> Outbox | None:
        """Where sealed epochs wait for the hub."""
        return None if self._link is None else self._link.outbox

    def remote(self) -> Remote | None:
        """Checkpoints elsewhere, to recover from."""
        taking_over = self._config.take_over and self._link is not None
        if self._config.remote is not None and not taking_over:
            return remote_checkpoints(self._config.remote, self._store)
        return None if self._link is None else self._link.remote

    def begin(self, writer: Writer) -> list[Steppable]:
        """What is stepped beside the engine. Called when it has recovered."""
        found: list[Steppable] = []
        if self._link is not None:
            writer.stages.retention.keep_for(self._link.acknowledged)
            found.append(self._link.sender)
        if self._config.remote is not None:
            self._upload = Upload(self._config.remote, self._store, self._rim.clock, keep=self._config.keep)
            writer.stages.retention.keep_for(self._upload.acknowledged)
            found.append(self._upload)
        return found

    def stopping(self) -> None:
        """The run was told to stop: its last epoch is sealed even if the outbox is full."""
        if self._link is not None:
            self._link.outbox.overrun = True

    def finish(self, *, patient: bool, wait: Callable[[float], bool], tick: Callable[[], None]) -> None:
        """Bring what is left to those who follow (see `Sender.finish`)."""
        if self._upload is not None:
            self._upload.finish()
        if self._link is not None:
            self._link.sender.finish(patient=patient, wait=wait, tick=tick)

    def told(self, progress: Progress) -> Progress:
        """How the run stands, and how it stands with the hub."""
        return progress if self._link is None else self._link.progress(progress)

    def close(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            self._client.close()
