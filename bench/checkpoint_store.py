"""How much the store adds to plain file I/O: writing and reading one large run.

    python bench/checkpoint_store.py [--mb 256] [--rounds 5] [--directory DIR]

Prints the median of each and the ratio to a plain write + fsync, and to a plain read, of the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from fordstone.epochs.run_file import COMPRESSIONS, encode_run
from fordstone.epochs.store import CheckpointStore
from fordstone.storage.disk import OsDisk


def frame_of(size_mb: int) -> pl.DataFrame:
    rng = np.random.default_rng(1)
    rows = size_mb * 1_000_000 // 32
    return pl.DataFrame(
        {
            "device": rng.integers(0, 1 << 40, rows),
            "n": rng.integers(0, 1000, rows),
            "total": rng.random(rows),
            "top": rng.random(rows),
        }
    )


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def plain_write(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    view = data
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)
    os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    frame = frame_of(options.mb)
    root = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        for compression in COMPRESSIONS:
            store = CheckpointStore(OsDisk(root), pipeline="bench", node="n", compression=compression)
            ref, data = encode_run(frame, compression)
            run = root / "bench" / "n" / "runs" / ref.digest
            times: dict[str, list[float]] = {
                "write_run": [],
                "plain write": [],
                "read_run": [],
                "plain read": [],
                "encode": [],
            }
            for _ in range(options.rounds):
                run.unlink(missing_ok=True)
                times["write_run"].append(timed(lambda store=store: store.write_run(frame)))  # type: ignore[misc]
                times["plain write"].append(timed(lambda data=data: plain_write(root / "plain", data)))  # type: ignore[misc]
                times["read_run"].append(timed(lambda store=store, ref=ref: store.read_run(ref)))  # type: ignore[misc]
                times["plain read"].append(timed((root / "plain").read_bytes))
                times["encode"].append(timed(lambda compression=compression: encode_run(frame, compression)))  # type: ignore[misc]
            median = {name: statistics.median(values) for name, values in times.items()}
            print(
                f"{compression:5} {ref.size_bytes / 1e6:6.0f} MB  "
                f"write_run {median['write_run']:.3f} s = {median['write_run'] / median['plain write']:.2f} x plain  "
                f"read_run {median['read_run']:.3f} s = {median['read_run'] / median['plain read']:.2f} x plain  "
                f"(encode and digest alone {median['encode']:.3f} s)"
            )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
