"""Deliberate faults between nodes, hub and center. The simulation of fleets must catch every one of them.

Each mutant is a context manager that breaks one thing while it is open.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import msgspec
from tests.simulation.fleet_hub import MemoryBlobs
from tests.simulation.mutants import operators_go_by_the_machines_clock

from fordstone.connectors.hub import HubReader
from fordstone.edge.link.outbox import Outbox
from fordstone.edge.link.sender import Sender
from fordstone.epochs.manifest import PartitionCut
from fordstone.errors import HubAwayError
from fordstone.hub.messages import Head, NodeEpochs
from fordstone.hub.store import commits, log_schema
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_writer import LogWriter
from fordstone.operators.join.lookup import LookupLatest
from fordstone.protocol import delivery
from fordstone.protocol.chain import PositionJudgement
from fordstone.protocol.delivery import (
    Accept,
    AlreadyDone,
    CommitDecision,
    CommitFacts,
    Gap,
    InSync,
    OtherContent,
    Stale,
)
from fordstone.protocol.lease import (
    Fence,
    Granted,
    LeaseDecision,
    LeaseFacts,
    NotHead,
    OlderIncarnation,
    Position,
    decide_lease,
)

_decide_order = delivery.decide_order


def _deciding(judge: Callable[[CommitFacts, CommitDecision], CommitDecision]) -> AbstractContextManager[Any]:
    """Let the hub's decision be another one."""

    def order(facts: CommitFacts) -> CommitDecision:
        return judge(facts, _decide_order(facts))

    return patch.multiple(
        commits, decide_order=order, decide_commit=lambda facts, absent: _with_blobs(order(facts), absent)
    )


def _with_blobs(decision: CommitDecision, absent: Any) -> CommitDecision:
    if isinstance(decision, Accept) and absent:
        return delivery.Missing(digests=tuple(sorted(absent)))
    return decision


@contextmanager
def hub_accepts_a_gap() -> Iterator[None]:
    """Epochs are taken in although some before them are missing."""

    def judge(facts: CommitFacts, decision: CommitDecision) -> CommitDecision:
        return Accept(first_new=facts.sent[0].epoch) if isinstance(decision, Gap) else decision

    with _deciding(judge):
        yield


@contextmanager
def hub_accepts_an_old_generation() -> Iterator[None]:
    """Who was shut out may still commit."""

    def judge(facts: CommitFacts, decision: CommitDecision) -> CommitDecision:
        if isinstance(decision, Stale) and facts.granted is not None:
            return _decide_order(replace(facts, fence=facts.granted))
        return decision

    with _deciding(judge):
        yield


@contextmanager
def hub_takes_other_content() -> Iterator[None]:
    """An epoch that is there is not compared with what is sent again."""

    def judge(facts: CommitFacts, decision: CommitDecision) -> CommitDecision:
        if not isinstance(decision, OtherContent):
            return decision
        return AlreadyDone() if facts.sent[-1].epoch <= facts.head else Accept(first_new=facts.head + 1)

    with _deciding(judge):
        yield


@contextmanager
def fold_loses_an_epoch() -> Iterator[None]:
    """Of epochs that are committed together, only the last brings its rows."""
    original = LogWriter.add_epochs

    def lazy(self: LogWriter, pipeline: str, node_id: int, epochs: Any, generation: Any, **more: Any) -> None:
        empty = [one._replace(entry=msgspec.structs.replace(one.entry, streams={})) for one in epochs[:-1]]
        original(self, pipeline, node_id, [*empty, epochs[-1]], generation, **more)

    with patch.object(LogWriter, "add_epochs", lazy):
        yield


@contextmanager
def gc_takes_what_nobody_has_passed() -> Iterator[None]:
    """A segment goes as soon as one consumer has passed it, although another has not."""
    original = LogReader.passed_segments

    class Greedy:
        """The database, with the largest position instead of the least."""

        def __init__(self, db: sqlite3.Connection) -> None:
            self._db = db

        def execute(self, query: str, *given: Any) -> Any:
            return self._db.execute(
                query.replace("SELECT min(coalesce(p.epoch, 0))", "SELECT max(coalesce(p.epoch, 0))"), *given
            )

    def passed(self: LogReader, **options: Any) -> Any:
        return original(LogReader(Greedy(self._db)), **options)  # type: ignore[arg-type]  # close enough

    with patch.object(LogReader, "passed_segments", passed):
        yield


@contextmanager
def named_blobs_are_not_counted() -> Iterator[None]:
    """Blobs are removed after their grace time, also those that an epoch names."""
    with patch.object(LogWriter, "_add_references", lambda *_: None):
        yield


@contextmanager
def blob_reported_before_it_is_durable() -> Iterator[None]:
    """The hub says that it has a blob whose name is not synced."""
    with patch.object(MemoryBlobs, "_settle", lambda *_: None):
        yield


@contextmanager
def node_drops_entries_before_the_answer() -> Iterator[None]:
    """The outbox forgets epochs when they are sent, whatever the hub says."""
    original = Sender._commit

    def hasty(self: Sender, batch: Any, generation: Any) -> None:
        self._outbox.mark(batch.last, chain=self._outbox.chain_at(batch.last) or "", log_id=self._log_id)
        original(self, batch, generation)

    with patch.object(Sender, "_commit", hasty):
        yield


@contextmanager
def node_collects_unsent_runs() -> Iterator[None]:
    """Runs go with their checkpoint, although the hub does not have them."""
    with patch.object(Outbox, "held", lambda _: set()):
        yield


@contextmanager
def sender_takes_silence_for_yes() -> Iterator[None]:
    """A commit without an answer counts as one that was accepted."""
    original = Sender._commit

    def trusting(self: Sender, batch: Any, generation: Any) -> None:
        try:
            original(self, batch, generation)
        except HubAwayError:
            self._in_sync = True
            self._drop_batch()
            self._mark(Position(batch.last, self._outbox.chain_at(batch.last) or ""))

    with patch.object(Sender, "_commit", trusting):
        yield


@contextmanager
def position_reported_before_the_seal() -> Iterator[None]:
    """The center tells the hub what it has read rather than what it has sealed."""
    original = HubReader.read

    def early(self: HubReader, rows_max: int, until: Any = None) -> Any:
        chunk = original(self, rows_max, until)
        source = self._source
        if chunk is not None and source is not None:
            source.ack({self._node: PartitionCut(position=int(chunk.position), identity=self.identity())})
        return chunk

    with patch.object(HubReader, "read", early):
        yield


@contextmanager
def control_taken_without_a_barrier() -> Iterator[None]:
    """Rows meet a control version as soon as it has come."""
    original = LookupLatest.on_batch

    def eager(self: LookupLatest, frame: Any, *, late: bool) -> Any:
        out = original(self, frame, late=late)
        self._take_control()
        return out

    with patch.object(LookupLatest, "on_batch", eager):
        yield


@contextmanager
def log_is_not_synced() -> Iterator[None]:
    """The hub answers before its log is durable."""
    original = log_schema.set_up

    def careless(connection: sqlite3.Connection, *, wal_pages: int | None = None) -> sqlite3.Connection:
        original(connection, wal_pages=wal_pages).execute("PRAGMA synchronous = OFF")
        return connection

    with patch.object(log_schema, "set_up", careless):
        yield


@contextmanager
def log_is_synced_at_checkpoints_only() -> Iterator[None]:
    """SQLite's usual setting for a write-ahead log: consistent after a power cut, but without the last commits."""
    original = log_schema.set_up

    def usual(connection: sqlite3.Connection, *, wal_pages: int | None = None) -> sqlite3.Connection:
        original(connection, wal_pages=wal_pages).execute("PRAGMA synchronous = NORMAL")
        return connection

    with patch.object(log_schema, "set_up", usual):
        yield


@contextmanager
def positions_are_not_compared() -> Iterator[None]:
    """Every position of a reader, and every chain before a commit, is taken to be one of the log."""
    with patch.object(commits, "judge_position", lambda *_: PositionJudgement.FITS):
        yield


@contextmanager
def lease_does_not_need_the_head() -> Iterator[None]:
    """An old copy of a state directory gets the lease when it was started often enough."""

    def lenient(facts: LeaseFacts) -> LeaseDecision:
        decision = decide_lease(facts)
        if isinstance(decision, NotHead) and facts.holding is not None:
            return Granted(fence=Fence(facts.holding.fence.hub, facts.local))
        return decision

    with patch.object(commits, "decide_lease", lenient):
        yield


@contextmanager
def lease_goes_to_an_older_start() -> Iterator[None]:
    """A process that was started before the holder, or is a copy of it, shuts the holder out."""

    def lenient(facts: LeaseFacts) -> LeaseDecision:
        decision = decide_lease(facts)
        if isinstance(decision, OlderIncarnation):
            return Granted(fence=Fence(decision.by.hub, facts.local))
        return decision

    with patch.object(commits, "decide_lease", lenient):
        yield


@contextmanager
def hub_commits_without_blobs() -> Iterator[None]:
    """An epoch is taken in although blobs that it names are missing."""
    with patch.object(commits, "decide_commit", lambda facts, absent: _decide_order(facts)):
        yield


@contextmanager
def sender_trusts_its_own_state() -> Iterator[None]:
    """A node does not compare its epochs with those of the hub: it goes on after what it has sent, or what the hub has."""

    def trusting(self: Sender, head: Head) -> InSync:
        return InSync(done=max(min(head.epoch, self._outbox.newest), self._outbox.sent))

    with patch.object(Sender, "_compare", trusting):
        yield


@contextmanager
def index_pages_lose_their_last_epoch() -> Iterator[None]:
    """The hub lists one epoch less than it says."""
    original = commits._listed

    def short(*given: Any) -> NodeEpochs:
        found = original(*given)
        return msgspec.structs.replace(found, epochs=found.epochs[:-1]) if len(found.epochs) > 1 else found

    with patch.object(commits, "_listed", short):
        yield


@contextmanager
def ended_node_does_not_look_at_the_hub() -> Iterator[None]:
    """A node that has sent everything does not notice that the hub was restored."""

    def waits(self: Sender) -> bool:
        return self._outbox.epochs > 0 or self._acknowledged is not None

    with patch.object(Sender, "unfinished", property(waits)):
        yield


@contextmanager
def restored_hub_reports_no_gap() -> Iterator[None]:
    """What was lost with a hub is not written down."""
    original = LogWriter.add_epochs

    def silent(self: LogWriter, *given: Any, lost_from: int | None = None, **more: Any) -> None:
        del lost_from
        original(self, *given, **more)

    with patch.object(LogWriter, "add_epochs", silent):
        yield


@contextmanager
def replaced_machine_comes_back_after_a_restore() -> Iterator[None]:
    """A machine with later epochs than a restored hub gets the lease although another one has gone on since."""

    def forgetful(facts: LeaseFacts) -> LeaseDecision:
        return decide_lease(replace(facts, resync=True))

    with patch.object(commits, "decide_lease", forgetful):
        yield


@contextmanager
def node_offers_nothing_again() -> Iterator[None]:
    """A node gives up all that a restored hub lacks, although it has some of it."""
    with patch.object(Outbox, "offer_again", lambda self, _: self.sent + 1):
        yield


FLEET_MUTANTS: Final[dict[str, Callable[[], AbstractContextManager[None]]]] = {
    mutant.__name__: mutant
    for mutant in (
        hub_accepts_a_gap,
        hub_accepts_an_old_generation,
        hub_takes_other_content,
        fold_loses_an_epoch,
        gc_takes_what_nobody_has_passed,
        named_blobs_are_not_counted,
        blob_reported_before_it_is_durable,
        node_drops_entries_before_the_answer,
        node_collects_unsent_runs,
        sender_takes_silence_for_yes,
        position_reported_before_the_seal,
        control_taken_without_a_barrier,
        log_is_not_synced,
        log_is_synced_at_checkpoints_only,
        positions_are_not_compared,
        lease_does_not_need_the_head,
        lease_goes_to_an_older_start,
        hub_commits_without_blobs,
        sender_trusts_its_own_state,
        index_pages_lose_their_last_epoch,
        ended_node_does_not_look_at_the_hub,
        restored_hub_reports_no_gap,
        replaced_machine_comes_back_after_a_restore,
        node_offers_nothing_again,
        operators_go_by_the_machines_clock,
    )
}
