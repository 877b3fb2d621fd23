"""The process that the faults happen to: runs a job in the working directory, through the public API.

Prints a line of JSON for each change of what stalls it, and its report at the end. A user's mistake is one text on
standard error and exit code 1, as on the command line.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, closing, nullcontext

import msgspec
from tests.faults.job import NODE, PIPELINE, Job, build

from fordstone.cli.logs import configure_logging
from fordstone.epochs.store import CheckpointStore, Combine, merge_checkpoint
from fordstone.errors import FordstoneError
from fordstone.operators.base import OperatorContext
from fordstone.operators.registry import make_operator
from fordstone.planner.check import stream_types
from fordstone.protocol.progress import Progress
from fordstone.protocol.retry import RestartPolicy
from fordstone.state.rocksdb import RocksTable
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import failpoints_of_process


def main() -> int:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    configure_logging(0)
    try:
        with mutant(job.mutant) if job.mutant is not None else nullcontext():
            if job.task == "merge":
                merge(job)
            else:
                run(job)
    except FordstoneError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def mutant(name: str) -> AbstractContextManager[None]:
    from tests.simulation.mutants import MUTANTS  # few children need it, and each pays for its imports

    return MUTANTS[name]()


def run(job: Job) -> None:
    # Copies of databases are worth it for more rows than a test has.
    assert RocksTable.__init__.__kwdefaults__ is not None
    RocksTable.__init__.__kwdefaults__["keep_rows_min"] = 10
    stalled: list[str | None] = [None]

    def on_progress(progress: Progress) -> None:
        if progress.stalled != stalled[-1]:
            stalled.append(progress.stalled)
            print(json.dumps({"stalled": progress.stalled, "epoch": progress.epoch}), flush=True)

    options = {"state": "state"} | dict(job.options)
    if "restart" in options:
        options["restart"] = RestartPolicy(**options["restart"])
    report = build(job).run(on_progress=on_progress, **options)
    print(msgspec.json.encode(report).decode(), flush=True)


def merge(job: Job) -> None:
    """Fold the newest checkpoint while nothing runs, as `fordstone checkpoints merge` does."""
    plan = build(job).plan()
    setting = OperatorContext(plan=plan, types=stream_types(plan))

    def combine_of(step: str, state: str) -> Combine | None:
        return make_operator(plan.step(step), setting).states()[state].combine

    with closing(OsDisk("state")) as disk:
        disk.lock()
        failpoints = failpoints_of_process()
        store = CheckpointStore(disk, pipeline=PIPELINE, node=NODE, failpoints=failpoints)
        merged = merge_checkpoint(store, combine_of)
        store.collect()
    if merged is None:
        raise FordstoneError("there was nothing to merge.")
    print(json.dumps({"before": merged.runs_before, "after": merged.runs_after}))


if __name__ == "__main__":
    sys.exit(main())
