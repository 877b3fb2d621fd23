"""The epoch log: one record per epoch, and how far the hub has acknowledged them.

`epochs.jsonl` is appended to before each manifest; the manifest, which contains the same record, is the commit. When a manifest is
damaged, its epoch is replayed from the record in this log. After each manifest a line records that the epoch is sealed: without
it, a lost manifest would look like a commit that never happened. The outbox is what is sealed and not acknowledged (`edge.link.outbox`).

Invariants: a line counts only under its own checksum; when an epoch is sealed the log holds one record of it, so a damaged line never
uncovers an older, unsealed one; a record is there only if the epoch before it is sealed; a record that crosses to the hub stays until
it is acknowledged.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import msgspec

from fordstone.epochs.manifest import EPOCH_MAX, Cut, cut_of, encode_cut
from fordstone.errors import DamagedError, StorageError
from fordstone.storage.disk import Disk
from fordstone.storage.failpoint import Failpoints
from fordstone.storage.journal import Journal, JournalContent, parse_journal, seal

EPOCH_LOG_NAME: Final = "epochs.jsonl"
EPOCH_LOG_MAX_BYTES: Final = 16 << 20
"""The log is rewritten to about half of this when it has grown beyond it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLogContent:
    """What the log says, and how many of its lines say nothing any more."""

    cuts: dict[int, Cut] = field(default_factory=dict)
    crossings: dict[int, Cut] = field(default_factory=dict)
    """Of older epochs that wait for the hub: the record without what was read, which cannot be replayed."""
    damaged_lines: int = 0
    noted: int = 0
    """The newest epoch of which a line says that it is sealed."""
    delivery: DeliveryState | None = None
    """None: nothing was ever sent to a hub."""

    @property
    def sealed(self) -> int:
        """The newest epoch that is known to be sealed: a line says so, the hub has it, or a later record is there."""
        acknowledged = self.delivery.acknowledged if self.delivery is not None else 0
        return max(self.noted, acknowledged, max(self.cuts, default=1) - 1)


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

    def read(self) -> EpochLogContent:
        """Everything that can be read. Of two lines for one epoch the later one counts."""
        return _content(self._journal.read())

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
                self._learn(self.read())
            if cut.epoch > (self._newest or 0):
                self._append(cut)
            else:
                self._insert(cut, sealed_before=sealed_before)
            size_bytes = self._journal.size_bytes
            all_sent = 0 < self._newest_crossing <= self._acknowledged
            if size_bytes > (self._max_bytes if all_sent else self._rewrite_above_bytes):
                self._rewrite(self._fitting(self.read(), needed_from))
                # What is needed may be more than the bound: then wait until it has doubled rather than rewrite every time.
                self._rewrite_above_bytes = max(self._max_bytes, 2 * self._journal.size_bytes)

    def restate(self, cut: Cut) -> None:
        """Append the record of a sealed epoch after another one of that epoch. The file is not rewritten: another process appends to it."""
        with self._mutex:
            self._journal.append(encode_cut(cut))

    def add(self, cuts: Iterable[Cut]) -> None:
        """Take in records of sealed epochs from a remote. They win: what stands here may be from a commit that never happened."""
        with self._mutex:
            content = self.read()
            together = content.cuts | {cut.epoch: cut for cut in cuts}
            if together != content.cuts or content.damaged_lines:
                self._rewrite(replace(content, cuts=together))

    def mend(self, cuts: Iterable[Cut], keep_copy: Callable[[str], None]) -> str | None:
        """If there is damage, keep a copy and rewrite the log with these records of whole manifests; return what was wrong."""
        content = self.read()
        cuts = list(cuts)
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
        found = (cut.segments for epoch, cut in self.read().cuts.items() if epoch in epochs)
        return {run.digest for segments in found for segment in segments for run in segment.runs}

    def _append(self, cut: Cut) -> None:
        # Set before the write: after a failed one it is unknown whether the line is there, so the next try rewrites.
        self._newest = cut.epoch
        self._journal.append(encode_cut(cut), sync=False)
        self._failpoints.hit("cut.appended")
        self._journal.sync()
        self._failpoints.hit("cut.synced")

    def _insert(self, cut: Cut, *, sealed_before: bool) -> None:
        content = self.read()
        if sealed_before and content.cuts.get(cut.epoch) == cut:
            return
        kept = (
            content.cuts if sealed_before else {epoch: old for epoch, old in content.cuts.items() if epoch < cut.epoch}
        )
        noted = content.noted if sealed_before else min(content.noted, cut.epoch - 1)
        self._rewrite(replace(content, cuts=kept | {cut.epoch: cut}, noted=noted))

    def _rewrite(self, content: EpochLogContent) -> None:
        # Twice, at both ends: without it, epochs that the hub has would be missed.
        delivery = [] if content.delivery is None else [seal("delivery", content.delivery)]
        crossings = (seal("crossing", content.crossings[epoch]) for epoch in sorted(content.crossings))
        cuts = (encode_cut(content.cuts[epoch]) for epoch in sorted(content.cuts))
        noted = [_sealed_line(content.noted)] if content.noted else []
        # Each line is made once: there may be millions.
        self._journal.rewrite(itertools.chain(delivery, crossings, cuts, noted, delivery))
        self._failpoints.hit("cut.appended")
        self._failpoints.hit("cut.synced")
        self._learn(content)

    def _learn(self, content: EpochLogContent) -> None:
        self._newest = max(content.cuts, default=0)
        self._newest_crossing = max(content.crossings, default=0)
        self._acknowledged = content.delivery.acknowledged if content.delivery is not None else 0

    def _fitting(self, content: EpochLogContent, needed_from: int) -> EpochLogContent:
        """The newest records that fill half the bound, all that are needed, and of the others what waits for the hub."""
        kept: dict[int, Cut] = {}
        room_bytes = self._max_bytes // 2
        for epoch in sorted(content.cuts, reverse=True):
            room_bytes -= len(encode_cut(content.cuts[epoch]))
            if room_bytes < 0 and epoch < needed_from:
                break
            kept[epoch] = content.cuts[epoch]
        waiting = {
            epoch: msgspec.structs.replace(cut, sources={})
            for epoch, cut in (content.crossings | content.cuts).items()
            if epoch not in kept and epoch > self._acknowledged and cut.crosses
        }
        return replace(content, cuts=kept, crossings=waiting)


def parse_epoch_log(data: bytes) -> EpochLogContent:
    """Read the lines of an epoch log, wherever its bytes came from."""
    return _content(parse_journal(data))


def _sealed_line(epoch: int) -> bytes:
    return seal("sealed", epoch)


def _content(journal: JournalContent) -> EpochLogContent:
    cuts: dict[int, Cut] = {}
    crossings: dict[int, Cut] = {}
    damaged_lines, noted, delivery = journal.damaged_lines + bool(journal.torn_bytes), 0, None
    for record in journal.records:
        try:
            match record.kind:
                case "cut" | "crossing":
                    cut = cut_of(record)
                    (cuts if record.kind == "cut" else crossings)[cut.epoch] = cut
                case "sealed":
                    noted = max(noted, record.decode(_EPOCH))
                case "delivery":
                    delivery = record.decode(_DELIVERY)
                case _:
                    damaged_lines += 1
        except DamagedError:
            damaged_lines += 1
    return EpochLogContent(cuts=cuts, crossings=crossings, damaged_lines=damaged_lines, noted=noted, delivery=delivery)
