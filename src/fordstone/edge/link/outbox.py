"""The outbox: sealed epochs that the hub does not have yet, as an index of entries; their rows are runs in the store.

    <pipeline>/<node>/outbox.jsonl   a line for each entry, and for each time the hub has acknowledged some

The writer adds an entry after each seal; `edge.sending` takes the oldest and marks them when the hub has them. Both
append to one file, which is rewritten when most of it is of no use any more: days without the hub cost a line an epoch.

Invariants: a line counts only under its own checksum; entries have no gaps; an entry is durable when `add` returns, and
goes only after the mark that the hub has it is durable; the runs of every entry that is there are held.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from fordstone.errors import CheckpointError, DamagedError, StorageError
from fordstone.hub.messages import EpochEntry
from fordstone.protocol.sending import Weight
from fordstone.storage.disk import Disk
from fordstone.storage.failpoint import Failpoints, NoFailpoints
from fordstone.storage.journal import Journal, JournalContent, seal

log = logging.getLogger(__name__)

OUTBOX_NAME: Final = "outbox.jsonl"
COMPACT_BYTES_MIN: Final = 1 << 18
"""The file is rewritten when so much of it, and more than half, is of no use any more."""
COLLECT_EPOCHS: Final = 5_000
_ENTRY: Final = msgspec.json.Decoder(EpochEntry)
_EPOCH: Final = msgspec.json.Decoder(int)


class Found(NamedTuple):
    """An entry that was made again from what else is known of its epoch."""

    entry: EpochEntry
    exact: bool
    """It is surely as it was."""


class _Kept(NamedTuple):
    """An entry, small: there may be some hundred thousand."""

    body: bytes
    size_bytes: int
    digests: tuple[str, ...]
    segments: int
    exact: bool


class Outbox:
    """Written by two threads, the writer's and the sender's; read by any."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        bytes_max: int,
        drops: bool = False,
        fresh: bool = False,
        failpoints: Failpoints | None = None,
        compact_bytes_min: int = COMPACT_BYTES_MIN,
    ) -> None:
        """`drops`: when it is full, the oldest rows go; else nothing is sealed. `fresh`: the directory never had to do with a hub."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something new to send."""
        self.overrun = False
        """The last epoch before a stop may go beyond the bound: otherwise a full outbox could not be stopped."""
        self.unsent_before = 0
        """Epochs up to this one were sealed before there was an outbox, and hold nothing for the hub."""
        self._directory = directory
        self._journal = Journal(disk, f"{directory}/{OUTBOX_NAME}")
        self._bytes_max, self._drops, self._fresh = bytes_max, drops, fresh
        self._failpoints = failpoints or NoFailpoints()
        self._compact_bytes_min = compact_bytes_min
        self._io = threading.RLock()
        """Held while the file is written. Taken before the other lock, which is never held while a disk is waited for."""
        self._mutex = threading.Lock()
        self._sent = 0
        self._kept: deque[_Kept] = deque()
        self._held: dict[str, int] = {}
        """How many entries name each run."""
        self._bytes = self._live_bytes = 0
        self._there = False

    # What is known of it.

    @property
    def sent(self) -> int:
        """The newest epoch that the hub is known to have."""
        return self._sent

    @property
    def newest(self) -> int:
        """The newest epoch that is, or was, in here."""
        with self._mutex:
            return self._sent + len(self._kept)

    @property
    def epochs(self) -> int:
        """How many wait."""
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """How many bytes of rows wait."""
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

    def begin(self, sealed: int, find: Callable[[int], Found | None]) -> None:
        """Read what is there and make it whole. Called before anything else; again if another checkpoint has to be used.

        `sealed`: the newest sealed epoch. `find` restores an entry from checkpoints and cuts.
        """
        lines = self._read()
        self._kept.clear()
        self._held.clear()
        self._bytes = self._live_bytes = 0
        known = {epoch: kept for epoch, kept in lines.entries.items() if epoch > lines.sent}
        newest = max(known, default=lines.sent)
        if newest > sealed:
            raise CheckpointError(
                f"the outbox in {self._directory} has epoch {newest}, but the newest checkpoint there is of epoch {sealed}: "
                "the files of this state directory are not of one time. Bring all of them back from one copy, or go on from the "
                "hub's checkpoint with an empty directory and --take-over."
            )
        self._sent, self.unsent_before = lines.sent, lines.unsent_before
        if not self._there:
            known, found = {}, None
            for epoch in range(sealed, 0, -1):
                found = find(epoch)
                if found is None or not found.entry.streams:
                    break
                known[epoch] = _kept(found.entry, exact=found.exact)
            self._sent = min(known, default=sealed + 1) - 1
            # Nothing crosses at all, or nothing was to cross: the sender fills up what the hub wants, without a list of it here.
            empty = found is not None and not found.entry.streams
            self.unsent_before = self._sent if self._fresh or empty else 0
        for epoch in range(self._sent + 1, sealed + 1):
            self._push(known.get(epoch) or self._find(epoch, find))
        mended = lines.damaged or self._kept_count_differs(lines)
        if mended:
            log.warning("outbox mended", extra={"damaged_lines": lines.damaged, "epochs": self.epochs})
        if mended or not self._there:
            self._rewrite()

    def add(self, entry: EpochEntry, *, exact: bool = True) -> None:
        """Take in a sealed epoch; durable on return. One that is there already, or that the hub has, stays as it is."""
        with self._io:
            newest = self.newest
            if entry.epoch <= newest:
                return
            if entry.epoch != newest + 1:
                raise AssertionError(f"epoch {entry.epoch} came into the outbox after {newest}")
            self._failpoints.hit("outbox.before-add")
            kept = _kept(entry, exact=exact)
            self._journal.append(_line(kept))
            self._failpoints.hit("outbox.added")
            self._push(kept)
        self.wake()

    def replace(self, entry: EpochEntry) -> None:
        """Put another entry in the place of one that waits: its rows were damaged and have been computed again."""
        with self._io:
            if not self._sent < entry.epoch <= self.newest:
                return
            kept = _kept(entry, exact=False)
            self._journal.append(_line(kept))
            self._swap(entry.epoch, kept)

    def make_room(self, size_bytes: int) -> None:
        """Before a seal: check that this many more bytes fit. `StorageError` while they do not."""
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

    # The sender's side.

    def weights(self) -> Iterator[Weight]:
        """What each entry weighs, the oldest first, for the next commit; only some thousand of them."""
        with self._mutex:
            some = list(itertools.islice(self._kept, 2048))
        return (
            Weight(size_bytes=kept.size_bytes, body_bytes=len(kept.body), runs=len(kept.digests) + kept.segments)
            for kept in some
        )

    def oldest(self, count: int) -> tuple[EpochEntry, ...]:
        """The oldest entries."""
        with self._mutex:
            some = list(itertools.islice(self._kept, count))
        return tuple(_ENTRY.decode(kept.body) for kept in some)

    def entry(self, epoch: int) -> EpochEntry | None:
        """An entry that waits; None: it does not."""
        kept = self._waiting(epoch)
        return None if kept is None else _ENTRY.decode(kept.body)

    def digest(self, epoch: int) -> str | None:
        """The digest of an entry that waits; None if it does not, or was restored so that its original is unknown."""
        kept = self._waiting(epoch)
        return None if kept is None or not kept.exact else _ENTRY.decode(kept.body).digest()

    def mark(self, epoch: int) -> None:
        """The hub has everything up to here. The mark is durable before anything is removed."""
        with self._io:
            if epoch <= self._sent:
                return
            self._journal.append(seal("sent", epoch))
            self._failpoints.hit("outbox.marked")
            with self._mutex:
                while self._sent < epoch:
                    self._sent += 1
                    if self._kept:
                        self._forget(self._kept.popleft())
            if self._journal.size_bytes - self._live_bytes > max(self._compact_bytes_min, self._live_bytes):
                self._rewrite()
            self._failpoints.hit("outbox.trimmed")

    # How.

    def _waiting(self, epoch: int) -> _Kept | None:
        with self._mutex:
            index = epoch - self._sent - 1
            return self._kept[index] if 0 <= index < len(self._kept) else None

    def _find(self, epoch: int, find: Callable[[int], Found | None]) -> _Kept:
        found = find(epoch)
        if found is None:
            raise CheckpointError(
                f"{self._journal.path}: the line of epoch {epoch} cannot be read, and what that epoch sent to the center cannot be found in "
                "the checkpoints either. Bring the file back from a copy; or, if the hub has the epoch, go on from the hub's "
                "checkpoint with an empty state directory and --take-over."
            )
        return _kept(found.entry, exact=found.exact)

    def _kept_count_differs(self, lines: _Lines) -> bool:
        return self._there and any(epoch not in lines.entries for epoch in range(self._sent + 1, self.newest + 1))

    def _read(self) -> _Lines:
        self._there = self._journal.exists()
        return _parse(self._journal.read())

    def _rewrite(self) -> None:
        with self._mutex:
            kept = list(self._kept)
        # Twice, at both ends: without it, entries that are long gone would be missed.
        sent = seal("sent", self._sent)
        before = [seal("before", self.unsent_before)] if self.unsent_before else []
        self._journal.rewrite([sent, *before, *map(_line, kept), sent])
        self._there = True

    def _drop(self, beyond: int) -> None:
        """Take the rows out of the oldest entries. The epochs stay: the hub takes none without those before it."""
        emptied: dict[int, _Kept] = {}
        rows = 0
        for epoch, kept in zip(itertools.count(self._sent + 1), list(self._kept), strict=False):
            if beyond <= 0:
                break
            if kept.size_bytes:
                entry = _ENTRY.decode(kept.body)
                rows += sum(run.rows for segment in entry.streams.values() for run in segment.runs)
                streams = {name: msgspec.structs.replace(one, runs=()) for name, one in entry.streams.items()}
                emptied[epoch] = _kept(msgspec.structs.replace(entry, streams=streams), exact=False)
                beyond -= kept.size_bytes
        if emptied:
            self._journal.append(*map(_line, emptied.values()))
            for epoch, kept in emptied.items():
                self._swap(epoch, kept)
            log.warning("outbox full, rows dropped", extra={"epochs": len(emptied), "rows": rows})

    def _push(self, kept: _Kept) -> None:
        with self._mutex:
            self._kept.append(kept)
            self._remember(kept)

    def _swap(self, epoch: int, kept: _Kept) -> None:
        with self._mutex:
            index = epoch - self._sent - 1
            if 0 <= index < len(self._kept):
                self._forget(self._kept[index])
                self._kept[index] = kept
                self._remember(kept)

    def _remember(self, kept: _Kept) -> None:
        for digest in kept.digests:
            self._held[digest] = self._held.get(digest, 0) + 1
        self._bytes += kept.size_bytes
        self._live_bytes += len(kept.body)

    def _forget(self, kept: _Kept) -> None:
        for digest in kept.digests:
            left = self._held[digest] - 1
            if left:
                self._held[digest] = left
            else:
                del self._held[digest]
        self._bytes -= kept.size_bytes
        self._live_bytes -= len(kept.body)


class _Lines(NamedTuple):
    entries: dict[int, _Kept]
    sent: int
    unsent_before: int
    damaged: int


def _parse(content: JournalContent) -> _Lines:
    entries: dict[int, _Kept] = {}
    sent = before = 0
    damaged = content.damaged_lines + bool(content.torn_bytes)
    for record in content.records:
        try:
            match record.kind:
                case "entry" | "again":
                    entry = record.decode(_ENTRY)
                    entries[entry.epoch] = _kept(entry, exact=record.kind == "entry", body=record.body)
                case "before":
                    before = max(before, record.decode(_EPOCH))
                case _:
                    sent = max(sent, record.decode(_EPOCH))
        except DamagedError:
            damaged += 1
    return _Lines(entries, sent, before, damaged)


def _kept(entry: EpochEntry, *, exact: bool, body: bytes | None = None) -> _Kept:
    size_bytes, digests = 0, []
    for segment in entry.streams.values():
        for run in segment.runs:
            size_bytes += run.size_bytes
            digests.append(run.digest)
    body = msgspec.json.encode(entry, order="deterministic") if body is None else body
    return _Kept(body, size_bytes, tuple(digests), len(entry.streams), exact)


def _line(kept: _Kept) -> bytes:
    return seal("entry" if kept.exact else "again", msgspec.Raw(kept.body))
