"""Options for the Java of every Spark that a test starts."""

from __future__ import annotations

from typing import Final

OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java's quick compiler alone: tests end before the thorough one has paid for itself (half the processor time)."""
LAUNCHER: Final = "SPARK_SUBMIT_OPTS"
"""The variable from which Spark's launcher takes options for Java."""
