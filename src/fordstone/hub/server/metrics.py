"""What the hub measures, with `prometheus_client`: counted as requests pass, or read from the log when asked for.

Every label has a bound: routes are templates, methods and errors are one of a few, and of nodes and streams only those
with the largest values are listed. However many there are, reading them takes a bounded share of the time. One registry per hub.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fordstone.hub.messages import StreamInfo
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_records import LogTotals, NodeLag

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
SERIES_MAX: Final = 2_000
"""Maximum number of nodes, streams and consumers that are listed: those with the largest values."""
SNAPSHOT_EVERY_S: Final = 5.0
"""Metrics are read from the log at most once in this time, however often they are scraped."""
READ_SHARE: Final = 20
"""Reading takes at most one part in this many of the time: a log of which it takes long is read less often."""
_SECOND_US: Final = 1_000_000
_PREFIX: Final = "fordstone_hub_"
_events = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSnapshot:
    """What was read from the log."""

    now_us: int
    totals: LogTotals
    slowest_nodes: Sequence[NodeLag] = ()
    """Those that have committed least recently."""
    quarantined_nodes: Sequence[tuple[str, str, int]] = ()
    """Pipeline, node, and the epoch from which on it is not read."""
    largest_streams: Sequence[StreamInfo] = ()
    """Those with the most epochs."""
    log_bytes: int = 0
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
        self.connections_closed = counter("connections_closed", "Connections closed to make room for others.")
        self.connections = Gauge(f"{_PREFIX}connections", "Connections that are open.", registry=self.registry)
        self.connections_unauthenticated = Gauge(
            f"{_PREFIX}connections_unauthenticated",
            "Connections that are open and have shown no valid token.",
            registry=self.registry,
        )
        self.commits = counter("commits", "Commits with new epochs.")
        self.epochs = counter("committed_epochs", "Epochs in commits with new epochs.")
        self.blob_bytes_in = counter("blob_bytes_in", "Bytes of blobs received, whether kept or not.")
        self.blob_bytes_out = counter("blob_bytes_out", "Bytes of blobs sent.")
        self.scrubbed_blobs = counter("scrubbed_blobs", "Blobs that were read to compare their digests.")
        self.scrubbed_bytes = counter("scrubbed_bytes", "Bytes of blobs that were read to compare their digests.")
        self.repaired_blobs = counter("repaired_blobs", "Damaged blobs that an upload has replaced.")
        self.body_memory_bytes = Gauge(
            f"{_PREFIX}body_memory_bytes", "Bytes of bodies in memory.", registry=self.registry
        )
        self.polls_waiting = Gauge(f"{_PREFIX}polls_waiting", "Long polls in progress.", registry=self.registry)
        self.requests_running = Gauge(
            f"{_PREFIX}requests_running", "Requests in progress, without long polls.", registry=self.registry
        )

    def count_scrubbed(self, size_bytes: int) -> None:
        """Count a blob that the scrub has read."""
        self.scrubbed_blobs.inc()
        self.scrubbed_bytes.inc(size_bytes)

    def render(self, snapshot: LogSnapshot | None) -> bytes:
        """Return everything in the text format of Prometheus. None: the log could not be read."""
        self._snapshot.snapshot = snapshot
        return generate_latest(self.registry)


class _SnapshotCollector(Collector):
    """Gauges of the newest snapshot."""

    def __init__(self) -> None:
        self.snapshot: LogSnapshot | None = None

    def collect(self) -> Iterator[Metric]:
        found = self.snapshot
        yield _gauge("log_up", "Whether the log could be read.", (), {(): int(found is not None)})
        if found is None:
            return
        rows = CounterMetricFamily(f"{_PREFIX}committed_rows", "Rows in epochs committed since the hub was started.")
        rows.add_metric((), found.rows)
        yield rows
        yield _gauge("nodes", "Pipelines on nodes that have contacted the hub.", (), {(): found.totals.nodes})
        yield _gauge("streams", "Streams of all pipelines.", (), {(): found.totals.streams})
        yield _gauge("log_bytes", "Size of the log in storage.", (), {(): found.log_bytes})
        yield _gauge("blobs", "Blobs stored.", (), {(): found.totals.blobs})
        yield _gauge("blob_bytes", "Bytes of blobs stored.", (), {(): found.totals.blob_bytes})
        yield _gauge(
            "damaged_blobs", "Blobs that are damaged and count as missing.", (), {(): found.totals.damaged_blobs}
        )
        node = ("pipeline", "node")
        lags = {(one.pipeline, one.node): (found.now_us - one.committed_us) / _SECOND_US for one in found.slowest_nodes}
        yield _gauge("node_lag_seconds", "Time since the last commit of a pipeline on a node.", node, lags)
        heads = {(one.pipeline, one.node): one.head for one in found.slowest_nodes}
        yield _gauge("node_head_epoch", "The newest epoch of a pipeline on a node.", node, heads)
        aside = {(pipeline, node): epoch for pipeline, node, epoch in found.quarantined_nodes}
        yield _gauge("quarantined_nodes", "Pipelines on nodes that are in quarantine.", (), {(): len(aside)})
        yield _gauge(
            "node_quarantine_epoch",
            "The epoch from which on a pipeline on a node in quarantine is not read.",
            node,
            aside,
        )
        for name, text, field in (
            ("stream_rows", "Rows kept of a stream.", "rows"),
            ("stream_bytes", "Bytes kept of a stream.", "size_bytes"),
            ("stream_epochs", "Epochs kept of a stream.", "epochs"),
        ):
            values = {(one.pipeline, one.stream): getattr(one, field) for one in found.largest_streams}
            yield _gauge(name, text, ("pipeline", "stream"), values)
        backlog = {
            (one.pipeline, one.stream, consumer): epochs
            for one in found.largest_streams
            for consumer, epochs in one.consumers.items()
        }
        yield _gauge(
            "consumer_backlog_epochs",
            "Epochs that a consumer has still to read.",
            ("pipeline", "stream", "consumer"),
            backlog,
        )


class LogMetrics:
    """All metrics, with what the log says: it is read on a thread, at most every few seconds."""

    def __init__(self, log: HubLog, metrics: HubMetrics, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._metrics = metrics
        self._clock_s = clock_s
        self._snapshot: LogSnapshot | None = None
        self._due_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._rows = 0
        self._seq = log.read(lambda log: log.newest_seq())

    async def render(self) -> bytes:
        """Return everything in the text format of Prometheus."""
        if self._clock_s() >= self._due_s:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
            await asyncio.shield(self._reading)
        return self._metrics.render(self._snapshot)

    async def _read(self) -> None:
        began_s = self._clock_s()
        try:
            self._snapshot = await asyncio.to_thread(self._log.read, self._take)
        except Exception:  # noqa: BLE001 - a scrape without the log's gauges says so in `log_up`
            _events.exception("hub log not read for metrics")
            self._snapshot = None
        finally:
            now_s, self._reading = self._clock_s(), None
            self._due_s = now_s + max(SNAPSHOT_EVERY_S, (now_s - began_s) * READ_SHARE)

    def _take(self, log: LogReader) -> LogSnapshot:
        totals = log.totals(after_seq=self._seq)
        self._rows, self._seq = self._rows + totals.rows, totals.seq
        return LogSnapshot(
            now_us=self._log.now_us(),
            totals=totals,
            slowest_nodes=log.slowest_nodes(SERIES_MAX),
            quarantined_nodes=log.quarantined_nodes(SERIES_MAX),
            largest_streams=log.largest_streams(SERIES_MAX),
            log_bytes=self._log.size_bytes(),
            rows=self._rows,
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
