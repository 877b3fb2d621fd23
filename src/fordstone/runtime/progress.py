"""What a run reports while it runs and when it is over. Frozen values, to be shown or sent as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run now."""

    pipeline: str
    epoch: int
    rows_in: int
    rows_out: int
    """Released to sinks by this process."""
    rows_late: int
    rows_rejected: int
    watermark_us: int | None = None
    """The least over the sources; None before any row."""
    state_bytes: int
    checkpoints: int
    """Sealed by this process."""
    given_up: int
    checkpoint_us: int | None = None
    """Time until the last one was durable, while the pipeline ran on."""
    checkpoint_bytes: int | None = None
    pause_us: int | None = None
    """How long the last barrier held up the slowest task."""
    interval_us: int
    restarts: int
    stalled: str | None = None
    """Why nothing can be sealed now."""
    elapsed_us: int
    share: float | None = None
    """Share of bounded input that was read, from 0 to 1, if that can be known."""
    read_bytes: int | None = None
    total_bytes: int | None = None
    stopping: bool = False
    """A stop was requested: the epoch is being finished."""
    outbox_epochs: int = 0
    """Sealed, and not at the hub yet."""
    outbox_bytes: int = 0
    sent_epoch: int | None = None
    """The newest epoch that the hub has; None: there is no hub."""
    sent_bytes: int = 0
    """Sent to the hub by this process."""
    hub_problem: str | None = None
    """Why nothing can be sent now."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    pipeline: str
    outcome: Literal["ended", "stopped", "already_ended"]
    """Bounded input was read to its end; a stop was requested; or there was nothing left to do."""
    progress: Progress
    resumed_from: int | None = None
    """The checkpoint that the run began with."""
