"""A pipeline whose rows cross to the hub, and what the hub then has of it. Run as a program, it is a node that may be killed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from tests.hub import reading

from fordstone import Pipeline
from fordstone.connectors import files, memory
from fordstone.connectors.base import ConnectorSpec
from fordstone.connectors.memory import MemorySink, MemorySource
from fordstone.edge.config import RunConfig
from fordstone.edge.run import run
from fordstone.epochs.run_file import decode_run
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import StreamEpoch
from fordstone.plan import plan as p
from fordstone.protocol.progress import Report

SCHEMA = {"id": "bigint", "ts": "timestamp"}
PIPELINE = "crossing"


def center(plan: p.Plan) -> p.Plan:
    """The plan with its sinks at the center."""
    steps = [
        msgspec.structs.replace(step, connector=ConnectorSpec("center", {"stream": step.name}), tier="center")
        if isinstance(step, p.Sink)
        else step
        for step in plan.steps
    ]
    return msgspec.structs.replace(plan, steps=tuple(steps))


def plan_over(connector: ConnectorSpec, *, guarantee: Any = "exactly_once", time: str | None = "ts") -> p.Plan:
    pipeline = Pipeline(PIPELINE, guarantee=guarantee)
    stream = pipeline.source("source", connector, schema=SCHEMA, time=time)
    stream.filter("id >= 0").sink("s", memory(MemorySink()))
    return center(pipeline.plan())


def source_of(count: int, first: int = 0) -> MemorySource:
    return MemorySource([rows(count, first)])


def rows(count: int, first: int = 0) -> list[tuple[int, str]]:
    return [
        (number, f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}Z") for number in range(first, first + count)
    ]


def run_plan(plan: p.Plan, hub: HubAddress | None, state: Path, **options: Any) -> Report:
    on_progress = options.pop("on_progress", None)
    config = RunConfig(**{"hub": hub, "state": state, "bounded": True, "interval": "20ms", "batch_rows": 7} | options)
    return run(plan, {}, config, on_progress=on_progress)


def epochs_at(hub: HubAddress, stream: str = "s") -> list[StreamEpoch]:
    """What the hub has of the stream, in order."""
    with contextlib.closing(HubClient(hub, timeout_s=10)) as client:
        return reading.epochs_at(client, PIPELINE, stream)


def rows_at(hub: HubAddress, stream: str = "s") -> pl.DataFrame:
    """All rows of the stream."""
    with contextlib.closing(HubClient(hub, timeout_s=10)) as client:
        frames = [decode_run(client.read_blob(ref), ref) for epoch in epochs_at(hub, stream) for ref in epoch.runs]
    return pl.concat(frames) if frames else pl.DataFrame()


def ids_at(hub: HubAddress) -> list[int]:
    found = rows_at(hub)
    return found.get_column("id").to_list() if found.height else []


if __name__ == "__main__":
    url, folder, state = sys.argv[1:]
    run_plan(plan_over(files(f"{folder}/*.jsonl")), HubAddress(url=url), Path(state), interval="1ms")
