"""What the engine is measured against: the same work without a stream, and the disk without a checkpoint."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from edge_rows import checksum, cut, readings

WINDOW_US = 10_000_000
READ_BYTES = 8 << 20
_MERGE_ROWS = 200_000


_WINDOW = (pl.col("ts").to_physical() // WINDOW_US).alias("w")
_TEMP = pl.col("temp")
_RESULTS = {"n": pl.len(), "total": _TEMP.sum(), "low": _TEMP.min(), "top": _TEMP.max()}


def _partial(batch: pl.DataFrame) -> pl.DataFrame:
    return batch.group_by(_WINDOW, "dev").agg(**_RESULTS)


def _grouped(rows: pl.LazyFrame) -> pl.LazyFrame:
    return rows.group_by(_WINDOW, "dev").agg(**_RESULTS)


def _merged(partials: Sequence[pl.DataFrame]) -> pl.DataFrame:
    return (
        pl.concat(partials)
        .group_by("w", "dev")
        .agg(pl.col("n").sum(), pl.col("total").sum(), pl.col("low").min(), pl.col("top").max())
    )


def one_group_by(*, rows: int, keys: int, streaming: bool = False) -> dict[str, object]:
    """All rows in one Polars `group_by`, by its engine for frames in memory or by the one for streams of batches."""
    frame = readings(rows, keys)
    began, cpu_began = time.perf_counter(), time.process_time()
    result = _grouped(frame.lazy()).collect(engine="streaming") if streaming else _partial(frame)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "checksum": checksum(result)}


def bare_loop(*, rows: int, keys: int, batch_rows: int, threads: int) -> dict[str, object]:
    """Partial rows of each batch, merged by size and emitted by window: the engine's work without the engine."""
    batches = cut(readings(rows, keys), batch_rows)
    results: list[pl.DataFrame] = []
    began, cpu_began = time.perf_counter(), time.process_time()
    workers = [threading.Thread(target=_loop, args=(batches[i::threads], results)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    result = _merged(results)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "checksum": checksum(result)}


def _loop(batches: Sequence[pl.DataFrame], results: list[pl.DataFrame]) -> None:
    runs: list[pl.DataFrame] = []
    open_rows = left = 0
    newest = -1
    for batch in batches:
        runs.append(_partial(batch))
        open_rows += runs[-1].height
        if open_rows > max(4 * left, _MERGE_ROWS):
            runs = [_merged(runs)]
            open_rows = left = runs[0].height
        window = int(batch["ts"].to_physical()[-1]) // WINDOW_US
        if window > newest:
            merged = _merged(runs)
            results.append(merged.filter(pl.col("w") < window))
            runs = [merged.filter(pl.col("w") >= window)]
            open_rows = left = runs[0].height
            newest = window
    results.append(_merged(runs))


def forget_cached(paths: Sequence[str]) -> None:
    """Drop the files' pages from the page cache (posix_fadvise DONTNEED; they are durable, so all of them can go)."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_from_device_bytes() -> int:
    """What this process has made the kernel fetch from storage so far; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def read_files(*, paths: Sequence[str]) -> dict[str, float]:
    """Read files from start to end, one after the other, and do nothing with them."""
    forget_cached(paths)
    buffer = bytearray(READ_BYTES)
    before = read_from_device_bytes()
    began = time.perf_counter()
    size = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        while count := os.readv(descriptor, [buffer]):
            size += count
        os.close(descriptor)
    return {
        "seconds": time.perf_counter() - began,
        "size_bytes": size,
        "device_bytes": read_from_device_bytes() - before,
    }
