"""End a process whose Java process is gone.

Threads that talked to Java are still about then, inside of native code. If Python takes itself apart around them, now and
then one of them touches what is gone, and the process dies of a segmentation fault instead of giving its exit code.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Do what is left to do at the end of a process, and end it at once with this code."""
    atexit._run_exitfuncs()  # noqa: SLF001 - nothing else runs them without ending the process by its own way
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it has gone, or it is closed
            stream.flush()
    os._exit(code)
