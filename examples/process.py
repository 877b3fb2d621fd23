"""A function with state and timers: tells of devices that fall silent, and of those that come back.

Needs no files: the generator makes the readings; a filter makes devices lose some.

Run it:  fordstone run examples/process.py --bounded
"""

from collections.abc import Iterator
from typing import Any

from fordstone import Context, KeyedFunction, Pipeline, Timer, ValueState
from fordstone.connectors import files, generator


class Silence(KeyedFunction):
    """Remembers when each device was last heard."""

    heard = ValueState("timestamp")
    silent = ValueState("boolean", ttl="1d")

    def process(self, row: dict[str, Any], ctx: Context) -> Iterator[dict[str, Any]]:  # noqa: ARG002 - that there is one is enough
        """A reading: the device is there."""
        if self.silent.get(default=False):
            self.silent.clear()
            yield {"device": ctx.key, "ts": ctx.time, "what": "back", "after": (ctx.time - self.heard.get()).seconds}
        self.heard.set(ctx.time)
        ctx.set_timer(after="20s")

    def on_timer(self, timer: Timer, ctx: Context) -> Iterator[dict[str, Any]]:
        """Nothing for 20 seconds."""
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
told = (
    readings.filter("temp > 20")
    .group_by("device")
    .process(Silence, schema={"device": "string", "ts": "timestamp", "what": "string", "after": "bigint"})
)
told.sink("silence", files("out/silence", format="jsonl"))
