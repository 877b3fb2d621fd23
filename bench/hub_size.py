"""How large a run of the hub's benchmarks is."""

from __future__ import annotations

from dataclasses import dataclass

from edge_size import SizeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size."""

    repetitions: int
    """Of each side of a ratio, in turn."""
    nodes: int
    seconds: float
    settling_s: float
    blob_bytes: int
    blobs: int
    epochs: int
    """Of each node, for Spark to read."""
    epoch_rows: int
    senders: int
    """Nodes whose epochs Spark reads."""


SIZES: dict[SizeName, Size] = {
    "full": Size(
        repetitions=5,
        nodes=1_000,
        seconds=20.0,
        settling_s=3.0,
        blob_bytes=8 << 20,
        blobs=48,
        epochs=20,
        epoch_rows=200_000,
        senders=4,
    ),
    "quick": Size(
        repetitions=3,
        nodes=1_000,
        seconds=6.0,
        settling_s=2.0,
        blob_bytes=8 << 20,
        blobs=16,
        epochs=10,
        epoch_rows=200_000,
        senders=4,
    ),
    # So small that it says nothing about speed: for the test that keeps the benchmark from rotting.
    "tiny": Size(
        repetitions=1,
        nodes=10,
        seconds=3.0,
        settling_s=0.2,
        blob_bytes=1 << 20,
        blobs=2,
        epochs=2,
        epoch_rows=500,
        senders=2,
    ),
}
