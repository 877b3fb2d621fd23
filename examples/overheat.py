"""An alarm for devices that get hotter and hotter: a pattern of rows, and the candidates that timed out.

Needs no files: the generator makes the readings.

Run it:  fordstone run examples/overheat.py --bounded
"""

from fordstone import Pattern, Pipeline
from fordstone.connectors import files, generator

p = Pipeline("overheat")
readings = p.source(
    "readings",
    generator(rows=20_000, partitions=2, keys=20, step="10ms", disorder="300ms", seed=7),
    schema={"device": "string", "ts": "timestamp", "temp": "double"},
    time="ts",
    lateness="1s",
)
overheat = (
    Pattern("overheat")
    .start("hot", "temp > 25")
    .then("hotter", "temp > 25 AND temp > hot.temp", times=2)
    .then("hottest", "temp > 25 AND temp > max(hotter.temp)")
    .within("5s")
)
measures = {"since": "first(hot.ts)", "peak": "hottest.temp", "mean": "avg(temp)", "at": "match_time()"}
alarms = readings.group_by("device").match(overheat, measures)
alarms.sink("alarms", files("out/alarms", format="jsonl"))
alarms.timeouts.sink("calmed", files("out/calmed", format="jsonl"))
