"""A process that commits epochs, collects, merges and uploads, and may be killed on the way. Prints what it sealed."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import polars as pl
from tests.epochs.conftest import commit_epoch, open_store

from fordstone.epochs.copies import Uploader
from fordstone.epochs.store import merge_checkpoint
from fordstone.protocol.recovery import CannotResume, StartEmpty, decide_recovery
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import failpoints_of_process


class Commits(msgspec.Struct, frozen=True, kw_only=True):
    """Where, and up to which epoch."""

    root: str
    epochs: int


def fold(frames: Any, *, oldest: Any) -> Any:
    assert oldest
    return pl.concat(frames)


def main() -> int:
    job = msgspec.json.decode(sys.argv[1], type=Commits)
    disk = OsDisk(job.root)
    disk.lock()
    store = open_store(disk, failpoints=failpoints_of_process(), keep=2)
    uploader = Uploader(store, f"file://{job.root}-remote", keep=2)
    survey = store.survey(deep=True)
    decision = decide_recovery(survey.checkpoints, survey.cuts)
    assert not isinstance(decision, CannotResume)
    first = 1 if isinstance(decision, StartEmpty) else decision.next_epoch
    for epoch in range(first, job.epochs + 1):
        commit_epoch(store, epoch)
        print(epoch, flush=True)
        merge_checkpoint(store, lambda _step, _state: fold)
        store.collect()
        uploader.offer(epoch)
        while uploader.step():
            pass
    return 0
