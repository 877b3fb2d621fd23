"""Values that Spark sends to its processes, and that only some of these need."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
            self._value = _serializer().loads(self._pickled)
        return self._value

    def __getstate__(self) -> bytes:
        return self._pickled or bytes(_serializer().dumps(self._value))

    def __setstate__(self, pickled: bytes) -> None:
        self._value, self._pickled = None, pickled


def _serializer() -> Any:
    from pyspark.serializers import CloudPickleSerializer  # noqa: PLC0415 - explaining a plan needs no pyspark

    return CloudPickleSerializer()  # type: ignore[no-untyped-call]  # not typed there
