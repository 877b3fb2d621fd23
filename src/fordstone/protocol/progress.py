"""The progress of a run while it runs, and its report when it is over: frozen values that are shown, or sent as JSON.

`Counters` are what a node also reports to the hub (`hub.messages.Health` embeds them); `Progress` adds what only the process shows.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Counters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts and sizes of one run. None: not known yet."""

    epoch: int = 0
    rows_in: int = 0
    rows_out: int = 0
    """Rows that this process has released to sinks."""
    rows_late: int = 0
    rows_rejected: int = 0
    """Input that was not a row, or a row without a time."""
    rows_failed: int = 0
    """Rows that a user's function raised an exception for, and that were set aside."""
    watermark_us: int | None = None
    """The minimum over the sources."""
    state_bytes: int = 0
    checkpoints: int = 0
    """Checkpoints that this process has sealed."""
    given_up: int = 0
    """Checkpoints that this process has given up."""
    checkpoint_us: int | None = None
    """The time until the last checkpoint was durable. The pipeline does not wait for it."""
    checkpoint_bytes: int | None = None
    pause_us: int | None = None
    """The time for which the last barrier stopped the slowest task."""
    interval_us: int = 0
    restarts: int = 0
    outbox_epochs: int = 0
    """Sealed epochs that the hub does not have yet."""
    outbox_bytes: int = 0
    sent_epoch: int | None = None
    """The newest epoch that the hub has; None without a hub."""
    sent_bytes: int = 0
    """Bytes that this process has sent to the hub."""


class Progress(Counters, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The state of a run now."""

    pipeline: str
    elapsed_us: int
    stalled: str | None = None
    """Why nothing can be sealed now."""
    hub_problem: str | None = None
    """Why nothing can be sent to the hub now."""
    stopping: bool = False
    """A stop was requested: the epoch is being finished."""
    share: float | None = None
    """The share of bounded input that was read, from 0 to 1, if it is known."""
    read_bytes: int | None = None
    total_bytes: int | None = None

    def counters(self) -> Counters:
        return msgspec.convert(self, Counters, from_attributes=True)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    pipeline: str
    outcome: Literal["ended", "stopped", "already_ended"]
    """Bounded input was read to its end; a stop was requested; or there was nothing left to do."""
    progress: Progress
    resumed_from: int | None = None
    """The checkpoint that the run resumed from."""
