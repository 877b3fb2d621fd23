"""The limits that the hub sets its clients: size, rate, number at a time, speed, and space on its disks.

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
DISK_CHECK_INTERVAL_S: Final = 0.25


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
    chunk_seconds_max: float = 30.0
    """Timeout between two pieces of a body, and for sending a piece of a response."""
    slow_after_s: float = 10.0
    """A body that takes longer than this must have come with at least the speed below."""
    bytes_per_s_min: int = 1_024

    def __post_init__(self) -> None:
        if not 1 <= self.blob_bytes_max <= BLOB_BYTES_MAX:
            raise ConfigError(f"a blob may have 1 to {BLOB_BYTES_MAX} bytes, not up to {self.blob_bytes_max}.")
        if not 1 <= self.body_bytes_max <= BODY_BYTES_MAX:
            raise ConfigError(f"a body may have 1 to {BODY_BYTES_MAX} bytes, not up to {self.body_bytes_max}.")
        if not 0 < self.rate_per_s < float("inf"):
            raise ConfigError(f"the rate must be a number of requests per second above zero, not {self.rate_per_s}.")

    def bytes_max(self, *, blob: bool) -> int:
        return self.blob_bytes_max if blob else self.body_bytes_max

    def too_slow(self, received_bytes: int, seconds: float) -> bool:
        """Whether a body comes so slowly that it only occupies a slot."""
        return seconds > self.slow_after_s and received_bytes < self.bytes_per_s_min * seconds


class RateLimiter:
    """A token bucket per caller, which fills steadily.

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

    def take(self, caller: str, now_s: float, *, times: float = 1.0) -> float:
        """Take one request. Return 0 if it is granted, else the seconds until it would be. `times` multiplies the rate."""
        rate, burst = self._rate_per_s * times, self._burst * times
        left, at_s = self._left.get(caller, (burst, now_s))
        left = min(burst, left + max(0.0, now_s - at_s) * rate)
        granted = left >= 1.0
        self._left[caller] = (left - 1.0 if granted else left, now_s)
        self._left.move_to_end(caller)
        if len(self._left) > self._callers_max:
            self._left.popitem(last=False)
        return 0.0 if granted else (1.0 - left) / rate


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
        usage: Callable[[Path], Any] = shutil.disk_usage,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directories`: one on each disk."""
        self._directories = tuple(directories)
        self._usage = usage
        self._clock_s = clock_s
        self._checked_s = float("-inf")
        self._free_share = 1.0

    def check_blob(self) -> None:
        """Reject if only the reserve is left."""
        self._check(1.0)

    def check_epochs(self) -> None:
        """Reject if only the last part of the reserve is left."""
        self._check(1.0 / EPOCHS_SHARE)

    def _check(self, share: float) -> None:
        now_s = self._clock_s()
        if now_s - self._checked_s >= DISK_CHECK_INTERVAL_S:
            self._checked_s, self._free_share = now_s, min(map(self._free, self._directories), default=float("inf"))
        if self._free_share < share:
            raise Rejection(
                "storage",
                "the hub's disk is nearly full: what is left is reserved for removing what has been read. Free space, or let consumers "
                "read on. Nothing was kept; try again later.",
            )

    def _free(self, directory: Path) -> float:
        """Return the free space as a multiple of the reserve."""
        try:
            usage = self._usage(directory)
        except OSError:
            # It is unknown; a write there will fail or not.
            return float("inf")
        return float(usage.free / max(1, min(RESERVED_BYTES_MAX, usage.total // RESERVED_SHARE)))
