"""Decodes thousands of forged runs, in a process of its own so that a crash is seen: `python -m tests.epochs.forging SEED TRIES`.

Prints how many were taken, how many rejected, and the peak memory; anything else is a crash, with the bytes in `--keep`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import io
import random
import sys
from decimal import Decimal
from pathlib import Path

import polars as pl

from fordstone.epochs import run_file
from fordstone.epochs.run_file import COMPRESSIONS, encode_run
from fordstone.epochs.untrusted import decode_untrusted
from fordstone.errors import RejectedRunError
from fordstone.state.base import RunRef

ROWS = 200
NUMBERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**30, 255, 256, 4096, 2**40, 2**62, -(2**63), 2**63 - 1)


def text(number: int) -> str | None:
    if number % 7 == 0:
        return None
    return f"k{number}" if number % 3 else f"longer than the twelve bytes of a view, äöü {number}"


def every_type(rows: int = ROWS) -> pl.DataFrame:
    """All types that pipelines have, with nulls, short and long text, and nesting."""
    numbers = range(rows)
    entry = pl.Struct({"key": pl.String(), "value": pl.Float64()})
    return pl.DataFrame(
        {
            "text": [text(number) for number in numbers],
            "bytes": [None if number % 5 == 0 else bytes([number % 256]) * (number % 30) for number in numbers],
            "whole": pl.Series(numbers, dtype=pl.Int64),
            "small": pl.Series([number % 100 for number in numbers], dtype=pl.Int8),
            "flag": [None if number % 4 == 0 else number % 3 == 0 for number in numbers],
            "decimal": pl.Series([Decimal(number) / 100 for number in numbers], dtype=pl.Decimal(38, 2)),
            "time": pl.Series([number * 10**9 for number in numbers], dtype=pl.Datetime("us", "UTC")),
            "day": [dt.date(2024, 1, 1)] * rows,
            "float": [float(number) for number in numbers],
            "many": pl.Series([[text(each) for each in range(n % 5)] for n in numbers], dtype=pl.List(pl.String())),
            "deep": pl.Series([[[1, 2], [n]] * (n % 3) for n in numbers], dtype=pl.List(pl.List(pl.Int64()))),
            "both": pl.Series(
                [{"a": n, "b": [text(n)] * (n % 3)} for n in numbers],
                dtype=pl.Struct({"a": pl.Int64(), "b": pl.List(pl.String())}),
            ),
            "map": pl.Series(
                [None if n % 8 == 0 else [{"key": f"k{each}", "value": 0.5} for each in range(n % 4)] for n in numbers],
                dtype=pl.List(entry),
            ).cast(pl.Map(pl.String(), pl.Float64())),
            "nothing": pl.Series([None] * rows, dtype=pl.Null()),
        }
    )


def forged(good: bytes, rng: random.Random) -> bytes:
    """The bytes with some of them changed: bits, and numbers of four and eight bytes, most of them where metadata is."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.choice((rng.randrange(len(data) - 8), rng.randrange(6000), len(data) - 8 - rng.randrange(3000)))
        match rng.randrange(5):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place & ~3 : (place & ~3) + 4] = (rng.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")
            case 2:
                data[place & ~7 : (place & ~7) + 8] = (rng.choice(NUMBERS) & (2**64 - 1)).to_bytes(8, "little")
            case 3:
                data[place : place + 4] = rng.randbytes(4)
            case _:
                other = rng.randrange(len(data) - 8)
                data[place & ~7 : (place & ~7) + 8] = data[other & ~7 : (other & ~7) + 8]
    return bytes(data) if rng.random() > 0.05 else bytes(data[: rng.randrange(len(data))])


def use(frame: pl.DataFrame) -> None:
    """What pipelines and sinks do with rows."""
    pl.concat([frame, frame]).rechunk().write_ipc_stream(io.BytesIO(), compression="zstd")
    for column in frame.iter_columns():
        column.is_null().sum()
        column.gather([0, frame.height - 1])
        if not isinstance(column.dtype, pl.Map | pl.Struct | pl.Null):
            column.n_unique()
            column.sort()
    if frame.schema == EVERY.schema:
        frame.select(pl.exclude("day", "time")).rows()
        frame.group_by("text").agg(pl.len(), pl.col("float").sum(), pl.col("decimal").sum())
        frame.select(pl.col("many").list.join("-"), pl.col("both").struct.field("b").list.len())
        frame.filter(pl.col("flag")).select(pl.col("text").str.to_uppercase(), pl.col("bytes").bin.size())


EVERY = every_type()


def peak_mib() -> int:
    """Not `ru_maxrss`, which a process inherits."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def main(seed: int, tries: int, keep: Path | None) -> None:
    rng = random.Random(seed)
    goods = []
    for run_file._FILE_ROWS_MIN in (0, 10**9):  # both formats
        goods += [bytes(encode_run(EVERY, compression)[1]) for compression in COMPRESSIONS]
    taken = rejected = 0
    for _ in range(tries):
        data = forged(rng.choice(goods), rng)
        if keep is not None:
            keep.write_bytes(data)
        ref = RunRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), rows=ROWS)
        try:
            frame = decode_untrusted(data, ref)
        except RejectedRunError:
            rejected += 1
            continue
        taken += 1
        with contextlib.suppress(pl.exceptions.PolarsError):
            use(frame)
    print(f"{taken} {rejected} {peak_mib()}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
