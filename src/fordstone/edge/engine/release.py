"""What happens to a sealed epoch: it becomes final, its rows go to the sinks, and what is no longer needed is removed.

Each part is handed to `Writer`, which calls them in this order, on its own thread.

Invariants: no row reaches a sink before its epoch is final; nothing that an unsent epoch or a kept checkpoint names is removed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import polars as pl

from fordstone.connectors.base import Sink, SinkDelayedError
from fordstone.edge.link.outbox import Outbox
from fordstone.epochs.manifest import Cut, Manifest
from fordstone.epochs.store import CheckpointStore, merge_state
from fordstone.errors import CheckpointError, DamagedError, StorageError
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.runtime.snapshot import FrozenState
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.failpoint import Failpoints

log = logging.getLogger(__name__)


class ReleaseLog(Protocol):
    """Decides when an epoch is final. Between `seal` and `is_final` an epoch is sealed and not released."""

    def seal(self, manifest: Manifest) -> None:
        """Record the epoch durably. Called once per epoch, in order; again after a `StorageError` that is not fatal."""
        ...

    def is_final(self, epoch: int) -> bool:
        """Whether the rows of a sealed epoch may leave this node. Polled by the writer until it holds; once true, always true."""
        ...


class LocalReleaseLog:
    """An epoch is final as soon as its manifest is durable on this node."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._sealed = 0

    def seal(self, manifest: Manifest) -> None:
        self._store.commit(manifest)
        self._sealed = manifest.epoch

    def is_final(self, epoch: int) -> bool:
        return epoch <= self._sealed


class SinkRelease:
    """Hands the rows of final epochs to the sinks that wait for them."""

    def __init__(self, sinks: Mapping[str, tuple[Sink, pl.Schema]], failpoints: Failpoints) -> None:
        self._sinks = sinks
        self._failpoints = failpoints
        self.released_rows = 0
        """Dead letters are not counted."""
        self.last = ""
        """The sink that was the last to be given rows."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sinks)

    def release(self, name: str, epoch: int, frames: Sequence[pl.DataFrame]) -> None:
        sink, schema = self._sinks[name]
        self._failpoints.hit("sink.before-release")
        # A clone: a task may hold the same frame, and writing locks it (see `epochs.run_file.encode_run`).
        rows = pl.concat(frames).clone() if frames else pl.DataFrame(schema=schema)
        self.last = name
        try:
            sink.release(epoch, rows)
        except SinkDelayedError as error:
            error.step = name
            raise
        if not name.startswith(DEAD_LETTERS):
            self.released_rows += rows.height
        self._failpoints.hit("sink.released")

    def release_again(self, manifest: Manifest, store: CheckpointStore) -> None:
        """Release the epoch of a checkpoint once more, in case the crash came between the seal and the sinks."""
        for segment in manifest.segments:
            if segment.sink in self._sinks:
                self.release(segment.sink, manifest.epoch, [store.read_run(run) for run in segment.runs])
        self.released_rows = 0

    def close(self) -> None:
        for sink, _ in self._sinks.values():
            sink.close()


class Retention:
    """Removes checkpoints that are no longer kept, and merges small runs while there is nothing else to do."""

    def __init__(
        self, store: CheckpointStore, *, outbox: Outbox | None = None, ack: Callable[[Cut], None] | None = None
    ) -> None:
        """`ack` is called with the cut of the oldest checkpoint that is kept: no run will ever start before it."""
        self._store = store
        self._outbox = outbox
        self._ack = ack
        self._copies: list[Callable[[], Collection[int]]] = []
        self._states: deque[FrozenState] = deque()
        self._not_merged: set[str] = set()
        """What kept states from being merged. It is logged once, and the states are tried again after every epoch."""

    def keep_for(self, acknowledged: Callable[[], Collection[int]]) -> None:
        """Keep the newest checkpoint that a copy has acknowledged, beside the last few. Called once per copy: the hub, the remote."""
        self._copies.append(acknowledged)

    def collect(self, epoch: int) -> None:
        """Remove what is no longer needed after this epoch. A failure is logged, and the next epoch tries again."""
        if self._outbox is not None and epoch % self._outbox.collect_every:
            return
        try:
            held = self._outbox.held() if self._outbox is not None else ()
            self._store.collect(acknowledged=[epoch for copy in self._copies for epoch in copy()], held=held)
            if self._ack is not None and (kept := self._store.epochs()):
                self._ack(self._store.manifest(kept[0]).cut)
        except FatalStorageError:
            raise
        except (StorageError, CheckpointError) as error:
            log.warning("retention failed", extra={"problem": str(error)})

    def merge_later(self, states: Iterable[FrozenState]) -> None:
        """Set the states to be merged, in place of those left from earlier."""
        self._states = deque(states)

    def merge_one(self) -> bool:
        """Merge some pieces of one state; return whether there was something to merge.

        A state with a damaged run stays as it is: the one in memory is whole, so that the pipeline need not stop for it.
        """
        while self._states:
            frozen = self._states.popleft()
            try:
                if merge_state(self._store, frozen.state, first=frozen.pieces[0] if frozen.pieces else None):
                    return True
            except FatalStorageError:
                raise
            except DamagedError as error:
                if str(error) not in self._not_merged:
                    self._not_merged.add(str(error))
                    extra = {"step": frozen.step, "state": frozen.name, "problem": str(error)}
                    log.warning("state not merged: one of its runs is damaged", extra=extra)
            except StorageError:
                # Merging only saves space and time; the next checkpoint will report that the disk refuses.
                self._states.clear()
        return False
