"""What the hub has of one stream: its epochs by node, and the thread that hears of new ones.

`StreamIndex` is a list in memory, filled page by page in the order in which the hub committed; it reads nothing itself.
`Follower` keeps one up to date with long polls, so that nobody who reads ever waits for news.

Invariants: the epochs of a node grow; an index is shown only when it was complete once, so that all nodes that the hub knew
at the start are seen together; a hub that is away stops nothing here.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Mapping
from operator import attrgetter
from typing import Final, Protocol

from fordstone.errors import HubAwayError, HubRefusedError
from fordstone.hub.messages import ConsumerPosition, StreamEpoch, StreamPage
from fordstone.state.base import RunRef

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 20.0
"""How long the hub may keep a question for news."""
GATHER_SECONDS: Final = 0.05
"""Between two polls: a thousand nodes that commit once a second are not asked about a thousand times."""
BACK_OFF_FIRST_SECONDS: Final = 0.2
BACK_OFF_MAX_SECONDS: Final = 15.0
EPOCHS_A_READ_MAX: Final = 1_000
_EPOCH: Final = attrgetter("epoch")


class HubReading(Protocol):
    """What is needed of `hub.client.HubClient`."""

    def stream_page(self, pipeline: str, stream: str, *, after: int = 0, wait_s: float = 0.0) -> StreamPage:
        """What was committed after `after`."""
        ...

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        """A blob, checked."""
        ...

    def consumer(self, pipeline: str, consumer: str, position: ConsumerPosition) -> None:
        """Register, or say how far we have come."""
        ...


class StreamIndex:
    """Epochs of one stream, by node. Used from several threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._grown = threading.Condition(self._mutex)
        self._epochs: dict[str, list[StreamEpoch]] = {}
        self._last: dict[str, int] = {}
        self._ended: set[str] = set()
        self._nodes: tuple[str, ...] = ()
        self.after = 0
        """What to ask the hub with next."""
        self.complete = False
        """Whether all that the hub had has been listed, at least once."""
        self.blobs: str | None = None
        self.entries = 0
        self.first_entries: int | None = None
        """How many there were when it was first complete."""

    def add(self, page: StreamPage) -> None:
        """Take a page in. One that was taken in before, or by another thread meanwhile, changes nothing."""
        with self._grown:
            for entry in page.epochs:
                if entry.epoch > self._last.get(entry.node, 0):
                    self._epochs.setdefault(entry.node, []).append(entry)
                    self._last[entry.node] = entry.epoch
                    self.entries += 1
                    (self._ended.add if entry.ended else self._ended.discard)(entry.node)
            if len(self._nodes) != len(self._last):
                self._nodes = tuple(sorted(self._last))
            self.after = max(self.after, page.next)
            self.blobs = page.blobs
            if not page.more and not self.complete:
                self.complete, self.first_entries = True, self.entries
            self._grown.notify_all()

    def nodes(self) -> tuple[str, ...]:
        """All nodes that have epochs, or had some; in order of their names."""
        with self._mutex:
            return self._nodes if self.complete else ()

    def last(self, node: str) -> int:
        """The newest epoch of a node; 0: none."""
        with self._mutex:
            return self._last.get(node, 0)

    def rests(self, node: str, position: int) -> bool:
        """Whether a node said with its newest epoch that it had come to an end, and that epoch has been read."""
        with self._mutex:
            return node in self._ended and position >= self._last[node]

    def ends_before(self, node: str, position: int) -> int | None:
        """The newest epoch of a node, if what was read before goes beyond it: the hub lets go of the oldest first, so it was set back."""
        with self._mutex:
            last = self._last.get(node, 0)
            return last if self.complete and 0 < last < position else None

    def behind(
        self, node: str, position: int, rows_max: int, *, until: int | None = None, epochs_max: int = EPOCHS_A_READ_MAX
    ) -> list[StreamEpoch]:
        """The epochs behind `position`, up to about `rows_max` rows; at least one if there is one."""
        with self._mutex:
            known = self._epochs.get(node, [])
            found: list[StreamEpoch] = []
            rows = 0
            for number in range(bisect_right(known, position, key=_EPOCH), len(known)):
                entry = known[number]
                rows += sum(run.rows for run in entry.runs)
                over = found and (rows > rows_max or len(found) >= epochs_max)
                if over or (until is not None and entry.epoch > until):
                    break
                found.append(entry)
                if rows >= rows_max:
                    break
            return found

    def forget(self, positions: Mapping[str, int]) -> None:
        """Drop what nobody will ask for again. The nodes stay."""
        with self._mutex:
            for node, position in positions.items():
                known = self._epochs.get(node)
                if known:
                    gone = bisect_right(known, position, key=_EPOCH)
                    del known[:gone]
                    self.entries -= gone

    def wait_for(self, node: str, epoch: int, seconds: float) -> bool:
        """Wait until an epoch is known, for so long at most; says whether it is."""
        with self._grown:
            return self._grown.wait_for(lambda: self._last.get(node, 0) >= epoch, seconds)


class Follower:
    """A thread that keeps an index up to date, and tells the hub how far its consumer has come. Used once."""

    def __init__(self, client: HubReading, index: StreamIndex, *, pipeline: str, stream: str, consumer: str) -> None:
        self._client = client
        self._index = index
        self._pipeline = pipeline
        self._stream = stream
        self._consumer = consumer
        self._stopped = threading.Event()
        self._asked = threading.Event()
        self._mutex = threading.Lock()
        self._told: dict[str, int] = {}
        self._to_tell: dict[str, int] | None = {}
        """What the hub does not know yet: at first, that we are there."""
        self.away = False
        """The hub did not answer when it was last asked."""
        self._failures = 0
        self._refused: HubRefusedError | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name=f"hub-{stream}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End soon: a poll that the hub has not answered yet is not waited for."""
        self._stopped.set()

    def refusal(self) -> HubRefusedError | None:
        """What the hub refused us with when it was last asked, if it did. Raises what the thread failed with: a bug of ours."""
        if self._failure is not None:
            raise self._failure
        return self._refused

    @property
    def asked(self) -> bool:
        """Whether the hub has told all it had, or turned out to be away."""
        return self._asked.is_set()

    def wait_for_first(self, seconds: float) -> None:
        """Wait until the hub has told all it had, or turned out to be away."""
        self._asked.wait(seconds)

    def tell(self, positions: Mapping[str, int]) -> None:
        """Let the hub know, with the next poll, that what lies before these positions may go."""
        with self._mutex:
            news = {node: epoch for node, epoch in positions.items() if epoch > self._told.get(node, 0)}
            if news:
                self._to_tell = {**(self._to_tell or {}), **news}

    def _follow(self) -> None:
        try:
            self._take_turns()
        except Exception as error:
            log.exception("following the hub failed", extra={"pipeline": self._pipeline, "stream": self._stream})
            self._failure = error
            self._asked.set()

    def _take_turns(self) -> None:
        while not self._stopped.is_set():
            self._stopped.wait(self.turn())

    def turn(self) -> float:
        """Tell and ask once; gives the seconds to wait until the next time. Called by the thread, or by who has none."""
        try:
            self._tell()
            wait_s = POLL_SECONDS if self._index.complete and self.asked else 0.0
            page = self._client.stream_page(self._pipeline, self._stream, after=self._index.after, wait_s=wait_s)
        except (HubAwayError, HubRefusedError) as error:
            self._failed(error)
            self._failures += 1
            back_off_s: float = BACK_OFF_FIRST_SECONDS * 2 ** min(self._failures, 16)
            return min(back_off_s, BACK_OFF_MAX_SECONDS)
        self._index.add(page)
        if self.away:
            log.info("hub back", extra={"pipeline": self._pipeline, "stream": self._stream})
        self.away, self._refused, self._failures = False, None, 0
        if page.more:
            return 0.0
        self._asked.set()
        return GATHER_SECONDS

    def _failed(self, error: HubAwayError | HubRefusedError) -> None:
        if not self.away:
            log.warning("hub away", extra={"pipeline": self._pipeline, "stream": self._stream, "problem": str(error)})
        self._refused = error if isinstance(error, HubRefusedError) else None
        self.away = True
        self._asked.set()

    def _tell(self) -> None:
        """Tell what there is to tell; what the hub does not take is told again with more, later."""
        with self._mutex:
            news, self._to_tell = self._to_tell, None
        if news is None:
            return
        try:
            tell(self._client, self._pipeline, self._stream, self._consumer, news)
        except HubAwayError:
            with self._mutex:
                self._to_tell = {**news, **(self._to_tell or {})}
            raise
        except HubRefusedError as error:
            # Rows stay at the hub for longer than they need to: a pity, but no reason to stop.
            log.warning("hub refused a position", extra={"consumer": self._consumer, "problem": str(error)})
            return
        self._told |= news


def tell(client: HubReading, pipeline: str, stream: str, consumer: str, positions: Mapping[str, int]) -> None:
    """Register the consumer, or say how far it has come."""
    client.consumer(pipeline, consumer, ConsumerPosition(streams={stream: dict(positions)}))
