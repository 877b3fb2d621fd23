"""The limits that the hub sets its clients: size, rate, number at a time, speed, memory, and space on its disks.

`middleware` and the handlers apply them. Clock values and disk usage are handed in, so that tests control them.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fordstone.errors import ConfigError
from fordstone.hub.messages import BLOB_BYTES_MAX, BODY_BYTES_MAX, Rejection

SHARED_TIMES: Final = 20
"""Multiple of a node's rate for callers that represent many: the center, an admin, a peer address without tokens."""
RESERVED_BYTES_MAX: Final = 256 << 20
"""Maximum disk space that is reserved, which blobs may not take."""
RESERVED_SHARE: Final = 8
"""A small disk has one part in this many reserved instead."""
EPOCHS_SHARE: Final = 4
"""Epochs may take all of the reserve but one part in this many."""
SHORT_SHARE: Final = 2.0
"""Multiple of the reserve below which the log gives back the free pages of its file."""
DISK_CHECK_INTERVAL_S: Final = 0.25
LINES_PER_S: Final = 1.0
"""Rejections of one caller that are logged per second, and after a pause at once."""
LINES_AT_ONCE: Final = 10.0
ALL_LINES_PER_S: Final = 5.0
"""The same for all callers without a token together, and for all with one: at most about 150 MB per day."""
ALL_LINES_AT_ONCE: Final = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one hub."""

    blob_bytes_max: int = BLOB_BYTES_MAX
    body_bytes_max: int = BODY_BYTES_MAX
    rate_per_s: float = 500.0
    """Maximum requests per second of one node's token."""
    burst_s: float = 4.0
    """Seconds' worth of requests that may come at once."""
    callers_max: int = 20_000
    """Maximum number of callers whose rate is remembered."""
    requests_max: int = 2_000
    """Maximum requests in progress, without long polls."""
    polls_max: int = 5_000
    """Maximum long polls in progress."""
    node_requests_max: int = 64
    """Maximum requests in progress of one node's token, so that one node cannot take all slots."""
    node_polls_max: int = 256
    connections_max: int = 20_000
    """Maximum number of connections. The process may not be allowed to open as many files: then it is fewer."""
    unauthenticated_max: int = 1_000
    """Maximum number of connections that have not shown a valid token yet; the oldest idle one makes room for a new one."""
    peer_unauthenticated_max: int = 256
    """The same for one peer address. Nodes of a site may share one, and all connect when the hub is back."""
    node_connections_max: int = 400
    """Maximum number of connections of one node's token: at least its requests and its long polls."""
    chunk_seconds_max: float = 30.0
    """Timeout between two pieces of a body, and for sending a piece of a response."""
    slow_window_s: float = 10.0
    """In each span of this length a body must come with at least the speed below."""
    bytes_per_s_min: int = 1_024
    bytes_per_hour: int = 32 << 30
    """Maximum bytes per hour of one node's token, in bodies of requests and responses. What was not used in one hour is not added to the next."""
    memory_bytes_max: int = 256 << 20
    """Maximum bytes of bodies in memory at a time, of requests and of large responses."""
    node_memory_bytes_max: int = 32 << 20
    """The same for one node's token; other callers may have half of all."""

    def __post_init__(self) -> None:
        if not 1 <= self.blob_bytes_max <= BLOB_BYTES_MAX:
            raise ConfigError(f"a blob may have 1 to {BLOB_BYTES_MAX} bytes, not up to {self.blob_bytes_max}.")
        if not 1 <= self.body_bytes_max <= BODY_BYTES_MAX:
            raise ConfigError(f"a body may have 1 to {BODY_BYTES_MAX} bytes, not up to {self.body_bytes_max}.")
        if not 0 < self.rate_per_s < float("inf"):
            raise ConfigError(f"the rate must be a number of requests per second above zero, not {self.rate_per_s}.")
        if self.bytes_per_hour < 1:
            raise ConfigError(f"the bytes per hour must be a number above zero, not {self.bytes_per_hour}.")


class RateLimiter:
    """A bucket per caller, which fills steadily with what the caller may take: requests, bytes, or lines of the log.

    A bounded number of callers is remembered; the one that was silent longest is forgotten first, and starts with a full
    bucket when it returns.
    """

    def __init__(self, *, rate_per_s: float, burst: float, callers_max: int) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, burst)
        self._callers_max = callers_max
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def take(self, caller: str, now_s: float, *, times: float = 1.0, amount: float = 1.0) -> float:
        """Take an amount. Return 0 if it is granted, else the seconds until it would be. `times` multiplies the rate.

        Granted if there is at least one left: the rest of the amount is owed, so that even an amount larger than the bucket
        is granted at last, and those after it wait.
        """
        left = self._fill(caller, now_s, times)
        granted = left >= 1.0
        self._keep(caller, left - amount if granted else left, now_s)
        return 0.0 if granted else (1.0 - left) / (self._rate_per_s * times)

    def correct(self, caller: str, now_s: float, *, times: float = 1.0, amount: float) -> None:
        """Take an amount that was not known before, or, if it is below zero, give it back."""
        self._keep(caller, self._fill(caller, now_s, times) - amount, now_s)

    def _fill(self, caller: str, now_s: float, times: float) -> float:
        burst = self._burst * times
        left, at_s = self._left.get(caller, (burst, now_s))
        return min(burst, left + max(0.0, now_s - at_s) * self._rate_per_s * times)

    def _keep(self, caller: str, left: float, now_s: float) -> None:
        self._left[caller] = (left, now_s)
        self._left.move_to_end(caller)
        if len(self._left) > self._callers_max:
            self._left.popitem(last=False)


class LogLines:
    """Decides which rejections are logged: some per second of each caller and of all, so that nobody fills the log's disk.

    The callers with a token and those without have apart what they may log, so that the ones do not hide the others.
    """

    def __init__(self, *, callers_max: int) -> None:
        self._callers_max = callers_max
        self._of_caller = RateLimiter(rate_per_s=LINES_PER_S, burst=LINES_AT_ONCE, callers_max=callers_max)
        self._of_all = RateLimiter(rate_per_s=ALL_LINES_PER_S, burst=ALL_LINES_AT_ONCE, callers_max=2)
        self._left_out: Counter[str] = Counter()

    def take(self, caller: str, now_s: float, *, known: bool) -> bool:
        """Whether a line of this caller is logged. If not, it is counted."""
        if not self._of_caller.take(caller, now_s) and not self._of_all.take("known" if known else "unknown", now_s):
            return True
        self._left_out[caller if caller in self._left_out or len(self._left_out) < self._callers_max else "others"] += 1
        return False

    def left_out(self) -> Counter[str]:
        """Return how many lines of which caller were not logged since the last call."""
        found, self._left_out = self._left_out, Counter()
        return found


class BodyMemory:
    """Bytes of bodies that are in memory, in all and per caller."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._of_callers: Counter[str] = Counter()
        self.taken_bytes = 0

    def take(self, caller: str, amount_bytes: int, *, most_bytes: int) -> bool:
        """Take memory; False, and none is taken, if that is more than is left, or than one caller may have."""
        if self.taken_bytes + amount_bytes > self._bytes_max or self._of_callers[caller] + amount_bytes > most_bytes:
            return False
        self.taken_bytes += amount_bytes
        self._of_callers[caller] += amount_bytes
        return True

    def free(self, caller: str, amount_bytes: int) -> None:
        self.taken_bytes -= amount_bytes
        self._of_callers[caller] -= amount_bytes
        if not self._of_callers[caller]:
            del self._of_callers[caller]


class Slots:
    """Maximum number of requests at a time, in all and per node."""

    def __init__(self, slots_max: int, *, node_max: int) -> None:
        self._slots_max = slots_max
        self._node_max = node_max
        self._of_nodes: Counter[str] = Counter()
        self.taken = 0

    def is_full_of(self, node: str | None) -> bool:
        """Whether this node has all the slots that one node may have. None: the caller is no node."""
        return node is not None and self._of_nodes[node] >= self._node_max

    @contextlib.contextmanager
    def one(self, node: str | None = None) -> Iterator[bool]:
        """Hold a slot for as long as the context lasts; yields False, and holds none, if all are taken."""
        if self.taken >= self._slots_max or self.is_full_of(node):
            yield False
            return
        self.taken += 1
        if node is not None:
            self._of_nodes[node] += 1
        try:
            yield True
        finally:
            self.taken -= 1
            if node is not None:
                self._of_nodes[node] -= 1
                if not self._of_nodes[node]:
                    del self._of_nodes[node]


class DiskQuota:
    """Reserves space on the hub's disks, so that a full hub can still remove what was read.

    To record what consumers have passed and to remove what no reader needs, the log must be written. If blobs and epochs could
    take the last byte, nothing would ever become free again. So blobs are rejected first, then epochs; all else may use the
    reserve. Asked on the event loop for each blob and commit; looks at the disks a few times per second at most.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        has_reserve: Callable[[], bool] = lambda: True,
        usage: Callable[[Path], Any] = shutil.disk_usage,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directories`: one on each disk. `has_reserve`: False while the disk of the log is full."""
        self._directories = tuple(directories)
        self._has_reserve = has_reserve
        self._usage = usage
        self._clock_s = clock_s
        self._checked_s = float("-inf")
        self._free_share = 1.0
        self._free_bytes = float("inf")

    def check_blob(self) -> None:
        """Reject if only the reserve is left."""
        self._check(1.0)

    def check_epochs(self) -> None:
        """Reject if only the last part of the reserve is left."""
        self._check(1.0 / EPOCHS_SHARE)

    def free_bytes(self) -> float:
        """Return the space that is left for blobs; infinity: it is unknown."""
        self._free_now()
        return self._free_bytes

    def is_short(self) -> bool:
        """Whether there is so little space that the log should give back what it does not need."""
        return self._free_now() < SHORT_SHARE

    def _free_now(self) -> float:
        now_s = self._clock_s()
        if now_s - self._checked_s >= DISK_CHECK_INTERVAL_S:
            found = [self._free(directory) for directory in self._directories]
            self._checked_s = now_s
            self._free_share = min((share for share, _ in found), default=float("inf"))
            self._free_bytes = min((free_bytes for _, free_bytes in found), default=float("inf"))
        return self._free_share

    def _check(self, share: float) -> None:
        if self._free_now() < share or not self._has_reserve():
            raise Rejection(
                "storage",
                "the hub's disk is nearly full: what is left is reserved for removing what has been read. Free space, or let consumers "
                "read on. Nothing was kept; try again later.",
            )

    def _free(self, directory: Path) -> tuple[float, float]:
        """Return the free space as a multiple of the reserve, and the bytes of it that are not reserved."""
        try:
            usage = self._usage(directory)
        except OSError:
            # It is unknown; a write there will fail or not.
            return float("inf"), float("inf")
        reserve = max(1, min(RESERVED_BYTES_MAX, usage.total // RESERVED_SHARE))
        return usage.free / reserve, usage.free - reserve
