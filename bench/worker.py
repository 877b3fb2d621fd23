"""Processes that are asked for one measurement after the other, so that A and B can be measured in turn, each warm.

Settings that count for a whole process (Polars' threads, what is in memory) differ between A and B; a process for each
keeps them apart. One line of JSON goes in for each request, one comes out.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

HERE = Path(__file__).parent
ANSWER_SECONDS_MAX = 900.0
"""The timeout after which a process without output is considered hung, and ended."""


class WorkerError(Exception):
    """The other process failed; its traceback has gone to stderr."""


class Asked(Protocol):
    """Something that can be asked for measurements."""

    def ask(self, function: str, **arguments: Any) -> Any:
        """Call `module.function` and wait for what it gives."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def worker(*, apart: bool, threads: int | None) -> Asked:
    """A process of its own; or this one, where nothing is measured in earnest and starting processes takes too long."""
    return Worker(threads=threads) if apart else Here()


class Here:
    """This process."""

    def ask(self, function: str, **arguments: Any) -> Any:
        return call(function, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""


class Worker:
    """One process. `threads`: how many threads Polars may use there; None: as many as there are cores."""

    def __init__(self, *, threads: int | None) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "POLARS_MAX_THREADS"}
        if threads is not None:
            environment["POLARS_MAX_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, function: str, **arguments: Any) -> Any:
        """Call `module.function` over there and wait for what it gives."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([function, arguments]) + "\n")
        process.stdin.flush()
        hangs = threading.Timer(ANSWER_SECONDS_MAX, process.kill)
        hangs.start()
        line = process.stdout.readline()
        hangs.cancel()
        if not line:
            raise WorkerError(f"{function} failed in a process of its own, which ended with {process.wait()}.")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def ask_once(function: str, *, apart: bool = True, **arguments: Any) -> Any:
    """The same in a process that nothing else was done in, with one thread for Polars."""
    with worker(apart=apart, threads=1) as asked:
        return asked.ask(function, **arguments)


def call(path: str, arguments: dict[str, Any]) -> Any:
    module, _, name = path.partition(".")
    return getattr(importlib.import_module(module), name)(**arguments)


def serve() -> None:
    """What the other process does until its input is closed."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed here must not look like an answer
    for line in sys.stdin:
        path, arguments = json.loads(line)
        answers.write(json.dumps(call(path, arguments)) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
