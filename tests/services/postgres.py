"""PostgreSQL: a cluster of its own in a folder of the test run. Databases, roles and connections for tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import sql
from tests.services.base import Server, debian_root, free_port, library_path, run_installer
from tests.waiting import until

VERSION: Final = 15
"""Of Debian 12."""
USER: Final = "tester"
PASSWORD: Final = "secret"
DATABASE: Final = "test"
SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "50",
    "shared_buffers": "32MB",
    "lc_messages": "C",
}
"""`fsync` stays on: the tests kill the server, and what it has confirmed must be there afterwards."""
_SYSTEM: Final = Path(f"/usr/lib/postgresql/{VERSION}/bin")
_NOBODY: Final = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")


def programs(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return the folder of the server's programs, and the environment that they need: those of the system, or from packages.

    The server's user may not reach the cache, below the home of another user: then it gets a copy in `folder`.
    """
    if (_SYSTEM / "initdb").exists():
        return _SYSTEM, {}
    root = debian_root(f"postgresql-{VERSION}", [f"postgresql-{VERSION}"])
    if not os.geteuid() and not all(parent.stat().st_mode & 0o001 for parent in (root, *root.parents)):
        root = Path(shutil.copytree(root, folder / "programs", symlinks=True))
    return root / _SYSTEM.relative_to("/"), library_path(root)


class Postgres:
    """A server. It may be killed and started again: its data stay."""

    def __init__(self) -> None:
        """Make a cluster and start it. Raises `MissingServiceError` if there are no programs."""
        # Not below pytest's own folder, which no other user may enter.
        self._folder = Path(tempfile.mkdtemp(prefix="fordstone-postgres-"))
        self._folder.chmod(0o755)
        program, env = programs(self._folder)
        home, data, password = self._folder / "home", self._folder / "home/data", self._folder / "password"
        home.mkdir()
        password.write_text(PASSWORD)
        # The server refuses to run as root.
        prefix: Sequence[str] = () if os.geteuid() else _NOBODY
        if prefix:
            shutil.chown(home, "nobody", "nogroup")
        run_installer(
            *prefix,
            *(program / "initdb", "--pgdata", data, "--username", USER, "--encoding=UTF8", "--locale=C.UTF-8"),
            *("--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"),
            env=env,
            cwd=home,
        )
        self.port = free_port()
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        self._server = Server(
            "postgres",
            [*prefix, program / "postgres", "-D", data, f"--port={self.port}", *settings],
            log=self._folder / "log",
            answers=self._answers,
            env=env,
            cwd=home,
        )
        self._server.start()
        self.create_database(DATABASE)

    def _answers(self) -> bool:
        try:
            self.connect("postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def dsn(self, database: str = DATABASE, *, user: str = USER, password: str | None = None) -> str:
        """Return where a database is, by default without a password, as it may stand in a plan."""
        secret = "" if password is None else f" password={password}"
        return f"host=127.0.0.1 port={self.port} dbname={database} user={user}{secret}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to connect by `dsn()`, or by no dsn at all."""
        return {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.port),
            "PGDATABASE": DATABASE,
            "PGUSER": USER,
            "PGPASSWORD": PASSWORD,
        }

    def connect(self, database: str = DATABASE) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a connection of the superuser, each of whose statements is a transaction."""
        return psycopg.connect(self.dsn(database, password=PASSWORD), autocommit=True, connect_timeout=5)

    def execute(self, *statements: str, database: str = DATABASE) -> None:
        with self.connect(database) as connection:
            for statement in statements:
                connection.execute(statement)

    def rows(self, query: str, database: str = DATABASE) -> list[tuple[Any, ...]]:
        with self.connect(database) as connection:
            return connection.execute(query).fetchall()

    def create_database(self, name: str) -> str:
        """Make an empty database; return its dsn."""
        with self.connect("postgres") as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.dsn(name)

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """Shut down fast: sessions are ended, and a checkpoint is written."""
        if self._server.pid is not None:
            os.kill(self._server.pid, signal.SIGINT)
        self._server.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the server and all its sessions for a while: they keep their connections and answer nothing."""
        pid = self._server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # first, so that no session is added
        children = _children(pid)
        for child in children:
            os.kill(child, signal.SIGSTOP)
        try:
            yield
        finally:
            for stopped in (*children, pid):
                with suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove its data."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the server and all its sessions at once, as a power cut of its machine would."""
        pid = self._server.pid
        children = [] if pid is None else _children(pid)
        self._server.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        # They hold the shared memory until they are gone, and the server does not start before.
        until(lambda: not any(map(_runs, children)), "end of the server's processes")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
