"""A hub in memory, as far as readers of streams use one: it can be away, lose blobs, and answer in small pages."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import polars as pl

from fordstone.epochs.manifest import PartitionCut
from fordstone.epochs.run_file import encode_run
from fordstone.errors import DamagedError, HubAwayError, HubRefusedError
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.reader import StreamFacts, first_epochs
from fordstone.hub.messages import (
    NUMBER_MAX,
    PAGE_ENTRIES_MAX,
    Acknowledged,
    ConsumerPosition,
    EpochRange,
    EpochsRequest,
    NodeEpochs,
    NodePosition,
    NodeStop,
    Quarantine,
    QuarantineChange,
    QuarantineRequest,
    StreamEpoch,
    StreamEpochs,
    StreamNode,
    StreamNodes,
)
from fordstone.lang.duration import TIME_MIN_US
from fordstone.protocol.chain import CHAIN_START, ChainFacts, PositionJudgement, chained, judge_position
from fordstone.state.base import RunRef

PIPELINE, STREAM = "p", "s"
WAIT_SECONDS = 10.0
"""No test waits longer for something that should have come."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch that a node commits: its runs, and what it says of its time."""

    runs: Sequence[pl.DataFrame] = ()
    watermark_us: int = TIME_MIN_US
    ended: bool = False


@dataclass
class FakeHub(HubClient):
    """Answers what readers of streams ask; a test fills it."""

    page_nodes: int = 1000
    away: bool = False
    away_for_blobs: bool = False
    away_for_quarantine: bool = False
    quarantined: dict[str, Quarantine] = field(default_factory=dict)
    refuses: HubRefusedError | None = None
    now_us: int = 0
    blobs: dict[str, bytes | HubRefusedError] = field(default_factory=dict)
    """By digest; an error is what the hub answers."""
    entries: list[StreamEpoch] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    passed: dict[str, dict[str, int]] = field(default_factory=dict)
    """The position of each consumer, by node."""
    asked: list[EpochsRequest] = field(default_factory=list)
    """The requests for epochs, and for where they end."""
    newest: dict[str, StreamNode] = field(default_factory=dict)
    log_id: str = "log-1"
    awaited: set[str] = field(default_factory=set)
    """Nodes that a restored hub waits for."""
    epochs_max: int = PAGE_ENTRIES_MAX
    """Maximum number of epochs of a node in a response."""

    def __post_init__(self) -> None:
        self._grown = threading.Condition()
        self._chains: dict[tuple[str, int], str] = {}
        self._removed: dict[str, int] = {}
        self._seq = 0

    # What a test does.

    def add(self, node: str, *epochs: Epoch) -> int:
        """Commit epochs of a node together; gives the last one's number."""
        with self._grown:
            self._seq += 1
            seq, number = self._seq, self.newest[node].epoch if node in self.newest else 0
            for number, epoch in enumerate(epochs, number + 1):  # noqa: B020 - it goes on from there
                refs = []
                for frame in epoch.runs:
                    ref, data = encode_run(frame, "none")
                    self.blobs[ref.digest] = bytes(data)
                    refs.append(ref)
                content = hashlib.sha256("".join(ref.digest for ref in refs).encode()).hexdigest()
                chain = chained(self._chains.get((node, number - 1), CHAIN_START), content)
                self._chains[node, number] = chain
                entry = StreamEpoch(
                    seq=seq,
                    node=node,
                    epoch=number,
                    chain=chain,
                    runs=tuple(refs),
                    watermark_us=epoch.watermark_us,
                    received_us=self.now_us,
                    ended=epoch.ended,
                )
                self.entries.append(entry)
                self.newest[node] = StreamNode(
                    node=node,
                    seq=seq,
                    epoch=number,
                    chain=chain,
                    watermark_us=epoch.watermark_us,
                    received_us=self.now_us,
                    ended=epoch.ended,
                    removed=self._removed.get(node, 0),
                )
            self._grown.notify_all()
            return number

    def reset(self) -> None:
        """Be a new hub."""
        self.entries.clear()
        self.newest.clear()
        self._chains.clear()
        self._removed.clear()
        self._seq = 0

    def set_back(self, node: str, epoch: int) -> None:
        """Be as a copy was when the newest epoch of a node was this one. The log has another id only if a test says so."""
        with self._grown:
            self.entries = [entry for entry in self.entries if entry.node != node or entry.epoch <= epoch]
            newest = next(entry for entry in self.entries if (entry.node, entry.epoch) == (node, epoch))
            self.newest[node] = msgspec.structs.replace(
                self.newest[node], epoch=epoch, chain=newest.chain, seq=newest.seq, watermark_us=newest.watermark_us
            )
            self._chains = {at: chain for at, chain in self._chains.items() if at[0] != node or at[1] <= epoch}
            self._grown.notify_all()

    def remove_epochs(self, node: str, epoch: int) -> None:
        """Remove the epochs of a node up to and including `epoch`."""
        self.entries = [entry for entry in self.entries if entry.node != node or entry.epoch > epoch]
        self._removed[node] = epoch
        self.newest[node] = msgspec.structs.replace(self.newest[node], removed=epoch)

    def cut(self, node: str, epoch: int) -> PartitionCut:
        """The cut of a source that has read up to an epoch."""
        return PartitionCut(position=epoch, identity=f"{epoch}:{self._chains[node, epoch]}")

    def goes(self, *, away: bool) -> None:
        """Go away, or come back."""
        with self._grown:
            self.away = away
            self._grown.notify_all()

    def wait_for_passed(self, consumer: str, positions: dict[str, int]) -> bool:
        """Wait until a consumer has said that it passed these."""
        with self._grown:
            return self._grown.wait_for(lambda: self.passed.get(consumer) == positions, WAIT_SECONDS)

    # What a reader calls.

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
        assert (pipeline, stream, limit) == (PIPELINE, STREAM, None)
        with self._grown:
            self.calls.append("nodes")

            def news() -> bool:
                other = log_id not in {None, self.log_id}
                return other or self.away or any(one.seq > after for one in self.newest.values())

            self._grown.wait_for(news, min(wait_s, 1.0))
            self._check(away=self.away)
            if log_id not in {None, self.log_id}:
                after = 0
            found = sorted((one for one in self.newest.values() if one.seq > after), key=lambda one: one.seq)
            nodes = tuple(found[: self.page_nodes])
            return StreamNodes(
                nodes=nodes,
                next=nodes[-1].seq if nodes else after,
                more=len(nodes) < len(found),
                log_id=self.log_id,
            )

    def stream_epochs(self, pipeline: str, stream: str, request: EpochsRequest) -> StreamEpochs:
        assert (pipeline, stream) == (PIPELINE, STREAM)
        with self._grown:
            self.calls.append("epochs" if request.listed else "plan")
            self.asked.append(request)
            self._check(away=self.away)
            some = list(request.nodes.items())[: self.page_nodes]
            nodes = {node: self._node_epochs(node, wanted, request) for node, wanted in some}
            return StreamEpochs(nodes=nodes, log_id=self.log_id)

    def _node_epochs(self, node: str, wanted: EpochRange, request: EpochsRequest) -> NodeEpochs:
        newest, removed = self.newest.get(node), self._removed.get(node, 0)
        facts = ChainFacts(
            head=0 if newest is None else newest.epoch,
            head_chain=CHAIN_START if newest is None else newest.chain,
            chain=self._chains.get((node, wanted.seen.epoch)),
        )
        judgement = judge_position(wanted.seen.epoch, wanted.seen.chain, facts)
        if judgement is PositionJudgement.BEYOND:
            if node in self.awaited:
                return NodeEpochs(awaited=f"the log of node {node} ends at epoch {facts.head} since a restore")
            return NodeEpochs(stopped=NodeStop(code="beyond", reason=f"the log ends at epoch {facts.head}"))
        if judgement is PositionJudgement.DIFFERS:
            return NodeEpochs(stopped=NodeStop(code="differs", reason="the log has other content"))
        if wanted.after < removed and not wanted.earliest:
            return NodeEpochs(stopped=NodeStop(code="gone", reason=f"epochs up to {removed} are gone"))
        until = NUMBER_MAX if wanted.until is None else wanted.until
        kept = [one for one in self.entries if one.node == node and wanted.after < one.epoch <= until]
        found = first_epochs(kept, request.rows_max, epochs_max=min(request.epochs_max, self.epochs_max))
        if not found:
            passed = wanted.earliest and wanted.after < removed <= until
            return NodeEpochs(end=NodePosition(removed, self._chains[node, removed]) if passed else NodePosition())
        end = NodePosition(found[-1].epoch, found[-1].chain)
        return NodeEpochs(epochs=tuple(found) if request.listed else (), first=found[0].epoch, end=end)

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        self.calls.append("blob")
        self._check(away=self.away or self.away_for_blobs)
        if ref.digest not in self.blobs:
            raise HubRefusedError("there is no such blob.", status=404, code="not_found")
        answer = self.blobs[ref.digest]
        if isinstance(answer, HubRefusedError):
            raise answer
        if hashlib.sha256(answer).hexdigest() != ref.digest:
            raise DamagedError(f"blob {ref.digest[:12]} came with other bytes than its name says.")
        return answer

    def quarantine(self, pipeline: str, node: str, request: QuarantineRequest) -> QuarantineChange:
        assert pipeline == PIPELINE
        with self._grown:
            self.calls.append("quarantine")
            self._check(away=self.away or self.away_for_quarantine)
            self._seq += 1
            before = [one for one in self.entries if one.node == node and one.epoch < request.epoch]
            epoch, chain = (before[-1].epoch, before[-1].chain) if before else (0, CHAIN_START)
            self.newest[node] = msgspec.structs.replace(
                self.newest[node], seq=self._seq, epoch=epoch, chain=chain, quarantined=request.epoch
            )
            self.quarantined[node] = Quarantine(
                epoch=request.epoch, reason=request.reason, since_us=self.now_us, by=request.by
            )
            self._grown.notify_all()
            return QuarantineChange(quarantine=self.quarantined[node], changed=True, seq=self._seq)

    def consumer(self, pipeline: str, consumer: str, position: ConsumerPosition) -> Acknowledged:
        assert pipeline == PIPELINE
        with self._grown:
            self.calls.append("consumer")
            self._check(away=self.away)
            passed = {node: at.epoch for node, at in position.streams[STREAM].items()}
            self.passed.setdefault(consumer, {}).update(passed)
            self._grown.notify_all()
            return Acknowledged()

    def _check(self, *, away: bool) -> None:
        if away:
            raise HubAwayError("the hub does not answer.")
        if self.refuses is not None:
            raise self.refuses


def wait_until_listed(facts: StreamFacts, node: str, epoch: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while (newest := facts.newest(node)) is None or newest.epoch < epoch:
        assert time.monotonic() < deadline, f"epoch {epoch} of {node} was not listed"
        threading.Event().wait(0.001)
