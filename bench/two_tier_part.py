"""One part of the pipeline of two tiers that is measured, as a process of its own: a gateway, or the center.

    python two_tier_part.py '{"part": "edge", ...}'

As `fordstone run --part` runs it, but that push-down can be switched off.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import msgspec

# Before Polars is loaded: tasks are the threads.
os.environ.setdefault("POLARS_MAX_THREADS", "1")

from fordstone import Pipeline, tumbling
from fordstone.connectors import files
from fordstone.hub.client.address import HubAddress
from fordstone.planner.split import placed, split
from spark_input import SCHEMA


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to run."""

    part: Literal["edge", "local", "spark"]
    """The edge; the center on the edge's engine; the center on Spark."""
    node: str
    pattern: str
    out: str
    state: str
    hub: str
    push_down: bool


def pipeline_of(pattern: str, out: str) -> Pipeline:
    """Windows of ten seconds over the readings of all gateways."""
    p = Pipeline("two-tier")
    rows = p.source("readings", files(pattern), schema=SCHEMA, time="ts", lateness="1s")
    windows = rows.to_center().group_by("dev").window(tumbling("10s"))
    found = windows.agg(n="count(*)", total="sum(temp)", low="min(temp)", top="max(temp)")
    found.sink("out", files(out, format="parquet"))
    return p


def run_part(options: Part) -> None:
    """Run until it is stopped."""
    pipeline = pipeline_of(options.pattern, options.out)
    hub = HubAddress(url=options.hub)
    tiers = split(pipeline.plan(), push_down=options.push_down)
    half = tiers.edge if options.part == "edge" else tiers.center
    assert half is not None
    plan = placed(half, hub)
    if options.part == "spark":
        from fordstone.spark import session
        from fordstone.spark.config import SparkConfig
        from fordstone.spark.run import run_plan

        spark = session(master="local[*]", memory="4g")
        run_plan(plan, pipeline.functions, SparkConfig(state=Path(options.state), interval="200ms"), spark=spark)
        return
    from fordstone.edge.config import RunConfig
    from fordstone.edge.run import run

    to_hub = {"hub": hub} if options.part == "edge" else {}
    run(plan, pipeline.functions, RunConfig(state=options.state, node=options.node, interval="1s", **to_hub))  # type: ignore[arg-type]  # of one type


if __name__ == "__main__":
    run_part(msgspec.json.decode(sys.argv[1], type=Part))
