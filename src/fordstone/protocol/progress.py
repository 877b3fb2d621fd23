"""The progress of a run while it runs, and its report when it is over: frozen values that are shown, or sent as JSON.

`Counters` are what a node also reports to the hub (`hub.messages.Health` embeds them); `Progress` adds what only the process shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from fordstone.lang.duration import TIME_MIN_US, human_us
from fordstone.protocol.health import WaitsFor


class WaitedFor(NamedTuple):
    """A partition that the watermark waits for: neither idle nor done."""

    source: str
    partition: str
    watermark_us: int
    is_node: bool = False
    """The source reads a hub, where a partition is a node."""
    silent_us: int | None = None
    """How long it has had no rows by the clock, since the run started at most; None: not known."""


class HeldBack(msgspec.Struct, frozen=True, kw_only=True):
    """The partition whose watermark is the least, while others are ahead of it."""

    source: str
    partition: str
    lag_us: int | None = None
    """How far the partition that is furthest ahead has come beyond it, in event time; None: it has had no rows yet."""
    silent_us: int | None = None
    """How long it has had no rows by the clock, since the run started at most; None: not known."""
    is_node: bool = False
    """At the center, the partition is a node."""


Role = Literal["source", "sink"]


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """A source or sink whose system cannot be used now, or, of a source that keeps a journal, whose journal is full."""

    role: Role
    step: str
    kind: str
    """Of the connector; empty for dead letters."""
    problem: str
    """With the address, in the connector's words."""

    @property
    def name(self) -> str:
        """The step in a few words, without the problem."""
        return f"{self.role} {self.step} ({self.kind})" if self.kind else f"{self.role} {self.step}"


class NotRead(msgspec.Struct, frozen=True, kw_only=True):
    """A node in quarantine, at the center (rule 25)."""

    pipeline: str
    node: str
    epoch: int
    """The first epoch that is not read."""


def held_back(waited_for: Iterable[WaitedFor]) -> HeldBack | None:
    """Return the partition that holds the watermark back, of those that are waited for; None: none does."""
    found = list(waited_for)
    least = min(found, key=lambda one: one.watermark_us, default=None)
    most_us = max((one.watermark_us for one in found), default=TIME_MIN_US)
    if least is None or least.watermark_us == most_us:
        return None
    return HeldBack(
        source=least.source,
        partition=least.partition,
        lag_us=None if least.watermark_us == TIME_MIN_US else most_us - least.watermark_us,
        silent_us=least.silent_us,
        is_node=least.is_node,
    )


def describe_late(late_by_us: int, lateness_us: Mapping[str, int]) -> str:
    """Explain late rows: by how much they were too late, and which lateness would have counted them.

    `lateness_us`: of each source of the plan that judges rows by their time. The center of two tiers has none: its rows were judged
    at their nodes, or came after the others had ceased to wait for their node.
    """
    if not late_by_us:
        return "without a time, or too far ahead of the clock"
    late = f"up to {human_us(rounded_up_us(late_by_us))} too late"
    if len(lateness_us) == 1:
        ((source, before_us),) = lateness_us.items()
        needed = human_us(rounded_up_us(before_us + late_by_us))
        return f'{late}; lateness="{needed}" at source {source} would have counted them'
    if lateness_us:
        return f"{late}; a lateness of their source that is longer by this would have counted them"
    return (
        f"{late}; a lateness of the edge's sources that is longer by this would have counted them, or a longer offline= in to_center() "
        "if their node was away"
    )


def rounded_up_us(span_us: int) -> int:
    """A duration to show that is not shorter: in whole seconds, or whole milliseconds below one second."""
    unit_us = next((unit_us for unit_us in (1_000_000, 1_000) if span_us >= unit_us), 1)
    return -(-span_us // unit_us) * unit_us


class Counters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Counts and sizes of one run. None: not known yet."""

    epoch: int = 0
    rows_in: int = 0
    rows_out: int = 0
    """Rows that this process has released to sinks."""
    rows_late: int = 0
    rows_rejected: int = 0
    """Input that was not a row, or a row without a time."""
    rows_failed: int = 0
    """Rows that a user's function raised an exception for, and that were set aside."""
    watermark_us: int | None = None
    """The minimum over the sources."""
    state_bytes: int = 0
    checkpoints: int = 0
    """Checkpoints that this process has sealed."""
    given_up: int = 0
    """Checkpoints that this process has given up."""
    checkpoint_us: int | None = None
    """The time until the last checkpoint was durable. The pipeline does not wait for it."""
    checkpoint_bytes: int | None = None
    pause_us: int | None = None
    """The time for which the last barrier stopped the slowest task."""
    interval_us: int = 0
    restarts: int = 0
    outbox_epochs: int = 0
    """Sealed epochs that the hub does not have yet."""
    outbox_bytes: int = 0
    sent_epoch: int | None = None
    """The newest epoch that the hub has; None without a hub."""
    sent_bytes: int = 0
    """Bytes that this process has sent to the hub."""


class Progress(Counters, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The state of a run now."""

    pipeline: str
    elapsed_us: int
    stalled: str | None = None
    """Why nothing can be sealed now, or why only a part of the input is read."""
    waits_for: WaitsFor | None = None
    """What `stalled` is about."""
    busy: bool = False
    """Rows are being processed that `rows_in` does not count yet: on Spark, a batch is running."""
    hub_problem: str | None = None
    """Why the hub cannot be reached now: nothing is sent to it, or read from it."""
    away: tuple[Away, ...] = ()
    """The other systems that cannot be used now, by the steps that need them."""
    not_read: tuple[NotRead, ...] = ()
    """The nodes in quarantine, at the center."""
    damaged_runs: int = 0
    """Runs of kept checkpoints that the disk has damaged, and of which no copy could be had."""
    stopping: bool = False
    """A stop was requested: the epoch is being finished."""
    late: str | None = None
    """How late the late rows were, and what would have counted them."""
    rejected: str | None = None
    """Why one of the rejected rows is not a row."""
    held_back: HeldBack | None = None
    """The partition that the watermark waits for."""
    share: float | None = None
    """The share of bounded input that was read, from 0 to 1, if it is known."""
    read_bytes: int | None = None
    total_bytes: int | None = None

    def counters(self) -> Counters:
        return msgspec.convert(self, Counters, from_attributes=True)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run."""

    pipeline: str
    outcome: Literal["ended", "stopped", "already_ended"]
    """Bounded input was read to its end; a stop was requested; or there was nothing left to do."""
    progress: Progress
    resumed_from: int | None = None
    """The checkpoint that the run resumed from."""
