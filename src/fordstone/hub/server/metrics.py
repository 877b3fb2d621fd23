"""What the hub measures, with `prometheus_client`: counted as requests pass, or read from the log when asked for.

Every label has a bound: routes are templates, methods and errors are one of a few, and of nodes and streams only those
with the largest values are listed. One registry per hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fordstone.hub.messages import NodeInfo, StreamInfo

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
SERIES_MAX: Final = 2_000
"""Maximum number of nodes, streams and consumers that are listed: those with the largest values."""
_SECOND_US: Final = 1_000_000
_PREFIX: Final = "fordstone_hub_"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSnapshot:
    """What was read from the log."""

    now_us: int
    nodes: Sequence[NodeInfo] = ()
    streams: Sequence[StreamInfo] = ()
    log_bytes: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    rows: int = 0
    """Committed since the hub was started."""


class HubMetrics:
    """All metrics of one hub."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._snapshot = _SnapshotCollector()
        self.registry.register(self._snapshot)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests answered, by route and status.", "method", "route", "status")
        self.seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "From the head of a request to the end of its response; without long polls.",
            ("method", "route"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.rejections = counter("rejections", "Requests rejected, by error.", "error")
        self.disconnects = counter("disconnects", "Clients that disconnected before their body was complete.")
        self.commits = counter("commits", "Commits with new epochs.")
        self.epochs = counter("committed_epochs", "Epochs in commits with new epochs.")
        self.blob_bytes_in = counter("blob_bytes_in", "Bytes of blobs received, whether kept or not.")
        self.blob_bytes_out = counter("blob_bytes_out", "Bytes of blobs sent.")
        self.polls_waiting = Gauge(f"{_PREFIX}polls_waiting", "Long polls in progress.", registry=self.registry)
        self.requests_running = Gauge(
            f"{_PREFIX}requests_running", "Requests in progress, without long polls.", registry=self.registry
        )

    def render(self, snapshot: LogSnapshot | None) -> bytes:
        """Return everything in the text format of Prometheus. None: the log could not be read."""
        self._snapshot.snapshot = snapshot
        return generate_latest(self.registry)


class _SnapshotCollector(Collector):
    """Gauges of the newest snapshot."""

    def __init__(self) -> None:
        self.snapshot: LogSnapshot | None = None

    def collect(self) -> Iterator[Metric]:
        """Called for each scrape."""
        found = self.snapshot
        yield _gauge("log_up", "Whether the log could be read.", (), {(): int(found is not None)})
        if found is None:
            return
        rows = CounterMetricFamily(f"{_PREFIX}committed_rows", "Rows in epochs committed since the hub was started.")
        rows.add_metric((), found.rows)
        yield rows
        yield _gauge("nodes", "Pipelines on nodes that have contacted the hub.", (), {(): len(found.nodes)})
        yield _gauge("log_bytes", "Size of the log in storage.", (), {(): found.log_bytes})
        yield _gauge("blobs", "Blobs stored.", (), {(): found.blobs})
        yield _gauge("blob_bytes", "Bytes of blobs stored.", (), {(): found.blob_bytes})
        node = ("pipeline", "node")
        lags = {
            (one.pipeline, one.node): (found.now_us - one.committed_us) / _SECOND_US
            for one in found.nodes
            if one.committed_us is not None
        }
        yield _gauge("node_lag_seconds", "Time since the last commit of a pipeline on a node.", node, lags)
        heads = {(one.pipeline, one.node): one.head for one in found.nodes}
        yield _gauge("node_head_epoch", "The newest epoch of a pipeline on a node.", node, heads)
        for name, text, field in (
            ("stream_rows", "Rows kept of a stream.", "rows"),
            ("stream_bytes", "Bytes kept of a stream.", "size_bytes"),
            ("stream_epochs", "Epochs kept of a stream.", "epochs"),
        ):
            values = {(one.pipeline, one.stream): getattr(one, field) for one in found.streams}
            yield _gauge(name, text, ("pipeline", "stream"), values)
        backlog = {
            (one.pipeline, one.stream, consumer): epochs
            for one in found.streams
            for consumer, epochs in one.consumers.items()
        }
        yield _gauge(
            "consumer_backlog_epochs",
            "Epochs that a consumer has still to read.",
            ("pipeline", "stream", "consumer"),
            backlog,
        )


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> GaugeMetricFamily:
    """Make a gauge of at most `SERIES_MAX` series, the largest ones. Keys are the values of the labels."""
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    listed = values.items()
    if len(values) > SERIES_MAX:
        listed = dict(sorted(listed, key=lambda pair: -pair[1])[:SERIES_MAX]).items()
    for key, value in listed:
        family.add_metric(key, value)
    return family
