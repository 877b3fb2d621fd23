"""Who follows a run: a URL that gets copies of its checkpoints, the hub that gets its epochs, both, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from fordstone.checkpoint.store import CheckpointStore
from fordstone.edge.config import RunConfig
from fordstone.edge.engine import Rim, Steppable
from fordstone.edge.hub_link import HubLink
from fordstone.edge.outbox import Outbox
from fordstone.edge.recovery import Remote
from fordstone.edge.report import Progress
from fordstone.edge.uploading import Upload, remote_checkpoints
from fordstone.edge.writer import Writer
from fordstone.model import plan as p

if TYPE_CHECKING:
    from fordstone.hub.client import HubClient

HUB_TIMEOUT_SECONDS: Final = 15.0
"""Of one call: so long a stop may have to wait for a hub that hangs."""


class Followers:
    """Made once a start. Nobody is asked anything before recovery needs it."""

    def __init__(self, plan: p.Plan, config: RunConfig, rim: Rim, store: CheckpointStore) -> None:
        self._config, self._rim, self._store = config, rim, store
        self._upload: Upload | None = None
        self._client: HubClient | None = None
        self._link: HubLink | None = None
        if config.hub is not None:
            from fordstone.hub.client import HubClient  # noqa: PLC0415 - who has no hub saves the memory of an HTTP client

            self._client = HubClient(config.hub, timeout_s=HUB_TIMEOUT_SECONDS)
            self._link = HubLink(self._client, plan, config, rim, store)

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
            writer.keep_for(self._link.acknowledged)
            found.append(self._link.sender)
        if self._config.remote is not None:
            self._upload = Upload(self._config.remote, self._store, self._rim.clock, keep=self._config.keep)
            writer.keep_for(self._upload.acknowledged)
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
