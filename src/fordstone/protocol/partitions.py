"""Rules of a source's partitions: when one joins, becomes idle, returns or is done, and how far time has come.

Both engines apply them at the boundary between two epochs and nowhere else, so that an epoch can be computed again from its
recorded positions (rule 1): the edge at a barrier and at a start, Spark when it plans a micro-batch. The caller gathers the
facts (which partitions exist, which have rows, since when one has been silent) and applies what is decided.

`followed` decides which partitions continue one another in time, as rolled files do: one that was read to its end and is continued is
finished.

Invariants: a watermark never goes back; a partition that joins or returns never holds a watermark back that was announced
without it, because rows below its floor are late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import pairwise

from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US


class Change(Enum):
    """What becomes of a known partition at a boundary."""

    NONE = "none"
    IDLE = "idle"
    """The watermark no longer waits for it."""
    RETURN = "return"
    """It is read again, and the watermark waits for it: neither idle nor done, with the floor of `joined_floor_us`."""


class SourceState(StrEnum):
    """What the watermark of a source waits for."""

    OPEN = "open"
    """At least one partition is read: the watermark is the least of theirs."""
    IDLE = "idle"
    """Nothing is waited for at present: the watermark holds no other source back, and moves only as `reached_us` says."""
    ENDED = "ended"
    """Bounded input was read to its end: time goes to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """What is known about a partition at a boundary."""

    idle: bool = False
    done: bool = False
    starting: bool = False
    """This is the first boundary of a run: what was done when the last run stopped may have grown since."""
    bounded: bool = False
    """What exists now is all that there will be: nothing is waited for by the clock."""
    has_rows: bool = False
    """Rows can be read after its position, or it has not been looked for any."""
    silent_us: int = 0
    """Time by the clock since rows were last seen, or since it joined."""
    finished: bool = False
    """No more rows are due: the source says so (`Source.idleness`), or a later partition continues this one (`is_continued`)."""
    unknown: bool = False
    """The source cannot find out whether rows are due: silence means nothing. The caller counts `silent_us` from now on."""


def decide(facts: PartitionFacts, idle_after_us: int | None) -> Change:
    """Decide about a known partition. `idle_after_us`: that of the source step; None: silence alone makes no partition idle.

    - Idle partitions with rows return; if input is bounded, all idle ones do, because they are read to their end.
    - Done partitions are looked at once, at a start, and return if they have rows.
    - Partitions without rows become idle if they have been silent for `idle_after_us`, or if they are finished; never if input is
      bounded.
    """
    if facts.done:
        return Change.RETURN if facts.starting and facts.has_rows else Change.NONE
    if facts.idle:
        return Change.RETURN if facts.has_rows or facts.bounded else Change.NONE
    if facts.has_rows or facts.bounded:
        return Change.NONE
    silent = idle_after_us is not None and not facts.unknown and facts.silent_us >= idle_after_us
    return Change.IDLE if silent or facts.finished else Change.NONE


def joined_floor_us(floor_us: int, source_watermark_us: int) -> int:
    """Return the floor of a partition that joins (`floor_us` is TIME_MIN_US then) or returns: rows below it are late."""
    return max(floor_us, source_watermark_us)


def partition_watermark_us(max_time_us: int, floor_us: int, lateness_us: int) -> int:
    """Return how far time has come in one partition, whose largest time so far is `max_time_us` (TIME_MIN_US: none)."""
    if max_time_us == TIME_MIN_US:
        return floor_us
    return max(max_time_us - lateness_us, floor_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPlace:
    """A series that a partition may belong to, and its place there. A series is a guess from names: times show whether it is true."""

    series: str
    order: str
    """Later partitions have a larger one."""
    declared: bool = False
    """The user says that this is a series: its times do not have to show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesMember:
    """A partition in its series, and the times of its rows so far."""

    partition: str
    places: Sequence[SeriesPlace]
    first_us: int = TIME_MAX_US
    """The time of its first row; TIME_MAX_US: it had none yet."""
    max_time_us: int = TIME_MIN_US
    returned: bool = False
    """It had rows again after it had been idle."""


def is_continued(member: SeriesMember, next_us: int, lateness_us: int) -> bool:
    """Return whether later rows, the first of which has the time `next_us`, continue a partition instead of overlapping it.

    Rolled files continue one another. Files that are written at the same time, one per device, overlap. Rows out of order by the
    lateness are no overlap, unless the later rows begin in the first half of the partition, or it had rows again after it was idle.
    """
    if member.max_time_us == TIME_MIN_US:
        return True
    out_of_order_us = 0 if member.returned else min(lateness_us, (member.max_time_us - member.first_us) // 2)
    return next_us >= member.max_time_us - out_of_order_us


def followed(members: Iterable[SeriesMember], lateness_us: int) -> dict[str, int]:
    """Return the partitions that a later one of their series continues, with the time of the first row after them.

    If two partitions of a series overlap, they are written side by side, and none of the series is continued. In a declared
    series any later partition continues the earlier ones: TIME_MAX_US.
    """
    series: dict[tuple[str, bool], list[tuple[str, SeriesMember]]] = defaultdict(list)
    for member in members:
        for place in member.places:
            series[place.series, place.declared].append((place.order, member))
    found: dict[str, int] = {}
    for (_, declared), placed in series.items():
        if len(placed) == 1:
            continue
        ordered = [member for _, member in sorted(placed, key=lambda one: (one[0], one[1].partition))]
        if declared:
            found |= {member.partition: TIME_MAX_US for member, _ in pairwise(ordered)}
            continue
        next_us, continued = TIME_MAX_US, {}
        for member in reversed(ordered):
            if next_us < TIME_MAX_US:
                if not is_continued(member, next_us, lateness_us):
                    break
                continued[member.partition] = next_us
            next_us = min(next_us, member.first_us)
        else:
            found |= continued
    return found


def reached_us(before_us: int, *, waited: Iterable[int], ended: Iterable[int]) -> int:
    """Return how far time has come where several watermarks meet: partitions of a source, its tasks, or sources. It never goes back.

    `waited`: the watermarks of those that time waits for, with or without rows: the least counts. `ended`: of partitions that were
    read to their end and never grow. They hold nothing back, so if nothing is waited for, time is where the furthest of them ended.
    Those that are only idle are in neither: if there is nothing else, time stays.
    """
    least_us = min(waited, default=None)
    return max(before_us, max(ended, default=TIME_MIN_US) if least_us is None else least_us)


def source_state(partitions: Iterable[tuple[bool, bool]], *, bounded: bool) -> SourceState:
    """Return what a source waits for. Of each of its partitions: whether it is idle, and whether it is done.

    A source without partitions waits for nothing: if input is bounded it has ended, else it is idle.
    """
    flags = list(partitions)
    if bounded and all(done for _, done in flags):
        return SourceState.ENDED
    return SourceState.IDLE if all(idle or done for idle, done in flags) else SourceState.OPEN
