"""The record of an epoch (`Cut`), and the checkpoint that it is sealed with (`Manifest`): frozen values and their stored form.

The record says all that an epoch contains: what was read, what each sink got, and what crosses to the hub. A manifest is the record
and the state after it. `epochs.store` and `epochs.epoch_log` read and write the files.

Invariants: a manifest is an ordered list of runs with repetition (two equal runs are two contributions); epochs start
at 1 and have no gaps; times are microseconds of event time, UTC. Reading gives the value that was written or raises `DamagedError`,
or `CheckpointError` for a newer version; run digests that were read are file names and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from fordstone.epochs.run_file import is_digest
from fordstone.errors import CheckpointError, DamagedError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.state.base import RunRef
from fordstone.storage.journal import Record, seal, unseal_as

MANIFEST_VERSION: Final = 1
EPOCH_DIGITS: Final = 12
EPOCH_MAX: Final = 10**EPOCH_DIGITS - 1


class PartitionCut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where one partition of a source stood at a barrier."""

    position: int
    max_time_us: int = TIME_MIN_US
    first_us: int = TIME_MAX_US
    """The time of the first row; TIME_MAX_US: it had none yet. Shows which rolled file continues which."""
    floor_us: int = TIME_MIN_US
    """The source's watermark when this partition joined or came back from idleness: rows below it are late."""
    limit_us: int = TIME_MAX_US
    """Rows above it, from here on, are too far ahead of the clock: they are late (rule 7). It changes at barriers and at starts only."""
    idle: bool = False
    done: bool = False
    followed_by: str = ""
    """The first later partition of its series that had rows when this one had been read to its end; empty: none had."""
    followed_at: int = 0
    """The position that this one was read to then. If it is further now, it grew beside that one, as files of devices do."""
    identity: str = ""
    """What tells the input before the position from other input of that name, in the source's own form; empty: nothing does."""


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
    stream: str | None = None
    """The stream at the hub that the rows cross to; None: they stay on this node."""
    watermark_us: int = TIME_MIN_US
    """The watermark of that stream at the barrier."""


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of an epoch: enough to compute it again, and to send it. Kept in the epoch log, and once more in the manifest."""

    epoch: int
    sources: dict[str, SourceCut]
    segments: tuple[Segment, ...] = ()
    controls: dict[str, int] = {}
    """The version of each control table that was in effect when the epoch ended."""
    sealed_as: str | None = None
    """The digest of what crosses as it was sealed, if its rows were damaged since and computed again in other bytes: the hub may
    have either. None: it is as it was sealed."""
    chain_before: str | None = None
    """The chain of what crosses before this epoch (`protocol.chain`); None: it was sealed without a hub, or before the hub was reached."""
    overtaking: bool = False
    """Unaligned, with rows in flight: they count as read, and are emitted in a later epoch."""
    bounded: bool = False
    """What had been read to its end had ended for good."""
    ended: bool = False
    now_us: int = 0
    """The clock at the end of the epoch, by which timers fired."""

    @property
    def crosses(self) -> bool:
        """Whether it has anything for the hub."""
        return any(segment.stream is not None for segment in self.segments)


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
    ended_us: int = TIME_MIN_US


class ChannelLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was in flight on one channel, in order."""

    channel: str
    items: tuple[LoggedItem, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A checkpoint: everything needed to resume after `epoch`. Durable manifest = sealed epoch."""

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
        return self.cut.segments

    def runs(self) -> tuple[RunRef, ...]:
        """Every run that this checkpoint names, in order, with repetition."""
        found = [run for state in self.states for run in state.runs]
        found += [item.run for log in self.channels for item in log.items if item.run is not None]
        found += [run for segment in (*self.segments, *self.pending) for run in segment.runs]
        return tuple(found)


_MANIFEST: Final = msgspec.json.Decoder(Manifest)
_CUT: Final = msgspec.json.Decoder(Cut)


class _Version(msgspec.Struct):
    version: int


_VERSION: Final = msgspec.json.Decoder(_Version)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest file."""
    return seal("manifest", manifest)


def decode_manifest(data: bytes, *, pipeline: str, node: str, epoch: int) -> Manifest:
    """Read a manifest file back that was found where this epoch of this pipeline on this node belongs."""
    version = unseal_as("manifest", data, _VERSION).version
    if version > MANIFEST_VERSION:
        raise CheckpointError(
            f"the manifest has version {version}, this Fordstone reads up to {MANIFEST_VERSION}. "
            f"It was written by a newer one: use that, or a copy of the state from before the upgrade."
        )
    manifest = unseal_as("manifest", data, _MANIFEST)
    if manifest.version < 1:
        raise DamagedError(f"the version is {manifest.version}, versions start at 1")
    if not 1 <= manifest.epoch <= EPOCH_MAX or manifest.cut.epoch != manifest.epoch:
        raise DamagedError(f"the epoch is {manifest.epoch}, and its cut has {manifest.cut.epoch}")
    if (manifest.pipeline, manifest.node, manifest.epoch) != (pipeline, node, epoch):
        raise DamagedError(
            f"it is checkpoint {manifest.epoch} of pipeline {manifest.pipeline} on node {manifest.node} under a wrong name"
        )
    _check_runs(manifest.runs())
    return manifest


def encode_cut(cut: Cut) -> bytes:
    """The bytes of one line of the epoch log, without its newline."""
    return seal("cut", cut)


def cut_of(record: Record) -> Cut:
    """Decode a record. `DamagedError` if it is none, or an impossible one."""
    cut = record.decode(_CUT)
    if not 1 <= cut.epoch <= EPOCH_MAX:
        raise DamagedError(f"the epoch is {cut.epoch}")
    _check_runs(run for segment in cut.segments for run in segment.runs)
    return cut


def epoch_name(epoch: int, suffix: str = ".json") -> str:
    """The file name that belongs to an epoch; names sort as epochs do."""
    return f"{epoch:0{EPOCH_DIGITS}}{suffix}"


def parse_epoch_name(name: str, suffix: str = ".json") -> int | None:
    """The epoch that a file name belongs to, if it is one of ours."""
    stem = name.removesuffix(suffix)
    if len(name) != EPOCH_DIGITS + len(suffix) or len(stem) != EPOCH_DIGITS or not (stem.isascii() and stem.isdigit()):
        return None
    return int(stem)


def _check_runs(runs: Iterable[RunRef]) -> None:
    for run in runs:
        if not is_digest(run.digest) or run.size_bytes < 0 or run.rows < 0:
            raise DamagedError(
                f"it names an impossible run: {run.digest[:80]!r}, {run.size_bytes} bytes, {run.rows} rows"
            )
