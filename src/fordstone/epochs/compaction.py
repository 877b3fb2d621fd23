"""Fold the many small runs of a state into few.

`merge_state` does it while the pipeline runs, beside the tasks; `merge_checkpoint` does it to a stored checkpoint when
nothing runs. Which pieces are worth it and what folding means is the state's to say.

Invariants: what older manifests name is not touched; a checkpoint has its old runs or its new ones, never a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import polars as pl

from fordstone.epochs.manifest import StateRuns
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError
from fordstone.state.base import Piece, State


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
    """Fold what the state says is worth folding, if anything; says whether it was. Off the task's thread.

    `first` is the first piece of the newest freeze, if known: when the fold begins with it, tombstones have nothing
    older to hide and go too.
    """
    pieces = state.mergeable()
    if not pieces:
        return False
    frame = state.combine([_rows(store, piece) for piece in pieces], oldest=pieces[0] is first)
    ref = store.write_run(frame)
    store.failpoints.hit("merge.written")
    state.merged(pieces, Piece(frame, ref=ref, keep=True) if state.keeps_frames else Piece(ref=ref))
    return True


def merge_checkpoint(store: CheckpointStore, combine_of: Callable[[str, str], Combine | None]) -> Merged | None:
    """Fold every state of the newest checkpoint into one run each, under the same epoch. None: nothing to fold.

    `combine_of` maps a step and the name of its state to what folds it; None leaves that state as it is. The old runs
    go when no older manifest names them: with the next `collect`.
    """
    epochs = store.epochs()
    if not epochs:
        raise CheckpointError(
            f"pipeline {store.pipeline} has no checkpoint on node {store.node}: there is nothing to merge."
        )
    old = store.manifest(epochs[-1])
    new = msgspec.structs.replace(old, states=tuple(_folded(store, state, combine_of) for state in old.states))
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


def _folded(store: CheckpointStore, state: StateRuns, combine_of: Callable[[str, str], Combine | None]) -> StateRuns:
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
