"""Tables of lookups that are read again: each epoch finds the same rows when it is computed again, and nothing waits for a read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.connectors.postgres_place import database_of
from tests.services.postgres import PASSWORD, Postgres
from tests.waiting import until

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, files, memory, rows
from fordstone.connectors import postgres as table
from fordstone.connectors.refreshed_table import KeptTable
from fordstone.errors import PipelineError, SourceError
from fordstone.storage.disk import OsDisk
from fordstone.storage.remote import DiskRemote

SITES = {"device": "string", "site": "string"}


# What was in the table, by time


class Reads:
    """Stands in for a table whose content the test changes."""

    def __init__(self) -> None:
        self.value = 0
        self.done = 0
        self.wait = threading.Event()
        self.wait.set()

    def __call__(self) -> pl.DataFrame:
        value = self.value
        self.wait.wait(60)
        self.done += 1
        return pl.DataFrame({"n": [value]})


def kept(tmp_path: Path, reads: Reads, *, live_us: int | None = 0) -> KeptTable:
    made = KeptTable("step", DiskRemote(OsDisk(tmp_path)), "lookups/step", reads, every_us=10)
    if live_us is not None:
        made.begin(live_us)
    return made


def value(found: KeptTable, now_us: int) -> int:
    number: int = found.at(now_us)["n"].item()
    return number


def refreshed(found: KeptTable, reads: Reads, now_us: int, new: int) -> None:
    done, reads.value = reads.done, new
    found.refresh(now_us)
    until(lambda: reads.done > done, "read", seconds_max=20)
    until(lambda: not found._reading, "end of the read", seconds_max=20)


def test_a_table_is_due_again_when_its_interval_has_passed_also_without_rows(tmp_path: Path) -> None:
    reads = Reads()
    assert kept(tmp_path / "replay", reads, live_us=None).due_us() is None
    found = kept(tmp_path / "live", reads)
    refreshed(found, reads, 100, new=1)
    assert found.due_us() == 110
    refreshed(found, reads, 125, new=2)
    assert found.due_us() == 135
    found.close()
    assert found.due_us() is None


def test_what_was_found_at_a_time_is_found_again_also_after_a_restart(tmp_path: Path) -> None:
    reads = Reads()
    found = kept(tmp_path, reads)
    assert value(found, 0) == 0
    assert value(found, 100) == 0
    refreshed(found, reads, 100, new=1)
    assert value(found, 100) == 0, "a subtask has looked rows up at this time already"
    assert value(found, 101) == 1
    assert value(found, 200) == 1
    refreshed(found, reads, 200, new=2)
    assert [value(found, now_us) for now_us in (0, 100, 150, 200, 201)] == [0, 0, 1, 1, 2]
    again = kept(tmp_path, reads, live_us=None)
    assert [value(again, now_us) for now_us in (0, 100, 150, 200, 201)] == [0, 0, 1, 1, 2]


def test_two_reads_between_two_barriers_leave_the_second_also_after_a_restart(tmp_path: Path) -> None:
    reads = Reads()
    found = kept(tmp_path, reads)
    assert [value(found, now_us) for now_us in (0, 100)] == [0, 0]
    refreshed(found, reads, 100, new=1)
    refreshed(found, reads, 110, new=2)
    assert value(found, 150) == 2
    assert value(kept(tmp_path, reads), 150) == 2
    assert len(list((tmp_path / "lookups/step").iterdir())) == 2


def test_it_is_read_again_after_the_interval_and_not_before_or_while_epochs_are_computed_again(tmp_path: Path) -> None:
    reads = Reads()
    found = kept(tmp_path, reads, live_us=None)
    assert value(found, 100) == 0
    found.refresh(200)
    assert reads.done == 1, "recorded epochs are computed again"
    found.begin(200)
    found.refresh(109)
    assert reads.done == 1
    refreshed(found, reads, 110, new=1)
    found.refresh(119)
    assert reads.done == 2
    refreshed(found, reads, 120, new=2)
    assert (value(found, 200), value(found, 201)) == (0, 2), "not before the epochs that are recorded"


def test_nothing_waits_for_a_read_and_one_that_ends_after_the_engine_changes_nothing(tmp_path: Path) -> None:
    reads = Reads()
    found = kept(tmp_path, reads)
    assert value(found, 0) == 0
    reads.wait.clear()
    reads.value = 1
    found.refresh(100)
    assert value(found, 300) == 0
    assert found._reading
    found.close()
    reads.wait.set()
    until(lambda: not found._reading, "end of the read")
    assert value(kept(tmp_path, reads), 400) == 0


def test_a_content_that_is_the_same_is_not_kept_twice_and_those_that_are_not_needed_go(tmp_path: Path) -> None:
    reads = Reads()
    found = kept(tmp_path, reads)
    value(found, 0)
    for now_us in (100, 200, 300, 400):
        value(found, now_us)
        refreshed(found, reads, now_us, new=now_us // 200)
    files_there = list((tmp_path / "lookups/step").iterdir())
    assert len(files_there) == 3
    found.ack(250)
    assert [value(found, now_us) for now_us in (250, 401)] == [1, 2]
    assert len(list((tmp_path / "lookups/step").iterdir())) == 2
    with pytest.raises(SourceError, match="has to be computed again is gone"):
        found.at(100)


# In pipelines, with a table of PostgreSQL


@pytest.fixture
def place(postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., None], str]:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    dsn = database_of(postgres, tmp_path)

    def run(*statements: str) -> None:
        postgres.execute(*statements, database=dsn.split("dbname=")[1].split()[0])

    run("CREATE TABLE devices (device text, site text)", "INSERT INTO devices VALUES ('a', 'north')")
    return run, dsn


def looked_up(source: Any, dsn: str, out: Any, **options: Any) -> Pipeline:
    pipeline = Pipeline("refreshed", **options)
    stream = pipeline.source("rows", source, schema={"device": "string", "n": "bigint"})
    stream.lookup(table("devices", dsn), on="device", schema=SITES, refresh="1ms").sink("out", out)
    return pipeline


def test_rows_find_what_the_table_has_since(
    place: tuple[Callable[..., None], str], caplog: pytest.LogCaptureFixture
) -> None:
    run, dsn = place
    source, found = MemorySource(live=True), MemorySink()
    source.add_partition()
    sent = [0]

    def send_until(met: Callable[[], bool], what: str) -> None:
        def try_it() -> bool:
            sent[0] += 1
            source.append(0, [{"device": "a", "n": sent[0]}])
            return met()

        until(try_it, what, seconds_max=120, report=lambda: caplog.text[-3000:])

    def sites() -> list[str]:
        seen = found.rows()
        return seen.sort("n")["site"].to_list() if seen.height else []

    with looked_up(memory(source), dsn, memory(found)).start(interval="5ms") as going:
        send_until(lambda: "north" in sites(), "first site")
        run("UPDATE devices SET site = 'south'")
        send_until(lambda: "south" in sites(), "second site")
        # A table with two rows of a key, or none at all, is logged, and does not take the place of the one before.
        run("INSERT INTO devices VALUES ('a', 'twice')")
        send_until(lambda: "more than one row for device='a'" in caplog.text, "warning")
        run("DROP TABLE devices")
        send_until(lambda: "does not exist" in caplog.text, "warning")
        run("CREATE TABLE devices AS SELECT 'a' AS device, 'west' AS site")
        send_until(lambda: "west" in sites(), "third site")
        assert going.progress is None or going.progress.restarts == 0
    assert list(dict.fromkeys(sites())) == ["north", "south", "west"]
    assert all(record.levelno <= logging.WARNING for record in caplog.records)


def test_epochs_that_are_computed_again_find_what_was_in_the_table_then(
    place: tuple[Callable[..., None], str], tmp_path: Path
) -> None:
    run, dsn = place
    (tmp_path / "in").mkdir()
    out = tmp_path / "out"

    def pipeline() -> Pipeline:
        return looked_up(files(str(tmp_path / "in/*.jsonl")), dsn, files(str(out), format="jsonl"))

    def send(number: int) -> None:
        with (tmp_path / "in/a.jsonl").open("a") as file:
            file.write(f'{{"device": "a", "n": {number}}}\n')

    sent = 0
    with pipeline().start(state=str(tmp_path / "state"), interval="5ms", keep=100):
        for site in ("north", "south", "west", "east"):
            run(f"UPDATE devices SET site = '{site}'")
            while not ((out / "_stream.json").exists() and site in rows(out)["site"]):
                seen = rows(out).height if (out / "_stream.json").exists() else 0
                sent += 1
                send(sent)
                until(lambda seen=seen: (out / "_stream.json").exists() and rows(out).height > seen, "row")  # type: ignore[misc]
    before = rows(out)
    # The newest checkpoints are damaged, so that their epochs are computed again, from one at which rows found the first site.
    manifests = sorted((tmp_path / "state/refreshed/node/manifests").glob("*.json"))
    for manifest in manifests[1:]:
        manifest.write_bytes(b"{}")
    run("UPDATE devices SET site = 'elsewhere'")
    sent += 1
    send(sent)
    report = pipeline().run(state=str(tmp_path / "state"), bounded=True)
    assert report.outcome == "ended"
    assert report.resumed_from == int(manifests[0].stem)
    assert rows(out).height == sent
    assert rows(out).head(before.height).rows() == before.rows()
    assert before["site"].n_unique() == 4
    # The first epoch of a start finds what the last one before left.
    assert rows(out)["site"][-1] == "east"


def test_refresh_is_refused_where_it_is_not_possible_and_explained_where_it_is(place: Any) -> None:
    pipeline = looked_up(memory([{"device": "a", "n": 1}]), place[1], memory(MemorySink()))
    assert "is read again every 1ms, and used from the next epoch on" in " ".join(pipeline.explain().split())
    with pytest.raises(PipelineError, match="Use mode='aligned'"):
        looked_up(memory([{"device": "a", "n": 1}]), place[1], memory(MemorySink()), mode="unaligned").plan()
