"""A function with state and timers: reports devices that fall silent, and devices that send again.

Needs no files: the generator makes the readings, and a filter drops some of them.

Run it:  fordstone run examples/process.py --bounded
"""

from collections.abc import Iterator
from typing import Any

from fordstone import Context, KeyedFunction, Pipeline, Timer, ValueState
from fordstone.connectors import files, generator


class Silence(KeyedFunction):
    """Keeps the time of the last reading of each device."""

    heard = ValueState("timestamp")
    silent = ValueState("boolean", ttl="1d")

    def process(self, row: dict[str, Any], ctx: Context) -> Iterator[dict[str, Any]]:  # noqa: ARG002 - the function needs only the time
        """Report the device if it was silent, and set the timer again."""
        if self.silent.get(default=False):
            self.silent.clear()
            yield {"device": ctx.key, "ts": ctx.time, "what": "back", "after": (ctx.time - self.heard.get()).seconds}
        self.heard.set(ctx.time)
        ctx.set_timer(after="20s")

    def on_timer(self, timer: Timer, ctx: Context) -> Iterator[dict[str, Any]]:
        """Report a device that has sent no reading for 20 seconds."""
        self.silent.set(True)
        yield {"device": ctx.key, "ts": timer.time, "what": "silent", "after": 20}


p = Pipeline("silence")
readings = p.source(
    "readings",
    generator(rows=5_000, keys=10, step="500ms", disorder="2s", seed=11),
    schema={"device": "string", "ts": "timestamp", "temp": "double"},
    time="ts",
    lateness="2s",
)
reports = (
    readings.filter("temp > 20")
    .group_by("device")
    .process(Silence, schema={"device": "string", "ts": "timestamp", "what": "string", "after": "bigint"})
)
reports.sink("silence", files("out/silence", format="jsonl"))
