"""The heap of one of Spark's Python workers: what lives as long as the process is left alone by the garbage collector.

Between two tasks of a worker Spark collects all garbage, and so goes through every object of every imported module: about
50 ms each time, which is more than all the rest of a small task.
"""

from __future__ import annotations

import gc
import os
from typing import Final

_REUSED: Final = "SPARK_REUSE_WORKER"
"""Set by Spark in the environment of workers that do many tasks."""


def leave_alone_what_stays() -> None:
    """Called at the end of every task, when what it needs is imported. Acts once a process, and only in such a worker."""
    if _REUSED in os.environ and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
