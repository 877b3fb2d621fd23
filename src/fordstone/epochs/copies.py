"""Copies of checkpoints on remote storage: uploaded in the background, and fetched into the local store.

`survey_remote` gathers the facts that `protocol.recovery` judges beside the local ones, and `fetch_checkpoint` carries out its
decision. `storage.remote` has the transport. The remote layout is the local one, except that cuts are uploaded in chunks,
`cuts/<last epoch>.jsonl`.

Invariants: every fetched byte is checked before it is stored, and the local manifest is written last. A manifest is uploaded only after everything that it names; a checkpoint is pinned while it is uploaded; no
commit waits for an upload. There is one uploader per pipeline and node: the process that has locked the state directory.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from fordstone.epochs.epoch_log import parse_epoch_log
from fordstone.epochs.manifest import (
    Cut,
    Manifest,
    decode_manifest,
    encode_cut,
    encode_manifest,
    epoch_name,
    parse_epoch_name,
)
from fordstone.epochs.run_file import run_problem, short
from fordstone.epochs.store import KEEP_DEFAULT, CheckpointStore, Survey
from fordstone.errors import CheckpointError, DamagedError, StorageError
from fordstone.protocol.recovery import CheckpointFact
from fordstone.protocol.retention import decide_retention
from fordstone.protocol.retry import Backoff
from fordstone.state.base import RunRef
from fordstone.storage.clock import monotonic_clock_us
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.remote import Remote, open_remote

CUT_CHUNKS_MAX: Final = 1024
"""Maximum number of chunks of cuts at the remote."""
UPLOAD_BACKOFF: Final = Backoff(first_us=1_000_000, max_us=300_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStatus:
    """The state of an uploader."""

    uploaded: int | None = None
    """The newest epoch that this uploader has put at the remote."""
    failures: int = 0
    """Failures in a row."""
    next_try_us: int | None = None
    last_error: str | None = None
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """One request to the remote."""

    kind: Literal["run", "cuts", "manifest", "retention", "remove"]
    run: RunRef | None = None
    path: str = ""


class Uploader:
    """A scheduler calls `step`; another thread may call `offer`."""

    def __init__(
        self,
        store: CheckpointStore,
        url: str | Remote,
        *,
        keep: int = KEEP_DEFAULT,
        backoff: Backoff = UPLOAD_BACKOFF,
        chance: Callable[[], float] = random.random,
        clock_us: Callable[[], int] = monotonic_clock_us,
    ) -> None:
        """`keep`: the number of checkpoints that stay at the remote. `clock_us`: a monotonic clock."""
        self._store = store
        self._url = url
        self._opened: Remote | None = None if isinstance(url, str) else url
        self._keep = keep
        self._backoff, self._chance = backoff, chance
        self._clock_us = clock_us
        self._base = f"{store.pipeline}/{store.node}"
        self._offered = 0
        """Only `offer` writes it, so it needs no lock."""
        self._done = 0
        """The newest epoch that was uploaded or given up. Only `step` writes it."""
        self._job: Manifest | None = None
        self._units: deque[_Unit] = deque()
        self._there: dict[str, int] | None = None
        """The runs at the remote with their sizes; None if they must be listed."""
        self._named: dict[int, frozenset[str]] = {}
        self._cuts_sent = 0
        """The newest epoch whose cut this uploader has put."""
        self._status = UploadStatus()

    @property
    def status(self) -> UploadStatus:
        return self._status

    def offer(self, epoch: int) -> None:
        """Announce a committed checkpoint. The newest one is uploaded next; those between are skipped."""
        self._offered = max(epoch, self._offered)

    def step(self) -> bool:
        """Do one unit of work, at most one file. Return False if there is nothing to do now.

        Failures are recorded in `status` and retried after a growing wait; they are never raised.
        """
        if self._status.next_try_us is not None:
            if self._clock_us() < self._status.next_try_us:
                return False
            self._status = replace(self._status, next_try_us=None)
        try:
            if self._job is None:
                return self._start()
            self._do(self._units[0])
        except (StorageError, OSError) as error:
            self._failed(error)
            return False
        except CheckpointError as error:
            # The local checkpoint is damaged: a retry would not help, but the next checkpoint may be whole.
            self._done = self._offered if self._job is None else self._job.epoch
            self._drop()
            self._status = replace(self._status, last_error=str(error))
            return False
        self._units.popleft()
        if not self._units:
            self._drop()
        self._status = replace(self._status, failures=0, next_try_us=None, last_error=None)
        return True

    def _start(self) -> bool:
        epoch = max(self._store.epochs(), default=0)
        if self._offered <= self._done or epoch <= self._done:
            return False
        if self._there is None:
            for directory in ("runs", "cuts", "manifests"):
                self._remote.remove_leftovers(f"{self._base}/{directory}")
            self._there = self._remote.sizes(f"{self._base}/runs")
        self._store.pin(epoch)
        try:
            manifest = self._store.manifest(epoch)
        except CheckpointError:
            self._store.unpin(epoch)
            raise
        runs = {run.digest: run for run in manifest.runs()}
        missing = [run for digest, run in runs.items() if self._there.get(digest) != run.size_bytes]
        self._units = deque(_Unit(kind="run", run=run) for run in missing)
        self._units += [_Unit(kind="cuts"), _Unit(kind="manifest"), _Unit(kind="retention")]
        self._job = manifest
        return True

    def _do(self, unit: _Unit) -> None:
        if self._job is None:
            raise AssertionError("a unit without a job")
        match unit.kind:
            case "run":
                if unit.run is not None:
                    self._put_run(unit.run)
            case "cuts":
                self._put_cuts(self._job.epoch)
            case "manifest":
                self._put(f"manifests/{epoch_name(self._job.epoch)}", encode_manifest(self._job))
                self._named[self._job.epoch] = frozenset(run.digest for run in self._job.runs())
                self._done = self._job.epoch
                self._status = replace(self._status, uploaded=self._job.epoch)
                self._store.failpoints.hit("upload.manifest")
            case "retention":
                self._plan_removal(self._job.epoch)
            case "remove":
                self._remote.remove(unit.path)

    @property
    def _remote(self) -> Remote:
        """The remote, opened at its first use: it may be unreachable now and back later."""
        if self._opened is None:
            if not isinstance(self._url, str):
                raise AssertionError("a remote that was handed over is open")
            self._opened = open_remote(self._url)
        return self._opened

    def _put_run(self, run: RunRef) -> None:
        data = self._store.read_run_bytes(run)
        problem = run_problem(data, run)
        if problem is not None:
            raise DamagedError(f"run {short(run.digest)} is damaged: it {problem}.")
        self._put(f"runs/{run.digest}", data)
        if self._there is not None:
            self._there[run.digest] = run.size_bytes
        self._store.failpoints.hit("upload.run")

    def _put_cuts(self, epoch: int) -> None:
        """Put the cuts since the newest manifest at the remote, which was put after its cuts, or since the last chunk put here.

        That a chunk exists says nothing, because it may be incomplete. A chunk that is known to be whole is not written again.
        """
        self._read_manifests(epoch)
        after = max((there for there in self._named if there < epoch), default=0)
        after = max(after, self._cuts_sent)
        cuts = self._store.cuts(range(after + 1, epoch + 1))
        lines = [encode_cut(cuts[number]) for number in sorted(cuts)]
        if lines:
            self._put(f"cuts/{epoch_name(epoch, '.jsonl')}", b"\n".join(lines) + b"\n")
        self._cuts_sent = epoch

    def _plan_removal(self, epoch: int) -> None:
        """Decide what to remove, and queue it: manifests before runs."""
        damaged, unknown = self._read_manifests(epoch)
        there = self._there or {}
        decision = decide_retention(self._named, there.keys(), keep=self._keep)
        paths = [f"manifests/{epoch_name(number)}" for number in sorted([*damaged, *decision.remove_manifests])]
        if not unknown:
            paths += [f"runs/{digest}" for digest in decision.remove_runs]
            for digest in decision.remove_runs:
                # Dropped from the list before it is removed: a later checkpoint that needs it puts it again.
                there.pop(digest)
        chunks = self._remote_epochs("cuts", ".jsonl")
        paths += [f"cuts/{epoch_name(number, '.jsonl')}" for number in chunks[:-CUT_CHUNKS_MAX]]
        self._units.extend(_Unit(kind="remove", path=f"{self._base}/{path}") for path in paths)

    def _read_manifests(self, epoch: int) -> tuple[list[int], list[int]]:
        """Read which runs each manifest at the remote names. Return the damaged manifests and those of an unknown version.

        A damaged manifest is what a broken connection left of an upload. It is removed once a newer checkpoint is there.
        """
        damaged, unknown = [], []
        epochs = self._remote_epochs("manifests", ".json")
        self._named = {number: digests for number, digests in self._named.items() if number in epochs}
        for number in [number for number in epochs if number not in self._named]:
            try:
                data = self._remote.get(f"{self._base}/manifests/{epoch_name(number)}")
                manifest = decode_manifest(data, pipeline=self._store.pipeline, node=self._store.node, epoch=number)
            except (FileNotFoundError, DamagedError):
                if number < epoch:
                    damaged.append(number)
            except CheckpointError:
                unknown.append(number)
            else:
                self._named[number] = frozenset(run.digest for run in manifest.runs())
        return damaged, unknown

    def _remote_epochs(self, directory: str, suffix: str) -> list[int]:
        names = self._remote.sizes(f"{self._base}/{directory}")
        return sorted(epoch for name in names if (epoch := parse_epoch_name(name, suffix)) is not None)

    def _put(self, path: str, data: bytes) -> None:
        self._remote.put(f"{self._base}/{path}", data)
        self._status = replace(self._status, sent_bytes=self._status.sent_bytes + len(data))

    def _failed(self, error: Exception) -> None:
        """Wait, then start over with the newest checkpoint: a node that is offline for days must not keep an old one pinned."""
        failures = self._status.failures + 1
        next_try_us = self._clock_us() + self._backoff.wait_us(failures, chance=self._chance())
        self._status = replace(self._status, failures=failures, next_try_us=next_try_us, last_error=str(error))
        # A failed request may have been carried out in part, so the remote must be listed again.
        self._there = None
        self._drop()
        if isinstance(error, FatalStorageError) and isinstance(self._url, str):
            # A sync failed on a share. It held only a copy, so it is opened again.
            self._opened = None

    def _drop(self) -> None:
        if self._job is not None:
            self._store.unpin(self._job.epoch)
        self._job = None
        self._units.clear()


def survey_remote(url: str | Remote, store: CheckpointStore, *, deep: bool = False) -> Survey:
    """The facts about the remote copies of this store's pipeline and node. `deep` reads every run.

    `StorageError` if the remote does not answer: whether to go on without it is the caller's to decide.
    """
    copies = _Copies(url, store)
    there = copies.run_sizes()
    cuts = set(copies.cuts())
    facts = []
    for epoch in copies.epochs():
        problem: str | None = None
        try:
            runs = copies.manifest(epoch).runs()
        except DamagedError as error:
            problem = str(error)
        else:
            cuts.add(epoch)
            for run in dict.fromkeys(runs):
                problem = problem or (copies.run_fault(run) if deep else _size_fault(run, there))
        facts.append(CheckpointFact(epoch=epoch, where="remote", problem=problem))
    return Survey(checkpoints=tuple(facts), cuts=frozenset(cuts))


def fetch_cuts(url: str | Remote, store: CheckpointStore) -> None:
    """Bring every cut that the remote has into the local store: for a replay that begins from nothing."""
    copies = _Copies(url, store)
    cuts = copies.cuts()
    for epoch in copies.epochs():
        if epoch not in cuts:
            with contextlib.suppress(DamagedError):
                cuts[epoch] = copies.manifest(epoch).cut
    store.add_cuts(cuts[epoch] for epoch in sorted(cuts))


def fetch_checkpoint(url: str | Remote, store: CheckpointStore, epoch: int | None = None) -> Manifest:
    """Bring one checkpoint, or the newest that is whole, into the local store, with the cuts that are there.

    Only runs that are not stored here, or are damaged here, are fetched. `CheckpointError` says why none could be had.
    """
    copies = _Copies(url, store)
    epochs = copies.epochs()[::-1] if epoch is None else (epoch,)
    problems = []
    for number in epochs:
        try:
            manifest = copies.manifest(number)
            for run in dict.fromkeys(manifest.runs()):
                if store.run_fault(run, deep=True) is not None:
                    store.put_run(run, copies.run(run))
        except DamagedError as error:
            problems.append(f"  checkpoint {number}: {error}")
            continue
        store.add_cuts([*copies.cuts().values(), manifest.cut])
        store.commit(manifest, sealed_before=True)
        return manifest
    found = "\n".join(problems) or "  there is none"
    raise CheckpointError(
        f"no whole checkpoint of pipeline {store.pipeline} on node {store.node} could be fetched:\n{found}\n"
        f"Check the URL and the name of the node."
    )


def fetch_run(url: str | Remote, store: CheckpointStore, run: RunRef) -> bytes:
    """The bytes of a run at the remote, unchecked; `DamagedError` if it is not there."""
    return _Copies(url, store).run(run)


class _Copies:
    """The files of one pipeline and node at a remote."""

    def __init__(self, url: str | Remote, store: CheckpointStore) -> None:
        self._remote = open_remote(url) if isinstance(url, str) else url
        self._pipeline, self._node = store.pipeline, store.node
        self._base = f"{store.pipeline}/{store.node}"

    def epochs(self) -> tuple[int, ...]:
        names = self._remote.sizes(f"{self._base}/manifests")
        return tuple(sorted(epoch for name in names if (epoch := parse_epoch_name(name))))

    def run_sizes(self) -> dict[str, int]:
        return self._remote.sizes(f"{self._base}/runs")

    def manifest(self, epoch: int) -> Manifest:
        data = self._get(f"manifests/{epoch_name(epoch)}")
        return decode_manifest(data, pipeline=self._pipeline, node=self._node, epoch=epoch)

    def run(self, ref: RunRef) -> bytes:
        return self._get(f"runs/{ref.digest}")

    def run_fault(self, ref: RunRef) -> str | None:
        try:
            problem = run_problem(self.run(ref), ref)
        except DamagedError as error:
            return str(error)
        return f"run {short(ref.digest)} {problem}" if problem else None

    def cuts(self) -> dict[int, Cut]:
        cuts: dict[int, Cut] = {}
        for name in sorted(self._remote.sizes(f"{self._base}/cuts")):
            if parse_epoch_name(name, ".jsonl") is not None:
                with contextlib.suppress(DamagedError):
                    cuts |= parse_epoch_log(self._get(f"cuts/{name}")).cuts
        return cuts

    def _get(self, path: str) -> bytes:
        try:
            return self._remote.get(f"{self._base}/{path}")
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing at the remote") from error


def _size_fault(run: RunRef, there: dict[str, int]) -> str | None:
    if run.digest not in there:
        return f"run {short(run.digest)} is missing at the remote"
    if there[run.digest] != run.size_bytes:
        return (
            f"run {short(run.digest)} has {there[run.digest]} bytes at the remote, the manifest says {run.size_bytes}"
        )
    return None
