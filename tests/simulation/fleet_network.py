"""The network of a simulated fleet: requests and answers are lost, come late, come twice, or come after others.

Each client has a `Wire`, which speaks as `hub.client.HubClient` does. A request that comes late is carried out when its
asker has long given it up, perhaps after it was started again, or after somebody has taken over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from tests.simulation.fleet_hub import FleetHub, HubCrashedError
from tests.simulation.fleet_tally import Fault
from tests.simulation.rows import SimulationError

from fordstone.errors import DamagedError, HubAwayError, HubRefusedError
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import (
    Acknowledged,
    Checkpoint,
    Commit,
    Committed,
    ConsumerPosition,
    ControlPage,
    ControlPublish,
    ControlVersion,
    EpochsRequest,
    Head,
    Lease,
    LeaseRequest,
    Rejection,
    StreamEpochs,
    StreamNodes,
)

if TYPE_CHECKING:
    from tests.simulation.fleet_ledger import Ledger

    from fordstone.state.base import RunRef

LATE_MAX: Final = 20
"""The maximum of requests under way."""

T = TypeVar("T")


class Network:
    """Carries requests to the hub, or does not."""

    def __init__(self, hub: FleetHub, ledger: Ledger, rng: Random, *, lost: float) -> None:
        self.hub = hub
        self.ledger = ledger
        self.lost = lost
        self.late: list[tuple[Callable[[], object], Fault]] = []
        """Requests that are still under way."""
        self.asked = 0
        self._rng = rng
        self._faults = ledger.faults

    def ask(self, work: Callable[[], T], *, changes: bool) -> T:
        """Carry a request there and its answer back. `changes`: it leaves something at the hub, so that it matters when it comes."""
        self.asked += 1
        fate = self._rng.random() if self.lost else 1.0
        if not self.hub.up or fate < self.lost / 3:
            if self.hub.up:
                self._faults[Fault.REQUEST_LOST] += 1
            raise HubAwayError("the request was lost.")
        if changes and fate < self.lost * 2 / 3 and len(self.late) < LATE_MAX:
            self.late.append((work, Fault.REQUEST_LATE))
            raise HubAwayError("the request is late.")
        answer = self._carry_out(work)
        if fate < self.lost:
            self._faults[Fault.ANSWER_LOST] += 1
            raise HubAwayError("the answer was lost.")
        if changes and fate < self.lost * 1.3 and len(self.late) < LATE_MAX:
            self.late.append((work, Fault.REQUEST_TWICE))
        return answer

    def deliver(self) -> None:
        """Let a late request come in, any of them, perhaps not for the last time. Nobody waits for its answer."""
        work, fault = self.late.pop(self._rng.randrange(len(self.late)))
        if self.hub.up:
            self._faults[fault] += 1
            try:
                self._carry_out(work)
            except (HubRefusedError, HubAwayError):
                return

    def _carry_out(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Rejection as refused:
            if refused.status >= 500:
                raise HubAwayError(str(refused)) from refused
            raise HubRefusedError(
                f"refused: {refused}", status=refused.status, code=refused.refusal.error, refusal=refused.refusal
            ) from refused
        except HubCrashedError:
            self.hub.crash()
            raise HubAwayError("the hub crashed.") from None


class Wire(HubClient):
    """The hub as one machine sees it."""

    def __init__(self, network: Network, name: str) -> None:
        self.name = name
        self.cut_off = False
        """Nothing goes through."""
        self._network = network
        self._hub = network.hub

    def close(self) -> None:
        """Nothing is held."""

    def _through(self, work: Callable[[], T], *, changes: bool = False) -> T:
        if self.cut_off:
            self._network.ledger.faults[Fault.CUT_OFF] += 1
            raise HubAwayError("cut off.")
        return self._network.ask(work, changes=changes)

    # Blobs.

    def put_blob(self, digest: str, data: bytes) -> None:
        """Store a blob."""
        self._through(partial(self._hub.put_blob, digest, data), changes=True)

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        """Read a blob, checked."""
        del direct_url
        data = self._through(partial(self._hub.get_blob, ref.digest))
        if len(data) != ref.size_bytes or hashlib.sha256(data).hexdigest() != ref.digest:
            raise DamagedError(f"blob {ref.digest[:12]} is not what was asked for.")
        return data

    def missing(self, digests: Iterable[str]) -> set[str]:
        """Which blobs the hub lacks."""
        return self._through(partial(self._hub.missing, list(digests)))

    # Nodes.

    def lease(self, pipeline: str, node: str, request: LeaseRequest) -> Lease:
        """Take or renew the right to commit."""

        def carried_out() -> Lease:
            lease = self._hub.lease(pipeline, node, request)
            resync = self._hub.head(pipeline, node).resync
            self._network.ledger.check_lease(node, request, resync=resync)
            return lease

        return self._through(carried_out, changes=True)

    def head(self, pipeline: str, node: str) -> Head:
        """Where the node stands."""
        return self._through(partial(self._hub.head, pipeline, node))

    def checkpoint(self, pipeline: str, node: str) -> Checkpoint | None:
        """The newest checkpoint."""
        return self._through(partial(self._hub.checkpoint, pipeline, node))

    def commit(self, pipeline: str, node: str, commit: Commit) -> Committed:
        """Commit a range."""
        self._network.ledger.note_sent(node, self.name, commit)

        def carried_out() -> Committed:
            answer = self._hub.commit(pipeline, node, commit)
            self._network.ledger.look_at(self._hub, node)
            self._network.ledger.check_answer(node, commit, answer)
            return answer

        return self._through(carried_out, changes=True)

    # Readers and publishers.

    def stream_nodes(
        self,
        pipeline: str,
        stream: str,
        *,
        after: int = 0,
        log_id: str | None = None,
        wait_s: float = 0.0,
        limit: int | None = None,
    ) -> StreamNodes:
        """The nodes that have committed to a stream."""
        del wait_s, limit
        return self._through(partial(self._hub.stream_nodes, pipeline, stream, after=after, log_id=log_id))

    def stream_epochs(self, pipeline: str, stream: str, request: EpochsRequest) -> StreamEpochs:
        """The next epochs of nodes."""
        found = self._through(partial(self._hub.stream_epochs, pipeline, stream, request))
        for node, one in found.nodes.items():
            if one.epochs and one.epochs[-1].epoch != one.end.epoch:
                raise SimulationError(
                    f"the hub's list of {node} ends with epoch {one.epochs[-1].epoch}, and says that it ends with {one.end.epoch}"
                )
        return found

    def consumer(self, pipeline: str, consumer: str, position: ConsumerPosition) -> Acknowledged:
        """Register, or say how far a consumer has come."""
        return self._through(partial(self._hub.consumer, pipeline, consumer, position), changes=True)

    def publish(self, pipeline: str, control: str, version: ControlPublish) -> ControlVersion:
        """Publish a version."""

        def carried_out() -> ControlVersion:
            published = self._hub.publish(pipeline, control, version)
            self._network.ledger.note_versions(self._hub)
            return published

        return self._through(carried_out, changes=True)

    def control_page(
        self, pipeline: str, control: str, *, after: int = 0, chain: str | None = None, wait_s: float = 0.0
    ) -> ControlPage:
        """The versions of a control table."""
        del wait_s
        return self._through(partial(self._hub.control_page, pipeline, control, after=after, chain=chain))
