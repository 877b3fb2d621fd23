"""The Spark of one command: started with the command's settings, given the pipeline's file, and ended with the command.

Workers get functions by their import path, so they must be able to import the pipeline's file under its stem, as this process did,
and whatever its functions import from beside it: these files are sent as an archive. Installed packages must be in the executors'
environment. Of a directory with very many files, a home directory perhaps, only what this process has imported is sent.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JError
from pyspark.core.context import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from fordstone.errors import ConfigError, FordstoneError
from fordstone.spark.session.session import describe_failure, java_gone, session
from fordstone.spark.session.settings import local_cores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_WORKER_PYTHON = "spark.pyspark.python"
_IMPORT_PATH = "PYTHONPATH"
_WORKER_THREADS = "spark.executorEnv.POLARS_MAX_THREADS"


@contextmanager
def application(
    *, master: str | None = None, config: Mapping[str, str] | None = None, file: Path | None = None, **options: Any
) -> Iterator[SparkSession]:
    """A session for the time of the block. Where Spark runs in this process already, a session of it, which then stays.

    Options are those of `session`; `file` is the pipeline's Python file, which this process has loaded: its functions can then be
    called in workers. Raises `FordstoneError` if Spark could not be started; the text says why.
    """
    if master is not None and master.startswith("sc://"):
        raise ConfigError(
            f"{master} is a Spark Connect server, where a command cannot follow its query. "
            "Use it from Python: fordstone.spark.session(remote=...)."
        )
    given = dict(config or {})
    if _WORKER_PYTHON in given:
        # Spark itself hears of this setting from spark-submit only.
        os.environ["PYSPARK_PYTHON"] = given[_WORKER_PYTHON]
    given.setdefault(_WORKER_THREADS, os.environ.get("POLARS_MAX_THREADS", "1"))
    running = SparkContext._active_spark_context is not None  # noqa: SLF001 - asking in any other way would start one
    with _importable(file):
        try:
            spark = session(master=master, config=given, **options)
        except (PySparkException, Py4JError) as error:
            where = "" if master is None else f" with master {master}"
            why = describe_failure(str(error)) or type(error).__name__
            raise FordstoneError(f"Spark could not be started{where}: {why}") from error
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


SHIPPED_BYTES_MAX: Final = 64 * 1024 * 1024
LOOKED_AT_MAX: Final = 10_000
"""Files and directories below that of the pipeline's file."""
OURSELVES: Final = "fordstone"
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)


def ship(spark: SparkSession, file: Path, folder: Path) -> None:
    """Put the file and what belongs to it on the import path of every worker of the application.

    `folder` holds what is sent and has to stay as long as the application runs: executors that come later ask for it.

    Raises:
        ConfigError: It is more than anybody can mean.
    """
    data = packed(file.parent, belonging(file, sys.modules))
    # The same content has the same name: to Spark, a second file of one name with other content is an error.
    archive = folder / f"{file.stem}-{hashlib.sha256(data).hexdigest()[:16]}.zip"
    archive.write_bytes(data)
    spark.sparkContext.addPyFile(str(archive))


def belonging(file: Path, modules: Mapping[str, ModuleType]) -> list[Path]:
    """The file, what was imported from the directory that it is in, and what could be."""
    return sorted({file} | _imported(file.parent, modules) | _importable_files(file.parent))


def _imported(directory: Path, modules: Mapping[str, ModuleType]) -> set[Path]:
    """The Python files of what was imported from there: a module's own, a package's all."""
    found: set[Path] = set()
    for name, module in list(modules.items()):
        if "." in name or name == OURSELVES:
            continue
        places = [Path(place) for place in getattr(module, "__path__", ())]
        own = getattr(module, "__file__", None)
        for package in places:
            if package.parent == directory:
                found.update(path for path in package.rglob("*.py") if path.is_file())
        if not places and own is not None and Path(own).parent == directory and Path(own).suffix == ".py":
            found.add(Path(own))
    return found


def _importable_files(directory: Path) -> set[Path]:
    """All Python files there and in what could be packages; none, if looking for them takes too long."""
    found: set[Path] = set()
    looked_at = 0
    for folder, folders, names in os.walk(directory):
        place = Path(folder)
        looked_at += len(folders) + len(names)
        if looked_at > LOOKED_AT_MAX:
            return set()
        folders[:] = [name for name in folders if name.isidentifier() and _may_be_package(place / name)]
        found.update(place / name for name in names if name.endswith(".py") and name.removesuffix(".py").isidentifier())
    return found


def _may_be_package(folder: Path) -> bool:
    """Leave out environments, what Python caches, and this package, which executors have."""
    return folder.name not in {"__pycache__", OURSELVES} and not (folder / "pyvenv.cfg").exists()


def packed(directory: Path, files: list[Path]) -> bytes:
    """The files as a zip archive from which Python can import. The same files give the same bytes."""
    size = sum(path.stat().st_size for path in files)
    if size > SHIPPED_BYTES_MAX:
        raise ConfigError(
            f"the modules beside the pipeline's file have {size} bytes, too many to send to Spark's workers "
            f"(at most {SHIPPED_BYTES_MAX}). Install them where the executors' Python finds them, and not in {directory}."
        )
    contents = {path.relative_to(directory): path.read_bytes() for path in files}
    # Python finds a directory without __init__.py only if it has an entry of its own.
    folders = {folder for path in contents for folder in path.parents} - {Path()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [(f"{folder.as_posix()}/", b"") for folder in sorted(folders)] + [
            (path.as_posix(), data) for path, data in sorted(contents.items())
        ]:
            archive.writestr(zipfile.ZipInfo(name, date_time=_LONG_AGO), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()
