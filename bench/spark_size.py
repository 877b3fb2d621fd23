"""How large a run of the Spark benchmarks is."""

from __future__ import annotations

from dataclasses import dataclass

from edge_size import SizeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size."""

    repetitions: int
    """Of each side of a ratio, in turn."""
    batches: int
    """Micro-batches of a run, of which the first is not counted: in it workers start and code is compiled."""
    batch_rows: int
    """About as many as a micro-batch reads where nobody says otherwise."""
    by_key_rows: int
    """Likewise for the comparison with a function that Spark calls for each key, which takes much longer."""
    keys: tuple[int, ...]
    state_bytes: int
    fill_rows: int
    """Rows of a micro-batch that grows the state: each of a key of its own."""
    change_rows: int
    """Rows of a micro-batch that changes a little of it."""
    changes: int
    """How many of these there are at each size that is shown."""
    kafka_rows: int
    """Messages in the topic that is read."""


SIZES: dict[SizeName, Size] = {
    "full": Size(
        repetitions=5,
        batches=5,
        batch_rows=4_000_000,
        by_key_rows=500_000,
        keys=(1_000, 100_000),
        state_bytes=1_000_000_000,
        fill_rows=2_000_000,
        change_rows=2_000,
        changes=5,
        kafka_rows=4_000_000,
    ),
    "quick": Size(
        repetitions=3,
        batches=4,
        batch_rows=4_000_000,
        by_key_rows=200_000,
        keys=(1_000, 100_000),
        state_bytes=100_000_000,
        fill_rows=1_000_000,
        change_rows=2_000,
        changes=5,
        kafka_rows=1_000_000,
    ),
    # So small that it says nothing about speed: for the test that keeps the benchmark from rotting.
    "tiny": Size(
        repetitions=1,
        batches=2,
        batch_rows=2_000,
        by_key_rows=200,
        keys=(50,),
        state_bytes=100_000,
        fill_rows=2_000,
        change_rows=50,
        changes=1,
        kafka_rows=400,
    ),
}
