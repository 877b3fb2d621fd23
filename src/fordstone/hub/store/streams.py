"""Pages of streams, and the positions of their consumers."""

from __future__ import annotations

from itertools import groupby
from typing import Final

from fordstone.hub.messages import ConsumerPosition, StreamEpoch, StreamPage
from fordstone.hub.rejection import Rejection
from fordstone.hub.store.base import LogReader

PAGE_BYTES_MAX: Final = 4 << 20
"""Maximum encoded size of the runs on one page; a single commit may be larger."""


def page(log: LogReader, pipeline: str, stream: str, *, after: int, limit: int) -> StreamPage:
    """Return whole commits after `after`, about `limit` epochs, at least one commit if there is any."""
    newest = log.newest_seq()
    if after > newest:
        raise Rejection(
            "gone",
            f"the hub's log ends at {newest}, but the request is for commits after {after}. The hub's data was set back: "
            "read the stream from the start.",
        )
    epochs: list[StreamEpoch] = []
    size_bytes, more = 0, False
    for _, group in groupby(log.stream_epochs(pipeline, stream, after=after), key=lambda pair: pair[0].seq):
        commit = list(group)
        size_bytes += sum(size for _, size in commit)
        if epochs and (len(epochs) + len(commit) > limit or size_bytes > PAGE_BYTES_MAX):
            more = True
            break
        epochs += [epoch for epoch, _ in commit]
    return StreamPage(epochs=tuple(epochs), next=epochs[-1].seq if epochs else after, more=more)


def positions(log: LogReader, pipeline: str, consumer: str) -> ConsumerPosition:
    """Return what a consumer has passed."""
    found = log.consumer_position(pipeline, consumer)
    if found is None:
        raise Rejection("not_found", f"pipeline {pipeline} has no consumer {consumer}.")
    return found
