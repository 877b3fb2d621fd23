"""After a failure of Spark: find what a Python worker raised, and end a process whose Java process is gone.

Spark wraps a worker's traceback into its own text, tracebacks and plans, several times over. The innermost traceback is the last
one. If it is of a call to Java, the cause that Java names counts.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

RAISED_LINES_MAX: Final = 20
_BEGINS: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)')
_ENDS: Final = re.compile(r"\s*$|\s*SQLSTATE|\s*at \S|JVM stacktrace|=== Streaming Query|Driver stacktrace|\t")
_OURS: Final = re.compile(r"(?:^|/)fordstone/(?:[a-z_]+/)+[a-z_]+\.py$")
_LIBRARY: Final = re.compile(r"/site-packages/|/dist-packages/|/lib/python\d|/pyspark\.zip/|/python/pyspark/|^<frozen")
_ARCHIVE: Final = re.compile(r"^.*\.zip/")
_IN_JAVA: Final = "py4j.protocol.Py4JJavaError: "
_JAVA_SAYS: Final = re.compile(r"^(?:Caused by)?: [\w.$]+: *(.*?)(?: +SQLSTATE.*)?$", re.MULTILINE)
"""After the name of the exception: of what a call raised, and of each of its causes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """What was raised in a worker."""

    frames: tuple[str, ...]
    """The frames of the user's code, as text of one or more lines."""
    raised: str
    """What was raised, and the notes to it."""

    def __str__(self) -> str:
        return "\n".join([*self.frames, self.raised])


def worker_trace(text: str) -> WorkerTrace | None:
    """The innermost traceback in what Spark says; None: there is none."""
    _, begins, rest = text.rpartition(_BEGINS)
    if not begins:
        return None
    lines = rest.lstrip("\n").splitlines()
    count = next((place for place, line in enumerate(lines) if not line.startswith(" ")), len(lines))
    raised = []
    for line in lines[count : count + RAISED_LINES_MAX]:
        if _ENDS.match(line):
            break
        raised.append(line)
    return WorkerTrace(frames=_of_user(lines[:count]), raised="\n".join(raised)) if raised else None


def last_words(text: str) -> str:
    """The failure in a line: what a worker raised, else what Spark says first."""
    trace = worker_trace(text)
    if trace is not None and trace.raised.startswith(_IN_JAVA):
        causes = [cause for cause in _JAVA_SAYS.findall(text[text.rindex(_IN_JAVA) :]) if cause]
        # Spark's own errors have a name in brackets; what lies below them is about files and sockets.
        named = [cause for cause in causes if cause.startswith("[")]
        if causes:
            return str((named or causes)[-1])
    if trace is not None:
        return " ".join(trace.raised.split("\n"))
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if line and not line.startswith("at ")), "")


def _of_user(lines: list[str]) -> tuple[str, ...]:
    """Return the frames after the last one of ours that are in no library. A file that came in an archive is named as in it."""
    frames: list[tuple[str, list[str]]] = []
    for line in lines:
        found = _FRAME.fullmatch(line)
        if found is not None:
            file = _ARCHIVE.sub("", found["file"])
            frames.append((found["file"], [f'  File "{file}", line {found["line"]}, in {found["name"]}']))
        elif frames:
            frames[-1][1].append(line)
    ours = [place for place, (file, _) in enumerate(frames) if _OURS.search(file)]
    later = frames[ours[-1] + 1 :] if ours else frames
    return tuple("\n".join(shown) for file, shown in later if not _LIBRARY.search(file))


def leave(code: int) -> NoReturn:
    """Run the exit functions, and end the process at once with this code.

    Threads that talked to Java still run then, inside of native code. If Python tears itself down around them, one of them may
    touch what is gone, and the process dies of a segmentation fault instead of returning its exit code.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - nothing else runs them without ending the process by its own way
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    os._exit(code)
