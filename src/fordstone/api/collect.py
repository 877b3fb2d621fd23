"""The rows of a stream as a frame: run only the steps that it comes from, without state, over the input that is there.

Other sinks of the pipeline are not part of such a run.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import msgspec
import polars as pl

from fordstone.api.graph import Graph
from fordstone.api.run import shortened
from fordstone.api.tiers import run_here
from fordstone.connectors.memory import MemorySink, memory
from fordstone.edge.config import RunConfig
from fordstone.errors import FordstoneError
from fordstone.plan import plan as p
from fordstone.protocol.progress import Progress
from fordstone.runtime.signals import Signals

HEAD_INTERVAL = "100ms"
"""Between two checkpoints while the first rows are waited for: rows come out at checkpoints."""


def collect(graph: Graph, at: p.Input, *, nodes: int | None, parallelism: int, rows_max: int | None) -> pl.DataFrame:
    """The rows of one stream; of an upsert stream the newest of each key. Stop when there are `rows_max` rows."""
    found = MemorySink()
    part = graph.part_of(at)
    sink = p.Sink(name=graph.name_for("collect", None), input=at, connector=memory(found))
    plan = msgspec.structs.replace(part, steps=(*part.steps, sink))
    upserts = graph.types[at].upsert_key is not None
    config = RunConfig(bounded=True, parallelism=parallelism, interval="1s" if rows_max is None else HEAD_INTERVAL)

    def enough() -> bool:
        return rows_max is not None and not upserts and sum(frame.height for frame in found.frames()) >= rows_max

    try:
        with Signals() as stop:

            def look(_: Progress) -> None:
                if enough():
                    stop.request()

            report = run_here(plan, graph.functions, config, nodes=nodes, on_progress=look, stop=stop)
    except FordstoneError as error:
        raise shortened(error) from error.__cause__
    if report.outcome == "stopped" and not enough():
        # Some of the rows would look like all of them.
        raise KeyboardInterrupt
    reads_late = any(one.port == "late" for step in plan.steps for one in step.inputs)
    if missing := _missing(report.progress, reads_late=reads_late):
        warnings.warn(missing, stacklevel=_frames_of_ours())
    rows = found.latest()
    return rows if rows_max is None else rows.head(rows_max)


def _missing(progress: Progress, *, reads_late: bool) -> str:
    """Sentences on the rows that are not among the result, although one would look for them there."""
    counts = (
        (progress.rows_rejected, "could not be read", progress.rejected),
        (0 if reads_late else progress.rows_late, "did not count", progress.late),
        (progress.rows_failed, "became dead letters of a function", None),
    )
    return " ".join(
        f"{count:,} {'row' if count == 1 else 'rows'} {what}{f' ({why})' if why else ''}."
        for count, what, why in counts
        if count
    )


def _frames_of_ours() -> int:
    """The number of callers up to the first that is not of this package."""
    package, level = str(Path(__file__).parents[1]), 1
    while sys._getframe(level).f_code.co_filename.startswith(package):  # noqa: SLF001 - as the module `warnings` does
        level += 1
    return level
