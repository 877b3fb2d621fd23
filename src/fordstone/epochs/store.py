"""The checkpoint store of one pipeline on one node: runs, manifests, cuts, and what was set aside.

    <pipeline>/<node>/manifests/<epoch>.json   a checkpoint each; its durable name is the commit
    <pipeline>/<node>/runs/<sha256>            immutable; shared between checkpoints
    <pipeline>/<node>/epochs.jsonl             the record of each epoch, a second time, and how far the hub has them
    <pipeline>/<node>/aside/                   what was damaged, with notes; never deleted

What to resume from is decided by `protocol.recovery`, what to remove by `protocol.retention`; this module brings the
facts and carries it out. It takes no lock against other processes: `OsDisk.lock` does.

Invariants: a run is durable before a manifest names it, the record of an epoch before its manifest; a manifest is durable before
`commit` returns; an epoch that was sealed once stays known as sealed, even when its manifest is damaged, missing or aside;
a run is removed only after every manifest that named it is gone durably.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import polars as pl

from fordstone.epochs.epoch_log import EPOCHS, EpochLog
from fordstone.epochs.manifest import (
    EPOCH_DIGITS,
    Cut,
    Manifest,
    StateRuns,
    decode_manifest,
    encode_manifest,
    epoch_name,
    parse_epoch_name,
)
from fordstone.epochs.run_file import COMPRESSIONS, Compression, RunStore, short
from fordstone.errors import CheckpointError, ConfigError, DamagedError, StorageError, StoreLockedError
from fordstone.plan.ids import checked_name
from fordstone.protocol.recovery import CheckpointFact
from fordstone.protocol.retention import decide_retention
from fordstone.state.base import Piece, RunRef, State
from fordstone.storage.atomic import AtomicWriter, remove_leftovers
from fordstone.storage.disk import Disk
from fordstone.storage.failpoint import Failpoints, NoFailpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The facts that `protocol.recovery.decide_recovery` judges."""

    checkpoints: tuple[CheckpointFact, ...]
    cuts: frozenset[int]
    damaged_log_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What retention took away."""

    manifests: tuple[int, ...] = ()
    runs: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `fordstone checkpoints verify` prints: every byte was read."""

    checkpoints: tuple[CheckpointFact, ...]
    damaged_runs: tuple[tuple[str, str], ...]
    """Digest, and what is wrong with it."""
    runs_checked: int
    checked_bytes: int
    damaged_log_lines: int
    aside: tuple[str, ...]
    """The names of what was set aside earlier."""

    @property
    def whole(self) -> bool:
        return not self.damaged_log_lines and all(fact.problem is None for fact in self.checkpoints)


class _Aside:
    """The directory for damaged files. A file is never deleted: the note that it was set aside is durable before it moves."""

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
        text = msgspec.json.format(msgspec.json.encode(note, order="deterministic")) + b"\n"
        self._disk.create(f"{self._directory}/{stem}.json", text)
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
        stems = (
            name[:EPOCH_DIGITS]
            for name in self.files()
            if name.endswith(".json") and name[EPOCH_DIGITS : EPOCH_DIGITS + 1] == "-"
        )
        return {int(stem) for stem in stems if stem.isascii() and stem.isdigit()}

    def files(self) -> tuple[str, ...]:
        return tuple(self._disk.list(self._directory))


KEEP_DEFAULT: Final = 3


class CheckpointStore:
    """Writes, reads and collects checkpoints. Called from several threads."""

    def __init__(
        self,
        disk: Disk,
        *,
        pipeline: str,
        node: str,
        compression: Compression = "lz4",
        keep: int = KEEP_DEFAULT,
        failpoints: Failpoints | None = None,
        read_only: bool = False,
    ) -> None:
        """Open, and clean up what a crash left half-written. `read_only` touches nothing: for looking at a live store."""
        if keep < 1:
            raise ConfigError(f"keep={keep}: at least one checkpoint must be kept.")
        if compression not in COMPRESSIONS:
            raise ConfigError(f"compression {compression!r} does not exist. Choose one of {', '.join(COMPRESSIONS)}.")
        self.pipeline = checked_name(pipeline, "pipeline")
        self.node = checked_name(node, "node")
        self._disk = disk
        self._keep = keep
        self.failpoints = failpoints or NoFailpoints()
        self._read_only = read_only
        self._base = f"{pipeline}/{node}"
        self._manifests = f"{self._base}/manifests"
        if not read_only:
            self._clean_up()
        self._mutex = threading.RLock()
        self._commit_mutex = threading.Lock()
        self._writer = AtomicWriter(disk, self.failpoints)
        self.log = EpochLog(disk, self._base, failpoints=self.failpoints)
        self._aside = _Aside(disk, f"{self._base}/aside")
        self._runs = RunStore(
            disk,
            f"{self._base}/runs",
            compression=compression,
            writer=self._writer,
            mutex=self._mutex,
        )
        self._pins: Counter[int] = Counter()
        self._committing: frozenset[str] = frozenset()
        listed = (parse_epoch_name(name) for name in disk.list(self._manifests))
        self._named: dict[int, frozenset[str] | None] = {epoch: None for epoch in listed if epoch}
        self._aside_epochs = self._aside.epochs()

    def write_run(self, frame: pl.DataFrame) -> RunRef:
        """Store a frame as a run. Its bytes are durable on return; its name is with the next `commit`.

        Called by writers and the merger, any number at once. A run that is there already and whole is not written again.
        """
        self._check_writable()
        return self._runs.write(frame)

    def put_run(self, ref: RunRef, data: bytes) -> None:
        """Store the bytes of a run that came from elsewhere; `DamagedError` if they are not what `ref` says."""
        self._check_writable()
        self._runs.put(ref, data)

    def read_run(self, ref: RunRef) -> pl.DataFrame:
        """The rows of a run, after its size and digest were checked; `DamagedError` if they disagree."""
        return self._runs.read(ref)

    def read_run_bytes(self, ref: RunRef) -> bytes:
        """The bytes of a run as they are on disk, unchecked."""
        return self._runs.read_bytes(ref)

    def run_fault(self, ref: RunRef, *, deep: bool = False) -> str | None:
        """What is wrong with a stored run: missing or of another size; with `deep` also other bytes."""
        return self._runs.fault(ref, deep=deep)

    def commit(self, manifest: Manifest, *, sealed_before: bool = False) -> None:
        """Seal an epoch: when this returns it is durable, and nothing may be released before.

        Called once per epoch, in order. `sealed_before`: the epoch was sealed before and its manifest is damaged, aside, or
        only remote; this one takes its place. On `StorageError` that is not fatal, nothing was sealed and the same
        epoch may be tried again. `StoreLockedError` if another process has sealed the epoch: on some network file systems locks keep
        no process out, but a manifest never takes the name of one that is there.
        """
        self._check_writable()
        digests = frozenset(run.digest for run in manifest.runs())
        with self._commit_mutex, self._holding(digests):
            with self._mutex:
                self._admit(manifest, digests, sealed_before=sealed_before)
                needed_from = min(self._named, default=manifest.epoch)
            self._runs.sync()
            self.failpoints.hit("runs.dir-synced")
            if manifest.epoch not in self._named and self._disk.exists(self._manifest_path(manifest.epoch)):
                raise self._taken(manifest.epoch)
            self.log.record(manifest.cut, sealed_before=sealed_before, needed_from=needed_from)
            if manifest.epoch in self._named:
                self.set_aside(manifest.epoch, "it was computed again")
                self._check_present(manifest, digests)
            try:
                self._publish(manifest, digests, over=False)
            except FileExistsError as error:
                with contextlib.suppress(CheckpointError):
                    # Of two records the later one counts, and that was this process's.
                    self.log.restate(self.manifest(manifest.epoch).cut)
                raise self._taken(manifest.epoch) from error
            self.log.note_sealed(manifest.epoch)

    def replace(self, manifest: Manifest) -> None:
        """Put a manifest that means the same (runs merged) in place of the one of its epoch, at once or not at all."""
        self._check_writable()
        digests = frozenset(run.digest for run in manifest.runs())
        with self._commit_mutex, self._holding(digests):
            with self._mutex:
                if manifest.epoch not in self._named:
                    raise CheckpointError(f"{self._title(manifest.epoch)} does not exist, so it cannot be replaced.")
                self._check_present(manifest, digests)
            self._runs.sync()
            self._publish(manifest, digests, over=True)
            self.failpoints.hit("merge.replaced")

    def epochs(self) -> tuple[int, ...]:
        """The epochs that have a manifest in place, damaged or not, oldest first."""
        with self._mutex:
            return tuple(sorted(self._named))

    def manifest(self, epoch: int) -> Manifest:
        """The checkpoint of an epoch; `DamagedError` if it is missing or not what was written."""
        try:
            data = self._disk.read(self._manifest_path(epoch))
            return decode_manifest(data, pipeline=self.pipeline, node=self.node, epoch=epoch)
        except FileNotFoundError as error:
            raise DamagedError(f"{self._title(epoch)} is missing.") from error
        except DamagedError as error:
            raise DamagedError(f"{self._title(epoch)} is damaged: {error}.") from error
        except CheckpointError as error:
            raise CheckpointError(f"{self._title(epoch)} cannot be used: {error}") from error

    def cut(self, epoch: int) -> Cut:
        """What decided an epoch, from the epoch log or else from its manifest; `DamagedError` if neither can be read."""
        cut = self.cuts((epoch,)).get(epoch)
        return self.manifest(epoch).cut if cut is None else cut

    def cuts(self, epochs: Container[int] = EPOCHS) -> dict[int, Cut]:
        """The records of these epochs in the epoch log, which may hold days of them."""
        return self.log.read(epochs).cuts

    def add_cuts(self, cuts: Iterable[Cut]) -> None:
        """Take in cuts that came with a remote checkpoint."""
        self._check_writable()
        with self._commit_mutex:
            self.log.add(cuts)

    def mend_cuts(self) -> str | None:
        """Rewrite the epoch log if it is damaged, with the help of the manifests that are whole; return what was wrong."""
        self._check_writable()
        cuts = []
        for epoch in self.epochs():
            with contextlib.suppress(CheckpointError):
                cuts.append(self.manifest(epoch).cut)
        with self._commit_mutex:
            return self.log.mend(cuts, self._aside.copy)

    def survey(self, *, deep: bool = False) -> Survey:
        """Look at everything there is, for `decide_recovery`. `deep` reads every run, else only sizes are compared.

        What only `deep` would have found shows when the run is read: on `DamagedError` then, survey again with `deep`.
        A manifest of a newer version stops the survey with `CheckpointError`: passing over it would unseal an epoch.
        """
        log = self.log.read(())
        cuts = set(log.sizes)
        facts = []
        faults: dict[RunRef, str | None] = {}
        for epoch in self.epochs():
            try:
                manifest = self.manifest(epoch)
            except DamagedError as error:
                problem: str | None = str(error)
            else:
                cuts.add(epoch)
                problem = self._first_fault(manifest, faults, deep=deep)
            facts.append(CheckpointFact(epoch=epoch, problem=problem))
        aside = self._aside_epochs.difference(fact.epoch for fact in facts)
        facts += [CheckpointFact(epoch=epoch, problem="it was set aside") for epoch in aside]
        facts.sort(key=lambda fact: fact.epoch)
        if log.sealed > max((fact.epoch for fact in facts), default=0):
            facts.append(CheckpointFact(epoch=log.sealed, problem=f"{self._title(log.sealed)} is missing."))
        # A cut beyond the newest sealed epoch belongs to a commit that never happened.
        sealed = frozenset(epoch for epoch in cuts if facts and epoch <= facts[-1].epoch)
        return Survey(checkpoints=tuple(facts), cuts=sealed, damaged_log_lines=log.damaged_lines)

    def set_aside(self, epoch: int, reason: str) -> None:
        """Move a checkpoint that cannot be used out of the way, with its damaged runs and a note. Nothing is deleted.

        The epoch stays sealed: `commit` takes it only as `sealed_before`. Nothing happens if it is not, or is aside already.
        """
        self._check_writable()
        try:
            runs = {run.digest: run for run in self.manifest(epoch).runs()}
        except CheckpointError:
            runs = {}
        damaged = [digest for digest, run in runs.items() if self._runs.fault(run, deep=True)]
        with self._mutex:
            in_place = epoch in self._named
            if not in_place and (epoch in self._aside_epochs or epoch > self.log.read(()).sealed):
                return
            damaged = [digest for digest in damaged if self._disk.exists(self._runs.path(digest))]
            paths = [self._runs.path(digest) for digest in damaged]
            self._aside.take(epoch, reason, [*paths, self._manifest_path(epoch)] if in_place else [])
            self._aside_epochs.add(epoch)
            self._runs.forget(damaged)
            self._named.pop(epoch, None)
            self._disk.fsync_dir(self._manifests)
            self._runs.sync()

    def verify(self, epoch: int | None = None) -> VerifyReport:
        """Read every byte of one checkpoint, or of all, and say what is wrong."""
        facts = []
        faults: dict[RunRef, str | None] = {}
        for number in self.epochs() if epoch is None else (epoch,):
            try:
                problem = self._first_fault(self.manifest(number), faults, deep=True)
            except CheckpointError as error:
                problem = str(error)
            facts.append(CheckpointFact(epoch=number, problem=problem))
        return VerifyReport(
            checkpoints=tuple(facts),
            damaged_runs=tuple((run.digest, fault) for run, fault in faults.items() if fault),
            runs_checked=len(faults),
            checked_bytes=sum(run.size_bytes for run in faults),
            damaged_log_lines=self.log.read(()).damaged_lines,
            aside=self._aside.files(),
        )

    def pin(self, epoch: int) -> None:
        """Keep a checkpoint while it is being read or uploaded; counted."""
        with self._mutex:
            if epoch not in self._named:
                raise CheckpointError(f"{self._title(epoch)} does not exist, so it cannot be pinned.")
            self._pins[epoch] += 1

    def unpin(self, epoch: int) -> None:
        with self._mutex:
            self._pins[epoch] -= 1
            if self._pins[epoch] <= 0:
                del self._pins[epoch]

    def collect(self, *, acknowledged: Collection[int] = (), held: Iterable[str] = ()) -> Collected:
        """Remove what is no longer retained: manifests first, durably, then the runs that no manifest names and that are not `held`.

        Called after each commit. The output of an epoch that is still to be replayed stays too, to be compared with. While
        a manifest among the kept ones cannot be read its runs are unknown, so no run is removed; one that is older than
        they are is set aside.
        """
        self._check_writable()
        with self._mutex:
            self.failpoints.hit("retention.before")
            unreadable = self._read_names()
            decision = decide_retention(
                {epoch: digests for epoch, digests in self._named.items() if digests is not None},
                self._runs.present(),
                keep=self._keep,
                pinned=self._pins.keys(),
                acknowledged=acknowledged,
                held=itertools.chain(self._runs.held() | self._committing | self._sealed_output(), held),
            )
            for epoch in decision.remove_manifests:
                self._disk.remove(self._manifest_path(epoch))
                del self._named[epoch]
                self.failpoints.hit("retention.removed-manifest")
            old = {epoch for epoch in unreadable if decision.kept and epoch < decision.kept[0]}
            for epoch in old:
                self.set_aside(epoch, "it is damaged and no longer kept")
            if unreadable - old:
                return Collected(manifests=decision.remove_manifests)
            if decision.remove_runs:
                # Whether or not a manifest went just now: an earlier call may have been stopped before it came here.
                self._disk.fsync_dir(self._manifests)
            freed_bytes = 0
            for digest in decision.remove_runs:
                freed_bytes += self._runs.remove(digest)
                self.failpoints.hit("retention.removed-run")
            return Collected(
                manifests=decision.remove_manifests, runs=len(decision.remove_runs), size_bytes=freed_bytes
            )

    def size_bytes(self) -> int:
        return self._runs.size_bytes()

    def _clean_up(self) -> None:
        """Make the directories, remove what was half-written, and make durable what an earlier process may only have named.

        Without the last, a manifest renamed just before a kill could be read now and lost in a power cut later.
        """
        for directory in (self._manifests, f"{self._base}/runs", f"{self._base}/aside", self._base):
            self._disk.make_dirs(directory)
            remove_leftovers(self._disk, directory)
            self._disk.fsync_dir(directory)

    def _admit(self, manifest: Manifest, digests: frozenset[str], *, sealed_before: bool) -> None:
        """Refuse a manifest that would break what is sealed."""
        epoch = manifest.epoch
        if (manifest.pipeline, manifest.node, manifest.cut.epoch) != (self.pipeline, self.node, epoch):
            raise CheckpointError(
                f"checkpoint {epoch} of pipeline {manifest.pipeline} on node {manifest.node} with the cut of epoch "
                f"{manifest.cut.epoch} does not belong into the store of pipeline {self.pipeline} on node {self.node}."
            )
        newest = max(itertools.chain(self._named, self._aside_epochs), default=None)
        if not sealed_before and newest is not None and epoch != newest + 1:
            raise CheckpointError(
                f"{self._title(epoch)} was refused: epoch {newest} is the newest sealed one, so the next is {newest + 1}. "
                f"A sealed epoch is final."
            )
        self._check_present(manifest, digests)

    def _check_present(self, manifest: Manifest, digests: frozenset[str]) -> None:
        missing = digests - self._runs.present()
        if missing:
            raise CheckpointError(
                f"{self._title(manifest.epoch)} was refused: it names {len(missing)} runs that are not stored, {short(min(missing))} among them."
            )

    @contextlib.contextmanager
    def _holding(self, digests: frozenset[str]) -> Iterator[None]:
        """Keep the collector off these runs while a manifest that names them is on its way."""
        with self._mutex:
            self._committing = digests
        try:
            yield
        finally:
            with self._mutex:
                self._committing = frozenset()

    def _taken(self, epoch: int) -> StoreLockedError:
        return StoreLockedError(
            f"{self._title(epoch)} on node {self.node} was written by another process: two processes use this state directory, and the "
            "lock did not keep them apart, as on a network file system without locks. Nothing of this process's epoch was released.\n"
            "Stop one of them, or give each a directory of its own on a local disk."
        )

    def _publish(self, manifest: Manifest, digests: frozenset[str], *, over: bool) -> None:
        path = self._manifest_path(manifest.epoch)
        self._writer.write(path, encode_manifest(manifest), kind="manifest", over=over)
        with self._mutex:
            self._named[manifest.epoch] = digests
            self._runs.committed(digests)

    def _read_names(self) -> set[int]:
        """Learn the runs of manifests that an earlier process wrote; gives the epochs that cannot be read."""
        unreadable = set()
        for epoch in [epoch for epoch, digests in self._named.items() if digests is None]:
            try:
                self._named[epoch] = frozenset(run.digest for run in self.manifest(epoch).runs())
            except CheckpointError:
                unreadable.add(epoch)
        return unreadable

    def _sealed_output(self) -> set[str]:
        """The output of the epochs after the newest manifest in place: those that are to be replayed."""
        newest, sealed = max(self._named, default=0), max(self._aside_epochs, default=0)
        return self.log.output_of(range(newest + 1, sealed + 1)) if sealed > newest else set()

    def _first_fault(self, manifest: Manifest, known: dict[RunRef, str | None], *, deep: bool) -> str | None:
        first = self._runs.first_fault(manifest.runs(), known, deep=deep)
        return f"{self._title(manifest.epoch)} is damaged: {first}." if first else None

    def _manifest_path(self, epoch: int) -> str:
        return f"{self._manifests}/{epoch_name(epoch)}"

    def _title(self, epoch: int) -> str:
        return f"checkpoint {epoch} of pipeline {self.pipeline}"

    def _check_writable(self) -> None:
        if self._read_only:
            raise CheckpointError(f"store of pipeline {self.pipeline} on node {self.node}: opened for reading only.")


class Combine(Protocol):
    """`State.combine`, or something that means the same."""

    def __call__(self, frames: Sequence[pl.DataFrame], *, oldest: bool) -> pl.DataFrame:
        """The rows that mean the same as `frames` together, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What `merge_checkpoint` did to a checkpoint."""

    epoch: int
    runs_before: int
    runs_after: int
    size_bytes_before: int
    size_bytes_after: int


def merge_state(store: CheckpointStore, state: State, *, first: Piece | None = None) -> bool:
    """Merge or rewrite the pieces that the state names, if any; return whether it did. Runs off the task's thread.

    `first` is the first piece of the newest freeze, if known: when the merge begins with it, tombstones have nothing
    older to hide and go too.
    """
    rewrite = state.rewrite()
    if rewrite is not None:
        written = [Piece(ref=store.write_run(frame)) for frame in rewrite.frames]
        store.failpoints.hit("merge.written")
        rewrite.done(rewrite.old, written)
        return True
    pieces = state.mergeable()
    if not pieces:
        return False
    frame = state.combine([_rows(store, piece) for piece in pieces], oldest=pieces[0] is first)
    ref = store.write_run(frame)
    store.failpoints.hit("merge.written")
    state.merged(pieces, Piece(frame, ref=ref, keep=True) if state.keeps_frames else Piece(ref=ref))
    return True


def merge_checkpoint(store: CheckpointStore, combine_of: Callable[[str, str], Combine | None]) -> Merged | None:
    """Merge every state of the newest checkpoint into one run each, under the same epoch. None: nothing to merge.

    `combine_of` maps a step and the name of its state to what merges it; None leaves that state as it is. The old runs
    go when no older manifest names them: with the next `collect`.
    """
    epochs = store.epochs()
    if not epochs:
        raise CheckpointError(
            f"pipeline {store.pipeline} has no checkpoint on node {store.node}: there is nothing to merge."
        )
    old = store.manifest(epochs[-1])
    new = msgspec.structs.replace(old, states=tuple(_merged_state(store, state, combine_of) for state in old.states))
    if new == old:
        return None
    store.failpoints.hit("merge.written")
    store.replace(new)
    return Merged(
        epoch=old.epoch,
        runs_before=sum(len(state.runs) for state in old.states),
        runs_after=sum(len(state.runs) for state in new.states),
        size_bytes_before=sum(run.size_bytes for state in old.states for run in state.runs),
        size_bytes_after=sum(run.size_bytes for state in new.states for run in state.runs),
    )


def _merged_state(
    store: CheckpointStore, state: StateRuns, combine_of: Callable[[str, str], Combine | None]
) -> StateRuns:
    combine = combine_of(state.step, state.state)
    if combine is None or len(state.runs) < 2:  # noqa: PLR2004 - one run is as few as can be
        return state
    frame = combine([store.read_run(run) for run in state.runs], oldest=True)
    return msgspec.structs.replace(state, runs=(store.write_run(frame),))


def _rows(store: CheckpointStore, piece: Piece) -> pl.DataFrame:
    if piece.in_memory:
        try:
            return piece.frame()
        except LookupError:
            # The writer has just made it durable and dropped the rows.
            pass
    ref = piece.ref
    if ref is None:
        raise LookupError("a piece is neither in memory nor stored")
    return store.read_run(ref)
