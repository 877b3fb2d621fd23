"""A connection to a server, made when it is needed and made again when it was lost, and the meaning of its errors.

Every transaction sets what it needs for itself alone, so that a pooler between may hand each to another session. Errors are judged by
their SQLSTATE, because a server writes their texts in its own language.

Invariants: a connection on which something went wrong in the middle is not used again; no answer is awaited without a limit.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any, Final, LiteralString, NoReturn, TypeAlias, TypeVar

import psycopg
from psycopg import pq
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fordstone.connectors.postgres.settings import PostgresSettings
from fordstone.errors import ConfigError

_T = TypeVar("_T")
Row: TypeAlias = tuple[Any, ...]
Cursor: TypeAlias = psycopg.Cursor[Row]

CONNECT_TIMEOUT_S: Final = 10
"""The longest wait for a connection, unless the dsn or `PGCONNECT_TIMEOUT` has another."""
SILENCE_S: Final = 5.0
"""After this time without an answer to a statement, another connection is tried, to find out whether the server answers at all."""
STATEMENT_TIMEOUT_S: Final = 900.0
"""The longest wait for the answer to a statement from a server that still answers others."""
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
"""For errors without a code: those that the client itself finds, in English, and refusals where `_refusal` finds none."""
_EVENTS: Final = {pq.PollingStatus.READING: select.POLLIN, pq.PollingStatus.WRITING: select.POLLOUT}
_TRACED_CODE: Final = re.compile(rb'\tErrorResponse\t.*? C "(\w{5})"')


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
        text=error.diag.message_primary or " ".join(str(error).split()),
        detail=" ".join(filter(None, (error.diag.message_detail, error.diag.message_hint))),
        line=None if found is None else int(found[1]),
    )


def _is_refused(error: psycopg.Error, text: str) -> bool:
    connection = error.pgconn
    return (connection is not None and bool(connection.needs_password)) or _REFUSED.search(text) is not None


class _Connection(psycopg.Connection[Row]):
    """Does not wait for a server that has stopped: the kernel of its machine still acknowledges what it is sent, so TCP finds nothing wrong."""

    def wait(self, gen: PQGen[_T], *args: Any, **options: Any) -> _T:
        return super().wait(self._limited(gen), *args, **options)

    def _limited(self, gen: PQGen[_T]) -> PQGen[_T]:
        """Hand on what `gen` waits for, and what is ready: while nothing is, that is `READY_NONE`, about ten times a second."""
        began_s = asked_s = time.monotonic()
        try:
            waits_for = next(gen)
            while True:
                ready = yield waits_for
                now_s = time.monotonic()
                if ready:
                    began_s = asked_s = now_s
                elif now_s - began_s > STATEMENT_TIMEOUT_S:
                    self._give_up(f"a statement was not answered within {STATEMENT_TIMEOUT_S:.0f} s")
                elif now_s - asked_s > SILENCE_S:
                    if not self._server_answers():
                        self._give_up("the server has stopped answering, on a new connection too")
                    asked_s = time.monotonic()
                waits_for = gen.send(ready)
        except StopIteration as end:
            found: _T = end.value
            return found

    def _server_answers(self) -> bool:
        """Whether a new connection is answered, if only by an error. A long statement or a lock keeps this one silent, and no other."""
        info = self.info
        dsn = make_conninfo(info.dsn, host=info.host, port=info.port, password=info.password or None)
        try:
            psycopg.connect(dsn).close()
        except psycopg.errors.ConnectionTimeout:
            return False
        except psycopg.Error:
            pass
        return True

    def _give_up(self, why: str) -> NoReturn:
        self.pgconn.finish()  # otherwise the rollback would wait for the same
        raise psycopg.OperationalError(why)


def _refusal(conninfo: str, timeout_s: float) -> str | None:
    """The SQLSTATE with which the server refuses a connection; None: it does not refuse, or that cannot be found out.

    libpq gives the text of such an error alone. The code is in what it traces of the protocol, which it does on Linux.
    """
    deadline_s = time.monotonic() + timeout_s
    with suppress(psycopg.NotSupportedError), TemporaryFile() as trace:
        connection = pq.PGconn.connect_start(conninfo.encode())
        try:
            connection.trace(trace.fileno())
            while (event := _EVENTS.get(pq.PollingStatus(connection.connect_poll()))) is not None:
                poll = select.poll()
                poll.register(connection.socket, event)
                if not poll.poll(max(deadline_s - time.monotonic(), 0.0) * 1000):
                    break
            connection.untrace()
        finally:
            connection.finish()
        trace.seek(0)
        codes = _TRACED_CODE.findall(trace.read())
        return codes[-1].decode() if codes else None
    return None


class Server:
    """Where a table is. Used by one thread."""

    def __init__(self, settings: PostgresSettings, secrets: Mapping[str, str], *, name: str) -> None:
        """`name`: how the session is called in the server's own views."""
        self._conninfo = _conninfo(settings, secrets, name=name)
        self._connection: psycopg.Connection[Row] | None = None

    @contextmanager
    def transaction(self, *, reads: bool = False) -> Iterator[Cursor]:
        """Begin a transaction, and commit it at the end; each statement sees what was committed before it. `reads`: it writes nothing."""
        connection = self._connected()
        connection.isolation_level, connection.read_only = psycopg.IsolationLevel.READ_COMMITTED, reads or None
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
            try:
                self._connection = _Connection.connect(self._conninfo, autocommit=True, prepare_threshold=None)
            except psycopg.errors.ConnectionTimeout:
                raise
            except psycopg.OperationalError as error:
                error.sqlstate = error.sqlstate or _refusal(self._conninfo, CONNECT_TIMEOUT_S)
                raise
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
