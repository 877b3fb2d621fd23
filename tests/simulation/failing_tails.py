"""Functions that raise for some rows at the end of a random pipeline, and the dead letters that these rows become."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import polars as pl
from tests.simulation.query_tails import TOP_WINDOW_S, closed_for
from tests.simulation.rows import Row, check_equal, in_order, second_of
from tests.simulation.tails import LATE, LETTERS, MORE, OUT, STEP, Given, Sinks, Tail, attach_sinks, by_key

from fordstone.api.process import Context, KeyedFunction, Timer, ValueState
from fordstone.api.stream import Stream
from fordstone.api.windows import tumbling

SILENCE_S: Final = 3
FAILING_NUMBER: Final = 3
"""A timer raises for each multiple of this number of rows."""
Record = dict[str, Any]


def fails(number: int) -> bool:
    """Whether functions raise for the row with this id."""
    return number % 5 == 2


def check(number: int) -> None:
    """Raise for some rows."""
    if fails(number):
        raise ValueError(f"row {number}")


def changed(row: Record) -> Record:
    """For `map`."""
    check(row["id"])
    row["n"] += 10
    return row


def parted(row: Record) -> Iterator[Record]:
    """For `flat_map`: raises after the first of two."""
    yield {**row, "n": row["n"] + 10}
    check(row["id"])
    yield {**row, "n": row["n"] + 20}


def changed_batch(frame: pl.DataFrame) -> pl.DataFrame:
    """For `map_batches`."""
    for number in frame.get_column("id"):
        check(number)
    return frame.with_columns(pl.col("n") + 10)


@dataclass(frozen=True, slots=True)
class FunctionTail(Tail):
    """A function of rows or batches; what it gives is counted in windows."""

    kind: Literal["map", "flat_map", "map_batches"]

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        match self.kind:
            case "map":
                made = stream.map(changed, on_error="dead_letter", name=STEP)
            case "flat_map":
                made = stream.flat_map(parted, on_error="dead_letter", name=STEP)
            case "map_batches":
                made = stream.map_batches(changed_batch, on_error="dead_letter", name=STEP)
        grouped = made.group_by("k").window(tumbling(f"{TOP_WINDOW_S}s"))
        windows = grouped.agg(name=f"{STEP}_windows", c="count(*)", total="sum(id)")
        attach_sinks(sinks, made, late=windows.late, more=windows)

    @property
    def parts(self) -> int:
        """How many rows the function makes of one."""
        return 2 if self.kind == "flat_map" else 1

    def judge(self, given: Given) -> None:
        """Each row is a dead letter, with its place in the input, or was changed and counted."""
        fine = [row for row in given.rows if not fails(row.id)]
        failed = Counter((*given.places[row.id], row.id) for row in given.rows if fails(row.id))
        letters = Counter((one["partition"], one["position"], row["id"]) for one, row in letters_in(given))
        check_equal("dead letters of the tail", letters, failed)
        made = Counter((row.id, row.n + more) for row in fine for more in (10, 20)[: self.parts])
        check_equal("rows of the tail", Counter(given.found(OUT, "id", "n")), made)
        late, known = given.ids(LATE), given.watermarks
        overtaken = {row.id for row in fine if (row.id in late if known is None else closed_for(row, known[row.id]))}
        check_equal("late rows of the tail", late, Counter(dict.fromkeys(overtaken, self.parts)))
        counted = by_key(
            [row for row in fine if row.id not in overtaken],
            lambda row: (row.k, row.second // TOP_WINDOW_S * TOP_WINDOW_S),
        )
        windows = Counter(
            (*key, len(some) * self.parts, sum(row.id for row in some) * self.parts) for key, some in counted.items()
        )
        found = Counter((k, second_of(start), *rest) for k, start, *rest in given.found(MORE, *_WINDOWS))
        check_equal("windows of the tail", found, windows)

    def judge_loosely(self, given: Given, *, least: bool) -> None:
        """Every row is a dead letter or went on, at least or at most once."""
        went_on = Counter(number for number, n in given.found(OUT, "id", "n") if n < 20)
        check_counted(given, went_on, least=least)


_WINDOWS: Final = ("k", "window_start", "c", "total")


def letters_in(given: Given) -> Iterator[tuple[Mapping[str, Any], Record]]:
    """The dead letters, and the rows or timers that they tell of."""
    for one in given.sinks[LETTERS].rows().iter_rows(named=True):
        row = json.loads(one["text"])
        reason = f"ValueError: row {row['id']}" if "id" in row else f"ValueError: timer of {row['key']}"
        check_equal("step and reason of a dead letter", (one["step"], one["reason"]), (STEP, reason))
        yield one, row


def check_counted(given: Given, went_on: Counter[int], *, least: bool) -> None:
    """Check that each row went on or became a dead letter, at least or at most once."""
    counted = went_on + Counter(row["id"] for _, row in letters_in(given) if "id" in row)
    wrong = [row.id for row in given.rows if (counted[row.id] < 1 if least else counted[row.id] > 1)]
    check_equal("rows that the tail lost or doubled", wrong, [])


_NUMBERED: Final = {"k": "bigint", "id": "bigint", "number": "bigint", "rang": "boolean"}


class Faltering(KeyedFunction):
    """Numbers the rows of a key until there is silence. Raises when it has changed everything already, for some rows and some timers."""

    seen = ValueState("bigint")

    def process(self, row: Mapping[str, Any], ctx: Context) -> Iterator[Record]:
        """Number a row, and move the timer."""
        self.seen.set(self.seen.get(0) + 1)
        ctx.set_timer("silence", after=f"{SILENCE_S}s")
        yield {"k": ctx.key, "id": row["id"], "number": self.seen.get(), "rang": False}
        check(row["id"])

    def on_timer(self, timer: Timer, ctx: Context) -> Iterator[Record]:
        """Report the number, and forget it."""
        number = self.seen.get()
        self.seen.clear()
        yield {"k": ctx.key, "id": None, "number": number, "rang": timer.name == "silence"}
        if number % FAILING_NUMBER == 0:
            raise ValueError(f"timer of {ctx.key}")


@dataclass(frozen=True, slots=True)
class FailingProcessTail(Tail):
    """A function with state and a timer. Of a call that raises, nothing stays."""

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        grouped = stream.group_by("k")
        made = grouped.process(Faltering, schema=_NUMBERED, on_error="dead_letter", name=STEP)
        attach_sinks(sinks, made, late=made.late)

    def judge(self, given: Given) -> None:
        """Rows with their numbers as if there were no others, and the dead letters of rows and timers."""
        made: Counter[tuple[Any, ...]] = Counter()
        failed: Counter[tuple[Any, ...]] = Counter()
        for k, rows in by_key(in_order(given.in_time(given.rows))).items():
            failed.update(("row", row.id) for row in rows if fails(row.id))
            _number(k, [row for row in rows if not fails(row.id)], made, failed)
        check_equal("rows of the tail", Counter(given.found(OUT, *_NUMBERED)), made)
        letters = Counter(
            ("row", row["id"])
            if "id" in row
            else (row["key"], row["timer"], second_of(datetime.fromisoformat(row["time"])))
            for _, row in letters_in(given)
        )
        check_equal("dead letters of the tail", letters, failed)

    def judge_loosely(self, given: Given, *, least: bool) -> None:
        """Every row is late, a dead letter or was numbered, at least or at most once."""
        check_counted(given, given.ids(OUT) + given.ids(LATE), least=least)


def _number(k: int, rows: list[Row], made: Counter[tuple[Any, ...]], failed: Counter[tuple[Any, ...]]) -> None:
    number = 0
    for at, row in enumerate(rows):
        number += 1
        made[k, row.id, number, False] += 1
        rings = row.second + SILENCE_S
        if at + 1 < len(rows) and rows[at + 1].second <= rings:
            continue
        if number % FAILING_NUMBER == 0:
            failed[k, "silence", rings] += 1
        else:
            made[k, None, number, True] += 1
            number = 0
