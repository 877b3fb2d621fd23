"""Which settings a Spark session gets, and why. Decides only: `session` gathers the facts and carries it out.

Two kinds are kept apart. `MEANING` are the SQL settings without which a plan would mean something else on Spark than on
the edge; they hold in every session that runs a plan. All else is comfort and speed, set only in
sessions that are ours, and gives way to what the user asks for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fordstone.errors import ConfigError

SPARK_MIN = (4, 3)
SHARDS_MAX = 128  # as many as there are key groups
LOCAL_MEMORY = "2g"
# A task whose Python worker died is tried once more; plain local[N] gives up at the first.
LOCAL_TASK_ATTEMPTS = 2
RESULTS: Final = "spark.driver.maxResultSize"
"""The setting for how much of a batch may come to the driver. Spark's default is 1g."""
RESULTS_SHARE: Final = 4
"""Output for sinks that take no parts comes to the driver, up to this part of its memory: Java and Python both hold it for a time."""
# Spark matches a Python error's whole text with a recursive pattern when a query is stopped: the usual 1 MB overflows.
THREAD_STACK = "8m"

MEANING: Mapping[str, str] = {
    # A cast or division that fails gives null, as on the edge.
    "spark.sql.ansi.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    # INT96, the default, is read as nanoseconds by everybody else.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A file that cannot be read is an error, never a gap.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    # State on disk, of which a batch writes the change and not the whole.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Each try at a batch writes state files of its own, and the commit names them. In version 1 a batch that is executed again may be
    # followed by a load that mixes files of both tries; our pieces of state may differ between tries.
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    # A shard is a partition for as long as its state lives; Spark must not merge or split them as it sees fit.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.adaptive.streaming.stateless.enabled": "false",
    # Settings of old versions turn the meaning of functions back.
    "spark.sql.legacy.timeParserPolicy": "CORRECTED",
}

SPEED: Mapping[str, str] = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Counting the rows of the state would read each before it is written.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    # Spark runs a task a core; tasks that each use every core only get in each other's way.
    "spark.executorEnv.POLARS_MAX_THREADS": "1",
}

COMFORT: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # The timeout of connections between Python and Java: the usual 15 s are too short on a busy machine.
    "spark.python.authenticate.socketTimeout": "300s",
}

LOOPBACK: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

LOG_LEVELS = ("ALL", "TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL", "OFF")
_MEMORY = re.compile(r"[1-9][0-9]*[kmgt]", re.IGNORECASE)
_LOCAL = re.compile(r"local(?:\[\s*([0-9]+|\*)\s*(?:,\s*[0-9]+\s*)?\])?")
_LOOPBACK_MASTER = re.compile(r"spark://(?:127\.0\.0\.1|localhost|\[::1\])(?::|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the caller of `session` asked for."""

    master: str | None = None
    name: str = "fordstone"
    memory: str | None = None
    cores: int | None = None
    log_level: str = "OFF"
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the process finds itself in."""

    machine_cores: int
    # spark-submit or a Spark set-up of the user's (SPARK_HOME, SPARK_CONF_DIR) decides what the caller leaves open.
    configured: bool
    # None where the user's own log set-up holds.
    log_file: Path | None


def local_cores(master: str | None, machine_cores: int) -> int | None:
    """How many tasks a local master runs at once; None where driver and executors are not one process on this machine."""
    found = None if master is None else _LOCAL.fullmatch(master)
    if found is None:
        return None
    if found[1] is None:
        return 1
    return machine_cores if found[1] == "*" else max(1, int(found[1]))


def settings(wish: Wish, surroundings: Surroundings) -> dict[str, str]:
    """Every setting of a session of our own; the caller's `config` has the last word.

    Raises:
        ConfigError: The wish makes no sense, or goes against what a plan means.
    """
    _check(wish)
    master = wish.config.get("spark.master", wish.master)
    if master is None and not surroundings.configured:
        master = f"local[{wish.cores or surroundings.machine_cores},{LOCAL_TASK_ATTEMPTS}]"
    chosen = {"spark.app.name": wish.name, **COMFORT, **SPEED, **MEANING}
    if master is not None:
        chosen["spark.master"] = master
    cores = local_cores(master, surroundings.machine_cores)
    if cores is not None:
        chosen |= LOOPBACK
        chosen["spark.driver.memory"] = wish.memory or LOCAL_MEMORY
        chosen["spark.sql.shuffle.partitions"] = str(min(cores, SHARDS_MAX))
    else:
        if master is not None and _LOOPBACK_MASTER.match(master):
            chosen |= LOOPBACK
        if wish.memory is not None:
            chosen["spark.executor.memory"] = wish.memory
        if wish.cores is not None:
            chosen["spark.cores.max"] = str(wish.cores)
            chosen["spark.sql.shuffle.partitions"] = str(min(wish.cores, SHARDS_MAX))
    driver_memory = wish.config.get("spark.driver.memory", chosen.get("spark.driver.memory"))
    if driver_memory is not None and _MEMORY.fullmatch(driver_memory) is not None:
        chosen[RESULTS] = f"{_mebibytes(driver_memory) // RESULTS_SHARE or 1}m"
    chosen["spark.driver.extraJavaOptions"] = _java_options(wish, surroundings)
    chosen |= {key: value for key, value in wish.config.items() if key != "spark.driver.extraJavaOptions"}
    return chosen


def _mebibytes(memory: str) -> int:
    kibibytes = int(memory[:-1]) << 10 * "kmgt".index(memory[-1].lower())
    return kibibytes // 1024


def _java_options(wish: Wish, surroundings: Surroundings) -> str:
    options = [f"-Xss{THREAD_STACK}"]
    if surroundings.log_file is not None:
        options.append(f'"-Dlog4j2.configurationFile={surroundings.log_file.as_uri()}"')
        options.append(f"-Dfordstone.log.level={wish.log_level.lower()}")
    # Theirs last: Java takes the last of two that say the same.
    return " ".join([*options, wish.config.get("spark.driver.extraJavaOptions", "")]).strip()


def _check(wish: Wish) -> None:
    if wish.memory is not None and _MEMORY.fullmatch(wish.memory) is None:
        raise ConfigError(
            f"memory={wish.memory!r} is not an amount of memory; write a whole number and a unit, as in 2g or 512m"
        )
    if wish.cores is not None and wish.cores < 1:
        raise ConfigError(f"cores={wish.cores} must be at least 1")
    if wish.log_level.upper() not in LOG_LEVELS:
        raise ConfigError(
            f"log_level={wish.log_level!r} is not a level of Spark's log; use one of {', '.join(LOG_LEVELS)}"
        )
    if wish.master is not None and "spark.master" in wish.config and wish.config["spark.master"] != wish.master:
        raise ConfigError(
            f"master={wish.master!r} and config['spark.master']={wish.config['spark.master']!r} disagree; give one of them"
        )
    if wish.cores is not None and local_cores(wish.master, 1) is not None:
        raise ConfigError(f"master={wish.master!r} sets the number of cores; omit cores={wish.cores}")
    for key in sorted(MEANING.keys() & wish.config.keys()):
        if wish.config[key].lower() != MEANING[key].lower():
            raise ConfigError(
                f"config[{key!r}]={wish.config[key]!r} would change what a plan means; it must be {MEANING[key]!r}. Omit it"
            )


def too_old(version: str) -> bool:
    """Whether a Spark of this version lacks what we need of it."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is None or (int(numbers[1]), int(numbers[2])) < SPARK_MIN


UNBOUNDED_EXECUTORS: Final = 32
"""How many executors are counted on where Spark may start as many as it likes."""


DEFAULT_EXECUTORS: Final = 2
"""What Spark starts on YARN and Kubernetes if no number is given."""


def tasks_max(conf: Mapping[str, str]) -> int:
    """How many tasks an application may come to run at once by its settings; 0: they do not say.

    YARN and Kubernetes have a number of executors, or let it change up to a maximum; a standalone cluster has a maximum of cores.
    """
    cores = int(conf.get("spark.executor.cores") or 1) // max(1, int(conf.get("spark.task.cpus") or 1))
    executors = int(conf.get("spark.executor.instances") or 0)
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        most = int(conf.get("spark.dynamicAllocation.maxExecutors") or UNBOUNDED_EXECUTORS)
        # By default Spark has no maximum, which it writes as the largest integer.
        executors = max(executors, min(most, UNBOUNDED_EXECUTORS))
    elif not executors and conf.get("spark.master", "").startswith(("yarn", "k8s://")):
        executors = DEFAULT_EXECUTORS
    return max(int(conf.get("spark.cores.max") or 0), executors * max(1, cores))
