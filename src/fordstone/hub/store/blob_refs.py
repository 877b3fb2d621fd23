"""How often each blob is named: counted in the log with everything that adds or removes a name.

Invariant: a blob with a count above zero is never removed, and nothing names a blob that is not there.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fordstone.state.base import RunRef

ASKED_AT_ONCE: Final = 500


def absent(db: sqlite3.Connection, runs: Sequence[RunRef]) -> set[str]:
    """Which of these blobs are not there, or not with this size (then what is there is not whole)."""
    wanted = {run.digest: run.size_bytes for run in runs}
    gone = {run.digest for run in runs if wanted[run.digest] != run.size_bytes}
    sizes = sizes_of(db, wanted)
    return gone | {digest for digest, size in wanted.items() if sizes.get(digest) != size}


def sizes_of(db: sqlite3.Connection, digests: Iterable[str]) -> dict[str, int]:
    """The sizes of those that are there."""
    wanted = list(digests)
    sizes: dict[str, int] = {}
    for start in range(0, len(wanted), ASKED_AT_ONCE):
        part = wanted[start : start + ASKED_AT_ONCE]
        marks = ",".join("?" * len(part))
        sizes.update(db.execute(f"SELECT digest, size_bytes FROM blobs WHERE digest IN ({marks})", part))  # noqa: S608 - only question marks
    return sizes


def rename(db: sqlite3.Connection, changes: Mapping[str, int]) -> None:
    """Count names added (above zero) and taken away (below)."""
    db.executemany(
        "UPDATE blobs SET refs = refs + ? WHERE digest = ?",
        [(change, digest) for digest, change in changes.items() if change],
    )


def counted(runs: Iterable[RunRef]) -> Counter[str]:
    """How often each blob is named."""
    return Counter(run.digest for run in runs)
