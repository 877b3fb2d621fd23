"""What `/metrics` shows of the log; `test_middleware` has what is counted of requests."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fordstone.hub.messages import StreamInfo
from fordstone.hub.server.metrics import READ_SHARE, SERIES_MAX, SNAPSHOT_EVERY_S, HubMetrics, LogMetrics, LogSnapshot
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.log_records import LogTotals, NodeLag
from fordstone.hub.store.sqlite import SqliteStore

LABELS = ("pipeline", "node", "stream", "consumer")


NOTHING = LogTotals(nodes=0, streams=0, blobs=0, blob_bytes=0, damaged_blobs=0, rows=0, seq=0)


def values(snapshot: LogSnapshot | None) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(HubMetrics().render(snapshot).decode())
    samples = [one for family in families for one in family.samples]
    return {(one.name, *(one.labels[label] for label in LABELS if label in one.labels)): one.value for one in samples}


def test_gauges_come_from_the_snapshot():
    info = NodeLag(pipeline="p", node='n"1', head=7, committed_us=1_000_000)
    stream = StreamInfo(
        pipeline="p", stream="s", nodes=1, epochs=2, rows=30, size_bytes=400, watermark_us=0, consumers={"center": 5}
    )
    found = values(
        LogSnapshot(
            now_us=3_500_000,
            totals=LogTotals(nodes=4, streams=5, blobs=2, blob_bytes=300, damaged_blobs=0, rows=6, seq=9),
            slowest_nodes=[info],
            largest_streams=[stream],
            log_bytes=10,
            rows=30,
        )
    )
    assert (found["fordstone_hub_nodes",], found["fordstone_hub_streams",]) == (4, 5)
    assert found["fordstone_hub_log_up",] == 1
    assert found["fordstone_hub_node_lag_seconds", "p", 'n"1'] == 2.5
    assert found["fordstone_hub_node_head_epoch", "p", 'n"1'] == 7
    assert found["fordstone_hub_consumer_backlog_epochs", "p", "s", "center"] == 5
    assert found["fordstone_hub_committed_rows_total",] == 30
    assert found["fordstone_hub_stream_rows", "p", "s"] == 30
    assert found["fordstone_hub_blob_bytes",] == 300


def test_a_log_that_cannot_be_read_is_shown():
    found = values(None)
    assert found["fordstone_hub_log_up",] == 0
    assert ("fordstone_hub_blobs",) not in found


def test_the_number_of_series_is_bounded():
    nodes = [
        NodeLag(pipeline="p", node=f"n{number}", head=number, committed_us=number) for number in range(SERIES_MAX + 10)
    ]
    found = values(LogSnapshot(now_us=0, totals=NOTHING, slowest_nodes=nodes))
    lags = [key for key in found if key[0] == "fordstone_hub_node_lag_seconds"]
    assert len(lags) == SERIES_MAX
    assert ("fordstone_hub_node_lag_seconds", "p", "n0") in found, "the one that lags most"


@pytest.mark.parametrize(
    ("seconds", "pause"), [(0.01, SNAPSHOT_EVERY_S), (2.0, 2.0 * READ_SHARE)], ids=["quick", "slow"]
)
def test_reading_the_log_takes_a_bounded_share_of_the_time(tmp_path: Path, seconds: float, pause: float):
    now_s = 0.0
    reads: list[float] = []
    with contextlib.closing(HubLog(SqliteStore(tmp_path / "log.sqlite"), clock_us=lambda: 0)) as log:
        metrics = LogMetrics(log, HubMetrics(), clock_s=lambda: now_s)
        read = log.read

        def slow(query: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            reads.append(now_s)
            return read(query)

        log.read = slow  # type: ignore[method-assign]

        async def scrape() -> None:
            nonlocal now_s
            for _ in range(400):
                await metrics.render()
                now_s += pause / 100

        asyncio.run(scrape())
    assert len(reads) == 4
