"""Register Fordstone's data sources in a Spark session, so that anybody's PySpark job can use them.

This works in any session: classic, or Spark Connect, where the server's Python needs Fordstone. Classes are sent by name, and
workers import them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from fordstone.errors import ConfigError
from fordstone.spark.session.settings import SPARK_MIN, too_old


def register(spark: SparkSession) -> None:
    """Make the formats `fordstone`, `fordstone-control` and `fordstone-state` known in this session. Repeating it is harmless.

    `fordstone.spark.session()` and `prepared()` do it themselves. A session made from this one by `newSession` does not have them.

    Raises:
        ConfigError: This Spark is too old for them.
    """
    if too_old(spark.version):
        raise ConfigError(
            f"this session is of Spark {spark.version}; Fordstone's data sources need Spark {'.'.join(map(str, SPARK_MIN))} or newer."
        )
    # Not above: every Python worker imports this module, and most of them need no client of the hub.
    from fordstone.spark.formats.control import ControlFormat  # noqa: PLC0415 - as said
    from fordstone.spark.formats.source import HubSource  # noqa: PLC0415 - as said
    from fordstone.spark.formats.state import StateSource  # noqa: PLC0415 - as said

    with _active(spark):
        for source in (HubSource, ControlFormat, StateSource):
            spark.dataSource.register(source)


@contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Make this the active session of this thread for a while.

    Spark checks in the active session, and not in the one that it registers in, whether a name is taken: our source in another
    session would look like a clash.
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
