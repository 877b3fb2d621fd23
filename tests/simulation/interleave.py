"""Real threads of which exactly one runs at a time; a seed decides which one runs next.

`Interleaving` stands in for the names `threading` and `queue` of a module under test. A thread can be interrupted where it takes or
releases a lock, waits, puts into a queue or takes out of it, and nowhere else: between two such points it has the process for
itself. In the modules that are `traced` it can be interrupted anywhere, between any two instructions of the interpreter. A seed always
gives the same order.

If no thread can run, that is a `DeadlockError`. So is it if threads do nothing any more but wait until their timeouts pass: what wakes one
was lost, and only the clock would go on.
"""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

STEPS_MAX: Final = 20_000
TIMEOUTS_MAX: Final = 200
"""How many waits may time out, each while no thread could run otherwise, before somebody sets, notifies, puts or ends something."""
INTERRUPTED: Final = 0.1
"""How often a thread is interrupted at an instruction of a traced module."""
REAL_SECONDS_MAX: Final = 60.0


class DeadlockError(AssertionError):
    """No thread can run, or the threads do not end."""


class _Abandoned(BaseException):
    """Ends the other threads of an interleaving that has failed."""


class _Task:
    """A thread, and what it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.can_run: Callable[[], bool] = lambda: True
        self.may_time_out = False
        self.turn = threading.Semaphore(0)


class Interleaving:
    """One run of some threads in the order of a seed."""

    def __init__(self, seed: int, *, traced: Collection[ModuleType] = (), steps_max: int = STEPS_MAX) -> None:
        self.seed = seed
        self._rng = Random(seed)
        self._traced = frozenset(module.__file__ for module in traced)
        self._steps_max = steps_max
        self._timeouts = 0
        self.on_idle: Callable[[], None] = lambda: None
        """Called when nothing happens unless a wait times out: for a simulated clock."""
        self._tasks: list[_Task] = []
        self._running: _Task | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._steps = 0

    @contextmanager
    def inside(self, *modules: ModuleType, excludes: bool = True) -> Iterator[None]:
        """Let these modules make their locks, queues and threads here. Without `excludes`, plain locks let everybody in."""
        names: dict[str, Any] = {
            "threading": SimpleNamespace(
                Lock=lambda: _Lock(self, excludes=excludes),
                RLock=lambda: _Lock(self, reentrant=True),
                Condition=lambda: _Condition(self),
                Event=lambda: _Event(self),
                Thread=lambda **given: _Thread(self, **given),
            ),
            "queue": SimpleNamespace(SimpleQueue=lambda: _Queue(self), Empty=queue.Empty),
            "Future": lambda: _future(self),
        }
        patches = [
            patch.object(module, name, names[name]) for module in modules for name in names if name in vars(module)
        ]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()

    def lock(self) -> _Lock:
        return _Lock(self)

    def event(self) -> _Event:
        return _Event(self)

    def run(self, *works: Callable[[], None]) -> None:
        """Run these, each on a thread, and the threads that they start, to their ends. Raises the first failure, with the seed."""
        for number, work in enumerate(works):
            self.start(work, f"thread {number}")
        self._hand_over()
        if not self._over.wait(REAL_SECONDS_MAX):
            self._failure = DeadlockError("a thread waits for something outside of the interleaving")
        if self._failure is not None:
            self._failure.add_note(f"interleaving of seed {self.seed}")
            raise self._failure

    def start(self, work: Callable[[], None], name: str) -> _Task:
        """Add a thread. It runs when it is chosen."""
        task = _Task(name)
        self._tasks.append(task)
        threading.Thread(target=self._live, args=(task, work), name=name, daemon=True).start()
        return task

    def has_ended(self, task: _Task) -> bool:
        return task not in self._tasks

    def me(self) -> _Task | None:
        """The thread that runs; None before the first one and after the last one."""
        return self._running

    def pause(self, can_run: Callable[[], bool] = lambda: True, *, may_time_out: bool = False) -> None:
        """Let any thread run, and return when this one is chosen, and `can_run` holds or its wait has timed out."""
        me = self._running
        if me is None:
            if not (can_run() or may_time_out):
                raise DeadlockError("nothing is left that could end this wait")
            return
        if self._failure is not None:
            raise _Abandoned
        me.can_run, me.may_time_out = can_run, may_time_out
        if self._hand_over() is not me:
            me.turn.acquire()
        if self._failure is not None:
            raise _Abandoned

    def changed(self) -> None:
        """Something was set, notified or put: a thread may go on for another reason than a timeout."""
        self._timeouts = 0

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        """Called for each call in a thread, and then for each instruction in the modules that are traced."""
        del arg
        if frame.f_code.co_filename not in self._traced:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and self._rng.random() < INTERRUPTED:
            self.pause()
        return self._trace

    def _live(self, task: _Task, work: Callable[[], None]) -> None:
        task.turn.acquire()
        if self._traced:
            sys.settrace(self._trace)
        try:
            if self._failure is None:
                work()
        except _Abandoned:
            pass
        except BaseException as failure:  # noqa: BLE001 - raised by `run`
            self._fail(failure)
        if self._traced:
            sys.settrace(None)
        self._tasks.remove(task)
        self.changed()
        self._hand_over()

    def _hand_over(self) -> _Task | None:
        """Choose the next thread. After a failure the others run to their ends, one after another."""
        self._steps += 1
        able = [task for task in self._tasks if self._failure is not None or task.can_run()]
        late = [task for task in self._tasks if task.may_time_out and task not in able]
        if late and not able:
            self._timeouts += 1
            self.on_idle()
        able += late
        problem = None
        if not able:
            problem = "no thread can run"
        elif self._timeouts > TIMEOUTS_MAX:
            problem = "threads wait for nothing but their timeouts"
        elif self._steps == self._steps_max:
            problem = f"no end within {self._steps_max} steps"
        if self._tasks and problem is not None and self._failure is None:
            self._fail(DeadlockError(f"seed {self.seed}: {problem}: {', '.join(task.name for task in self._tasks)}"))
            able = list(self._tasks)
        before, following = self._running, self._rng.choice(able) if able else None
        self._running = following
        # From the release on the other thread runs, and may hand over in turn.
        if following is None:
            self._over.set()
        elif following is not before:
            following.turn.release()
        return following

    def _fail(self, failure: BaseException) -> None:
        self._failure = self._failure or failure


class _Lock:
    def __init__(self, threads: Interleaving, *, reentrant: bool = False, excludes: bool = True) -> None:
        self._threads = threads
        self._excludes = excludes
        self._reentrant = reentrant
        self._owner: object = None
        self._depth = 0

    def acquire(self) -> bool:
        me = self._threads.me() or "outside"
        if not (self._reentrant and self._owner == me):
            self._threads.pause(lambda: not self._depth or not self._excludes)
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._threads.pause()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition(_Lock):
    def __init__(self, threads: Interleaving) -> None:
        super().__init__(threads, reentrant=True)
        self._waiting: list[object] = []

    def wait(self, timeout: float | None = None) -> bool:
        ticket = object()
        self._waiting.append(ticket)
        self.release()
        self._threads.pause(lambda: ticket not in self._waiting, may_time_out=timeout is not None)
        notified = ticket not in self._waiting
        if not notified:
            self._waiting.remove(ticket)
        self.acquire()
        return notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        while not predicate():
            if not self.wait(timeout):
                return predicate()
        return True

    def notify_all(self) -> None:
        self._waiting.clear()
        self._threads.changed()


class _Event:
    def __init__(self, threads: Interleaving) -> None:
        self._threads = threads
        self._set = False

    def is_set(self) -> bool:
        self._threads.pause()
        return self._set

    def set(self) -> None:
        self._set = True
        self._threads.changed()
        self._threads.pause()

    def clear(self) -> None:
        self._set = False
        self._threads.pause()

    def wait(self, timeout: float | None = None) -> bool:
        """With a timeout, it may pass at any time."""
        self._threads.pause(lambda: self._set, may_time_out=timeout is not None)
        return self._set


class _Queue:
    def __init__(self, threads: Interleaving) -> None:
        self._threads = threads
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._threads.pause()
        self._items.append(item)
        self._threads.changed()
        self._threads.pause()

    def get(self) -> Any:
        self._threads.pause(lambda: bool(self._items))
        return self._items.popleft()

    def get_nowait(self) -> Any:
        self._threads.pause()
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class _Thread:
    def __init__(
        self,
        threads: Interleaving,
        *,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool = True,
    ) -> None:
        self._threads = threads
        self._work = lambda: target(*args)
        self.name = name
        self._task: _Task | None = None

    def start(self) -> None:
        self._task = self._threads.start(self._work, self.name)
        self._threads.pause()

    def is_alive(self) -> bool:
        return self._task is not None and not self._threads.has_ended(self._task)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, without a timeout: a thread that never ends is a deadlock."""
        del timeout
        self._threads.pause(lambda: not self.is_alive())


def _future(threads: Interleaving) -> concurrent.futures.Future[Any]:
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()
    made._condition = _Condition(threads)  # type: ignore[assignment]  # it has what a future uses
    return made
