"""One run of the pipeline of two tiers: everything is started, warmed up with some rows, then given all the others at once.

The clock runs from when the rows come into view of the gateways to when every window of theirs is in the center's output.
What it takes to start Spark is not part of it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import polars as pl

from edge_size import SizeName
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from hub_process import hub_process
from spark_cpu import cpu_seconds
from spark_input import FIRST_US
from two_tier_part import Part

Center = Literal["spark", "local"]
HERE = Path(__file__).parent
SPAN_US = 600_000_000
"""The rows of a batch lie in so much event time: 60 windows."""
CLOSING_US = 60_000_000
"""The last row of a batch is so far behind the others: it closes their windows."""
KEYS = 1_000
WAIT_SECONDS_MAX = 300.0
LOOK_EVERY_S = 0.05
STOP_SECONDS_MAX = 90.0
BYTES_IN = "fordstone_hub_blob_bytes_in_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    repetitions: int
    gateways: int
    rows: int
    """Of all gateways, timed."""
    warm_up_rows: int
    """Of each of the batches before them."""
    warm_ups: int


SIZES: dict[SizeName, Size] = {
    "full": Size(repetitions=3, gateways=2, rows=60_000_000, warm_up_rows=200_000, warm_ups=3),
    "quick": Size(repetitions=1, gateways=2, rows=10_000_000, warm_up_rows=100_000, warm_ups=2),
    # So small that it says nothing about speed: for the test that keeps the benchmark from rotting.
    "tiny": Size(repetitions=1, gateways=2, rows=4_000, warm_up_rows=400, warm_ups=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one run found."""

    seconds: float
    sent_bytes: int
    """To the hub, from when the rows came into view: rows or partial rows, and checkpoints."""
    cpu_s: float
    """Of all processes."""
    result: tuple[int, int, float]
    """Of all windows: how many there are, of how many rows, and the sum of their extremes."""


def measured(center: Center, *, push_down: bool, size: Size, directory: Path | None) -> Measured:
    """One run."""
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="fordstone-two-tier-bench-") as home,
        hub_process(directory) as hub,
    ):
        place = Path(home)
        inlets = [place / f"in-{number}" for number in range(size.gateways)]
        for inlet in inlets:
            inlet.mkdir()
        out = place / "out"

        def part(kind: Literal["edge", "local", "spark"], node: str, pattern: Path) -> Part:
            return Part(
                part=kind,
                node=node,
                pattern=f"{pattern}/*.parquet",
                out=str(out),
                state=str(place / f"state-{node}"),
                hub=hub.url,
                push_down=push_down,
            )

        gateways = [part("edge", f"gateway-{number}", inlet) for number, inlet in enumerate(inlets)]
        with _processes() as begin:
            rows = _let_in(_staged(place, inlets, size.warm_up_rows, 0), inlets)
            processes = [begin(gateway) for gateway in gateways]
            # The center begins when it can know of all gateways: who comes later to a stream may be late.
            _await_sent(hub.address, processes)
            processes.append(begin(part(center, "center", inlets[0])))
            output = _Output(out)
            _await(output, rows, processes)
            for batch in range(1, size.warm_ups):
                rows += _let_in(_staged(place, inlets, size.warm_up_rows, batch), inlets)
                _await(output, rows, processes)
            staged = _staged(place, inlets, size.rows, size.warm_ups)
            before_bytes, before_cpu_s = hub.metric(BYTES_IN), cpu_seconds()
            began_s = time.monotonic()
            rows += _let_in(staged, inlets)
            result = _await(output, rows, processes)
            seconds = time.monotonic() - began_s
            return Measured(
                seconds=seconds,
                sent_bytes=int(hub.metric(BYTES_IN) - before_bytes),
                cpu_s=cpu_seconds() - before_cpu_s,
                result=result,
            )


def _staged(place: Path, inlets: Sequence[Path], rows: int, batch: int) -> list[tuple[Path, int]]:
    """A file for each gateway, not yet in view, and how many rows of it will be in windows that close with it."""
    staged = []
    for number in range(len(inlets)):
        path = place / f"staged-{number}-{batch:03d}.parquet"
        count = rows // len(inlets)
        _batch(count, batch, seed=1_000 * number + batch).write_parquet(path, compression="lz4", row_group_size=1 << 18)
        staged.append((path, count))
    return staged


def _batch(rows: int, batch: int, *, seed: int) -> pl.DataFrame:
    """Times in order, devices at random, then the one row that closes all windows. Its own window is the next batch's."""
    rng = np.random.default_rng(seed)
    begin_us = FIRST_US + batch * (SPAN_US + CLOSING_US)
    times = np.linspace(begin_us, begin_us + SPAN_US - 1, rows).astype(np.int64)
    devices = rng.integers(0, KEYS, rows, dtype=np.int32)
    # Whole quarters, so that sums are the same in whatever order they are made.
    temperatures = rng.integers(-80, 160, rows, dtype=np.int32) / 4
    closing = pl.DataFrame(
        {
            "ts": pl.Series([begin_us + SPAN_US + CLOSING_US // 2]).cast(pl.Datetime("us", "UTC")),
            "dev": pl.Series([0], dtype=pl.Int32),
            "temp": [0.0],
        }
    )
    frame = pl.DataFrame({"ts": pl.Series(times).cast(pl.Datetime("us", "UTC")), "dev": devices, "temp": temperatures})
    return pl.concat([frame, closing])


def _let_in(staged: Sequence[tuple[Path, int]], inlets: Sequence[Path]) -> int:
    """Bring the files into view, whole; how many rows will be in closed windows for it."""
    for (path, _), inlet in zip(staged, inlets, strict=True):
        path.rename(inlet / path.name.partition("-")[2].partition("-")[2])
    return sum(count for _, count in staged)


def _await(out: _Output, rows: int, processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int, float]:
    """Wait until the windows in the center's output are those of `rows` rows, the closing ones of earlier batches aside."""
    until_s = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        found = out.found()
        if found[1] == rows:
            return found
        gone = [process.returncode for process in processes if process.poll() is not None]
        if gone or found[1] > rows or time.monotonic() > until_s:
            raise SystemExit(
                f"the center has {found[1]:,} of {rows:,} rows in closed windows; processes that have ended: {gone}."
            )
        time.sleep(LOOK_EVERY_S)


def _await_sent(address: HubAddress, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until the hub has heard of every gateway."""
    client, until_s = HubClient(address), time.monotonic() + WAIT_SECONDS_MAX
    while not any(stream.nodes == len(processes) for stream in client.streams().streams):
        if any(process.poll() is not None for process in processes) or time.monotonic() > until_s:
            raise SystemExit(f"the gateways have not all sent something; the hub has {client.streams()}.")
        time.sleep(LOOK_EVERY_S)
    client.close()


class _Output:
    """The center's output, of which each file is read once: looking must not take cores from the processes that are measured."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._frames: dict[Path, pl.DataFrame] = {}
        self._found = 0, 0, 0.0

    def found(self) -> tuple[int, int, float]:
        """Of the newest rows of all windows: how many there are, of how many rows, and the sum of their values."""
        new = [path for path in self._place.rglob("*.parquet") if path not in self._frames and self._is_whole(path)]
        try:
            self._frames |= {path: pl.read_parquet(path, hive_partitioning=False) for path in new}
        except (OSError, pl.exceptions.PolarsError):
            return self._found  # one that is being moved
        if new:
            self._found = self._sums()
        return self._found

    def _is_whole(self, path: Path) -> bool:
        return not any(part.startswith(("_", ".")) for part in path.relative_to(self._place).parts)

    def _sums(self) -> tuple[int, int, float]:
        frame = pl.concat(self._frames.values(), how="diagonal_relaxed")
        newest = frame.sort("__epoch").unique(["dev", "window_start"], keep="last")
        # The rows that close windows lie between two batches.
        at_us = (newest["window_start"].dt.epoch("us") - FIRST_US) % (SPAN_US + CLOSING_US)
        windows = newest.filter(at_us < SPAN_US)
        sums = sum(float(windows[name].sum()) for name in ("total", "low", "top"))
        return windows.height, int(windows["n"].sum()), round(sums, 3)


@contextmanager
def _processes() -> Iterator[Callable[[Part], subprocess.Popen[bytes]]]:
    """Begins parts as processes, which end with the block."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(part: Part) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "two_tier_part.py"), msgspec.json.encode(part).decode()]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        return started[-1]

    try:
        yield begin
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
