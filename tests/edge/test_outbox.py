"""The outbox on a disk that forgets what was not synced."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fordstone.edge.link.outbox import Found, Outbox
from fordstone.edge.link.owner import next_owner
from fordstone.errors import CheckpointError, StorageError
from fordstone.hub.messages import EpochEntry, StreamSegment
from fordstone.state.base import RunRef
from fordstone.storage.journal import seal
from fordstone.testing.memory_disk import MemoryDisk

HOME = "p/n"
PATH = f"{HOME}/outbox.jsonl"


def entry(epoch: int, *, size_bytes: int = 100, name: str | None = None) -> EpochEntry:
    digest = hashlib.sha256((name or str(epoch)).encode()).hexdigest()
    runs = (RunRef(digest, size_bytes, 1),) if size_bytes else ()
    return EpochEntry(epoch=epoch, streams={"s": StreamSegment(runs=runs, watermark_us=epoch)}, created_us=epoch)


def digest(epoch: int) -> str:
    return entry(epoch).streams["s"].runs[0].digest


def nothing(_: int) -> None:
    return None


def opened(disk: MemoryDisk, sealed: int = 0, find: Callable[[int], Found | None] = nothing, **options) -> Outbox:
    disk.make_dirs(HOME)
    outbox = Outbox(disk, HOME, **{"bytes_max": 1 << 30} | options)
    outbox.begin(sealed, find)
    return outbox


def waiting(outbox: Outbox) -> list[int]:
    return [one.epoch for one in outbox.oldest(10**6)]


def test_what_was_added_is_there_after_a_power_cut():
    disk = MemoryDisk()
    outbox = opened(disk)
    for epoch in (1, 2, 3):
        outbox.add(entry(epoch))
    disk.crash(Random(1))
    again = opened(disk, sealed=3)
    assert again.oldest(9) == tuple(entry(epoch) for epoch in (1, 2, 3))
    assert again.held() == {digest(1), digest(2), digest(3)}
    assert (again.epochs, again.size_bytes, again.sent, again.newest) == (3, 300, 0, 3)


def test_what_was_marked_is_gone_for_good_and_its_runs_are_let_go():
    disk = MemoryDisk()
    outbox = opened(disk)
    for epoch in (1, 2, 3):
        outbox.add(entry(epoch))
    outbox.mark(2)
    assert outbox.held() == {digest(3)}
    disk.crash(Random(1))
    again = opened(disk, sealed=3)
    assert (waiting(again), again.sent) == ([3], 2)


def test_an_epoch_is_added_once_and_never_after_the_hub_has_it():
    outbox = opened(MemoryDisk())
    outbox.add(entry(1))
    outbox.add(entry(1, name="other"))
    assert outbox.oldest(9) == (entry(1),)
    outbox.mark(1)
    outbox.add(entry(1))
    assert outbox.epochs == 0


def test_a_gap_is_a_mistake_of_ours():
    with pytest.raises(AssertionError):
        opened(MemoryDisk()).add(entry(2))


def test_a_run_that_two_epochs_share_is_held_until_both_are_gone():
    outbox = opened(MemoryDisk())
    outbox.add(entry(1, name="same"))
    outbox.add(entry(2, name="same"))
    outbox.mark(1)
    assert len(outbox.held()) == 1
    outbox.mark(2)
    assert not outbox.held()


def test_the_last_epoch_that_a_crash_kept_out_is_found_again():
    disk = MemoryDisk()
    opened(disk).add(entry(1))
    again = opened(disk, sealed=2, find=lambda epoch: Found(entry(epoch), exact=True))
    assert waiting(again) == [1, 2]


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_damaged_line_is_found_again_and_the_file_mended(line: int):
    disk = MemoryDisk()
    outbox = opened(disk)
    for epoch in (1, 2, 3):
        outbox.add(entry(epoch))
    lines = [one for one in disk.read(PATH).split(b"\n") if b'"entry"' in one]
    damaged = disk.read(PATH).replace(lines[line - 1], lines[line - 1].replace(b'"created_us"', b'"created_as"'))
    rewrite(disk, damaged)
    asked: list[int] = []

    def find(epoch: int) -> Found:
        asked.append(epoch)
        return Found(entry(epoch), exact=False)

    again = opened(disk, sealed=3, find=find)
    assert asked == [line]
    assert waiting(again) == [1, 2, 3]
    # Nobody can tell whether it is as it was, so it is not compared.
    assert again.digest(line) is None
    assert waiting(opened(disk, sealed=3)) == [1, 2, 3]


def test_a_damaged_line_that_cannot_be_found_again_is_an_error_that_says_what_to_do():
    disk = MemoryDisk()
    outbox = opened(disk)
    for epoch in (1, 2):
        outbox.add(entry(epoch))
    rewrite(disk, disk.read(PATH).replace(b'"epoch":1,', b'"epoch":8,'))
    with pytest.raises(CheckpointError, match=r"epoch 1 cannot be read(.|\n)*--take-over"):
        opened(disk, sealed=2)


def test_a_damaged_line_of_what_the_hub_has_does_not_matter():
    disk = MemoryDisk()
    outbox = opened(disk)
    for epoch in (1, 2):
        outbox.add(entry(epoch))
    outbox.mark(1)
    rewrite(disk, disk.read(PATH).replace(b'"created_us":1,', b'"created_us":7,'))
    assert waiting(opened(disk, sealed=2)) == [2]


def test_an_outbox_with_epochs_that_no_checkpoint_knows_is_an_error():
    disk = MemoryDisk()
    outbox = opened(disk)
    for epoch in (1, 2):
        outbox.add(entry(epoch))
    with pytest.raises(CheckpointError, match="not of one time"):
        opened(disk, sealed=1)


def test_a_lost_file_is_made_again_as_far_back_as_rows_are_kept():
    disk = MemoryDisk()
    again = opened(disk, sealed=9, find=lambda epoch: Found(entry(epoch), exact=True) if epoch > 6 else None)
    assert waiting(again) == [7, 8, 9]
    # Whether the hub has those before is for the hub to say.
    assert (again.sent, again.unsent_before) == (6, 0)


def test_a_directory_without_a_past_at_the_hub_owes_it_nothing_from_before():
    disk = MemoryDisk()
    assert opened(disk, sealed=5, fresh=True).unsent_before == 5
    again = opened(disk, sealed=5)
    assert (again.sent, again.unsent_before) == (5, 5)
    again.add(entry(6))
    again.mark(6)
    assert opened(disk, sealed=6).unsent_before == 5


def test_beginning_again_after_a_damaged_checkpoint_changes_nothing():
    disk = MemoryDisk()
    outbox = opened(disk)
    outbox.add(entry(1))
    outbox.begin(1, nothing)
    assert (waiting(outbox), outbox.size_bytes, len(outbox.held())) == ([1], 100, 1)


# The bound.


def test_a_full_outbox_refuses_before_the_seal_and_takes_more_when_the_hub_has_some():
    outbox = opened(MemoryDisk(), bytes_max=250)
    for epoch in (1, 2):
        outbox.make_room(100)
        outbox.add(entry(epoch))
    with pytest.raises(StorageError, match=r"outbox is full(.|\n)*--outbox-max"):
        outbox.make_room(100)
    outbox.mark(1)
    outbox.make_room(100)


def test_an_epoch_without_rows_always_fits_and_so_does_one_alone():
    outbox = opened(MemoryDisk(), bytes_max=50)
    outbox.make_room(1000)
    outbox.add(entry(1))
    outbox.make_room(0)


def test_the_last_epoch_before_a_stop_may_go_beyond_the_bound():
    outbox = opened(MemoryDisk(), bytes_max=100)
    outbox.add(entry(1))
    outbox.overrun = True
    outbox.make_room(100)


def test_dropping_takes_the_oldest_rows_and_leaves_their_epochs_and_times():
    disk = MemoryDisk()
    outbox = opened(disk, bytes_max=300, drops=True)
    for epoch in range(1, 6):
        outbox.make_room(100)
        outbox.add(entry(epoch))
    for box in (outbox, opened(disk, sealed=5, bytes_max=300, drops=True)):
        assert [len(one.streams["s"].runs) for one in box.oldest(9)] == [0, 0, 1, 1, 1]
        assert [one.streams["s"].watermark_us for one in box.oldest(9)] == [1, 2, 3, 4, 5]
        assert box.held() == {digest(3), digest(4), digest(5)}
        assert box.size_bytes == 300
        # If the hub has it with its rows after all, that is no disagreement.
        assert box.digest(1) is None
        assert box.digest(3) == entry(3).digest()


def test_rows_that_were_damaged_are_replaced_only_while_they_wait():
    disk = MemoryDisk()
    outbox = opened(disk)
    for epoch in (1, 2):
        outbox.add(entry(epoch))
    outbox.mark(1)
    outbox.replace(entry(1, name="again"))
    outbox.replace(entry(2, name="again"))
    for box in (outbox, opened(disk, sealed=2)):
        assert box.oldest(9) == (entry(2, name="again"),)
        assert len(box.held()) == 1


# The disk.


def test_a_full_disk_leaves_the_entry_out_and_it_can_be_added_again():
    disk = MemoryDisk()
    outbox = opened(disk)
    outbox.add(entry(1))
    refuse = Refusing(disk)
    refuse.on = True
    with pytest.raises(StorageError):
        outbox.add(entry(2))
    assert waiting(outbox) == [1]
    refuse.on = False
    outbox.add(entry(2))
    assert waiting(opened(disk, sealed=2)) == [1, 2]


def test_a_mark_that_could_not_be_written_lets_nothing_go():
    disk = MemoryDisk()
    outbox = opened(disk)
    outbox.add(entry(1))
    refuse = Refusing(disk)
    refuse.on = True
    with pytest.raises(StorageError):
        outbox.mark(1)
    assert outbox.held() == {digest(1)}
    assert outbox.sent == 0


def test_the_file_stays_small_while_everything_is_sent():
    disk = MemoryDisk()
    outbox = opened(disk, compact_bytes_min=2000)
    sizes = []
    for epoch in range(1, 200):
        outbox.add(entry(epoch))
        outbox.mark(epoch)
        sizes.append(disk.size(PATH))
    assert max(sizes) < 5000
    assert (opened(disk, sealed=199).sent, outbox.newest) == (199, 199)


def test_the_file_is_not_rewritten_while_the_hub_is_away():
    disk = MemoryDisk()
    outbox = opened(disk, compact_bytes_min=1000)
    sizes = []
    for epoch in range(1, 300):
        outbox.add(entry(epoch))
        sizes.append(disk.size(PATH))
    assert sizes == sorted(sizes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["add", "mark", "crash", "mark_all"]), max_size=60), st.integers(0, 1))
def test_whatever_happens_in_whatever_order_no_epoch_is_lost_before_it_is_marked(steps: list[str], small: int):
    disk = MemoryDisk()
    outbox, sealed, sent = opened(disk), 0, 0
    for step in steps:
        if step == "add":
            sealed += 1
            outbox.add(entry(sealed))
        elif step == "mark" and sent < sealed:
            sent += 1
            outbox.mark(sent)
        elif step == "mark_all":
            sent = sealed
            outbox.mark(sent)
        elif step == "crash":
            disk.crash(Random(1))
            outbox = opened(disk, sealed=sealed, compact_bytes_min=small * 500)
        assert waiting(outbox) == list(range(sent + 1, sealed + 1))
        assert outbox.held() == {digest(epoch) for epoch in range(sent + 1, sealed + 1)}


def test_days_without_the_hub_are_opened_in_seconds():
    disk = MemoryDisk()
    opened(disk)
    count = 30_000
    rewrite(disk, b"\n".join(seal("entry", entry(epoch)) for epoch in range(1, count + 1)))
    began = time.perf_counter()
    outbox = opened(disk, sealed=count)
    took_s = time.perf_counter() - began
    assert outbox.epochs == count
    # A tenth of three and a half days at an epoch a second; generous, for machines under load.
    assert took_s < 5


@pytest.mark.parametrize("fresh", [True, False])
def test_years_of_epochs_that_hold_nothing_for_the_hub_are_not_listed(fresh: bool):
    asked: list[int] = []

    def find(epoch: int) -> Found:
        asked.append(epoch)
        return Found(EpochEntry(epoch=epoch, streams={}, created_us=0), exact=False)

    disk = MemoryDisk()
    outbox = opened(disk, sealed=50_000_000, find=find, fresh=fresh)
    assert (outbox.epochs, outbox.sent, outbox.unsent_before) == (0, 50_000_000, 50_000_000)
    assert len(asked) == 1
    # After a restart it still knows.
    assert opened(disk, sealed=50_000_000).unsent_before == 50_000_000


def test_an_entry_is_looked_up_where_it_is():
    outbox = opened(MemoryDisk())
    for epoch in range(1, 6):
        outbox.add(entry(epoch))
    outbox.mark(2)
    assert [outbox.entry(epoch) for epoch in (0, 2, 3, 5, 6)] == [None, None, entry(3), entry(5), None]


# Who we are.


def test_the_incarnation_grows_with_every_start_and_the_name_stays():
    disk = MemoryDisk()
    first, second = next_owner(disk, HOME), next_owner(disk, HOME)
    disk.crash(Random(1))
    third = next_owner(disk, HOME)
    assert [first.incarnation, second.incarnation, third.incarnation] == [1, 2, 3]
    assert first.holder == second.holder == third.holder
    assert next_owner(MemoryDisk(), HOME).holder != first.holder


def test_a_damaged_owner_file_is_somebody_else_to_the_hub():
    disk = MemoryDisk()
    first = next_owner(disk, HOME)
    rewrite(disk, b"{}", f"{HOME}/owner.json")
    assert next_owner(disk, HOME).holder != first.holder


def test_entries_are_the_same_bytes_whoever_encodes_them():
    body = msgspec.json.encode(entry(1), order="deterministic")
    assert hashlib.sha256(body).hexdigest() == entry(1).digest()


def rewrite(disk: MemoryDisk, data: bytes, path: str = PATH) -> None:
    disk.remove(path)
    disk.create(path, data)
    disk.fsync(path)
    disk.fsync_dir(HOME)


class Refusing:
    """Makes appends to a disk fail while it is on, half-way through."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.on = False
        append = disk.append

        def refusing(path: str, data: bytes) -> None:
            if self.on:
                append(path, bytes(data)[: len(data) // 2])
                raise StorageError("the disk is full")
            append(path, data)

        disk.append = refusing  # type: ignore[method-assign, assignment]
