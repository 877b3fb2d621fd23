"""The demo's pipeline: one file for the gateways, which run the steps before the cut, and for Spark, which runs the steps after it."""

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

# At the gateway, within milliseconds, with limits that the center has computed.
hot = readings.join_control(limits, on="device", how="inner").filter(col("temp") > col("high"))
hot.sink("alarms", files("out/alarms", format="jsonl"), release="at_once")

# At the center, over all gateways. The gateways count and sum; they send partial aggregates instead of rows.
windows = (
    readings.to_center(name="windows_up")
    .group_by("device")
    .window(tumbling("10s"))
    .agg(n="count(*)", mean="avg(temp)", low="min(temp)", top="max(temp)")
)
windows.sink("per_device", files("out/per_device", format="parquet"))
windows.final().select("device", "mean + 6 AS high").to_edges("limits")
