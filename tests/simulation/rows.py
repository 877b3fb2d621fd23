"""The rows of a simulation, and what oracles say about a row by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

SCHEMA: Final = {"id": "bigint", "k": "bigint", "ts": "timestamp", "n": "bigint"}
LATENESS_S: Final = 4
LONG_AGO_S: Final = -(10**9)
_EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
ROWS_BEGIN_US: Final = int(_EPOCH.timestamp()) * 1_000_000


class SimulationError(AssertionError):
    """An invariant did not hold. Says which seed shows it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One input row; `second` is its event time, `n` how often it goes around a loop."""

    id: int
    k: int
    second: int
    n: int

    def record(self) -> tuple[int, int, datetime, int]:
        """As the source takes it."""
        return (self.id, self.k, _EPOCH + timedelta(seconds=self.second), self.n)


def partition_name(index: int) -> str:
    """How a source names one of its partitions."""
    return f"memory-{index:06d}"


def second_of(time: datetime) -> int:
    """A time as the scenario counts it."""
    return int((time - _EPOCH).total_seconds())


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows by time, and those of one time by id."""
    return sorted(rows, key=lambda row: (row.second, row.id))


def watermarks_of(partitions: Sequence[Sequence[Row]]) -> dict[int, int]:
    """By the id of a row: the second that the watermark of its own partition had come to when it came (rule 6)."""
    found = {}
    for rows in partitions:
        newest = LONG_AGO_S
        for row in rows:
            found[row.id] = newest - LATENESS_S
            newest = max(newest, row.second)
    return found


def late_of(partitions: Sequence[Sequence[Row]], open_s: int = 0) -> set[int]:
    """The ids of rows that are late for a step: `open_s` after a row's time, rounded up to a multiple, its window closes.

    0: the step needs order, and takes no row below its watermark.
    """
    watermarks = watermarks_of(partitions)
    rows = [row for rows in partitions for row in rows]
    if not open_s:
        return {row.id for row in rows if row.second < watermarks[row.id]}
    return {row.id for row in rows if row.second // open_s * open_s + open_s <= watermarks[row.id]}


def check_equal(what: str, got: object, wanted: object) -> None:
    """Raise unless both are the same."""
    if got != wanted:
        raise SimulationError(f"{what}: got {got}, wanted {wanted}")
