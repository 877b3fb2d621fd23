"""The pipeline of the soak: as the demo's, but rows cross instead of partial aggregates, because late rows are read."""

from fordstone import Pipeline, col, tumbling
from fordstone.connectors import files

p = Pipeline("fleet")

readings = p.source(
    "readings",
    files("in/*.jsonl"),
    schema={"device": "string", "seq": "bigint", "ts": "timestamp", "temp": "double"},
    time="ts",
    lateness="2s",
)
limits = p.control("limits", schema={"device": "string", "high": "double"}, key="device")
hot = readings.join_control(limits, on="device", how="inner").filter(col("temp") > col("high"))
hot.sink("alarms", files("out/alarms", format="jsonl"), release="at_once")

windows = (
    readings.to_center(name="readings_up")
    .group_by("device")
    .window(tumbling("10s"))
    .agg(n="count(*)", mean="avg(temp)", low="min(temp)", top="max(temp)")
)
windows.sink("per_device", files("out/per_device", format="parquet"))
windows.late.sink("late", files("out/late", format="jsonl"))
windows.final().select("device", "mean + 6 AS high").to_edges("limits")
