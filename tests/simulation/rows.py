"""The rows of a simulation, and what oracles say about a row by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

SCHEMA: Final = {"id": "bigint", "k": "bigint", "ts": "timestamp", "n": "bigint"}
LATENESS_S: Final = 4
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


def second_of(time: datetime) -> int:
    """A time as the scenario counts it."""
    return int((time - _EPOCH).total_seconds())


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows by time, and those of one time by id."""
    return sorted(rows, key=lambda row: (row.second, row.id))


def late_of(partitions: Sequence[Sequence[Row]]) -> set[int]:
    """The ids of rows that are older than what their own partition has shown already."""
    late = set()
    for rows in partitions:
        newest: int | None = None
        for row in rows:
            if newest is not None and row.second < newest - LATENESS_S:
                late.add(row.id)
            newest = row.second if newest is None else max(newest, row.second)
    return late


def check_equal(what: str, got: object, wanted: object) -> None:
    """Raise unless both are the same."""
    if got != wanted:
        raise SimulationError(f"{what}: got {got}, wanted {wanted}")
