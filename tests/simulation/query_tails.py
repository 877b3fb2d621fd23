"""What queries are made of at the end of a random pipeline: Top-N, OVER, DISTINCT, and aggregates that are kept up to date."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tests.simulation.rows import Row, check_equal, in_order, second_of
from tests.simulation.tails import LATE, OUT, STEP, Given, Sinks, Tail, attach_sinks, by_key

from fordstone.api.stream import Stream
from fordstone.api.windows import tumbling
from fordstone.plan.plan import Numbering

TOP_WINDOW_S: Final = 10
VALUES: Final = {"kinds": "count(DISTINCT n)", "greatest": "max_by(id, n)", "least": "min_by(id, n)"}
"""Aggregates that depend on which values there are, or on two columns: `values_of` works them out."""
Shown = tuple[Any, ...]


def latest_of(given: Given, key: int, *columns: str) -> dict[Shown, Shown]:
    """The last row of each key, which the first `key` columns are, without keys that were deleted."""
    found: dict[Shown, Shown] = {}
    for op, *values in given.found(OUT, "__op", *columns):
        found.pop(tuple(values[:key]), None)
        if op == "upsert":
            found[tuple(values[:key])] = tuple(values[key:])
    return found


@dataclass(frozen=True, slots=True)
class RunningTail(Tail):
    """Aggregates of all rows so far that depend on more than one column, or on which values there are."""

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        made = stream.group_by("k").agg(name=STEP, c="count(*)", **VALUES)
        attach_sinks(sinks, made, late=None)

    def judge(self, given: Given) -> None:
        """The last result of each key has all rows."""
        wanted = {(k,): (len(rows), *values_of(rows)) for k, rows in by_key(given.rows).items()}
        check_equal("running results of the tail", latest_of(given, 1, "k", "c", *VALUES), wanted)


def values_of(rows: Sequence[Row]) -> tuple[int, int, int]:
    """How many different `n` there are, and the ids of the rows with the greatest and the least of them."""
    pairs = [(row.n, row.id) for row in rows]
    return len({row.n for row in rows}), max(pairs)[1], min(pairs)[1]


@dataclass(frozen=True, slots=True)
class TopTail(Tail):
    """The first rows in an order: of the windows that end together, of all rows so far, or of counts that replace each other."""

    kind: Literal["windows", "rows", "counts"]
    n: int | None
    numbering: Numbering = "row_number"

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        if self.kind == "windows":
            grouped = stream.group_by("k").window(tumbling(f"{TOP_WINDOW_S}s"))
            windows = grouped.agg(name=f"{STEP}_windows", total="sum(id)", c="count(*)")
            made = windows.top(self.n, by="c DESC", per="window_start", numbering=self.numbering, name=STEP)
            attach_sinks(sinks, made, late=windows.late)
            return
        if self.kind == "counts":
            stream = stream.group_by("k", "n").agg(name=f"{STEP}_counts", c="count(*)")
        by = "c DESC" if self.kind == "counts" else "n DESC"
        attach_sinks(sinks, stream.top(self.n, by=by, per="k", name=STEP), late=None)

    def judge(self, given: Given) -> None:
        """Which row has which number, in the end."""
        if self.kind == "windows":
            found = given.found(OUT, "window_start", "k", "total", "c", "rank")
            shown = Counter((second_of(start), *rest) for start, *rest in found)
            check_equal("rankings of the tail", shown, Counter(self._windows(given)))
            return
        wanted: dict[Shown, Shown] = {}
        for k, rows in by_key(given.rows).items():
            counts = Counter(row.n for row in rows)
            ordered = (
                [(row.id, row.n) for row in sorted(rows, key=lambda row: (-row.n, row.id))]
                if self.kind == "rows"
                else sorted(counts.items(), key=lambda one: (-one[1], one[0]))
            )
            wanted |= {(k, number): one for number, one in enumerate(ordered[: self.n], 1)}
        columns = ("id", "n") if self.kind == "rows" else ("n", "c")
        check_equal("rankings of the tail", latest_of(given, 2, "k", "rank", *columns), wanted)

    def _windows(self, given: Given) -> Iterator[Shown]:
        rows = given.in_time(given.rows, is_late=closed_for)
        for start, some in by_key(rows, lambda row: row.second // TOP_WINDOW_S * TOP_WINDOW_S).items():
            counted = [(len(members), k, sum(row.id for row in members)) for k, members in by_key(some).items()]
            for place, (c, k, total) in enumerate(sorted(counted, key=lambda one: (-one[0], one[1])), 1):
                greater = [other for other, *_ in counted if other > c]
                number = {"row_number": place, "rank": len(greater) + 1, "dense_rank": len({*greater}) + 1}
                if self.n is None or number[self.numbering] <= self.n:
                    yield start, k, total, c, number[self.numbering]


def closed_for(row: Row, watermark: int) -> bool:
    """Whether the window that a row lies in is closed for it."""
    return row.second // TOP_WINDOW_S * TOP_WINDOW_S + TOP_WINDOW_S <= watermark


_OVER: Final = {"total": "sum(id)", "c": "count(*)", "most": "max(n)", "oldest": "first_value(id)"}


@dataclass(frozen=True, slots=True)
class OverTail(Tail):
    """Every row with aggregates over rows up to it: a number of them, a span of time, or all."""

    rows: int | None
    span: int | None
    """In seconds."""

    def aggregates(self) -> dict[str, str]:
        """The row before is known only where the frame has it."""
        return _OVER | {"before": "lag(id)"} if (self.rows or 0) > 1 else _OVER

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        span = None if self.span is None else f"{self.span}s"
        made = stream.group_by("k").over(rows=self.rows, range=span, order="id", name=STEP, **self.aggregates())
        attach_sinks(sinks, made, late=made.late)

    def judge(self, given: Given) -> None:
        """Each row that was not late once, with its frame."""
        wanted = Counter(
            one for rows in by_key(in_order(given.in_time(given.rows))).values() for one in self._framed(rows)
        )
        check_equal("rows of the tail", Counter(given.found(OUT, "id", *self.aggregates())), wanted)

    def _framed(self, rows: list[Row]) -> Iterator[Shown]:
        for at, row in enumerate(rows):
            if self.span is not None:
                frame = [one for one in rows if row.second - self.span <= one.second <= row.second]
            else:
                frame = rows[0 if self.rows is None else max(0, at + 1 - self.rows) : at + 1]
            total, most = sum(one.id for one in frame), max(one.n for one in frame)
            framed = (row.id, total, len(frame), most, frame[0].id)
            yield (*framed, rows[at - 1].id if at else None) if "before" in self.aggregates() else framed

    def counted(self, given: Given) -> Counter[int] | None:
        """Every row is emitted."""
        return given.ids(OUT)


@dataclass(frozen=True, slots=True)
class DistinctTail(Tail):
    """Each row once: those of one time, or of all that came so far."""

    timed: bool

    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to the stream."""
        del sources
        columns = ("k", "ts") if self.timed else ("k", "n")
        made = stream.select(*columns, name=f"{STEP}_columns").distinct(name=STEP)
        attach_sinks(sinks, made, late=made.late if self.timed else None)

    def judge(self, given: Given) -> None:
        """Late rows are all there, and of the others each once. Where idleness decides which were late, the late port tells."""
        if not self.timed:
            check_equal("rows of the tail", Counter(given.found(OUT, "k", "n")), Counter(self._kinds(given.rows)))
            return
        late = Counter((k, second_of(ts)) for k, ts in given.found(LATE, "k", "ts"))
        known = given.watermarks
        every = Counter((row.k, row.second) for row in given.rows)
        if known is not None:
            wanted = Counter((row.k, row.second) for row in given.rows if row.second < known[row.id])
            check_equal("late rows of the tail", late, wanted)
        check_equal("late rows that never came", late - every, Counter())
        found = Counter((k, second_of(ts)) for k, ts in given.found(OUT, "k", "ts"))
        check_equal("rows of the tail", found, Counter((every - late).keys()))

    def _kinds(self, rows: Sequence[Row]) -> set[tuple[int, int]]:
        return {(row.k, row.n) for row in rows}
