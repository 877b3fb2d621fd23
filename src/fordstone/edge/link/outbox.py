"""The outbox: sealed epochs that the hub does not have yet. It is an index in memory of the epoch log; their rows are runs in the store.

The writer adds each epoch when it is sealed; `edge.link.sender` takes the oldest and marks them when the hub has them. Days without
the hub cost a line in the log per epoch.

Invariants: entries have no gaps; an entry goes only after the mark that the hub has it is durable; the runs of every entry that
is there are held.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from fordstone.epochs.epoch_log import DeliveryState
from fordstone.epochs.manifest import Cut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError, StorageError
from fordstone.hub.messages import ENDED_US, EpochEntry, StreamSegment
from fordstone.protocol.delivery import Weight

log = logging.getLogger(__name__)

COLLECT_EPOCHS: Final = 5_000
WEIGHTS_MAX: Final = 2048
_ENTRY: Final = msgspec.json.Decoder(EpochEntry)


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
    )


class _Kept(NamedTuple):
    """An entry, small: there may be some hundred thousand."""

    body: bytes
    size_bytes: int
    digests: tuple[str, ...]
    segments: int
    exact: bool
    """The hub cannot have this epoch with other content."""


class Outbox:
    """Written by two threads, the writer's and the sender's; read by any."""

    def __init__(self, store: CheckpointStore, *, bytes_max: int, drops: bool = False, fresh: bool = False) -> None:
        """`drops`: when it is full, the oldest rows go; else nothing is sealed. `fresh`: the directory never had to do with a hub."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something new to send."""
        self.overrun = False
        """The last epoch before a stop may go beyond the bound: otherwise a full outbox could not be stopped."""
        self._store = store
        self._bytes_max, self._drops, self._fresh = bytes_max, drops, fresh
        self._io = threading.Lock()
        """Held while a mark is written. Taken before the other lock, which is never held while a disk is waited for."""
        self._mutex = threading.Lock()
        self._delivery = DeliveryState(acknowledged=0)
        self._kept: deque[_Kept] = deque()
        self._held: dict[str, int] = {}
        """How many entries name each run."""
        self._bytes = 0

    # What is known of it.

    @property
    def sent(self) -> int:
        """The newest epoch that the hub is known to have."""
        return self._delivery.acknowledged

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
        return self._bytes

    @property
    def collect_every(self) -> int:
        """Every how many epochs it is worth looking for runs that may go: it takes a look at each that may not."""
        return 1 + self.epochs // COLLECT_EPOCHS

    def held(self) -> set[str]:
        """The runs that must stay. Called by the writer before it collects."""
        with self._mutex:
            return set(self._held)

    # The writer's side.

    def begin(self, sealed: int, *, crosses: bool = True) -> None:
        """Find what waits. Called before anything else, after any replay; again if another checkpoint has to be used.

        `sealed`: the newest sealed epoch. `crosses`: the plan has rows for the hub.
        """
        content = self._store.log.read()
        records = content.crossings | content.cuts

        def find(epoch: int) -> Cut | None:
            try:
                return records.get(epoch) or self._store.manifest(epoch).cut
            except CheckpointError:
                # A pipeline of which nothing crosses may have run without a hub, and nothing was lost by it.
                return None if crosses else Cut(epoch=epoch, sources={}, restated=True)

        if content.delivery is None:
            self._delivery = self._first_delivery(sealed, find)
            self._store.log.note_delivery(self._delivery)
        else:
            self._delivery = content.delivery
        self._kept.clear()
        self._held.clear()
        self._bytes = 0
        for epoch in range(self.sent + 1, sealed + 1):
            cut = find(epoch)
            if cut is None:
                raise CheckpointError(
                    f"{self._store.log.path}: the line of epoch {epoch} cannot be read, and what that epoch sent to the center cannot be "
                    "found in the checkpoints either. Bring the file back from a copy; or, if the hub has the epoch, go on from the "
                    "hub's checkpoint with an empty state directory and --take-over."
                )
            self._push(self._keep(cut))

    def check(self, cut: Cut) -> None:
        """At a start: read the rows of the newest epoch if they wait for the hub. `DamagedError`: the epoch has to be replayed.

        Later it could not be: an epoch is replayed only as long as no later one is sealed.
        """
        if cut.epoch > self.sent and (fault := self._fault(cut, deep=True)) is not None:
            raise DamagedError(f"what epoch {cut.epoch} has for the hub is damaged: {fault}")

    def make_room(self, cut: Cut) -> None:
        """Before a seal: check that the rows of an epoch fit. `StorageError` while they do not."""
        size_bytes = sum(run.size_bytes for segment in entry_of(cut).streams.values() for run in segment.runs)
        with self._io:
            beyond = self._bytes + size_bytes - self._bytes_max
            if beyond <= 0 or not self._bytes or self.overrun or not size_bytes:
                return
            if self._drops:
                self._drop(beyond)
                return
        raise StorageError(
            f"the outbox is full: {self._bytes} bytes of {self.epochs} epochs wait for the hub, and {size_bytes} more do not fit into "
            f"{self._bytes_max}. Nothing more is read until the hub takes some of them. Bring the hub back, or give the outbox more "
            "room (--outbox-max)."
        )

    def add(self, cut: Cut) -> int:
        """Take in an epoch that has just been sealed; return the number of its rows."""
        if cut.epoch != self.newest + 1:
            raise AssertionError(f"epoch {cut.epoch} came into the outbox after {self.newest}")
        self._push(self._keep(cut))
        self.wake()
        return sum(run.rows for segment in entry_of(cut).streams.values() for run in segment.runs)

    # The sender's side.

    def weights(self) -> Iterator[Weight]:
        """What each entry weighs, the oldest first, for the next commit; only some thousand of them."""
        with self._mutex:
            some = list(itertools.islice(self._kept, WEIGHTS_MAX))
        return (
            Weight(size_bytes=kept.size_bytes, body_bytes=len(kept.body), runs=len(kept.digests) + kept.segments)
            for kept in some
        )

    def oldest(self, count: int) -> tuple[EpochEntry, ...]:
        with self._mutex:
            some = list(itertools.islice(self._kept, count))
        return tuple(_ENTRY.decode(kept.body) for kept in some)

    def digest(self, epoch: int) -> str | None:
        """The digest of an entry that waits; None if it does not, or if the hub may have it with other content."""
        with self._mutex:
            index = epoch - self.sent - 1
            kept = self._kept[index] if 0 <= index < len(self._kept) else None
        return None if kept is None or not kept.exact else _ENTRY.decode(kept.body).digest()

    def mark(self, epoch: int) -> None:
        """The hub has everything up to here. The mark is durable before anything is removed."""
        with self._io:
            if epoch <= self.sent:
                return
            delivery = msgspec.structs.replace(self._delivery, acknowledged=epoch)
            self._store.log.note_delivery(delivery)
            self._store.failpoints.hit("outbox.marked")
            with self._mutex:
                for _ in range(min(epoch - self.sent, len(self._kept))):
                    self._forget(self._kept.popleft())
                self._delivery = delivery

    # How.

    def _first_delivery(self, sealed: int, find: Callable[[int], Cut | None]) -> DeliveryState:
        """Nothing is known of the hub: what has rows that are still here may be unsent. The hub will say what it has."""
        epoch, cut = sealed, None
        while epoch and (cut := find(epoch)) is not None and cut.crosses and self._fault(cut, deep=False) is None:
            epoch -= 1
        # Nothing was to cross: the sender fills up what the hub wants, without a list of it here.
        nothing_before = self._fresh or (cut is not None and not cut.crosses)
        return DeliveryState(acknowledged=epoch, unsent_before=epoch if nothing_before else 0)

    def _fault(self, cut: Cut, *, deep: bool) -> str | None:
        runs = [run for segment in cut.segments if segment.stream is not None for run in segment.runs]
        return next((fault for run in runs if (fault := self._store.run_fault(run, deep=deep))), None)

    def _keep(self, cut: Cut) -> _Kept:
        if cut.epoch <= self._delivery.dropped:
            return _kept(_without_rows(entry_of(cut)), exact=False)
        return _kept(entry_of(cut), exact=not cut.restated)

    def _drop(self, beyond: int) -> None:
        """Take the rows out of the oldest entries. The epochs stay: the hub takes none without those before it."""
        emptied: list[_Kept] = []
        rows = 0
        for kept in list(self._kept):
            if beyond <= 0:
                break
            entry = _ENTRY.decode(kept.body)
            rows += sum(run.rows for segment in entry.streams.values() for run in segment.runs)
            emptied.append(_kept(_without_rows(entry), exact=False))
            beyond -= kept.size_bytes
        delivery = msgspec.structs.replace(self._delivery, dropped=self.sent + len(emptied))
        self._store.log.note_delivery(delivery)
        with self._mutex:
            self._delivery = delivery
            for index, kept in enumerate(emptied):
                self._forget(self._kept[index])
                self._kept[index] = kept
        log.warning("outbox full, rows dropped", extra={"epochs": len(emptied), "rows": rows})

    def _push(self, kept: _Kept) -> None:
        with self._mutex:
            self._kept.append(kept)
            for digest in kept.digests:
                self._held[digest] = self._held.get(digest, 0) + 1
            self._bytes += kept.size_bytes

    def _forget(self, kept: _Kept) -> None:
        for digest in kept.digests:
            left = self._held[digest] - 1
            if left:
                self._held[digest] = left
            else:
                del self._held[digest]
        self._bytes -= kept.size_bytes


def _without_rows(entry: EpochEntry) -> EpochEntry:
    streams = {name: msgspec.structs.replace(one, runs=()) for name, one in entry.streams.items()}
    return msgspec.structs.replace(entry, streams=streams)


def _kept(entry: EpochEntry, *, exact: bool) -> _Kept:
    runs = [run for segment in entry.streams.values() for run in segment.runs]
    return _Kept(
        body=msgspec.json.encode(entry, order="deterministic"),
        size_bytes=sum(run.size_bytes for run in runs),
        digests=tuple(run.digest for run in runs),
        segments=len(entry.streams),
        exact=exact,
    )
