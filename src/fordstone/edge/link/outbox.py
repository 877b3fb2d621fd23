"""The outbox: sealed epochs that the hub does not have yet. It is an index in memory of the epoch log; their rows are runs in the store.

The writer adds each epoch when it is sealed; `edge.link.sender` takes the oldest and marks them when the hub has them. Days without
the hub cost a line in the log and about a hundred bytes of memory per epoch (up to 200 at a start), which its bound counts, too
(`ENTRY_BYTES`); when many wait, epochs become longer where nothing on the node waits for them (`protocol.pacing`).

Invariants: entries have no gaps; an entry goes only after the mark that the hub has it is durable; the runs of every entry that
is there are held; an epoch has one digest, in whatever form it is sent, so the chain at the newest epoch never depends on that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from fordstone.epochs.epoch_log import DeliveryState
from fordstone.epochs.manifest import Cut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError, StorageError
from fordstone.hub.messages import ENDED_US, EpochEntry, StreamSegment
from fordstone.protocol.chain import CHAIN_START, chained
from fordstone.protocol.delivery import Weight
from fordstone.protocol.lease import Position
from fordstone.state.base import RunRef

log = logging.getLogger(__name__)

COLLECT_EPOCHS: Final = 5_000
WEIGHTS_MAX: Final = 2048
ENTRY_BYTES: Final = 1024
"""What an epoch counts for beside its rows: its line in the log, its entry here, and the names of its runs."""


def entry_of(cut: Cut) -> EpochEntry:
    """What is sent of an epoch: the same whenever it is made from its record."""
    return EpochEntry(
        epoch=cut.epoch,
        streams={
            segment.stream: StreamSegment(
                runs=segment.runs, watermark_us=ENDED_US if cut.ended else segment.watermark_us
            )
            for segment in cut.segments
            if segment.stream is not None
        },
        created_us=cut.now_us,
        ended=cut.ended,
        controls=cut.controls,
        sealed_as=cut.sealed_as,
    )


def empty_entry(epoch: int) -> EpochEntry:
    """What is sent of an epoch that was sealed before there was a hub, and holds nothing for it."""
    return EpochEntry(epoch=epoch, streams={}, created_us=0)


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """An entry in a few bytes: there may be millions. Its epoch is known by its place."""

    streams: tuple[tuple[str, int, tuple[tuple[bytes, int, int], ...]], ...]
    """Of each stream its name, its watermark, and the digest, size and rows of its runs."""
    created_us: int
    ended: bool
    controls: dict[str, int]
    sealed_as: bytes
    """The digest of the entry, if its form has changed since it was sealed."""

    @classmethod
    def of(cls, entry: EpochEntry) -> _Kept:
        streams = tuple(
            (
                name,
                segment.watermark_us,
                tuple((bytes.fromhex(run.digest), run.size_bytes, run.rows) for run in segment.runs),
            )
            for name, segment in entry.streams.items()
        )
        sealed_as = bytes.fromhex(entry.sealed_as or "")
        return cls(streams, entry.created_us, entry.ended, dict(entry.controls), sealed_as)

    def entry(self, epoch: int) -> EpochEntry:
        return EpochEntry(
            epoch=epoch,
            streams={
                name: StreamSegment(
                    runs=tuple(RunRef(digest.hex(), size_bytes, rows) for digest, size_bytes, rows in runs),
                    watermark_us=watermark_us,
                )
                for name, watermark_us, runs in self.streams
            },
            created_us=self.created_us,
            ended=self.ended,
            controls=self.controls,
            sealed_as=self.sealed_as.hex() or None,
        )

    @property
    def size_bytes(self) -> int:
        return sum(size_bytes for _, _, runs in self.streams for _, size_bytes, _ in runs)

    def digests(self) -> Iterator[str]:
        """Of its runs."""
        return (digest.hex() for _, _, runs in self.streams for digest, _, _ in runs)


_PACK: Final = msgspec.msgpack.Encoder()
_UNPACK: Final = msgspec.msgpack.Decoder(_Kept)


class OutboxFullError(StorageError):
    """What waits for the hub takes all the room that it may take."""


class Outbox:
    """Written by two threads, the writer's and the sender's; read by any."""

    def __init__(self, store: CheckpointStore, *, bytes_max: int, drops: bool = False) -> None:
        """`drops`: when it is full, the oldest rows go; else nothing is sealed."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something new to send."""
        self.overrun = False
        """The last epoch before a stop may go beyond the bound: otherwise a full outbox could not be stopped."""
        self._store = store
        self._bytes_max, self._drops = bytes_max, drops
        self._io = threading.Lock()
        """Held while a mark is written. Taken before the other lock, which is never held while a disk is waited for."""
        self._mutex = threading.Lock()
        self._delivery = DeliveryState(acknowledged=0)
        self._kept: deque[bytes] = deque()
        """The entries, packed, the oldest first."""
        self._newest_chain: str | None = None
        """The chain at the newest epoch; None: it is not known."""
        self._empty = Position(0, CHAIN_START)
        self._offered: list[int] = []
        """Checkpoints that are pinned until the hub has their epochs again."""
        self._bytes = 0

    # What is known of it.

    @property
    def sent(self) -> int:
        """The newest epoch that the hub is known to have."""
        return self._delivery.acknowledged

    @property
    def log_id(self) -> str:
        """The hub's log that acknowledged `sent`; empty: none has yet."""
        return self._delivery.log_id

    @property
    def unsent_before(self) -> int:
        """Epochs up to this one were sealed before there was a hub, and hold nothing for it."""
        return self._delivery.unsent_before

    @property
    def newest(self) -> int:
        """The newest epoch that is, or was, in here."""
        with self._mutex:
            return self.sent + len(self._kept)

    @property
    def epochs(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """The bytes of the rows that wait."""
        return self._bytes

    @property
    def collect_every(self) -> int:
        """Every how many epochs it is worth looking for runs that may go: it takes a look at each that may not."""
        return 1 + self.epochs // COLLECT_EPOCHS

    def chain_at(self, epoch: int) -> str | None:
        """The chain at an epoch from `sent` to `newest`, from what is here alone; None: it cannot be computed."""
        with self._mutex:
            delivery, kept = self._delivery, list(itertools.islice(self._kept, max(epoch - self.sent, 0)))
        if epoch >= delivery.acknowledged:
            known = delivery.chain is not None and len(kept) == epoch - delivery.acknowledged
            digests = (one.digest() for one in _entries(kept, delivery.acknowledged + 1))
            return _fold(delivery.chain or CHAIN_START, digests) if known else None
        if delivery.acknowledged <= delivery.unsent_before:
            return self.chain_of_empty(epoch)
        return None

    def chain_of_empty(self, epoch: int) -> str:
        """The chain at an epoch if all up to it hold nothing. Goes on from the last call: there may be millions of them."""
        start = self._empty if self._empty.epoch <= epoch else Position(0, CHAIN_START)
        chain = _fold(start.chain, (empty_entry(one).digest() for one in range(start.epoch + 1, epoch + 1)))
        self._empty = Position(epoch, chain)
        return chain

    def held(self) -> Iterator[str]:
        """The runs that must stay. Called by the writer when it collects; later entries name later runs."""
        with self._mutex:
            kept = list(self._kept)
        return (digest for packed in kept for digest in _UNPACK.decode(packed).digests())

    # The writer's side.

    def begin(self, sealed: int, *, crosses: bool = True) -> None:
        """Find what waits. Called before anything else, after any replay; again if another checkpoint has to be used.

        `sealed`: the newest sealed epoch. `crosses`: the plan has rows for the hub.
        """
        content = self._store.log.read(())

        def find(epoch: int) -> Cut | None:
            try:
                return self._store.manifest(epoch).cut
            except CheckpointError:
                # A pipeline of which nothing crosses may have run without a hub, and nothing was lost by it.
                return None if crosses else Cut(epoch=epoch, sources={})

        if content.delivery is None:
            known = {record.epoch: record.cut for record in self._store.log.records(content.late)}
            self._delivery = self._first_delivery(sealed, lambda epoch: known.get(epoch) or find(epoch))
            self._store.log.note_delivery(self._delivery)
        else:
            self._delivery = content.delivery
        self._kept.clear()
        self._bytes = 0
        self._newest_chain = self._delivery.chain
        # One after the other: there may be millions.
        records = self._store.log.records(content.late)
        record = next(records, None)
        for epoch in range(self.sent + 1, sealed + 1):
            while record is not None and record.epoch < epoch:
                record = next(records, None)
            cut = record.cut if record is not None and record.epoch == epoch else find(epoch)
            if cut is None:
                raise CheckpointError(
                    f"{self._store.log.path}: the line of epoch {epoch} cannot be read, and what that epoch sent to the center cannot be "
                    "found in the checkpoints either. Bring the file back from a copy; or, if the hub has the epoch, go on from the "
                    "hub's checkpoint with an empty state directory and --take-over."
                )
            self._push(cut)

    def check(self, cut: Cut) -> None:
        """At a start: read the rows of the newest epoch if they wait for the hub. `DamagedError`: the epoch has to be replayed.

        Later it could not be: an epoch is replayed only as long as no later one is sealed.
        """
        if cut.epoch > self.sent and (fault := self._fault(cut, deep=True)) is not None:
            raise DamagedError(f"what epoch {cut.epoch} has for the hub is damaged: {fault}")

    def continuing(self, cut: Cut) -> Cut:
        """Before a seal: the record of the next epoch, with the chain that it continues."""
        return msgspec.structs.replace(cut, chain_before=self._newest_chain)

    def make_room(self, cut: Cut) -> None:
        """Before a seal: check that an epoch fits. `StorageError` while it does not.

        What drops rows counts rows only: their epochs cannot go, and how many there are is bounded by how fast they are sealed
        (`protocol.pacing`).
        """
        size_bytes = sum(run.size_bytes for segment in entry_of(cut).streams.values() for run in segment.runs)
        with self._io:
            if self._drops:
                # An epoch larger than the bound stays until newer rows come; one without rows makes nothing go.
                if (beyond := self._bytes + size_bytes - self._bytes_max) > 0 and self._bytes and size_bytes:
                    self._drop(beyond)
                return
            waiting_bytes, size_bytes = self._bytes + ENTRY_BYTES * self.epochs, size_bytes + ENTRY_BYTES
            if waiting_bytes + size_bytes <= self._bytes_max or not self.epochs or self.overrun:
                return
        raise OutboxFullError(
            f"the outbox is full: {waiting_bytes} bytes of {self.epochs} epochs wait for the hub, and {size_bytes} more do not fit into "
            f"{self._bytes_max}. Nothing more is read until the hub takes some of them. Bring the hub back, or give the outbox more "
            "room (--outbox-max)."
        )

    def add(self, cut: Cut) -> int:
        """Take in an epoch that has just been sealed; return the number of its rows."""
        if cut.epoch != self.newest + 1:
            raise AssertionError(f"epoch {cut.epoch} came into the outbox after {self.newest}")
        self._push(cut)
        self.wake()
        return sum(run.rows for segment in entry_of(cut).streams.values() for run in segment.runs)

    # The sender's side.

    def weights(self) -> Iterator[Weight]:
        """What each entry weighs, the oldest first, for the next commit; only some thousand of them."""
        return map(_weight, self._oldest(WEIGHTS_MAX))

    def oldest(self, count: int) -> tuple[EpochEntry, ...]:
        return tuple(self._oldest(count))

    def mark(self, epoch: int, *, chain: str, log_id: str) -> None:
        """The hub has everything up to here, with this chain. The mark is durable before anything is removed."""
        with self._io:
            delivery = msgspec.structs.replace(self._delivery, acknowledged=epoch, chain=chain, log_id=log_id)
            if epoch < self.sent or delivery == self._delivery:
                return
            self._store.log.note_delivery(delivery)
            self._store.failpoints.hit("outbox.marked")
            with self._mutex:
                for _ in range(min(epoch - self.sent, len(self._kept))):
                    self._bytes -= _UNPACK.decode(self._kept.popleft()).size_bytes
                self._delivery = delivery
                if self._newest_chain is None or not self._kept:
                    self._newest_chain = _fold(chain, (one.digest() for one in _entries(self._kept, epoch + 1)))
        self._unpin(epoch)

    def offer_again(self, head: int) -> int:
        """Send epochs after `head` again, which a restored hub has lost, as far back as they are still here. Return the first of them.

        These are epochs of which the checkpoint is kept; rows of others went when the hub had them.
        """
        with self._io:
            first, found = self.sent + 1, deque[Cut]()
            while first - 1 > head and (cut := self._still_here(first - 1)) is not None:
                found.appendleft(cut)
                first -= 1
            digests = [entry_of(cut).digest() for cut in found]
            if not found or _fold(found[0].chain_before or CHAIN_START, digests) != self._delivery.chain:
                return self.sent + 1
            delivery = msgspec.structs.replace(self._delivery, acknowledged=first - 1, chain=found[0].chain_before)
            self._store.log.note_delivery(delivery)
            with self._mutex:
                self._delivery = delivery
                for cut in reversed(found):
                    kept = _Kept.of(self._entry(cut))
                    self._kept.appendleft(_PACK.encode(kept))
                    self._bytes += kept.size_bytes
        return first

    # How.

    def _first_delivery(self, sealed: int, find: Callable[[int], Cut | None]) -> DeliveryState:
        """Nothing is known of the hub: what has rows that are still here may be unsent. The hub will say what it has."""
        epoch, cut = sealed, None
        while epoch and (cut := find(epoch)) is not None and cut.crosses and self._fault(cut, deep=False) is None:
            epoch -= 1
        # Nothing was to cross: the sender fills up what the hub wants, without a list of it here.
        nothing_before = cut is not None and not cut.crosses
        following = find(epoch + 1) if epoch < sealed else None
        chain = CHAIN_START if not epoch else None
        if following is not None and following.chain_before is not None:
            chain = following.chain_before
        elif cut is not None and cut.epoch == epoch and cut.chain_before is not None:
            chain = chained(cut.chain_before, entry_of(cut).digest())
        return DeliveryState(acknowledged=epoch, chain=chain, unsent_before=epoch if nothing_before else 0)

    def _still_here(self, epoch: int) -> Cut | None:
        """The record of an epoch that could be sent again: its checkpoint is kept, and pinned from now on, and its rows are whole."""
        with contextlib.suppress(CheckpointError):
            self._store.pin(epoch)
            self._offered.append(epoch)
            cut = self._store.manifest(epoch).cut
            if cut.chain_before is not None and self._fault(cut, deep=True) is None:
                return cut
        return None

    def _unpin(self, until: int) -> None:
        for epoch in [epoch for epoch in self._offered if epoch <= until]:
            self._offered.remove(epoch)
            self._store.unpin(epoch)

    def _fault(self, cut: Cut, *, deep: bool) -> str | None:
        runs = [run for segment in cut.segments if segment.stream is not None for run in segment.runs]
        return next((fault for run in runs if (fault := self._store.run_fault(run, deep=deep))), None)

    def _entry(self, cut: Cut) -> EpochEntry:
        return _without_rows(entry_of(cut)) if cut.epoch <= self._delivery.dropped else entry_of(cut)

    def _oldest(self, count: int, *, skipped: int = 0) -> Iterator[EpochEntry]:
        with self._mutex:
            first, some = self.sent + 1 + skipped, list(itertools.islice(self._kept, skipped, skipped + count))
        return _entries(some, first)

    def _drop(self, beyond: int) -> None:
        """Take the rows out of the oldest entries. The epochs stay: the hub takes none without those before it."""
        emptied: list[bytes] = []
        rows = dropped_bytes = 0
        before = max(self._delivery.dropped - self.sent, 0)
        for entry in self._oldest(len(self._kept), skipped=before):
            if beyond <= dropped_bytes:
                break
            rows += sum(run.rows for segment in entry.streams.values() for run in segment.runs)
            dropped_bytes += _weight(entry).size_bytes
            emptied.append(_PACK.encode(_Kept.of(_without_rows(entry))))
        delivery = msgspec.structs.replace(self._delivery, dropped=self.sent + before + len(emptied))
        self._store.log.note_delivery(delivery)
        with self._mutex:
            self._delivery = delivery
            self._bytes -= dropped_bytes
            for index, packed in enumerate(emptied, before):
                self._kept[index] = packed
        log.warning("outbox full, rows dropped", extra={"epochs": len(emptied), "rows": rows})

    def _push(self, cut: Cut) -> None:
        entry = self._entry(cut)
        kept = _Kept.of(entry)
        with self._mutex:
            self._kept.append(_PACK.encode(kept))
            self._bytes += kept.size_bytes
            if self._newest_chain is not None:
                self._newest_chain = chained(self._newest_chain, entry.digest())


def _without_rows(entry: EpochEntry) -> EpochEntry:
    streams = {name: msgspec.structs.replace(one, runs=()) for name, one in entry.streams.items()}
    return msgspec.structs.replace(entry, streams=streams, sealed_as=entry.digest())


def _fold(chain: str, digests: Iterable[str]) -> str:
    return functools.reduce(chained, digests, chain)


def _entries(packed: Iterable[bytes], first: int) -> Iterator[EpochEntry]:
    """The entries of these epochs, of which the first is `first`."""
    return (_UNPACK.decode(one).entry(epoch) for epoch, one in enumerate(packed, first))


def _weight(entry: EpochEntry) -> Weight:
    runs = [run for segment in entry.streams.values() for run in segment.runs]
    return Weight(
        size_bytes=sum(run.size_bytes for run in runs),
        body_bytes=len(msgspec.json.encode(entry)),
        runs=len(runs) + len(entry.streams),
    )
