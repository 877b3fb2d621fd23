"""A process that commits epochs, collects, merges and uploads, and may be killed on the way. Prints what it sealed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import polars as pl

from fordstone.epochs.copies import Uploader
from fordstone.epochs.store import merge_checkpoint
from fordstone.protocol.recovery import CannotResume, StartEmpty, decide_recovery
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import parse_failpoints

spec = importlib.util.spec_from_file_location("builders", Path(__file__).with_name("conftest.py"))
assert spec is not None
assert spec.loader is not None
builders = importlib.util.module_from_spec(spec)
spec.loader.exec_module(builders)


def fold(frames: Any, *, oldest: Any) -> Any:
    assert oldest
    return pl.concat(frames)


def main(root: str, failpoint: str, epochs: int) -> None:
    disk = OsDisk(root)
    disk.lock()
    store = builders.open_store(disk, failpoints=parse_failpoints(failpoint), keep=2)
    uploader = Uploader(store, f"file://{root}-remote", keep=2)
    survey = store.survey(deep=True)
    decision = decide_recovery(survey.checkpoints, survey.cuts)
    assert not isinstance(decision, CannotResume)
    first = 1 if isinstance(decision, StartEmpty) else decision.next_epoch
    for epoch in range(first, epochs + 1):
        builders.commit_epoch(store, epoch)
        print(epoch, flush=True)
        merge_checkpoint(store, lambda _step, _state: fold)
        store.collect()
        uploader.offer(epoch)
        while uploader.step():
            pass


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
