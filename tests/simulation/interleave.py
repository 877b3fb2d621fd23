"""Real threads of which exactly one runs at a time; a seed decides which one runs next.

`Interleaving` stands in for the names `threading` and `queue` of a module under test. A thread can be interrupted where it takes or
releases a lock, waits, puts into a queue or takes out of it, and nowhere else: between two such points it has the process for
itself. A seed always gives the same order. If no thread can run, that is a `DeadlockError`.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

STEPS_MAX: Final = 20_000
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
        self.turn = threading.Semaphore(0)


class Interleaving:
    """One run of some threads in the order of a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = Random(seed)
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

    def pause(self, can_run: Callable[[], bool] = lambda: True) -> None:
        """Let any thread run, and return when `can_run` holds and this one is chosen."""
        me = self._running
        if me is None:
            if not can_run():
                raise DeadlockError("nothing is left that could end this wait")
            return
        if self._failure is not None:
            raise _Abandoned
        me.can_run = can_run
        if self._hand_over() is not me:
            me.turn.acquire()
        if self._failure is not None:
            raise _Abandoned

    def _live(self, task: _Task, work: Callable[[], None]) -> None:
        task.turn.acquire()
        try:
            if self._failure is None:
                work()
        except _Abandoned:
            pass
        except BaseException as failure:  # noqa: BLE001 - raised by `run`
            self._fail(failure)
        self._tasks.remove(task)
        self._hand_over()

    def _hand_over(self) -> _Task | None:
        """Choose the next thread. After a failure the others run to their ends, one after another."""
        self._steps += 1
        able = [task for task in self._tasks if self._failure is not None or task.can_run()]
        if self._tasks and (not able or self._steps == STEPS_MAX):
            what = f"no end within {STEPS_MAX} steps" if able else "no thread can run"
            self._fail(DeadlockError(f"seed {self.seed}: {what}: {', '.join(task.name for task in self._tasks)}"))
            able = list(self._tasks)
        before, self._running = self._running, self._rng.choice(able) if able else None
        if self._running is None:
            self._over.set()
        elif self._running is not before:
            self._running.turn.release()
        return self._running

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
        self._threads.pause(lambda: timeout is not None or ticket not in self._waiting)
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


class _Event:
    def __init__(self, threads: Interleaving) -> None:
        self._threads = threads
        self._set = False

    def is_set(self) -> bool:
        self._threads.pause()
        return self._set

    def set(self) -> None:
        self._set = True
        self._threads.pause()

    def clear(self) -> None:
        self._set = False
        self._threads.pause()

    def wait(self, timeout: float | None = None) -> bool:
        """With a timeout, it may pass at any time."""
        self._threads.pause(lambda: timeout is not None or self._set)
        return self._set


class _Queue:
    def __init__(self, threads: Interleaving) -> None:
        self._threads = threads
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._threads.pause()
        self._items.append(item)
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
