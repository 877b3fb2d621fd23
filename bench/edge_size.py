"""How large a run of the edge benchmarks is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SizeName = Literal["full", "quick", "tiny"]
KI = 1024
HOT_KEYS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size."""

    apart: bool
    """Whether each measurement runs in a process of its own."""
    repetitions: int
    warm_ups: int
    tumbling_rows: int
    tumbling_cases: tuple[tuple[int, int], ...]
    """Keys and rows a batch."""
    lot_rows: int
    """How many rows runs without end go through before they begin again, later."""
    batch_rows: int
    intervals: tuple[str, ...]
    warm_seconds: float
    steady_seconds: float
    state_bytes: int
    state_cases: tuple[tuple[str, int | None], ...]
    """With so much state: the mode, and how many of its keys get further rows; None: all."""
    pause_seconds: float
    pause_interval: str
    table_keys: tuple[int, ...]
    latency_seconds: float
    process_interval: str
    """Between the checkpoints of whole processes."""
    process_parallelism: tuple[int, ...]
    idle_seconds: float
    load_seconds: float
    starts: int


SIZES: dict[SizeName, Size] = {
    "full": Size(
        apart=True,
        warm_ups=1,
        repetitions=5,
        tumbling_rows=20_000_000,
        tumbling_cases=tuple((keys, batch) for keys in (1_000, 100_000) for batch in (8 * KI, 64 * KI, 256 * KI)),
        lot_rows=8_000_000,
        batch_rows=64 * KI,
        intervals=("1s", "100ms"),
        warm_seconds=2.0,
        steady_seconds=10.0,
        state_bytes=1_000_000_000,
        state_cases=(
            ("aligned", HOT_KEYS),
            ("unaligned", HOT_KEYS),
            ("blocking", HOT_KEYS),
            ("aligned", 100_000),
            ("aligned", None),
        ),
        pause_seconds=20.0,
        pause_interval="100ms",
        table_keys=(1_000, 100_000, 1_000_000),
        latency_seconds=20.0,
        process_interval="1s",
        process_parallelism=(1, 2),
        idle_seconds=3.0,
        load_seconds=8.0,
        starts=15,
    ),
    "quick": Size(
        apart=True,
        warm_ups=1,
        repetitions=3,
        tumbling_rows=10_000_000,
        tumbling_cases=((1_000, 64 * KI), (100_000, 64 * KI)),
        lot_rows=4_000_000,
        batch_rows=64 * KI,
        intervals=("1s", "100ms"),
        warm_seconds=1.0,
        steady_seconds=3.0,
        state_bytes=200_000_000,
        state_cases=(
            ("aligned", HOT_KEYS),
            ("unaligned", HOT_KEYS),
            ("blocking", HOT_KEYS),
            ("aligned", 100_000),
            ("aligned", None),
        ),
        pause_seconds=5.0,
        pause_interval="100ms",
        table_keys=(1_000, 100_000),
        latency_seconds=6.0,
        process_interval="1s",
        process_parallelism=(1, 2),
        idle_seconds=3.0,
        load_seconds=4.0,
        starts=7,
    ),
    # So small that it says nothing about speed: for the test that keeps the benchmark from rotting.
    "tiny": Size(
        apart=False,
        warm_ups=0,
        repetitions=1,
        tumbling_rows=20_000,
        tumbling_cases=((100, 4 * KI),),
        lot_rows=16 * KI,
        batch_rows=KI,
        intervals=("50ms",),
        warm_seconds=0.05,
        steady_seconds=0.1,
        state_bytes=500_000,
        state_cases=(("aligned", HOT_KEYS), ("aligned", None)),
        pause_seconds=0.1,
        pause_interval="20ms",
        table_keys=(100,),
        latency_seconds=0.4,
        process_interval="50ms",
        process_parallelism=(1,),
        idle_seconds=0.3,
        load_seconds=0.5,
        starts=1,
    ),
}
