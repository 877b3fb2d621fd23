"""Packed rows: how batches, marks of time and results travel between the stages of a query on Spark.

A Spark row is `(shard, what, tag, data)`: a whole batch as Arrow bytes, or a few words as JSON. Spark moves and groups
these by shard and never looks inside, so that no conversion on the way (pandas turns nulls into NaN and large integers
into floats) can change a value.

A shard is a set of key groups. The number that stands for it is chosen so that Spark's own hash puts each shard into a
partition of its own. Pure, and free of Spark.
"""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from fordstone.lang.polars.hash import MURMUR3
from fordstone.plan.ids import KEY_GROUPS
from fordstone.state.key_group import split_by_owner

if TYPE_CHECKING:
    import pyarrow as pa

PACK_BYTES: Final = 512 * 1024
"""Approximate number of bytes that are gathered before they are packed. Larger ones take longer by the byte, at each of the
dozen places where they are copied: they leave the processor's cache, and Java puts them aside as large objects."""
SLICE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Approximate maximum size of a packed slice of state: Spark has several copies of a value on the way."""
RECORDS_BYTES_MAX: Final = 4 * 1024 * 1024
"""Size of the Arrow batches that go to Spark."""
_NUMBERS: Final = 1 << 13
"""Among these, each of 128 shards finds one that Spark puts into its partition."""


class What(IntEnum):
    """What a packed row carries."""

    ROWS = 0
    """A batch for the keyed step that `tag` names."""
    LATE = 1
    """Likewise, of rows that are below the watermark of their source partition, and carry it."""
    CLOCK = 2
    """How far the sources' time has come."""
    OUT = 3
    """A batch for the sink that `tag` names."""
    FACTS = 4
    """What a task reports to the driver: positions, times, counts."""
    SEED = 5
    """State from a checkpoint for the keyed step that `tag` names."""
    PART = 6
    """The name of a part that was written for the sink that `tag` names."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed row; `shard` is the shard's number, from 0, not yet Spark's key for it."""

    shard: int
    what: What
    tag: int
    data: bytes


def encode(frame: pl.DataFrame) -> bytes:
    """A batch as Arrow bytes, not compressed: Spark compresses what it shuffles and stores."""
    buffer = io.BytesIO()
    # A clone: see `epochs.run_file.encode_run`.
    frame.clone().write_ipc_stream(buffer, compression="uncompressed")
    return buffer.getvalue()


def decode(data: bytes) -> pl.DataFrame:
    """The batch back."""
    return pl.read_ipc_stream(data)


Place = tuple[int, What, int, tuple[str, ...]]
"""Shard, what, tag and columns: the branches of a union may have them in another order, and carry ids or not."""


class Packer:
    """Gathers the batches of one task and packs them by shard and destination. Used by one thread."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._open: dict[Place, list[pl.DataFrame]] = {}
        self._rows: dict[Place, int] = {}
        self._pack_rows: dict[Place, int] = {}
        """How many rows are packed together, by how long those before were."""
        self._packed: list[Packed] = []
        self._turn = 0

    def keyed(self, tag: int, keys: Sequence[str], frame: pl.DataFrame, *, late: bool) -> None:
        """Rows for a keyed step, each to the shard that owns its key; without keys all belong to the first."""
        what = What.LATE if late else What.ROWS
        if not keys or self._shards == 1:
            self._take((0, what, tag), frame)
            return
        for shard, part in enumerate(split_by_owner(frame, keys, self._shards)):
            if part.height:
                self._take((shard, what, tag), part)

    def out(self, tag: int, frame: pl.DataFrame) -> None:
        """Rows for a sink. They go by any shard: each in its turn."""
        self._take((self._turn % self._shards, What.OUT, tag), frame)
        self._turn += 1

    def add(self, packed: Packed) -> None:
        self._packed.append(packed)

    def to_all(self, what: What, tag: int, data: bytes) -> None:
        self._packed += [Packed(shard, what, tag, data) for shard in range(self._shards)]

    def ready(self) -> Iterator[Packed]:
        """What is packed by now. Called often, so that no task holds much."""
        packed, self._packed = self._packed, []
        yield from packed

    def taken(self) -> Iterator[Packed]:
        for place in tuple(self._open):
            self._pack(place)
        yield from self.ready()

    def _take(self, where: tuple[int, What, int], frame: pl.DataFrame) -> None:
        if not frame.height:
            return
        place = (*where, tuple(frame.columns))
        self._open.setdefault(place, []).append(frame)
        self._rows[place] = self._rows.get(place, 0) + frame.height
        if place not in self._pack_rows:
            # Text that it shares with other frames counts as its own, so this is too few rather than too many.
            self._pack_rows[place] = _rows_in_a_pack(int(frame.estimated_size()), frame.height)
        if self._rows[place] >= self._pack_rows[place]:
            self._pack(place)

    def _pack(self, place: Place) -> None:
        frames, rows = self._open.pop(place), self._rows.pop(place)
        frame = pl.concat(frames, rechunk=True) if len(frames) > 1 else frames[0]
        at = 0
        while at < rows:
            packs = max(1, round((rows - at) / self._pack_rows[place]))
            part = frame.slice(at, -(-(rows - at) // packs))
            data = encode(part)
            self._pack_rows[place] = _rows_in_a_pack(len(data), part.height)
            if len(data) > 2 * PACK_BYTES and part.height > 1:
                continue  # these rows are longer than those before
            self._packed.append(Packed(*place[:3], data))
            at += part.height


def _rows_in_a_pack(size_bytes: int, rows: int) -> int:
    return max(1, PACK_BYTES * rows // max(1, size_bytes))


def sliced(frame: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """The frame in slices of about `SLICE_BYTES_MAX` at most."""
    count = min(frame.height, 1 + int(frame.estimated_size()) // SLICE_BYTES_MAX)
    rows = -(-frame.height // max(1, count))
    yield from frame.iter_slices(rows) if count > 1 else (frame,)


def split_state(
    frame: pl.DataFrame, key: Sequence[str], *, keyed: bool, shards: int
) -> Iterator[tuple[int, pl.DataFrame]]:
    """The rows of stored state by the shard that owns them; those of a step without keys belong to the first."""
    if not keyed or shards == 1:
        yield 0, frame
        return
    for shard, mine in enumerate(split_by_owner(frame, key, shards)):
        if mine.height:
            yield shard, mine


def shard_keys(shards: int) -> tuple[int, ...]:
    """For each shard the number that Spark groups by, such that shard i is hashed to partition i of as many."""
    if not 1 <= shards <= KEY_GROUPS:
        raise ValueError(f"{shards} shards: there are 1 to {KEY_GROUPS}, the number of key groups.")
    places, numbers = np.unique(spark_hashes(range(_NUMBERS)) % shards, return_index=True)
    if len(places) < shards:
        raise AssertionError(f"no numbers found for {shards} shards")
    return tuple(numbers.tolist())


def spark_hashes(numbers: Sequence[int]) -> NDArray[np.int32]:
    """Spark's hash of each int: Murmur3 with seed 42, as a signed number."""
    halves = np.array(numbers, dtype=np.int32).view(np.uint32)
    hashes: NDArray[np.uint32] = MURMUR3.of_halves(halves, np.full_like(halves, 42))
    return hashes.view(np.int32)


def shards_of(keys: Iterable[int]) -> dict[int, int]:
    """From the numbers that Spark groups by back to the shards."""
    return {key: shard for shard, key in enumerate(keys)}


def batches(rows: Iterator[Packed], keys: Sequence[int]) -> Iterator[pa.RecordBatch]:
    """Packed rows as Spark takes them."""
    held: list[Packed] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row.data)
        if size >= RECORDS_BYTES_MAX:
            yield record_batch(held, keys)
            held, size = [], 0
    if held:
        yield record_batch(held, keys)


def record_batch(rows: Sequence[Packed], keys: Sequence[int]) -> pa.RecordBatch:
    """Packed rows as one Arrow batch. `keys`: the number that Spark groups by, by shard."""
    import pyarrow as pa  # noqa: PLC0415 - explaining a plan needs neither pyarrow nor pyspark

    schema = pa.schema([("shard", pa.int32()), ("what", pa.int32()), ("tag", pa.int32()), ("data", pa.binary())])
    # Made of Python's numbers, so that more than Arrow can count is an error.
    ends = np.array([0, *accumulate(len(row.data) for row in rows)], dtype=np.int32)
    data = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(row.data for row in rows))]
    columns = [
        int_array([keys[row.shard] for row in rows]),
        int_array([int(row.what) for row in rows]),
        int_array([row.tag for row in rows]),
        pa.Array.from_buffers(pa.binary(), len(rows), data),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def int_array(numbers: Sequence[int]) -> pa.Array:
    """Numbers as Arrow. `pyarrow.array` would do it too, but imports pandas first: over a second in every worker."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    return pa.Array.from_buffers(pa.int32(), len(numbers), [None, pa.py_buffer(np.array(numbers, dtype=np.int32))])


_REUSED: Final = "SPARK_REUSE_WORKER"
"""Set by Spark in the environment of workers that do many tasks."""


def freeze_gc() -> None:
    """Called at the end of every task, when what it needs is imported. Acts once per process, and only in such a worker.

    Between two tasks Spark collects all garbage, and so visits every object of every imported module: about 50 ms each time,
    which is more than all the rest of a small task.
    """
    if _REUSED in os.environ and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
