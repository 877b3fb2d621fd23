"""Put a hosted query together: readers, then one stage for each depth of keyed steps; as a stream or as a batch job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from fordstone.spark.hosted.feed import Feed, QuerySetting
from fordstone.spark.hosted.host import ShardHost
from fordstone.spark.hosted.packing import PACKED, Packed, What, shard_keys, shards_of
from fordstone.spark.hosted.processor import HostProcessor
from fordstone.spark.hosted.source import SOURCE_NAME, assign, batches, pipeline_source
from fordstone.spark.hosted.work import PartitionRead, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from fordstone.spark.hosted.cuts import CutFiles
    from fordstone.spark.hosted.seed import Seed

ARROW_BYTES_MAX: Final = ("spark.sql.execution.arrow.maxBytesPerBatch", str(4 * 1024 * 1024))
"""So much goes to a Python worker at a time. Spark's own bound is by rows, and ours are long: it would gather all of them."""


def streaming(
    spark: SparkSession, setting: QuerySetting, cuts: CutFiles, seed: Seed | None, *, rows_max: int, tasks: int
) -> DataFrame:
    """The packed output of a pipeline as a stream."""
    spark.conf.set(*ARROW_BYTES_MAX)
    spark.dataSource.register(pipeline_source(setting, cuts, seed, rows_max=rows_max, tasks=tasks))
    rows = spark.readStream.format(SOURCE_NAME).load()
    for depth in range(1, setting.stages().depth + 1):
        rows = rows.groupBy("shard").transformWithState(
            HostProcessor(setting, depth), PACKED, outputMode="Append", timeMode="None"
        )
    return rows


def batch(spark: SparkSession, setting: QuerySetting, work: Work, seed: Seed | None, *, tasks: int) -> DataFrame:
    """The packed output of a pipeline over all of the work, as a batch job: each stage runs once, and ends with the input."""
    spark.conf.set(*ARROW_BYTES_MAX)
    shares: list[tuple[int, bytes | None, bytes | None]] = [
        (number, msgspec.json.encode(reads), work.to_json() if number == 0 else None)
        for number, reads in enumerate(assign(work.reads, tasks))
    ]
    if seed is not None:
        shares += [(number, None, None) for number in range(tasks)]
    rows = spark.createDataFrame([(place, *share) for place, share in enumerate(shares)], _SHARES)
    packed = rows.repartitionByRange(len(shares), "place").mapInArrow(_feeding(setting, seed, tasks), PACKED)
    for depth in range(1, setting.stages().depth + 1):
        packed = packed.groupBy("shard").applyInArrow(_hosting(setting, depth), PACKED)
    return packed


_SHARES: Final = "place int, number int, reads binary, work binary"


def _feeding(
    setting: QuerySetting, seed: Seed | None, tasks: int
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What reader tasks of a batch job do: a row is a share of the work, or of the checkpoint to begin from."""

    def feed(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        keys = shard_keys(setting.shards)
        for batch in rows:
            for row in batch.to_pylist():
                if row["reads"] is not None:
                    reads = msgspec.json.decode(row["reads"], type=tuple[PartitionRead, ...])
                    work = None if row["work"] is None else msgspec.json.decode(row["work"], type=Work)
                    yield from batches(Feed(setting).run(reads, work), keys)
                elif seed is not None:
                    yield from batches(seed.rows(setting, row["number"], tasks), keys)

    return feed


def _hosting(setting: QuerySetting, depth: int) -> Callable[..., Any]:
    """What keyed tasks of a batch job do: one shard, from beginning to end."""

    def host(key: tuple[pa.Scalar, ...], rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        keys = shard_keys(setting.shards)
        shard = shards_of(keys)[key[0].as_py()]
        packed = (
            Packed(shard, What(row["what"]), row["tag"], row["data"]) for batch in rows for row in batch.to_pylist()
        )
        return batches(ShardHost(setting, depth, shard, MemoryStore()).run(packed), keys)

    return host


class MemoryStore:
    """`host.PieceStore` for one batch, of which nothing is left."""

    def __init__(self) -> None:
        self._memo: bytes | None = None
        self._pieces: dict[tuple[str, int], bytes] = {}

    def memo(self) -> bytes | None:
        """What was kept."""
        return self._memo

    def keep(self, memo: bytes) -> None:
        """Keep it."""
        self._memo = memo

    def get(self, state: str, number: int) -> bytes:
        """A piece."""
        return self._pieces[state, number]

    def put(self, state: str, number: int, data: bytes) -> None:
        """Store a piece."""
        self._pieces[state, number] = data

    def remove(self, state: str, number: int) -> None:
        """Drop a piece."""
        del self._pieces[state, number]
