"""Patterns over short words: rows named like `b1`, whose first letter is what conditions look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import polars as pl
from tests.operators.subtasks import frame_of

from fordstone.api.pattern import MatchOptions, Pattern, match_step
from fordstone.lang.duration import TIME_MAX_US
from fordstone.lang.schema import Schema
from fordstone.operators.match.check import derive_match
from fordstone.operators.match.step import TIMEOUT, MatchRows
from fordstone.plan import plan as p
from fordstone.plan.stream_type import EventTime, StreamType
from fordstone.state.memory import IN_MEMORY

SCHEMA = Schema.of({"k": "string", "ts": "timestamp", "name": "string", "x": "double"})
STREAM = StreamType(schema=SCHEMA, time=EventTime(column="ts"))
Row = tuple[Any, ...]
"""Key, microseconds, name, value."""


def of(letter: str) -> str:
    """A row whose name begins with one of these letters."""
    return " OR ".join(f"name LIKE '{one}%'" for one in letter)


def frame(rows: Sequence[Row]) -> pl.DataFrame:
    return frame_of(rows, SCHEMA)


def step_of(
    pattern: Pattern, measures: Mapping[str, str] | None = None, keys: tuple[str, ...] = ("k",), **options: Any
) -> p.Match:
    """The step, judged as a plan would be."""
    given = p.Input("rows")
    step = match_step("match", given, keys, pattern, measures or {}, cast("MatchOptions", options))
    derive_match(step, {given: STREAM})
    return step


def word(text: str) -> list[Row]:
    """`a b1 b2` as rows of one key, a microsecond apart; `a@7` is at 7."""
    rows: list[Row] = []
    for at, part in enumerate(text.split()):
        name, _, time = part.partition("@")
        rows.append(("k", int(time) if time else at, name, float(at)))
    return rows


def run(step: p.Match, rows: Sequence[Row], *, until: int = TIME_MAX_US) -> dict[str, pl.DataFrame]:
    """What comes out on each port when all rows come at once."""
    operator = MatchRows(step, STREAM, state=IN_MEMORY)
    emits = operator.on_batch(frame(rows), late=False) if rows else []
    emits += operator.on_watermark(until)
    found: dict[str, pl.DataFrame] = {}
    for emit in emits:
        found[emit.port] = pl.concat([found[emit.port], emit.frame]) if emit.port in found else emit.frame
    return found


def matches(pattern: Pattern, text: str, **options: Any) -> list[str]:
    """The matches of a pattern in a word, each as the names of its rows, in order of their rows."""
    step = step_of(pattern, {"n": "match_number()"}, rows="all", **options)
    out = run(step, word(text))
    if "main" not in out:
        return []
    found: dict[int, list[str]] = {}
    for name, n in out["main"].select("name", "n").iter_rows():
        found.setdefault(n, []).append(name)
    return sorted(" ".join(names) for names in found.values())


def timeouts(pattern: Pattern, text: str, until: int = TIME_MAX_US, **options: Any) -> list[tuple[int, str]]:
    """The candidates that timed out: the time of the first row, and the stages."""
    out = run(step_of(pattern, **options), word(text), until=until).get(TIMEOUT)
    if out is None:
        return []
    return sorted(out.select(pl.col("match_start").cast(pl.Int64), "stages").rows())


def counted(names: Sequence[str]) -> Counter[str]:
    return Counter(names)
