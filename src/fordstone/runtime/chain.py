"""Chains: the fused steps of one task. A batch goes through all of them before the next is taken; nothing is queued between.

A chain is a tree: a step's output may go to further steps of the chain, to outlets, and out to other tasks. An outlet is where a task's
rows leave for a sink: with `release="commit"` they wait there until the epoch is sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import polars as pl

from fordstone.connectors.base import Sink
from fordstone.errors import FordstoneError
from fordstone.operators.aggregate.partial import ROWS
from fordstone.operators.base import IN_STEP, LATE, Emits, Moment, Operator
from fordstone.operators.dead_letter import DEAD
from fordstone.plan.ids import Attempt
from fordstone.runtime.snapshot import FrozenState
from fordstone.state.base import Piece

WAITING_BYTES_MAX: Final = 256 * 1024 * 1024


class Outlet:
    """One sink's end in one task.

    Rows that wait are frozen at a barrier, and leave when the barrier's attempt is sealed. What an attempt that was given
    up had frozen stays pending and is part of the next (rule 4). An outlet that holds too much asks for a barrier,
    and for no more input until then.
    """

    def __init__(
        self,
        sink: str,
        *,
        write_to: Sink | None = None,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
        on_full: Callable[[], None] | None = None,
    ) -> None:
        """With `write_to`, rows go there at once; else they wait for the seal, and `on_full` is called when they are many."""
        self.sink = sink
        self.rows = 0
        self._write_to = write_to
        self._waiting_bytes_max = waiting_bytes_max
        self._on_full = on_full
        self._open: list[pl.DataFrame] = []
        self._open_bytes = 0
        self._frozen: list[tuple[Attempt, Piece]] = []

    @property
    def waits(self) -> bool:
        return self._write_to is None

    @property
    def has_waiting(self) -> bool:
        """Whether rows came since the last barrier; callable from any thread."""
        return bool(self._open)

    def take(self, frame: pl.DataFrame) -> None:
        self.rows += frame.height
        if self._write_to is not None:
            # A clone: other tasks may hold this frame, and writing locks it (see `epochs.run_file.encode_run`).
            self._write_to.write(frame.clone())
            return
        self._open.append(frame)
        self._open_bytes += int(frame.estimated_size())
        if self._open_bytes > self._waiting_bytes_max and self._on_full is not None:
            self._on_full()

    def restore(self, frames: Iterable[pl.DataFrame]) -> None:
        """Put back output of an earlier run that no epoch has released yet. Called before anything else comes out."""
        for frame in frames:
            self._open.append(frame)
            self._open_bytes += int(frame.estimated_size())

    def freeze(self, attempt: Attempt, committed: Attempt) -> tuple[Piece, ...]:
        """Everything that is not sealed yet, up to this barrier. `committed`: the newest attempt that has been sealed."""
        self._frozen = [(frozen, piece) for frozen, piece in self._frozen if frozen > committed]
        if self._open:
            frames, self._open, self._open_bytes = self._open, [], 0
            self._frozen.append((attempt, Piece(make=lambda: pl.concat(frames), keep=True)))
        return tuple(piece for _, piece in self._frozen)

    def close(self) -> None:
        if self._write_to is not None:
            self._write_to.close()


class TaskOutput(Protocol):
    """Takes rows out of the task."""

    def send(self, frame: pl.DataFrame, *, late: bool) -> None:
        """Queue rows for the tasks that come next."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """One fused step, and where its output goes, by port."""

    step: str
    operator: Operator
    links: Mapping[str, Sequence[str]] = field(default_factory=dict)
    outputs: Mapping[str, Sequence[TaskOutput]] = field(default_factory=dict)
    outlets: Mapping[str, Sequence[Outlet]] = field(default_factory=dict)


class Chain:
    """The fused steps of one task, heads first."""

    def __init__(
        self, links: Sequence[Link], heads: Sequence[str], *, subtask: int, fed_by_task: Sequence[Outlet] = ()
    ) -> None:
        """`heads` are the steps that take the task's input. `links` are in an order in which each comes after its feeder.

        `fed_by_task`: outlets for what the task itself puts out (dead letters).
        """
        self._links = {link.step: link for link in links}
        self._heads = tuple(heads)
        self._subtask = subtask
        self.late_rows = 0
        self.late_by_us = 0
        """By how much they were too late, at most."""
        self.failed_rows = 0
        """Rows that a user's function raised an exception for, and that were set aside."""
        fed = [outlet for link in links for outlets in link.outlets.values() for outlet in outlets]
        self._outlets = (*fed, *fed_by_task)

    @property
    def outlets(self) -> tuple[Outlet, ...]:
        return self._outlets

    def operators(self) -> dict[str, Operator]:
        return {name: link.operator for name, link in self._links.items()}

    def push(self, frame: pl.DataFrame, *, late: bool) -> None:
        """Take a batch of the task's input through the chain."""
        for head in self._heads:
            self._apply(head, frame, late=late)

    def on_watermark(self, us: int, *, mute: bool = False) -> None:
        """Move the time of every step, feeders first, so that the output of one reaches the next before its time moves.

        `mute`: what they emit is dropped.
        """
        for link in self._links.values():
            emits = link.operator.on_watermark(us)
            self._route(link, [] if mute else emits)

    def on_barrier(self, moment: Moment) -> None:
        """Let every step emit what is due once per epoch."""
        for link in self._links.values():
            self._route(link, link.operator.on_barrier(moment))

    def clock_due_us(self) -> int | None:
        """From when on, by the clock, a barrier has something to do for one of the steps; None: never. Called after `on_barrier`."""
        due = (link.operator.clock_due_us() for link in self._links.values())
        return min((at_us for at_us in due if at_us is not None), default=None)

    def freeze(self) -> tuple[FrozenState, ...]:
        return tuple(
            FrozenState(step=step, name=name, subtask=self._subtask, pieces=state.freeze(), state=state)
            for step, link in self._links.items()
            for name, state in link.operator.states().items()
        )

    def freeze_outlets(self, attempt: Attempt, committed: Attempt) -> dict[str, tuple[Piece, ...]]:
        """The output that waits for the seal, by sink."""
        return {outlet.sink: outlet.freeze(attempt, committed) for outlet in self._outlets if outlet.waits}

    def state_bytes(self) -> int:
        """About how much memory the states take."""
        return sum(state.size_bytes() for link in self._links.values() for state in link.operator.states().values())

    def close(self) -> None:
        for outlet in self._outlets:
            outlet.close()

    def _apply(self, step: str, frame: pl.DataFrame, *, late: bool) -> None:
        link = self._links[step]
        try:
            emits = link.operator.on_batch(frame, late=late)
        except FordstoneError:
            raise
        except Exception as error:
            if not any(note.startswith(IN_STEP) for note in getattr(error, "__notes__", ())):
                columns = ", ".join(frame.columns)
                error.add_note(f"{IN_STEP}{step}, on a batch of {frame.height} rows with columns {columns}")
            raise
        self._route(link, emits)

    def _route(self, link: Link, emits: Emits) -> None:
        for emit in emits:
            if emit.port == LATE:
                partial = ROWS in emit.frame.columns
                self.late_by_us = max(self.late_by_us, emit.late_by_us)
                self.late_rows += int(emit.frame.get_column(ROWS).sum()) if partial else emit.frame.height
            elif emit.port == DEAD:
                self.failed_rows += emit.frame.height
            for step in link.links.get(emit.port, ()):
                self._apply(step, emit.frame, late=emit.late)
            for output in link.outputs.get(emit.port, ()):
                output.send(emit.frame, late=emit.late)
            for outlet in link.outlets.get(emit.port, ()):
                outlet.take(emit.frame)
