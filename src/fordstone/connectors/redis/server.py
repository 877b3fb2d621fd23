"""The connection to a server of Redis, and what its errors mean.

A call waits at most `ANSWER_S` for an answer. `AwayError` is what waiting may mend; the rest is a `SourceError` or `SinkError` (`fails`), such as a
rejected password. A connection on which something went wrong is not used again.
"""

from __future__ import annotations

import logging
import random
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fordstone.connectors.base import OpenContext, secret_of
from fordstone.connectors.redis.kind import RedisSettings
from fordstone.errors import FordstoneError

log = logging.getLogger(__name__)

ANSWER_S: Final = 5.0
"""Maximum time to connect, and for the next piece of an answer."""
PROBE_MIN_S: Final = 0.05
PROBE_MAX_S: Final = 1.0
"""Intervals at which a server that is away is asked whether it is back."""
_AS_THEY_COME: Final = ("XRANGE", "XINFO STREAM", "CONFIG GET")
"""Commands whose answers the client would otherwise turn into dicts, which lose fields of the same name."""
_DENIED: Final = (
    redis.exceptions.AuthenticationError,
    redis.exceptions.AuthenticationWrongNumberOfArgsError,
    redis.exceptions.NoPermissionError,
)
_AWAY: Final = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.TryAgainError,
    redis.exceptions.MasterDownError,
    OSError,
)
_AWAY_WORDS: Final = ("LOADING", "BUSY ", "MISCONF", "NOREPLICAS", "MASTERDOWN", "READONLY", "OOM ", "UNKILLABLE")
_CLUSTER: Final = (redis.exceptions.ClusterError, redis.exceptions.AskError)
_IN_PIPELINE: Final = re.compile(r"^Command # \d+ \(.*\) of pipeline caused error: ")
T = TypeVar("T")


class AwayError(ConnectionError):
    """The server does not answer now, or does not take what it is sent."""


class Server:
    """What all calls of one connector share. Used by any thread."""

    def __init__(
        self, settings: RedisSettings, context: OpenContext, *, fails: Callable[[str], FordstoneError]
    ) -> None:
        """`fails` makes an error of a text that says what happened."""
        self._settings = settings
        self._fails = fails
        self._client = _client(settings, context)
        for command in _AS_THEY_COME:
            self._client.set_response_callback(command, _as_it_came)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._probe: threading.Thread | None = None
        self.away: str | None = None
        """Why nothing can be asked now."""

    def ask(self, question: Callable[[redis.Redis], T]) -> T:
        """Ask, and wait for the answer."""
        with self._errors():
            answer = question(self._client)
        self.away = None
        return answer

    def ask_if_there(self, question: Callable[[redis.Redis], T]) -> T:
        """As `ask`, but do not wait for a server that is away: whether it is back is found out in the background."""
        if self._probe is not None:
            raise AwayError(self.away or "")
        try:
            return self.ask(question)
        except AwayError as error:
            with self._lock:
                self.away = str(error)
                if self._probe is None and not self._closed.is_set():
                    self._probe = threading.Thread(target=self._until_back, name="fordstone-redis", daemon=True)
                    self._probe.start()
            raise

    def raised(self, answer: object) -> None:
        """Raise what an answer means that is an error."""
        if isinstance(answer, Exception):
            with self._errors():
                raise answer

    def failure(self, text: str) -> FordstoneError:
        return self._fails(text)

    def close(self) -> None:
        self._closed.set()
        self._client.close()

    def _until_back(self) -> None:
        wait_s = PROBE_MIN_S
        while not self._closed.wait(wait_s * random.uniform(0.5, 1.0)):  # noqa: S311 - jitter
            wait_s = min(PROBE_MAX_S, wait_s * 2)
            try:
                self._client.ping()
            except _DENIED:
                break  # the next question says so
            except (redis.RedisError, OSError):
                continue
            break
        self._probe = None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise self._meaning(error) from error

    def _meaning(self, error: Exception) -> Exception:
        text = described(error)
        server = self._settings.server
        if isinstance(error, _DENIED) or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")) or _is_distrust(error):
            return self._fails(
                f"{self._settings.called}: {server} does not let this process in: {text}.\n"
                "Check the user in url=, the variable that password= names, the certificates, and what the user may do (ACL)."
            )
        if isinstance(error, _CLUSTER):
            return self._fails(
                f"{self._settings.called}: {server} is a node of a Redis Cluster ({text}), which is not supported. Use a server that has the whole "
                "stream: a single one, or a primary with replicas."
            )
        if isinstance(error, _AWAY) or text.startswith(_AWAY_WORDS):
            asks = self._settings.tls and self._settings.cert_file is None
            hint = " If it asks for a certificate, give one with cert_file= and key_file=." if asks else ""
            return AwayError(f"{server} does not answer as it should: {text}.{hint}")
        if "WRONGTYPE" in text or "wrong kind of value" in text:
            return self._fails(
                f"{self._settings.called}: the key is there, and is no stream. Name another, or remove it."
            )
        return self._fails(f"{self._settings.called}: {server} says: {text}.")


def _client(settings: RedisSettings, context: OpenContext) -> redis.Redis:
    named = settings.password
    secret = None if named is None else secret_of(context.secrets, named, option="password", where=settings.called)
    host, port = settings.address
    tls: dict[str, Any] = {}
    if settings.tls:
        tls = {
            "ssl": True,
            "ssl_ca_certs": settings.ca_file,
            "ssl_certfile": settings.cert_file,
            "ssl_keyfile": settings.key_file,
            "ssl_check_hostname": True,
            "ssl_cert_reqs": "required",
        }
    return redis.Redis(
        host=host,
        port=port,
        db=settings.database,
        username=settings.user,
        password=secret,
        protocol=2,  # all that is asked has the same form in it on every server
        socket_timeout=ANSWER_S,
        socket_connect_timeout=ANSWER_S,
        retry=Retry(NoBackoff(), 0),
        client_name="fordstone",
        **tls,
    )


def described(error: BaseException) -> str:
    """An error of the client library in words, without a full stop."""
    text = _IN_PIPELINE.sub("", " ".join(str(error).split()))
    return text.rstrip(". ") or type(error).__name__


def _is_distrust(error: BaseException | None) -> bool:
    """Whether certificates are the reason."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _as_it_came(answer: object, **_: object) -> object:
    return answer
