"""Decodes thousands of forged runs, in a process of its own so that a crash is seen: `python -m tests.epochs.forging SEED TRIES`.

Most are good runs with some bytes changed. In some of them, and in metadata that is made from nothing (`columns_message`), many offsets
point to one table, text or vector: a few bytes that are read thousands of times.

Prints how many were taken, how many rejected, the peak memory in MiB, and the longest time of one run in milliseconds, for each megabyte of
it and for at least one; anything else is a crash, with the bytes in `--keep`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import io
import random
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
        match rng.randrange(6):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place & ~3 : (place & ~3) + 4] = (rng.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")
            case 2:
                data[place & ~7 : (place & ~7) + 8] = (rng.choice(NUMBERS) & (2**64 - 1)).to_bytes(8, "little")
            case 3:
                data[place : place + 4] = rng.randbytes(4)
            case 4:
                share_offsets(data, rng)
            case _:
                other = rng.randrange(len(data) - 8)
                data[place & ~7 : (place & ~7) + 8] = data[other & ~7 : (other & ~7) + 8]
    return bytes(data) if rng.random() > 0.05 else bytes(data[: rng.randrange(len(data))])


def share_offsets(data: bytearray, rng: random.Random) -> None:
    """Make some of what may be offsets point to the same place: a table, a text, a vector, or the layout of a table."""
    start = rng.choice((8, max(8, len(data) - 3000) & ~7))
    end = min(len(data) - 4, start + 3000)
    found = {place: struct.unpack_from("<I", data, place)[0] for place in range(start, end, 4)}
    offsets = {place: place + offset for place, offset in found.items() if 0 < offset < end - place}
    if not offsets:
        return
    target = rng.choice(list(offsets.values()))
    before = [place for place in offsets if place < target]
    for place in rng.sample(before, min(len(before), rng.choice((1, 2, 8, 64)))):
        struct.pack_into("<I", data, place, target - place)


# Metadata that is made from nothing.

LINK = b""
"""In place of a value: an offset, which is set later."""
TIMESTAMP, INTEGER, STRUCT = 10, 2, 13


@dataclass(frozen=True)
class Table:
    position: int
    slots: Mapping[int, int]
    """Where its fields stand."""


class Flatbuffer:
    """Bytes of a flatbuffer, from its root on: an offset points to what comes later."""

    def __init__(self) -> None:
        self.data = bytearray(4)

    def put(self, content: bytes) -> int:
        self.data += bytes(-len(self.data) % 8)
        self.data += content
        return len(self.data) - len(content)

    def link(self, place: int, target: int) -> None:
        struct.pack_into("<I", self.data, place, target - place)

    def table(self, fields: Mapping[int, bytes], *, layout_fields: int = 0) -> Table:
        """`layout_fields`: of how many fields its layout has a place, although they have none."""
        places = {field: 8 + 8 * number for number, field in enumerate(fields)}
        layout = [places.get(field, 0) for field in range(max([layout_fields, *(field + 1 for field in fields)]))]
        size = 8 + 8 * len(fields)
        vtable = self.put(struct.pack(f"<HH{len(layout)}H", 4 + 2 * len(layout), size, *layout))
        position = self.put(bytes(8) + b"".join(value.ljust(8, b"\0") for value in fields.values()))
        struct.pack_into("<i", self.data, position, position - vtable)
        return Table(position, {field: position + place for field, place in places.items()})

    def text(self, text: bytes) -> int:
        return self.put(struct.pack("<I", len(text)) + text + b"\0")

    def vector(self, count: int) -> list[int]:
        """The places of its offsets; the vector itself begins four bytes before the first, also if there is none."""
        position = self.put(struct.pack("<I", count) + bytes(4 * count))
        return [position + 4 + 4 * number for number in range(max(1, count))]


def columns_message(
    columns: int,
    *,
    tables: int | None = None,
    names: int | None = None,
    name: bytes = b"",
    layout_fields: int = 0,
    depth: int = 0,
    metadata: tuple[int, bytes] = (0, b""),
    zone: bytes = b"",
) -> bytes:
    """A stream without batches.

    Args:
        columns: Number of columns.
        tables: Number of tables that they are; None: each has one.
        names: Number of names that these have, likewise.
        name: How each name begins.
        layout_fields: As `Flatbuffer.table` has it.
        depth: Number of structs around each column, of two fields that are the same.
        metadata: Number of pairs of metadata, and the one value of all of them.
        zone: The time zone of all columns.
    """
    made = Flatbuffer()
    message = made.table({0: struct.pack("<h", 4), 1: b"\x01", 2: LINK})
    made.link(0, message.position)
    schema = made.table({1: LINK} | ({2: LINK} if metadata[0] else {}))
    made.link(message.slots[2], schema.position)
    vector = made.vector(columns)
    made.link(schema.slots[1], vector[0] - 4)
    kind, kinds = (
        (TIMESTAMP, {0: struct.pack("<h", 2), 1: LINK}) if zone else (INTEGER, {0: struct.pack("<i", 64), 1: b"\x01"})
    )
    leaf = {0: LINK, 2: bytes([kind]), 3: LINK, 5: LINK}
    count = columns if tables is None else tables
    outer = []
    for _ in range(depth):
        one = made.table({**leaf, 2: bytes([STRUCT])})
        inside = made.vector(2)
        made.link(one.slots[5], inside[0] - 4)
        outer.append((one, inside))
    own = [made.table(leaf, layout_fields=layout_fields) for _ in range(count)]
    for (_, inside), (one, _) in zip(outer, [*outer[1:], (own[0], [])], strict=True) if outer else ():
        for place in inside:
            made.link(place, one.position)
    for number, place in enumerate(vector if columns else ()):
        made.link(place, outer[0][0].position if outer else own[number % count].position)
    type_ = made.table(kinds)
    empty = made.put(bytes(8))
    texts = [made.text(name + str(number).encode()) for number in range(count if names is None else names)]
    for number, one in enumerate([*own, *(one for one, _ in outer)]):
        made.link(one.slots[0], texts[number % len(texts)])
        made.link(one.slots[3], type_.position)
    for one in own:
        made.link(one.slots[5], empty)
    if zone:
        made.link(type_.slots[1], made.text(zone))
    if metadata[0]:
        pairs = made.vector(metadata[0])
        made.link(schema.slots[2], pairs[0] - 4)
        keys = [made.table({0: LINK, 1: LINK}) for _ in pairs]
        key, value = made.text(b"key"), made.text(metadata[1])
        for place, pair in zip(pairs, keys, strict=True):
            made.link(place, pair.position)
            made.link(pair.slots[0], key)
            made.link(pair.slots[1], value)
    made.put(b"")
    return struct.pack("<Ii", 0xFFFFFFFF, len(made.data)) + bytes(made.data) + struct.pack("<Ii", 0xFFFFFFFF, 0)


def forged_columns(rng: random.Random) -> bytes:
    """Metadata in which things are shared at random."""
    columns = rng.choice((0, 1, 7, 300, 3000, 16_384, 20_000))

    def some() -> int | None:
        return rng.choice((None, None, 1, 2, max(1, columns // 3)))

    return columns_message(
        columns,
        tables=some(),
        names=some(),
        name=b"n" * rng.choice((0, 0, 10, 900, 5000, 100_000)) if columns < 1000 else b"",
        layout_fields=rng.choice((0, 7, 8, 1000, 32_000)) if columns < 1000 else 0,
        depth=rng.choice((0, 0, 3, 12, 13, 40, 70)) if columns else 0,
        metadata=rng.choice(((0, b""), (0, b""), (1, b"v"), (1000, b"v" * 100_000))),
        zone=rng.choice((b"", b"", b"UTC", b"Mars", b"Z" * 50_000)),
    )


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
    taken = rejected = longest_ns = 0
    for _ in range(tries):
        made = rng.random() < 0.1
        data = forged_columns(rng) if made else forged(rng.choice(goods), rng)
        if keep is not None:
            keep.write_bytes(data)
        ref = RunRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), rows=0 if made else ROWS)
        began_ns = time.thread_time_ns()
        try:
            frame = decode_untrusted(data, ref)
        except RejectedRunError:
            rejected += 1
            continue
        finally:
            longest_ns = max(longest_ns, int((time.thread_time_ns() - began_ns) / max(1.0, len(data) / 1e6)))
        taken += 1
        if made:
            continue
        with contextlib.suppress(pl.exceptions.PolarsError):
            use(frame)
    print(f"{taken} {rejected} {peak_mib()} {longest_ns // 1_000_000}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
