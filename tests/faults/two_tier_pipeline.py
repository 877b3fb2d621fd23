"""The pipeline of two tiers that the faults are aimed at. Paths are relative: each process runs in a folder of its own.

Rows cross twice: as they are, so that every single one can be found again, and as partial aggregates. What the windows hold is fed back to
the nodes, where every row is joined with it.
"""

from __future__ import annotations

from tests.faults.job import LATENESS_S, SCHEMA, WINDOW_S

from fordstone import Pipeline, tumbling
from fordstone.connectors import files

p = Pipeline("fleet")
rows = p.source("rows", files("in/*.jsonl"), schema=SCHEMA, time="ts", lateness=f"{LATENESS_S}s")
limits = p.control("limits", schema={"k": "bigint", "most": "bigint"}, key="k")

joined = rows.filter("id % 7 <> 3").join_control(limits, on="k")
joined.sink("joined", files("out/joined", format="jsonl"))

plain = joined.select("id", "k", "ts", "n")
plain.to_center(name="plain").sink("kept", files("out/kept", format="jsonl"))
windows = (
    plain.to_center(name="sums")
    .group_by("k")
    .window(tumbling(f"{WINDOW_S}s"))
    .agg(name="windows_by_k", n="count(*)", total="sum(id)")
)
windows.sink("windows", files("out/windows", format="parquet"))
windows.final().select("k", "n AS most").to_edges("limits")
