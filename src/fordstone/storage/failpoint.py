"""Failpoints: named places on the way to a commit at which a test can kill the process.

Production runs with `NoFailpoints`. A test sets one by name and count; the process then kills itself there, as a power
cut would: nothing is flushed or closed.

Invariant: every name that is hit is in one of the tuples below, so that tests can go through all of them: `FAILPOINTS`
(edge), `OUTBOX_FAILPOINTS` (edge to hub), `HUB_FAILPOINTS`, `SPARK_FAILPOINTS`, `CONTROL_FAILPOINTS` (hub to edge).
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Final, Protocol

from fordstone.errors import ConfigError

FAILPOINT_VARIABLE: Final = "FORDSTONE_FAILPOINT"
"""The environment variable with the failpoint of a process."""
FAILPOINTS: Final[tuple[str, ...]] = (
    "run.created",
    "run.synced",
    "run.renamed",
    "runs.dir-synced",
    "cut.appended",
    "cut.synced",
    "manifest.created",
    "manifest.synced",
    "manifest.renamed",
    "manifest.dir-synced",
    "sink.before-release",
    "sink.released",
    "retention.before",
    "retention.removed-manifest",
    "retention.removed-run",
    "upload.run",
    "upload.manifest",
    "merge.written",
    "merge.replaced",
)
SPARK_FAILPOINTS: Final[tuple[str, ...]] = (
    "batch.executed",
    "batch.sealed",
    "sink.released",
    "batch.released",
    "batch.kept",
)
OUTBOX_FAILPOINTS: Final[tuple[str, ...]] = (
    "outbox.blob-sent",
    "outbox.before-commit",
    "outbox.committed",
    "outbox.marked",
)
CONTROL_FAILPOINTS: Final[tuple[str, ...]] = (
    "control.fetched",
    "control.stored",
)
HUB_FAILPOINTS: Final[tuple[str, ...]] = (
    "hub.blob-written",
    "hub.blob-renamed",
    "hub.before-commit",
    "hub.committed",
    "hub.before-answer",
    "hub.gc-before",
    "hub.gc-forgotten",
    "hub.gc-removed",
)


class Failpoints(Protocol):
    """Is called when a named place is reached."""

    def hit(self, name: str) -> None:
        """Called just after the event that `name` says, on the thread that caused it. May not return."""


class NoFailpoints:
    """Does nothing."""

    __slots__ = ()

    def hit(self, name: str) -> None:
        """Do nothing."""


class KillAt:
    """Kills its own process at the `count`-th hit of one failpoint."""

    def __init__(self, name: str, count: int = 1, *, hits: Path | None = None) -> None:
        """Each hit appends its name as a line to the file `hits`, if given, before the process is killed."""
        self.name = name
        self.count = count
        self.hits = hits
        self._left = count
        self._mutex = threading.Lock()

    def hit(self, name: str) -> None:
        """Count the hit, and kill the process at the last one."""
        if name != self.name:
            return
        with self._mutex:
            self._left -= 1
            if self.hits is not None:
                with self.hits.open("a") as file:
                    file.write(f"{name}\n")
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def parse_failpoints(value: str) -> Failpoints:
    """Parse `name[:count][@file]`, the value of an environment variable; empty means none."""
    if not value.strip():
        return NoFailpoints()
    spec, _, hits = value.strip().partition("@")
    name, colon, count = spec.partition(":")
    known = dict.fromkeys((*FAILPOINTS, *SPARK_FAILPOINTS, *OUTBOX_FAILPOINTS, *HUB_FAILPOINTS, *CONTROL_FAILPOINTS))
    if name not in known:
        raise ConfigError(f"failpoint {name!r} does not exist. There are: {', '.join(known)}.")
    if colon and not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError(f"failpoint {value!r}: the count after ':' must be a whole number from 1 on.")
    return KillAt(name, int(count) if colon else 1, hits=Path(hits) if hits else None)


def failpoints_of_process() -> Failpoints:
    """Return the failpoint that the environment names, or none."""
    return parse_failpoints(os.environ.get(FAILPOINT_VARIABLE, ""))
