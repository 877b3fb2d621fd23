"""Start a child process that cannot outlive this one, and hand on what it prints, line by line.

The child leads a process group of its own: a Ctrl-C at the terminal reaches only the parent, which stops its children in the
order that it wants. On Linux the kernel kills the child when the parent dies, however that happens. Elsewhere a parent that is
killed leaves its children behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final, Literal

LINE_CHARS_MAX: Final = 1 << 20
"""Of one printed line; what is longer comes in parts."""
READ_WAIT_S: Final = 5.0
"""Once a child has ended, what it printed is waited for so long: a grandchild may still hold the pipe."""
# A process of its own, for code between fork and exec may wait for ever for a lock that another thread of ours held. What is asked
# of the kernel (PR_SET_PDEATHSIG) outlasts exec; whose parent has died before it asked, ends.
_BIND: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
Stream = Literal["out", "err"]
OnLine = Callable[[str, Stream, str], None]
"""Called with the job's name, the stream and a line without its end; from a thread of the child's, one line after the other."""


class ChildProcess:
    """One started process; see `supervisor.Process`. Start it from a thread that lives as long as the children should."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        on_line: OnLine,
        environment: Mapping[str, str] | None = None,
        catch_out: bool = True,
    ) -> None:
        """`catch_out`: its standard output is handed on as lines too; else it goes where ours goes."""
        self._name = name
        self._on_line = on_line
        self._process = subprocess.Popen(  # noqa: S603 - a command of our own, without a shell
            bound(command),
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if catch_out else None,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._readers = [
            self._reader(stream, pipe)
            for stream, pipe in (("out", self._process.stdout), ("err", self._process.stderr))
            if pipe is not None
        ]

    @property
    def pid(self) -> int:
        """Its id, which is that of its group too."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs. After an end, all that it printed has been handed on."""
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(READ_WAIT_S)
        return code

    def terminate(self) -> None:
        """SIGTERM, to the process alone: it stops what it has started itself."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, to its group: what it has started goes too."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _reader(self, stream: Any, pipe: IO[str]) -> threading.Thread:
        thread = threading.Thread(target=self._read, args=(stream, pipe), name=f"{self._name}-{stream}", daemon=True)
        thread.start()
        return thread

    def _read(self, stream: Stream, pipe: IO[str]) -> None:
        with pipe:
            while line := pipe.readline(LINE_CHARS_MAX):
                self._on_line(self._name, stream, line.rstrip("\n"))


def bound(command: Sequence[str]) -> list[str]:
    """The command of a process that the kernel kills when this one dies. The first word is a path."""
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BIND, str(os.getpid()), *command]
