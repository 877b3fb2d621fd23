"""The journal of messages loses and doubles nothing that it has acknowledged, and its positions never change meaning."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from random import Random
from typing import get_args

import pytest

from fordstone.errors import DamagedError, GoneError, StorageError
from fordstone.storage.disk import Disk, FatalStorageError
from fordstone.storage.message_log import Message, MessageLog, MessageLogFullError, MessageReader, Messages, WhenFull
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

FOLDER = "p/n/journal/in"
SMALL = 400
"""Bytes of a segment: a few frames each."""


def messages(first: int, count: int) -> list[Message]:
    return [Message(b"value %d" % n, f"topic/{n % 2}", n * 1000, f"id{n}") for n in range(first, first + count)]


def opened(
    disk: Disk, *, bytes_max: int = 1 << 20, when_full: WhenFull = "wait", segment_bytes: int = SMALL
) -> MessageLog:
    return MessageLog(disk, FOLDER, bytes_max=bytes_max, when_full=when_full, segment_bytes=segment_bytes)


def rows(found: list[Messages]) -> list[tuple[int, Message]]:
    return [
        (some.first + number, Message(*columns))
        for some in found
        for number, columns in enumerate(zip(some.values, some.topics, some.times_us, some.ids, strict=True))
    ]


def read_all(log: MessageLog, position: int | None = None, *, count_max: int = 3) -> list[tuple[int, Message]]:
    reader = MessageReader(log, log.first if position is None else position)
    found: list[tuple[int, Message]] = []
    while some := reader.read(count_max):
        assert sum(len(one.values) for one in some) <= count_max
        found += rows(some)
    return found


def numbered(first: int, count: int) -> list[tuple[int, Message]]:
    return list(enumerate(messages(first, count), start=first))


def filled(disk: MemoryDisk, count: int, *, frame: int = 3) -> MessageLog:
    log = opened(disk)
    for first in range(0, count, frame):
        log.commit(messages(first, min(frame, count - first)))
    return log


# Reading


@pytest.mark.parametrize("count_max", [1, 2, 7, 1000])
def test_every_position_gives_exactly_what_follows(count_max: int) -> None:
    log = filled(MemoryDisk(), 50, frame=4)
    for position in range(51):
        assert read_all(log, position, count_max=count_max) == numbered(position, 50 - position)


def test_reading_stops_at_until_and_goes_on_from_there() -> None:
    log = filled(MemoryDisk(), 30, frame=4)
    reader = MessageReader(log, 5)
    assert rows(reader.read(100, 18)) == numbered(5, 13)
    assert reader.read(100, 18) == []
    assert rows(reader.read(100)) == numbered(18, 12)
    log.commit(messages(30, 2))
    assert rows(reader.read(100)) == numbered(30, 2)


def test_what_is_not_durable_is_not_read() -> None:
    log = filled(MemoryDisk(), 3)
    reader = MessageReader(log, 0)
    log.append(messages(3, 2))
    assert rows(reader.read(100)) == numbered(0, 3)
    assert reader.read(100) == []
    log.sync()
    assert rows(reader.read(100)) == numbered(3, 2)


def test_a_log_that_is_opened_again_goes_on_at_its_position() -> None:
    disk = MemoryDisk()
    first = filled(disk, 20)
    second = opened(disk)
    assert (second.id, second.end) == (first.id, 20)
    second.commit(messages(20, 5))
    assert read_all(opened(disk)) == numbered(0, 25)


def test_messages_larger_than_a_read_are_read() -> None:
    log = MessageLog(MemoryDisk(), FOLDER, bytes_max=1 << 26)
    large = [Message(bytes([n]) * (3 << 20)) for n in range(3)]
    for one in large:
        log.commit([one])
    assert [message for _, message in read_all(log)] == large


# Trimming and bounds


def test_trimming_removes_what_is_before_and_nothing_else() -> None:
    disk = MemoryDisk()
    log = filled(disk, 60)
    before = log.size_bytes
    log.trim(31)
    assert 0 < log.first <= 31
    assert log.size_bytes < before
    for one in (log, opened(disk)):
        assert read_all(one, 31) == numbered(31, 29)
        with pytest.raises(GoneError, match=r"begins with message \d+, and message 0 is to be read"):
            MessageReader(one, 0).read(1)
    log.trim(60)
    assert log.end == opened(disk).end == 60


def fill_up(log: MessageLog) -> None:
    while True:
        log.commit(messages(log.end, 3))


def test_a_full_journal_refuses_until_it_is_trimmed() -> None:
    log = opened(MemoryDisk(), bytes_max=4000)
    with pytest.raises(MessageLogFullError, match="is full"):
        fill_up(log)
    end = log.end
    assert log.size_bytes <= 4000
    assert read_all(log) == numbered(0, end)
    log.trim(end // 2)
    assert log.commit(messages(end, 3)) == end + 3
    assert read_all(log, end // 2) == numbered(end // 2, end + 3 - end // 2)


def test_a_large_batch_fits_when_all_before_it_was_processed() -> None:
    log = opened(MemoryDisk(), bytes_max=4000)
    log.commit([Message(bytes(1900))])
    log.trim(1)
    log.commit([Message(bytes(1900))])
    log.trim(2)
    assert log.commit([Message(bytes(1900))]) == 3
    with pytest.raises(StorageError, match="too large for the journal"):
        log.commit([Message(bytes(4000))])


def test_drop_newest_keeps_what_is_there_and_counts() -> None:
    disk = MemoryDisk()
    log = opened(disk, bytes_max=4000, when_full="drop_newest")
    for _ in range(100):
        log.commit(messages(log.end, 3))
    kept = log.end
    assert log.dropped == 300 - kept
    assert read_all(opened(disk)) == numbered(0, kept)


def test_drop_oldest_removes_what_was_never_read_and_counts() -> None:
    disk = MemoryDisk()
    log = opened(disk, bytes_max=4000, when_full="drop_oldest")
    log.commit(messages(0, 3))
    assert rows(MessageReader(log, 0).read(2)) == numbered(0, 2)
    for first in range(3, 300, 3):
        log.commit(messages(first, 3))
    log.close()
    again = opened(disk, bytes_max=4000, when_full="drop_oldest")
    for one in (again, opened(disk, bytes_max=4000)):
        found = read_all(one, 0)
        positions = [position for position, _ in found]
        gap = next(n for n, position in enumerate(positions) if n != position)
        assert gap >= 3  # what was read, and what shares its segment, is still there
        assert positions == [*range(gap), *range(positions[gap], 300)]
        assert log.dropped == positions[gap] - gap
        assert all(message == messages(position, 1)[0] for position, message in found)
    reader = MessageReader(again, 0)
    assert len(reader.read(1000, gap)[0].values) <= gap
    while reader.read(1000, gap):
        pass
    assert reader.position == gap


def test_positions_that_were_dropped_before_anything_was_read_are_passed_over() -> None:
    disk = MemoryDisk()
    for _ in range(2):
        log = opened(disk, bytes_max=4000, when_full="drop_oldest")
        for _ in range(100):
            log.commit(messages(log.end, 3))
        reader = MessageReader(opened(disk, bytes_max=4000), 0)
        assert rows(reader.read(1000)) == numbered(log.first, 100)[: reader.position - log.first]
        assert log.first > 0


def test_what_an_earlier_process_has_read_is_not_dropped() -> None:
    disk = MemoryDisk()
    log = opened(disk, bytes_max=4000, when_full="drop_oldest")
    for first in range(0, 30, 3):
        log.commit(messages(first, 3))
    assert read_all(log) == numbered(0, 30)
    again = opened(disk, bytes_max=4000, when_full="drop_oldest")
    for first in range(30, 300, 3):
        again.commit(messages(first, 3))
    assert again.dropped > 0
    assert read_all(again, 0, count_max=1)[:30] == numbered(0, 30)


# Groups


def test_callers_that_wait_together_share_a_sync() -> None:
    syncing, go_on = threading.Event(), threading.Event()

    class Slow(MemoryDisk):
        def fsync(self, path: str) -> None:
            if threading.current_thread() is not threading.main_thread():
                syncing.set()
                assert go_on.wait(30)
            super().fsync(path)

    disk = Slow()
    log = opened(disk, segment_bytes=1 << 16)
    threads = [threading.Thread(target=log.commit, args=([Message(b"first")],))]
    threads[0].start()
    assert syncing.wait(30)
    threads += [threading.Thread(target=log.commit, args=([Message(b"later")],)) for _ in range(20)]
    for thread in threads[1:]:
        thread.start()
    while log._end < 21:
        pass
    assert log.end == 0
    before = disk.counts["fsync"]
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert log.end == 21
    assert disk.counts["fsync"] - before <= 3
    assert [message.value for _, message in read_all(log)] == [b"first", *[b"later"] * 20]


def test_after_a_failed_sync_nothing_is_acknowledged_or_read() -> None:
    disk = MemoryDisk()
    log = filled(disk, 3)
    disk.fail_next("fsync", "sync")
    with pytest.raises(FatalStorageError):
        log.commit(messages(3, 1))
    for call in (log.check, log.sync, lambda: log.commit(messages(3, 1)), lambda: MessageReader(log, 0).read(1)):
        with pytest.raises(FatalStorageError, match="sync"):
            call()


def test_a_full_disk_takes_nothing_of_a_batch_and_the_next_one_has_its_positions() -> None:
    disk = MemoryDisk()
    log = filled(disk, 3)
    for fault in ("full", "read-only"):
        disk.fail_next("append", fault)
        with pytest.raises(StorageError):
            log.commit(messages(90, 2))
        end = log.end
        log.commit(messages(end, 2))
        assert read_all(log) == read_all(opened(disk)) == numbered(0, end + 2)


def test_a_closed_log_wakes_those_who_wait_for_room_and_refuses() -> None:
    log = opened(MemoryDisk())
    waiting = threading.Thread(target=log.wait_for_room, args=(60.0,))
    waiting.start()
    log.close()
    waiting.join(30)
    assert not waiting.is_alive()
    with pytest.raises(StorageError, match="is closed"):
        log.commit(messages(0, 1))


# Damage


def newest(disk: MemoryDisk) -> str:
    return f"{FOLDER}/{[name for name in disk.list(FOLDER) if name.endswith('.log')][-1]}"


def test_every_torn_end_is_cut_off_and_the_frames_before_it_stay() -> None:
    disk = MemoryDisk()
    log = filled(disk, 2)
    path, synced = newest(disk), disk.size(newest(disk))
    log.append(messages(2, 2))
    whole = disk.read(path)
    for size in range(synced, len(whole)):
        for tail in (b"", bytes(40)):
            disk.damage(path, whole[:size] + tail)
            again = opened(disk)
            assert again.end == 2
            again.commit(messages(2, 1))
            assert read_all(opened(disk)) == numbered(0, 3)


def test_every_flipped_byte_before_a_synced_frame_is_an_error_that_says_what_is_lost() -> None:
    disk = MemoryDisk()
    filled(disk, 4, frame=2)
    path = newest(disk)
    opened(disk).commit(messages(4, 1))
    whole = disk.read(path)
    last = len(whole) - len(disk.read(path)[whole.rfind(b"\xf5MF1") :])
    for at in range(last):
        disk.damage(path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError, match=r"00000\.log.*(messages from number|from number) \d"):
            opened(disk)


def test_damage_in_an_older_segment_is_found_when_it_is_read() -> None:
    disk = MemoryDisk()
    filled(disk, 60)
    path = f"{FOLDER}/{disk.list(FOLDER)[1]}"
    whole = disk.read(path)
    first = int(path[-24:-4])
    for cut in (whole[: len(whole) // 2], whole[:60] + b"x" + whole[61:], b""):
        disk.damage(path, cut)
        log = opened(disk)
        reader = MessageReader(log, 0)
        assert rows(reader.read(first)) == numbered(0, first)
        with pytest.raises(
            DamagedError, match=rf"{first:020}\.log is damaged at byte \d+: messages \d+ to \d+ were acknowledged"
        ):
            read_all(log, first)


def test_a_missing_segment_is_damage() -> None:
    disk = MemoryDisk()
    filled(disk, 60)
    disk.remove(f"{FOLDER}/{disk.list(FOLDER)[1]}")
    with pytest.raises(DamagedError, match=r"is damaged.*were acknowledged, and cannot be read"):
        read_all(opened(disk))


def test_nobody_can_send_a_message_that_looks_like_damage() -> None:
    other = filled(MemoryDisk(), 60)
    donor = MemoryDisk()
    opened(donor, segment_bytes=1 << 16).commit(messages(0, 1))
    log = opened(donor, segment_bytes=1 << 16)
    log.commit(messages(1, 50))
    stolen = donor.read(newest(donor))  # frames of another log, one of which says that 1 message was synced
    assert other.id != log.id
    disk = MemoryDisk()
    victim = opened(disk, segment_bytes=1 << 16)
    victim.append([Message(stolen)])
    path, whole = newest(disk), disk.read(newest(disk))
    disk.damage(path, whole[:40] + b"torn" + whole[44:])
    assert opened(disk).end == 0


# Power cuts


@dataclass
class Model:
    """What was appended, by position, and what must still be there."""

    written: dict[int, Message] = field(default_factory=dict)
    durable: int = 0
    trimmed: int = 0
    number: int = 0
    cuts: int = 0

    def next(self, count: int) -> list[Message]:
        made = messages(self.number, count)
        self.number += count
        return made

    def note(self, first: int, batch: list[Message]) -> None:
        for position in [position for position in self.written if position >= first]:
            del self.written[position]
        self.written |= dict(enumerate(batch, start=first))


def check_after_crash(log: MessageLog, model: Model) -> None:
    assert log.end >= model.durable
    assert log.first <= model.trimmed
    found = read_all(log, count_max=5)
    assert [position for position, _ in found] == list(range(log.first, log.end))
    for position, message in found:
        assert message == model.written[position]
    assert len({message.id for _, message in found}) == len(found)


@pytest.mark.parametrize("seed", range(150))
def test_power_cuts_lose_nothing_acknowledged_and_change_no_position(seed: int) -> None:
    rng, disk, model = Random(seed), MemoryDisk(), Model()
    for _ in range(8):
        disk.cut_after = rng.randint(0, 60)
        attempted: tuple[int, list[Message]] | None = None
        try:
            log = opened(disk)
            while True:
                match rng.randrange(8):
                    case 0:
                        log.sync()
                        model.durable = max(model.durable, log.end)
                    case 1 if model.durable > model.trimmed:
                        model.trimmed = rng.randint(model.trimmed, model.durable)
                        log.trim(model.trimmed)
                    case 2:
                        assert [message for _, message in read_all(log, model.trimmed)] == [
                            model.written[position] for position in range(model.trimmed, log.end)
                        ]
                        model.durable = max(model.durable, log.end)
                    case _:
                        batch = model.next(rng.randint(1, 4))
                        attempted = (log._end, batch)
                        model.note(*attempted)
                        log.append(batch)
        except PowerCut:
            model.cuts += 1
            if rng.getrandbits(2):
                disk.crash(rng)
            else:
                disk.kill()
        log = opened(disk)
        check_after_crash(log, model)
        model.durable = log.end
    assert model.cuts == 8


def test_every_policy_is_a_word_of_the_option() -> None:
    assert get_args(WhenFull) == ("wait", "drop_oldest", "drop_newest")
