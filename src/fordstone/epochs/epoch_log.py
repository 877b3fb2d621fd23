"""The epoch log: one record per epoch, and how far the hub has acknowledged them.

`epochs.jsonl` is appended to before each manifest; the manifest, which contains the same record, is the commit. When a manifest is
damaged, its epoch is replayed from the record in this log. After each manifest a line records that the epoch is sealed: without
it, a lost manifest would look like a commit that never happened. The outbox is what is sealed and not acknowledged (`edge.link.outbox`):
it may be millions of records, so they are read, and copied at a rewrite, one by one.

Invariants: a line counts only under its own checksum; when an epoch is sealed the log holds one record of it, so a damaged line never
uncovers an older, unsealed one; a record is there only if the epoch before it is sealed; a record that crosses to the hub stays until
it is acknowledged.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec

from fordstone.epochs.manifest import EPOCH_MAX, Cut, cut_of, encode_cut
from fordstone.errors import DamagedError, StorageError
from fordstone.storage.disk import Disk
from fordstone.storage.failpoint import Failpoints
from fordstone.storage.journal import Journal, JournalLines, Record, seal

EPOCH_LOG_NAME: Final = "epochs.jsonl"
EPOCH_LOG_MAX_BYTES: Final = 16 << 20
"""The log is rewritten to about half of this when it has grown beyond it."""
EPOCHS: Final = range(1, EPOCH_MAX + 1)
_EPOCH: Final = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=1, le=EPOCH_MAX)])


class DeliveryState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far the hub has this node's epochs. Its numbers only grow, but for `acknowledged` after a restore of the hub."""

    acknowledged: int
    """The hub has every epoch up to this one."""
    chain: str | None = None
    """The chain at `acknowledged` (`protocol.chain`); None: it is not known here."""
    log_id: str = ""
    """The hub's log that acknowledged it; empty: none has yet."""
    dropped: int = 0
    """Epochs up to this one are sent without rows: the outbox was full, and was to drop the oldest."""
    unsent_before: int = 0
    """Epochs up to this one were sealed before there was a hub, and hold nothing for it."""


_DELIVERY: Final = msgspec.json.Decoder(DeliveryState)


class EpochRecord(NamedTuple):
    """One line for one epoch."""

    epoch: int
    cut: Cut
    replayable: bool
    """False: an older epoch that waits for the hub. The record is without what was read."""


@dataclass(slots=True, kw_only=True)
class EpochLogContent:
    """What the log says, but for most of its records, and how many of its lines say nothing any more."""

    cuts: dict[int, Cut] = field(default_factory=dict)
    """Of the epochs that were asked for, as far as they can be replayed."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Of each epoch that can be replayed, the size of its line."""
    late: dict[int, EpochRecord] = field(default_factory=dict)
    """Records that a later epoch precedes, or another one of their epoch. Lines are written in order, so there are few."""
    newest_crossing: int = 0
    """The newest epoch that is kept only for the hub."""
    damaged_lines: int = 0
    noted: int = 0
    """The newest epoch of which a line says that it is sealed."""
    delivery: DeliveryState | None = None
    """None: nothing was ever sent to a hub."""

    @property
    def sealed(self) -> int:
        """The newest epoch that is known to be sealed: a line says so, the hub has it, or a later record is there."""
        acknowledged = self.delivery.acknowledged if self.delivery is not None else 0
        return max(self.noted, acknowledged, max(self.sizes, default=1) - 1)


class EpochLog:
    """Appends and finds records. Written by the thread that commits and the one that sends."""

    def __init__(
        self, disk: Disk, directory: str, *, failpoints: Failpoints, max_bytes: int = EPOCH_LOG_MAX_BYTES
    ) -> None:
        self.path = f"{directory}/{EPOCH_LOG_NAME}"
        self._journal = Journal(disk, self.path)
        self._failpoints = failpoints
        self._mutex = threading.RLock()
        self._max_bytes = max_bytes
        self._rewrite_above_bytes = max_bytes
        self._newest: int | None = None
        self._newest_crossing = 0
        """The newest epoch that is kept only for the hub."""
        self._acknowledged = 0

    def read(self, wanted: Container[int] = EPOCHS) -> EpochLogContent:
        """All but the records of epochs that are not `wanted`. Of two lines for one epoch the later one counts."""
        return _content(self._journal.read(), wanted)

    def records(self, late: dict[int, EpochRecord]) -> Iterator[EpochRecord]:
        """Yield one record per epoch, in their order. `late`: what `read` has found, and what is to replace records of the file."""
        newest, rest = 0, [late[epoch] for epoch in sorted(late, reverse=True)]
        for line in self._journal.read():
            record = _record(line)
            if record is None or record.epoch <= newest:
                continue
            newest = record.epoch
            while rest and rest[-1].epoch < newest:
                yield rest.pop()
            yield rest.pop() if rest and rest[-1].epoch == newest else record
        yield from reversed(rest)

    def note_sealed(self, epoch: int) -> None:
        """Say that an epoch is sealed. Called when its manifest is durable; this line is so with the next record.

        Never fails: the manifest itself says the same, and this line only counts if that vanishes.
        """
        with self._mutex, contextlib.suppress(StorageError):
            self._journal.append(_sealed_line(epoch), sync=False)

    def note_delivery(self, delivery: DeliveryState) -> None:
        """Record, durably, how far the hub is."""
        with self._mutex:
            self._journal.append(seal("delivery", delivery))
            self._acknowledged = delivery.acknowledged

    def record(self, cut: Cut, *, sealed_before: bool, needed_from: int) -> None:
        """Make the record durable. Called before the manifest is.

        Lines of a commit that never happened (this epoch or later) are removed first. An epoch that was sealed before only
        mends its own line. `needed_from`: records of this epoch and later survive whatever the bound says.
        """
        with self._mutex:
            if self._newest is None:
                self._learn(self.read(()))
            if cut.epoch > (self._newest or 0):
                self._append(cut)
            else:
                self._insert(cut, sealed_before=sealed_before)
            size_bytes = self._journal.size_bytes
            all_sent = 0 < self._newest_crossing <= self._acknowledged
            if size_bytes > (self._max_bytes if all_sent else self._rewrite_above_bytes):
                content = self.read(())
                self._rewrite(content, replayable_from=self._fitting(content, needed_from))
                # What is needed may be more than the bound: then wait until it has doubled rather than rewrite every time.
                self._rewrite_above_bytes = max(self._max_bytes, 2 * self._journal.size_bytes)

    def restate(self, cut: Cut) -> None:
        """Append the record of a sealed epoch after another one of that epoch. The file is not rewritten: another process appends to it."""
        with self._mutex:
            self._journal.append(encode_cut(cut))

    def add(self, cuts: Iterable[Cut]) -> None:
        """Take in records of sealed epochs from a remote. They win: what stands here may be from a commit that never happened."""
        with self._mutex:
            added = {cut.epoch: cut for cut in cuts}
            content = self.read(added)
            if content.cuts != added or content.damaged_lines:
                self._rewrite(content, added.values())

    def mend(self, cuts: Iterable[Cut], keep_copy: Callable[[str], None]) -> str | None:
        """If there is damage, keep a copy and rewrite the log with these records of whole manifests; return what was wrong."""
        cuts = list(cuts)
        content = self.read({cut.epoch for cut in cuts})
        # Where the two differ, the manifest is the commit.
        missing = [cut.epoch for cut in cuts if content.cuts.get(cut.epoch) != cut]
        if not missing and not content.damaged_lines:
            return None
        if content.damaged_lines:
            keep_copy(self.path)
        self.add(cuts)
        return f"{content.damaged_lines} of its lines cannot be read, {len(missing)} cuts of kept checkpoints are missing or differ"

    def output_of(self, epochs: range) -> set[str]:
        """The digests of the runs that these epochs released, as far as their records can be read."""
        found = (cut.segments for cut in self.read(epochs).cuts.values())
        return {run.digest for segments in found for segment in segments for run in segment.runs}

    def _append(self, cut: Cut) -> None:
        # Set before the write: after a failed one it is unknown whether the line is there, so the next try rewrites.
        self._newest = cut.epoch
        self._journal.append(encode_cut(cut), sync=False)
        self._failpoints.hit("cut.appended")
        self._journal.sync()
        self._failpoints.hit("cut.synced")

    def _insert(self, cut: Cut, *, sealed_before: bool) -> None:
        content = self.read((cut.epoch,))
        if sealed_before and content.cuts.get(cut.epoch) == cut:
            return
        if not sealed_before:
            content.noted = min(content.noted, cut.epoch - 1)
        self._rewrite(content, [cut], replayable_until=None if sealed_before else cut.epoch)

    def _rewrite(
        self,
        content: EpochLogContent,
        added: Iterable[Cut] = (),
        *,
        replayable_from: int = 1,
        replayable_until: int | None = None,
    ) -> None:
        """Write the log again with these records in place of those of their epochs.

        Before `replayable_from`, only what waits for the hub stays; after `replayable_until`, no record that could be replayed.
        """
        newest = newest_crossing = 0
        acknowledged = content.delivery.acknowledged if content.delivery is not None else 0
        replaced = content.late | {cut.epoch: EpochRecord(cut.epoch, cut, replayable=True) for cut in added}

        def lines() -> Iterator[bytes]:
            nonlocal newest, newest_crossing
            for epoch, cut, replayable in self.records(replaced):
                if replayable and replayable_until is not None and epoch > replayable_until:
                    continue
                if replayable and epoch >= replayable_from:
                    newest = epoch
                    yield encode_cut(cut)
                elif epoch > acknowledged and cut.crosses:
                    newest_crossing = epoch
                    yield seal("crossing", msgspec.structs.replace(cut, sources={}))

        # Twice, at both ends: without it, epochs that the hub has would be missed.
        delivery = [] if content.delivery is None else [seal("delivery", content.delivery)]
        noted = [_sealed_line(content.noted)] if content.noted else []
        self._journal.rewrite(itertools.chain(delivery, lines(), noted, delivery))
        self._failpoints.hit("cut.appended")
        self._failpoints.hit("cut.synced")
        self._newest, self._newest_crossing, self._acknowledged = newest, newest_crossing, acknowledged

    def _learn(self, content: EpochLogContent) -> None:
        self._newest = max(content.sizes, default=0)
        self._newest_crossing = content.newest_crossing
        self._acknowledged = content.delivery.acknowledged if content.delivery is not None else 0

    def _fitting(self, content: EpochLogContent, needed_from: int) -> int:
        """From which epoch on records stay: the newest that fill half the bound, and all that are needed."""
        first, room_bytes = EPOCH_MAX, self._max_bytes // 2
        for epoch in sorted(content.sizes, reverse=True):
            room_bytes -= content.sizes[epoch]
            if room_bytes < 0 and epoch < needed_from:
                break
            first = epoch
        return first


def parse_epoch_log(data: bytes) -> EpochLogContent:
    """Read the lines of an epoch log, wherever its bytes came from."""
    return _content(JournalLines([data]), EPOCHS)


def _sealed_line(epoch: int) -> bytes:
    return seal("sealed", epoch)


def _record(line: Record) -> EpochRecord | None:
    """Decode the record of an epoch; None if the line is not one, or cannot be decoded."""
    if line.kind not in {"cut", "crossing"}:
        return None
    try:
        cut = cut_of(line)
    except DamagedError:
        return None
    return EpochRecord(cut.epoch, cut, replayable=line.kind == "cut")


def _content(lines: JournalLines, wanted: Container[int]) -> EpochLogContent:
    content = EpochLogContent()
    newest = 0
    for line in lines:
        record = _record(line)
        try:
            if record is not None:
                if record.epoch <= newest:
                    content.late[record.epoch] = record
                newest = max(newest, record.epoch)
                if not record.replayable:
                    content.newest_crossing = max(content.newest_crossing, record.epoch)
                    continue
                content.sizes[record.epoch] = line.size_bytes
                if record.epoch in wanted:
                    content.cuts[record.epoch] = record.cut
            elif line.kind == "sealed":
                content.noted = max(content.noted, line.decode(_EPOCH))
            elif line.kind == "delivery":
                content.delivery = line.decode(_DELIVERY)
            else:
                content.damaged_lines += 1
        except DamagedError:
            content.damaged_lines += 1
    content.damaged_lines += lines.damaged_lines + bool(lines.torn_bytes)
    return content
