"""Rules of a source's partitions: when one joins, becomes idle, returns or is done, and how far time has come.

Both engines apply them at the boundary between two epochs and nowhere else, so that an epoch can be computed again from its
recorded positions (rule 1): the edge at a barrier and at a start, Spark when it plans a micro-batch. The caller gathers the
facts (which partitions exist, which have rows, since when one has been silent) and applies what is decided.

`followers` decides which partitions continue one another in time, as rolled files do: one that was read to its end and is continued is
finished.

Invariants: a watermark never goes back; a partition that joins or returns never holds a watermark back that was announced
without it, because rows below its floor are late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import pairwise
from typing import Final

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
    """No more rows are due: the source says so (`Source.idleness`), or a later partition continues this one (`followers`)."""
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
    certain: bool = False
    """If other partitions are in this series, their names leave no doubt that it is one, unless they overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesMember:
    """A partition in its series, and the times of its rows so far."""

    partition: str
    places: Sequence[SeriesPlace]
    first_us: int = TIME_MAX_US
    """The time of its first row; TIME_MAX_US: it had none yet."""
    max_time_us: int = TIME_MIN_US
    at_end: bool = False
    """It was read to its end: no row of it can show that it overlaps others, unless it grows."""
    grew_beside: str = ""
    """A later partition that had rows already when this one grew; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """The later partition of a series that seems to continue an earlier one."""

    partition: str
    first_us: int
    """The time of its first row. TIME_MAX_US: the series is declared, and times do not matter."""
    certain: bool
    """Whether the series is certain. If not, the earlier partition must also be quiet (`Source.is_quiet`) to be finished."""


CLOSE_MIN: Final = 2
"""Number of partitions, each followed closely by a later one, that make a series certain: with the last one there are three."""


def is_continued(member: SeriesMember, next_us: int, lateness_us: int) -> bool:
    """Return whether later rows, the first of which has the time `next_us`, continue a partition instead of overlapping it.

    Rolled files continue one another. Files that are written at the same time, one per device, overlap. Rows out of order by the
    lateness are no overlap, unless the later rows begin in the first half of the partition, or it grew beside another one.
    """
    if member.max_time_us == TIME_MIN_US:
        return True
    out_of_order_us = 0 if member.grew_beside else min(lateness_us, (member.max_time_us - member.first_us) // 2)
    return next_us >= member.max_time_us - out_of_order_us


def followers(members: Iterable[SeriesMember], lateness_us: int) -> dict[str, Follower]:
    """Return the partitions that a later one of their series continues, with that one.

    - If two partitions of a series overlap, they are written side by side, and none of the series is continued.
    - If at least `CLOSE_MIN` are followed closely, with a pause that is not longer than the time that they cover, the series is certain.
      So it is if the names say it, as those of a log and its rotated files do.
    - Otherwise, one that grew although a later one had rows is not continued.

    In a declared series any later partition continues the earlier ones.
    """
    series: dict[tuple[str, bool], list[tuple[str, SeriesMember]]] = defaultdict(list)
    certain: set[str] = set()
    for member in members:
        for place in member.places:
            series[place.series, place.declared].append((place.order, member))
            if place.certain:
                certain.add(place.series)
    found: dict[str, Follower] = {}
    for (name, declared), placed in series.items():
        if len(placed) == 1:
            continue
        ordered = [member for _, member in sorted(placed, key=lambda one: (one[0], one[1].partition))]
        here = _declared(ordered) if declared else _shown(ordered, lateness_us, certain=name in certain)
        found |= {member: one for member, one in here.items() if one.certain or member not in found}
    return found


def _declared(ordered: Sequence[SeriesMember]) -> dict[str, Follower]:
    return {
        member.partition: Follower(partition=later.partition, first_us=TIME_MAX_US, certain=True)
        for member, later in pairwise(ordered)
    }


def _shown(ordered: Sequence[SeriesMember], lateness_us: int, *, certain: bool) -> dict[str, Follower]:
    """The partitions of one series that are continued, as their times show it. `certain`: their names show it, too."""
    names = {member.partition for member in ordered}
    continued: list[tuple[SeriesMember, SeriesMember]] = []
    later: SeriesMember | None = None
    """Of those that come later, the one that begins first."""
    for member in reversed(ordered):
        if later is not None:
            if not is_continued(member, later.first_us, lateness_us):
                return {}
            continued.append((member, later))
        if member.first_us < (TIME_MAX_US if later is None else later.first_us):
            later = member
    certain = certain or sum(_is_close(member, later, names) for member, later in continued) >= CLOSE_MIN
    return {
        member.partition: Follower(partition=later.partition, first_us=later.first_us, certain=certain)
        for member, later in continued
        if certain or member.grew_beside not in names
    }


def _is_close(member: SeriesMember, later: SeriesMember, names: Container[str]) -> bool:
    """Whether a partition is followed closely, and nothing says that it goes on beside the later one."""
    if not member.at_end or member.grew_beside in names or member.max_time_us == TIME_MIN_US:
        return False
    return later.first_us - member.max_time_us <= member.max_time_us - member.first_us


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
