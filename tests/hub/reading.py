"""What a hub has of a stream, for tests that want all of it at once."""

from __future__ import annotations

from collections.abc import Iterable

from fordstone.hub.client.client import HubClient
from fordstone.hub.client.reader import StreamReader
from fordstone.hub.messages import NUMBER_MAX, EpochRange, StreamEpoch
from fordstone.hub.store import commits
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.log_reader import LogReader


def epochs_at(client: HubClient, pipeline: str = "p", stream: str = "s") -> list[StreamEpoch]:
    """All epochs that a hub keeps, in order of their commits."""
    reader = StreamReader(client, pipeline, stream)
    ranges = {node: EpochRange(earliest=True) for node in reader.facts().nodes()}
    return _in_order(entry for entry, _ in reader.epochs_between(ranges))


def epochs_in(log: HubLog, pipeline: str = "p", stream: str = "s") -> list[StreamEpoch]:
    """All epochs that a log keeps, in order of their commits."""

    def kept(read: LogReader) -> list[StreamEpoch]:
        nodes = commits.stream_nodes(read, pipeline, stream, after=0, limit=1_000, log_id=None).nodes
        found = [read.segments(pipeline, stream, one.node) for one in nodes]
        return [
            entry
            for segments in found
            if segments is not None
            for entry, _ in read.stream_epochs(segments, after=0, until=NUMBER_MAX)
        ]

    return _in_order(log.read(kept))


def _in_order(entries: Iterable[StreamEpoch]) -> list[StreamEpoch]:
    return sorted(entries, key=lambda entry: (entry.seq, entry.epoch))
