from __future__ import annotations

import re

import pytest
from pyspark import SparkConf, SparkContext

from fordstone.errors import FordstoneError
from fordstone.spark.session import quiet
from fordstone.spark.session.quiet import worth_showing

WORKER = "Streaming TransformWithStateInPandas Python worker"


def shown(text: str) -> str:
    return "".join(worth_showing(text.splitlines(keepends=True)))


@pytest.mark.parametrize(
    "chatter",
    [
        "WARNING: Using incubator modules: jdk.incubator.vector\n",
        "WARNING: package sun.security.action not in java.base\n",
        (
            "WARNING: A restricted method in java.lang.System has been called\n"
            "WARNING: java.lang.System::load has been called by org.rocksdb.NativeLibraryLoader in an unnamed module (file:/x.jar)\n"
            "WARNING: Use --enable-native-access=ALL-UNNAMED to avoid a warning for callers in this module\n"
            "WARNING: Restricted methods will be blocked in a future release unless native access is enabled\n"
        ),
        "Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties\n",
        f"Starting {WORKER}.\n\n",
        f"{WORKER} received parameters for UDF. State server port/path: 44911\n\n",
        (
            'Exception in thread "stateConnectionListenerThread" java.io.IOException: Broken pipe\n'
            "\tat java.base/sun.nio.ch.FileDispatcherImpl.write0(Native Method)\n"
            "Caused by: java.io.IOException: x\n"
            "\t... 3 more\n"
        ),
    ],
)
def test_known_chatter_is_left_out_and_what_stands_around_it_is_kept(chatter):
    assert shown(f"before\n\n{chatter}\nafter\n") in {"before\n\nafter\n", "before\n\n\nafter\n"}
    assert shown(chatter) == ""


@pytest.mark.parametrize(
    "useful",
    [
        'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no good\n',
        'Exception in thread "main" java.lang.OutOfMemoryError: Java heap space\n\tat a.b(C.java:1)\n',
        'Exception in thread "stateConnectionListenerThread" java.lang.OutOfMemoryError: Java heap space\n\tat a.b(C.java:1)\n',
        "WARNING: something about the user's own Java options\n",
        "a line of the user's\n\n\nand another, about " + WORKER + "\n",
        "no newline at the end",
    ],
)
def test_everything_else_is_passed_on_as_it_came(useful):
    assert shown(useful) == useful


# PySpark leaves its end of a pipe open to the process that never became one.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_java_that_does_not_start_is_an_error_with_what_it_said(monkeypatch, tmp_path, capsys):
    false_java = tmp_path / "bin" / "java"
    false_java.parent.mkdir()
    false_java.write_text("#!/bin/sh\necho 'Error: no room for 900g' >&2\nexit 1\n")
    false_java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    # As in a process in which Spark never ran.
    monkeypatch.setattr(SparkContext, "_gateway", None)
    with pytest.raises(FordstoneError, match=re.escape("ended before it was ready. It said:\nError: no room for 900g")):
        quiet.start_java(SparkConf(loadDefaults=False))
    assert "no room for 900g" in capsys.readouterr().err
