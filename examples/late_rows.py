"""Late rows are not lost: rows in = rows counted in windows + rows in the late stream.

Needs no files: the generator makes rows up to 1.2 s out of order, and the source waits for 1 s.

Run it:  fordstone run examples/late_rows.py --bounded
"""

from fordstone import Pipeline, tumbling
from fordstone.connectors import files, generator

p = Pipeline("late-rows")
readings = p.source(
    "readings",
    generator(rows=20_000, partitions=2, keys=20, step="10ms", disorder="1200ms", seed=7),
    schema={"device": "string", "ts": "timestamp", "temp": "double"},
    time="ts",
    lateness="1s",
)
windows = readings.group_by("device").window(tumbling("10s")).agg(n="count(*)", mean="avg(temp)")
windows.sink("windows", files("out/windows", format="csv"))
windows.late.sink("late", files("out/late", format="jsonl"))
