"""Who reads and writes at the hub without an engine: a plain reader of the stream that crosses, and a publisher of controls.

The reader keeps what it has read in two parts, what is durable and what a crash takes back, and tells the hub only the first.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

import polars as pl
from tests.simulation.fleet_ledger import TABLE, Ledger
from tests.simulation.fleet_network import Wire
from tests.simulation.fleet_scenario import CONTROL, CUT, PIPELINE
from tests.simulation.fleet_tally import Fault
from tests.simulation.rows import SimulationError
from tests.simulation.simulator import SimClock

from fordstone.epochs.run_file import decode_run, encode_run
from fordstone.errors import HubAwayError, HubRefusedError
from fordstone.hub.client.reader import START
from fordstone.hub.messages import (
    ConsumerPosition,
    ControlPublish,
    EpochRange,
    EpochsRequest,
    NodeEpochs,
    NodePosition,
    NodeStop,
    StreamEpoch,
)
from fordstone.lang.duration import TIME_MIN_US

TAP: Final = "tap"
POLL_US: Final = 20_000
KEYS: Final = 4


class Tap:
    """Reads every epoch of every node, in order."""

    def __init__(self, wire: Wire, clock: SimClock, ledger: Ledger) -> None:
        self.read: dict[str, list[tuple[StreamEpoch, list[pl.DataFrame]]]] = {}
        """By node, what is durable."""
        self.stopped: dict[str, NodeStop] = {}
        """Nodes that cannot be read on until an operator has said how."""
        self._wire = wire
        self._clock = clock
        self._ledger = ledger
        self._volatile: dict[str, list[tuple[StreamEpoch, list[pl.DataFrame]]]] = {}
        self._passed: dict[str, NodePosition] = {}
        """By node, the durable position."""
        self._reached: dict[str, NodePosition] = {}
        """By node, the position after what was read since."""
        self._listed: deque[tuple[str, StreamEpoch | NodePosition]] = deque()
        """Epochs, and positions after epochs that are passed over."""
        self._news: dict[str, int] = {}
        """The newest epoch of nodes that have more than what was listed."""
        self._log_id: str | None = None
        self._after = 0
        self._poll_at_us = 0
        self._untold = False

    def position(self, node: str) -> int:
        """The last epoch that is durably read."""
        return self._passed.get(node, START).epoch

    def crash(self) -> None:
        """Forget what is not durable, and what was listed."""
        self._volatile.clear()
        self._reached.clear()
        self.stopped.clear()
        self._listed.clear()
        self._news.clear()
        self._after = 0

    def step(self) -> bool:
        """Read an epoch, or keep what was read, or tell the hub, or ask for more."""
        if self._clock.now_us < self._poll_at_us:
            return False
        try:
            self._advance()
        except HubAwayError:
            self._poll_at_us = self._clock.now_us + POLL_US
            return False
        except HubRefusedError as error:
            if error.code == "not_found" and self._ledger.restores:
                # It was listed before the hub was restored. Started again, it lists what there is now.
                self.crash()
                return True
            raise SimulationError(f"the hub refused a reader: {error}") from error
        return True

    def _advance(self) -> None:
        if self._listed:
            node, what = self._listed[0]
            if isinstance(what, StreamEpoch):
                self._take(what)
            elif what.epoch > self._at(node).epoch:
                self._pass(node, what)
            self._listed.popleft()
        elif self._reached:
            for node, epochs in self._volatile.items():
                self.read.setdefault(node, []).extend(epochs)
            self._passed |= self._reached
            self._volatile.clear()
            self._reached.clear()
            self._untold = True
        elif self._untold:
            refused = self._wire.consumer(PIPELINE, TAP, ConsumerPosition(streams={CUT: self._passed})).refused
            if refused and not self._ledger.restores:
                raise SimulationError(f"the hub refused the positions of a reader: {refused}")
            self._untold = False
        elif self._news:
            wanted = {node: EpochRange(after=self._at(node).epoch, seen=self._at(node)) for node in self._news}
            for node, found in self._wire.stream_epochs(PIPELINE, CUT, EpochsRequest(nodes=wanted)).nodes.items():
                self._list(node, found)
        else:
            page = self._wire.stream_nodes(PIPELINE, CUT, after=self._after, log_id=self._log_id)
            self._after = page.next if page.log_id == self._log_id else 0
            listed = page.nodes if page.log_id == self._log_id else ()
            self._log_id = page.log_id
            self._news = {
                one.node: one.epoch for one in listed if NodePosition(one.epoch, one.chain) != self._at(one.node)
            }
            self._poll_at_us = self._clock.now_us + (0 if page.nodes else POLL_US)

    def _at(self, node: str) -> NodePosition:
        return self._reached.get(node) or self._passed.get(node, START)

    def _list(self, node: str, found: NodeEpochs) -> None:
        if found.stopped is not None:
            if not self._ledger.restores:
                raise SimulationError(f"the hub stopped a reader of {node}: {found.stopped.reason}")
            self.stopped[node] = found.stopped
            self._ledger.faults[Fault.READER_STOPPED] += 1
        elif found.awaited and not self._ledger.restores:
            raise SimulationError(f"the hub lets a reader of {node} wait: {found.awaited}")
        self._listed.extend((node, entry) for entry in found.epochs)
        if not found.epochs and found.end.chain:
            self._listed.append((node, found.end))
        if found.end.epoch >= self._news[node] or not (found.epochs or found.end.epoch > self._at(node).epoch):
            del self._news[node]

    def _pass(self, node: str, end: NodePosition) -> None:
        first = self._at(node).epoch + 1
        if not self._ledger.may_pass(node, first, end.epoch):
            raise SimulationError(f"the hub let a reader of {node} pass over epochs {first} to {end.epoch}")
        self._reached[node] = end

    def _take(self, entry: StreamEpoch) -> None:
        node, have = entry.node, [*self.read.get(entry.node, ()), *self._volatile.get(entry.node, ())]
        at = self._at(node).epoch
        if entry.epoch <= at:
            return
        if not self._ledger.may_pass(node, at + 1, entry.epoch - 1):
            raise SimulationError(f"the hub gave epoch {entry.epoch} of {node} after {at}")
        before_us = have[-1][0].watermark_us if have else TIME_MIN_US
        if entry.watermark_us < before_us and node not in self._ledger.forced:
            raise SimulationError(f"the time of {node} went back from {before_us} to {entry.watermark_us}")
        frames = [decode_run(self._wire.read_blob(ref), ref) for ref in entry.runs]
        self._volatile.setdefault(node, []).append((entry, frames))
        self._reached[node] = NodePosition(entry.epoch, entry.chain)


class Publisher:
    """Publishes versions of the control table, where no center does."""

    def __init__(self, wire: Wire, rng: Random) -> None:
        self._wire = wire
        self._rng = rng
        self._table: dict[int, int] = {}
        self._batch = 0
        self._value = 0
        self._waiting: tuple[ControlPublish, bytes, dict[int, int]] | None = None

    def publish(self) -> None:
        """Publish another version, or the one before again if nobody knows what became of it."""
        if self._waiting is None:
            self._waiting = self._next()
        version, data, table = self._waiting
        try:
            self._wire.put_blob(version.blob.digest, data)
            self._wire.publish(PIPELINE, CONTROL, version)
        except HubAwayError:
            return
        except HubRefusedError as error:
            if error.code != "missing_blobs":
                raise SimulationError(f"the hub refused a publisher: {error}") from error
            return
        self._table, self._waiting = table, None

    def _next(self) -> tuple[ControlPublish, bytes, dict[int, int]]:
        self._batch += 1
        self._value += 1
        key = self._rng.randrange(KEYS)
        table = dict(self._table)
        if key in table and self._rng.random() < 0.2:
            rows = [(key, table.pop(key), "delete")]
        else:
            table[key] = self._value
            rows = [(key, self._value, "upsert")]
        snapshot = self._rng.random() < 0.2
        if snapshot:
            rows = [(k, bound, "upsert") for k, bound in table.items()]
        ref, data = encode_run(pl.DataFrame(rows, schema=TABLE, orient="row"), "none")
        return ControlPublish(owner="publisher", batch=self._batch, blob=ref, snapshot=snapshot), bytes(data), table
