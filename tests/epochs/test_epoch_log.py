from __future__ import annotations

from typing import Any

from fordstone.epochs.epoch_log import DeliveryState, EpochLog, parse_epoch_log
from fordstone.epochs.manifest import encode_cut
from fordstone.storage.failpoint import NoFailpoints
from fordstone.testing.memory_disk import MemoryDisk

LOG = "log/epochs.jsonl"


def open_log(disk: MemoryDisk, **options: Any) -> Any:
    disk.make_dirs("log")
    return EpochLog(disk, "log", failpoints=NoFailpoints(), **options)


def record(log: Any, *cuts: Any, sealed_before: Any = False, needed_from: Any = 10**9) -> None:
    for cut in cuts:
        log.record(cut, sealed_before=sealed_before, needed_from=needed_from)


def test_cuts_are_found_by_another_reader(disk: MemoryDisk, build: Any) -> None:
    record(open_log(disk), build.cut(1), build.cut(2))
    assert open_log(disk).read().cuts == {1: build.cut(1), 2: build.cut(2)}


def test_a_torn_last_line_does_not_spoil_the_next_one(disk: MemoryDisk, build: Any) -> None:
    record(open_log(disk), build.cut(1))
    disk.append(LOG, encode_cut(build.cut(2))[:-9])
    record(open_log(disk), build.cut(2))
    content = open_log(disk).read()
    assert content.cuts == {1: build.cut(1), 2: build.cut(2)}
    assert content.damaged_lines == 0


def test_a_line_that_lacks_only_its_newline_counts(disk: MemoryDisk, build: Any) -> None:
    record(open_log(disk), build.cut(1))
    disk.damage(LOG, disk.read(LOG).rstrip(b"\n"))
    record(open_log(disk), build.cut(2))
    assert open_log(disk).read().cuts.keys() == {1, 2}


def test_a_second_try_of_an_epoch_takes_the_place_of_the_first(disk: MemoryDisk, build: Any) -> None:
    record(open_log(disk), build.cut(1), build.cut(2, 7), build.cut(3, 7))
    record(open_log(disk), build.cut(2, 8))
    assert open_log(disk).read().cuts == {1: build.cut(1), 2: build.cut(2, 8)}
    assert disk.read(LOG).count(b'"epoch":2') == 1


def test_rebuilding_writes_nothing_when_the_line_is_there_and_mends_it_when_not(disk: MemoryDisk, build: Any) -> None:
    log = open_log(disk)
    record(log, build.cut(1), build.cut(2), build.cut(3))
    before = disk.read(LOG)
    record(log, build.cut(2), sealed_before=True)
    assert disk.read(LOG) == before
    disk.damage(LOG, before.replace(b'"epoch":2', b'"epoch":9'))
    record(open_log(disk), build.cut(2), sealed_before=True)
    assert open_log(disk).read().cuts.keys() == {1, 2, 3}
    assert open_log(disk).read().damaged_lines == 0


def test_the_log_stays_within_its_bound_and_keeps_the_newest(disk: MemoryDisk, build: Any) -> None:
    log = open_log(disk, max_bytes=4096)
    for epoch in range(1, 400):
        record(log, build.cut(epoch))
        assert disk.size(LOG) <= 4096
    assert max(log.read().cuts) == 399
    assert sorted(log.read().cuts) == list(range(400 - len(log.read().cuts), 400))


def test_cuts_that_kept_checkpoints_need_stay_beyond_the_bound_without_endless_rewriting(
    disk: MemoryDisk, build: Any
) -> None:
    log = open_log(disk, max_bytes=1000)
    for epoch in range(1, 101):
        record(log, build.cut(epoch), needed_from=1)
    assert log.read().cuts.keys() == set(range(1, 101))
    assert disk.counts["rename"] < 10


def test_the_bound_holds_after_a_restart(disk: MemoryDisk, build: Any) -> None:
    for epoch in range(1, 100):
        record(open_log(disk, max_bytes=4096), build.cut(epoch))
    assert disk.size(LOG) <= 4096


def test_cuts_of_sealed_epochs_from_a_remote_win_over_what_was_tried_here(disk: MemoryDisk, build: Any) -> None:
    log = open_log(disk)
    record(log, build.cut(1), build.cut(2, 7))
    log.add([build.cut(2, 8), build.cut(3)])
    assert log.read().cuts == {1: build.cut(1), 2: build.cut(2, 8), 3: build.cut(3)}
    renames = disk.counts["rename"]
    log.add([build.cut(3)])
    assert disk.counts["rename"] == renames


def test_lines_of_rubbish_are_counted_and_passed_over(build: Any) -> None:
    data = b"\n".join([b"\x00" * 50, encode_cut(build.cut(4)), b"{}", b"\xff\xfe", encode_cut(build.cut(5))[:-1]])
    content = parse_epoch_log(data)
    assert content.cuts == {4: build.cut(4)}
    assert content.damaged_lines == 2, "one line, and all that follows the last whole one"


def test_an_epoch_is_known_as_sealed_by_its_line_or_by_the_cut_after_it(disk: MemoryDisk, build: Any) -> None:
    log = open_log(disk)
    assert log.read().sealed == 0
    record(log, build.cut(1))
    assert log.read().sealed == 0
    log.note_sealed(1)
    assert open_log(disk).read().sealed == 1
    record(log, build.cut(2), build.cut(3))
    assert open_log(disk).read().sealed == 2
    assert log.read().damaged_lines == 0


def test_what_was_noted_as_sealed_survives_rewriting_and_a_second_try_takes_none_of_it_back(
    disk: MemoryDisk, build: Any
) -> None:
    log = open_log(disk)
    record(log, build.cut(1), build.cut(2))
    log.note_sealed(2)
    record(log, build.cut(1, 7), sealed_before=True)
    assert open_log(disk).read().sealed == 2
    log.add([build.cut(1, 8)])
    assert open_log(disk).read().sealed == 2
    record(open_log(disk), build.cut(3, 7))
    record(open_log(disk), build.cut(3, 8))
    assert open_log(disk).read().sealed == 2


def test_a_full_disk_keeps_no_one_from_sealing(disk: MemoryDisk, build: Any) -> None:
    log = open_log(disk)
    record(log, build.cut(1))
    disk.room_bytes = disk.size(LOG) + 40
    log.note_sealed(1)
    disk.room_bytes = None
    record(log, build.cut(2))
    assert open_log(disk).read().cuts.keys() == {1, 2}


def test_a_damaged_log_is_kept_aside_and_mended_from_the_manifests(disk: MemoryDisk, build: Any) -> None:
    log = open_log(disk)
    copies: list[bytes] = []

    def keep_copy(path: str) -> None:
        copies.append(disk.read(path))

    record(log, build.cut(1), build.cut(2), build.cut(3))
    log.note_sealed(3)
    assert log.mend([build.cut(2), build.cut(3)], keep_copy) is None
    damaged = disk.read(LOG).replace(b'"epoch":2', b'"epoch":9')
    disk.damage(LOG, damaged)
    assert "1 of its lines cannot be read, 1 cuts" in log.mend([build.cut(2), build.cut(3)], keep_copy)
    assert copies == [damaged]
    content = open_log(disk).read()
    assert content.cuts == {epoch: build.cut(epoch) for epoch in (1, 2, 3)}
    assert (content.damaged_lines, content.sealed) == (0, 3)


def test_what_the_hub_has_is_sealed_and_survives_rewriting(disk: MemoryDisk, build: Any) -> None:
    log = open_log(disk)
    record(log, build.cut(1), build.cut(2))
    assert log.read().delivery is None
    log.note_delivery(DeliveryState(acknowledged=2, dropped=1))
    assert log.read().sealed == 2
    record(log, build.cut(1, 7), sealed_before=True)
    record(log, build.cut(3, 7))
    record(open_log(disk), build.cut(3, 8))
    content = open_log(disk).read()
    assert (content.delivery, content.sealed) == (DeliveryState(acknowledged=2, dropped=1), 2)
    lines = disk.read(LOG).split(b"\n")
    disk.damage(LOG, b"\n".join(lines[1:]))
    assert open_log(disk).read().delivery == DeliveryState(acknowledged=2, dropped=1), "it is written at both ends"
