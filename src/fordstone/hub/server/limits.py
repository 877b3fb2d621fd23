"""The bounds that the hub keeps towards its clients: how much, how often, how many at once, how slowly.

Pure but for the clock values that callers hand in. Who is refused what, and with which words, is `guard`'s business.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fordstone.errors import ConfigError
from fordstone.hub.messages import BLOB_BYTES_MAX, BODY_BYTES_MAX

SHARED_TIMES: Final = 20
"""So many times the rate of one node has whoever stands for many: the center, an admin, a peer address without tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one hub bears."""

    blob_bytes_max: int = BLOB_BYTES_MAX
    body_bytes_max: int = BODY_BYTES_MAX
    rate_per_s: float = 500.0
    """Requests of one token."""
    burst_s: float = 4.0
    """So many seconds' worth of requests may come at once."""
    buckets_max: int = 20_000
    requests_max: int = 2_000
    """At once, without those that wait for news."""
    polls_max: int = 5_000
    """Requests that wait for news, at once."""
    node_requests_max: int = 64
    """Of those above, one node's token: else one node could take all the room there is."""
    node_polls_max: int = 256
    connections_max: int = 20_000
    chunk_seconds_max: float = 30.0
    """Between two pieces of a body, and for a piece of an answer to be taken."""
    slow_after_s: float = 10.0
    """A body that takes longer than this must have come with at least the speed below."""
    bytes_per_s_min: int = 1_024

    def __post_init__(self) -> None:
        if not 1 <= self.blob_bytes_max <= BLOB_BYTES_MAX:
            raise ConfigError(f"a blob may have 1 to {BLOB_BYTES_MAX} bytes, not up to {self.blob_bytes_max}.")
        if not 1 <= self.body_bytes_max <= BODY_BYTES_MAX:
            raise ConfigError(f"a body may have 1 to {BODY_BYTES_MAX} bytes, not up to {self.body_bytes_max}.")
        if not 0 < self.rate_per_s < float("inf"):
            raise ConfigError(f"the rate must be a number of requests a second above zero, not {self.rate_per_s}.")

    def too_slow(self, received_bytes: int, seconds: float) -> bool:
        """Whether a body comes so slowly that it only holds a place."""
        return seconds > self.slow_after_s and received_bytes < self.bytes_per_s_min * seconds


class Buckets:
    """How often each caller may come: a bucket of requests that fills steadily. As many callers are known as fit.

    Whoever has not come for longest is forgotten first; who comes anew begins with a full bucket.
    """

    def __init__(self, *, rate_per_s: float, burst: float, buckets_max: int) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, burst)
        self._buckets_max = buckets_max
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def take(self, caller: str, now_s: float, *, times: float = 1.0) -> float:
        """Take a request out. 0: granted; else in how many seconds there will be one. `times`: of the usual rate."""
        rate, burst = self._rate_per_s * times, self._burst * times
        left, at_s = self._left.get(caller, (burst, now_s))
        left = min(burst, left + max(0.0, now_s - at_s) * rate)
        granted = left >= 1.0
        self._left[caller] = (left - 1.0 if granted else left, now_s)
        self._left.move_to_end(caller)
        if len(self._left) > self._buckets_max:
            self._left.popitem(last=False)
        return 0.0 if granted else (1.0 - left) / rate


class Slots:
    """How many may be inside at once, and how many of them may be one node's."""

    def __init__(self, slots_max: int, *, node_max: int) -> None:
        self._slots_max = slots_max
        self._node_max = node_max
        self._of_nodes: Counter[str] = Counter()
        self.taken = 0

    def is_full_of(self, node: str | None) -> bool:
        """Whether this node has all the slots that one may have. None: who asks is no node."""
        return node is not None and self._of_nodes[node] >= self._node_max

    @contextlib.contextmanager
    def one(self, node: str | None = None) -> Iterator[bool]:
        """Be inside for as long as the context lasts; gives False, and takes nothing, if all slots are taken."""
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
