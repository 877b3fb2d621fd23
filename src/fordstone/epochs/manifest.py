"""What a checkpoint says: a manifest, the cut it stands for, and the runs it is made of.

Frozen values, encoded as canonical JSON. Reading and writing files is `checkpoint`'s work.

Invariants: a manifest is an ordered list of runs with repetition (two equal runs are two contributions); epochs start
at 1 and have no gaps; times are microseconds of event time, UTC.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.state.base import RunRef

MANIFEST_VERSION: Final = 1


class PartitionCut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one partition of a source stood at a barrier."""

    position: int
    max_time_us: int = TIME_MIN_US
    floor_us: int = TIME_MIN_US
    """The source's watermark when this partition joined or came back from idleness: rows below it are late."""
    limit_us: int = TIME_MAX_US
    """Rows above it, from here on, are too far ahead of the clock: they are late (rule 7). It changes at barriers and at starts only."""
    idle: bool = False
    done: bool = False


class SourceCut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one source stood at a barrier: every partition, and the watermark that all its subtasks had announced."""

    partitions: dict[str, PartitionCut]
    watermark_us: int = TIME_MIN_US
    stages: tuple[dict[str, PartitionCut], ...] = ()
    """Where partitions joined or came back within the epoch, at a start or at a barrier whose attempt was given up: the
    partitions as they were then, in order."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The output rows of one sink in this epoch."""

    sink: str
    runs: tuple[RunRef, ...]


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of what decided an epoch: enough to compute it again. Kept in the manifest and once more beside it."""

    epoch: int
    sources: dict[str, SourceCut]
    segments: tuple[Segment, ...] = ()
    overtaking: bool = False
    """Unaligned, with rows in flight: they count as read, and come out in a later epoch."""
    bounded: bool = False
    """What had been read to its end had ended for good."""
    ended: bool = False
    now_us: int = 0
    """The time by the clock that the epoch ended at: what waited for it came out."""


class StateRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One named state of one step on one subtask: its runs, oldest first."""

    step: str
    state: str
    subtask: int
    runs: tuple[RunRef, ...]


class TaskCut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a task knew at the barrier beside its state: its watermark and that of each input, and whether it had finished.

    Inputs are channels, or for a source the partitions that this task read.


    The task's own may be larger than the least of its channels': idle ones do not hold it back, and it never goes back.
    """

    task: str
    watermarks_us: dict[str, int]
    watermark_us: int = TIME_MIN_US
    finished: bool = False


class LoggedItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that was in flight on a channel."""

    kind: Literal["batch", "late", "watermark"]
    run: RunRef | None = None
    watermark_us: int = TIME_MIN_US
    idle: bool = False


class ChannelLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was in flight on one channel, in order."""

    channel: str
    items: tuple[LoggedItem, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checkpoint: everything needed to go on after `epoch`. Durable manifest = sealed epoch."""

    version: int = MANIFEST_VERSION
    pipeline: str
    node: str
    epoch: int
    attempt: int
    mode: str
    parallelism: int
    plan_digest: str
    step_digests: dict[str, str]
    """Stateful steps and what their state depends on: a step whose digest changed cannot use the old state."""
    created_us: int
    cut: Cut
    tasks: tuple[TaskCut, ...] = ()
    states: tuple[StateRuns, ...] = ()
    channels: tuple[ChannelLog, ...] = ()
    pending: tuple[Segment, ...] = ()
    """Output that this epoch did not release and the next one will: of an unaligned epoch that was replayed, the rows that had been
    in flight."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The output of this epoch."""
        return self.cut.segments

    def runs(self) -> tuple[RunRef, ...]:
        """Every run that this checkpoint names, in order, with repetition."""
        found = [run for state in self.states for run in state.runs]
        found += [item.run for log in self.channels for item in log.items if item.run is not None]
        found += [run for segment in (*self.segments, *self.pending) for run in segment.runs]
        return tuple(found)
