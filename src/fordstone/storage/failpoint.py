"""Failpoints: named places on the way to a commit where a test may end the process.

Production runs with `NoFailpoints`. A test sets one by name and count, and the process kills itself there as a power
cut would: nothing is flushed, nothing is closed.

Invariant: every name that is hit anywhere stands in `FAILPOINTS`, or in `SPARK_FAILPOINTS` if a query on Spark hits it, or in
`OUTBOX_FAILPOINTS` if it is on the way to the hub, or in `HUB_FAILPOINTS` if it is there, or in
`CONTROL_FAILPOINTS` if it is on the way back, so that a test can go through all of them.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Final, Protocol

from fordstone.errors import ConfigError

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
    "outbox.before-add",
    "outbox.added",
    "outbox.blob-sent",
    "outbox.before-commit",
    "outbox.committed",
    "outbox.marked",
    "outbox.trimmed",
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
    """Whoever wants to know, or to interfere, when a named place is reached."""

    def hit(self, name: str) -> None:
        """Called just after what `name` says has happened, on the thread that did it. May not return."""


class NoFailpoints:
    """Goes on."""

    __slots__ = ()

    def hit(self, name: str) -> None:
        """Do nothing."""


class KillAt:
    """Kills its own process at the `count`-th hit of one failpoint."""

    def __init__(self, name: str, count: int = 1, *, hits: Path | None = None) -> None:
        """Every hit adds its name as a line to the file `hits`, if given, before the process dies."""
        self.name = name
        self.count = count
        self.hits = hits
        self._left = count
        self._mutex = threading.Lock()

    def hit(self, name: str) -> None:
        """Count, note down, and die when it is time."""
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
    """Read `name[:count][@file]` as an environment variable gives it; nothing means none."""
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
