"""The scrub in a real run: a run that rotted in a kept checkpoint is repaired from the remote copy, or reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from fordstone import Pipeline
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.edge.run import run
from fordstone.epochs.store import CheckpointStore
from fordstone.protocol.progress import Progress
from fordstone.runtime.signals import StopRequest
from fordstone.storage.disk import OsDisk

TICKS_MAX = 400


def pipeline(rows: int) -> Pipeline:
    found = Pipeline("p")
    source = MemorySource([[{"k": "a", "n": number} for number in range(rows)]])
    stream = found.source("rows", memory(source), schema={"k": "string", "n": "long"})
    stream.group_by("k").agg(n="count(*)").sink("out", memory(MemorySink()))
    return found


@pytest.mark.parametrize("copied", [True, False])
def test_a_run_that_rotted_is_repaired_from_a_copy_or_reported(tmp_path: Path, copied: bool) -> None:
    state, remote = tmp_path / "state", f"file://{tmp_path}/copies" if copied else None
    for rows in (5, 10, 15):
        first = pipeline(rows)
        run(first.plan(), first.functions, state=state, remote=remote, available_now=True, discard_later_output=True)
    disk = OsDisk(state)
    store = CheckpointStore(disk, pipeline="p", node="node", read_only=True)
    *older, newest = store.epochs()
    named = {run for epoch in older for run in store.manifest(epoch).runs()} - set(store.manifest(newest).runs())
    (rotten, *_) = [one for one in named if not copied or (tmp_path / "copies/p/node/runs" / one.digest).exists()]
    path = state / "p" / "node" / "runs" / rotten.digest
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    stop, ticks, most = StopRequest(), 0, 0

    def look(progress: Progress) -> None:
        nonlocal ticks, most
        ticks, most = ticks + 1, max(most, progress.damaged_runs)
        if ticks > TICKS_MAX or (progress.damaged_runs if not copied else store.run_fault(rotten, deep=True) is None):
            stop.request()

    again = pipeline(15)
    options = {"state": state, "remote": remote, "keep": 10, "discard_later_output": True}
    run(again.plan(), again.functions, on_progress=look, stop=stop, **options)  # type: ignore[arg-type]
    disk.close()
    assert ticks <= TICKS_MAX
    assert most == (0 if copied else 1)
    assert store.run_fault(rotten, deep=True) is None if copied else path.read_bytes() == data
