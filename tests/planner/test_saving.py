"""Estimates of what crosses: stated with what they assume, and never better than they are."""

from __future__ import annotations

import pytest
from tests.planner.fleets import crossing_of, sunk

from fordstone import sliding, tumbling
from fordstone.lang.schema import Schema
from fordstone.planner.split import Saving, assumptions, column_bytes, describe_saving, partial_bytes, row_bytes, saving


def words(build) -> list[str]:
    crossing = crossing_of(build)
    found = saving(crossing.before, crossing.schema, partial=crossing.partial)
    return list(
        describe_saving(
            found,
            crossing.schema,
            filters="filter" in crossing.pushed.names,
            explodes="flat_map" in crossing.pushed.names,
        )
    )


def test_widths_are_those_of_values_in_memory():
    schema = Schema.of({"a": "boolean", "b": "int", "c": "decimal(9,2)", "d": "array<double>", "e": "timestamp"})
    assert [column_bytes(kind) for kind in schema.values()] == [1, 4, 16, 64, 8]
    assert row_bytes(schema) == 1 + 4 + 16 + 64 + 8 + 1  # and whether it is late


def test_a_full_sketch_is_counted_as_one():
    crossing = crossing_of(lambda stream: sunk(stream.group_by().agg(d="count_distinct(n)", q="median(temp)")))
    assert partial_bytes(crossing.schema) > 4096 + 3 * 200 * 8
    assert (
        "a partial row at most about"
        in words(lambda stream: sunk(stream.group_by().agg(d="count_distinct(n)", q="median(temp)")))[0]
    )


@pytest.mark.parametrize(("row", "crosses", "rows"), [(33, 56, 2), (33, 66, 3), (33, 65, 2), (100, 20, 1)])
def test_partial_rows_pay_from_the_first_number_of_rows_that_is_wider(row, crosses, rows):
    found = Saving(row=row, crosses=crosses, partial=True, collects=False)
    assert found.pays_from == rows
    assert found.share(rows) > 0
    assert rows == 1 or found.share(rows - 1) <= 0


def test_windows_share_by_window_and_running_aggregates_by_key_alone():
    running = words(lambda stream: sunk(stream.group_by("device").agg(n="count(*)")))
    assert running[1] == "always fewer bytes; with 100 rows per key and epoch, 99 % less"
    for window in (tumbling("1s"), sliding("4s", every="1s")):
        found = words(lambda stream, window=window: sunk(stream.group_by("device").window(window).agg(n="count(*)")))
        assert "rows per key, window and epoch" in found[1]


def test_a_sketch_that_is_not_full_pays_earlier():
    found = words(lambda stream: sunk(stream.group_by("device").agg(d="count_distinct(n)")))
    assert found[1].startswith("fewer bytes from 23 rows per key and epoch on at the latest; with 100 of them, ")


def test_where_rows_are_made_of_rows_no_number_is_given():
    found = words(lambda stream: sunk(stream.flat_map("tags AS tag").group_by("tag").agg(n="count(*)")))
    assert found[1:] == ["the number of rows that flat_map makes of one is unknown, so the saving cannot be estimated"]


def test_a_list_of_all_values_is_not_sold_as_a_sum():
    found = words(lambda stream: sunk(stream.group_by("device").agg(every="collect(temp)")))
    assert found[-1] == "partial rows hold every value, so they save little"


def test_rows_as_they_were_save_nothing_and_filters_save_what_is_not_known():
    assert words(sunk) == ["nothing: a row is about 185 bytes"]
    assert words(lambda stream: sunk(stream.filter("n > 0"))) == [
        "the rows that filters below the cut leave out: how many is not known here"
    ]
    assert words(lambda stream: sunk(stream.filter("n > 0").select("device", "n"))) == [
        "a row is about 25 bytes instead of 185: 86 % less",
        "and the rows that filters below the cut leave out: how many is not known here",
    ]


def test_what_is_assumed_is_said():
    assert assumptions([Schema.of({"a": "int"})]) == "estimated from the types of columns, before compression"
    assert assumptions([Schema.of({"a": "string", "b": "array<int>"})]) == (
        "estimated from the types of columns, before compression, text as 16 bytes, arrays and maps as 8 elements"
    )
