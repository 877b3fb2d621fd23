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
LONG_AGO_S = -(10**9)
TICKS_MAX = 1000
"""About a minute: a run that takes longer has failed."""
PART_ROWS = 30
AnyRow = TypeVar("AnyRow", bound=tuple[Any, ...])


def in_disorder(rng: Random, count: int, *, steps: Sequence[int] = (0, 0, 1)) -> Iterator[int]:
    """Seconds that move on by `steps`, with some disorder; a few are late."""
    now = 0
    for _ in range(count):
        now += rng.choice(steps)
        yield now - rng.choice((0, 0, 1, LATENESS_S, LATENESS_S + 2, LATENESS_S + 9))


def with_watermarks(partitions: Sequence[Sequence[AnyRow]]) -> list[tuple[AnyRow, int]]:
    """Each row with the second that the watermark of its partition had come to when it came (rule 6)."""
    found = []
    for rows in partitions:
        newest = LONG_AGO_S
        for row in rows:
            found.append((row, newest - LATENESS_S))
            newest = max(newest, row[1])
    return found


def in_time(partitions: Sequence[Sequence[AnyRow]]) -> tuple[list[AnyRow], int]:
    """The rows that are in time for steps that need order, and how many are not."""
    judged = with_watermarks(partitions)
    kept = [row for row, watermark in judged if row[1] >= watermark]
    return kept, len(judged) - len(kept)


def in_windows(
    partitions: Sequence[Sequence[AnyRow]], size_s: int, start: datetime = START
) -> tuple[list[AnyRow], int]:
    """The rows whose tumbling window is open for them, and how many are late."""
    at = round(start.timestamp())
    judged = with_watermarks(partitions)
    kept = [row for row, watermark in judged if (row[1] + at) // size_s * size_s + size_s > watermark + at]
    return kept, len(judged) - len(kept)


def in_sessions(partitions: Sequence[Sequence[AnyRow]], gap_s: int) -> tuple[list[list[AnyRow]], int]:
    """The rows of each session of each key, in order of time, and how many are late."""
    judged = with_watermarks(partitions)
    open_rows = [(max(row[1], watermark), row) for row, watermark in judged if row[1] + gap_s > watermark]
    found: list[list[AnyRow]] = []
    for key in {row[0] for _, row in open_rows}:
        session: list[AnyRow] = []
        for turn, row in sorted((one for one in open_rows if one[1][0] == key), key=lambda one: one[0]):
            if session and max(one[1] for one in session) + gap_s <= turn:
                found.append(session)
                session = []
            session.append(row)
        found.append(session)
    return [sorted(session, key=lambda row: row[1:]) for session in found], len(judged) - len(open_rows)


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
