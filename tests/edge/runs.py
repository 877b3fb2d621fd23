"""Rows in disorder, those of them that are in time, a run in three parts, and rows compared exactly. For both engines.

A row has its second, counted from a start that each test chooses, at place 1.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import polars as pl
from polars.testing import assert_frame_equal

from fordstone import Pipeline
from fordstone.connectors.memory import MemorySource
from fordstone.protocol.progress import Progress

START = datetime(1969, 12, 31, 23, 59, 50, tzinfo=UTC)
LATENESS_S = 3
TICKS_MAX = 1000
"""About a minute: a run that takes longer has failed."""
PART_ROWS = 30
AnyRow = TypeVar("AnyRow", bound=tuple[Any, ...])


def in_disorder(rng: Random, count: int, *, steps: Sequence[int] = (0, 0, 1)) -> Iterator[int]:
    """Seconds that move on by `steps`, with some disorder; a few are late."""
    now = 0
    for _ in range(count):
        now += rng.choice(steps)
        yield now - rng.choice((0, 0, 1, LATENESS_S, LATENESS_S + 2))


def in_time(partitions: list[list[AnyRow]]) -> tuple[list[AnyRow], int]:
    """The rows that are in time, and how many are not."""
    kept, late = [], 0
    for rows in partitions:
        newest: int | None = None
        for row in rows:
            if newest is not None and row[1] < newest - LATENESS_S:
                late += 1
            else:
                kept.append(row)
            newest = row[1] if newest is None else max(newest, row[1])
    return kept, late


def run_in_parts(
    pipeline: Pipeline,
    source: MemorySource,
    partitions: Sequence[Sequence[tuple[Any, ...]]],
    state: Path,
    *,
    out: bool = True,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    """Run with one, three and two subtasks; each finds `PART_ROWS` more of every partition, and the last runs to the end.

    The others are stopped when they have read their rows and, if `out`, some rows are out. `after` is called with each part that ended.
    """
    ticks = 0
    stopped: set[int] = set()

    def stop_when_read(progress: Progress) -> None:
        nonlocal ticks
        read = progress.rows_in == PART_ROWS * len(partitions) and (progress.rows_out > 0 or not out)
        # After a second signal, a run would stop at once.
        if part not in stopped and (read or ticks > TICKS_MAX):
            stopped.add(part)
            signal.raise_signal(signal.SIGTERM)
        ticks += 1

    for part, parallelism in enumerate((1, 3, 2)):
        for number, given in enumerate(partitions):
            source.append(number, given[PART_ROWS * part : PART_ROWS * (part + 1)])
        last = part == 2
        pipeline.run(
            state=state,
            bounded=last,
            parallelism=parallelism,
            interval="5ms",
            on_progress=None if last else stop_when_read,
        )
        after(part)


def same_rows(got: pl.DataFrame, wanted: pl.DataFrame) -> None:
    """Fail unless they are the same in any order, to the last bit."""
    assert_frame_equal(got.select(wanted.columns).sort(wanted.columns), wanted.sort(wanted.columns), check_exact=True)
