from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from tests.hub.sending import ONE, checkpoint

from fordstone.errors import ConfigError, StorageError
from fordstone.hub.messages import Rejection
from fordstone.hub.store.log import HubLog, Transaction
from fordstone.hub.store.log_reader import DIGESTS_PER_QUERY, LogReader
from fordstone.hub.store.log_schema import CACHE_BYTES, READER_CACHE_BYTES, open_connection
from fordstone.hub.store.log_writer import LogWriter
from fordstone.hub.store.sqlite import SqliteStore


def opened(path: Path, **options: Any) -> HubLog:
    return HubLog(SqliteStore(path / "log.sqlite"), clock_us=lambda: 1_000, **options)


def add(text: str) -> Any:
    """A job that adds a node, and breaks a constraint if it is done twice."""

    def work(tx: Transaction) -> str:
        tx.log.grant_lease("p", text, holder="h", start="s", generation=ONE, resync=False, now_us=tx.now_us)
        found = tx.log.node("p", text)
        assert found is not None
        tx.log.add_checkpoint(found.node_id, checkpoint(1), replaced=())
        tx.changed.add(("stream", "p", text))
        return text

    return work


def names(log: HubLog) -> list[str]:
    return log.read(lambda log: [node.node for node in log.nodes()])


def held_up(log: HubLog) -> threading.Event:
    """Keep the writing thread busy, so that what comes meanwhile goes into one transaction."""
    go, begun = threading.Event(), threading.Event()

    def work(tx: Transaction) -> None:
        begun.set()
        assert go.wait(10)

    log.write(work)
    assert begun.wait(10)
    return go


def test_what_was_written_is_there_after_the_log_is_opened_again(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.write(add("a")).result(10)
    log.close()
    log = opened(tmp_path)
    log.write(add("b")).result(10)
    assert names(log) == ["a", "b"]
    log.close()


def test_what_was_answered_is_there_for_a_process_that_finds_the_log_unclosed(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.write(add("a")).result(10)
    for file in tmp_path.iterdir():
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes()) if file.is_file() else None
    again = opened(tmp_path / "copy")
    assert names(again) == ["a"]
    again.close()
    log.close()


def test_jobs_that_wait_together_are_one_transaction_and_a_refused_one_changes_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path)
    heard: list[frozenset[Any]] = []
    log.listen(heard.append)
    go = held_up(log)

    def refused(tx: Transaction) -> None:
        add("no")(tx)
        raise Rejection("gap", "no")

    outcomes = [log.write(add("a")), log.write(refused), log.write(add("b"))]
    broken = log.write(add("a"))
    go.set()
    assert [outcomes[0].result(10), outcomes[2].result(10)] == ["a", "b"]
    with pytest.raises(Rejection):
        outcomes[1].result(10)
    with pytest.raises(sqlite3.IntegrityError):
        broken.result(10)
    assert names(log) == ["a", "b"]
    assert heard == [frozenset({("stream", "p", "a"), ("stream", "p", "b")})]
    log.close()


def test_a_transaction_that_the_disk_refuses_fails_every_job_in_it_and_the_next_one_goes_on(tmp_path: Path) -> None:
    log = opened(tmp_path)
    go = held_up(log)

    def full(tx: Transaction) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    outcomes = [log.write(add("a")), log.write(full), log.write(add("b"))]
    go.set()
    for outcome in outcomes:
        with pytest.raises(Rejection, match="full") as raised:
            outcome.result(10)
        assert raised.value.status == 507
    log.write(add("c")).result(10)
    assert names(log) == ["c"]
    log.close()


def test_a_job_that_was_cancelled_while_it_waited_is_not_done(tmp_path: Path) -> None:
    log = opened(tmp_path)
    go = held_up(log)
    assert log.write(add("a")).cancel()
    go.set()
    log.write(add("b")).result(10)
    assert names(log) == ["b"]
    log.close()


def test_stored_blobs_are_recorded_with_the_next_transaction(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.record_blob("d", 7)
    assert log.blob_sizes(["d", "e"]) == {"d": 7}, "before it is recorded"
    assert log.write(lambda tx: tx.log.blob_sizes(["d", "e"])).result(10) == {"d": 7}
    assert log.blob_sizes(["d", "e"]) == {"d": 7}
    log.close()


def test_stored_blobs_are_recorded_even_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fordstone.hub.store.log.UNRECORDED_BLOBS_MAX", 3)
    log = opened(tmp_path)
    for digest in "abc":
        log.record_blob(digest, 1)
    log.close()
    again = opened(tmp_path)
    assert again.blob_sizes("abc") == {"a": 1, "b": 1, "c": 1}
    again.close()


def test_a_bug_in_a_listener_is_answered_and_the_log_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = opened(tmp_path)

    def broken(_: Any) -> None:
        raise ZeroDivisionError

    log.listen(broken)
    with pytest.raises(ZeroDivisionError):
        log.write(add("a")).result(10)
    log.unlisten(broken)
    log.write(add("b")).result(10)
    assert names(log) == ["a", "b"]
    assert "hub log failed" in caplog.text
    log.close()


def test_a_closed_log_refuses_and_says_to_try_again(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.close()
    log.close()
    with pytest.raises(Rejection) as raised:
        log.write(add("a")).result(10)
    assert raised.value.status == 503


def test_snapshots_cannot_write_and_every_transaction_is_synced(tmp_path: Path) -> None:
    with contextlib.closing(SqliteStore(tmp_path / "log.sqlite")) as store:
        with store.snapshot() as log, pytest.raises(sqlite3.OperationalError):
            LogWriter.remove_consumer(cast("LogWriter", log), "p", "c")
        db = store._db
        assert [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")] == ["wal", 2]


def test_each_connection_to_the_log_keeps_a_bounded_part_of_it_in_memory(tmp_path: Path) -> None:
    opened: list[sqlite3.Connection] = []

    def connect(path: Path) -> sqlite3.Connection:
        opened.append(open_connection(path))
        return opened[-1]

    with contextlib.closing(SqliteStore(tmp_path / "log.sqlite", open_file=connect)) as store:
        for _ in range(3):
            with store.snapshot(), store.snapshot():
                pass
        kib = [-one.execute("PRAGMA cache_size").fetchone()[0] for one in opened]
    assert kib == [CACHE_BYTES >> 10, READER_CACHE_BYTES >> 10, READER_CACHE_BYTES >> 10]


def test_every_number_of_blobs_is_looked_up_with_the_same_statement(tmp_path: Path) -> None:
    """Each connection keeps its last 128 statements: of 128 long lists of parameters they took 11 MiB."""
    texts: set[str] = set()

    class Recording(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            texts.add(sql)
            return super().execute(sql, *values)

    def connect(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Recording)

    def look_up(log: LogReader, count: int) -> None:
        wanted = [f"{number:064x}" for number in range(count)]
        assert log.blob_sizes(wanted) == dict.fromkeys(wanted[:2], 5)
        assert log.recorded_blobs(wanted) == set(wanted[:2])

    with contextlib.closing(SqliteStore(tmp_path / "log.sqlite", open_file=connect)) as store:
        with store.transaction() as writer:
            writer.record_blobs({f"{number:064x}": (5, 0) for number in range(2)})
        with store.snapshot() as log:
            look_up(log, 2)
            known = set(texts)
            for count in (3, 4, DIGESTS_PER_QUERY, 2 * DIGESTS_PER_QUERY + 1):
                look_up(log, count)
    assert texts - known == {"ROLLBACK"}


@pytest.mark.parametrize("version", [1, 99])
def test_a_log_of_another_version_is_left_alone(tmp_path: Path, version: int) -> None:
    opened(tmp_path).close()
    db = sqlite3.connect(tmp_path / "log.sqlite")
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(ConfigError, match=f"version {version}"):
        opened(tmp_path)


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="cannot be opened"):
        opened(tmp_path)
