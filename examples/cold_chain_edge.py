"""Watch refrigerated boxes: alarms at once, a summary every ten seconds, totals, and late rows.

Run it:  fordstone example readings && fordstone run examples/cold_chain_edge.py --bounded
"""

from fordstone import Pipeline, col, tumbling
from fordstone.connectors import files

ALARM_ABOVE = 8.0

p = Pipeline("cold-chain")

readings = p.source(
    "readings",
    files("in/readings/*.jsonl"),
    schema={"device": "string", "seq": "bigint", "ts": "timestamp", "temp": "double"},
    time="ts",
    lateness="5s",
)
plausible = readings.filter("temp > -60 AND temp < 80")

# Alarms are emitted at once, before the epoch is sealed. After a crash some are emitted again, with the same __id.
hot = plausible.filter(col("temp") > ALARM_ABOVE).select("device", "seq", "ts", "temp")
hot.sink("alarms", files("out/alarms", format="jsonl"), release="at_once")

# One row per device and window is emitted, once, when the window closes.
summary = (
    plausible.group_by("device")
    .window(tumbling("10s"))
    .agg(n="count(*)", mean="avg(temp)", low="min(temp)", top="max(temp)")
)
summary.sink("per_device", files("out/per_device", format="parquet"))

# Rows that arrived after their window had closed are only here.
summary.late.sink("late", files("out/late", format="jsonl"))

# Without a window, the row of each device is replaced when it changes.
totals = plausible.group_by("device").agg(n="count(*)", top="max(temp)")
totals.sink("totals", files("out/totals", format="jsonl"))
