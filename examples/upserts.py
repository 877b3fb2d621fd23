"""Running results replace each other by key; a filter on them deletes rows that no longer pass.

A sensor counts as steady while its readings stay within 32 degrees of each other. At first all sensors
are steady; one by one they are deleted from the table.

Run it:  fordstone run examples/upserts.py --bounded
"""

from fordstone import Pipeline
from fordstone.connectors import files, generator

p = Pipeline("steady-sensors")
readings = p.source(
    "readings",
    generator(rows=20_000, keys=50, seed=11),
    schema={"device": "string", "ts": "timestamp", "temp": "double"},
)
span = readings.group_by("device").agg(n="count(*)", low="min(temp)", top="max(temp)")
steady = span.filter("top - low < 32").select("device", "n", "round(top - low, 1) AS span")
steady.sink("steady", files("out/steady", format="jsonl"))
