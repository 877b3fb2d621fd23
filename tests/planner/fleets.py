"""Pipelines for two tiers, for the tests of how they are cut."""

from __future__ import annotations

from collections.abc import Callable

from fordstone import Pipeline, Stream, col, tumbling
from fordstone.connectors import files
from fordstone.plan import plan as p
from fordstone.planner.split import Crossing, Tiers, split

SCHEMA = {
    "device": "string", "ts": "timestamp", "temp": "double", "n": "bigint", "tags": "array<string>", "note": "string",
}  # fmt: skip


def cold_chain() -> Pipeline:
    """The pipeline of the design's first page."""
    pipeline = Pipeline("cold-chain")
    readings = pipeline.source(
        "readings",
        files("in/*.jsonl"),
        schema={"device": "string", "ts": "timestamp", "temp": "double"},
        time="ts",
        lateness="5s",
    )
    thresholds = pipeline.control("thresholds", schema={"device": "string", "threshold": "double"}, key="device")
    warm = readings.filter("temp > -40").join_control(thresholds, on="device")
    hot = warm.filter(col("temp") > col("threshold"))
    hot.sink("alarms", files("out/alarms", format="jsonl"), release="at_once")
    grouped = readings.to_center().group_by("device").window(tumbling("10s"))
    fleet = grouped.agg(n="count(*)", mean="avg(temp)", top="max(temp)")
    fleet.sink("per_device", files("out/per_device", format="parquet"))
    fleet.final().select("device", "mean + 4 AS threshold").to_edges("thresholds")
    return pipeline


def above(build: Callable[[Stream], object], *, name: str = "cut") -> p.Plan:
    """A plan with one cut, and what `build` makes of the stream above it."""
    pipeline = Pipeline("fleet")
    rows = pipeline.source("rows", files("in/*.jsonl"), schema=SCHEMA, time="ts", lateness="5s")
    build(rows.to_center(name=name))
    return pipeline.plan()


def sunk(stream: Stream, name: str = "out") -> Stream:
    stream.sink(name, files(f"out/{name}", format="jsonl"))
    return stream


def tiers_of(build: Callable[[Stream], object]) -> Tiers:
    return split(above(build))


def crossing_of(build: Callable[[Stream], object]) -> Crossing:
    (crossing,) = tiers_of(build).crossings
    return crossing


def names(plan: p.Plan | None) -> list[str]:
    assert plan is not None
    return [step.name for step in plan.steps]
