"""Refrigerated boxes on two tiers: alarms at each gateway in milliseconds, the view of the whole fleet at the center.

Run it, all on this machine, in two terminals:

    fordstone example boxes --live
    fordstone run examples/cold_chain.py --center local

Without `--center local` the center is on Spark. The first windows close after about 15 seconds and become thresholds. From then on every
box that is opened raises an alarm, in out/alarms.
"""

from fordstone import Pipeline, col, tumbling
from fordstone.connectors import files

p = Pipeline("cold-chain")

readings = p.source(
    "readings",
    files("in/*.jsonl"),
    schema={"device": "string", "ts": "timestamp", "temp": "double"},
    time="ts",
    lateness="5s",
)

# Each box has its own threshold. The center computes it, and every gateway has a copy of the table.
thresholds = p.control("thresholds", schema={"device": "string", "threshold": "double"}, key="device")

hot = readings.filter("temp > -40").join_control(thresholds, on="device").filter(col("temp") > col("threshold"))
hot.sink("alarms", files("out/alarms", format="jsonl"), release="at_once")  # at the gateway, in milliseconds

fleet = (
    readings.to_center()  # the cut: the steps before it run on gateways, the steps after it on Spark
    .group_by("device")
    .window(tumbling("10s"))
    .agg(n="count(*)", mean="avg(temp)", top="max(temp)")
)
fleet.sink("per_device", files("out/per_device", format="parquet"))

# The mean of each box returns to the gateways as its threshold.
fleet.final().select("device", "mean + 4 AS threshold").to_edges("thresholds")
