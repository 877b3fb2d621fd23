"""How the rows of a source come into the chain of its task, on both engines: judged, then pushed.

Rows are judged (`Partition.judged`) at the source, or where the source has a `with_time` step (`Source.timed_by`), there: the steps
before it run first, and other readers of their rows get them unjudged, without event time. Rows without a time become dead
letters. A time that was read in a wrong unit stops the pipeline (`protocol.time_unit`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import Chunk
from fordstone.errors import SourceError
from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.polars.times import microseconds
from fordstone.operators.base import Emit, Emits
from fordstone.operators.with_time import AssignTime
from fordstone.plan import plan as p
from fordstone.protocol.time_unit import (
    SPANS_US,
    UNITS,
    WrongUnit,
    describe_unit,
    moment_text,
    wrong_unit,
)
from fordstone.runtime.chain import Chain
from fordstone.runtime.partition import DeadLetters, Partition

BeforeJudging = Callable[[Partition, p.Source, Chunk], None]
"""Called with the partition, the source with its time column, and the chunk with the rows as they are judged."""
_SPANS_US: Final = [(first_us, end_us) for first_us, end_us in SPANS_US.values() if end_us <= TIME_MAX_US]


class Intake:
    """The way of rows into one chain. Used by the task of the chain alone."""

    def __init__(
        self, step: p.Source, chain: Chain, letters: DeadLetters, *, before_judging: BeforeJudging | None = None
    ) -> None:
        """`before_judging`: called before rows are judged in a `with_time` step."""
        self._step = step
        self._chain = chain
        self._letters = letters
        self._before_judging = before_judging
        self._rows = self._ahead = 0
        self._assigns: AssignTime | None = None
        if step.timed_by is not None:
            operator = chain.operators()[step.timed_by]
            if not isinstance(operator, AssignTime):
                raise TypeError(f"{step.timed_by} assigns no time")
            self._assigns = operator
            self._step = msgspec.structs.replace(step, time=operator.column)

    def take(self, partition: Partition, chunk: Chunk, frame: pl.DataFrame) -> bool:
        """Push the rows of a chunk (with their ids) through the chain; return whether all that have a time were too far ahead."""
        self._rows = self._ahead = 0
        if self._assigns is None:
            for emit in self._judged(partition, chunk, frame):
                self._chain.push(emit.frame, late=emit.late)
        else:
            self._assigns.judge = lambda timed: self._assigned(partition, chunk, timed)
            self._chain.push(frame, late=False)
        return 0 < self._ahead == self._rows

    def _assigned(self, partition: Partition, chunk: Chunk, frame: pl.DataFrame) -> Emits:
        if self._before_judging is not None:
            self._before_judging(partition, self._step, replace(chunk, frame=frame))
        return list(self._judged(partition, chunk, frame))

    def _judged(self, partition: Partition, chunk: Chunk, frame: pl.DataFrame) -> Iterator[Emit]:
        judged = partition.judged(self._step, chunk, frame)
        if self._step.checks_time_unit and judged.between_us is not None:
            self._check_unit(partition, frame, *judged.between_us)
        self._rows += frame.height
        self._ahead += judged.ahead
        if judged.untimed is not None:
            self._letters.take_timeless(self._step, partition.name, partition.position, judged.untimed)
        if judged.in_time.height:
            yield Emit(judged.in_time)
        if judged.late is not None:
            yield Emit(judged.late, late=True)

    def _check_unit(self, partition: Partition, frame: pl.DataFrame, low_us: int, high_us: int) -> None:
        spans = [(first_us, end_us) for first_us, end_us in _SPANS_US if low_us < end_us and high_us >= first_us]
        if not spans:
            return
        times = microseconds(frame.get_column(str(self._step.time)))
        wrong = times.filter(reduce(operator.or_, (times.is_between(*span, closed="left") for span in spans)))
        found = wrong_unit(int(wrong[0])) if wrong.len() else None
        if found is not None:
            raise SourceError(_describe(self._step, partition.name, found))


def _describe(step: p.Source, partition: str, found: WrongUnit) -> str:
    if step.timed_by is not None:
        factor = f"{1_000 ** abs(found.steps):,}"
        share = f"{factor} times as much" if found.steps > 0 else f"1/{factor} of it"
        return (
            f"step {step.timed_by}: a row of {partition} has the time {moment_text(found.time_us)}. Counted from 1970, {share} is "
            f"{moment_text(found.meant_us)}, so the unit is probably wrong. Use the one of timestamp_seconds, timestamp_millis and "
            "timestamp_micros that fits, or check_time_unit=False if such times are meant."
        )
    read_as = str(step.connector.options.get("time_unit", "us"))
    count = found.time_us * 1_000 // 1_000 ** list(UNITS).index(read_as)
    return (
        f"source {step.name}, {partition}, column {step.time}: {describe_unit(count, read_as, found)}, or check_time_unit=False at the "
        "source if such times are meant."
    )
