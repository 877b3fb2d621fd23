"""The cut log, a second record of what decided each epoch; and the directory for damaged files.

`cuts.jsonl` is appended to before each manifest. When a manifest is damaged, its epoch is replayed from the cut in this log. After
each manifest a line records that the epoch is sealed: without it, a lost manifest would look like a commit that never happened.

Invariants: a line counts only under its own checksum; when an epoch is sealed the log holds one cut of it, so a damaged line never
uncovers an older, unsealed cut; a cut is there only if the epoch before it is sealed. A damaged file is never deleted: the note
that it was set aside, which also records that its epoch was sealed, is durable before the file moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fordstone.epochs.manifest import Cut
from fordstone.epochs.sealed import EPOCH_DIGITS, cut_of, encode_cut, encode_note, encode_sealed, sealed_of
from fordstone.errors import DamagedError, StorageError
from fordstone.storage.disk import Disk
from fordstone.storage.failpoint import Failpoints
from fordstone.storage.journal import Journal, JournalContent, parse_journal


class Aside:
    """Moves files into one directory. Called by one thread at a time."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory

    def take(self, epoch: int, reason: str, paths: Sequence[str]) -> None:
        """Note down why, durably, then move the files here. The directories they came from are the caller's to sync."""
        names = set(self._disk.list(self._directory))
        number = 1
        while f"{epoch:0{EPOCH_DIGITS}}-{number}.json" in names:
            number += 1
        stem = f"{epoch:0{EPOCH_DIGITS}}-{number}"
        moves = [(path, f"{stem}.{path.rpartition('/')[2].removesuffix('.json')}") for path in paths]
        note = {"epoch": epoch, "reason": reason, "files": {new: old for old, new in moves}}
        self._disk.create(f"{self._directory}/{stem}.json", encode_note(note))
        self._disk.fsync(f"{self._directory}/{stem}.json")
        self._disk.fsync_dir(self._directory)
        for old, new in moves:
            self._disk.rename(old, f"{self._directory}/{new}")
        self._disk.fsync_dir(self._directory)

    def copy(self, path: str) -> None:
        """Keep the bytes of a file as they are now, durably; the file stays where it is."""
        names = set(self._disk.list(self._directory))
        stem, _, ending = path.rpartition("/")[2].rpartition(".")
        number = 1
        while f"{stem}-{number}.{ending}" in names:
            number += 1
        kept = f"{self._directory}/{stem}-{number}.{ending}"
        try:
            self._disk.create(kept, self._disk.read(path))
        except StorageError:
            with contextlib.suppress(StorageError):
                self._disk.remove(kept)
            raise
        self._disk.fsync(kept)
        self._disk.fsync_dir(self._directory)

    def epochs(self) -> set[int]:
        """The epochs of which anything was ever set aside."""
        stems = (
            name[:EPOCH_DIGITS]
            for name in self.files()
            if name.endswith(".json") and name[EPOCH_DIGITS : EPOCH_DIGITS + 1] == "-"
        )
        return {int(stem) for stem in stems if stem.isascii() and stem.isdigit()}

    def files(self) -> tuple[str, ...]:
        """The names of all that lies here."""
        return tuple(self._disk.list(self._directory))


CUT_LOG_MAX_BYTES: Final = 16 << 20
"""The log is rewritten to about half of this when it has grown beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLogContent:
    """What the log says, and how many of its lines say nothing any more."""

    cuts: dict[int, Cut]
    damaged_lines: int
    noted: int = 0
    """The newest epoch of which a line says that it is sealed."""

    @property
    def sealed(self) -> int:
        """The newest epoch that is known to be sealed: a line says so, or a later cut is there."""
        return max(self.noted, max(self.cuts, default=1) - 1)


class CutLog:
    """Appends and finds cuts. Written by one thread at a time, the one that commits."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        failpoints: Failpoints,
        max_bytes: int = CUT_LOG_MAX_BYTES,
    ) -> None:
        self._journal = Journal(disk, f"{directory}/cuts.jsonl", failpoints=failpoints, failpoint_kind="cut")
        self._max_bytes = max_bytes
        self._newest: int | None = None
        self._rewrite_above_bytes = max_bytes

    def read(self) -> CutLogContent:
        """Every cut that can be read. Of two lines for one epoch the later one counts."""
        return _content(self._journal.read())

    def note_sealed(self, epoch: int) -> None:
        """Say that an epoch is sealed. Called when its manifest is durable; this line is so with the next cut.

        Never fails: the manifest itself says the same, and this line only counts if that vanishes.
        """
        with contextlib.suppress(StorageError):
            self._journal.append(encode_sealed(epoch), sync=False)

    def record(self, cut: Cut, *, rebuilt: bool, needed_from: int) -> None:
        """Make the cut durable. Called before the manifest is.

        Lines of a commit that never happened (this epoch or later) are removed first. A rebuilt epoch only
        mends its own line. `needed_from`: cuts of this epoch and later survive whatever the bound says.
        """
        if self._newest is None:
            self._newest = max(self.read().cuts, default=0)
        if cut.epoch > self._newest:
            self._append(cut)
        else:
            content = self.read()
            known = content.cuts
            if not (rebuilt and known.get(cut.epoch) == cut):
                kept = [old for epoch, old in known.items() if (epoch != cut.epoch if rebuilt else epoch < cut.epoch)]
                self._rewrite([*kept, cut], noted=content.noted if rebuilt else min(content.noted, cut.epoch - 1))
        if self._journal.size_bytes > self._rewrite_above_bytes:
            content = self.read()
            self._rewrite(self._fitting(content.cuts, needed_from), noted=content.noted)
            # What is needed may be more than the bound: then wait until it has doubled rather than rewrite every time.
            self._rewrite_above_bytes = max(self._max_bytes, 2 * self._journal.size_bytes)

    def add(self, cuts: Iterable[Cut]) -> None:
        """Take in cuts of sealed epochs from a remote. They win: what stands here may be from a commit that never happened."""
        content = self.read()
        together = content.cuts | {cut.epoch: cut for cut in cuts}
        if together != content.cuts or content.damaged_lines:
            self._rewrite(list(together.values()), noted=content.noted)

    def mend(self, cuts: Iterable[Cut], aside: Aside) -> str | None:
        """If there is damage, keep a copy aside and rewrite the log with these cuts of whole manifests; return what was wrong."""
        content = self.read()
        cuts = list(cuts)
        missing = [cut.epoch for cut in cuts if cut.epoch not in content.cuts]
        if not missing and not content.damaged_lines:
            return None
        if content.damaged_lines:
            aside.copy(self._journal.path)
        self.add(cuts)
        return (
            f"{content.damaged_lines} of its lines cannot be read, {len(missing)} cuts of kept checkpoints are missing"
        )

    def output_of(self, epochs: range) -> set[str]:
        """The digests of the runs that these epochs released, as far as their cuts can be read."""
        found = (cut.segments for epoch, cut in self.read().cuts.items() if epoch in epochs)
        return {run.digest for segments in found for segment in segments for run in segment.runs}

    def _append(self, cut: Cut) -> None:
        # Set before the write: after a failed one it is unknown whether the line is there, so the next try rewrites.
        self._newest = cut.epoch
        self._journal.append(encode_cut(cut))

    def _rewrite(self, cuts: list[Cut], *, noted: int) -> None:
        cuts.sort(key=lambda cut: cut.epoch)
        lines = [encode_cut(cut) for cut in cuts]
        self._journal.rewrite([*lines, encode_sealed(noted)] if noted else lines)
        self._newest = cuts[-1].epoch if cuts else 0

    def _fitting(self, cuts: dict[int, Cut], needed_from: int) -> list[Cut]:
        """The newest cuts that fill half the bound, and all that are needed."""
        kept: list[Cut] = []
        room_bytes = self._max_bytes // 2
        for epoch in sorted(cuts, reverse=True):
            room_bytes -= len(encode_cut(cuts[epoch]))
            if room_bytes < 0 and epoch < needed_from:
                break
            kept.append(cuts[epoch])
        return kept


def parse_cut_log(data: bytes) -> CutLogContent:
    """Read the lines of a cut log, wherever its bytes came from."""
    return _content(parse_journal(data))


def _content(journal: JournalContent) -> CutLogContent:
    cuts: dict[int, Cut] = {}
    damaged_lines, noted = journal.damaged_lines + bool(journal.torn_bytes), 0
    for record in journal.records:
        try:
            if record.kind == "sealed":
                noted = max(noted, sealed_of(record))
            else:
                cut = cut_of(record)
                cuts[cut.epoch] = cut
        except DamagedError:
            damaged_lines += 1
    return CutLogContent(cuts=cuts, damaged_lines=damaged_lines, noted=noted)
