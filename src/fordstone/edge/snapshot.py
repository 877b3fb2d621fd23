"""What a task hands over at a barrier: references to immutable pieces, and a few numbers. Nothing is copied or written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fordstone.edge.item import Item
from fordstone.model.ids import Attempt, TaskId
from fordstone.model.manifest import TIME_MIN_US, PartitionCut
from fordstone.state.piece import Piece
from fordstone.state.state import State


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
    """What changed within the epoch (see `edge.share`)."""


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
