"""What moves along a channel."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from fordstone.model.ids import Attempt


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows. `late` ones were judged so at their source."""

    frame: pl.DataFrame
    late: bool = False


@dataclass(frozen=True, slots=True)
class Watermark:
    """No row that is not late will be older. `idle`: this channel holds time back no longer, until it says otherwise."""

    us: int
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """The mark between two epochs."""

    attempt: Attempt
    committed: Attempt
    """The newest attempt that has been sealed: what was frozen for it is not pending any more."""
    overtakes: bool = False
    """Unaligned: it does not wait for what stands before it."""
    last: bool = False
    """Nothing follows."""
    idle: bool = False
    """Behind it, this channel holds time back no longer. Taken up for all channels at the cut itself, so that it does not
    matter whose rows come first behind it."""
    now_us: int = 0
    """The time by the clock, for all tasks alike."""
    before_us: int = 0
    """The same at the end of the epoch before."""
    drains: bool = False
    """Loops are to run empty before it passes: a recorded epoch is computed again."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Sent around a loop to find out whether anything is left in it."""

    number: int


Item = Batch | Watermark | Barrier | Probe
