"""Many nodes in one process: each with a connection of its own that stays open, sending what a node sends for an epoch.

Written against bare sockets on one event loop, so that making the load takes as little as possible of the cores that the hub
needs. An epoch is the blobs that it names, one `PUT` after the other, then its commit: a node has one call under way at a time.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fordstone.hub.messages import Checkpoint, Commit, EpochEntry, Generation, LeaseRequest, StreamSegment
from fordstone.state.base import RunRef

PIPELINE = "bench"
STREAM = "readings"
ANSWER_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the nodes do."""

    nodes: int
    seconds: float
    settling_s: float
    """At the beginning, not counted."""
    segment_bytes: int = 2_048
    state_bytes: int = 0
    """Of the state that changes with an epoch; 0: no checkpoints are sent."""
    period_s: float | None = 1.0
    """Between two epochs of a node; None: the next as soon as one is committed."""


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    commits: int = 0
    errors: int = 0
    first_error: str = ""
    latencies_s: list[float] = field(default_factory=list)
    """From when an epoch was due to when its commit was answered."""
    counted_s: float = 0.0

    @property
    def commits_per_s(self) -> float:
        return self.commits / self.counted_s


class _Line(asyncio.Protocol):
    """One connection; one request under way."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._data = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the hub closed the connection: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end or self._answer is None or self._answer.done():
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(body) >= length:
            self._data = b""
            self._answer.set_result((int(head[9:12]), body))

    def ask(self, method: str, path: str, body: bytes) -> asyncio.Future[tuple[int, bytes]]:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Node:
    def __init__(self, number: int, load: Load, line: _Line) -> None:
        self._path = f"/v1/pipelines/{PIPELINE}/nodes/node-{number}"
        self._load, self._line = load, line
        self._random = random.Random(number)
        self._generation: Generation | None = None
        self._epoch = 0

    async def lease(self) -> None:
        asked = LeaseRequest(holder=self._path.rpartition("/")[2], local=1, start="s")
        answer = await self._called("POST", f"{self._path}/lease", msgspec.json.encode(asked), 200)
        self._generation = msgspec.convert(msgspec.json.decode(answer)["generation"], Generation)

    async def commit(self) -> None:
        """One epoch, blobs first."""
        assert self._generation is not None
        self._epoch += 1
        segment = await self._put(self._load.segment_bytes, rows=64)
        checkpoint = None
        if self._load.state_bytes:
            state = await self._put(self._load.state_bytes, rows=64)
            manifest = await self._put(1_024, rows=0)
            checkpoint = Checkpoint(epoch=self._epoch, manifest=manifest, state=(state,))
        entry = EpochEntry(
            epoch=self._epoch,
            streams={STREAM: StreamSegment(runs=(segment,), watermark_us=self._epoch)},
            created_us=self._epoch,
        )
        body = msgspec.json.encode(Commit(generation=self._generation, epochs=(entry,), checkpoint=checkpoint))
        await self._called("POST", f"{self._path}/epochs/{self._epoch}-{self._epoch}", body, 201)

    async def _put(self, size_bytes: int, *, rows: int) -> RunRef:
        data = self._random.randbytes(size_bytes)
        digest = hashlib.sha256(data).hexdigest()
        await self._called("PUT", f"/v1/blobs/{digest}", data, 201)
        return RunRef(digest=digest, size_bytes=size_bytes, rows=rows)

    async def _called(self, method: str, path: str, body: bytes, status: int) -> bytes:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            found, answer = await self._line.ask(method, path, body)
        if found != status:
            raise ConnectionError(f"{method} {path[:80]} was answered with {found}: {answer[:200]!r}")
        return answer


def drive(netloc: tuple[str, int], load: Load, *, at_edge: Callable[[], None] = lambda: None) -> Outcome:
    """Have the nodes commit. `at_edge` is called when counting begins, and when it ends."""
    # What is on its way lives for milliseconds and has no cycles: looking for some would only show as latency.
    gc.collect()
    gc.disable()
    try:
        return asyncio.run(_drive(netloc, load, at_edge))
    finally:
        gc.enable()


async def _drive(netloc: tuple[str, int], load: Load, at_edge: Callable[[], None]) -> Outcome:
    loop = asyncio.get_running_loop()
    lines = [(await loop.create_connection(_Line, *netloc))[1] for _ in range(load.nodes)]
    nodes = [_Node(number, load, line) for number, line in enumerate(lines)]
    for node in nodes:
        await node.lease()
    outcome = Outcome()
    began_s = time.monotonic()
    count_from_s, until_s = began_s + load.settling_s, began_s + load.settling_s + load.seconds

    async def live(number: int, node: _Node) -> None:
        # Nodes are spread over a period evenly, as clocks that nobody sets together are.
        due_s = began_s + (load.period_s or 0.0) * number / load.nodes
        while due_s < until_s:
            await asyncio.sleep(due_s - time.monotonic())
            try:
                await node.commit()
            except (ConnectionError, TimeoutError) as error:
                outcome.errors += 1
                outcome.first_error = outcome.first_error or f"{type(error).__name__}: {error}"
                return
            now_s = time.monotonic()
            if count_from_s <= now_s < until_s:
                outcome.commits += 1
                outcome.latencies_s.append(now_s - due_s)
            due_s = now_s if load.period_s is None else due_s + load.period_s

    async def tell() -> None:
        for edge_s in (count_from_s, until_s):
            await asyncio.sleep(edge_s - time.monotonic())
            at_edge()

    await asyncio.gather(tell(), *(live(number, node) for number, node in enumerate(nodes)))
    outcome.counted_s = load.seconds
    for line in lines:
        line.close()
    return outcome
