"""The journal returns every line that was synced, never a changed one, and says what it could not read."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from fordstone.errors import DamagedError, StorageError
from fordstone.storage.disk import FatalStorageError, OsDisk
from fordstone.storage.journal import Journal, JournalLines, Record, seal, unseal, unseal_as
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

PATH = "d/log.jsonl"
INT = msgspec.json.Decoder(int)


def numbers(journal: Journal) -> list[int]:
    return [record.decode(INT) for record in journal.read()]


def read(lines: JournalLines) -> tuple[list[int], int, int]:
    """The numbers, how many lines are damaged, and how many bytes are torn."""
    found = [record.decode(INT) for record in lines]
    return found, lines.damaged_lines, lines.torn_bytes


@pytest.fixture
def disk() -> MemoryDisk:
    made = MemoryDisk()
    made.make_dirs("d")
    return made


def write(disk: MemoryDisk, count: int) -> Journal:
    journal = Journal(disk, PATH)
    for number in range(count):
        journal.append(seal("n", number))
    return journal


# The frame


def test_a_value_is_read_back_as_its_kind() -> None:
    line = seal("cut", {"b": 1, "a": [None, "x"]})
    assert unseal(line) == Record("cut", b'{"a":[null,"x"],"b":1}')
    assert unseal_as("cut", line, msgspec.json.Decoder(dict[str, Any])) == {"b": 1, "a": [None, "x"]}
    with pytest.raises(DamagedError, match="it is a cut, not a sent"):
        unseal_as("sent", line, INT)
    with pytest.raises(DamagedError, match="checksum is right but the content is not"):
        unseal_as("cut", line, INT)


def test_every_flipped_bit_and_every_shorter_form_is_detected() -> None:
    line = seal("cut", {"epoch": 17})
    for at in range(len(line)):
        for bit in range(8):
            data = line[:at] + bytes([line[at] ^ (1 << bit)]) + line[at + 1 :]
            with pytest.raises(DamagedError):
                unseal(data)
        with pytest.raises(DamagedError):
            unseal(line[:at])


# The log


@pytest.mark.parametrize("real", [True, False])
def test_lines_are_read_back_in_order_also_by_the_next_process(tmp_path: Any, real: bool) -> None:
    disk: Any = OsDisk(tmp_path) if real else MemoryDisk()
    disk.make_dirs("d")
    journal = Journal(disk, PATH)
    assert numbers(journal) == []
    assert not journal.exists()
    journal.append(seal("n", 1), seal("n", 2))
    Journal(disk, PATH).append(seal("n", 3))
    assert numbers(journal) == [1, 2, 3]
    journal.rewrite([seal("n", 3)])
    journal.append(seal("n", 4))
    assert numbers(Journal(disk, PATH)) == [3, 4]
    assert journal.size_bytes == disk.size(PATH)


def test_a_torn_tail_is_removed_before_the_next_line_and_is_not_damage(disk: MemoryDisk) -> None:
    write(disk, 3)
    whole = disk.read(PATH)
    line = seal("n", 3) + b"\n"
    for torn in (line[:1], line[: len(line) // 2], line[:-2], bytes(len(line)), line[:40] + bytes(20) + b"\n"):
        disk.damage(PATH, whole + torn)
        assert read(Journal(disk, PATH).read()) == ([0, 1, 2], 0, len(torn))
        assert disk.read(PATH) == whole + torn  # reading changes nothing
        journal = Journal(disk, PATH)
        journal.append(seal("n", 9))
        assert read(journal.read()) == ([0, 1, 2, 9], 0, 0)
        assert journal.size_bytes == disk.size(PATH)


def test_a_line_that_lacks_only_its_newline_counts_and_the_next_one_is_not_glued_to_it(disk: MemoryDisk) -> None:
    write(disk, 2)
    disk.damage(PATH, disk.read(PATH)[:-1])
    journal = Journal(disk, PATH)
    disk.fail_next("append", "full")
    with pytest.raises(StorageError):
        journal.append(seal("n", 6))
    assert numbers(journal) == [0, 1]
    journal.append(seal("n", 7))
    journal.append(seal("n", 8))
    assert read(journal.read()) == ([0, 1, 7, 8], 0, 0)
    assert journal.size_bytes == disk.size(PATH)


def test_damage_in_the_middle_is_reported_and_hides_only_its_own_line(disk: MemoryDisk) -> None:
    write(disk, 3)
    whole = disk.read(PATH)
    second = len(whole) // 3
    for at in range(second, 2 * second):
        disk.damage(PATH, whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        found, damaged_lines, torn_bytes = read(Journal(disk, PATH).read())
        # A flipped newline joins the second line with the third.
        assert found == ([0, 2] if at < 2 * second - 1 else [0]), at
        assert damaged_lines or torn_bytes, at


def test_a_full_disk_leaves_no_part_of_a_line_in_front_of_the_next(disk: MemoryDisk) -> None:
    for before in (0, 2):
        disk.remove(PATH)
        journal = write(disk, before)
        disk.fail_next("append", "full")
        with pytest.raises(StorageError):
            journal.append(seal("n", 7))
        journal.append(seal("n", 8))
        assert read(journal.read()) == ([*range(before), 8], 0, 0)


def test_a_failed_sync_is_fatal(disk: MemoryDisk) -> None:
    journal = write(disk, 1)
    disk.fail_next("fsync", "sync")
    with pytest.raises(FatalStorageError):
        journal.append(seal("n", 1))
    with pytest.raises(FatalStorageError):
        journal.append(seal("n", 2))
    disk.crash(Random(1))
    assert numbers(Journal(disk, PATH)) in ([0], [0, 1])


@pytest.mark.parametrize("seed", range(60))
def test_synced_lines_survive_any_crash_and_of_the_rest_some_in_order(disk: MemoryDisk, seed: int) -> None:
    rng = Random(seed)
    synced: list[int] = []
    written: list[int] = []
    number = 0
    for _ in range(6):
        journal = Journal(disk, PATH)
        disk.cut_after = rng.randrange(12)
        try:
            for _ in range(8):
                if rng.random() < 0.2:
                    journal.rewrite([seal("n", one) for one in written])
                    synced = list(written)
                    continue
                number += 1
                sync = rng.random() < 0.7
                written = [*written, number]
                journal.append(seal("n", number), sync=sync)
                if sync:
                    synced = list(written)
        except PowerCut:
            pass
        disk.crash(rng)
        found, damaged_lines, _ = read(Journal(disk, PATH).read())
        assert found[: len(synced)] == synced
        assert found == [one for one in written if one in found]
        assert found == written[: len(found)] or damaged_lines
        written = synced = found


def test_bytes_from_elsewhere_are_parsed_alike() -> None:
    data = b"junk\n" + seal("n", 1) + b"\n" + b"half"
    for piece_bytes in range(1, len(data) + 1):
        pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
        assert read(JournalLines(pieces)) == ([1], 1, 4)
