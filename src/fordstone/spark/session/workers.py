"""Python workers of the executors: check that they can run a plan, and keep their garbage collections short.

The check costs one small job, and makes the error say what is missing there. Executors that come later are not checked.
"""

from __future__ import annotations

import gc
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import fordstone
from fordstone.errors import ConfigError

NEEDED = ("fordstone", "polars", "pyarrow", "pandas", "msgspec", "sqlglot")
ASKED_MAX = 64
_PYTHON_ERROR = re.compile(r"(?:pyspark\.[\w.]+\.)?[A-Z]\w*(?:Error|Exception): ")
_TASK_FAILURE = re.compile(r"most recent failure: Lost task .*? \([^()]* executor \w+\): (.+)")
_HOW = (
    "Executors need the same Python and the same packages as the driver: install 'fordstone[spark]' on every machine, or "
    "send an environment along (spark-submit --archives env.tar.gz#env with PYSPARK_PYTHON=./env/bin/python)"
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WorkerFacts:
    """What one executor's Python says of itself."""

    host: str
    python: str
    missing: tuple[str, ...]
    fordstone: str


def complaints(workers: Iterable[WorkerFacts], *, python: str, version: str) -> list[str]:
    """What stands in the way of running there what was built here."""
    found = []
    for worker in sorted(set(workers)):
        if worker.python.split(".")[:2] != python.split(".")[:2]:
            found.append(f"{worker.host}: Python {worker.python}, where the driver has {python}")
        if worker.missing:
            found.append(f"{worker.host}: without {', '.join(worker.missing)}")
        elif worker.fordstone != version:
            found.append(f"{worker.host}: Fordstone {worker.fordstone}, where the driver has {version}")
    return found


def check_workers(spark: SparkSession, tasks: int) -> None:
    """Run one task on each of as many cores.

    Raises:
        ConfigError: Some executor cannot run a plan; the text says which, why, and what to do.
    """
    parts = max(1, min(tasks, ASKED_MAX))
    asked = spark.range(0, parts, 1, parts).mapInArrow(
        _question(NEEDED), "host string, python string, missing string, fordstone string"
    )
    try:
        rows = asked.collect()
    except (PySparkException, Py4JError) as error:
        raise ConfigError(f"the executors cannot run Python: {_cause(error)}\n{_HOW}") from error
    workers = [
        WorkerFacts(
            host=row.host, python=row.python, missing=tuple(filter(None, row.missing.split())), fordstone=row.fordstone
        )
        for row in rows
    ]
    found = complaints(workers, python=platform.python_version(), version=fordstone.__version__)
    if found:
        raise ConfigError("the executors cannot run the plan:\n" + "".join(f"  {line}\n" for line in found) + _HOW)


def _question(needed: tuple[str, ...]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    # A function inside a function is sent as it is; one of this module would have to be found there.
    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import importlib.util  # noqa: PLC0415 - runs elsewhere
        import platform  # noqa: PLC0415 - as above
        import socket  # noqa: PLC0415 - as above

        import pyarrow as pa  # noqa: PLC0415 - as above

        for _ in batches:
            pass
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        version = ""
        if "fordstone" not in missing:
            import fordstone  # noqa: PLC0415 - as above

            version = fordstone.__version__
        row = {
            "host": socket.gethostname(),
            "python": platform.python_version(),
            "missing": " ".join(missing),
            "fordstone": version,
        }
        yield pa.RecordBatch.from_pylist([row])

    return answer


def _cause(error: Exception) -> str:
    """The one line of a trace that says what happened."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    raised = [line for line in reversed(lines) if _PYTHON_ERROR.match(line)]
    failed = [found[1] for line in lines if (found := _TASK_FAILURE.search(line))]
    return [*raised, *failed, *lines, type(error).__name__][0]


_REUSED: Final = "SPARK_REUSE_WORKER"
"""Set by Spark in the environment of workers that do many tasks."""


def freeze_gc() -> None:
    """Called at the end of every task, when what it needs is imported. Acts once per process, and only in such a worker.

    Between two tasks Spark collects all garbage, and so visits every object of every imported module: about 50 ms each time,
    which is more than all the rest of a small task.
    """
    if _REUSED in os.environ and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
