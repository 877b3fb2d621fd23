"""Reads blobs from the hub's own store, where a client can reach it: quicker than through the hub.

The hub names the location, and the client opens it with its own credentials. So only locations of a few kinds are opened, and only
plain ones; anything else is asked of the hub, as is what does not come in time. What is read has the digest that was asked for.

Invariants: a read takes a bounded time, and no more than `READS_MAX` reads hang at once; a location that failed is not tried again.
"""

from __future__ import annotations

import logging
import posixpath
import threading
from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import unquote, urlsplit

from fordstone.epochs.run_file import digest_of
from fordstone.state.base import RunRef
from fordstone.storage.remote import read_url

_events = logging.getLogger(__name__)

SCHEMES: Final = frozenset({"file", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hdfs"})
"""Kinds of stores that blobs are kept in. Each is opened for reading only, without options from the URL."""
SECONDS: Final = 15.0
BYTES_PER_SECOND_MIN: Final = 1 << 20
"""A read may take `SECONDS`, and the time of its bytes at this rate. A store that is slower is not worth it."""
READS_MAX: Final = 16
"""Maximum number of reads in progress; those that hang count until they end."""
LOCATIONS_MAX: Final = 64
"""Maximum number of locations that are remembered as unusable."""
_LOCATION_CHARS_MAX: Final = 2_000
_MARKS: Final = ("?", "#", "\\", "*", "[", "{")


def location_problem(url: str) -> str | None:
    """Why blobs are not read from a location that a hub named; None: they may be."""
    if len(url) > _LOCATION_CHARS_MAX or not url.isascii() or not url.isprintable() or " " in url:
        return "it is not a plain URL"
    if "::" in url:
        return "it is a chain of URLs"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "it is not a URL"
    if parts.scheme not in SCHEMES:
        return f"a URL of kind {parts.scheme or 'none'!r} is not opened; the kinds are {', '.join(sorted(SCHEMES))}"
    # abfs://container@account has a container in the place of a user.
    if parts.password is not None or (parts.username is not None and parts.scheme not in {"abfs", "abfss"}):
        return "it has a user in it"
    local = parts.scheme == "file"
    if any(mark in url for mark in _MARKS) or ("%" in url and not local):
        return "it has a query, a fragment, an escape or a pattern in it"
    if local and (parts.netloc or not parts.path.startswith("/")):
        return "it is not an absolute path"
    if not local and not parts.hostname:
        return "it names no bucket or host"
    path = (unquote(parts.path) if local else parts.path).rstrip("/") or "/"
    if path != posixpath.normpath(path) or ".." in path.split("/"):
        return "its path is not normalised"
    return None


class DirectBlobs:
    """Used by one client, from several threads."""

    def __init__(
        self, *, read: Callable[..., bytes] = read_url, seconds: float = SECONDS, reads_max: int = READS_MAX
    ) -> None:
        """`read(url, bytes_max=...)` returns the first bytes of a file; tests give another one."""
        self._read = read
        self._seconds = seconds
        self._slots = threading.Semaphore(reads_max)
        self._unusable: set[str] = set()

    def read(self, url: str, ref: RunRef) -> bytes | None:
        """A blob; None: it has to be asked of the hub."""
        if url in self._unusable or len(self._unusable) >= LOCATIONS_MAX:
            return None
        if (problem := location_problem(url)) is not None:
            self._give_up(url, problem)
            return None
        if not self._slots.acquire(blocking=False):
            return None  # others hang, or are enough
        read = _Read(self._read, f"{url.rstrip('/')}/{ref.digest[:2]}/{ref.digest}", ref.size_bytes + 1, self._slots)
        seconds = self._seconds + ref.size_bytes / BYTES_PER_SECOND_MIN
        if not read.done.wait(seconds):
            self._give_up(url, f"nothing came within {seconds:.0f} s")
            return None
        if read.error is not None:
            if not isinstance(read.error, FileNotFoundError):  # small blobs are only at the hub
                self._give_up(url, str(read.error))
            return None
        data = read.data
        return data if len(data) == ref.size_bytes and digest_of(data) == ref.digest else None

    def _give_up(self, url: str, problem: str) -> None:
        if url not in self._unusable:
            self._unusable.add(url)
            _events.info("blobs read through the hub", extra={"location": url[:200], "problem": problem[:500]})


class _Read:
    """One read on a thread of its own: no store has a timeout that can be relied on. A thread that hangs does not hold the process up."""

    def __init__(self, read: Callable[..., bytes], url: str, bytes_max: int, slots: threading.Semaphore) -> None:
        self.done = threading.Event()
        self.data = b""
        self.error: Exception | None = None
        self._work = partial(read, url, bytes_max=bytes_max)
        self._slots = slots
        threading.Thread(target=self._run, name="hub-direct", daemon=True).start()

    def _run(self) -> None:
        try:
            self.data = self._work()
        except Exception as error:  # noqa: BLE001 - each kind of store has its own errors, and the hub is the way out of all of them
            self.error = error
        finally:
            self._slots.release()
            self.done.set()
