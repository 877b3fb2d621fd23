"""Find runs of kept checkpoints that the disk has damaged: read them all, slowly, and compare their digests; repair them from a copy.

Stepped on a thread of its own, so no task and no commit waits for it. A copy at the remote URL or at the hub repairs a run. Without one,
the damage is reported and nothing else is done: the state in memory is whole, so the pipeline goes on. What a restart
would resume from is decided by `protocol.recovery`, as for all damage.

Invariants: a run counts as damaged only after a second read, and while a kept checkpoint names it. Nothing is removed. At most
`bytes_per_s` are read on average, one run at a time.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from fordstone.epochs.run_file import SCRUB_PASS_US, short
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError, HubError, StorageError
from fordstone.runtime.clock import Clock
from fordstone.state.base import RunRef
from fordstone.storage.disk import FatalStorageError

log = logging.getLogger(__name__)

RATE_BYTES: Final = 1 << 20
"""Bytes per second that a node reads in the background."""
RUN_US_MIN: Final = 10_000
"""Minimum time between two runs, which may be small and numerous."""
Copy = Callable[[RunRef], bytes]
"""Fetches the bytes of a run. `DamagedError` if the copy does not have it; `StorageError` or `HubError` if it cannot be asked now."""


class RunScrub:
    """Stepped by a scheduler. `damaged` may be read from any thread."""

    def __init__(
        self,
        store: CheckpointStore,
        clock: Clock,
        *,
        copies: Sequence[Copy] = (),
        bytes_per_s: int = RATE_BYTES,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`chance()`: a random number from 0 to 1. A pass begins anywhere, so that a node that restarts often checks all runs in time, too."""
        self.wake: Callable[[], None] = lambda: None
        self.damaged = 0
        """Runs that are damaged and could not be repaired."""
        self._store = store
        self._clock = clock
        self._copies = tuple(copies)
        self._bytes_per_s = bytes_per_s
        self._chance = chance
        self._due_us = clock.monotonic_us()
        self._next_pass_us = self._due_us
        self._left: deque[RunRef] = deque()
        self._known: set[RunRef] = set()

    @property
    def idle_wait_us(self) -> int | None:
        return max(self._due_us - self._clock.monotonic_us(), RUN_US_MIN)

    def step(self) -> bool:
        """Check one run if it is due. Returns False, so that the scheduler waits for `idle_wait_us`."""
        now_us = self._clock.monotonic_us()
        if now_us < self._due_us:
            return False
        if not self._left:
            if now_us < self._next_pass_us:
                self._due_us = self._next_pass_us
                return False
            self._next_pass_us = now_us + SCRUB_PASS_US
            runs = sorted(self._named(), key=lambda run: run.digest)
            first = int(self._chance() * len(runs))
            # Those that were damaged come first: they may have been repaired, or a copy can be asked again.
            known = [run for run in runs if run in self._known]
            self._left = deque([*known, *(run for run in runs[first:] + runs[:first] if run not in self._known)])
            self._known.intersection_update(runs)
            self.damaged = len(self._known)
        if self._left:
            run = self._left.popleft()
            self._check(run)
            self._due_us = now_us + max(run.size_bytes * 1_000_000 // self._bytes_per_s, RUN_US_MIN)
        return False

    def _named(self) -> set[RunRef]:
        """The runs that kept checkpoints name. A manifest that is damaged is found when it is read at the next start."""
        found: set[RunRef] = set()
        for epoch in self._store.epochs():
            try:
                found.update(self._store.manifest(epoch).runs())
            except (CheckpointError, StorageError) as error:
                if isinstance(error, FatalStorageError):
                    raise
                if epoch in self._store.epochs():
                    log.warning("checkpoint damaged", extra={"epoch": epoch, "problem": str(error)})
        return found

    def _check(self, run: RunRef) -> None:
        try:
            problem = self._store.run_fault(run, deep=True)
            # A second look: it may have been collected meanwhile, and a read may fail once.
            if problem is not None and run in self._named():
                problem = self._store.run_fault(run, deep=True)
            elif problem is not None:
                problem = None
            if problem is not None and self._repair(run):
                log.warning("damaged run repaired", extra={"digest": short(run.digest), "problem": problem})
                problem = None
        except FatalStorageError:
            raise
        except (StorageError, OSError) as error:
            log.warning("run not checked", extra={"digest": short(run.digest), "problem": str(error)})
            return
        if problem is None:
            self._known.discard(run)
        elif run not in self._known:
            self._known.add(run)
            log.error(
                "run is damaged", extra={"digest": short(run.digest), "bytes": run.size_bytes, "problem": problem}
            )
        self.damaged = len(self._known)

    def _repair(self, run: RunRef) -> bool:
        """Put a copy over the damaged file. The store compares its digest, and writes it whole or not at all."""
        for copy in self._copies:
            try:
                self._store.put_run(run, copy(run))
            except FatalStorageError:
                raise
            except (DamagedError, HubError, StorageError) as error:
                log.info("no copy of a damaged run", extra={"digest": short(run.digest), "problem": str(error)})
            else:
                return True
        return False
