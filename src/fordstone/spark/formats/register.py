"""Tell a Spark session of Fordstone's data sources, so that anybody's PySpark job can use them.

Works in a session that has nothing else of Fordstone's: classic, or Spark Connect, where the server's Python needs Fordstone. The
classes are named, not sent: workers import them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from fordstone.errors import ConfigError
from fordstone.spark.session.settings import SPARK_MIN, too_old


def register(spark: SparkSession) -> None:
    """Make the formats `fordstone`, `fordstone-control` and `fordstone-state` known in this session. Doing it again is harmless.

    `fordstone.spark.session.session()` and `prepared()` do it themselves. A session made from this one by `newSession` has them not.

    Raises:
        ConfigError: This Spark is too old for them.
    """
    if too_old(spark.version):
        raise ConfigError(
            f"this session is of Spark {spark.version}; Fordstone's data sources need Spark {'.'.join(map(str, SPARK_MIN))} or newer."
        )
    # Not above: every Python worker imports this module, and hardly any of them needs a client of the hub.
    from fordstone.spark.formats.control import ControlFormat  # noqa: PLC0415 - as said
    from fordstone.spark.formats.source import HubSource  # noqa: PLC0415 - as said
    from fordstone.spark.formats.state import StateSource  # noqa: PLC0415 - as said

    with _active(spark):
        for source in (HubSource, ControlFormat, StateSource):
            spark.dataSource.register(source)


@contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Make this the active session of this thread for a while.

    Spark asks the active session, and not the one that it was told to register in, whether a name is taken by something else: it would
    take our source in another session for that.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # Spark Connect: the server has a session for each client
        yield
        return
    sessions = spark._get_j_spark_session_class(jvm)  # noqa: SLF001 - PySpark itself sets it this way
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001 - as above
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()
