"""What moves along a channel, and what a task hands over at a barrier: references to immutable pieces, and a few numbers.

Nothing is copied or written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from fordstone.epochs.manifest import PartitionCut
from fordstone.lang.duration import TIME_MIN_US
from fordstone.plan.ids import Attempt, TaskId
from fordstone.state.base import Piece, State


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows. `late` ones are below the watermark of their source partition, and carry it (`ROW_WATERMARK`)."""

    frame: pl.DataFrame
    late: bool = False


@dataclass(frozen=True, slots=True)
class Watermark:
    """No row that is not late will be older. `idle`: this channel holds time back no longer, until it says otherwise."""

    us: int
    idle: bool = False
    ended_us: int = TIME_MIN_US
    """From a source: how far the furthest partition came that was read to its end (`reached_us`)."""


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
    """After it, this channel does not hold time back. Applied to all channels at the cut itself, so that it does not matter whose rows
    come first after it."""
    ended_us: int = TIME_MIN_US
    """From a source, likewise: as in `Watermark`."""
    now_us: int = 0
    """The time by the pipeline's clock (`protocol.clock`), for all tasks alike."""
    before_us: int = 0
    """The same at the end of the epoch before."""
    wall_us: int = 0
    """The time by the machine's clock, for all tasks alike. Not used when an epoch is computed again."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Sent around a loop to find out whether anything is left in it."""

    number: int


Item = Batch | Watermark | Barrier | Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenState:
    """One state of one step on one subtask, as it was at the barrier."""

    step: str
    name: str
    subtask: int
    pieces: tuple[Piece, ...]
    state: State
    """The live state, for the merger; its content has moved on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSource:
    """Where a source task's partitions stood."""

    step: str
    partitions: Mapping[str, PartitionCut]
    watermark_us: int
    stages: tuple[Mapping[str, PartitionCut], ...] = ()
    """Where partitions changed within the epoch (see `runtime.partition.Share`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSnapshot:
    """One task's part of a checkpoint."""

    task: TaskId
    attempt: Attempt
    states: tuple[FrozenState, ...] = ()
    source: FrozenSource | None = None
    times_us: Mapping[str, int] = field(default_factory=dict)
    """The watermark of each input channel."""
    watermark_us: int = TIME_MIN_US
    outputs: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    """Output rows that wait for the seal, by sink: all of them that no earlier seal has released."""
    in_flight: Mapping[str, tuple[Item, ...]] = field(default_factory=dict)
    finished: bool = False
    pause_us: int = 0
    moved: bool = True
    """Whether rows came or time moved since the barrier before."""
    clock_due_us: int | None = None
    """From when on, by the clock, a barrier has something to do here although nothing moves."""
