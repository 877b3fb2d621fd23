"""The user's functions on their way to tasks: unpacked where one is first asked for, and not where none is.

Spark sends a query's parts not only to tasks, but to the processes in which it plans a streaming source and a stateful step.
Those need no function, and in Spark 4.3 they do not find modules that were sent along (`--py-files`, `addPyFile`): unpacking a
function there, which imports what it refers to, would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from pyspark.serializers import CloudPickleSerializer

_WIRE: Final[Any] = CloudPickleSerializer()  # type: ignore[no-untyped-call]  # not typed there


class SentFunctions(Mapping[str, Callable[..., Any]]):
    """Functions by path, as `operators.factory.Functions`. Travels as Spark's own functions do."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions: dict[str, Callable[..., Any]] | None = dict(functions)
        self._packed = b""

    def __getitem__(self, path: str) -> Callable[..., Any]:
        return self._unpacked()[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unpacked())

    def __len__(self) -> int:
        return len(self._unpacked())

    def __getstate__(self) -> bytes:
        return self._packed or bytes(_WIRE.dumps(self._functions))

    def __setstate__(self, packed: bytes) -> None:
        self._functions, self._packed = None, packed

    def _unpacked(self) -> dict[str, Callable[..., Any]]:
        if self._functions is None:
            self._functions = dict(_WIRE.loads(self._packed))
        return self._functions
