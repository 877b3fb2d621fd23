"""A source over a journal keeps the contract of the seam, replays exactly, and never mistakes another journal for its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from fordstone.connectors.base import ConnectorSpec, Home, Idleness, OpenContext, Source
from fordstone.connectors.files.rows import encoded
from fordstone.connectors.journal.source import (
    PARTITION,
    Feed,
    IfJournalLost,
    JournalOptions,
    JournalSource,
    MessageColumns,
    open_journal,
    received,
    topics,
)
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import ConfigError, SourceError
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.message_log import Message, MessageLog
from fordstone.testing.contracts.connector import SCHEMA, SourceContract, read_all
from fordstone.testing.memory_disk import MemoryDisk

SPEC = ConnectorSpec(kind="test", options={})
FOLDER = "p/n/journal/in"
WIDE = Schema.of({"n": "bigint", "topic": "string", "at": "timestamp"})


def columns(schema: Schema = SCHEMA) -> MessageColumns:
    return MessageColumns.of(schema, {}, format_name="json", time_unit="us", where="test")


def wide() -> MessageColumns:
    beside = {"topic": ("string", topics), "at": ("timestamp", received)}
    return MessageColumns.of(WIDE, beside, format_name="json", time_unit="us", where="test")


def source(
    log: MessageLog, *, bounded: bool = False, feed: Feed | None = None, lost: IfJournalLost = "stop"
) -> JournalSource:
    return JournalSource(log, columns(), bounded=bounded, where="source in: test", feed=feed, if_journal_lost=lost)


def rows(first: int, count: int) -> pl.DataFrame:
    numbers = range(first, first + count)
    return pl.DataFrame(
        {
            "device": [f"d{n % 3}" for n in numbers],
            "ts": [n * 1_000_000 for n in numbers],
            "temp": [n / 4 for n in numbers],
            "n": list(numbers),
        }
    ).cast(SCHEMA.polars)


def put(log: MessageLog, frame: pl.DataFrame) -> None:
    log.commit([Message(line) for line in encoded(frame, "jsonl").splitlines()])


class TestJournal(SourceContract):
    partitions_min = 1
    bad: tuple[bytes, ...] = ()

    def fill(self, place: Path) -> ConnectorSpec:
        self.log = MessageLog(MemoryDisk(), FOLDER, segment_bytes=700)
        for first in range(0, 50, 6):
            put(self.log, rows(first, min(6, 50 - first)))
            self.log.commit([Message(value) for value in self.bad])
        return SPEC

    def expected(self) -> Sequence[pl.DataFrame]:
        return [rows(0, 50)]

    def grow(self, place: Path) -> pl.DataFrame | None:
        put(self.log, rows(100, 9))
        return rows(100, 9)

    def source(self, spec: ConnectorSpec, *, bounded: bool = True) -> Source:
        return source(self.log, bounded=bounded)


class TestJournalWithBadMessages(TestJournal):
    bad = (b"{", b"", b'{"temp":"warm"}', b'{"n":\n1,')


class TestJournalWithGaps(TestJournal):
    """Messages that were dropped change nothing of what is read before and after them."""

    def fill(self, place: Path) -> ConnectorSpec:
        self.log = MessageLog(MemoryDisk(), FOLDER, segment_bytes=700, bytes_max=8000, when_full="drop_oldest")
        for first in range(0, 600, 6):
            put(self.log, rows(first, 6))
        assert self.log.dropped > 0
        self.end = 600
        return SPEC

    def expected(self) -> Sequence[pl.DataFrame]:
        return [rows(self.log.first, self.end - self.log.first)]

    def grow(self, place: Path) -> pl.DataFrame | None:
        return None  # the suite has read all of it, so nothing may be dropped any more


# What is beside the value


def test_topics_and_times_are_columns_and_stay_with_their_rows() -> None:
    log = MessageLog(MemoryDisk(), FOLDER)
    log.commit([Message(b'{"n": %d}' % n if n != 1 else b"?", f"t/{n}", n * 1_000_000) for n in range(4)])
    opened = JournalSource(log, wide(), bounded=True, where="test")
    found = read_all(opened, PARTITION, WIDE)
    assert found.rows["topic"].to_list() == ["t/0", "t/2", "t/3"]
    assert found.rows["at"].dt.epoch("s").to_list() == [0, 2, 3]
    assert found.row_positions == [0, 2, 3]
    assert [(one.position, one.text) for one in found.rejected] == [(1, "?")]


def test_a_column_beside_the_value_must_be_declared_with_its_type() -> None:
    beside = {"topic": ("string", topics)}
    with pytest.raises(ConfigError, match=r"mqtt: column 'topic' is not in the schema. Declare it as 'string'"):
        MessageColumns.of(Schema.of({"n": "bigint"}), beside, format_name="json", time_unit="us", where="mqtt")
    with pytest.raises(ConfigError, match=r"mqtt: column 'topic' is declared as bigint"):
        MessageColumns.of(Schema.of({"topic": "bigint"}), beside, format_name="json", time_unit="us", where="mqtt")


# Which journal


def cut(log: MessageLog, position: int) -> dict[str, PartitionCut]:
    return {PARTITION: PartitionCut(position=position, identity=log.id)}


def test_a_checkpoint_of_this_journal_is_resumed() -> None:
    disk = MemoryDisk()
    log = MessageLog(disk, FOLDER)
    put(log, rows(0, 10))
    opened = source(MessageLog(disk, FOLDER), bounded=True)
    opened.restore(cut(log, 7))
    assert_frame_equal(read_all(opened, PARTITION, SCHEMA, position=7).rows, rows(7, 3))


def test_another_journal_and_an_older_copy_are_errors_that_say_what_to_do() -> None:
    disk = MemoryDisk()
    log = MessageLog(disk, FOLDER)
    put(log, rows(0, 10))
    for lost in ("stop", "continue"):
        with pytest.raises(
            SourceError, match=r"after 11 messages of a journal, and the one in p/n/journal/in has only 10"
        ):
            source(log, lost=lost).restore(cut(log, 11))
    other = MessageLog(MemoryDisk(), FOLDER)
    with pytest.raises(SourceError, match=r"is another one \(of 0 messages\).*\n.*if_journal_lost"):
        source(other).restore(cut(log, 10))


def test_a_lost_journal_is_continued_at_its_position_if_that_is_asked_for() -> None:
    disk = MemoryDisk()
    lost = MessageLog(MemoryDisk(), FOLDER)
    for _ in range(2):  # the second start finds the same checkpoint
        log = MessageLog(disk, FOLDER)
        source(log, lost="continue").restore(cut(lost, 40))
        assert (log.first, log.end) == (40, 40)
    put(log, rows(40, 3))
    log = MessageLog(disk, FOLDER)
    opened = source(log, bounded=True, lost="continue")
    opened.restore(cut(lost, 40))
    assert_frame_equal(read_all(opened, PARTITION, SCHEMA, position=40).rows, rows(40, 3))
    with pytest.raises(SourceError, match="is another one"):
        source(log, lost="continue").restore(cut(lost, 39))


# Acknowledgement and the feed


class Fed(Feed):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.problem: str | None = None
        self.error: SourceError | None = None

    def start(self) -> None:
        self.calls.append("start")

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def away(self) -> str | None:
        return self.problem

    def before_trim(self, position: int) -> None:
        self.calls.append(f"trim {position}")

    def close(self) -> None:
        self.calls.append("close")


def test_a_replay_takes_nothing_in_and_the_first_new_read_begins() -> None:
    log, feed = MessageLog(MemoryDisk(), FOLDER), Fed()
    put(log, rows(0, 10))
    opened = source(log, feed=feed)
    reader = opened.open(PARTITION, Position(0), with_positions=False)
    while reader.read(3, Position(8)):
        pass
    assert feed.calls == []
    reader.read(3)
    reader.read(3)
    opened.close()
    assert feed.calls == ["start", "close"]
    for bounded in (True, False):
        replayed = Fed()
        opened = source(MessageLog(MemoryDisk(), FOLDER), bounded=bounded, feed=replayed)
        opened.open(PARTITION, Position(0), with_positions=False).read(3, None if bounded else Position(1))
        opened.close()
        assert replayed.calls == []


def test_what_the_feed_failed_with_is_raised_where_it_is_read() -> None:
    feed = Fed()
    opened = source(MessageLog(MemoryDisk(), FOLDER), feed=feed)
    reader = opened.open(PARTITION, Position(0), with_positions=False)
    assert reader.read(1) is None
    feed.error = SourceError("the broker says no")
    with pytest.raises(SourceError, match="says no"):
        reader.read(1)


def test_while_the_sender_is_away_silence_means_nothing() -> None:
    feed = Fed()
    opened = source(MessageLog(MemoryDisk(), FOLDER), feed=feed)
    assert opened.idleness(PARTITION, Position(0)) is Idleness.EXPECTED
    feed.problem = "broker away"
    assert opened.idleness(PARTITION, Position(0)) is Idleness.UNKNOWN
    assert opened.trouble().away == "broker away"


def test_acknowledged_positions_are_trimmed_after_the_feed_was_asked() -> None:
    log, feed = MessageLog(MemoryDisk(), FOLDER, segment_bytes=300), Fed()
    for first in range(0, 60, 3):
        put(log, rows(first, 3))
    opened = source(log, feed=feed)
    opened.ack(cut(log, 31))
    assert feed.calls == ["trim 31"]
    assert 0 < log.first <= 31
    opened.ack({})
    assert feed.calls == ["trim 31"]


def test_a_failed_sync_stops_the_reader_although_there_is_nothing_new() -> None:
    disk = MemoryDisk()
    log = MessageLog(disk, FOLDER)
    reader = source(log).open(PARTITION, Position(0), with_positions=False)
    assert reader.read(1) is None
    disk.fail_next("fsync", "sync")
    with pytest.raises(FatalStorageError):
        put(log, rows(0, 1))
    with pytest.raises(FatalStorageError):
        reader.read(1)


def test_a_journal_needs_a_state_directory() -> None:
    with pytest.raises(ConfigError, match=r"keeps files in the state directory of a node.*Run this step at the edge"):
        open_journal(SPEC, JournalOptions(), OpenContext())


def test_each_step_has_a_journal_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    home = Home(disk=MemoryDisk(), directory="p/n")
    for step in ("a", "b"):
        log = open_journal(SPEC, JournalOptions(), OpenContext(home=home, step=step))
        assert (log.folder, log.end) == (f"p/n/journal/{step}", 0)
        put(log, rows(0, 3))
    assert not caplog.records
    open_journal(SPEC, JournalOptions(), OpenContext(home=home, step="c", keeps_state=False))
    assert "journal not kept" in caplog.text


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="journal_bytes_max=5 must be at least 67108864"):
        JournalOptions(journal_bytes_max=5).check_journal("mqtt")


def test_planned_reads_need_no_read() -> None:
    log = MessageLog(MemoryDisk(), FOLDER)
    put(log, rows(0, 10))
    opened = source(log)
    planned = opened.plan_read(PARTITION, Position(4), 3)
    assert (planned.position, planned.ended) == (7, False)
    assert opened.plan_read(PARTITION, Position(4), 100).position == 10
