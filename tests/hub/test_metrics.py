"""What `/metrics` shows of the log; `test_middleware` has what is counted of requests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from fordstone.hub.messages import Generation, NodeInfo, StreamInfo
from fordstone.hub.server.metrics import SERIES_MAX, HubMetrics, LogSnapshot

LABELS = ("pipeline", "node", "stream", "consumer")


def values(snapshot: LogSnapshot | None) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(HubMetrics().render(snapshot).decode())
    samples = [one for family in families for one in family.samples]
    return {(one.name, *(one.labels[label] for label in LABELS if label in one.labels)): one.value for one in samples}


def test_gauges_come_from_the_snapshot():
    info = NodeInfo(
        node='n"1', pipeline="p", head=7, generation=Generation(hub=1, local=1), seen_us=9, committed_us=1_000_000
    )
    stream = StreamInfo(
        pipeline="p", stream="s", nodes=1, epochs=2, rows=30, size_bytes=400, watermark_us=0, consumers={"center": 5}
    )
    found = values(
        LogSnapshot(now_us=3_500_000, nodes=[info], streams=[stream], log_bytes=10, blobs=2, blob_bytes=300, rows=30)
    )
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
        NodeInfo(node=f"n{number}", pipeline="p", head=number, generation=None, seen_us=0, committed_us=number)
        for number in range(SERIES_MAX + 10)
    ]
    found = values(LogSnapshot(now_us=0, nodes=nodes))
    lags = [key for key in found if key[0] == "fordstone_hub_node_lag_seconds"]
    assert len(lags) == SERIES_MAX
    assert ("fordstone_hub_node_lag_seconds", "p", "n0") in found, "the one that lags most"
