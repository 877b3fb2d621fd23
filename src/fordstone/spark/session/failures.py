"""End a process whose Java process is gone.

Threads that talked to Java are still about then, inside of native code. If Python takes itself apart around them, now and
then one of them touches what is gone, and the process dies of a segmentation fault instead of giving its exit code.

Find in what Spark says of a failure the one thing that counts: what a Python worker raised, and where.

Spark wraps a worker's traceback into its own words, tracebacks of its own and plans, several times over. The innermost
traceback is the last one. If that is of a call to Java, what counts is what Java names as the cause. Reads text and nothing
else.
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
        said = [told for told in _JAVA_SAYS.findall(text[text.rindex(_IN_JAVA) :]) if told]
        # Spark's own errors have a name in brackets; what lies below them is about files and sockets.
        named = [told for told in said if told.startswith("[")]
        if said:
            return str((named or said)[-1])
    if trace is not None:
        return " ".join(trace.raised.split("\n"))
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if line and not line.startswith("at ")), "")


def _of_user(lines: list[str]) -> tuple[str, ...]:
    """The frames behind the last one of ours that are in nobody's library. A file that came in an archive is named as in it."""
    frames: list[tuple[str, list[str]]] = []
    for line in lines:
        found = _FRAME.fullmatch(line)
        if found is not None:
            file = _ARCHIVE.sub("", found["file"])
            frames.append((found["file"], [f'  File "{file}", line {found["line"]}, in {found["name"]}']))
        elif frames:
            frames[-1][1].append(line)
    ours = [place for place, (file, _) in enumerate(frames) if _OURS.search(file)]
    behind = frames[ours[-1] + 1 :] if ours else frames
    return tuple("\n".join(shown) for file, shown in behind if not _LIBRARY.search(file))


def leave(code: int) -> NoReturn:
    """Do what is left to do at the end of a process, and end it at once with this code."""
    atexit._run_exitfuncs()  # noqa: SLF001 - nothing else runs them without ending the process by its own way
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it has gone, or it is closed
            stream.flush()
    os._exit(code)
