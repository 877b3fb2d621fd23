"""The classes that Spark sends to its processes: the source of a stream, and a stateful step of it.

To start one query Spark unpickles them in five processes, one after the other. Most of these ask only for a name, a schema or the
names of states. So this module imports little but pyspark: what does the work (`source.PipelineReader`, `operator_host.ShardHost`)
is imported by the process that first calls it. That saves two seconds in each of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Row

    from fordstone.spark.hosted.connector_sources import WakeReader
    from fordstone.spark.hosted.source import PipelineReader
    from fordstone.spark.hosted.stages import QuerySetting

SOURCE_NAME: Final = "fordstone-pipeline"
PACKED: Final = "shard int, what int, tag int, data binary"
"""The columns of a packed row, as Spark spells them."""
MEMO: Final = "memo"
"""The name under which a shard's `ShardMemo` is stored."""

T = TypeVar("T")
_SERIALIZER: Final[Any] = CloudPickleSerializer()  # type: ignore[no-untyped-call]  # not typed there
# Not as text: in every task Spark's worker would ask the JVM twice to read it, state by state.
_JSON: Final = StructType([StructField("json", BinaryType())])
_NUMBER: Final = StructType([StructField("number", LongType())])
_DATA: Final = StructType([StructField("data", BinaryType())])


class Lazy(Generic[T]):
    """A value that is pickled as Spark's functions are, and unpickled where it is first asked for.

    This does not only save time: the processes in which Spark 4.3 plans do not find modules that were sent along (`--py-files`,
    `addPyFile`), so unpickling a user's function there would fail.
    """

    def __init__(self, value: T) -> None:
        self._value: T | None = value
        self._pickled = b""

    def get(self) -> T:
        if self._value is None:
            self._value = _SERIALIZER.loads(self._pickled)
        return self._value

    def __getstate__(self) -> bytes:
        return self._pickled or bytes(_SERIALIZER.dumps(self._value))

    def __setstate__(self, pickled: bytes) -> None:
        self._value, self._pickled = None, pickled


class SentReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`PipelineReader`, as Spark sends it."""

    def __init__(self, reader: Lazy[PipelineReader | WakeReader]) -> None:
        self._reader = reader

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._reader.get().first_offset()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._reader.get().stop_at_what_is_there()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002, N802 - Spark's
        return self._reader.get().next_offset(start)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:  # noqa: ARG002 - the end says all
        return [InputPartition(share) for share in self._reader.get().shares(end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.get().read(partition.value)

    def commit(self, end: dict[str, Any]) -> None:
        self._reader.get().commit(end)

    def stop(self) -> None:
        """Called by Spark where it plans, when the query ends."""
        self._reader.get().close()


def source_class(reader: PipelineReader | WakeReader) -> type[DataSource]:
    """A data source class for one query. Spark sends the class itself to its workers, with what it holds."""
    sent = SentReader(Lazy(reader))

    class PipelineSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return SOURCE_NAME

        def schema(self) -> str:
            return PACKED

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's name
            return sent

    return PipelineSource


class HostProcessor(StatefulProcessor):
    """Hosts one stage. Spark makes one per task and calls it for every shard of every batch."""

    def __init__(self, setting: QuerySetting, depth: int, states: Sequence[str]) -> None:
        self._setting = Lazy(setting)
        self._depth = depth
        self._names = tuple(states)
        self._host: Callable[..., Iterator[Row]] | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._memo = handle.getValueState(MEMO, _JSON)
        self._states = {name: handle.getMapState(name, _NUMBER, _DATA) for name in self._names}

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803 - Spark's names
        if self._host is None:
            from fordstone.spark.hosted.operator_host import stream_host  # noqa: PLC0415 - as said at the top

            self._host = stream_host(self._setting.get(), self._depth)
        return self._host(key[0], rows, SparkStore(self._memo, self._states))

    def close(self) -> None:
        """Nothing is held. Called at the end of every task."""
        from fordstone.spark.hosted.packing import freeze_gc  # noqa: PLC0415 - as said at the top

        freeze_gc()


class SparkStore:
    """A `PieceStore` on Spark's state of the current shard."""

    def __init__(self, memo: Any, states: dict[str, Any]) -> None:
        self._memo = memo
        self._states = states

    def get(self, at: tuple[str, int], /) -> bytes | None:
        name, number = at
        found = self._memo.get() if name == MEMO else self._states[name].getValue((number,))
        return None if found is None else bytes(found[0])

    def __setitem__(self, at: tuple[str, int], data: bytes, /) -> None:
        name, number = at
        if name == MEMO:
            self._memo.update((data,))
        else:
            self._states[name].updateValue((number,), (data,))

    def __delitem__(self, at: tuple[str, int], /) -> None:
        self._states[at[0]].removeKey((at[1],))
