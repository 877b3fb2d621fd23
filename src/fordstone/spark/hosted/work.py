"""What one micro-batch does: which parts of the sources it reads, from which times, and how far time comes by it.

The planner decides a batch's work before it runs; it becomes the batch's offset in Spark's log, so that a batch that is
run again does exactly the same. The times that only reading reveals come back as facts, and make, with the cut before
and the work, the cut behind the batch: what the edge engine writes into a manifest. Pure.

Invariants: a micro-batch is an epoch, numbered without gaps; work and facts of an epoch always give the same cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.errors import DamagedError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.protocol import partitions as rules
from fordstone.protocol.partitions import SourceState


class PartitionRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of one partition, and the times that rows in it are judged by."""

    source: str
    partition: str
    position: int
    until: int
    max_time_us: int = TIME_MIN_US
    floor_us: int = TIME_MIN_US
    limit_us: int = TIME_MAX_US
    ended: bool = False
    """Nothing will ever follow `until`: the end of bounded input, or of a file that never grows."""

    def to_json(self) -> str:
        """As text."""
        return msgspec.json.encode(self).decode()


class SourceClock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of a source's time before the batch."""

    watermark_us: int
    """When the batch began."""
    state: SourceState
    """After the batch."""
    least_us: int | None = None
    """The least watermark of the partitions that are waited for but not read in this batch."""


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that decides a batch."""

    epoch: int
    reads: tuple[PartitionRead, ...] = ()
    clocks: dict[str, SourceClock] = {}
    changed: dict[str, dict[str, PartitionCut]] = {}
    """Partitions that joined, fell idle or came back, as they are when the batch begins; by source."""
    seeds: bool = False
    """The state of a checkpoint comes with this batch."""
    bounded: bool = False
    now_us: int = 0
    """The time by the clock, for all tasks alike."""
    before_us: int = 0
    """The same in the batch before."""

    def to_json(self) -> bytes:
        """As bytes."""
        return msgspec.json.encode(self)


class PartitionFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What reading a part revealed."""

    source: str
    partition: str
    max_time_us: int
    rows: int
    rejected: int = 0


class TaskFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one task tells the driver."""

    partitions: tuple[PartitionFact, ...] = ()
    rows_late: int = 0
    state_bytes: int = 0
    written_bytes: int = 0
    """State that this batch added."""
    work: Work | None = None
    """From one task of each batch, so that the driver knows which epoch this is."""

    def to_json(self) -> bytes:
        """As bytes."""
        return msgspec.json.encode(self)


class Clock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mark of time on its way to the shards: what one task knows of the sources. All marks of a batch count together."""

    clocks: dict[str, SourceClock] = {}
    """From one task of each batch."""
    least_us: dict[str, int] = {}
    """Behind the batch, for the partitions that this task read and that are still waited for."""
    now_us: int = 0
    before_us: int = 0
    """The times by the clock, from the task that was given the work."""

    def to_json(self) -> bytes:
        """As bytes."""
        return msgspec.json.encode(self)


def read_work(offset: Mapping[str, Any]) -> Work:
    """The work that an offset says; raises `DamagedError` if it is not one of ours."""
    try:
        return msgspec.json.decode(offset["work"], type=Work)
    except (KeyError, msgspec.DecodeError) as error:
        raise DamagedError(f"this is not an offset of a fordstone query: {error!r}.") from error


def offset_of(work: Work) -> dict[str, Any]:
    """The work as an offset: equal work is equal text, which is how Spark compares offsets."""
    return {"epoch": work.epoch, "work": work.to_json().decode()}


def first_offset(epoch: int) -> dict[str, Any]:
    """Where a query begins: behind this epoch, which it has not done itself."""
    return {"epoch": epoch}


def read_clock(marks: Iterable[bytes]) -> Clock:
    """All marks of a batch as one."""
    clocks: dict[str, SourceClock] = {}
    least: dict[str, int] = {}
    now_us = before_us = 0
    for data in marks:
        mark = msgspec.json.decode(data, type=Clock)
        clocks |= mark.clocks
        now_us, before_us = max(now_us, mark.now_us), max(before_us, mark.before_us)
        for source, us in mark.least_us.items():
            least[source] = min(least.get(source, us), us)
    return Clock(clocks=clocks, least_us=least, now_us=now_us, before_us=before_us)


def watermarks_us(clock: Clock) -> dict[str, int | None]:
    """How far each source's time has come behind the batch; None: it is idle, and holds nobody back."""
    found: dict[str, int | None] = {}
    for source, known in clock.clocks.items():
        if known.state is SourceState.ENDED:
            found[source] = TIME_MAX_US
        elif known.state is SourceState.IDLE:
            found[source] = None
        else:
            leasts = [us for us in (known.least_us, clock.least_us.get(source)) if us is not None]
            found[source] = max(known.watermark_us, min(leasts, default=TIME_MIN_US))
    return found


def time_of(sources: Iterable[str], watermarks: Mapping[str, int | None], before_us: int) -> int:
    """How far time has come where rows of these sources meet. It never goes back."""
    waited = [us for us in (watermarks.get(source) for source in sources) if us is not None]
    return max(before_us, min(waited, default=TIME_MIN_US))


def partition_watermark_us(cut: PartitionCut, lateness_us: int) -> int:
    """How far time has come in one partition."""
    return rules.partition_watermark_us(cut.max_time_us, cut.floor_us, lateness_us)


def waits_for(read: PartitionRead, *, bounded: bool) -> bool:
    """Whether a partition's time counts behind the batch that reads it.

    Bounded input that has ended holds nobody back. A file that never grows counts with the batch in which it ends, or time
    would stand still where each file is read by one batch.
    """
    return not (read.ended and bounded)


def cut_behind(before: Cut | None, work: Work, facts: Sequence[PartitionFact], lateness_us: Mapping[str, int]) -> Cut:
    """The cut behind a batch. Raises `DamagedError` if the facts are not those of the work."""
    known = {(fact.source, fact.partition): fact for fact in facts}
    if before is not None and before.epoch != work.epoch - 1:
        raise DamagedError(
            f"epoch {work.epoch} follows {work.epoch - 1}, but the cut before it is that of {before.epoch}."
        )
    least: dict[str, int] = {}
    sources: dict[str, dict[str, PartitionCut]] = {
        source: dict(before.sources[source].partitions) if before is not None and source in before.sources else {}
        for source in work.clocks
    }
    for source, changed in work.changed.items():
        sources[source] |= changed
    for read in work.reads:
        fact = known.pop((read.source, read.partition), None)
        if fact is None:
            raise DamagedError(f"epoch {work.epoch}: nothing was heard of {read.source} {read.partition}.")
        cut = PartitionCut(
            position=read.until, max_time_us=fact.max_time_us, floor_us=read.floor_us, idle=False, done=read.ended
        )
        sources[read.source][read.partition] = cut
        if waits_for(read, bounded=work.bounded):
            us = partition_watermark_us(cut, lateness_us[read.source])
            least[read.source] = min(least.get(read.source, us), us)
    if known:
        raise DamagedError(f"epoch {work.epoch}: {next(iter(known))} was read, which the work does not say.")
    times = watermarks_us(Clock(clocks=work.clocks, least_us=least))
    cuts = {}
    for source, partitions in sources.items():
        reached_us = times[source]
        cuts[source] = SourceCut(
            partitions=dict(sorted(partitions.items())),
            watermark_us=work.clocks[source].watermark_us if reached_us is None else reached_us,
        )
    ended = work.bounded and all(clock.state is SourceState.ENDED for clock in work.clocks.values())
    return Cut(epoch=work.epoch, sources=cuts, bounded=work.bounded, ended=ended, now_us=work.now_us)
