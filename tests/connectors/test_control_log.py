"""The folder of a control table: prefixes after crashes, damage, compaction, and reading from any version."""

from __future__ import annotations

from random import Random
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tests.connectors.control_hub import GONE, KEYS, SCHEMA, Table, applied, as_table, control_rows
from tests.examples import examples

from fordstone.connectors.control import COMPACT_FILES_MAX, COMPACT_FILES_MIN, ControlLog, changes_between
from fordstone.errors import SourceError, StorageError
from fordstone.lang.schema import Schema
from fordstone.operators.base import OP
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

FOLDER = "p/n/control/limits"
versions_of = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([1.0, 2.0, -0.0, 0.0, None, GONE])), max_size=24
)


def opened(disk: MemoryDisk, schema: Schema = SCHEMA) -> ControlLog:
    return ControlLog(disk, FOLDER, schema=schema, keys=KEYS)


def tables_of(versions: list[dict[str, Any]]) -> list[Table]:
    tables: list[Table] = [{}]
    for rows in versions:
        tables.append(applied(tables[-1], rows))
    return tables


def filled(disk: MemoryDisk, versions: list[dict[str, Any]]) -> ControlLog:
    log = opened(disk)
    for number, rows in enumerate(versions, 1):
        log.add(number, control_rows(rows), chain="")
    return log


@examples(150)
@given(versions=versions_of, cut_after=st.integers(0, 120), seed=st.integers(0, 2**32), compact_at=st.integers(0, 24))
def test_a_crash_at_any_point_keeps_a_prefix_with_all_that_was_stored(versions, cut_after, seed, compact_at):
    disk, tables = MemoryDisk(), tables_of(versions)
    stored = 0
    log = opened(disk)
    disk.cut_after = disk.changes + cut_after
    try:
        for number, rows in enumerate(versions, 1):
            log.add(number, control_rows(rows), chain="")
            stored = number
            if number == compact_at:
                log.compact(number)
    except PowerCut:
        pass
    disk.crash(Random(seed))
    again = opened(disk)
    assert stored <= again.newest <= min(stored + 1, len(versions))
    assert as_table(again.table()) == tables[again.newest]
    # And it goes on from there, as if nothing had happened.
    for number in range(again.newest + 1, len(versions) + 1):
        again.add(number, control_rows(versions[number - 1]), chain="")
    assert as_table(opened(disk).table()) == tables[-1]


@examples(60)
@given(versions=versions_of.filter(len), data=st.data())
def test_reading_from_every_version_gives_what_follows_however_it_is_cut(versions, data):
    log, tables = filled(MemoryDisk(), versions), tables_of(versions)
    position = data.draw(st.integers(0, len(versions)))
    until = data.draw(st.none() | st.integers(position, len(versions)))
    table, stands = tables[position], position
    while (found := log.read(stands, data.draw(st.integers(1, 5)), until)) is not None:
        assert found.position > stands
        stands = found.position
        for device, threshold, op in found.frame.rows():
            table = applied(table, {device: threshold if op == "upsert" else GONE})
    assert stands == (len(versions) if until is None else until)
    assert table == tables[stands]


def test_compaction_keeps_the_table_and_what_may_still_be_read():
    versions = [{"a": float(n), "b": GONE if n % 2 else 1.0} for n in range(1, 41)]
    disk = MemoryDisk()
    log, tables = filled(disk, versions), tables_of(versions)
    log.compact(COMPACT_FILES_MIN - 1)
    assert log.files == 40
    log.compact(30)
    assert log.files == 11
    for one in (log, opened(disk)):
        assert as_table(one.table()) == tables[-1]
        whole = one.read(0, 1)
        assert whole is not None
        assert whole.position == 30
        assert as_table(whole.frame) == tables[30]
        assert set(whole.versions.to_list()) == {30}
        rest = one.read(30, 1000)
        assert rest is not None
        assert rest.position == 40
        with pytest.raises(SourceError, match="what follows version 7 is gone"):
            one.read(7, 1000)
        with pytest.raises(SourceError, match="version 12 is needed again and was compacted"):
            one.read(0, 1000, until=12)


def test_a_large_table_is_not_written_again_for_a_few_rows():
    log = opened(MemoryDisk())
    log.begin_at(1, control_rows({f"d{number}": 1.0 for number in range(1000)}), chain="")
    for version in range(2, 2 + COMPACT_FILES_MAX):
        log.add(version, control_rows({"d0": float(version)} if version > 3 else {"x": 1.0}), chain="")
        log.compact(version)
        if version in {40, 200}:
            assert log.files == version
    assert log.files < COMPACT_FILES_MAX
    assert as_table(log.table())["d0"] == COMPACT_FILES_MAX + 1.0


@pytest.mark.parametrize("torn", [b"", b"\0" * 300, None])
def test_a_damaged_version_is_cut_off_with_all_that_comes_after_it(torn, caplog):
    disk = MemoryDisk()
    versions = [{"a": float(n)} for n in range(1, 7)]
    filled(disk, versions)
    (name,) = [name for name in disk.list(FOLDER) if name.startswith("000000000004-")]
    if torn is None:
        disk.remove(f"{FOLDER}/{name}")
    else:
        disk.damage(f"{FOLDER}/{name}", torn)
    again = opened(disk)
    assert again.newest == 3
    assert as_table(again.table()) == {"a": 3.0}
    assert len(disk.list(FOLDER)) == 3
    assert "control version lost" in caplog.text
    again.add(6, control_rows({"a": 9.0}), chain="")
    assert opened(disk).newest == 6


def test_a_damaged_base_leaves_nothing():
    disk = MemoryDisk()
    log = filled(disk, [{"a": float(n)} for n in range(1, 25)])
    log.compact(20)
    (name,) = [name for name in disk.list(FOLDER) if name.startswith("base-")]
    disk.damage(f"{FOLDER}/{name}", b"rot")
    assert opened(disk).newest == 0
    assert disk.list(FOLDER) == []


def test_versions_of_another_plan_are_not_given_to_this_one():
    disk = MemoryDisk()
    filled(disk, [{"a": 1.0}])
    assert opened(disk, Schema.of({"device": "string", "threshold": "bigint"})).newest == 0


def test_a_full_disk_leaves_all_as_it_was_and_the_version_can_be_stored_later():
    disk = MemoryDisk()
    log = filled(disk, [{"a": 1.0}])
    for operation in ("create", "rename"):
        disk.fail_next(operation, "full" if operation == "create" else "read-only")
        with pytest.raises(StorageError):
            log.add(2, control_rows({"a": 2.0}), chain="")
        assert log.newest == opened(disk).newest == 1
    log.add(2, control_rows({"a": 2.0}), chain="")
    assert as_table(opened(disk).table()) == {"a": 2.0}


def test_a_version_that_is_needed_again_and_not_there_is_an_error():
    log = filled(MemoryDisk(), [{"a": 1.0}])
    assert log.read(1, 10, until=1) is None
    with pytest.raises(SourceError, match="version 3 is needed again and is not there"):
        log.read(1, 10, until=3)


def test_a_later_table_takes_the_place_of_all_that_is_there():
    disk = MemoryDisk()
    log = filled(disk, [{"a": 1.0}, {"b": 2.0}])
    log.begin_at(7, control_rows({"c": 3.0}), chain="")
    for one in (log, opened(disk)):
        assert (one.newest, one.files) == (7, 1)
        assert as_table(one.table()) == {"c": 3.0}
        assert one.read(7, 10) is None


@given(before=versions_of, after=versions_of)
def test_the_changes_between_two_tables_turn_one_into_the_other_and_name_only_what_differs(before, after):
    first, second = (control_rows(tables_of(versions)[-1]) for versions in (before, after))
    changes = changes_between(first, second, KEYS)
    log = opened(MemoryDisk())
    log.add(1, first, chain="")
    log.add(2, changes, chain="")
    assert_frame_equal(log.table().sort("device"), second.sort("device"))
    same = {row for row in first.rows() if repr(row) in {repr(one) for one in second.rows()}}
    assert not same & set(changes.rows())
    assert changes.schema == second.schema


def test_lists_and_nan_are_compared_whole():
    columns: dict[str, Any] = {"k": pl.String, "tags": pl.List(pl.String), "x": pl.Float64, OP: pl.String}
    before = pl.DataFrame(
        [("a", ["x"], float("nan"), "upsert"), ("b", None, 1.0, "upsert")], schema=columns, orient="row"
    )
    after = pl.DataFrame([("a", ["x"], float("nan"), "upsert"), ("b", [], 1.0, "upsert")], schema=columns, orient="row")
    assert changes_between(before, after, ["k"]).rows() == [("b", [], 1.0, "upsert")]
