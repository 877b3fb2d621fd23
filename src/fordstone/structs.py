"""Prepares the classes that are decoded, before several threads decode them.

msgspec builds what it needs of a class when it is decoded for the first time, and lets other threads use that before it is complete: two
threads that decode one class for the first time can crash the process. Whatever starts threads calls `prepare_structs` before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import msgspec

_PACKAGE: Final = __name__.partition(".")[0]
_one_at_a_time: Final = threading.Lock()


def prepare_structs() -> None:
    """Build what msgspec needs of all loaded classes of this package. What is there already is not built again."""
    with _one_at_a_time:
        for each in _classes(msgspec.Struct):
            if each.__module__.partition(".")[0] == _PACKAGE:
                # One whose annotations cannot be resolved, or are of types that msgspec lacks, is never decoded.
                with contextlib.suppress(NameError, TypeError):
                    msgspec.json.Decoder(each)


def _classes(base: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in base.__subclasses__():
        yield each
        yield from _classes(each)
