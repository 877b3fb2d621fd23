"""Names and numbers that must not be mixed up, as types of their own."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final, NewType

from fordstone.errors import PipelineError

PartitionId = NewType("PartitionId", str)
"""One replayable part of a source: a file, a topic partition, a generator lane."""
Position = NewType("Position", int)
"""Where a partition stands: reading from it gives exactly what follows. Bytes, rows or sequence numbers."""
Epoch = NewType("Epoch", int)
"""Numbered from 1 without gaps; given at commit."""
Attempt = NewType("Attempt", int)
"""The number on a barrier; only grows, and may skip."""
TaskId = NewType("TaskId", str)
"""`vertex/subtask`."""

KEY_GROUPS: Final = 128
"""Into how many slices the key space is cut. Part of what is stored; never changes."""

NAME_PATTERN: Final = r"[A-Za-z0-9_](?!.*\.\.)[A-Za-z0-9_.-]{0,99}"
"""The form of names: they may stand in a path and a log line."""
_NAME: Final = re.compile(NAME_PATTERN)


def checked_name(name: str, what: str) -> str:
    """Return `name` if it has the form of names, else raise."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise PipelineError(
            f"{what} {name!r}: a name has 1 to 100 letters, digits, '_', '-' or single '.', and starts with none of '.-'."
        )
    return name


def free_name(base: str, taken: Container[str]) -> str:
    """Return `base`, with a number appended if it is taken."""
    count = 1
    while (name := base if count == 1 else f"{base}_{count}") in taken:
        count += 1
    return name


def owner_of(key_group: int, parallelism: int) -> int:
    """Which of `parallelism` subtasks owns a key group."""
    return key_group * parallelism // KEY_GROUPS
