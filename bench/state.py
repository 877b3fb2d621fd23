"""State by backend: key updates per second as a running aggregate does them, checkpoints, restarts.

    python bench/state.py [--keys 1000000] [--seconds 5]
    python bench/connectors.py --only state    # RocksDB alone, with 1 and 5 million keys, and the goal beside it

One update is a `get` and a `put` of a key, in batches of 64 Ki keys that are drawn at random. The table in memory is beside it, in the same run.
In RocksDB it also stands beside the bare calls, `get` and a `WriteBatch` of the same keys and values: its share of their speed.
Each batch is followed by a barrier. As in the engine, another thread then rewrites pieces and copies the database, while updates go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fordstone.lang.duration import TIME_MIN_US
from fordstone.state.base import FOUND, Piece, RunRef, Table
from fordstone.state.rocksdb import RocksCache, RocksTable
from fordstone.state.table import MemoryTable
from fordstone.state.working import WorkingFiles
from table import Finding, at_least

BATCH_ROWS = 65_536
UPDATES_PER_S = at_least(200_000)
CACHE_BYTES = 256 * 1024 * 1024  # as on a machine with 4 GiB and more
SCHEMA: dict[str, pl.DataType] = {
    "device": pl.String(),
    "n": pl.Int64(),
    "total": pl.Float64(),
    "low": pl.Float64(),
    "high": pl.Float64(),
}


def batches(keys: int, seed: int) -> Iterator[pl.DataFrame]:
    """Distinct keys, as a running aggregate has them after it has merged its partial rows."""
    rng = np.random.default_rng(seed)
    names = pl.Series([f"device-{number:08d}" for number in range(keys)])
    while True:
        picked = rng.choice(keys, BATCH_ROWS, replace=False) if keys > BATCH_ROWS else np.arange(keys)
        values = rng.random(picked.size)
        yield pl.DataFrame(
            {
                "device": names.gather(picked),
                "n": np.ones(picked.size, dtype=np.int64),
                "total": values,
                "low": values,
                "high": values,
            }
        )


def update(table: Table, changed: pl.DataFrame) -> None:
    """What `operators.aggregate.running` does with the partial rows of a batch: count, sum, least, most."""
    known = table.get(changed.select("device"))
    before = known.filter(pl.col(FOUND)).select(changed.columns)
    if before.height:
        changed = (
            pl.concat([before, changed])
            .group_by("device")
            .agg(pl.col("n").sum(), pl.col("total").sum(), pl.col("low").min(), pl.col("high").max())
        )
    table.put(changed)


def merge(table: Table) -> float:
    """Do what the merger's thread does with one table; return how many milliseconds it took."""
    began = time.perf_counter()
    rewrite = table.rewrite()
    if rewrite is not None:
        pieces = [
            Piece(ref=RunRef(digest=f"rewritten-{id(frame)}", size_bytes=1, rows=frame.height))
            for frame in rewrite.frames
        ]
        rewrite.done(rewrite.old, pieces)
    return 1000 * (time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one backend does."""

    backend: str
    keys: int
    updates_per_s: int
    updates_per_s_best: int
    updates_per_cpu_s: int
    freeze_ms_median: float
    freeze_ms_max: float
    update_ms_median: int
    update_ms_max: int
    merger_ms_max: float
    scan_rows_per_s: int
    memory_mib: int


def measure(name: str, make: Callable[[], Table], keys: int, seconds: float) -> Measured:
    table = make()
    filled = next(batches(keys, 0)).clear()
    for start in range(0, keys, BATCH_ROWS):
        count = min(BATCH_ROWS, keys - start)
        names = [f"device-{number:08d}" for number in range(start, start + count)]
        filled = pl.DataFrame(
            {"device": names, "n": [1] * count, "total": [0.5] * count, "low": [0.5] * count, "high": [0.5] * count}
        )
        table.put(filled)
    table.freeze()
    some = batches(keys, 1)
    rates: list[tuple[float, float]] = []
    freezes_ms: list[float] = []
    copies_ms: list[float] = []
    merging: Future[float] | None = None
    merger = ThreadPoolExecutor(1)
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(rates) < 5:
        batch = next(some)
        began, began_cpu = time.perf_counter(), time.process_time()
        update(table, batch)
        took = time.perf_counter() - began
        rates.append((batch.height / took, batch.height / max(1e-9, time.process_time() - began_cpu)))
        began = time.perf_counter()
        pieces = table.freeze()
        freezes_ms.append(1000 * (time.perf_counter() - began))
        for piece in pieces:
            if piece.ref is None:
                piece.written(RunRef(digest=f"{id(piece)}", size_bytes=1, rows=piece.frame().height))
        if merging is None or merging.done():
            copies_ms += [] if merging is None else [merging.result()]
            merging = merger.submit(merge, table)
    merger.shutdown()
    wall, cpu = (sorted(column) for column in zip(*rates, strict=True))
    began = time.perf_counter()
    rows = table.scan().height
    scan_s = time.perf_counter() - began
    return Measured(
        backend=name,
        keys=rows,
        updates_per_s=round(wall[len(wall) // 2]),
        updates_per_s_best=round(wall[-1]),
        updates_per_cpu_s=round(cpu[len(cpu) // 2]),
        freeze_ms_median=round(sorted(freezes_ms)[len(freezes_ms) // 2], 2),
        freeze_ms_max=round(max(freezes_ms), 1),
        update_ms_median=round(1000 * BATCH_ROWS / wall[len(wall) // 2]),
        update_ms_max=round(1000 * BATCH_ROWS / wall[0]),
        merger_ms_max=round(max(copies_ms, default=0.0), 1),
        scan_rows_per_s=round(rows / scan_s),
        memory_mib=round(table.size_bytes() / 2**20),
    )


def bare(directory: Path, keys: int, seconds: float) -> float:
    """Updates per second of processor time of the package alone: keys and values are bytes, sorted already, and nothing is merged."""
    from rocksdict import Rdict, WriteBatch

    cache = RocksCache(CACHE_BYTES)
    db = Rdict(str(directory), cache.options())
    value = bytes(33)

    def put(names: Sequence[bytes]) -> None:
        batch = WriteBatch(raw_mode=True)
        for name in names:
            batch.put(name, value)
        db.write(batch, cache.unlogged)

    for start in range(0, keys, BATCH_ROWS):
        put([b"\0device-%08d" % number for number in range(start, min(keys, start + BATCH_ROWS))])
    rng = np.random.default_rng(1)
    rates: list[float] = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(rates) < 5:
        names: list[Any] = [
            b"\0device-%08d" % n for n in sorted(rng.choice(keys, min(keys, BATCH_ROWS), replace=False).tolist())
        ]
        began_s = time.process_time()
        db.get(names)
        put(names)
        rates.append(len(names) / max(1e-9, time.process_time() - began_s))
    db.close()
    return sorted(rates)[len(rates) // 2]


def state(directory: Path, quick: bool) -> list[Finding]:
    """The section of `connectors.py`."""
    findings = []
    for keys in (1_000_000,) if quick else (1_000_000, 5_000_000):
        cache, files = RocksCache(CACHE_BYTES), WorkingFiles(directory / f"table-{keys}")
        seconds = 3.0 if quick else 15.0
        made = partial(RocksTable, ["device"], schema=SCHEMA, files=files, cache=cache)
        found = measure("rocksdb", made, keys, seconds)
        alone = bare(directory / f"bare-{keys}", keys, seconds / 3)
        findings.append(
            Finding(
                section="state",
                case=f"key updates in RocksDB, {keys / 1e6:.0f} M keys",
                measured=found.updates_per_s,
                unit="/s",
                target=UPDATES_PER_S,
                note=f"in batches of 64 Ki; by processor time {found.updates_per_cpu_s / alone:.2f} of bare get and write; longest update "
                f"{found.update_ms_max} ms",
                details={**asdict(found), "bare_per_cpu_s": alone},
            )
        )
    return findings


def restart(directory: Path, keys: int) -> dict[str, object]:
    """How long a restart takes: from the copy of the database, and from runs."""
    cache = RocksCache(CACHE_BYTES)
    table = RocksTable(["device"], schema=SCHEMA, files=WorkingFiles(directory), cache=cache)
    stored: dict[str, pl.DataFrame] = {}
    rows = next(batches(keys, 0)).clear()
    for start in range(0, keys, BATCH_ROWS):
        count = min(BATCH_ROWS, keys - start)
        names = [f"device-{number:08d}" for number in range(start, start + count)]
        rows = pl.DataFrame(
            {"device": names, "n": [1] * count, "total": [0.5] * count, "low": [0.5] * count, "high": [0.5] * count}
        )
        table.put(rows)
    for piece in table.freeze():
        stored[str(id(piece))] = piece.frame()
        piece.written(RunRef(digest=str(id(piece)), size_bytes=1, rows=piece.frame().height))
    table.rewrite()  # as the merger does: it makes the copy, and keeps it after the next barrier
    refs = [piece.ref for piece in table.freeze() if piece.ref is not None]
    table.rewrite()
    del table
    gc.collect()
    found = {}
    for way in ("copy", "runs"):
        again = RocksTable(["device"], schema=SCHEMA, files=WorkingFiles(directory), cache=cache)
        pieces = [Piece(make=lambda ref=ref: stored[ref.digest], ref=ref) for ref in refs]  # type: ignore[misc]
        began = time.perf_counter()
        again.load(pieces, watermark_us=TIME_MIN_US)
        again.get(rows.select("device").head(10))
        found[f"restart_from_{way}_s"] = round(time.perf_counter() - began, 2)
        del again
        gc.collect()
    return {"backend": "rocksdb", "keys": keys, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    try:
        cache, files = RocksCache(CACHE_BYTES), WorkingFiles(root / "rocksdb")
        in_memory = partial(MemoryTable, ["device"], schema=SCHEMA)
        in_rocksdb = partial(RocksTable, ["device"], schema=SCHEMA, files=files, cache=cache)
        for name, make in (("memory", in_memory), ("rocksdb", in_rocksdb)):
            print(json.dumps(asdict(measure(name, make, given.keys, given.seconds))), flush=True)
        print(json.dumps(restart(root / "restart", given.keys)))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
