"""Start Spark's Java process and let through of its standard error what a person can use.

Spark's log is set by log4j2.properties and is not the matter here. But Java announces its incubator modules, and the
Python process that prepares a stateful step tells its every move; both write straight to standard error, where no setting
reaches them. Whatever is not such a known line is passed on as it came: a traceback, or what a user's function prints.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pyspark.core.context import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from fordstone.errors import FordstoneError

if TYPE_CHECKING:
    from pyspark import SparkConf

_LAST_LINES = 20
_LAST_WORDS_S = 5.0

# Lines that say nothing to anybody.
_CHATTER = re.compile(
    r"WARNING: Using incubator modules: jdk\.incubator\.vector$"
    r"|WARNING: package sun\.security\.action not in java\.base$"
    r"|WARNING: A (?:restricted|terminally deprecated) method in \S+ has been called$"
    r"|WARNING: (?:java\.lang\.System::load|sun\.misc\.Unsafe::)\S* has been called by "
    r"|WARNING: Use --enable-native-access=ALL-UNNAMED to avoid a warning for callers in this module$"
    r"|WARNING: (?:Restricted methods will be blocked|Please consider reporting this|sun\.misc\.Unsafe::\S+ will be removed) "
    r"|Using Spark's default log4j profile: "
    r"|Setting default log level to \""
    r"|To adjust logging level use sc\.setLogLevel"
    r"|(?:Starting )?Streaming TransformWithStateInPandas Python worker"
)
# Threads that have lost the worker they served, because a query was stopped in the middle of a batch.
_BEREFT = re.compile(
    r'Exception in thread "stateConnectionListenerThread" java\.(?:io\.IOException|nio\.channels\.\S+Exception)'
)
_REST_OF_TRACE = re.compile(r"\s+at \S|\s+\.\.\. \d+ more|Caused by: |\s+Suppressed: ")


def worth_showing(lines: Iterable[str]) -> Iterator[str]:
    """Leave out the known chatter, with the empty line that follows each of its lines, and traces of no consequence."""
    in_trace = after_chatter = False
    for line in lines:
        in_trace = _BEREFT.match(line) is not None or (in_trace and _REST_OF_TRACE.match(line) is not None)
        chatter = _CHATTER.match(line) is not None or (after_chatter and not line.strip())
        after_chatter = _CHATTER.match(line) is not None
        if not in_trace and not chatter:
            yield line


def start_java(conf: SparkConf) -> None:
    """Start the Java process that the next SparkContext will use; does nothing where there is one already.

    Raises:
        FordstoneError: It ended before it was ready; the text has what it said.
    """
    if SparkContext._gateway is not None:  # noqa: SLF001 - a second one would be started for nothing and never end
        return
    said = _Passage()
    try:
        gateway = launch_gateway(conf, popen_kwargs={"stderr": said.writing})  # type: ignore[no-untyped-call]  # not typed there
    except PySparkRuntimeError as error:
        said.close()
        raise FordstoneError(
            f"Spark's Java process ended before it was ready. It said:\n{said.last_words()}"
        ) from error
    said.close()
    SparkContext._ensure_initialized(gateway=gateway, conf=conf)  # noqa: SLF001 - the one way to hand it over


class _Passage:
    """A pipe, and the thread that carries what is worth showing from it to standard error, until it is closed."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        # A daemon: it ends with the Java process, which ends after this one.
        self._thread = threading.Thread(target=self._carry, name="spark-stderr", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave the writing end to the Java process alone."""
        os.close(self.writing)

    def last_words(self) -> str:
        """What was said, once nobody is left to say more."""
        self._thread.join(timeout=_LAST_WORDS_S)
        return "".join(self._last)

    def _carry(self) -> None:
        with os.fdopen(self._reading, encoding="utf-8", errors="replace") as lines:
            for line in worth_showing(lines):
                self._last.append(line)
                # Looked up each time: a live display or a test may have put another in its place, or closed it.
                with suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(line)
                    sys.stderr.flush()
