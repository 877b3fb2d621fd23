"""The stateful half of a hosted stage: Spark's stateful processor around `host.ShardHost`, with its state in Spark's store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Never

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from fordstone.errors import CheckpointError
from fordstone.plan import plan as p
from fordstone.spark.hosted.chains import make_chain
from fordstone.spark.hosted.feed import QuerySetting
from fordstone.spark.hosted.host import ShardHost, states_of
from fordstone.spark.hosted.packing import Packed, Packer, What, shard_keys, shards_of
from fordstone.spark.session.worker_heap import leave_alone_what_stays

MEMO: Final = "memo"
# Not as text: in every task Spark's worker would ask the JVM twice to read it, state by state.
_JSON: Final = StructType([StructField("json", BinaryType())])
_NUMBER: Final = StructType([StructField("number", LongType())])
_DATA: Final = StructType([StructField("data", BinaryType())])


class HostProcessor(StatefulProcessor):
    """Hosts one stage. Spark makes one a task and calls it for every shard of every batch."""

    def __init__(self, setting: QuerySetting, depth: int) -> None:
        self._setting = setting
        self._depth = depth

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the states."""
        stages = self._setting.stages()
        # Only states are asked for here, and functions have none: where Spark plans, they may not be found (see `sent_functions`).
        functions = {step.path: _not_called for step in stages.plan.steps if isinstance(step, p.Function | p.Process)}
        operators = replace(self._setting.operators(stages), functions=functions)
        self._keys = shard_keys(self._setting.shards)
        self._shards = shards_of(self._keys)
        self._memo = handle.getValueState(MEMO, _JSON)
        self._states = {
            name: handle.getMapState(name, _NUMBER, _DATA)
            for host in stages.at(self._depth)
            for name in states_of(make_chain(stages, host, operators, Packer(1)))
        }

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803 - Spark's names
        """One shard's rows of one batch."""
        shard = self._shards[key[0]]
        packed = (Packed(shard, What(row.what), row.tag, bytes(row.data)) for row in rows)
        host = ShardHost(self._setting, self._depth, shard, _SparkStore(self._memo, self._states))
        for out in host.run(packed):
            yield Row(shard=self._keys[out.shard], what=int(out.what), tag=out.tag, data=out.data)

    def close(self) -> None:
        """Nothing is held. Called at the end of every task."""
        leave_alone_what_stays()


def _not_called(*_: object) -> Never:
    raise AssertionError("a function stands in for the user's where states are opened, and is not called")


class _SparkStore:
    """`host.PieceStore` on Spark's state of the current shard."""

    def __init__(self, memo: Any, states: dict[str, Any]) -> None:
        self._memo = memo
        self._states = states

    def memo(self) -> bytes | None:
        found = self._memo.get()
        return None if found is None else bytes(found[0])

    def keep(self, memo: bytes) -> None:
        self._memo.update((memo,))

    def get(self, state: str, number: int) -> bytes:
        found = self._states[state].getValue((number,))
        if found is None:
            raise CheckpointError(
                f"piece {number} of {state} is missing from the query's state. Restore its checkpoint location."
            )
        return bytes(found[0])

    def put(self, state: str, number: int, data: bytes) -> None:
        self._states[state].updateValue((number,), (data,))

    def remove(self, state: str, number: int) -> None:
        self._states[state].removeKey((number,))
