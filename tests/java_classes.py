"""An archive of the classes that Spark loads: with it Java starts in half the time, and takes half the processor time for that.

The first run with Spark makes it, beside its tests; until it is there, and with another Java than it was made for, Java starts
without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ARCHIVE: Final = Path(sys.prefix) / "spark-classes.jsa"
# Java's quick compiler alone: tests end before the thorough one has paid for itself (half the processor time).
QUICK: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:cds=off -Xlog:cds+dynamic=off"
OPTIONS: Final = f"{QUICK} -XX:SharedArchiveFile={ARCHIVE}"
LAUNCHER: Final = "SPARK_SUBMIT_OPTS"
"""The variable from which Spark's launcher takes options for Java."""


def use_archive() -> None:
    """Set it for every Spark that this process and its children start: Spark's launcher reads the variable."""
    os.environ.setdefault(LAUNCHER, OPTIONS)


def make_archive() -> None:
    """Begin to make the archive, if there is none."""
    if ARCHIVE.exists():
        return
    making = subprocess.Popen(
        [sys.executable, "-m", "tests.java_classes"],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    making.returncode = 0  # It is not waited for.


def main() -> None:
    """Have a process of its own run Spark, and put the archive in its place when Java has ended, which writes it at the end."""
    with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:
        made = Path(folder) / ARCHIVE.name
        # Java has the same standard output, which is therefore closed only when Java has ended.
        subprocess.run(
            [sys.executable, "-m", "tests.java_classes", folder],
            env={**os.environ, LAUNCHER: f"{QUICK} -XX:ArchiveClassesAtExit={made}"},
            stdout=subprocess.PIPE,
            check=True,
        )
        made.replace(ARCHIVE)


def run_spark(folder: Path) -> None:
    """Run a stream and a batch job: what most tests do."""
    from fordstone import Pipeline
    from fordstone.connectors import files
    from fordstone.spark.config import SparkConfig
    from fordstone.spark.run import run_plan
    from fordstone.spark.session.application import application

    (folder / "in.jsonl").write_text('{"k": 1}\n{"k": 2}\n')
    with application(name="classes", master="local[1]", memory="512m") as spark:
        for kind in ("stream", "batch"):
            p = Pipeline(kind)
            rows = p.source("rows", files(str(folder / "in.jsonl")), schema={"k": "bigint"})
            rows.group_by("k").agg(n="count(*)").sink("counts", files(str(folder / kind / "out"), format="jsonl"))
            config = SparkConfig(state=folder / kind, available_now=kind == "stream", bounded=kind == "batch")
            run_plan(p.plan(), {}, config, spark=spark)


if __name__ == "__main__":
    if sys.argv[1:]:
        run_spark(Path(sys.argv[1]))
    else:
        main()
