"""Decide what the next micro-batch reads, and compute the cut after it.

The planner runs beside the driver, in the process that Spark starts for the source. Partitions that lag furthest in time are read
first (rule 21), each up to its share of the batch; they join, become idle and return between batches by the rules of
`protocol.partitions`. The decision is the batch's offset in Spark's log, so a batch that runs again does the same; one that is not sealed is
shortened if part of its input has turned out to be unreadable (`Planner.still_planned`). Facts
that only reading reveals come back from tasks; with the cut before and the work they make the cut after the batch.

Invariants: a micro-batch is an epoch, numbered without gaps; work and facts of an epoch always give the same cut; the planner
holds nothing that may not be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from fordstone.connectors.base import ALL_ROWS, ClockUs, Idleness, ReadPlan, Source, close_sources
from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.errors import DamagedError, SourceError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.plan import plan as p
from fordstone.plan.ids import PartitionId, Position
from fordstone.protocol import partitions as rules
from fordstone.protocol.clock import pipeline_clock_us
from fordstone.protocol.partitions import (
    Change,
    Follower,
    PartitionFacts,
    SourceState,
    decide,
    is_continued,
    joined_floor_us,
    reached_us,
    source_state,
)
from fordstone.runtime.partition import ended_us, find_followers, has_event_time, limit_us, series_member


class PartitionRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of one partition, and the times that rows in it are judged by."""

    source: str
    partition: str
    position: int
    until: int
    max_time_us: int = TIME_MIN_US
    first_us: int = TIME_MAX_US
    floor_us: int = TIME_MIN_US
    limit_us: int = TIME_MAX_US
    ended: bool = False
    """Nothing will ever follow `until`: the end of bounded input, or of a file that never grows."""
    identity: str = ""
    """What tells the input before `until` from other input of the same name (`Source.identity`)."""


class SourceClock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of a source's time before the batch."""

    watermark_us: int
    """When the batch began."""
    state: SourceState
    """After the batch."""
    least_us: int | None = None
    """The least watermark of the partitions that are waited for but not read in this batch."""
    ended_us: int = TIME_MIN_US
    """The largest watermark of the partitions that ended before this batch."""


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
    tables: dict[str, str] = {}
    """By step, the file with the refreshed table that its rows are looked up in (`tables.BatchTables`)."""


class PartitionFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What reading a part revealed."""

    source: str
    partition: str
    max_time_us: int
    first_us: int = TIME_MAX_US
    rows: int
    rejected: int = 0


class TaskFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one task reports to the driver."""

    partitions: tuple[PartitionFact, ...] = ()
    rows_late: int = 0
    late_by_us: int = 0
    rows_failed: int = 0
    state_bytes: int = 0
    written_bytes: int = 0
    """State that this batch added."""
    work: Work | None = None
    """From one task of each batch, so that the driver knows which epoch this is."""


class SourceTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mark of time on its way to the shards: what one task knows of the sources. All marks of a batch count together."""

    clocks: dict[str, SourceClock] = {}
    """From one task of each batch."""
    least_us: dict[str, int] = {}
    """After the batch, for the partitions that this task read and that are still waited for."""
    ended_us: dict[str, int] = {}
    """The largest watermark of those that it read to their end."""
    by_partition: dict[str, dict[str, int]] = {}
    """Of sources that a connector of Spark's reads, whose tasks learn from rows alone what they read: the watermark of each partition that the batch
    reads, from one task that before the batch, and from those that had rows that after it. The largest counts."""
    now_us: int = 0
    before_us: int = 0
    """The times by the clock, from the task that was given the work."""
    tables: dict[str, str] = {}
    """Those of the work, from the same task."""


class SourceTime(NamedTuple):
    """How far time has come in a source after a batch."""

    us: int
    idle: bool = False
    """Nothing of it is waited for: it holds no other source back."""
    ended_us: int = TIME_MIN_US
    """The largest watermark of the partitions that ended."""


def read_work(offset: Mapping[str, Any]) -> Work:
    """The work that an offset says; raises `DamagedError` if it is not one of ours."""
    try:
        return msgspec.json.decode(offset["work"], type=Work)
    except (KeyError, msgspec.DecodeError) as error:
        raise DamagedError(f"this is not an offset of a fordstone query: {error!r}.") from error


def offset_of(work: Work) -> dict[str, Any]:
    """The work as an offset: equal work is equal text, which is how Spark compares offsets."""
    return {"epoch": work.epoch, "work": msgspec.json.encode(work).decode()}


def shortens(work: Work, planned: Work) -> bool:
    """Whether work is what `Planner.still_planned` may have made of planned work: the same, with reads that end earlier or are left out."""
    if replace(work, reads=planned.reads, changed=planned.changed) != planned:
        return False
    ends = {(read.source, read.partition, read.position): read.until for read in planned.reads}
    return all(read.until <= ends.get((read.source, read.partition, read.position), -1) for read in work.reads)


def first_offset(epoch: int) -> dict[str, Any]:
    """Return the offset of a query that begins after this epoch."""
    return {"epoch": epoch}


def read_clock(marks: Iterable[bytes]) -> SourceTimes:
    """All marks of a batch as one."""
    clocks: dict[str, SourceClock] = {}
    least: dict[str, int] = {}
    ended: dict[str, int] = {}
    tables: dict[str, str] = {}
    partitions: dict[str, dict[str, int]] = {}
    now_us = before_us = 0
    for data in marks:
        mark = msgspec.json.decode(data, type=SourceTimes)
        clocks |= mark.clocks
        tables |= mark.tables
        now_us, before_us = max(now_us, mark.now_us), max(before_us, mark.before_us)
        for source, us in mark.least_us.items():
            least[source] = min(least.get(source, us), us)
        for source, us in mark.ended_us.items():
            ended[source] = max(ended.get(source, us), us)
        for source, found in mark.by_partition.items():
            known = partitions.setdefault(source, {})
            known |= {name: max(known.get(name, us), us) for name, us in found.items()}
    return SourceTimes(
        clocks=clocks,
        least_us=least,
        ended_us=ended,
        by_partition=partitions,
        now_us=now_us,
        before_us=before_us,
        tables=tables,
    )


def source_times(clock: SourceTimes) -> dict[str, SourceTime]:
    """Return how far time has come in each source after the batch."""
    found: dict[str, SourceTime] = {}
    for source, known in clock.clocks.items():
        if known.state is SourceState.ENDED:
            found[source] = SourceTime(TIME_MAX_US)
            continue
        idle = known.state is SourceState.IDLE
        read = clock.by_partition.get(source, {}).values()
        leasts = () if idle else (known.least_us, clock.least_us.get(source), min(read, default=None))
        furthest_us = max(known.ended_us, clock.ended_us.get(source, TIME_MIN_US))
        us = reached_us(known.watermark_us, waited=[us for us in leasts if us is not None], ended=[furthest_us])
        found[source] = SourceTime(us, idle=idle, ended_us=furthest_us)
    return found


def time_of(sources: Iterable[str], times: Mapping[str, SourceTime], before_us: int) -> int:
    """How far time has come where rows of these sources meet. It never goes back."""
    found = [times[source] for source in sources if source in times]
    return reached_us(
        before_us, waited=[one.us for one in found if not one.idle], ended=[one.ended_us for one in found]
    )


def partition_watermark_us(cut: PartitionCut, lateness_us: int) -> int:
    """How far time has come in one partition."""
    return rules.partition_watermark_us(cut.max_time_us, cut.floor_us, lateness_us)


class ReadTimes:
    """How far time has come in the partitions that were read, by source: in those still waited for, and in those that ended."""

    def __init__(self) -> None:
        self.least_us: dict[str, int] = {}
        self.ended_us: dict[str, int] = {}

    def add(self, read: PartitionRead, cut: PartitionCut, lateness_us: int, *, bounded: bool) -> None:
        """Add a partition as it is after the batch. At the end of bounded input time ends, wherever its partitions ended."""
        us = partition_watermark_us(cut, lateness_us)
        if not read.ended:
            self.least_us[read.source] = min(self.least_us.get(read.source, us), us)
        elif not bounded:
            self.ended_us[read.source] = max(self.ended_us.get(read.source, us), us)


def cut_after(before: Cut | None, work: Work, facts: Sequence[PartitionFact], lateness_us: Mapping[str, int]) -> Cut:
    """Return the cut after a batch. Raises `DamagedError` if the facts are not those of the work."""
    known = {(fact.source, fact.partition): fact for fact in facts}
    if before is not None and before.epoch != work.epoch - 1:
        raise DamagedError(
            f"epoch {work.epoch} follows {work.epoch - 1}, but the cut before it is that of {before.epoch}."
        )
    read_times = ReadTimes()
    sources: dict[str, dict[str, PartitionCut]] = {
        source: dict(before.sources[source].partitions) if before is not None and source in before.sources else {}
        for source in work.clocks
    }
    for source, changed in work.changed.items():
        sources[source] |= changed
    for read in work.reads:
        fact = known.pop((read.source, read.partition), None)
        if fact is None:
            raise DamagedError(
                f"epoch {work.epoch}: no task reported the position of {read.source} {read.partition}. The checkpoint location is "
                "damaged or mixed with that of another query; restore it from a copy."
            )
        known_cut = sources[read.source].get(read.partition, PartitionCut(position=0))
        cut = PartitionCut(
            position=read.until,
            max_time_us=fact.max_time_us,
            first_us=fact.first_us,
            floor_us=read.floor_us,
            done=read.ended,
            followed_by=known_cut.followed_by,
            followed_at=known_cut.followed_at,
            identity=read.identity,
        )
        sources[read.source][read.partition] = cut
        read_times.add(read, cut, lateness_us[read.source], bounded=work.bounded)
    if known:
        source, partition = next(iter(known))
        raise DamagedError(
            f"epoch {work.epoch}: a task read {source} {partition}, which was not planned. The checkpoint location is damaged or "
            "mixed with that of another query; restore it from a copy."
        )
    times = source_times(SourceTimes(clocks=work.clocks, least_us=read_times.least_us, ended_us=read_times.ended_us))
    cuts = {
        source: SourceCut(partitions=dict(sorted(partitions.items())), watermark_us=times[source].us)
        for source, partitions in sources.items()
    }
    ended = work.bounded and all(clock.state is SourceState.ENDED for clock in work.clocks.values())
    return Cut(epoch=work.epoch, sources=cuts, bounded=work.bounded, ended=ended, now_us=work.now_us)


PARTITIONS_MAX: Final = 4096
"""Maximum number of partitions in one batch; the others wait for the next."""


class Planner:
    """Plans batches of one query. Used by one thread."""

    def __init__(
        self,
        steps: tuple[p.Source, ...],
        sources: Mapping[str, Source],
        *,
        rows_max: int,
        bounded: bool,
        clock_us: ClockUs,
        wall_us: ClockUs = lambda: 0,
        tick_us: int | None = None,
    ) -> None:
        """`bounded`: what is there now is all there will ever be.

        `wall_us`: microseconds since 1970. `tick_us`: something waits for the clock, so that a batch is due at this interval
        although there is nothing to read.
        """
        self._steps = steps
        self._sources = sources
        self._rows_max = rows_max
        self._bounded = bounded
        self._clock_us = clock_us
        self._wall_us = wall_us
        self._tick_us = tick_us
        self._seen_us: dict[tuple[str, str], int] = {}
        self._known_ends: dict[tuple[str, str], int] = {}
        """How far partitions were known to go when they were last looked at."""
        self._found: dict[str, tuple[PartitionId, ...]] = {}
        self._target: dict[tuple[str, str], int] | None = None
        self._before_us = 0
        """The pipeline's clock in the batch before, and the monotonic clock when it was planned."""
        self._before_at_us = clock_us()

    def stop_at_what_is_there(self, before: Cut | None = None) -> None:
        """Plan no further than what can be read at this moment, after the cut `before`."""
        self._target = {}
        for step in self._steps:
            source = self._sources[step.name]
            if before is not None and step.name in before.sources:
                source.restore(before.sources[step.name].partitions)
            for partition in source.partitions():
                planned = source.plan_read(partition, Position(0), ALL_ROWS)
                self._target[step.name, partition] = int(planned.position)

    @property
    def acks(self) -> bool:
        return any(type(source).ack is not Source.ack for source in self._sources.values())

    def ack(self, cut: Cut) -> None:
        """Acknowledge everything before this cut: it will not be planned again."""
        for step in self._steps:
            if step.name in cut.sources:
                self._sources[step.name].ack(cut.sources[step.name].partitions)

    def close(self) -> None:
        close_sources(self._sources.values())

    def next_work(self, before: Cut | None, epoch: int, *, seeds: bool = False, begun: bool = False) -> Work | None:
        """Return the work of the next batch after the cut `before`; None: there is nothing to do now.

        `begun`: Spark has begun the batch, so it is one although there may be nothing to do.
        """
        reads: list[PartitionRead] = []
        clocks: dict[str, SourceClock] = {}
        changed: dict[str, dict[str, PartitionCut]] = {}
        news = seeds
        before_us = before.now_us if before is not None else 0
        wall_us, at_us = self._wall_us(), self._clock_us()
        if before_us != self._before_us:
            # Planned by another process: what has passed is counted from here on.
            self._before_us, self._before_at_us = before_us, at_us
        now_us = pipeline_clock_us(wall_us, before_us=before_us, elapsed_us=at_us - self._before_at_us)
        for step in self._steps:
            cut = before.sources.get(step.name) if before is not None else None
            known = cut if cut is not None else SourceCut(partitions={})
            self._sources[step.name].restore(known.partitions)
            there = self._partitions(step)
            if step.declares_time:
                # A source that was acknowledged all rows of a partition need not list it any more. It may come back.
                there += tuple(PartitionId(name) for name in sorted(known.partitions.keys() - set(there)))
            followers = {} if self._bounded else self._followers(step, known, there)
            here = self._changed(step, known, there, followers)
            partitions = {**known.partitions, **here}
            most_us = limit_us(
                step, wall_us=wall_us, clock_us=now_us, watermark_us=known.watermark_us, bounded=self._bounded
            )
            wanted = self._reads(step, partitions, there, followers, most_us)
            state = self._state(partitions, wanted)
            ends = state is SourceState.ENDED and known.watermark_us < TIME_MAX_US
            news = news or bool(here) or bool(wanted) or ends
            reads += wanted
            read = {one.partition for one in wanted}
            waiting = [
                partition_watermark_us(one, step.lateness_us)
                for name, one in partitions.items()
                if name not in read and not one.idle and not one.done
            ]
            least_us = min(waiting, default=None) if has_event_time(step) else TIME_MIN_US
            clocks[step.name] = SourceClock(
                watermark_us=known.watermark_us,
                state=state,
                least_us=least_us,
                ended_us=ended_us(step, partitions.values(), bounded=self._bounded),
            )
            if here:
                changed[step.name] = here
        ticks = self._tick_us is not None and self._target is None and now_us - before_us >= self._tick_us
        if not (news or ticks or begun):
            return None
        self._before_us, self._before_at_us = now_us, at_us
        return Work(
            epoch=epoch,
            reads=tuple(reads),
            clocks=clocks,
            changed=changed,
            seeds=seeds,
            bounded=self._bounded,
            now_us=now_us,
            before_us=before_us,
        )

    def due_us(self, before: Cut) -> int | None:
        """Return when, by the monotonic clock, a batch is due after this cut although no rows come; None: not before rows come."""
        due = [] if self._tick_us is None else [self._before_at_us + self._tick_us]
        for step in self._steps:
            if step.idle_after_us is not None and has_event_time(step):
                due += [
                    self._seen_us.get((step.name, name), self._clock_us()) + step.idle_after_us
                    for name, cut in before.sources[step.name].partitions.items()
                    if not cut.idle and not cut.done
                ]
        return min(due, default=None)

    def still_planned(self, work: Work, before: Callable[[], Cut | None]) -> Work:
        """Return the work of a batch that is not sealed, without what has turned out to be unreadable (`Source.still_planned`).

        A partition of which nothing is left becomes idle: time goes on without it, and its rows are judged when it returns.
        """
        reads: list[PartitionRead] = []
        changed = {source: dict(cuts) for source, cuts in work.changed.items()}
        for read in work.reads:
            source, name = self._sources[read.source], PartitionId(read.partition)
            end = source.still_planned(name, Position(read.position), Position(read.until))
            if end >= read.until:
                reads.append(read)
            elif end > read.position:
                reads.append(replace(read, until=int(end), ended=False, identity=source.identity(name, end)))
            else:
                mine = changed.setdefault(read.source, {})
                cut = mine.get(read.partition)
                if cut is None:
                    known = before()
                    if known is None:
                        raise AssertionError("a partition that did not join with this batch is in the cut before it")
                    cut = known.sources[read.source].partitions[read.partition]
                mine[read.partition] = replace(cut, limit_us=TIME_MAX_US, idle=True)
        return work if tuple(reads) == work.reads else replace(work, reads=tuple(reads), changed=changed)

    def _changed(
        self, step: p.Source, known: SourceCut, there: tuple[PartitionId, ...], followers: Mapping[str, Follower]
    ) -> dict[str, PartitionCut]:
        """Partitions that join, fall idle, come back or are followed for the first time, as they are now."""
        now_us = self._clock_us()
        changed: dict[str, PartitionCut] = {}
        gone = known.partitions.keys() - set(there)
        for name in (*there, *sorted(gone)):
            at = (step.name, name)
            cut = known.partitions.get(name)
            if cut is None:
                if self._target is not None and at not in self._target:
                    continue  # it came too late for this run
                changed[name] = PartitionCut(position=0, floor_us=joined_floor_us(TIME_MIN_US, known.watermark_us))
                self._seen_us[at] = now_us
                continue
            starting = at not in self._seen_us
            self._seen_us.setdefault(at, now_us)
            if cut.done and (name in gone or not starting):
                continue
            if name in gone and not self._bounded:
                self._check_left(step, name, cut)
                # All of it was read and nothing can follow.
                changed[name] = replace(cut, idle=False, done=True)
                continue
            end = None if name in gone else self._end(step, name, cut, followers)
            has_rows = name not in gone and (
                self._has_rows(step, name, cut) or (end is not None and end > cut.position)
            )
            followed = end == cut.position and not (has_rows or cut.idle or cut.done)
            if followed and not cut.followed_by:
                cut = replace(cut, followed_by=followers[name].partition, followed_at=cut.position)
                changed[name] = cut
            idleness = self._sources[step.name].idleness(PartitionId(name), Position(cut.position))
            if has_rows or idleness is Idleness.UNKNOWN:
                self._seen_us[at] = now_us
            facts = PartitionFacts(
                idle=cut.idle,
                done=cut.done,
                starting=starting,
                bounded=self._bounded,
                has_rows=has_rows,
                silent_us=now_us - self._seen_us[at],
                finished=idleness is Idleness.FINISHED or (followed and self._is_finished(step, name, followers[name])),
                unknown=idleness is Idleness.UNKNOWN,
            )
            match decide(facts, step.idle_after_us):
                case Change.RETURN:
                    floor_us = joined_floor_us(cut.floor_us, known.watermark_us)
                    changed[name] = replace(cut, floor_us=floor_us, limit_us=TIME_MAX_US, idle=False, done=False)
                case Change.IDLE:
                    changed[name] = replace(cut, limit_us=TIME_MAX_US, idle=True)
                case Change.NONE:
                    pass
        return changed

    def _has_rows(self, step: p.Source, name: str, cut: PartitionCut) -> bool:
        """Whether there is something to read, although this run may not read it any more."""
        planned = self._sources[step.name].plan_read(PartitionId(name), Position(cut.position), 1)
        self._known_ends[step.name, name] = int(planned.position)
        return planned.position > cut.position

    def _followers(self, step: p.Source, known: SourceCut, there: tuple[PartitionId, ...]) -> dict[str, Follower]:
        """The partitions that a later one of their series continues."""
        found = set(there)

        def at_end(name: str) -> bool:
            cut = known.partitions[name]
            return cut.idle or cut.done or name not in found or not self._has_rows(step, name, cut)

        return find_followers(step, self._sources[step.name], known.partitions, at_end)

    def _end(self, step: p.Source, name: str, cut: PartitionCut, followers: Mapping[str, Follower]) -> Position | None:
        """Where a partition ends, if another one continues it and nothing but an unfinished last row is left (`Source.plan_rest`)."""
        follower = followers.get(name)
        if follower is None or not is_continued(series_member(name, cut), follower.first_us, step.lateness_us):
            return None
        end = self._sources[step.name].plan_rest(PartitionId(name), Position(cut.position))
        return end if end == cut.position or self._is_finished(step, name, follower) else None

    def _is_finished(self, step: p.Source, name: str, follower: Follower) -> bool:
        """Whether a partition that was read to its end, and has a follower, is finished."""
        return follower.certain or self._sources[step.name].is_quiet(PartitionId(name))

    def _check_left(self, step: p.Source, name: str, cut: PartitionCut) -> None:
        """Refuse to continue without a partition that has rows that were never read."""
        known_end = self._known_ends.get((step.name, name))
        # One that another process knew, and never read, may have had rows.
        if cut.position == 0 if known_end is None else known_end > cut.position:
            raise SourceError(
                f"source {step.name}: {name} is gone, and was read only up to {cut.position}. Bring it back, and move files away "
                "only when they have been read."
            )

    def _partitions(self, step: p.Source) -> tuple[PartitionId, ...]:
        if self._bounded and step.name in self._found:
            return self._found[step.name]
        self._found[step.name] = tuple(self._sources[step.name].partitions())
        return self._found[step.name]

    def _reads(
        self,
        step: p.Source,
        partitions: Mapping[str, PartitionCut],
        there: tuple[PartitionId, ...],
        followers: Mapping[str, Follower],
        most_us: int,
    ) -> list[PartitionRead]:
        """What to read of a source; rows of it above `most_us` are late."""
        found = set(there)
        candidates = sorted(
            (partition_watermark_us(cut, step.lateness_us), name)
            for name, cut in partitions.items()
            if not cut.idle and not cut.done
        )
        ready = []
        rests: dict[str, ReadPlan] = {}
        """Unfinished last rows of partitions that others continue."""
        for _, name in candidates:
            if name not in found:
                if self._bounded:
                    raise SourceError(
                        f"source {step.name}: {name} is gone, and had been read up to {partitions[name].position}. Without it this "
                        "input has no end. Bring it back."
                    )
                continue
            planned = self._plan_read(step, name, partitions[name], 1)
            at = partitions[name].position
            if planned.position <= at and (end := self._end(step, name, partitions[name], followers)) is not None:
                rests[name] = planned = ReadPlan(position=end, ended=planned.ended)
            if planned.position > at or planned.ended:
                ready.append(name)
                if len(ready) == PARTITIONS_MAX:
                    break
        share = max(1, self._rows_max // max(1, len(ready)))
        reads = []
        for name in ready:
            cut = partitions[name]
            planned = rests.get(name) or self._plan_read(step, name, cut, share)
            if not step.declares_time:  # of which no partition is ever taken for gone
                more = (
                    self._sources[step.name].plan_read(PartitionId(name), planned.position, 1)
                    if not planned.ended
                    else planned
                )
                self._known_ends[step.name, name] = int(more.position)
            reads.append(
                PartitionRead(
                    source=step.name,
                    partition=name,
                    position=cut.position,
                    until=int(planned.position),
                    max_time_us=cut.max_time_us,
                    first_us=cut.first_us,
                    floor_us=cut.floor_us,
                    limit_us=most_us,
                    ended=planned.ended,
                    identity=self._sources[step.name].identity(PartitionId(name), planned.position),
                )
            )
        return reads

    def _plan_read(self, step: p.Source, name: str, cut: PartitionCut, rows_max: int) -> ReadPlan:
        planned = self._sources[step.name].plan_read(PartitionId(name), Position(cut.position), rows_max)
        if self._target is None:
            return planned
        most = max(self._target.get((step.name, name), 0), cut.position)
        return planned if planned.position <= most else ReadPlan(position=Position(most), ended=False)

    def _state(self, partitions: Mapping[str, PartitionCut], reads: list[PartitionRead]) -> SourceState:
        """Return what the source waits for after the batch."""
        ending = {read.partition for read in reads if read.ended}
        return source_state(
            ((cut.idle, cut.done or name in ending) for name, cut in partitions.items()), bounded=self._bounded
        )
