"""Reserved positions survive restarts; damage that could repeat rows is an error."""

from __future__ import annotations

import pytest

from fordstone.edge.engine.source_task import REWRITE_AFTER_LINES, Reservations
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import CheckpointError, StorageError
from fordstone.testing.memory_disk import MemoryDisk

PATH = "p/n/reserved.jsonl"


def positions(disk: MemoryDisk) -> dict[str, int]:
    moved = Reservations(disk, "p/n").beyond("source", {"a": PartitionCut(position=5)})
    return {name: cut.position for name, cut in moved.items()}


def test_a_restart_begins_after_what_was_reserved() -> None:
    disk = MemoryDisk()
    reservations = Reservations(disk, "p/n")
    for position in range(1, 10):
        reservations.reserve("source", "a", position, position * 10)
    reservations.reserve("source", "b", 3, 30)
    reservations.reserve("other", "a", 99, 990)
    assert positions(disk) == {"a": 9, "b": 3}
    assert Reservations(disk, "p/n").time_us("source", 5) == 85


def test_a_torn_last_line_and_a_full_disk_lose_nothing_that_was_reserved() -> None:
    disk = MemoryDisk()
    reservations = Reservations(disk, "p/n")
    reservations.reserve("source", "a", 7, 70)
    disk.fail_next("append", "full")
    with pytest.raises(StorageError):
        reservations.reserve("source", "a", 8, 80)
    assert positions(disk) == {"a": 7}
    reservations.reserve("source", "b", 8, 80)
    disk.damage(PATH, disk.read(PATH) + b'{"digest":"0')
    assert positions(disk) == {"a": 7, "b": 8}


def test_a_damaged_line_is_an_error_because_rows_might_be_repeated() -> None:
    disk = MemoryDisk()
    reservations = Reservations(disk, "p/n")
    for name in ("a", "b"):
        reservations.reserve("source", name, 7, 70)
    data = bytearray(disk.read(PATH))
    data[data.index(b'"a"') + 1] ^= 1
    disk.damage(PATH, bytes(data))
    with pytest.raises(CheckpointError, match="1 lines are damaged"):
        Reservations(disk, "p/n")


def test_the_file_stays_short() -> None:
    disk = MemoryDisk()
    reservations = Reservations(disk, "p/n")
    for position in range(REWRITE_AFTER_LINES + 5):
        reservations.reserve("source", "a", position, position)
    assert disk.read(PATH).count(b"\n") < 10
    assert positions(disk) == {"a": REWRITE_AFTER_LINES + 4}
