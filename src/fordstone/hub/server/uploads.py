"""What nodes have uploaded: which blobs a node may name and read, and how much of the disk it may take.

A node may name in a commit, and read, only blobs that it has uploaded itself or that its own kept checkpoints have. Else
a digest that a node has guessed or learned would be enough to read what another one has sent. What was uploaded is known in
memory only: after a restart of the hub, blobs that no commit names yet are missing, and nodes send them again.

A node's blobs, and its rows in the log, may take as many bytes as are still free: one node alone gets half of what there was, n nodes get
one part in n + 1 each, and some is always left for those that have little. Commits count too: rows that name one blob very often, or none.

Used on the event loop, except for `has`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from fordstone.hub.messages import Rejection
from fordstone.hub.store.log_records import NodeBytes
from fordstone.hub.store.retention import HOUR_US

KEPT_S: Final = HOUR_US / 1e6
"""Uploads that no commit has named are known for once to twice this time; retention removes them after it."""
DIGESTS_MAX: Final = 100_000
"""Maximum number of uploads of one node that no commit has named yet: more than a commit names."""
READ_EVERY_S: Final = 5.0
"""How often the log is asked for what a node has, while it has too much."""


@dataclass(slots=True)
class _Node:
    uploads: dict[bytes, int] = field(default_factory=dict)
    """Digests with the bytes that they added to the disk, which no commit has named yet."""
    older: dict[bytes, int] = field(default_factory=dict)
    """Those from before `since_s`."""
    since_s: float = 0.0
    uploaded_bytes: int = 0
    """The sum of both."""
    committed_bytes: int | None = None
    """What the log has of the node, at most; None: not read yet."""
    read_s: float = float("-inf")
    coming_bytes: int = 0
    """Of uploads and commits in progress."""
    coming: int = 0
    """Uploads in progress."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def bytes(self) -> int:
        return (self.committed_bytes or 0) + self.uploaded_bytes + self.coming_bytes


class NodeUploads:
    """One per hub. Nodes are those of tokens, so their number is bounded."""

    def __init__(
        self,
        *,
        free_bytes: Callable[[], float],
        blobs_on_disk: bool = True,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`free_bytes`: the space left for blobs and the log. `blobs_on_disk`: False if blobs are elsewhere, and only the log counts."""
        self._free_bytes = free_bytes
        self._blobs_on_disk = blobs_on_disk
        self._clock_s = clock_s
        self._nodes: dict[str, _Node] = {}

    def has(self, node: str, digest: str) -> bool:
        """Whether the node has uploaded this blob lately. Called from any thread."""
        known = self._nodes.get(node)
        key = bytes.fromhex(digest)
        return known is not None and (key in known.uploads or key in known.older)

    def add(self, node: str, digest: str, size_bytes: int, *, new: bool) -> None:
        """Remember an upload. `new`: it was not stored before."""
        known = self._node(node)
        key = bytes.fromhex(digest)
        if key not in known.uploads and key not in known.older:
            known.uploads[key] = size_bytes if new and self._blobs_on_disk else 0
            known.uploaded_bytes += known.uploads[key]

    def commit(self, node: str, digests: Iterable[str], *, log_bytes: int = 0) -> None:
        """Forget uploads that the log has now. `log_bytes`: what the commit added to it."""
        known = self._node(node)
        if known.committed_bytes is not None:
            known.committed_bytes += log_bytes
        for digest in digests:
            key = bytes.fromhex(digest)
            for uploads in (known.uploads, known.older):
                size_bytes = uploads.pop(key, 0)
                known.uploaded_bytes -= size_bytes
                if known.committed_bytes is not None:
                    known.committed_bytes += size_bytes

    def is_unread(self, node: str, size_bytes: int) -> bool:
        """Whether `read` should be called before an upload or a commit: the log was not asked yet, or not lately, and the node has too much."""
        known = self._node(node)
        if known.committed_bytes is None:
            return True
        return known.bytes + size_bytes > self._free_bytes() and self._clock_s() - known.read_s >= READ_EVERY_S

    def reading(self, node: str) -> asyncio.Lock:
        """Return the lock under which the log is asked for what the node has, which may be much."""
        return self._node(node).reading

    def read(self, node: str, found: NodeBytes) -> None:
        """Take over what the log has of the node."""
        known = self._node(node)
        known.committed_bytes = found.log + (found.blobs if self._blobs_on_disk else 0)
        known.read_s = self._clock_s()

    def read_again(self, node: str | None = None) -> None:
        """Ask the log again for what a node has before its next upload, or for what each node has: much may be gone."""
        for name, known in self._nodes.items():
            if node in {None, name}:
                known.committed_bytes = None

    @contextlib.contextmanager
    def upload(self, node: str, size_bytes: int) -> Iterator[None]:
        """Count an upload while it is in progress; `Rejection` if the node has too much already, or too many that no commit has named."""
        known = self._node(node)
        if len(known.uploads) + len(known.older) + known.coming >= DIGESTS_MAX:
            raise Rejection(
                "storage",
                f"node {node} has uploaded {DIGESTS_MAX} blobs that none of its commits has named, which is the maximum. Commit them, or wait "
                "two hours until they are forgotten.",
            )
        known.coming += 1
        try:
            with self.coming(node, size_bytes if self._blobs_on_disk else 0):
                yield
        finally:
            known.coming -= 1

    @contextlib.contextmanager
    def coming(self, node: str, size_bytes: int) -> Iterator[None]:
        """Count bytes while they come; `Rejection` if the node has too many already."""
        known = self._node(node)
        if known.bytes + size_bytes > self._free_bytes():
            raise Rejection(
                "storage",
                f"node {node} has {known.bytes} bytes at the hub, whose disk has no more than that left for all nodes: let "
                "consumers read on, or free space. Nothing was kept; try again later.",
            )
        known.coming_bytes += size_bytes
        try:
            yield
        finally:
            known.coming_bytes -= size_bytes

    def _node(self, node: str) -> _Node:
        known, now_s = self._nodes.get(node), self._clock_s()
        if known is None:
            known = self._nodes[node] = _Node(since_s=now_s)
        if now_s - known.since_s >= KEPT_S:
            known.uploaded_bytes -= sum(known.older.values())
            known.older, known.uploads, known.since_s = known.uploads, {}, now_s
        return known
