"""The hub's log, its locks of blobs and the outbox, with their threads in the orders of many seeds.

What is acknowledged is never lost, order is kept, and every run ends. A lock that is left out is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from tests.edge.test_outbox import chain, cut
from tests.hub.sending import ONE, blob, commit_of, entry, run
from tests.simulation.interleave import DeadlockError, Interleaving

from fordstone.edge.link import outbox as outbox_module
from fordstone.edge.link.outbox import Outbox
from fordstone.epochs import epoch_log as epoch_log_module
from fordstone.epochs.store import CheckpointStore
from fordstone.hub.messages import EpochEntry, LeaseRequest, Rejection
from fordstone.hub.server.handlers import Handlers
from fordstone.hub.store import blobs as blobs_module
from fordstone.hub.store import commits
from fordstone.hub.store import log as log_module
from fordstone.hub.store.blobs import BlobLocks, DiskBlobs, Upload, is_whole
from fordstone.hub.store.log import HubLog, Transaction
from fordstone.hub.store.retention import Retention
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.protocol.chain import CHAIN_START, chained
from fordstone.testing.memory_disk import MemoryDisk

SEEDS = range(300)
HUB_SEEDS = range(50)
"""Each of them syncs a real file."""
MUTANT_SEEDS = range(1_000, 1_300)
EPOCHS = 8


def is_noticed(case: Callable[..., None], *given: Any, **options: Any) -> bool:
    """Whether one of the seeds shows that something is wrong."""
    for seed in MUTANT_SEEDS:
        try:
            case(seed, *given, **options)
        except Exception:  # noqa: BLE001 - however it shows
            return True
    return False


# The interleaving itself.


def two_locks_in_opposite_orders(seed: int) -> None:
    threads = Interleaving(seed)
    first, second = threads.lock(), threads.lock()

    def take(one: Any, other: Any) -> None:
        with one, other:
            pass

    threads.run(lambda: take(first, second), lambda: take(second, first))


def test_a_deadlock_is_found_and_its_seed_always_shows_it() -> None:
    found = []
    for seed in range(50):
        try:
            two_locks_in_opposite_orders(seed)
        except DeadlockError:
            found.append(seed)
    assert 0 < len(found) < 50
    with pytest.raises(DeadlockError, match=f"seed {found[0]}: no thread can run"):
        two_locks_in_opposite_orders(found[0])


# The hub's log.


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The file of a log without content: to copy it is quicker than to make one for every seed."""
    SqliteStore(tmp_path / "empty.sqlite").close()
    return tmp_path / "empty.sqlite"


def writers_against_close(seed: int, path: Path, empty: Path, *, excludes: bool = True) -> None:
    """Three threads write, one reads, one closes at some time."""
    threads = Interleaving(seed)
    file = path / f"{seed}.sqlite"
    shutil.copy(empty, file)
    acknowledged: list[str] = []
    carried_out: list[str] = []
    with threads.inside(log_module, excludes=excludes):
        store = SqliteStore(file)
        log = HubLog(store, clock_us=lambda: 1_000)

        def add(name: str, tx: Transaction) -> None:
            tx.log.grant_lease("p", name, holder="h", start="s", generation=ONE, resync=False, now_us=tx.now_us)
            carried_out.append(name)

        def write(writer: str) -> None:
            outcomes = {name: log.write(functools.partial(add, name)) for name in (f"{writer}1", f"{writer}2")}
            for name, outcome in outcomes.items():
                with contextlib.suppress(Rejection):
                    outcome.result()
                    acknowledged.append(name)

        def read() -> None:
            for _ in range(3):
                before = set(acknowledged)
                with contextlib.suppress(Rejection):
                    log.write(lambda tx: None).result()
                    assert before <= nodes(store)
                threads.pause()

        threads.run(*(functools.partial(write, name) for name in "abc"), read, log.close)
    again = SqliteStore(file)
    assert nodes(again) == set(acknowledged)
    again.close()
    for name in "abc":
        mine = [one for one in carried_out if one.startswith(name)]
        assert mine == sorted(mine)


def nodes(store: SqliteStore) -> set[str]:
    with store.snapshot() as found:
        return {node.node for node in found.nodes()}


def test_the_log_keeps_what_it_acknowledged_and_answers_every_job_however_threads_take_turns(
    tmp_path: Path, empty: Path
) -> None:
    for seed in HUB_SEEDS:
        writers_against_close(seed, tmp_path, empty)


def test_a_log_without_its_lock_is_noticed(tmp_path: Path, empty: Path) -> None:
    assert is_noticed(writers_against_close, tmp_path, empty, excludes=False)


# Blobs.


class SlowBlobs(DiskBlobs):
    """Lets other threads run before and after each of its operations, as a disk does."""

    def __init__(self, root: Path, threads: Interleaving) -> None:
        super().__init__(root)
        self._threads = threads

    def size(self, digest: str) -> int | None:
        self._threads.pause()
        return super().size(digest)

    def put(self, digest: str, upload: Upload) -> None:
        self._threads.pause()
        super().put(digest, upload)
        self._threads.pause()

    def remove(self, digest: str) -> None:
        self._threads.pause()
        super().remove(digest)
        self._threads.pause()


def uploads_against_removal(seed: int, path: Path, empty: Path) -> None:
    """Two nodes upload the same blob and commit it, again if it was removed before; retention removes what no commit names.

    At the beginning the blob is there, and no commit names it.
    """
    threads = Interleaving(seed)
    ticks = itertools.count(1)
    wanted = run("a")
    shutil.copy(empty, path / f"{seed}.sqlite")
    with threads.inside(log_module, blobs_module):
        store = SqliteStore(path / f"{seed}.sqlite")
        blobs, locks = SlowBlobs(path / f"{seed}", threads), BlobLocks()
        earlier = Upload(blobs.beside())
        earlier.write(blob("a"))
        blobs.put(wanted.digest, earlier)
        with store.transaction() as tx:
            tx.record_blobs({wanted.digest: (wanted.size_bytes, 0)})
        log = HubLog(store, clock_us=lambda: next(ticks))
        # What stores an upload, on one of the hub's threads, needs these alone.
        handlers = cast("Handlers", SimpleNamespace(log=log, blobs=blobs, locks=locks))
        retention = Retention(log, blobs, locks, grace_us=0)
        working = ["n", "m"]

        def upload() -> None:
            body = Upload(blobs.beside())
            Handlers._store(handlers, body, wanted.digest, [blob("a")])
            body.close()

        def send(node: str) -> None:
            lease = LeaseRequest(holder="h", local=1, start="s")
            log.write(lambda tx: commits.lease(tx, "p", node, lease)).result()
            body = commit_of(entry(1, "a"))
            digests = [one.digest() for one in body.epochs]
            committed = False
            while not committed:
                upload()
                with contextlib.suppress(Rejection):
                    log.write(lambda tx: commits.commit(tx, "p", node, body, digests)).result()
                    committed = True
            assert is_whole(blobs, wanted.digest)
            working.remove(node)
            if not working:
                log.close()

        def remove() -> None:
            with contextlib.suppress(Rejection):  # the log is closed
                for _ in range(4):
                    retention._remove_blobs(10)

        threads.run(lambda: send("n"), lambda: send("m"), remove)
    assert is_whole(DiskBlobs(path / f"{seed}"), wanted.digest)


def test_a_blob_that_a_commit_names_is_never_removed_however_threads_take_turns(tmp_path: Path, empty: Path) -> None:
    for seed in HUB_SEEDS:
        uploads_against_removal(seed, tmp_path, empty)


def test_an_upload_without_the_lock_of_its_blob_is_noticed(tmp_path: Path, empty: Path) -> None:
    with patch.object(BlobLocks, "arrival", lambda *_: contextlib.nullcontext()):
        assert is_noticed(uploads_against_removal, tmp_path, empty)


# The outbox.


def writer_against_sender(seed: int, *, excludes: bool = True) -> None:
    """One thread seals epochs, one sends them to a hub; in half of the seeds the outbox is small and drops the oldest rows."""
    threads, rng = Interleaving(seed), Random(seed)
    drops = rng.random() < 0.5
    bytes_max = 3 * 100 if drops else 1 << 30
    disk = MemoryDisk()
    hub: list[EpochEntry] = []
    with threads.inside(outbox_module, excludes=excludes), threads.inside(epoch_log_module):
        store = CheckpointStore(disk, pipeline="p", node="n")
        outbox = Outbox(store, bytes_max=bytes_max, drops=drops)
        outbox.begin(0)
        something = threads.event()
        outbox.wake = something.set

        def write() -> None:
            for epoch in range(1, EPOCHS + 1):
                record = outbox.continuing(cut(epoch))
                outbox.make_room(record)
                store.log.record(record, sealed_before=False, needed_from=10**9)
                outbox.add(record)
                assert cut(epoch).segments[0].runs[0].digest in set(outbox.held()) or outbox.sent >= epoch or drops

        def send() -> None:
            while len(hub) < EPOCHS:
                something.wait()
                something.clear()
                while entries := outbox.oldest(rng.randint(1, 3)):
                    assert [one.epoch for one in entries] == [len(hub) + 1 + index for index in range(len(entries))]
                    threads.pause()  # the request to the hub
                    hub.extend(entries)
                    newest = entries[-1].epoch
                    assert outbox.chain_at(newest) == chain(newest)
                    outbox.mark(newest, chain=chain(newest), log_id="log")

        threads.run(write, send)
    assert functools.reduce(chained, (one.digest() for one in hub), CHAIN_START) == chain(EPOCHS)
    assert all(one.streams["s"].runs or (drops and one.epoch <= outbox._delivery.dropped) for one in hub)
    assert (outbox.sent, outbox.epochs, outbox.size_bytes) == (EPOCHS, 0, 0)
    disk.crash(rng)
    again = Outbox(CheckpointStore(disk, pipeline="p", node="n"), bytes_max=bytes_max)
    again.begin(EPOCHS)
    assert again.sent == EPOCHS


def test_the_outbox_sends_every_epoch_once_and_in_order_however_threads_take_turns() -> None:
    for seed in SEEDS:
        writer_against_sender(seed)


def test_an_outbox_without_its_locks_is_noticed() -> None:
    assert is_noticed(writer_against_sender, excludes=False)
