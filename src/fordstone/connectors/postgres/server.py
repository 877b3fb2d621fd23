"""A connection to a server, made when it is needed and made again when it was lost, and the meaning of its errors.

Every transaction sets what it needs for itself alone, so that a pooler between may hand each to another session.

Invariant: a connection on which something went wrong in the middle is not used again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fordstone.connectors.postgres.settings import PostgresSettings
from fordstone.errors import ConfigError

Row: TypeAlias = tuple[Any, ...]
Cursor: TypeAlias = psycopg.Cursor[Row]

CONNECT_TIMEOUT_S: Final = 10
LOCK_TIMEOUT_MS: Final = 10_000
"""The longest wait for what another transaction has locked. The sink then tries again."""
IDLE_TIMEOUT_MS: Final = 60_000
"""After this the server gives up a transaction whose client is gone: until then it keeps its locks."""
_KEEPALIVE: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_BEGIN: Final[LiteralString] = (
    "SELECT set_config('lock_timeout', %s, true), set_config('idle_in_transaction_session_timeout', %s, true), "
    "set_config('client_min_messages', 'warning', true), "
    # Without it a server that crashes may forget what it has confirmed.
    "CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END"
)
_AWAY: Final = ("08", "53", "57", "40", "58", "55P03", "25006")
"""Classes and codes of errors that go by by themselves: connections, resources, shutdown, deadlocks, I/O, locks, a standby."""
_REFUSED: Final = re.compile(
    r"authentication failed|no pg_hba\.conf entry|does not exist|not permitted to log in|permission denied|does not support SSL|certificate",
    re.IGNORECASE,
)
"""While connecting, errors have no code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What an error of the server means."""

    away: bool
    """It may go by by itself."""
    text: str
    """What the server says, in one line."""
    detail: str = ""
    line: int | None = None
    """Which line of a COPY it is about, from 1."""


def problem_of(error: psycopg.Error) -> Problem:
    """Judge an error."""
    code = error.sqlstate
    if code is None:
        text = " ".join(str(error).split()) or type(error).__name__
        away = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not _is_refused(error, text)
        return Problem(away=away, text=text)
    found = re.match(r"COPY [^\n]*?, \w+ (\d+)", error.diag.context or "")
    return Problem(
        away=code.startswith(_AWAY),
        text=error.diag.message_primary or str(error),
        detail=" ".join(filter(None, (error.diag.message_detail, error.diag.message_hint))),
        line=None if found is None else int(found[1]),
    )


def _is_refused(error: psycopg.Error, text: str) -> bool:
    connection = error.pgconn
    return (connection is not None and bool(connection.needs_password)) or _REFUSED.search(text) is not None


class Server:
    """Where a table is. Used by one thread."""

    def __init__(self, settings: PostgresSettings, secrets: Mapping[str, str], *, name: str) -> None:
        """`name`: how the session is called in the server's own views."""
        self._conninfo = _conninfo(settings, secrets, name=name)
        self._connection: psycopg.Connection[Row] | None = None

    @contextmanager
    def transaction(self, *, snapshot: bool = False) -> Iterator[Cursor]:
        """Begin a transaction, and commit it at the end. `snapshot`: all its reads see the same, and it writes nothing."""
        connection = self._connected()
        level = psycopg.IsolationLevel.REPEATABLE_READ if snapshot else psycopg.IsolationLevel.READ_COMMITTED
        connection.isolation_level, connection.read_only = level, snapshot or None
        try:
            with connection.transaction(), connection.cursor() as cursor:
                cursor.execute(_BEGIN, (str(LOCK_TIMEOUT_MS), str(IDLE_TIMEOUT_MS)))
                yield cursor
        except psycopg.Error as error:
            if problem_of(error).away:
                self.close()
            raise

    def close(self) -> None:
        """End the session, if there is one. Another transaction begins a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> psycopg.Connection[Row]:
        if self._connection is None or self._connection.closed:
            # Without prepared statements: a pooler may hand the next transaction to another session.
            self._connection = psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        return self._connection


def _conninfo(settings: PostgresSettings, secrets: Mapping[str, str], *, name: str) -> str:
    """Where to connect, with the password if there is one here; libpq looks for one in its own places else."""
    dsn = settings.dsn or ""
    if settings.dsn_from is not None:
        dsn = _secret(settings, "dsn_from", settings.dsn_from, secrets)
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as error:
        # The text of the error may have the password in it, if it is wrong there.
        shown = f": {str(error).strip()}" if settings.dsn_from is None else ""
        raise ConfigError(f"{settings.where}: its dsn cannot be read{shown}.") from (
            error if settings.dsn_from is None else None
        )
    if settings.password_from is not None:
        given["password"] = _secret(settings, "password_from", settings.password_from, secrets)
    elif "password" not in given and "PGPASSWORD" in secrets:
        given["password"] = secrets["PGPASSWORD"]
    timeout = {} if "PGCONNECT_TIMEOUT" in os.environ else {"connect_timeout": CONNECT_TIMEOUT_S}
    ours: dict[str, str | int | None] = {
        "client_encoding": "utf8",
        "fallback_application_name": name,
        **timeout,
        **_KEEPALIVE,
    }
    return make_conninfo("", **{**ours, **given})


def _secret(settings: PostgresSettings, option: str, name: str, secrets: Mapping[str, str]) -> str:
    try:
        return secrets[name]
    except KeyError:
        raise ConfigError(
            f"{settings.where}: the environment variable {name}, which {option}= names, is not set here. Set it where this runs."
        ) from None
