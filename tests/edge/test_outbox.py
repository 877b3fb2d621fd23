"""The outbox on a disk that forgets what was not synced."""

from __future__ import annotations

import functools
import hashlib
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from fordstone.edge.link.outbox import ENTRY_BYTES, Outbox, empty_entry, entry_of
from fordstone.edge.link.owner import next_owner
from fordstone.epochs.epoch_log import DeliveryState
from fordstone.epochs.manifest import Cut, Manifest, Segment, SourceCut, encode_cut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError, StorageError
from fordstone.hub.messages import ENDED_US, EpochEntry
from fordstone.protocol.chain import CHAIN_START, chained
from fordstone.protocol.delivery import HubIsOlder, SyncState, reconcile
from fordstone.state.base import RunRef
from fordstone.storage.disk import PIECE_BYTES, OsDisk
from fordstone.storage.journal import seal
from fordstone.testing.memory_disk import MemoryDisk

HOME = "p/n"
PATH = f"{HOME}/epochs.jsonl"
WAITING = 4_000
PIECES_BYTES = 4 * PIECE_BYTES
"""What a file is read and written with, whatever its size."""


def cut(epoch: int, *, size_bytes: int = 100, name: str | None = None, stream: str | None = "s") -> Cut:
    digest = hashlib.sha256((name or str(epoch)).encode()).hexdigest()
    runs = (RunRef(digest, size_bytes, 1),) if size_bytes else ()
    segments = (Segment("sink", runs, stream=stream, watermark_us=epoch),)
    return Cut(epoch=epoch, sources={"in": SourceCut(partitions={})}, segments=segments, now_us=epoch)


def entry(epoch: int) -> EpochEntry:
    return entry_of(cut(epoch))


def digest(epoch: int) -> str:
    return entry(epoch).streams["s"].runs[0].digest


def chain(epoch: int) -> str:
    """The chain of what `seal` seals."""
    return functools.reduce(chained, (entry(one).digest() for one in range(1, epoch + 1)), CHAIN_START)


def mark(outbox: Outbox, epoch: int) -> None:
    outbox.mark(epoch, chain=outbox.chain_at(epoch) or "unknown", log_id="log")


class Node:
    """An outbox over the log of a store."""

    def __init__(self, disk: MemoryDisk | None = None, sealed: int = 0, *, log_bytes: int | None = None, **options):
        self.disk = disk or MemoryDisk()
        self.store = CheckpointStore(self.disk, pipeline="p", node="n")
        if log_bytes is not None:
            self.store.log._max_bytes = self.store.log._rewrite_above_bytes = log_bytes
        self.outbox = Outbox(self.store, **{"bytes_max": 1 << 30} | options)
        self.outbox.begin(sealed)

    def seal(self, *cuts: Cut | int) -> None:
        for one in cuts:
            record = self.outbox.continuing(cut(one) if isinstance(one, int) else one)
            self.outbox.make_room(record)
            self.store.log.record(record, sealed_before=False, needed_from=10**9)
            self.outbox.add(record)

    def waiting(self) -> list[int]:
        return [one.epoch for one in self.outbox.oldest(10**6)]


# What is sent.


def test_only_segments_with_a_stream_are_sent():
    both = msgspec.structs.replace(cut(3), segments=(*cut(3).segments, Segment("local", ())))
    assert entry_of(both) == entry(3)
    assert entry(3).streams["s"].watermark_us == 3
    assert entry_of(cut(3, stream=None)).streams == {}


def test_at_the_end_nothing_will_follow():
    last = entry_of(msgspec.structs.replace(cut(3), ended=True, controls={"limits": 12}))
    assert (last.ended, last.streams["s"].watermark_us, last.controls) == (True, ENDED_US, {"limits": 12})


# What waits.


def test_what_was_sealed_is_there_after_a_power_cut():
    node = Node()
    node.seal(1, 2, 3)
    node.disk.crash(Random(1))
    again = Node(node.disk, sealed=3).outbox
    assert again.oldest(9) == tuple(entry(epoch) for epoch in (1, 2, 3))
    assert set(again.held()) == {digest(1), digest(2), digest(3)}
    assert (again.epochs, again.size_bytes, again.sent, again.newest) == (3, 300, 0, 3)


def test_a_record_without_a_seal_is_not_sent():
    node = Node()
    node.seal(1, 2)
    assert Node(node.disk, sealed=1).waiting() == [1]


@pytest.mark.parametrize("seed", range(8))
def test_what_was_marked_is_gone_for_good_and_its_runs_are_released(seed: int):
    node = Node()
    node.seal(1, 2, 3)
    mark(node.outbox, 2)
    assert set(node.outbox.held()) == {digest(3)}
    node.disk.crash(Random(seed))  # what the disk keeps of bytes that were not synced depends on the seed
    again = Node(node.disk, sealed=3)
    assert (again.waiting(), again.outbox.sent) == ([3], 2)


def test_a_gap_is_a_mistake_of_ours():
    with pytest.raises(AssertionError):
        Node().outbox.add(cut(2))


def test_a_run_that_two_epochs_share_is_held_until_both_are_gone():
    node = Node()
    node.seal(cut(1, name="same"), cut(2, name="same"))
    mark(node.outbox, 1)
    assert len(set(node.outbox.held())) == 1
    mark(node.outbox, 2)
    assert not set(node.outbox.held())


def test_a_damaged_line_that_no_checkpoint_has_is_an_error_that_says_what_to_do():
    node = Node()
    node.seal(1, 2)
    rewrite(node.disk, node.disk.read(PATH).replace(b'"epoch":1,', b'"epoch":8,'))
    with pytest.raises(CheckpointError, match=r"epoch 1 cannot be read(.|\n)*--take-over"):
        Node(node.disk, sealed=2)


def test_a_damaged_line_of_an_epoch_with_a_checkpoint_is_found_there():
    disk = MemoryDisk()
    store = CheckpointStore(disk, pipeline="p", node="n")
    run = store.write_run(pl.DataFrame({"a": [1]}))
    record = msgspec.structs.replace(cut(1), segments=(Segment("sink", (run,), stream="s", watermark_us=5),))
    store.commit(manifest(record))
    Node(disk, sealed=1)
    rewrite(disk, disk.read(PATH).replace(b'"now_us":1', b'"now_us":7'))
    again = Node(disk, sealed=1)
    assert again.outbox.oldest(9) == (entry_of(record),)
    assert again.outbox.chain_at(1) == chained(CHAIN_START, entry_of(record).digest())


def test_a_damaged_line_of_what_the_hub_has_does_not_matter():
    node = Node()
    node.seal(1, 2)
    mark(node.outbox, 1)
    rewrite(node.disk, node.disk.read(PATH).replace(b'"now_us":1,', b'"now_us":7,'))
    assert Node(node.disk, sealed=2).waiting() == [2]


def test_rows_that_wait_and_are_damaged_are_noticed_at_the_start():
    disk = MemoryDisk()
    store = CheckpointStore(disk, pipeline="p", node="n")
    run = store.write_run(pl.DataFrame({"a": [1]}))
    record = msgspec.structs.replace(cut(1), segments=(Segment("sink", (run,), stream="s"),))
    store.commit(manifest(record))
    outbox = Node(disk, sealed=1).outbox
    outbox.check(record)
    disk.damage(f"{HOME}/runs/{run.digest}", b"\0" * run.size_bytes)
    with pytest.raises(DamagedError, match="what epoch 1 has for the hub is damaged"):
        outbox.check(record)
    mark(outbox, 1)
    outbox.check(record)


def test_a_lost_log_is_made_again_as_far_back_as_rows_are_kept():
    disk = MemoryDisk()
    store = CheckpointStore(disk, pipeline="p", node="n", keep=3)
    for epoch in range(1, 10):
        run = store.write_run(pl.DataFrame({"a": [epoch]}))
        store.commit(manifest(msgspec.structs.replace(cut(epoch), segments=(Segment("sink", (run,), stream="s"),))))
        store.collect()
    disk.remove(PATH)
    again = Node(disk, sealed=9)
    assert again.waiting() == [7, 8, 9]
    # Whether the hub has those before is for the hub to say.
    assert (again.outbox.sent, again.outbox.unsent_before) == (6, 0)


def test_lost_unsent_epochs_are_never_taken_for_empty_ones():
    """The name of the directory and the log are gone, and of ten epochs the checkpoints of the newest are left."""
    disk = MemoryDisk()
    store = CheckpointStore(disk, pipeline="p", node="n", keep=3)
    for epoch in range(1, 11):
        run = store.write_run(pl.DataFrame({"a": [epoch]}))
        store.commit(manifest(msgspec.structs.replace(cut(epoch), segments=(Segment("sink", (run,), stream="s"),))))
        store.collect()
    disk.remove(PATH)
    outbox = Node(disk, sealed=10).outbox
    state = SyncState(head=3, sent=outbox.sent, newest=outbox.newest, unsent_before=outbox.unsent_before)
    assert reconcile(state) == HubIsOlder(3, 7)


def test_years_of_epochs_that_hold_nothing_for_the_hub_are_not_listed():
    sealed, disk = 50_000_000, MemoryDisk()
    store = CheckpointStore(disk, pipeline="p", node="n")
    store.log.record(cut(sealed, stream=None), sealed_before=False, needed_from=1)
    outbox = Node(disk, sealed=sealed).outbox
    assert (outbox.epochs, outbox.sent, outbox.unsent_before) == (0, sealed, sealed)
    # After a restart it still knows.
    again = Node(disk, sealed=sealed)
    assert (again.outbox.sent, again.outbox.unsent_before) == (sealed, sealed)
    again.seal(sealed + 1)
    mark(again.outbox, sealed + 1)
    assert Node(disk, sealed=sealed + 1).outbox.unsent_before == sealed


def test_where_nothing_crosses_nothing_was_lost_while_there_was_no_hub():
    node = Node()
    node.outbox.begin(7, crosses=False)
    assert [one.streams for one in node.outbox.oldest(9)] == [{}] * 7


def test_beginning_again_after_a_damaged_checkpoint_changes_nothing():
    node = Node()
    node.seal(1)
    node.outbox.begin(1)
    assert (node.waiting(), node.outbox.size_bytes, len(set(node.outbox.held()))) == ([1], 100, 1)


def test_rows_that_were_computed_again_are_still_the_same_epoch():
    node = Node()
    node.seal(1, 2)
    again = msgspec.structs.replace(cut(2, name="again"), sealed_as=entry(2).digest())
    node.store.log.record(again, sealed_before=True, needed_from=1)
    outbox = Node(node.disk, sealed=2).outbox
    assert outbox.oldest(9)[1].streams == entry_of(cut(2, name="again")).streams
    assert outbox.oldest(9)[1].digest() == entry(2).digest()
    assert (outbox.chain_at(1), outbox.chain_at(2)) == (chain(1), chain(2))


# The chain.


def test_the_chain_is_known_from_what_the_hub_has_to_what_was_sealed_last():
    node = Node()
    node.seal(1, 2, 3, 4)
    assert [node.outbox.chain_at(epoch) for epoch in range(6)] == [*(chain(epoch) for epoch in range(5)), None]
    node.outbox.mark(2, chain=chain(2), log_id="log")
    for box in (node.outbox, Node(node.disk, sealed=4).outbox):
        assert [box.chain_at(epoch) for epoch in range(1, 6)] == [None, chain(2), chain(3), chain(4), None]
        assert box.log_id == "log"


def test_the_record_of_an_epoch_has_the_chain_before_it():
    node = Node()
    node.seal(1, 2)
    node.outbox.mark(1, chain=chain(1), log_id="log")
    node.seal(3)
    assert [one.chain_before for one in node.store.cuts().values()] == [chain(0), chain(1), chain(2)]


def test_a_lost_log_does_not_lose_the_chain_if_a_checkpoint_is_left():
    disk = MemoryDisk()
    store = CheckpointStore(disk, pipeline="p", node="n", keep=1)
    outbox = Outbox(store, bytes_max=1 << 30)
    outbox.begin(0)
    chains = []
    for epoch in range(1, 6):
        run = store.write_run(pl.DataFrame({"a": [epoch]}))
        record = msgspec.structs.replace(cut(epoch), segments=(Segment("sink", (run,), stream="s"),))
        store.commit(manifest(outbox.continuing(record)))
        outbox.add(record)
        chains.append(outbox.chain_at(epoch))
    store.collect()
    disk.remove(PATH)
    again = Node(disk, sealed=5)
    assert (again.outbox.sent, again.outbox.chain_at(4), again.outbox.chain_at(5)) == (4, chains[3], chains[4])


def test_the_chain_of_epochs_from_before_there_was_a_hub_is_that_of_empty_ones():
    disk = MemoryDisk()
    store = CheckpointStore(disk, pipeline="p", node="n")
    store.log.record(cut(9, stream=None), sealed_before=False, needed_from=1)
    outbox = Node(disk, sealed=9).outbox
    empty = [empty_entry(epoch).digest() for epoch in range(1, 10)]
    for epoch in (0, 3, 8, 5):
        assert outbox.chain_at(epoch) == functools.reduce(chained, empty[:epoch], CHAIN_START)
    assert outbox.chain_at(9) is None, "what was sent of it, the hub will say"
    outbox.mark(9, chain="c9", log_id="log")
    assert outbox.chain_at(9) == "c9"


# The bound.


def test_a_full_outbox_refuses_before_the_seal_and_takes_more_when_the_hub_has_some():
    node = Node(bytes_max=250 + 2 * ENTRY_BYTES)
    node.seal(1, 2)
    with pytest.raises(StorageError, match=r"outbox is full(.|\n)*--outbox-max"):
        node.outbox.make_room(cut(3))
    mark(node.outbox, 1)
    node.outbox.make_room(cut(3))


def test_the_bound_counts_epochs_beside_their_rows():
    """Otherwise many small ones would fill the memory long before the disk."""
    node = Node(bytes_max=10 * ENTRY_BYTES)
    node.seal(*(cut(epoch, size_bytes=1) for epoch in range(1, 10)))
    with pytest.raises(StorageError, match=r"outbox is full: 9225 bytes of 9 epochs"):
        node.outbox.make_room(cut(10, size_bytes=1))


@pytest.mark.parametrize(("size_bytes", "memory_bytes"), [(0, 110), (1500, 150)])
def test_an_epoch_that_waits_takes_little_memory(size_bytes: int, memory_bytes: int):
    """A month without the hub, at one epoch per second, is 2.6 million of them."""
    node, count = Node(), 5_000
    tracemalloc.start()
    try:
        for epoch in range(1, count + 1):
            node.outbox.add(cut(epoch, size_bytes=size_bytes))
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes / count < memory_bytes


@pytest.fixture
def days_offline(tmp_path: Path) -> Callable[[], Node]:
    """Start a node whose log is about to be rewritten: half of the epochs that wait could still be replayed."""
    disk: Any = OsDisk(tmp_path)
    Node(disk)
    lines = [seal("crossing", msgspec.structs.replace(cut(epoch), sources={})) for epoch in range(1, WAITING // 2 + 1)]
    lines += [encode_cut(cut(epoch)) for epoch in range(WAITING // 2 + 1, WAITING + 1)]
    with (tmp_path / PATH).open("ab") as file:
        file.write(b"\n".join([*lines, b""]))
    return lambda: Node(disk, sealed=WAITING, log_bytes=1_000)


def test_a_start_takes_little_memory_per_epoch_that_waits(days_offline: Callable[[], Node]):
    tracemalloc.start()
    try:
        node = days_offline()
        _, begin_bytes = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert node.store.mend_cuts() is None
        assert node.store.survey().cuts == set(range(WAITING // 2 + 1, WAITING))
        _, all_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert node.waiting() == list(range(1, WAITING + 1))
    assert max(begin_bytes, all_bytes) < WAITING * 200 + PIECES_BYTES


def test_a_rewrite_takes_little_memory_per_epoch_that_waits(days_offline: Callable[[], Node]):
    node = days_offline()
    size_bytes = node.disk.size(PATH)
    tracemalloc.start()
    try:
        node.seal(WAITING + 1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert node.disk.size(PATH) < size_bytes, "it was rewritten"
    assert peak_bytes < WAITING * 200 + PIECES_BYTES
    again = Node(node.disk, sealed=WAITING + 1)
    assert again.waiting() == list(range(1, WAITING + 2))
    assert again.outbox.chain_at(WAITING + 1) == chain(WAITING + 1)


@pytest.mark.parametrize("rewritten", [False, True])
def test_lines_that_are_not_in_order_are_sent_in_order_and_the_later_of_two_counts(rewritten: bool):
    """As when two processes had the directory, and one states its epoch again."""
    node = Node()
    lines = [cut(1), cut(4), cut(2, name="not this"), cut(3), cut(2), cut(5, name="nor this"), cut(7), cut(5), cut(6)]
    rewrite(node.disk, node.disk.read(PATH) + b"\n".join([*map(encode_cut, lines), b""]))
    again = Node(node.disk, sealed=7, log_bytes=500 if rewritten else None)
    assert again.store.cut(2) == cut(2)
    if rewritten:
        again.seal(8)
        assert node.disk.read(PATH).count(b'"epoch":2') == 1
        again = Node(node.disk, sealed=7)
    assert again.outbox.oldest(9) == tuple(entry(epoch) for epoch in range(1, 8))
    assert again.outbox.chain_at(7) == chain(7)


def test_an_epoch_alone_always_fits():
    Node(bytes_max=50).seal(1)


def test_epochs_without_rows_count_too():
    node = Node(bytes_max=10 * ENTRY_BYTES)
    node.seal(*(cut(epoch, size_bytes=0) for epoch in range(1, 11)))
    with pytest.raises(StorageError, match=r"outbox is full: 10240 bytes of 10 epochs"):
        node.outbox.make_room(cut(11, size_bytes=0))


def test_the_last_epoch_before_a_stop_may_go_beyond_the_bound():
    node = Node(bytes_max=100)
    node.seal(1)
    node.outbox.overrun = True
    node.outbox.make_room(cut(2))


def test_dropping_keeps_as_many_rows_as_fit_however_many_epochs_there_are():
    node = Node(bytes_max=1_000, drops=True)
    node.seal(*(cut(epoch, size_bytes=0) for epoch in range(1, 50)))
    node.seal(*(cut(epoch, size_bytes=100) for epoch in range(50, 101)))
    assert (node.outbox.epochs, node.outbox.size_bytes) == (100, 1_000)
    assert set(node.outbox.held()) == {digest(epoch) for epoch in range(91, 101)}


def test_an_epoch_larger_than_the_bound_stays_until_newer_rows_come():
    node = Node(bytes_max=300, drops=True)
    node.seal(cut(1, size_bytes=1_000), cut(2, size_bytes=0, stream=None), cut(3, stream=None))
    assert set(node.outbox.held()) == {digest(1)}
    node.seal(4)
    assert set(node.outbox.held()) == {digest(4)}


def test_dropping_takes_the_oldest_rows_and_leaves_their_epochs_and_times():
    bytes_max = 300
    node = Node(bytes_max=bytes_max, drops=True)
    node.seal(1, 2, 3, 4, 5)
    for box in (node.outbox, Node(node.disk, sealed=5, bytes_max=bytes_max, drops=True).outbox):
        assert [len(one.streams["s"].runs) for one in box.oldest(9)] == [0, 0, 1, 1, 1]
        assert [one.streams["s"].watermark_us for one in box.oldest(9)] == [1, 2, 3, 4, 5]
        assert set(box.held()) == {digest(3), digest(4), digest(5)}
        assert box.size_bytes == 300
        # If the hub has it with its rows after all, that is no disagreement.
        assert [box.chain_at(epoch) for epoch in range(1, 6)] == [chain(epoch) for epoch in range(1, 6)]


# The disk.


def test_a_mark_that_could_not_be_written_releases_nothing():
    node = Node()
    node.seal(1)
    refuse = Refusing(node.disk)
    refuse.on = True
    with pytest.raises(StorageError):
        mark(node.outbox, 1)
    assert set(node.outbox.held()) == {digest(1)}
    assert node.outbox.sent == 0
    refuse.on = False
    node.seal(2)
    assert Node(node.disk, sealed=2).waiting() == [1, 2]


def test_the_log_stays_small_while_everything_is_sent():
    node = Node(log_bytes=4000)
    sizes = []
    for epoch in range(1, 200):
        node.seal(epoch)
        mark(node.outbox, epoch)
        sizes.append(node.disk.size(PATH))
    assert max(sizes) < 5000
    assert (Node(node.disk, sealed=199).outbox.sent, node.outbox.newest) == (199, 199)


def test_without_the_hub_no_epoch_is_lost_and_the_log_is_small_again_when_it_is_back():
    node = Node(log_bytes=4000)
    for epoch in range(1, 300):
        node.seal(epoch)
    assert node.disk.counts["rename"] < 12
    again = Node(node.disk, sealed=299, log_bytes=4000)
    assert again.waiting() == list(range(1, 300))
    assert again.outbox.chain_at(299) == chain(299)
    assert len(again.store.cuts()) < 100, "those that wait only for the hub cannot be replayed"
    mark(again.outbox, 299)
    again.seal(300)
    assert node.disk.size(PATH) < 5000
    assert Node(node.disk, sealed=300).waiting() == [300]


def test_the_log_is_small_again_when_the_hub_is_back_also_without_a_restart():
    node = Node(log_bytes=4000)
    for epoch in range(1, 100):
        node.seal(epoch)
    assert node.disk.size(PATH) > 20_000
    mark(node.outbox, 99)
    node.seal(100)
    assert node.disk.size(PATH) < 5000


@examples(60)
@given(st.lists(st.sampled_from(["seal", "mark", "crash", "mark_all"]), max_size=60), st.booleans())
def test_whatever_happens_in_whatever_order_no_epoch_is_lost_before_it_is_marked(steps: list[str], small: bool):
    log_bytes = 600 if small else None
    node, sealed, sent = Node(log_bytes=log_bytes), 0, 0
    for step in steps:
        if step == "seal":
            sealed += 1
            node.seal(sealed)
        elif step == "mark" and sent < sealed:
            sent += 1
            mark(node.outbox, sent)
        elif step == "mark_all":
            sent = sealed
            mark(node.outbox, sent)
        elif step == "crash":
            node.disk.crash(Random(1))
            node = Node(node.disk, sealed=sealed, log_bytes=log_bytes)
        assert node.waiting() == list(range(sent + 1, sealed + 1))
        assert set(node.outbox.held()) == {digest(epoch) for epoch in range(sent + 1, sealed + 1)}


@pytest.mark.slow
def test_days_without_the_hub_are_opened_in_seconds():
    node, count = Node(), 30_000
    node.store.log.note_delivery(DeliveryState(acknowledged=0))
    rewrite(node.disk, node.disk.read(PATH) + b"\n".join(encode_cut(cut(epoch)) for epoch in range(1, count + 1)))
    began = time.process_time()
    outbox = Node(node.disk, sealed=count).outbox
    took_s = time.process_time() - began
    assert outbox.epochs == count
    # A tenth of three and a half days at an epoch a second.
    assert took_s < 5


# Who we are.


def test_the_incarnation_grows_with_every_start_and_the_name_stays():
    disk = MemoryDisk()
    first, second = next_owner(disk, HOME), next_owner(disk, HOME)
    disk.crash(Random(1))
    third = next_owner(disk, HOME)
    assert [first.incarnation, second.incarnation, third.incarnation] == [1, 2, 3]
    assert first.holder == second.holder == third.holder
    assert next_owner(MemoryDisk(), HOME).holder != first.holder


def test_two_copies_of_a_directory_come_to_the_same_incarnation_and_are_different_starts():
    """By the start the hub, and sinks, tell a copy from a request that is repeated."""
    disk, copy = MemoryDisk(), MemoryDisk()
    first = next_owner(disk, HOME)
    copy.make_dirs(HOME)
    rewrite(copy, disk.read(f"{HOME}/owner.json"), f"{HOME}/owner.json")
    mine, others = next_owner(disk, HOME), next_owner(copy, HOME)
    assert (mine.holder, mine.incarnation) == (others.holder, others.incarnation)
    assert len({first.start, mine.start, others.start}) == 3


def test_a_damaged_owner_file_is_somebody_else_to_the_hub():
    disk = MemoryDisk()
    first = next_owner(disk, HOME)
    rewrite(disk, b"{}", f"{HOME}/owner.json")
    assert next_owner(disk, HOME).holder != first.holder


def test_entries_are_the_same_bytes_with_every_encoder():
    body = msgspec.json.encode(entry(1), order="deterministic")
    assert hashlib.sha256(body).hexdigest() == entry(1).digest()


def manifest(record: Cut) -> Manifest:
    return Manifest(
        pipeline="p",
        node="n",
        epoch=record.epoch,
        attempt=record.epoch,
        mode="aligned",
        parallelism=1,
        plan_digest="",
        step_digests={},
        created_us=0,
        cut=record,
    )


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
