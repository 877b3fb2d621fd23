"""One consumer for all partitions that a source reads, and what it has fetched and nobody has taken yet.

The client library fetches on threads of its own; `take` returns what has arrived, and waits only if it is asked to. A partition whose messages
are not taken is paused, so that what is held stays bounded.

Used by several tasks: each reads its own partitions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from fordstone.connectors.kafka.client import At, Cluster
from fordstone.connectors.kafka.rows import Messages, last_header

CONSUME_MESSAGES: Final = 10_000
QUEUED_KBYTES: Final = 32 * 1024
"""Of fetched messages that the library holds."""
HELD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of fetched messages that partitions hold together, about."""
MESSAGE_BYTES: Final = 256
"""What a message takes in memory beside its value."""
FETCH_WAIT_MS: Final = 100
FETCH_WAIT_BRIEF_MS: Final = 5
"""How long a broker waits for messages before it says that there are none. Briefly for readers that end somewhere: only then it is known
that nothing is left before an end that no message marks."""
MAX_POLL_MS: Final = 86_400_000
POLL_S: Final = 0.05
_EOF: Final = KafkaError._PARTITION_EOF  # noqa: SLF001 - codes of the client library begin so


@dataclass(slots=True, eq=False)
class Fetched:
    """What has arrived of one partition. The fetcher's own, but for the one who opened it."""

    at: At
    next_offset: int
    """Of the next message or end that is taken: everything before it was taken, or is not there."""
    messages: list[Message] = field(default_factory=list)
    held_bytes: int = 0
    end: int = -1
    """Where the last answer of a broker ended, without messages after it."""
    error: KafkaError | None = None
    paused: bool = False


class FetchedMessages(Messages):
    """Messages of the client library."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    @property
    def offsets(self) -> np.ndarray:
        """They increase, and mostly none is left out: then the first and the last say all."""
        first, last = self._messages[0].offset(), self._messages[-1].offset()
        if last - first == len(self._messages) - 1:
            return np.arange(first, last + 1, dtype=np.int64)
        return np.array([one.offset() for one in self._messages], dtype=np.int64)

    def values(self) -> list[Any]:
        return [one.value() for one in self._messages]

    def keys(self) -> list[bytes | None]:
        return [one.key() for one in self._messages]

    def partitions(self) -> list[int]:
        return [one.partition() for one in self._messages]

    def times_ms(self) -> list[int | None]:
        times = [one.timestamp() for one in self._messages]
        return [None if what == TIMESTAMP_NOT_AVAILABLE else at for what, at in times]

    def headers(self, name: str) -> list[bytes | None]:
        return [last_header(one.headers(), name) for one in self._messages]


class Fetcher:
    """Fetches the partitions that are open."""

    def __init__(self, cluster: Cluster, *, group: str, brief: bool) -> None:
        """`brief`: the reads end somewhere."""
        self._lock = threading.Lock()
        self._open: dict[At, Fetched] = {}
        wait_ms = FETCH_WAIT_BRIEF_MS if brief else FETCH_WAIT_MS
        config = {
            **cluster.config(
                fetch_queue_backoff_ms=5, queued_max_messages_kbytes=QUEUED_KBYTES, fetch_wait_max_ms=wait_ms
            ),
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "max.poll.interval.ms": MAX_POLL_MS,
        }
        self._consumer = cluster.made(Consumer, config)

    def open(self, at: At, offset: int) -> Fetched:
        """Fetch a partition from an offset on. Another one that had it open gets no more."""
        with self._lock:
            if at in self._open:
                self._consumer.incremental_unassign([TopicPartition(*at)])
            self._open[at] = fetched = Fetched(at, offset)
            self._consumer.incremental_assign([TopicPartition(*at, offset)])
        return fetched

    def close_partition(self, fetched: Fetched) -> None:
        with self._lock:
            if self._open.get(fetched.at) is fetched:
                del self._open[fetched.at]
                self._consumer.incremental_unassign([TopicPartition(*fetched.at)])

    def take(self, fetched: Fetched, rows_max: int, *, before: int | None, wait_s: float = 0.0) -> list[Message]:
        """Return messages of a partition, before an offset, and move its `next_offset` past them.

        It may move without messages: where there is nothing up to `before`, or to the end. With `wait_s`, wait until it has moved.
        """
        deadline = time.monotonic() + wait_s
        while True:
            with self._lock:
                if not fetched.messages:
                    self._consume(POLL_S if wait_s and time.monotonic() < deadline else 0.0)
                if fetched.error is not None:
                    raise KafkaException(fetched.error)
                was = fetched.next_offset
                messages = self._taken(fetched, rows_max, before)
            if messages or fetched.next_offset > was or time.monotonic() >= deadline:
                return messages

    def commit(self, offsets: Sequence[tuple[At, int]]) -> None:
        """Publish offsets of the group, in the background."""
        with self._lock:
            self._consumer.commit(offsets=[TopicPartition(*at, offset) for at, offset in offsets], asynchronous=True)

    def close(self) -> None:
        with self._lock:
            self._open.clear()
            self._consumer.close()

    def _taken(self, fetched: Fetched, rows_max: int, before: int | None) -> list[Message]:
        held = fetched.messages
        count = min(rows_max, len(held))
        if before is not None:
            # The few that are beyond it were fetched along.
            while count and held[count - 1].offset() >= before:
                count -= 1
        messages = held[:count]
        del held[:count]
        if messages:
            fetched.held_bytes -= _size_bytes(messages) if held else fetched.held_bytes
            fetched.next_offset = messages[-1].offset() + 1
        # Offsets without a message: marks and messages of transactions that ended, or compacted ones.
        reached = held[0].offset() if held else max(fetched.next_offset, fetched.end)
        if before is not None and reached >= before:
            fetched.next_offset = max(fetched.next_offset, before)
        elif not held:
            fetched.next_offset = reached
        if fetched.paused and fetched.held_bytes < self._share() // 2:
            fetched.paused = False
            self._consumer.resume([TopicPartition(*fetched.at)])
        return messages

    def _consume(self, timeout_s: float) -> None:
        arrived = self._consumer.consume(CONSUME_MESSAGES, timeout=0.0)
        if not arrived and timeout_s:
            one = self._consumer.poll(timeout_s)
            arrived = [] if one is None else [one]
        for fetched, messages in self._by_partition(arrived):
            good = [one for one in messages if one.error() is None]
            fetched.messages += good
            fetched.held_bytes += _size_bytes(good)
            for message in messages if len(good) < len(messages) else ():
                error = message.error()
                if error is None or (message.topic(), message.partition()) != fetched.at:
                    continue
                if error.code() == _EOF:
                    fetched.end = max(fetched.end, message.offset())
                else:
                    fetched.error = error
        share = self._share()
        for fetched in self._open.values():
            if fetched.held_bytes > share and not fetched.paused:
                fetched.paused = True
                self._consumer.pause([TopicPartition(*fetched.at)])

    def _by_partition(self, arrived: Sequence[Message]) -> Iterable[tuple[Fetched, Sequence[Message]]]:
        """Sort messages by the partitions that are open. What the library says of none of them is left out."""
        if len(self._open) == 1:
            ((topic, number), only), *_ = self._open.items()
            first, last = arrived[0] if arrived else None, arrived[-1] if arrived else None
            # The library leaves out what it had fetched before a partition was closed, so only this one can be there, or none.
            if (
                first is not None
                and last is not None
                and all(one.topic() == topic and one.partition() == number for one in (first, last))
            ):
                return [(only, arrived)]
        sorted_out: dict[At, list[Message]] = {at: [] for at in self._open}
        for message in arrived:
            mine = sorted_out.get((message.topic(), message.partition()))
            if mine is not None:
                mine.append(message)
        return [(self._open[at], messages) for at, messages in sorted_out.items() if messages]

    def _share(self) -> int:
        return HELD_BYTES_MAX // max(1, len(self._open))


def _size_bytes(messages: Sequence[Message]) -> int:
    return sum(map(len, messages)) + MESSAGE_BYTES * len(messages)
