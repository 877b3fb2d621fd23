"""Copy checkpoints to remote storage in the background.

The layout there is the local one, except that cuts go up in chunks, `cuts/<last epoch>.jsonl`. Bringing them back is
`fetch`'s; the transport is `remote`'s.

Invariants: a manifest is put only after everything it names; a checkpoint is pinned while it goes up; nothing here is
waited for by a commit. One uploader a pipeline and node: whoever holds the lock on the state directory.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from fordstone.epochs.manifest import Manifest
from fordstone.epochs.run_file import run_problem, short
from fordstone.epochs.sealed import decode_manifest, encode_cut, encode_manifest, epoch_name, parse_epoch_name
from fordstone.epochs.store import KEEP_DEFAULT, CheckpointStore
from fordstone.errors import CheckpointError, DamagedError, StorageError
from fordstone.protocol.backoff import Backoff
from fordstone.protocol.retention import decide_retention
from fordstone.state.base import RunRef
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.remote import Remote, open_remote

CUT_CHUNKS_MAX: Final = 1024
"""Maximum number of chunks of cuts at the remote."""
UPLOAD_BACKOFF: Final = Backoff(first_us=1_000_000, max_us=300_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStatus:
    """Where the uploader stands."""

    uploaded: int | None = None
    """The newest epoch whose manifest is at the remote, as far as known."""
    current: int | None = None
    """The epoch on its way."""
    units_left: int = 0
    failures: int = 0
    """In a row."""
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
    """Driven by a scheduler through `step`; `offer` may come from another thread."""

    def __init__(
        self,
        store: CheckpointStore,
        url: str | Remote,
        *,
        keep: int = KEEP_DEFAULT,
        backoff: Backoff = UPLOAD_BACKOFF,
        chance: Callable[[], float] = random.random,
        clock_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
    ) -> None:
        """`keep`: how many checkpoints stay at the remote. `clock_us` may start anywhere but only goes forward."""
        self._store = store
        self._url = url
        self._opened: Remote | None = None if isinstance(url, str) else url
        self._keep = keep
        self._backoff, self._chance = backoff, chance
        self._clock_us = clock_us
        self._base = f"{store.pipeline}/{store.node}"
        self._offered = 0
        """Written by `offer` alone, so that it needs no lock."""
        self._done = 0
        """The newest epoch that went up or was given up. Written by `step` alone."""
        self._job: Manifest | None = None
        self._units: deque[_Unit] = deque()
        self._there: dict[str, int] | None = None
        """The runs at the remote with their sizes; None when it must be asked."""
        self._named: dict[int, frozenset[str]] = {}
        self._cuts_sent = 0
        """Up to which epoch this uploader has put the cuts."""
        self._status = UploadStatus()

    @property
    def status(self) -> UploadStatus:
        """Where it stands now."""
        return self._status

    def offer(self, epoch: int) -> None:
        """Say that a checkpoint was committed. Whatever was offered meanwhile, the newest one goes up next."""
        self._offered = max(epoch, self._offered)

    def step(self) -> bool:
        """Do one unit of work: at most one file moves. False: there is nothing to do, or not yet.

        Failures are kept in `status` and tried again after a growing wait; they are never raised.
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
            # The local checkpoint is damaged: trying again would not help, the next one may.
            self._done = self._offered if self._job is None else self._job.epoch
            self._drop()
            self._status = replace(self._status, last_error=str(error))
            return False
        self._units.popleft()
        if not self._units:
            self._drop()
        self._status = replace(self._status, failures=0, next_try_us=None, last_error=None, units_left=len(self._units))
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
        self._status = replace(self._status, current=epoch, units_left=len(self._units))
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
        """Opened when it is needed, for it may be out of reach now and back later."""
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
        """The cuts since the newest manifest there, which went up after its cuts, or since what this uploader has sent.

        That a chunk is there says nothing: it may be there only in part. But one known to be whole is not touched again.
        """
        self._learn(epoch)
        after = max((there for there in self._named if there < epoch), default=0)
        after = max(after, self._cuts_sent)
        cuts = self._store.cuts()
        lines = [encode_cut(cuts[number]) for number in sorted(cuts) if after < number <= epoch]
        if lines:
            self._put(f"cuts/{epoch_name(epoch, '.jsonl')}", b"\n".join(lines) + b"\n")
        self._cuts_sent = epoch

    def _plan_removal(self, epoch: int) -> None:
        """Look at what is there and line up what may go: manifests before runs."""
        damaged, unknown = self._learn(epoch)
        there = self._there or {}
        decision = decide_retention(self._named, there.keys(), keep=self._keep)
        paths = [f"manifests/{epoch_name(number)}" for number in sorted([*damaged, *decision.remove_manifests])]
        if not unknown:
            paths += [f"runs/{digest}" for digest in decision.remove_runs]
            for digest in decision.remove_runs:
                # Forgotten before it is gone: a later checkpoint that needs it puts it again.
                there.pop(digest)
        chunks = self._remote_epochs("cuts", ".jsonl")
        paths += [f"cuts/{epoch_name(number, '.jsonl')}" for number in chunks[:-CUT_CHUNKS_MAX]]
        self._units.extend(_Unit(kind="remove", path=f"{self._base}/{path}") for path in paths)

    def _learn(self, epoch: int) -> tuple[list[int], list[int]]:
        """Know which runs each manifest there names. Gives those that are damaged, and those of a version not known here.

        A damaged one is what a broken connection left of an upload: once a newer checkpoint is there, it may go.
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
        """Wait, then start over with the newest: a node that is offline for days must not keep an old epoch pinned."""
        failures = self._status.failures + 1
        next_try_us = self._clock_us() + self._backoff.wait_us(failures, chance=self._chance())
        self._status = replace(self._status, failures=failures, next_try_us=next_try_us, last_error=str(error))
        # A request that failed may have come through in part, so what is there must be asked again.
        self._there = None
        self._drop()
        if isinstance(error, FatalStorageError) and isinstance(self._url, str):
            # A share that failed a sync: its descriptors are spent, ours was only a copy.
            self._opened = None

    def _drop(self) -> None:
        if self._job is not None:
            self._store.unpin(self._job.epoch)
        self._job = None
        self._units.clear()
        self._status = replace(self._status, current=None, units_left=0)
