"""The numbers by which a run is judged from outside: the part of its progress that a node also reports to the hub.

`runtime.progress.Progress` adds what only the process itself shows; `hub.messages.Health` embeds these numbers as they are.
"""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts and sizes of one run. None: not known yet."""

    epoch: int = 0
    rows_in: int = 0
    rows_out: int = 0
    """Rows that this process has released to sinks."""
    rows_late: int = 0
    rows_rejected: int = 0
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
