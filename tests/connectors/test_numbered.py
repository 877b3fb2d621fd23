"""Sources over numbered rows: what fits no schema, and rows that are removed. The contract runs in docs/how-to/connector.md."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from fordstone.connectors.base import SourceOptions
from fordstone.connectors.numbered import NumberedRow, NumberedSource
from fordstone.errors import SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import PartitionId, Position
from fordstone.testing.contracts.connector import read_all

ONE = PartitionId("one")
SCHEMA = Schema.of({"name": "string", "n": "int", "at": "timestamp"})


class Table(NumberedSource):
    """Rows in memory, by their numbers."""

    def __init__(self, rows: dict[int, tuple[Any, ...]], *, bounded: bool = True) -> None:
        super().__init__(SourceOptions(schema=SCHEMA, bounded=bounded))
        self.table = rows

    def partitions(self) -> Sequence[PartitionId]:
        return [ONE]

    def end(self, partition: PartitionId) -> int:
        return max(self.table, default=-1) + 1

    def rows(self, partition: PartitionId, first: int, end: int, rows_max: int) -> Sequence[NumberedRow]:
        numbers = sorted(number for number in self.table if first <= number < end)
        return [(number, *self.table[number]) for number in numbers[:rows_max]]


def row(n: Any) -> tuple[Any, ...]:
    return ("a", n, 1_000_000)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_row_that_does_not_fit_the_schema_is_rejected_and_takes_no_other_with_it(size: int) -> None:
    table = Table(
        {
            0: row(1),
            3: row("many"),
            4: row(1 << 40),
            5: row(None),
            9: (5, 1, 1),
            10: ("b", 2, datetime(1970, 1, 2, tzinfo=UTC)),
        }
    )
    found = read_all(table, ONE, SCHEMA, rows_max=size)
    assert found.rows["n"].to_list() == [1, None, 2]
    assert found.rows["at"].dt.epoch("s").to_list() == [1, 1, 86_400]
    assert found.row_positions == [0, 5, 10]
    assert [one.position for one in found.rejected] == [3, 4, 9]
    assert found.rejected[0].reason.startswith("row 3 does not fit the schema: ")
    assert "many" in found.rejected[0].text
    assert found.ended


def test_rows_may_have_gaps_between_their_numbers_and_be_none_at_all() -> None:
    assert read_all(Table({}), ONE, SCHEMA).ended
    table = Table({5: row(1), 90: row(2)}, bounded=False)
    assert read_all(table, ONE, SCHEMA, rows_max=1).positions == [6, 91]
    assert table.plan_read(ONE, Position(0), 1).position == 6


def test_rows_that_are_removed_while_a_read_of_them_is_planned_are_an_error() -> None:
    table = Table({number: row(number) for number in range(5)}, bounded=False)
    planned = table.plan_read(ONE, Position(0), 5).position
    table.table = {number: row(number) for number in range(3)}
    with pytest.raises(SourceError, match="one: row 4 was there when this read was planned, and is gone"):
        read_all(table, ONE, SCHEMA, until=planned)
