"""Fetching control tables: what is stored is always changes, whatever the hub still has and however often it is away."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.connectors.control_hub import GONE, KEYS, SCHEMA, FakeHub, Table, applied, as_table, control_rows
from tests.examples import examples

from fordstone.connectors.control import ControlLog
from fordstone.edge.link.control import FETCH_BACKOFF, WAIT_SECONDS, ControlFetcher, ControlFetching
from fordstone.epochs.manifest import PartitionCut
from fordstone.hub.messages import ControlPage, NodePosition
from fordstone.operators.base import OP
from fordstone.storage.disk import FatalStorageError
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

FOLDER = "p/n/control/t"
changes_of = st.dictionaries(st.sampled_from("abc"), st.sampled_from([1.0, 2.0, None, GONE]), min_size=1)


class Dies:
    """Dies at a failpoint."""

    def __init__(self, name: str, count: int = 1) -> None:
        self.name, self.left = name, count

    def hit(self, name: str) -> None:
        self.left -= name == self.name
        if self.left == 0:
            raise PowerCut(name)


def log_of(disk: MemoryDisk) -> ControlLog:
    return ControlLog(disk, FOLDER, schema=SCHEMA, keys=KEYS)


def fetcher_of(
    hub: FakeHub, log: ControlLog, *, taken: int = 0, failpoints: Any = None, chance: float = 1.0
) -> ControlFetcher:
    chain = next((one.chain for one in hub.versions if one.version == taken), "0" * 64)
    cut = PartitionCut(position=taken, identity=NodePosition(taken, chain).identity) if taken else None
    return ControlFetcher(hub, log, pipeline="p", control="t", taken=cut, failpoints=failpoints, chance=lambda: chance)


def problem_of(fetcher: ControlFetcher) -> str | None:
    return fetcher.problem


def up_to_date(fetcher: ControlFetcher, log: ControlLog, hub: FakeHub) -> None:
    for _ in range(100):
        if log.newest == hub.newest:
            return
        assert fetcher.step() == 0.0
    raise AssertionError("the hub's versions never came")


def test_versions_are_stored_in_order_and_asked_for_with_a_long_poll():
    hub, log = FakeHub(), log_of(MemoryDisk())
    hub.add({"a": 1.0, "b": 1.0})
    hub.add({"a": GONE})
    fetcher = fetcher_of(hub, log)
    assert fetcher.step() == 0.0
    assert (log.newest, log.files) == (2, 2)
    assert as_table(log.table()) == {"b": 1.0}
    assert fetcher.step() == 0.0
    assert hub.asked == [0, 2]
    assert hub.waits == [WAIT_SECONDS] * 2


@examples(100)
@given(
    versions=st.lists(changes_of, min_size=1, max_size=12),
    snapshots=st.sets(st.integers(0, 11)),
    polls=st.sets(st.integers(0, 11)),
    forgets=st.sets(st.integers(0, 11)),
    page_max=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    dies=st.none() | st.tuples(st.sampled_from(["control.fetched", "control.stored"]), st.integers(1, 5)),
    cut_after=st.none() | st.integers(0, 40),
)
def test_the_table_is_the_hubs_whatever_was_forgotten_and_wherever_the_node_died(
    versions, snapshots, polls, forgets, page_max, seed, dies, cut_after
):
    hub, disk, rng = FakeHub(page_max=page_max), MemoryDisk(), Random(seed)
    tables: list[Table] = [{}]
    log = log_of(disk)
    fetcher = fetcher_of(hub, log, failpoints=None if dies is None else Dies(*dies))
    disk.cut_after = None if cut_after is None else disk.changes + cut_after
    for number, changes in enumerate(versions):
        tables.append(applied(tables[-1], changes))
        whole = number in snapshots
        hub.add(tables[-1] if whole else changes, snapshot=whole)
        if whole and number in forgets:
            hub.forget_before(number + 1)
        if number in polls:
            try:
                fetcher.step()
            except PowerCut:
                disk.crash(rng)
                log = log_of(disk)
                fetcher = fetcher_of(hub, log)
            assert as_table(log.table()) == tables[log.newest]
    disk.cut_after = None
    fetcher = fetcher_of(hub, log)
    up_to_date(fetcher, log, hub)
    # What is stored is changes: read from any version that is here, they lead to the newest table.
    for start in [0, *(entry for entry in range(1, log.newest) if any_file(disk, entry))]:
        table, stands = tables[start], start
        while (found := log.read(stands, 3)) is not None:
            stands = found.position
            for device, threshold, op in found.frame.rows():
                table = applied(table, {device: threshold if op == "upsert" else GONE})
        assert table == tables[-1]


def any_file(disk: MemoryDisk, version: int) -> bool:
    return any(name.startswith(f"{version:012}-") for name in disk.list(FOLDER))


def test_a_node_that_joins_late_begins_with_the_snapshot():
    hub, log = FakeHub(), log_of(MemoryDisk())
    for number in range(50):
        hub.add({"a": float(number)})
    hub.add({"a": 50.0, "b": 1.0}, snapshot=True)
    hub.add({"c": 1.0})
    hub.forget_before(51)
    up_to_date(fetcher_of(hub, log), log, hub)
    assert log.files == 2
    assert as_table(log.table()) == {"a": 50.0, "b": 1.0, "c": 1.0}


def test_after_long_away_a_snapshot_becomes_upserts_and_deletes():
    hub, log = FakeHub(), log_of(MemoryDisk())
    hub.add({"a": 1.0, "b": 1.0, "c": 1.0})
    fetcher = fetcher_of(hub, log)
    up_to_date(fetcher, log, hub)
    hub.add({"x": 9.0})
    hub.add({"a": 1.0, "c": 2.0, "d": None}, snapshot=True)
    hub.forget_before(3)
    up_to_date(fetcher, log, hub)
    found = log.read(1, 100)
    assert found is not None
    assert found.position == 3
    assert sorted(found.frame.rows()) == [("b", 1.0, "delete"), ("c", 2.0, "upsert"), ("d", None, "upsert")]


def test_a_hub_that_is_away_is_asked_less_and_less_often_and_the_table_stays():
    hub, log = FakeHub(), log_of(MemoryDisk())
    hub.add({"a": 1.0})
    fetcher = fetcher_of(hub, log)
    up_to_date(fetcher, log, hub)
    hub.away = True
    waits = [fetcher.step() for _ in range(12)]
    assert waits[:3] == [0.2, 0.4, 0.8]
    assert waits[-1] == FETCH_BACKOFF.max_us / 1e6
    assert problem_of(fetcher) == "control table t: the hub is away"
    assert as_table(log.table()) == {"a": 1.0}
    hub.away = False
    hub.add({"a": 2.0})
    assert fetcher.step() == 0.0
    assert problem_of(fetcher) is None
    assert as_table(log.table()) == {"a": 2.0}


def unfit(name: str) -> pl.DataFrame:
    good = control_rows({"a": 5.0})
    return {
        "type": good.with_columns(pl.col("threshold").cast(pl.Int64)),
        "column": good.with_columns(more=1),
        "op": good.with_columns(pl.lit("merge").alias(OP)),
        "no_op": good.with_columns(pl.lit(None, dtype=pl.String).alias(OP)),
    }[name]


@pytest.mark.parametrize("what", ["type", "column", "op", "no_op"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_version_that_does_not_fit_is_refused_and_reported_and_the_table_stays(what, snapshot, caplog):
    hub, log = FakeHub(), log_of(MemoryDisk())
    hub.add({"a": 1.0})
    hub.add({"a": 2.0})
    hub.add_frame(unfit(what), snapshot=snapshot)
    fetcher = fetcher_of(hub, log)
    if not snapshot:
        assert fetcher.step() > 0.0
    else:
        # A node that asks from the start is given the snapshot alone.
        hub.versions[2:], later = [], hub.versions[2:]
        assert fetcher.step() == 0.0
        hub.versions += later
        assert fetcher.step() > 0.0
    assert log.newest == 2
    assert as_table(log.table()) == {"a": 2.0}
    assert "version 3 has" in (problem_of(fetcher) or "")
    assert "control table not fetched" in caplog.text
    # The center is put right: its table starts over.
    hub.add({"b": 3.0}, snapshot=True)
    assert fetcher.step() == 0.0
    assert problem_of(fetcher) is None
    assert as_table(log.table()) == {"b": 3.0}


def test_rows_without_a_key_are_left_out_and_the_last_of_a_key_counts():
    hub, log = FakeHub(), log_of(MemoryDisk())
    rows = pl.concat([control_rows({"a": 1.0}), control_rows({"a": 2.0})])
    hub.add_frame(pl.concat([rows, rows.head(1).with_columns(pl.lit(None, dtype=pl.String).alias("device"))]))
    up_to_date(fetcher_of(hub, log), log, hub)
    assert as_table(log.table()) == {"a": 2.0}


def test_a_hub_that_started_over_is_reported_and_nothing_is_stored():
    hub, log = FakeHub(), log_of(MemoryDisk())
    for number in range(3):
        hub.add({"a": float(number)})
    up_to_date(fetcher_of(hub, log), log, hub)
    fresh = FakeHub()
    fresh.add({"a": 9.0})
    fetcher = fetcher_of(fresh, log)
    assert fetcher.step() > 0.0
    assert "not one of its versions" in (problem_of(fetcher) or "")
    assert log.newest == 3


@pytest.mark.parametrize("left", [0, 2])
def test_a_folder_that_is_older_than_the_checkpoint_is_made_again_as_of_its_version(left):
    hub, tables = FakeHub(), [Table()]
    for number in range(1, 9):
        changes = {"a": float(number), f"x{number % 3}": GONE if number % 2 else 1.0}
        tables.append(applied(tables[-1], changes))
        hub.add(changes if number != 4 else tables[-1], snapshot=number == 4)
    log = log_of(MemoryDisk())
    for version in range(1, left + 1):
        log.add(version, control_rows({"a": float(version)}), chain=hub.versions[version - 1].chain)
    # As on another machine that goes on from this node's checkpoint.
    fetcher = fetcher_of(hub, log, taken=6)
    up_to_date(fetcher, log, hub)
    found = log.read(6, 100)
    assert found is not None
    table = tables[6]
    for device, threshold, op in found.frame.rows():
        table = applied(table, {device: threshold if op == "upsert" else GONE})
    assert table == tables[8] == as_table(log.table())


def test_without_what_lies_between_folder_and_checkpoint_nothing_is_guessed():
    hub, log = FakeHub(), log_of(MemoryDisk())
    for number in range(1, 9):
        hub.add({"a": float(number)}, snapshot=number == 8)
    hub.forget_before(8)
    fetcher = fetcher_of(hub, log, taken=5)
    assert fetcher.step() > 0.0
    assert "the hub does not have version 5" in (problem_of(fetcher) or "")
    assert log.newest == 0


def test_a_full_disk_is_waited_out_and_a_failed_sync_ends_it():
    hub, disk = FakeHub(), MemoryDisk()
    log = log_of(disk)
    hub.add({"a": 1.0})
    fetcher = fetcher_of(hub, log)
    disk.fail_next("create", "full")
    assert fetcher.step() > 0.0
    assert fetcher.step() == 0.0
    hub.add({"a": 2.0})
    disk.fail_next("fsync", "sync")
    with pytest.raises(FatalStorageError):
        fetcher.step()


def test_nothing_is_stored_once_it_was_stopped_although_the_hub_answers_later():
    asked, answered = threading.Event(), threading.Event()

    class Slow(FakeHub):
        def control_page(self, *given: Any, **more: Any) -> ControlPage:
            asked.set()
            assert answered.wait(30)
            return super().control_page(*given, **more)

    hub, disk = Slow(), MemoryDisk()
    hub.add({"a": 1.0})
    log = log_of(disk)
    fetching = ControlFetching([fetcher_of(hub, log)])
    fetching.start()
    assert asked.wait(30)
    fetching.stop()
    answered.set()
    for thread in fetching._threads:
        thread.join(30)
        assert not thread.is_alive()
    assert log.newest == 0
    fetching.check()


def test_what_ends_a_fetcher_is_raised_where_the_pipeline_runs():
    hub, disk = FakeHub(), MemoryDisk()
    hub.add({"a": 1.0})
    disk.fail_next("fsync", "sync", after=0)
    fetching = ControlFetching([fetcher_of(hub, log_of(disk))])
    fetching.start()
    for thread in fetching._threads:
        thread.join(30)
    with pytest.raises(FatalStorageError):
        fetching.check()
    fetching.stop()
