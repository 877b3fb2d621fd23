"""The coordinator: begins attempts, gathers acknowledgements, hands complete ones to the writer.

When to do what is judged in `protocol.pacing`. It is stepped like a task and never waits.

Invariants: one attempt at a time; attempts only grow, across restarts too; an attempt is sealed only with the snapshots
of all tasks; the next barrier carries the newest sealed attempt, so that outlets drop what is no longer pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from fordstone.connectors.base import Source
from fordstone.edge.engine.sealing import Sealing
from fordstone.edge.engine.source_task import BarrierOrder, SourceTask
from fordstone.plan.ids import Attempt, PartitionId, TaskId
from fordstone.protocol.clock import pipeline_clock_us
from fordstone.protocol.pacing import Begin, GiveUp, Pace, PacingFacts, Seal, Wait, decide
from fordstone.protocol.partitions import Follower
from fordstone.runtime.assignment import assign_new
from fordstone.runtime.clock import Clock
from fordstone.runtime.partition import find_followers
from fordstone.runtime.snapshot import Barrier, TaskSnapshot

_ENDED_LOAD: Final = 1 << 31
"""More than any number of partitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """A source, the tasks that read it, and which partitions are known."""

    source: Source
    tasks: tuple[SourceTask, ...]
    known: set[str]
    found: set[str] = field(default_factory=set)
    """Those that were there at the last barrier."""

    def gone(self, found: Sequence[PartitionId]) -> frozenset[str]:
        """The known partitions that are not there any more. One that declares its time may come back."""
        return frozenset() if self.tasks[0].source_step.declares_time else frozenset(self.known.difference(found))

    def has_ended(self, snapshots: Sequence[TaskSnapshot]) -> bool:
        """Whether the source has ended, and an epoch with these snapshots has all of its rows. Nobody waits for a control table."""
        step = self.tasks[0].source_step
        if step.replaces:
            return True
        if not self.source.ended():
            return False
        cuts = [
            snapshot.source.partitions
            for snapshot in snapshots
            if snapshot.source and snapshot.source.step == step.name
        ]
        done = {name for partitions in cuts for name, cut in partitions.items() if cut.done}
        return done.issuperset(self.known) and done.issuperset(self.source.partitions())

    def followers(self) -> dict[str, Follower]:
        """The partitions that a later one of their series continues. They may be read by other tasks than it."""
        ends = frozenset[str]().union(*(task.ends() for task in self.tasks))
        cuts = {name: cut for task in self.tasks for name, cut in task.cuts().items()}
        return find_followers(self.tasks[0].source_step, self.source, cuts, ends.__contains__)


class Coordinator:
    """One per engine. `acknowledge`, `request_barrier` and `finished` are called by tasks, `committed` by the writer."""

    def __init__(
        self,
        *,
        pace: Callable[[], Pace],
        clock: Clock,
        tasks: frozenset[TaskId],
        ends: frozenset[TaskId],
        sources: Mapping[str, SourceShare],
        submit: Callable[[Sealing], None],
        first_attempt: Attempt,
        overtakes: bool,
        bounded: bool,
        available_now: bool = False,
        before_us: int = 0,
        moved: Callable[[], bool] = lambda: True,
        idle_after: int = 1,
        piled_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`ends`: when all of these tasks have finished, all input has been processed. `before_us`: the wall clock at the last seal.

        `available_now`: stop after the sources have read what was there at the start. `moved`: whether rows came or time moved at a
        task since its last barrier. `idle_after`: after how many epochs in which nothing happened the pipeline is idle. With the
        number of checkpoints that are kept, all of them have all rows by then, and their positions were acknowledged to the sources. `piled_up`: as in
        `PacingFacts`.
        """
        self.wake: Callable[[], None] = lambda: None
        self.given_up = self._given_up_in_a_row = 0
        self.begun = 0
        self.over = False
        """The last attempt has been sealed."""
        self._pace = pace
        self._clock = clock
        self._tasks = tasks
        self._ends = ends
        self._sources = sources
        self._submit = submit
        self._overtakes = overtakes
        self._overtook = False
        self._before_us = before_us
        self._before_at_us = clock.monotonic_us()
        """The monotonic clock at that time, or when this process started."""
        self._now_us = before_us
        self._now_at_us = self._before_at_us
        self._bounded = bounded
        self._available_now = available_now
        self._settling = False
        """The attempt began after the sources had read all they should: partitions become idle and are done at its barrier."""
        self._settled = False
        """Such an attempt has been sealed. Time has moved on after its barrier, so one more attempt is needed, the last."""
        self._moved = moved
        self._idle_after = idle_after
        self._piled_up = piled_up
        self._empty_epochs = 0
        """How many epochs were sealed since something happened."""
        self._moved_before = True
        """Whether something happened, or may have, before the attempt that is under way and after the last that was sealed."""
        self._clock_due_us: int | None = None
        self._mail: deque[TaskSnapshot | TaskId] = deque()
        self._attempt = Attempt(first_attempt - 1)
        self._committed = Attempt(0)
        self._running = False
        self._last = False
        self._committing = False
        self._requested = False
        self._stopping = False
        self._acknowledged: dict[TaskId, TaskSnapshot] = {}
        self._finished: set[TaskId] = set()
        self._started_us = clock.monotonic_us()
        self._wait_until_us = 0

    # Called from other threads.

    def acknowledge(self, snapshot: TaskSnapshot) -> None:
        self._mail.append(snapshot)
        self.wake()

    def request_barrier(self) -> None:
        self._requested = True
        self.wake()

    def outlet_full(self) -> None:
        """Read no more until the output that waits has been sealed."""
        self._requested = True
        for task in self._source_tasks():
            task.pause(paused=True)
        self.wake()

    def finished(self, task: TaskId) -> None:
        self._mail.append(task)
        self.wake()

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    def committed(self, sealing: Sealing) -> None:
        self._committed = sealing.attempt
        self._before_us, self._before_at_us = sealing.now_us, self._now_at_us
        self._settled = self._settled or self._settling
        empty = not (self._moved_before or any(snapshot.moved for snapshot in sealing.snapshots))
        self._empty_epochs = self._empty_epochs + 1 if empty else 0
        self._given_up_in_a_row = 0
        self._moved_before = False
        due = (snapshot.clock_due_us for snapshot in sealing.snapshots)
        self._clock_due_us = min((at_us for at_us in due if at_us is not None), default=None)
        if sealing.last:
            self.over = True
        elif not (self._bounded or self._available_now) and self._input_has_ended(sealing):
            # The next epoch has no rows. It is the last, and recorded as one of bounded input: a replay comes to the same end.
            self._bounded = True
            for task in self._source_tasks():
                task.end_input()
        self._resume()
        # Last, because from here on the coordinator's own thread may begin the next attempt.
        self._committing = False
        self.wake()

    def stalled(self) -> None:
        """The writer cannot write: read no more until it can."""
        for task in self._source_tasks():
            task.pause(paused=True)

    # Called by the scheduler.

    @property
    def idle_wait_us(self) -> int | None:
        return max(self._wait_until_us - self._clock.monotonic_us(), 0)

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def running(self) -> bool:
        """Whether an attempt is under way, barriers or writing."""
        return self._running or self._committing

    def step(self) -> bool:
        """Process the reports that came and act on the decision; return whether anything was done."""
        took = self._take_mail()
        match decide(self._pace(), self._facts()):
            case Begin(last=last):
                self._begin(last=last)
            case Seal():
                self._seal()
            case GiveUp():
                self._give_up()
            case Wait(until_us=until_us):
                self._wait_until_us = until_us
                return took
            case other:
                assert_never(other)
        return True

    def _facts(self) -> PacingFacts:
        return PacingFacts(
            now_us=self._clock.monotonic_us(),
            started_us=self._started_us,
            running=self._running,
            missing=len(self._tasks) - len(self._acknowledged),
            committing=self._committing or self.over,
            requested=self._requested,
            drained=self._finished >= self._ends and self._bounded,
            stopping=self._stopping or self._settled,
            given_up=self._given_up_in_a_row,
            idle=self._is_idle(),
            piled_up=self._piled_up(),
        )

    def _is_idle(self) -> bool:
        """Whether nothing happens. Looking for partitions takes longest, so that is only done when a barrier would be due."""
        if self.running or self._available_now or self._empty_epochs < self._idle_after:
            return False
        if self._moved_before or self._moved():
            return False
        if self._clock_due_us is not None and self._clock_us(self._clock.wall_us()) >= self._clock_due_us:
            return False
        if self._bounded or self._clock.monotonic_us() < self._started_us + self._pace().interval_us:
            return True
        return all(share.found == set(share.source.partitions()) for share in self._sources.values())

    def _clock_us(self, wall_us: int) -> int:
        """Return the time for operators."""
        elapsed_us = self._clock.monotonic_us() - self._before_at_us
        return pipeline_clock_us(wall_us, before_us=self._before_us, elapsed_us=elapsed_us)

    def _take_mail(self) -> bool:
        took = False
        while self._mail:
            mail = self._mail.popleft()
            took = True
            if not isinstance(mail, TaskSnapshot):
                self._finished.add(mail)
            elif self._running and mail.attempt == self._attempt:
                self._acknowledged[mail.task] = mail
        return took

    def _begin(self, *, last: bool) -> None:
        self._attempt = Attempt(self._attempt + 1)
        self._running, self._last, self._requested = True, last, False
        self._started_us = self._clock.monotonic_us()
        self._acknowledged = {}
        self._settling = self._available_now and all(task.caught_up for task in self._source_tasks())
        self.begun += 1
        wall_us, self._now_at_us = self._clock.wall_us(), self._started_us
        self._now_us = self._clock_us(wall_us)
        # Rescaling and moving need an aligned cut, and so does the end: nothing may be in flight (rule 16).
        overtakes = self._overtakes and not last
        barrier = Barrier(
            attempt=self._attempt,
            committed=self._committed,
            overtakes=overtakes,
            last=last,
            now_us=self._now_us,
            before_us=self._before_us,
            wall_us=wall_us,
        )
        self._overtook = overtakes
        for share in self._sources.values():
            changes = not (last or self._bounded)
            joins = changes and not self._available_now
            found = share.source.partitions() if joins else ()
            # A task that has ended has announced the end of time: rows that it read now would be late.
            loads = [task.partition_count + (_ENDED_LOAD if task.finished else 0) for task in share.tasks]
            joining = assign_new(found, share.known, loads)
            gone = share.gone(found) if joins else frozenset()
            followers = share.followers() if changes else {}
            share.known.update(found)
            share.found.clear()
            share.found.update(found)
            for task, partitions in zip(share.tasks, joining, strict=True):
                task.inject(BarrierOrder(barrier=barrier, joining=partitions, gone=gone, followers=followers))

    def _seal(self) -> None:
        self._running, self._committing = False, True
        snapshots = tuple(self._acknowledged[task] for task in sorted(self._acknowledged))
        ended = self._finished >= self._ends and self._bounded and self._last
        self._submit(
            Sealing(
                attempt=self._attempt,
                snapshots=snapshots,
                ended=ended,
                last=self._last,
                bounded=self._bounded,
                overtakes=self._overtook,
                now_us=self._now_us,
            )
        )

    def _input_has_ended(self, sealing: Sealing) -> bool:
        tables = [share.tasks[0].source_step.replaces for share in self._sources.values()]
        return not all(tables) and all(share.has_ended(sealing.snapshots) for share in self._sources.values())

    def _give_up(self) -> None:
        self._running = False
        # Some tasks have passed its barrier, and count what happened from there on.
        self._moved_before = True
        self.given_up += 1
        self._given_up_in_a_row += 1
        self._started_us = self._clock.monotonic_us()
        self._resume()

    def _resume(self) -> None:
        for task in self._source_tasks():
            task.pause(paused=False)

    def _source_tasks(self) -> list[SourceTask]:
        return [task for share in self._sources.values() for task in share.tasks]
