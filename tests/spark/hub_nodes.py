"""Nodes that commit rows to a hub, as a test says."""

from __future__ import annotations

import polars as pl

from fordstone.epochs.run_file import encode_run
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Checkpoint, Commit, Committed, EpochEntry, LeaseRequest, StreamSegment
from fordstone.state.base import RunRef


class HubNode:
    """One pipeline on one node; epochs are numbered as they are committed."""

    def __init__(self, address: HubAddress, pipeline: str, node: str, *, stream: str = "readings") -> None:
        self.client = HubClient(address)
        self.pipeline = pipeline
        self.node = node
        self.stream = stream
        self.generation = self.client.lease(
            pipeline, node, LeaseRequest(holder=f"{node}-disk", local=1, start="s")
        ).generation
        self.epoch = 0

    def put(self, frame: pl.DataFrame) -> RunRef:
        """A run, at the hub."""
        ref, data = encode_run(frame, "lz4")
        self.client.put_blob(ref.digest, bytes(data))
        return ref

    def commit(self, *epochs: pl.DataFrame | None, checkpoint: Checkpoint | None = None) -> Committed:
        """Commit these epochs together; None: one without rows."""
        entries = []
        for frame in epochs:
            self.epoch += 1
            runs = () if frame is None else (self.put(frame),)
            segment = StreamSegment(runs=runs, watermark_us=self.epoch)
            entries.append(EpochEntry(epoch=self.epoch, streams={self.stream: segment}, created_us=self.epoch))
        return self.client.commit(
            self.pipeline,
            self.node,
            Commit(generation=self.generation, epochs=tuple(entries), checkpoint=checkpoint),
        )


def numbers(*values: int) -> pl.DataFrame:
    """Rows that differ in their number."""
    return pl.DataFrame({"n": values, "half": [value / 2 for value in values]})
