"""What the hub counts, in the text format that Prometheus reads.

Counted as requests pass (`guard` calls `Metrics`), and looked up when asked (`Looked`, gathered by `serve` in a thread).
Every label has a bound: routes are templates, methods and errors are one of a few, and of nodes and streams only those
that lag most are listed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fordstone.hub.messages import NodeInfo, StreamInfo

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
SERIES_MAX: Final = 2_000
"""Of nodes, and of consumers: the worst ones."""
LABEL_SETS_MAX: Final = 2_000
_SECOND_US: Final = 1_000_000
_PREFIX: Final = "fordstone_hub_"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What was found in log and blob store."""

    now_us: int
    nodes: Sequence[NodeInfo] = ()
    streams: Sequence[StreamInfo] = ()
    log_bytes: int | None = None
    blobs: int | None = None
    blob_bytes: int | None = None
    rows: int = 0
    """Committed since the hub was started."""


class Counter:
    """Grows only. One number for each set of labels; sets beyond the bound are counted together."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = _PREFIX + name, text
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1, /, **labels: str) -> None:
        """Count."""
        key = tuple(labels.items())
        if key not in self._values and len(self._values) >= LABEL_SETS_MAX:
            key = tuple((name, "other") for name in labels)
        self._values[key] = self._values.get(key, 0) + amount

    def lines(self) -> Iterator[str]:
        """In the text format."""
        yield from _head(self.name, self.text, "counter")
        for labels, value in self._values.items() or [((), 0)]:
            yield _line(self.name, labels, value)


class Histogram:
    """How long things took, for each set of labels."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = _PREFIX + name, text
        self._values: dict[Labels, tuple[list[int], float]] = {}

    def add(self, seconds: float, **labels: str) -> None:
        """Count one that took so long."""
        key = tuple(labels.items())
        if key not in self._values and len(self._values) >= LABEL_SETS_MAX:
            key = tuple((name, "other") for name in labels)
        counts, total = self._values.get(key) or ([0] * (len(SECONDS) + 1), 0.0)
        counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._values[key] = (counts, total + seconds)

    def lines(self) -> Iterator[str]:
        """In the text format: buckets count all that took no longer."""
        yield from _head(self.name, self.text, "histogram")
        for labels, (counts, total) in self._values.items():
            below = 0
            for bound, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
                below += count
                yield _line(f"{self.name}_bucket", (*labels, ("le", bound)), below)
            yield _line(f"{self.name}_sum", labels, total)
            yield _line(f"{self.name}_count", labels, below)


class Metrics:
    """All that one hub counts. Used on its event loop only."""

    def __init__(self) -> None:
        self.requests = Counter("requests_total", "Requests answered, by route and status.")
        self.seconds = Histogram("request_seconds", "From the head of a request to the end of its answer; polls apart.")
        self.refusals = Counter("refusals_total", "Requests refused, by the word for why.")
        self.disconnects = Counter("disconnects_total", "Clients that went away before their body was whole.")
        self.commits = Counter("commits_total", "Commits that brought something new.")
        self.epochs = Counter("committed_epochs_total", "Epochs in commits that brought something new.")
        self.blob_bytes_in = Counter("blob_bytes_in_total", "Bytes of blobs received, whether kept or not.")
        self.blob_bytes_out = Counter("blob_bytes_out_total", "Bytes of blobs sent.")
        self.polls_waiting = 0
        self.requests_running = 0

    def text(self, looked: Looked | None) -> str:
        """Everything, in the text format. None: log and store could not be looked at."""
        lines: list[str] = []
        for one in (
            self.requests, self.seconds, self.refusals, self.disconnects, self.commits, self.epochs,
            self.blob_bytes_in, self.blob_bytes_out,
        ):  # fmt: skip
            lines += one.lines()
        lines += _gauge("polls_waiting", "Requests that wait for news.", {(): self.polls_waiting})
        lines += _gauge("requests_running", "Requests at work.", {(): self.requests_running})
        lines += _gauge("log_up", "Whether the log could be looked at.", {(): int(looked is not None)})
        if looked is not None:
            lines += _looked(looked)
        return "\n".join(lines) + "\n"


def _looked(looked: Looked) -> Iterator[str]:
    nodes, streams = looked.nodes, looked.streams
    yield from _gauge("nodes", "Pipelines on nodes that the hub has heard of.", {(): len(nodes)})
    yield from _head(f"{_PREFIX}committed_rows_total", "Rows in epochs committed since the hub was started.", "counter")
    yield _line(f"{_PREFIX}committed_rows_total", (), looked.rows)
    sizes = {
        "log_bytes": ("Size of the log on disk.", looked.log_bytes),
        "blobs": ("Blobs stored.", looked.blobs),
        "blob_bytes": ("Bytes of blobs stored.", looked.blob_bytes),
    }
    for name, (text, value) in sizes.items():
        if value is not None:
            yield from _gauge(name, text, {(): value})
    lags: dict[Labels, float] = {
        (("pipeline", one.pipeline), ("node", one.node)): (looked.now_us - one.committed_us) / _SECOND_US
        for one in nodes
        if one.committed_us is not None
    }
    yield from _gauge("node_lag_seconds", "Since the last commit of a pipeline on a node.", _worst(lags))
    heads: dict[Labels, float] = {(("pipeline", one.pipeline), ("node", one.node)): one.head for one in nodes}
    yield from _gauge("node_head_epoch", "The newest epoch of a pipeline on a node.", _worst(heads))
    labelled: list[tuple[Labels, StreamInfo]] = [
        ((("pipeline", one.pipeline), ("stream", one.stream)), one) for one in streams
    ]
    rows, size_bytes, epochs = (
        {labels: getattr(one, field) for labels, one in labelled} for field in ("rows", "size_bytes", "epochs")
    )
    yield from _gauge("stream_rows", "Rows kept of a stream.", _worst(rows))
    yield from _gauge("stream_bytes", "Bytes kept of a stream.", _worst(size_bytes))
    yield from _gauge("stream_epochs", "Epochs kept of a stream.", _worst(epochs))
    backlog: dict[Labels, float] = {
        (("pipeline", one.pipeline), ("stream", one.stream), ("consumer", consumer)): behind
        for one in streams
        for consumer, behind in one.consumers.items()
    }
    yield from _gauge("consumer_backlog_epochs", "Epochs that a consumer has still to read.", _worst(backlog))


def _worst(values: Mapping[Labels, float]) -> Mapping[Labels, float]:
    """The largest ones, if there are too many."""
    if len(values) <= SERIES_MAX:
        return values
    return dict(sorted(values.items(), key=lambda pair: -pair[1])[:SERIES_MAX])


def _gauge(name: str, text: str, values: Mapping[Labels, float]) -> Iterator[str]:
    yield from _head(_PREFIX + name, text, "gauge")
    for labels, value in values.items():
        yield _line(_PREFIX + name, labels, value)


def _head(name: str, text: str, kind: str) -> Iterable[str]:
    return (f"# HELP {name} {text}", f"# TYPE {name} {kind}")


def _line(name: str, labels: Labels, value: float) -> str:
    number = repr(value) if isinstance(value, float) and not value.is_integer() else str(int(value))
    if not labels:
        return f"{name} {number}"
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{inside}}} {number}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
