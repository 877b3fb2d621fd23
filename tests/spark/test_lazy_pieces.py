"""Pieces of open windows are read back only when one of their rows is due."""

import datetime as dt

import polars as pl

from fordstone import Pipeline, tumbling
from fordstone.connectors import files
from fordstone.lang.duration import TIME_MIN_US
from fordstone.operators.window.registry import partials_of
from fordstone.protocol.partitions import SourceState
from fordstone.spark.hosted.feed import QuerySetting
from fordstone.spark.hosted.host import ShardHost
from fordstone.spark.hosted.hosted import MemoryStore
from fordstone.spark.hosted.packing import Packed, What, decode, encode
from fordstone.spark.hosted.work import Clock, SourceClock

HOUR_US = 3_600_000_000


class CountingStore(MemoryStore):
    def __init__(self):
        super().__init__()
        self.reads = 0

    def get(self, state, number):
        self.reads += 1
        return super().get(state, number)


def _setting():
    p = Pipeline("hours")
    rows = p.source("r", files("in/*.jsonl"), schema={"k": "string", "ts": "timestamp"}, time="ts")
    rows.group_by("k").window(tumbling("1h")).agg(n="count(*)").sink("out", files("out", format="jsonl"))
    return QuerySetting(plan_json=p.plan().to_json(), shards=1)


def _run(setting, store, seconds, watermark_us):
    stages = setting.stages()
    partials = partials_of(stages.keyed[0], setting.operators(stages))
    times = [dt.datetime.fromtimestamp(s, dt.UTC) for s in seconds]
    frame = pl.DataFrame(
        {"k": ["a"] * len(times), "ts": times}, schema={"k": pl.String, "ts": pl.Datetime("us", "UTC")}
    )
    clock = Clock(clocks={"r": SourceClock(watermark_us=TIME_MIN_US, state=SourceState.OPEN, least_us=watermark_us)})
    packed = [Packed(0, What.CLOCK, 0, clock.to_json())]
    if times:
        packed.append(Packed(0, What.ROWS, 0, encode(partials.of_rows(frame))))
    out = list(ShardHost(setting, 1, 0, store).run(packed))
    return [row for one in out if one.what is What.OUT for row in decode(one.data).select("k", "n").rows()]


def test_a_batch_that_closes_no_window_reads_no_state():
    setting, store = _setting(), CountingStore()
    for batch in range(20):
        assert _run(setting, store, [batch, batch + 0.5], batch * 1_000_000) == []
    # Folding neighbours of like size reads them, which is in proportion to what was written.
    folding, store.reads = store.reads, 0
    assert folding <= 40
    assert _run(setting, store, [], 30_000_000) == []
    assert store.reads == 0
    assert _run(setting, store, [], HOUR_US) == [("a", 40)]
    assert store.reads > 0


def test_a_piece_of_which_half_is_closed_never_gives_that_half_again():
    setting, store = _setting(), CountingStore()
    # One piece with rows of two hours.
    assert _run(setting, store, [1, 3601], 0) == []
    assert _run(setting, store, [], HOUR_US) == [("a", 1)]
    for _ in range(3):
        assert _run(setting, store, [], HOUR_US + 1) == []
    assert _run(setting, store, [3602], HOUR_US + 2) == []
    assert _run(setting, store, [], 2 * HOUR_US) == [("a", 2)]
    assert _run(setting, store, [], 3 * HOUR_US) == []
