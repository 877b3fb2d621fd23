"""A run that goes on beside the caller: stop it, wait for it, look at its progress.

`Pipeline.start` makes one. The run has a thread of its own and gets no signals: it ends with its input, by `stop`, at the end of a `with`
block, or when the process exits, which stops it first.
"""

from __future__ import annotations

import asyncio
import atexit
import sysconfig
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self

from fordstone.errors import FordstoneError
from fordstone.protocol.progress import Progress, Report
from fordstone.runtime.signals import StopRequest

OnProgress = Callable[[Progress], None]
Work = Callable[[OnProgress | None, StopRequest | None], Report]
"""Runs until its input ends or the stop is requested: without a request to ask, by a signal."""


class Run:
    """A run that was started. As a context manager it is stopped at the end of the block."""

    def __init__(self, pipeline: str, work: Work, *, on_progress: OnProgress | None = None) -> None:
        self._pipeline = pipeline
        self._work = work
        self._on_progress = on_progress
        self._stop = StopRequest()
        self._over: Future[Report] = Future()
        self._progress: Progress | None = None
        self._thread = threading.Thread(target=self._run, name=f"fordstone-{pipeline}", daemon=True)
        # Exit functions are called in reverse order. The one that removes temporary directories is registered with the first finalizer:
        # it has to come after the run was stopped, which needs its directory until then.
        weakref.finalize(self, int).detach()
        atexit.register(self._stop_at_exit)
        self._thread.start()

    @property
    def progress(self) -> Progress | None:
        """The newest progress: rows in and out, the epoch, the watermark. None until the first, at the start."""
        report = self.report
        return self._progress if report is None else report.progress

    @property
    def report(self) -> Report | None:
        """How the run ended. None while it runs, and if it failed."""
        return self._over.result() if self._over.done() and self.error is None else None

    @property
    def error(self) -> BaseException | None:
        """Why the run failed. None while it runs, and if it ended well."""
        return self._over.exception() if self._over.done() else None

    @property
    def running(self) -> bool:
        return not self._over.done()

    @property
    def failed(self) -> bool:
        return self.error is not None

    def wait(self, timeout: float | None = None) -> Report:
        """Wait until the run is over, and return its report, or raise the error that it failed with.

        Raises:
            TimeoutError: it still runs after `timeout` seconds. It goes on, and so it does after a KeyboardInterrupt.
        """
        try:
            return self._over.result(timeout)
        except TimeoutError:
            if self._over.done():
                raise  # of the run itself
            raise TimeoutError(f"pipeline {self._pipeline} still runs after {timeout} s") from None
        except FordstoneError as error:
            raise shortened(error) from error.__cause__

    def stop(self, timeout: float | None = None) -> Report:
        """Finish the epoch and stop; return the report as `wait` does. May be called again."""
        self.request_stop()
        return self.wait(timeout)

    def request_stop(self) -> None:
        """Request the stop, and return at once."""
        self._stop.request()

    def join(self) -> None:
        """Wait until the run is over, however it ended."""
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.request()
        if kind is None:
            self.wait()
        else:
            self._thread.join()

    def __await__(self) -> Generator[Any, None, Report]:
        """`await run` is `run.wait()` without blocking the event loop. A task that is cancelled leaves the run as it is."""
        return self._awaited().__await__()

    async def _awaited(self) -> Report:
        try:
            return await asyncio.shield(asyncio.wrap_future(self._over))
        except FordstoneError as error:
            raise shortened(error) from error.__cause__

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.request()
        try:
            await self
        except Exception:
            if kind is None:
                raise

    def __repr__(self) -> str:
        if self.running:
            state = "running"
        elif (report := self.report) is not None:
            state = report.outcome
        else:
            state = "failed"
        counts = self.progress
        rows = "" if counts is None else f", {counts.rows_in:,} rows in, {counts.rows_out:,} out, epoch {counts.epoch}"
        return f"Run({self._pipeline}: {state}{rows})"

    def _run(self) -> None:
        try:
            self._over.set_result(self._work(self._show, self._stop))
        except BaseException as error:  # noqa: BLE001 - raised where the run is waited for
            self._over.set_exception(error)
        finally:
            atexit.unregister(self._stop_at_exit)

    def _show(self, progress: Progress) -> None:
        self._progress = progress
        if self._on_progress is not None:
            self._on_progress(progress)

    def _stop_at_exit(self) -> None:
        self._stop.request()
        self._thread.join()


_NOT_THE_USERS: Final = tuple(
    str(Path(folder)) for folder in {*sysconfig.get_paths().values(), str(Path(__file__).parents[1])}
)


def shortened(error: FordstoneError) -> FordstoneError:
    """The error without the frames of the engine: its text says what to do.

    An exception of the user's own code stays as the cause, with the frames from that code on.
    """
    cause = error.__cause__
    if cause is not None:
        inner = cause.__traceback__
        while inner is not None and inner.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            inner = inner.tb_next
        cause.__traceback__ = inner
        error.__cause__ = None if inner is None else shortened(cause) if isinstance(cause, FordstoneError) else cause
    error.__suppress_context__ = True
    return error.with_traceback(None)
