"""One partition of a source as a task reads it: position, time, and which rows are late.

The watermark of a row (rule 6) is the largest time before it in its partition, less the lateness, or the floor that the partition
joined at, if that is more. How rows were cut into chunks makes no difference. Rows below their watermark go apart and carry it
(`ROW_WATERMARK`): whether they are late is for each step to say, by which of its windows are closed. Rows above the partition's
limit are too far ahead of the clock to be believed (rule 7): they carry the last watermark of all, so that they are late everywhere,
and for the rows after them they were never there. Where the far end declares its time, its rows carry their watermark already.

`Partition.judged` is the one judge, for the edge engine and for Spark's tasks.
Input that is not a row becomes a dead letter, with its place and the reason, or stops the source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import polars as pl
from polars import selectors

from fordstone.connectors.base import Chunk, Idleness, Reader, Rejected, Source
from fordstone.epochs.manifest import Cut, PartitionCut
from fordstone.errors import FunctionError, SourceError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.lang.polars.times import microseconds
from fordstone.operators.base import ROW_ID, ROW_WATERMARK
from fordstone.operators.dead_letter import LETTER_SCHEMA, SHOWN_CHARS_MAX, TEXT_CHARS_MAX
from fordstone.plan import plan as p
from fordstone.plan.ids import Attempt, PartitionId, Position
from fordstone.protocol.clock import ahead_limit_us
from fordstone.protocol.partitions import (
    Change,
    Follower,
    PartitionFacts,
    SeriesMember,
    SeriesPlace,
    decide,
    followers,
    is_continued,
    joined_floor_us,
    partition_watermark_us,
)
from fordstone.protocol.progress import WaitedFor

Stage = Mapping[str, PartitionCut]

TIME_BOUND_US: Final = 2**62
"""Times beyond this, 146,000 years from 1970, are taken for errors: adding to them would overflow 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The rows of a chunk."""

    in_time: pl.DataFrame
    late: pl.DataFrame | None = None
    """Those below their watermark, with `ROW_WATERMARK`."""
    untimed: pl.DataFrame | None = None
    """Those whose time is null or absurd."""
    ahead: int = 0
    """How many of those that are late are too far ahead of the clock."""
    between_us: tuple[int, int] | None = None
    """The least and the largest time of the rows that have one. None: no row has, or the far end declares its time."""


def find_followers(
    step: p.Source, source: Source, cuts: Mapping[str, PartitionCut], at_end: Callable[[str], bool]
) -> dict[str, Follower]:
    """Return the partitions of a source that a later one of their series continues, with that one.

    `cuts`: all partitions of the source, of all its tasks. `at_end`: whether one was read to its end. Without event time of its own a
    source has no use for it.
    """
    if not has_event_time(step) or step.declares_time:
        return {}
    placed = {name: places for name in cuts if (places := source.series(PartitionId(name)))}
    members = (series_member(name, cuts[name], places, at_end=at_end(name)) for name, places in placed.items())
    return followers(members, step.lateness_us)


def series_member(
    name: str, cut: PartitionCut, places: Sequence[SeriesPlace] = (), *, at_end: bool = False
) -> SeriesMember:
    """A partition as the rules of series see it."""
    return SeriesMember(
        partition=name,
        places=places,
        first_us=cut.first_us,
        max_time_us=cut.max_time_us,
        at_end=at_end,
        grew_beside=cut.followed_by if cut.position > cut.followed_at else "",
    )


def has_event_time(step: p.Source) -> bool:
    """Whether event time goes on with this source: its rows carry it or are given it, or its far end declares it."""
    return step.time is not None or step.timed_by is not None or step.declares_time


def ended_us(step: p.Source, partitions: Iterable[Partition | PartitionCut], *, bounded: bool) -> int:
    """Return the largest watermark of the partitions that are done, for `reached_us`; TIME_MIN_US: none counts.

    Time of bounded input ends with it, and declared time is that of the far end.
    """
    if bounded or not has_event_time(step) or step.declares_time or step.replaces:
        return TIME_MIN_US
    done = (one for one in partitions if one.done)
    times = (partition_watermark_us(one.max_time_us, one.floor_us, step.lateness_us) for one in done)
    return max(times, default=TIME_MIN_US)


def lateness_of(plan: p.Plan) -> dict[str, int]:
    """The lateness of each source that judges its rows, by name."""
    sources = [step for step in plan.steps if isinstance(step, p.Source) and not step.declares_time]
    return {step.name: step.lateness_us for step in sources if has_event_time(step)}


def waited_for(sources: Iterable[p.Source], cut: Cut) -> list[WaitedFor]:
    """The partitions of these sources that the watermark waits for after a cut. How long they were silent is not in a cut."""
    return [
        WaitedFor(
            step.name,
            name,
            partition_watermark_us(one.max_time_us, one.floor_us, step.lateness_us),
            step.declares_time,
        )
        for step in sources
        if step.name in cut.sources and has_event_time(step) and not step.replaces
        for name, one in cut.sources[step.name].partitions.items()
        if not (one.done or one.idle)
    ]


def has_limit(step: p.Source, *, bounded: bool) -> bool:
    """Whether rows of a source can be too far ahead of the clock. History has no clock, and declared time is judged elsewhere."""
    return not bounded and has_event_time(step) and step.max_ahead_us is not None and not step.declares_time


def limit_us(step: p.Source, *, wall_us: int, clock_us: int, watermark_us: int, bounded: bool) -> int:
    """Above which time rows that are read from now on are late. The times are those of `protocol.clock`."""
    if step.max_ahead_us is None or not has_limit(step, bounded=bounded):
        return TIME_MAX_US
    return ahead_limit_us(wall_us, clock_us=clock_us, watermark_us=watermark_us, max_ahead_us=step.max_ahead_us)


@dataclass(slots=True, kw_only=True)
class Partition:
    """Where one partition stands. Owned by one source task."""

    name: str
    reader: Reader | None = None
    position: int = 0
    max_time_us: int = TIME_MIN_US
    first_us: int = TIME_MAX_US
    floor_us: int = TIME_MIN_US
    limit_us: int = TIME_MAX_US
    idle: bool = False
    done: bool = False
    followed_by: str = ""
    followed_at: int = 0
    identity: str = ""
    at_end: bool = False
    """Nothing followed when it was last read from."""
    ended: bool = False
    """Read to its end in this epoch, of input that goes on: it is waited for until the barrier, where it is done."""
    stashed: Chunk | None = None
    """Read while idle, to be worked on from the next barrier on."""
    heard_us: int = 0
    """When rows last came, on the monotonic clock."""
    reads: int = 0
    reads_identified: int = 0

    @classmethod
    def restored(cls, name: str, cut: PartitionCut, *, now_us: int) -> Partition:
        return cls(
            name=name,
            position=cut.position,
            max_time_us=cut.max_time_us,
            first_us=cut.first_us,
            floor_us=cut.floor_us,
            limit_us=cut.limit_us,
            idle=cut.idle,
            done=cut.done,
            followed_by=cut.followed_by,
            followed_at=cut.followed_at,
            identity=cut.identity,
            heard_us=now_us,
        )

    def cut(self) -> PartitionCut:
        return PartitionCut(
            position=self.position,
            max_time_us=self.max_time_us,
            first_us=self.first_us,
            floor_us=self.floor_us,
            limit_us=self.limit_us,
            idle=self.idle,
            done=self.done,
            followed_by=self.followed_by,
            followed_at=self.followed_at,
            identity=self.identity,
        )

    def watermark_us(self, lateness_us: int) -> int:
        return partition_watermark_us(self.max_time_us, self.floor_us, lateness_us)

    def is_continued_at(self, next_us: int, lateness_us: int) -> bool:
        """Whether rows of a later partition, the first of the time `next_us`, continue this one, by what is known of it now."""
        return is_continued(series_member(self.name, self.cut()), next_us, lateness_us)

    def note_follower(self, later: str) -> None:
        """It was read to its end, and a later partition has rows: if it grows from here on, it does so beside that one."""
        if not self.followed_by:
            self.followed_by, self.followed_at = later, self.position

    def close(self) -> None:
        """Close what is open; reading opens it again."""
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def return_at(self, source_watermark_us: int) -> None:
        """Be read again, and be waited for."""
        self.idle = self.done = False
        self.floor_us = joined_floor_us(self.floor_us, source_watermark_us)

    def judged(self, step: p.Source, chunk: Chunk, frame: pl.DataFrame) -> Judged:
        """Sort the rows of a chunk out, and move time on. Called once for each chunk, in order, with its rows (and their ids).

        Of a source that declares its time also for chunks without rows: what it declares counts after its rows.
        """
        if step.declares_time:
            judged = self._judged_declared(step, chunk.late, frame)
            if chunk.watermark_us is not None:
                self.max_time_us = max(self.max_time_us, chunk.watermark_us)
            return judged
        if step.time is None or not frame.height:
            return Judged(in_time=frame)
        untimed, times = None, microseconds(frame.get_column(step.time))
        between_us = _between_us(times)
        if not _is_sane(times, between_us):
            sane = _sane(times)
            frame, untimed, times = frame.filter(sane), frame.filter(~sane), times.filter(sane)
            between_us = _between_us(times)
        if between_us is None:
            return Judged(in_time=frame, untimed=untimed)
        watermarks, ahead = self._judge(times, *between_us, step.lateness_us)
        return replace(_apart(frame, watermarks, untimed), ahead=ahead, between_us=between_us)

    def newest_us(self, step: p.Source, chunk: Chunk) -> int:
        """How far time will have come, lateness left aside, when this chunk has been judged."""
        if step.declares_time:
            return self.max_time_us if chunk.watermark_us is None else max(self.max_time_us, chunk.watermark_us)
        if step.time is None or not chunk.frame.height:
            return self.max_time_us
        times = microseconds(chunk.frame.get_column(step.time))
        newest_us = times.filter(times.is_between(-TIME_BOUND_US, min(TIME_BOUND_US, self.limit_us))).max()
        return max(self.max_time_us, newest_us) if isinstance(newest_us, int) else self.max_time_us

    def _judged_declared(self, step: p.Source, watermarks: pl.Series | None, frame: pl.DataFrame) -> Judged:
        untimed = None
        if step.time is not None and frame.height:
            times = microseconds(frame.get_column(step.time))
            if not _is_sane(times, _between_us(times)):
                sane = _sane(times)
                untimed, frame = frame.filter(~sane), frame.filter(sane)
                watermarks = None if watermarks is None else watermarks.filter(sane)
            if self.floor_us > TIME_MIN_US:
                below = microseconds(frame.get_column(step.time)) + step.shift_us < self.floor_us
                floors = _where(below, self.floor_us)
                watermarks = (
                    floors if watermarks is None else pl.select(pl.max_horizontal(watermarks, floors)).to_series()
                )
        return _apart(frame, watermarks, untimed)

    def _judge(self, times: pl.Series, low: int, high: int, lateness_us: int) -> tuple[pl.Series | None, int]:
        """The watermark of each of these times (no nulls) that is below it, else null; None: none is. Move time on.

        `low`, `high`: the least and the largest of them. Also return how many are too far ahead.
        """
        before, ahead, believed = self.max_time_us, None, times
        if high > self.limit_us:
            ahead = times > self.limit_us
            believed = times.set(ahead, TIME_MIN_US)
            high = int(believed.max())  # type: ignore[arg-type]  # an Int64 with rows and no nulls
        self.max_time_us = max(before, high)
        if self.first_us == TIME_MAX_US and high > TIME_MIN_US:
            self.first_us = int(times[0] if ahead is None else believed.filter(~ahead)[0])
        if ahead is None and low >= max(self.max_time_us - lateness_us, self.floor_us):
            return None, 0
        if ahead is None and low >= max(before - lateness_us, self.floor_us) and times.is_sorted():
            # In order among themselves, and not below what came before.
            return None, 0
        # Exactly, row by row: against the largest time before each row.
        highest = believed.cum_max().shift(1).fill_null(before).clip(before)
        watermarks = (highest.clip(TIME_MIN_US + lateness_us) - lateness_us).clip(self.floor_us)
        if ahead is not None:
            watermarks = watermarks.set(ahead, TIME_MAX_US)
        return _where(times < watermarks, watermarks), 0 if ahead is None else int(ahead.sum())


def _where(mask: pl.Series, values: pl.Series | int) -> pl.Series:
    """Values where the mask is true, and nulls elsewhere."""
    given = pl.Series([values], dtype=pl.Int64) if isinstance(values, int) else values
    return given.zip_with(mask, pl.Series([None], dtype=pl.Int64)).rename(ROW_WATERMARK)


def _apart(frame: pl.DataFrame, watermarks: pl.Series | None, untimed: pl.DataFrame | None) -> Judged:
    """Take the rows that have a watermark from those that have none."""
    if watermarks is None or watermarks.null_count() == frame.height:
        return Judged(in_time=frame, untimed=untimed)
    below = watermarks.is_not_null()
    late = frame.filter(below).with_columns(watermarks.filter(below).alias(ROW_WATERMARK))
    return Judged(in_time=frame.filter(~below), late=late, untimed=untimed)


class Share:
    """The partitions that one source task reads. Used by that task alone.

    Partitions join, become idle and become active again at barriers and at a start only. What changed at a barrier whose attempt
    was given up, or at a start, is a stage of the epoch. It is recorded with the positions at that moment, so that the epoch can be
    replayed stage by stage (rule 1).
    """

    def __init__(self, partitions: Stage, *, now_us: int) -> None:
        self.partitions = {name: Partition.restored(name, cut, now_us=now_us) for name, cut in partitions.items()}
        self._stages: list[tuple[Attempt | None, Stage]] = []

    def start(
        self,
        joining: Sequence[PartitionId],
        *,
        gone: Collection[str] = (),
        bounded: bool,
        watermark_us: int,
        limit_us: int,
        now_us: int,
        with_rows: Container[str] | None = None,
    ) -> None:
        """Begin a run. `with_rows`: the partitions that have rows; None: that is not known.

        Then one that had ended may have grown since: reading it is how that is found out.
        """
        self.close_gone(gone)
        for partition in self.partitions.values():
            if partition.name in gone:
                continue
            facts = PartitionFacts(
                idle=partition.idle,
                done=partition.done,
                starting=True,
                bounded=bounded,
                has_rows=partition.done if with_rows is None else partition.name in with_rows,
            )
            if decide(facts, None) is Change.RETURN:
                partition.return_at(watermark_us)
        self.join(joining, watermark_us=watermark_us, now_us=now_us)
        self.limit(limit_us)
        self._stages.append((None, self.cuts()))

    def join(self, names: Sequence[PartitionId], *, watermark_us: int, now_us: int) -> None:
        """Add partitions. Their rows that are older than the watermark are late."""
        for name in names:
            if name not in self.partitions:
                floor_us = joined_floor_us(TIME_MIN_US, watermark_us)
                self.partitions[name] = Partition(name=name, floor_us=floor_us, heard_us=now_us)

    def change_idleness(
        self,
        after_us: int | None,
        idleness: Callable[[PartitionId, Position], Idleness],
        *,
        continued: Collection[str],
        bounded: bool,
        watermark_us: int,
        now_us: int,
    ) -> None:
        """At a barrier: silent and finished partitions become idle, and idle ones with rows waiting become active again.

        `continued`: those that another one continues and that were read to their end.
        """
        for partition in self.partitions.values():
            active = not (partition.done or partition.idle)
            means = idleness(PartitionId(partition.name), Position(partition.position)) if active else None
            facts = PartitionFacts(
                idle=partition.idle,
                done=partition.done,
                bounded=bounded,
                has_rows=partition.stashed is not None,
                silent_us=now_us - partition.heard_us,
                finished=means is Idleness.FINISHED or partition.name in continued,
                unknown=means is Idleness.UNKNOWN,
            )
            match decide(facts, after_us):
                case Change.RETURN:
                    partition.return_at(watermark_us)
                    partition.heard_us = now_us
                case Change.IDLE:
                    partition.idle = True
                    if partition.name in continued:
                        partition.close()  # rolled files are many
                case Change.NONE:
                    pass
            if facts.unknown:
                partition.heard_us = now_us

    def limit(self, limit_us: int) -> None:
        """At a barrier: rows above this time, read from here on, are too far ahead of the clock."""
        for partition in self.partitions.values():
            # None is read of those that are idle or done: without a limit their cuts are shorter, and do not change.
            partition.limit_us = TIME_MAX_US if partition.idle or partition.done else limit_us

    def close_gone(self, gone: Collection[str]) -> None:
        """At a barrier: idle partitions that are not there any more are done. They had been read to their end."""
        for partition in self.partitions.values():
            if partition.name in gone and partition.idle and partition.stashed is None:
                partition.idle, partition.done = False, True

    def close_ended(self) -> None:
        """At a barrier: partitions that were read to their end are done."""
        for partition in self.partitions.values():
            if partition.ended:
                partition.done, partition.ended = True, False

    def identify(self) -> None:
        """At a barrier: see what the partitions are that were read since the last one."""
        for partition in self.partitions.values():
            if partition.reader is not None and partition.reads != partition.reads_identified:
                partition.identity = partition.reader.identity()
                partition.reads_identified = partition.reads

    def cuts(self) -> dict[str, PartitionCut]:
        """The positions of the partitions. Callable from any thread, for a rough answer."""
        return {name: partition.cut() for name, partition in list(self.partitions.items())}

    def freeze_stages(self, attempt: Attempt, committed: Attempt) -> tuple[Stage, ...]:
        """Return the stages of the epoch that ends with this attempt, if it is sealed; and begin the next stage.

        What was recorded up to an attempt that has been sealed belongs to that epoch.
        """
        named = [(attempt if since is None else since, stage) for since, stage in self._stages]
        self._stages = [(since, stage) for since, stage in named if since > committed]
        found = tuple(stage for _, stage in self._stages)
        self._stages.append((attempt, self.cuts()))
        return found


def _between_us(times: pl.Series) -> tuple[int, int] | None:
    """The least and the largest of these times, if there are any."""
    low, high = times.min(), times.max()
    return (low, high) if isinstance(low, int) and isinstance(high, int) else None


def _is_sane(times: pl.Series, between_us: tuple[int, int] | None) -> bool:
    """Whether every row has a time, and not an absurd one."""
    if between_us is None or times.null_count():
        return False
    return between_us[0] >= -TIME_BOUND_US and between_us[1] <= TIME_BOUND_US


def _sane(times: pl.Series) -> pl.Series:
    """Which rows have a time, and not an absurd one."""
    return times.is_between(-TIME_BOUND_US, TIME_BOUND_US).fill_null(value=False)


def row_ids(source: str, partition: str, positions: pl.Series) -> pl.Expr:
    """The ids of rows at these positions: the same on every replay (rule 13)."""
    return pl.format("{}:{}:{}", pl.lit(source), pl.lit(partition), positions).alias(ROW_ID)


@contextmanager
def read_from(source: str, partition: str, start: int, end: int) -> Iterator[None]:
    """Add to the error of a function between which positions its row was read, unless the place is known exactly."""
    try:
        yield
    except FunctionError as error:
        if error.placed:
            raise
        text = f"{error}\nThe row was read from source {source}, {partition}, between positions {start} and {end}."
        raise FunctionError(text, placed=True) from error.__cause__


class Outward(Protocol):
    """Takes dead letters out of the task."""

    def take(self, frame: pl.DataFrame) -> None: ...


class DeadLetters:
    """What one source task could not read. Released with the epoch, so each is kept exactly once."""

    def __init__(self, source: p.Source, outlet: Outward) -> None:
        self.rows = 0
        self.first: str | None = None
        """Why the first of them is not a row."""
        self._source = source
        self._outlet = outlet

    def take(self, partition: str, rejected: Sequence[Rejected]) -> None:
        """Keep them; raises `SourceError` instead where the source says on_error='fail'."""
        if not rejected:
            return
        if self._source.on_error == "fail":
            first = rejected[0]
            raise SourceError(
                f"source {self._source.name}: {partition} at position {first.position} is not a row: {first.reason}.\n"
                f"  {first.text[:SHOWN_CHARS_MAX]}\nMend the input, or use on_error='keep' to set such rows aside."
            )
        self.rows += len(rejected)
        self.first = self.first or rejected[0].reason
        name = self._source.name
        rows = [(partition, row.position, name, row.reason, row.text[:TEXT_CHARS_MAX]) for row in rejected]
        self._outlet.take(pl.DataFrame(rows, schema=LETTER_SCHEMA.polars, orient="row"))

    def take_timeless(self, source: p.Source, partition: str, position: int, frame: pl.DataFrame) -> None:
        """Keep rows whose time is null or absurd. `source` is the source with its time column.

        `position` is the end of what was read with them: the nearest place that is known.
        """
        reason = f"column {source.time} ({source.timed_by or 'time='}) is null or out of range"
        # Times as plain numbers: one that is out of range cannot be spelt as a date.
        plain = frame.drop(ROW_ID, strict=False).with_columns(selectors.datetime().cast(pl.Int64))
        texts = plain.write_ndjson().splitlines()
        self.take(partition, [Rejected(position=position, text=text, reason=reason) for text in texts])
