"""The Spark of one command: started with the command's settings, given the pipeline's file, and ended with the command."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.core.context import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from fordstone.errors import ConfigError, FordstoneError
from fordstone.spark.session.session import java_gone, session
from fordstone.spark.session.settings import local_cores
from fordstone.spark.session.shipping import ship

_WORKER_PYTHON = "spark.pyspark.python"
_IMPORT_PATH = "PYTHONPATH"
_WORKER_THREADS = "spark.executorEnv.POLARS_MAX_THREADS"


@contextmanager
def application(
    *,
    name: str,
    master: str | None = None,
    memory: str | None = None,
    log_level: str = "OFF",
    config: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Iterator[SparkSession]:
    """A session for the time of the block. Where Spark runs in this process already, a session of it, which then stays.

    Args:
        name: The application's name.
        master: As for `session`, and so are `memory`, `log_level` and `config`.
        memory: See there.
        log_level: See there.
        config: See there.
        file: The pipeline's Python file, which this process has loaded: its functions can then be called in workers.

    Raises:
        FordstoneError: Spark could not be started; the text says why.
    """
    if master is not None and master.startswith("sc://"):
        raise ConfigError(
            f"{master} is a Spark Connect server, where a command cannot follow its query. "
            "Use it from Python: fordstone.spark.session.session(remote=...)."
        )
    given = dict(config or {})
    if _WORKER_PYTHON in given:
        # Spark itself hears of this setting from spark-submit only.
        os.environ["PYSPARK_PYTHON"] = given[_WORKER_PYTHON]
    given.setdefault(_WORKER_THREADS, os.environ.get("POLARS_MAX_THREADS", "1"))
    running = SparkContext._active_spark_context is not None  # noqa: SLF001 - nobody else can say so without starting one
    with _importable(file):
        spark = _started(name, master, memory, log_level, given)
        try:
            if file is not None and (running or local_cores(spark.sparkContext.master, 1) is None):
                folder = Path(tempfile.mkdtemp(prefix="fordstone-"))
                # Not before: executors ask for what is in it as long as the application lives, which may be longer than the block.
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                ship(spark, file, folder)
            yield spark
        finally:
            if not running and not java_gone(spark):
                spark.stop()


@contextmanager
def _importable(file: Path | None) -> Iterator[None]:
    """Let the processes that Spark starts on this machine, all its workers where it is local, import what lies beside the file."""
    before = os.environ.get(_IMPORT_PATH)
    if file is not None:
        os.environ[_IMPORT_PATH] = os.pathsep.join(filter(None, (str(file.parent), before)))
    try:
        yield
    finally:
        if before is not None:
            os.environ[_IMPORT_PATH] = before
        elif file is not None:
            del os.environ[_IMPORT_PATH]


def _started(
    name: str, master: str | None, memory: str | None, log_level: str, config: Mapping[str, str]
) -> SparkSession:
    try:
        return session(name=name, master=master, memory=memory, log_level=log_level, config=config)
    except (PySparkException, Py4JError) as error:
        where = "" if master is None else f" with master {master}"
        raise FordstoneError(f"Spark could not be started{where}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What Java says, without its stack."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("at ", "...", "An error occurred while calling"))]
    return " ".join(told[:2]).lstrip(": ") or type(error).__name__
