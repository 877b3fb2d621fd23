"""Time limits of requests to stores: some drivers have none, and none takes the size of a request into account."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
REQUEST_TIMEOUT_S: Final = 60.0
"""Time limit of one request, without the time for its bytes."""
BYTES_PER_S_MIN: Final = 64 * 1024
"""What a store must take or give per second, at least."""
READ_TIMEOUT_S: Final = 600.0
"""Time limit of a read of which the size is not known before. Drivers of object stores give up earlier if no bytes come."""


def request_timeout_s(size_bytes: int = 0) -> float:
    """Return the time limit of a request with that many bytes."""
    return REQUEST_TIMEOUT_S + size_bytes / BYTES_PER_S_MIN


def limited(work: Callable[[], T], timeout_s: float) -> T:
    """Return what `work` returns; `TimeoutError` if it does not return in time. Then its thread is left to itself, and ends with the process.

    `work` may still be carried out later: what it stores must have a name of its own, or be the same each time.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            raised.append(error)

    thread = threading.Thread(target=run, name="remote-request", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no response within {timeout_s:.0f} s")
    return returned[0]


class LimitedFile(io.RawIOBase):
    """A file that is open to read, of a driver without time limits."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        return int(self._file.tell())

    def read(self, size: int = -1) -> bytes:
        return bytes(limited(lambda: self._file.read(size), request_timeout_s() if size >= 0 else READ_TIMEOUT_S))
