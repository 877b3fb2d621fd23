"""The rows of a stream as a frame: run only the steps that it comes from, without state, over the input that is there.

Other sinks of the pipeline are not part of such a run.
"""

from __future__ import annotations

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
    rows = found.latest()
    return rows if rows_max is None else rows.head(rows_max)
