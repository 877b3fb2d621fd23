"""The progress of a run while it runs, and its report when it is over: frozen values that are shown, or sent as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from fordstone.protocol.progress import Counters


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
        """The numbers alone."""
        return msgspec.convert(self, Counters, from_attributes=True)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    pipeline: str
    outcome: Literal["ended", "stopped", "already_ended"]
    """Bounded input was read to its end; a stop was requested; or there was nothing left to do."""
    progress: Progress
    resumed_from: int | None = None
    """The checkpoint that the run resumed from."""
