"""Make a Spark session that a plan can run in, or make one out of the user's.

`session` starts Spark; `prepared` takes a session that is there. Either way the result has the settings that a plan's
meaning needs, and the user's own session keeps its settings. Which settings: `settings`; which Java: `java`. Executors that are
processes of their own are asked by one small job whether they can run a plan; those that come later are not. Spark wraps the
traceback of a worker into its own text several times over: the innermost one counts (`worker_trace`).
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import re
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, functions

import fordstone
from fordstone.errors import ConfigError, FordstoneError, StorageError
from fordstone.spark.formats.register import register
from fordstone.spark.session import java
from fordstone.spark.session.java import start_java
from fordstone.spark.session.settings import (
    MEANING,
    SHARDS_MAX,
    SPARK_MIN,
    Surroundings,
    Wish,
    local_cores,
    settings,
    tasks_max,
    too_old,
)
from fordstone.storage.remote import local_path, open_remote

log = logging.getLogger(__name__)
_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
_LOG_FILE = Path(__file__).with_name("log4j2.properties")
# How Spark is run is set elsewhere: by spark-submit, or by a Spark of the user's.
_CONFIGURED_BY = ("PYSPARK_GATEWAY_PORT", "SPARK_HOME", "SPARK_CONF_DIR")


def session(
    *,
    master: str | None = None,
    name: str = "fordstone",
    memory: str | None = None,
    cores: int | None = None,
    log_level: str = "OFF",
    config: Mapping[str, str] | None = None,
    remote: str | None = None,
) -> SparkSession:
    """Start Spark, ready for a plan, and give its session; where Spark runs in this process already, a session of it.

    Sets JAVA_HOME, PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON in this process's environment, because Spark's start scripts
    and its workers read them there; nothing else of Fordstone does so, and importing does not.

    Args:
        master: Where Spark runs: `local[4]`, `spark://host:7077`, ... By default what spark-submit or SPARK_CONF_DIR says,
            else this machine with all its cores.
        name: The application's name.
        memory: Of this process where Spark is local (default 2g), else of each executor; `512m`, `2g`.
        cores: How many tasks run at once.
        log_level: From which level on Spark's own log goes to standard error. Failures of a query are raised, not logged.
        config: Spark settings, which win over ours, but for those that would change what a plan means.
        remote: A Spark Connect server, `sc://host:15002`; where nothing is said of a master either, SPARK_REMOTE. Needs no
            Java here; goes without master, memory and cores.

    Raises:
        JavaMissingError: There is no Java that Spark can use.
        ConfigError: An argument makes no sense, or Spark runs here already and with another master.
    """
    wish = Wish(master=master, name=name, memory=memory, cores=cores, log_level=log_level, config=dict(config or {}))
    if remote is None and master is None:
        remote = os.environ.get("SPARK_REMOTE")
    if remote is not None:
        return _remote_session(remote, wish)
    if SparkContext._active_spark_context is not None:  # noqa: SLF001 - the session of this thread may be another, or none
        running = SparkSession.builder.getOrCreate()
        _same_master(running, wish)
        return prepared(running)
    chosen = settings(wish, _surroundings())
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ["JAVA_HOME"] = str(java.home())
    if local_cores(chosen.get("spark.master"), 1) is None:
        # On other machines Python may be elsewhere; a path that was set is kept.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    else:
        os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # It logs every batch that was stopped, with a trace; a failure of ours comes back as the query's.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)
    start_java(SparkConf(loadDefaults=False).setAll(list(chosen.items())))
    started = SparkSession.builder.config(map=dict(chosen)).getOrCreate()
    register(started)
    return started


def prepared(spark: SparkSession) -> SparkSession:
    """A new session of the same application that a plan can run in; `spark` itself stays as it is.

    What was set in `spark` holds in the new session too, but for the settings that a plan's meaning needs and for
    `spark.sql.legacy.*`. Temporary views are not carried over. Ending Spark ends both.

    Raises:
        ConfigError: That Spark is too old, does not let us set what the plan's meaning needs, or has executors (where they
            are processes of their own) whose Python cannot run a plan.
    """
    _new_enough(spark)
    theirs = spark.conf.getAll
    ready = spark.newSession()
    if is_connect(spark):
        # A further session that is still open when Python ends waits for ever for its connection to close.
        atexit.register(_stop, weakref.ref(ready))
    ours = ready.conf.getAll
    for key, value in theirs.items():
        if key not in MEANING and not key.startswith("spark.sql.legacy.") and ours.get(key) != value:
            # What cannot be set is the application's, and so the same in both.
            with suppress(PySparkException):
                ready.conf.set(key, value)
    _make_ready(ready)
    return ready


def is_connect(spark: SparkSession) -> bool:
    """Whether this session speaks to a Spark Connect server, and so has no SparkContext here."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def java_gone(spark: SparkSession) -> bool:
    """Whether the Java process of this session no longer answers: nothing works any more in this Python process."""
    if is_connect(spark):
        return False
    try:
        spark.sparkContext._jvm.java.lang.System.nanoTime()  # type: ignore[union-attr]  # noqa: SLF001 - any call will do
    except (Py4JError, OSError):
        return True
    return False


def parallelism(spark: SparkSession) -> int:
    """How many tasks this application may come to run at once; from 1 to the number of key groups.

    On a cluster executors come one by one, and may come and go: what the application may grow to counts, if that is more.
    """
    if is_connect(spark):
        # The server does not say; it cuts a range into as many partitions as it runs tasks.
        places = spark.range(SHARDS_MAX).select(functions.spark_partition_id()).collect()
        found = len({row[0] for row in places})
    else:
        context = spark.sparkContext
        found = max(context.defaultParallelism, tasks_max(dict(context.getConf().getAll())))
    return max(1, min(found, SHARDS_MAX))


def _surroundings() -> Surroundings:
    theirs = [Path(os.environ["SPARK_CONF_DIR"])] if "SPARK_CONF_DIR" in os.environ else []
    if "SPARK_HOME" in os.environ:
        theirs.append(Path(os.environ["SPARK_HOME"]) / "conf")
    own_log = any((directory / "log4j2.properties").exists() for directory in theirs)
    return Surroundings(
        machine_cores=len(os.sched_getaffinity(0)),
        configured=any(name in os.environ for name in _CONFIGURED_BY),
        log_file=None if own_log else _LOG_FILE,
    )


def _same_master(running: SparkSession, wish: Wish) -> None:
    master = wish.config.get("spark.master", wish.master)
    if master is not None and master != running.sparkContext.master:
        raise ConfigError(
            f"Spark runs in this process already, with master {running.sparkContext.master!r}, and a process has one; "
            f"asked for was {master!r}. Stop the running session first, or leave the master out"
        )


def _remote_session(remote: str, wish: Wish) -> SparkSession:
    if not remote.startswith("sc://"):
        raise ConfigError(f"remote={remote!r} names no Spark Connect server; write sc://host:15002, or use master=")
    for given, value in (("master", wish.master), ("memory", wish.memory), ("cores", wish.cores)):
        if value is not None:
            raise ConfigError(
                f"{given}={value!r} cannot be set for the Spark Connect server at {remote}, which has its own. Omit it, or omit remote="
            )
    try:
        spark = SparkSession.builder.remote(remote).create()
        _new_enough(spark)
        for key, value in wish.config.items():
            spark.conf.set(key, value)
        _make_ready(spark)
    except ImportError as error:
        raise FordstoneError(
            f"Spark Connect needs more than is installed ({error}): pip install 'fordstone[spark]'"
        ) from error
    return spark


def _new_enough(spark: SparkSession) -> None:
    if too_old(spark.version):
        raise ConfigError(
            f"this session is of Spark {spark.version}; Fordstone needs Spark {'.'.join(map(str, SPARK_MIN))} or newer. "
            "Use a newer cluster, or let fordstone.spark.session() start a Spark of its own"
        )


def _make_ready(spark: SparkSession) -> None:
    _set_meaning(spark)
    if spark.conf.get(_SHUFFLE_PARTITIONS, None) is None:
        spark.conf.set(_SHUFFLE_PARTITIONS, str(parallelism(spark)))
    if is_connect(spark) or local_cores(spark.sparkContext.master, 1) is None:
        check_workers(spark, parallelism(spark))
    register(spark)


def _set_meaning(spark: SparkSession) -> None:
    refused = []
    for key, value in MEANING.items():
        try:
            spark.conf.set(key, value)
        except PySparkException as error:
            refused.append(f"  {key}={value}: {str(error).splitlines()[0]}")
    if refused:
        raise ConfigError("this Spark does not let us set what the plan's meaning needs:\n" + "\n".join(refused))


def _stop(session_ref: weakref.ref[SparkSession]) -> None:
    open_still = session_ref()
    if open_still is not None:
        open_still.stop()


_ENCRYPTED: Final = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")
NEEDED = ("fordstone", "polars", "pyarrow", "pandas", "msgspec", "sqlglot")
ASKED_MAX = 64
_HOW = (
    "Executors need the same Python and the same packages as the driver: install 'fordstone[spark]' on every machine, or "
    "send an environment along (spark-submit --archives env.tar.gz#env with PYSPARK_PYTHON=./env/bin/python)"
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WorkerFacts:
    """What one executor's Python says of itself."""

    host: str
    python: str
    missing: str
    fordstone: str


def complaints(workers: Iterable[WorkerFacts], *, python: str, version: str) -> list[str]:
    """What stands in the way of running there what was built here."""
    found = []
    for worker in sorted(set(workers)):
        if worker.python.split(".")[:2] != python.split(".")[:2]:
            found.append(f"{worker.host}: Python {worker.python}, where the driver has {python}")
        if worker.missing:
            found.append(f"{worker.host}: without {worker.missing}")
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
        raise ConfigError(f"the executors cannot run Python: {describe_failure(str(error))}\n{_HOW}") from error
    workers = [WorkerFacts(**row.asDict()) for row in rows]
    found = complaints(workers, python=platform.python_version(), version=fordstone.__version__)
    if found:
        raise ConfigError("the executors cannot run the plan:\n" + "".join(f"  {line}\n" for line in found) + _HOW)


_WITHOUT_CLASSES: Final = ("UnsupportedFileSystemException", "ClassNotFoundException", "NoClassDefFoundError")


def check_file_system(spark: SparkSession, location: str) -> None:
    """Raise `ConfigError` if Spark lacks the classes for the checkpoint location. Its query would try again and again.

    Whether the store answers is not asked.
    """
    if is_connect(spark) or local_path(location) is not None:
        return
    context = spark.sparkContext
    try:
        context._jvm.org.apache.hadoop.fs.Path(location).getFileSystem(context._jsc.hadoopConfiguration())  # type: ignore[union-attr]  # noqa: SLF001 - PySpark has no other way
    except Py4JError as error:
        if not any(name in str(error) for name in _WITHOUT_CLASSES):
            return
        scheme = location.partition("://")[0]
        advice = "Write s3a:// in the place of s3://. " if scheme == "s3" else ""
        raise ConfigError(
            f"Spark has no file system for the checkpoint location {location}: {describe_failure(str(error))}\n{advice}Put its jars on "
            "the classpath of the driver and the executors; for S3 they are listed in docs/how-to/s3-and-hdfs.md. Or choose a location in "
            "HDFS, or in a directory that all machines mount."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A file that the driver has written below the checkpoint location, by which executors see whether it is theirs, too."""

    location: str
    path: str
    digest: str


def check_location(spark: SparkSession, location: str, path: str, tasks: int) -> Probe | None:
    """Let executors look at a file that the driver has written below the checkpoint location.

    Return it for those that were not asked: small tasks may all run on one executor, and others join later. None: there is one machine.

    Raises:
        ConfigError: Some executor does not see it, so that state would be written to disks of their own.
    """
    if not is_connect(spark) and local_cores(spark.sparkContext.master, 1) is not None:
        return None
    parts = max(1, min(tasks, ASKED_MAX))
    probe = Probe(location=location, path=path, digest=digest_at(location, path))
    rows = spark.range(0, parts, 1, parts).mapInArrow(_look(location, path), "host string, digest string").collect()
    blind = sorted({row["host"] for row in rows if row["digest"] != probe.digest})
    if blind:
        raise _not_shared(probe, blind)
    return probe


@cache
def check_probe(probe: Probe) -> None:
    """The same in an executor, once per process. `ConfigError` as of `check_location`."""
    if digest_at(probe.location, probe.path) != probe.digest:
        raise _not_shared(probe, [socket.gethostname()])


def _not_shared(probe: Probe, hosts: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"executors on {', '.join(hosts[:5])} do not see {probe.location.rstrip('/')}/{probe.path}, which the driver has written: the "
        "checkpoint location is not shared. Each of them would keep its part of the state on a disk of its own, and the first that is lost "
        "would take it along. Give --state a directory that all machines mount, or a URL such as s3a://bucket/state or "
        "hdfs://namenode/state."
    )


def warn_of_clear_tokens(spark: SparkSession) -> None:
    """Log that a token of the hub travels to executors in the clear, if it does."""
    if is_connect(spark) or local_cores(spark.sparkContext.master, 1) is not None:
        return
    conf = dict(spark.sparkContext.getConf().getAll())
    if not any(conf.get(name, "false").lower() == "true" for name in _ENCRYPTED):
        log.warning(
            "hub token sent in the clear",
            extra={
                "reason": "Spark does not encrypt what it sends to executors: set spark.network.crypto.enabled=true"
            },
        )


def digest_at(location: str, path: str) -> str:
    """The digest of a file below a location; empty: it is not there."""
    try:
        return hashlib.sha256(open_remote(location).get(path)).hexdigest()
    except (FileNotFoundError, StorageError):
        return ""


def _look(location: str, probe: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import socket  # noqa: PLC0415 - runs elsewhere

        import pyarrow as pa  # noqa: PLC0415 - as above

        from fordstone.spark.session.session import digest_at  # noqa: PLC0415 - as above

        for _ in batches:
            pass
        yield pa.RecordBatch.from_pylist([{"host": socket.gethostname(), "digest": digest_at(location, probe)}])

    return look


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
            "missing": ", ".join(missing),
            "fordstone": version,
        }
        yield pa.RecordBatch.from_pylist([row])

    return answer


RAISED_LINES_MAX: Final = 20
_BEGINS: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'  File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)')
_ENDS: Final = re.compile(r"\s*$|\s*SQLSTATE|\s*at \S|JVM stacktrace|=== Streaming Query|Driver stacktrace|\t")
_OUR_FILE: Final = re.compile(r"(?:^|/)fordstone/(?:[a-z_]+/)+[a-z_]+\.py$")
_LIBRARY: Final = re.compile(r"/site-packages/|/dist-packages/|/lib/python\d|/pyspark\.zip/|/python/pyspark/|^<frozen")
_ARCHIVE: Final = re.compile(r"^.*\.zip/")
_IN_JAVA: Final = "py4j.protocol.Py4JJavaError: "
_JAVA_SAYS: Final = re.compile(r"^(?:Caused by)?: [\w.$]+: *(.*?)(?: +SQLSTATE.*)?$", re.MULTILINE)
"""After the name of the exception: of what a call raised, and of each of its causes."""


_TASK_FAILURE: Final = re.compile(r"most recent failure: Lost task .*? \([^()]* executor \w+\): (.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTrace:
    """What was raised in a worker."""

    frames: tuple[str, ...]
    """The frames of the user's code, as text of one or more lines."""
    raised: str
    """What was raised, and the notes to it."""

    def __str__(self) -> str:
        return "\n".join([*self.frames, self.raised])


def worker_trace(text: str) -> WorkerTrace | None:
    """The innermost traceback in what Spark says; None: there is none."""
    _, begins, rest = text.rpartition(_BEGINS)
    if not begins:
        return None
    lines = rest.lstrip("\n").splitlines()
    count = next((place for place, line in enumerate(lines) if not line.startswith(" ")), len(lines))
    raised = []
    for line in lines[count : count + RAISED_LINES_MAX]:
        if _ENDS.match(line):
            break
        raised.append(line)
    return WorkerTrace(frames=_of_user(lines[:count]), raised="\n".join(raised)) if raised else None


def describe_failure(text: str) -> str:
    """The failure in a line: what a worker raised, else what Spark says first."""
    trace = worker_trace(text)
    if trace is not None and trace.raised.startswith(_IN_JAVA):
        causes = [cause for cause in _JAVA_SAYS.findall(text[text.rindex(_IN_JAVA) :]) if cause]
        # Spark's own errors have a name in brackets; what lies below them is about files and sockets.
        named = [cause for cause in causes if cause.startswith("[")]
        if causes:
            return str((named or causes)[-1])
    if trace is not None:
        return " ".join(trace.raised.split("\n"))
    lines = [line.strip().removeprefix(": ") for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(("at ", "...", "An error occurred while calling"))]
    failed = [found[1] for line in said if (found := _TASK_FAILURE.search(line))]
    return next(iter([*failed, *said]), "")


def _of_user(lines: list[str]) -> tuple[str, ...]:
    """Return the frames after the last one of ours that are in no library. A file that came in an archive is named as in it."""
    frames: list[tuple[str, list[str]]] = []
    for line in lines:
        found = _FRAME.fullmatch(line)
        if found is not None:
            file = _ARCHIVE.sub("", found["file"])
            frames.append((found["file"], [f'  File "{file}", line {found["line"]}, in {found["name"]}']))
        elif frames:
            frames[-1][1].append(line)
    ours = [place for place, (file, _) in enumerate(frames) if _OUR_FILE.search(file)]
    later = frames[ours[-1] + 1 :] if ours else frames
    return tuple("\n".join(shown) for file, shown in later if not _LIBRARY.search(file))
