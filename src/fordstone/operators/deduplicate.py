"""Deduplication: rows of each key in order of time, without those that follow a row that was kept by less than a span.

Rows wait until the watermark passes them. A row that is kept opens a span; rows of its key inside of it go, and the first
one after it (exactly the span later included) is kept again. Of rows of one key and one time, the first in the order of
`row_order` stands for all.

What is remembered of a key is until when its span lasts, in a timeline that drops it by itself when the watermark gets
there. To look keys up there is an index beside it, which is nothing but a view of the timeline: it is made when first
needed, and rebuilt when more than half of its keys are of the past. So forgetting costs nothing by itself.

Invariants: the timeline has at most one row per key, with an end above the watermark; an end in the index that the
watermark has passed means the same as none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.errors import PipelineError
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US, human_us
from fordstone.lang.schema import Schema
from fordstone.operators.base import Emit, Emits, Family, Operator, OperatorContext, stream_details
from fordstone.operators.row_order import Numbers, OrderedOperator, WaitingRows, same_as_before
from fordstone.plan import plan as p
from fordstone.plan.stream_type import (
    Derived,
    EventTime,
    StreamType,
    Types,
    append_only,
    late_rows,
    needs_time,
    plain_keys,
)
from fordstone.state.base import State, StateBackend

UNTIL: Final = "__until"
"""When the span of a key that was opened last ends."""
PAST_KEYS_MIN: Final = 4096
"""Fewer keys of the past than this are left in the index."""


class DeduplicateFamily(Family[p.Deduplicate]):
    """Rows without those that follow another of their key too soon."""

    steps = (p.Deduplicate,)
    stays = "{step} drops what another node may have sent before"

    def check(self, step: p.Deduplicate, types: Types) -> Derived:
        stream = types[step.input]
        append_only(step, stream, "deduplicate")
        time = needs_time(step, stream, "deduplicate")
        if not step.keys:
            raise PipelineError(
                f"step {step.name}: deduplicate needs at least one column to tell rows apart by, such as deduplicate('id', ...)."
            )
        if not 0 < step.within_us <= TIME_MAX_US:
            raise PipelineError(
                f"step {step.name}: within={step.within_us}us must be longer than zero, and at most {TIME_MAX_US}us. "
                "It is how long after a row another of its key counts as the same."
            )
        plain_keys(step.keys, stream.schema, what="deduplicate")
        kept = StreamType(schema=stream.schema, time=time, row_wise=False)
        return {p.Input(step.name): kept, **late_rows(step, stream)}

    def make(self, step: p.Deduplicate, context: OperatorContext) -> Operator:
        stream = context.types[step.input]
        time = needs_time(step, stream, "deduplicate")
        return Deduplicate(step.keys, stream.schema, within_us=step.within_us, time=time, state=context.state)

    def title(self, step: p.Deduplicate) -> str:
        return f"first of each {', '.join(step.keys)} within {human_us(step.within_us)}"

    def describe(self, step: p.Deduplicate, plan: p.Plan, types: Types) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - same in each plan
        yield from stream_details(step, types)
        yield "keeps", f"the rows that wait for time, and each key for {human_us(step.within_us)}"


class Deduplicate(OrderedOperator):
    """Keeps the first row of each key within a span."""

    def __init__(
        self, keys: Sequence[str], schema: Schema, *, within_us: int, time: EventTime, state: StateBackend
    ) -> None:
        self._waiting = WaitingRows(keys, schema, time=time, state=state)
        self._kept = state.timeline(keys, time_column=UNTIL, merge_rows=lambda rows: rows)
        self._spans = _Spans(self._waiting.key_types, within_us, state)
        self._fresh = True
        """Nothing has been read from the timeline yet."""

    def on_watermark(self, watermark_us: int) -> Emits:
        rows = self._waiting.release(watermark_us)
        found = self._keep(rows, watermark_us) if rows.height else rows
        over = self._kept.close(watermark_us).height
        if not self._fresh:
            self._spans.live -= over
            if len(self._spans.index) > 2 * self._spans.live + PAST_KEYS_MIN:
                self._spans.fill(self._kept.scan())
        return [Emit(found)] if found.height else []

    def states(self) -> Mapping[str, State]:
        return {"waiting": self._waiting.state, "kept": self._kept}

    def _keep(self, rows: pl.DataFrame, watermark_us: int) -> pl.DataFrame:
        if self._fresh:
            self._spans.fill(self._kept.scan())
            self._fresh = False
        times = self._waiting.times(rows)
        slots = self._spans.slots_of(rows.select(self._waiting.key))
        kept, several = self._spans.open(slots, times)
        if several.size:
            # Which of the rows of one key and one time is kept is for the order to say.
            tied = same_as_before(times[several]) & same_as_before(slots[several])
            if tied.any():
                rows = self._waiting.with_ties_in_order(rows, several, tied)
        ends = self._spans.ends(times.take(kept))
        lasting = (ends == self._spans.until_us.take(slots.take(kept))) & (ends > watermark_us)
        new = rows.select(self._waiting.key)[kept[lasting]]
        self._kept.add(new.with_columns(pl.Series(UNTIL, ends[lasting])))
        self._spans.live += new.height
        is_kept = np.zeros(rows.height, dtype=np.bool_)
        is_kept[kept] = True
        return rows.select(self._waiting.names).filter(pl.Series(is_kept))


class _Spans:
    """Until when the span of each key lasts that was opened last: an index over the timeline. Never stored."""

    def __init__(self, key_types: Mapping[str, pl.DataType], within_us: int, state: StateBackend) -> None:
        self._new_index = partial(state.key_index, key_types)
        self._within_us = within_us
        self.index = self._new_index()
        self.until_us: Numbers = np.zeros(0, dtype=np.int64)
        """By slot."""
        self._last: Numbers = np.zeros(0, dtype=np.int64)
        """By slot: the last row that had it; only good within a call."""
        self.live = 0
        """Keys in the timeline."""

    def fill(self, kept: pl.DataFrame) -> None:
        self.index, self.until_us = self._new_index(), np.zeros(0, dtype=np.int64)
        self.live = kept.height
        if kept.height:
            slots = self.index.fill(kept)
            self._make_room()
            self.until_us[slots] = kept.get_column(UNTIL).to_numpy()

    def slots_of(self, keys: pl.DataFrame) -> Numbers:
        """The slot of each row's key; new keys have a span that ended long ago."""
        slots, fresh = self.index.insert(keys)
        if self.index.capacity > self.until_us.size:
            self._make_room()
        self.until_us[fresh] = TIME_MIN_US
        return slots

    def open(self, slots: Numbers, times: Numbers) -> tuple[Numbers, Numbers]:
        """Open the spans that these rows (ordered by time) open.

        Gives the rows that open one, and the rows of keys that have several outside of their span so far, key by key.
        """
        outside = np.flatnonzero(times >= self.until_us.take(slots))
        own = slots.take(outside)
        numbers = np.arange(outside.size)
        self._last[own] = numbers
        is_last = self._last.take(own) == numbers
        if is_last.all():
            self.until_us[own] = self.ends(times.take(outside))
            return outside, np.zeros(0, dtype=np.int64)
        self._last[own] = 1
        self._last[own[~is_last]] = 0
        is_single = self._last.take(own) == 1
        single, several = outside[is_single], outside[~is_single]
        several = several[np.argsort(slots.take(several), kind="stable")]
        first = several[_openers(slots.take(several), times.take(several), self._within_us)]
        kept = np.concatenate([single, first])
        # Of several spans of a key the last to be written is the last in time.
        self.until_us[slots.take(kept)] = self.ends(times.take(kept))
        return kept, several

    def ends(self, times: Numbers) -> Numbers:
        return np.minimum(times, TIME_MAX_US - self._within_us) + self._within_us

    def _make_room(self) -> None:
        more = np.full(self.index.capacity - self.until_us.size, TIME_MIN_US, dtype=np.int64)
        self.until_us = np.concatenate([self.until_us, more])
        self._last = np.zeros(self.until_us.size, dtype=np.int64)


def _openers(keys: Numbers, times: Numbers, within_us: int) -> Numbers:
    """Which rows open a span, of rows that are ordered by key and time: the first of each key, and so on from there.

    Each row points at the first one of its key that lies `within_us` after it. Following the pointers of all keys at
    once, 1, 2, 4 ... steps at a time, marks the rows that are reached: as many passes as the longest chain has digits.
    """
    starts = np.flatnonzero(~same_as_before(keys))
    counts = np.diff(starts, append=keys.size)
    firsts = np.repeat(times[starts], counts)
    # As unsigned numbers: the difference of two times may be larger than a time.
    far = (times.view(np.uint64) - firsts.view(np.uint64)) >= np.uint64(within_us)
    if not far.any():
        return starts
    following = _following(np.cumsum(~same_as_before(keys)), times, within_us)
    reached: npt.NDArray[np.bool_] = np.zeros(keys.size + 1, dtype=np.bool_)
    reached[starts] = True
    marked = 0
    while (count := int(np.count_nonzero(reached[:-1]))) > marked:
        marked = count
        reached[following[:-1][reached[:-1]]] = True
        following = following.take(following)
    return np.flatnonzero(reached[:-1])


def _following(groups: Numbers, times: Numbers, within_us: int) -> Numbers:
    """For each row the first one of its group that lies `within_us` after it, or the end; and the end for the end."""
    size = times.size
    targets = np.minimum(times, TIME_MAX_US - within_us) + within_us
    ranks = np.unique(np.concatenate([times, targets]), return_inverse=True)[1]
    places = groups * (2 * size) + ranks[:size]
    found = np.searchsorted(places, groups * (2 * size) + ranks[size:])
    groups = np.append(groups, -1)
    found[groups[found] != groups[:-1]] = size
    return np.append(found, size)
