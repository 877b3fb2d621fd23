"""One more step at the end of a random pipeline, with the oracle that judges it. The kinds stand in `*_tails`.

A tail hears which rows reached it in time, and works out row by row what must have come of them. Which rows were late is
known beforehand, unless partitions fall idle: then the late port tells, and each row must be there or in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.rows import Row, SimulationError, check_equal

from fordstone.api.stream import Stream
from fordstone.connectors.memory import MemorySink, memory

STEP: Final = "tail"
"""What the name of every step of a tail begins with."""
OUT: Final = "tail_out"
LATE: Final = "tail_late"
MORE: Final = "tail_more"
"""Final results, or time-outs."""
LETTERS: Final = "tail_letters"
"""The dead letters of the tail's function."""
TAIL_SINKS: Final = (OUT, LATE, MORE, LETTERS)
Sinks = Mapping[str, MemorySink]
Tuples = Counter[tuple[Any, ...]]


def _out_of_order(row: Row, watermark: int) -> bool:
    return row.second < watermark


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a tail is judged by."""

    rows: Sequence[Row]
    """Those of the stream that the tail is attached to."""
    by_source: Sequence[Sequence[Row]]
    """All rows of each source."""
    watermarks: Mapping[int, int] | None
    """By id: the second that a row is judged by (rule 6), of whatever source; None: it depends on when rows turned up."""
    places: Mapping[int, tuple[str, int]]
    """By id: the partition and the position that a row was read at."""
    epochs: Mapping[int, int]
    """By id: the epoch that a row was read in."""
    uneven: AbstractSet[int]
    """Epochs with more barriers than the one that ended them: attempts to seal them were given up."""
    sinks: Sinks

    def found(self, sink: str, *columns: str) -> list[tuple[Any, ...]]:
        """The rows that a sink has, in their order."""
        rows = self.sinks[sink].rows()
        return rows.select(columns).rows() if rows.width else []

    def ids(self, sink: str, column: str = "id") -> Counter[int]:
        """How often a sink has each id."""
        return Counter(one for (one,) in self.found(sink, column) if one is not None)

    def late_ids(
        self, rows: Sequence[Row], column: str = "id", is_late: Callable[[Row, int], bool] = _out_of_order
    ) -> frozenset[int]:
        """Those of `rows` that were late. They must be on the late port once, and if time alone says it, those and no others.

        `is_late`: whether a row is late for the step at a watermark.
        """
        late = self.ids(LATE, column)
        known = self.watermarks
        wanted = {row.id for row in rows if (row.id in late if known is None else is_late(row, known[row.id]))}
        check_equal(f"late rows of the tail, {column}", late, Counter(wanted))
        return frozenset(wanted)

    def in_time(
        self, rows: Sequence[Row], column: str = "id", is_late: Callable[[Row, int], bool] = _out_of_order
    ) -> list[Row]:
        """Those of `rows` that were not late."""
        late = self.late_ids(rows, column, is_late)
        return [row for row in rows if row.id not in late]


class Tail(ABC):
    """A branch of a pipeline that ends in sinks of its own, and what must be in them."""

    @property
    def goes_by_barriers(self) -> bool:
        """Whether what it gives, and not only when, depends on where barriers are."""
        return False

    @abstractmethod
    def attach(self, stream: Stream, sources: Sequence[Stream], sinks: Sinks) -> None:
        """Attach it to a stream, or to two sources."""

    @abstractmethod
    def judge(self, given: Given) -> None:
        """Judge an exactly-once run."""

    def counted(self, given: Given) -> Counter[int] | None:
        """How often each input row shows in what came out, for the weaker guarantees; None: that cannot be said."""
        del given
        return None

    def counts_max(self) -> int:
        """How often an input row may show if nothing is doubled."""
        return 1

    def judge_loosely(self, given: Given, *, least: bool) -> None:
        """Judge a run that may double rows (`least`), or may lose them."""
        counted = self.counted(given)
        if counted is None:
            return
        counted += given.ids(LATE)
        if least:
            missing = {row.id for row in given.rows} - counted.keys()
            if missing:
                raise SimulationError(f"the tail lost rows {sorted(missing)}")
            return
        doubled = {one: count for one, count in counted.items() if count > self.counts_max()}
        if doubled:
            raise SimulationError(f"the tail doubled rows {doubled}")


def attach_sinks(sinks: Sinks, out: Stream, *, late: Stream | None, more: Stream | None = None) -> None:
    """Let what a tail gives end in its sinks."""
    for name, stream in ((OUT, out), (LATE, late), (MORE, more)):
        if stream is not None:
            stream.sink(name, memory(sinks[name]))


def by_key(rows: Sequence[Row], key: Callable[[Row], Any] = lambda row: row.k) -> dict[Any, list[Row]]:
    """Rows of each key, in the order that they have."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found
