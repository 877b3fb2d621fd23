"""Tokens, stored hashed in the data directory, and what each may do.

A token is 256 random bits, shown once when it is made; the file has its sha256, which is enough for a secret that cannot be
guessed. The command line changes the file (`TokenFile`), a running hub reads it again when it has changed (`Tokens`).

Invariants: the file is replaced as a whole, after a sync, and only under a lock of its own; once a hub has seen a token,
it never again answers without one, even if the file disappears or cannot be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from fordstone.errors import ConfigError, FordstoneError, StorageError
from fordstone.plan.ids import checked_name
from fordstone.storage.atomic import write_file

if TYPE_CHECKING:
    from fordstone.hub.server.routes import Matched

_events = logging.getLogger(__name__)

Role = Literal["node", "center", "admin"]
PREFIX: Final = "fst_"
TOKEN: Final = "fordstone.token"  # noqa: S105 - a key
"""The key in a request's scope under which handlers find its `Token`; None: it has none."""
TOKENS_MAX: Final = 10_000
FILE_BYTES_MAX: Final = 16 << 20
LOOK_EVERY_S: Final = 1.0
"""How long a change of the file may go unseen."""
WRITE_USED_EVERY_S: Final = 60.0
_SECRET_BYTES: Final = 32
_FORM: Final = re.compile(r"fst_[A-Za-z0-9_-]{43}")
_FILE: Final = "tokens.json"
_USED: Final = "tokens-used.json"
_LOCK: Final = "tokens.lock"


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One token, without its secret."""

    name: str
    role: Role
    sha256: str
    created_us: int
    node: str | None = None
    """The only node that a token of role `node` speaks for."""
    pipelines: tuple[str, ...] | None = None
    """The only pipelines that it may touch; None: all."""
    revoked_us: int | None = None


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1] = 1
    tokens: tuple[Token, ...] = ()


class TokenFile:
    """The tokens of a data directory, to change and list. Safe beside a running hub and other commands."""

    def __init__(self, data: str | Path) -> None:
        self._data = Path(data)

    @property
    def path(self) -> Path:
        return self._data / _FILE

    def read(self) -> tuple[Token, ...]:
        """All of them, revoked ones too, in the order in which they were made. `ConfigError` if the file cannot be understood."""
        try:
            with self.path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StorageError(f"the hub's tokens in {self.path} cannot be read: {error.strerror}.") from error
        try:
            if len(data) > FILE_BYTES_MAX:
                raise msgspec.ValidationError("it is too large")
            return msgspec.json.decode(data, type=_Stored).tokens
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the hub's tokens in {self.path} cannot be understood: {error}.\n"
                f"Put a copy of the file back, or remove it and make new tokens with `fordstone hub token add`."
            ) from error

    def used_us(self) -> dict[str, int]:
        """When each token was last used, as far as the hub has written it: up to a minute old."""
        try:
            return msgspec.json.decode((self._data / _USED).read_bytes(), type=dict[str, int])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return {}

    def add(
        self, name: str, *, role: Role, now_us: int, node: str | None = None, pipelines: tuple[str, ...] | None = None
    ) -> str:
        """Make a token and return its text, which is not stored. `ConfigError` if the name is taken."""
        checked_name(name, "token")
        if (role == "node") != (node is not None):
            raise ConfigError("a token is for one node (--node ID), or for the center or an admin, which are no nodes.")
        if node is not None:
            checked_name(node, "node")
        for pipeline in pipelines or ():
            checked_name(pipeline, "pipeline")
        text = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        made = Token(
            name=name, role=role, sha256=_hashed(text), created_us=now_us, node=node, pipelines=pipelines or None
        )
        with self._changing():
            there = self.read()
            if any(one.name == name and one.revoked_us is None for one in there):
                raise ConfigError(
                    f"there is a token {name} already. Its text cannot be shown again: choose another name, or first\n"
                    f"    fordstone hub token revoke {name} --data {self._data}"
                )
            kept = tuple(one for one in there if one.name != name)
            if len(kept) >= TOKENS_MAX:
                raise ConfigError(f"{self.path} has {TOKENS_MAX} tokens, which is the most. Share one between nodes.")
            self._write((*kept, made))
        return text

    def revoke(self, name: str, *, now_us: int) -> Token:
        """Make a token worthless, for good. `ConfigError` if there is none of that name; a revoked one stays as it is."""
        with self._changing():
            there = self.read()
            found = next((one for one in there if one.name == name), None)
            if found is None:
                names = ", ".join(one.name for one in there if one.revoked_us is None) or "none"
                raise ConfigError(f"there is no token {name!r} in {self.path}. Valid tokens: {names}.")
            if found.revoked_us is not None:
                return found
            revoked = msgspec.structs.replace(found, revoked_us=now_us)
            self._write(tuple(revoked if one is found else one for one in there))
        return revoked

    def write_used(self, used_us: dict[str, int]) -> None:
        """Write when tokens were last used. Called by the hub about once a minute; a crash may lose the last minute."""
        data = msgspec.json.format(msgspec.json.encode(used_us, order="deterministic"))
        write_file(self._data / _USED, data, mode=0o600, durable=False)

    def _write(self, tokens: tuple[Token, ...]) -> None:
        write_file(self.path, msgspec.json.format(msgspec.json.encode(_Stored(tokens=tokens))) + b"\n", mode=0o600)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One change at a time: two commands at once would otherwise lose one of two tokens."""
        try:
            self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self._data / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(f"the hub's tokens in {self._data} cannot be changed: {error.strerror}.") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


class Tokens:
    """The tokens as a running hub asks for them, on its event loop: looks at the file at most once a second."""

    def __init__(self, file: TokenFile, *, clock_s: Callable[[], float], clock_us: Callable[[], int]) -> None:
        """Reads the file; `ConfigError` if it cannot be understood. Later that is logged and what was read before holds."""
        self._file = file
        self._clock_s = clock_s
        self._clock_us = clock_us
        self._mark = self._look()
        self._by_hash: dict[str, Token] = {}
        """The time of a lookup says nothing: a caller cannot choose the hash of what it guesses."""
        self._required = False
        self._take(file.read())
        self._used_us = file.used_us()
        self._looked_s = self._written_s = clock_s()
        self._unwritten = False

    @property
    def required(self) -> bool:
        self._refresh()
        return self._required

    @property
    def valid(self) -> int:
        self._refresh()
        return sum(one.revoked_us is None for one in self._by_hash.values())

    def find(self, text: str) -> Token | None:
        """The token with this text, perhaps a revoked one; None: there is none."""
        self._refresh()
        if _FORM.fullmatch(text) is None:
            return None
        return self._by_hash.get(_hashed(text))

    def used(self, token: Token) -> None:
        self._used_us[token.name] = self._clock_us()
        self._unwritten = True

    def due(self) -> bool:
        """Whether `write_used` has something to do by now."""
        return self._unwritten and self._clock_s() - self._written_s >= WRITE_USED_EVERY_S

    def write_used(self) -> None:
        """Write when tokens were used. Blocks on the disk: not for the event loop. Errors are logged."""
        if not self._unwritten:
            return
        self._written_s, self._unwritten = self._clock_s(), False
        try:
            self._file.write_used(dict(self._used_us))
        except FordstoneError as error:
            _events.warning("last use of tokens not stored", extra={"error": str(error)})

    def _refresh(self) -> None:
        now_s = self._clock_s()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        mark = self._look()
        if mark == self._mark:
            return
        try:
            self._take(self._file.read())
        except FordstoneError as error:
            _events.error("tokens not read again", extra={"error": str(error)})
        else:
            _events.info("tokens read again", extra={"tokens": len(self._by_hash)})
        self._mark = mark

    def _take(self, tokens: tuple[Token, ...]) -> None:
        self._by_hash = {one.sha256: one for one in tokens}
        self._required = self._required or bool(tokens)

    def _look(self) -> tuple[int, int, int] | None:
        """What changes when the file does: it is replaced, so its inode too."""
        try:
            status = self._file.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def why_forbidden(token: Token, matched: Matched) -> str | None:
    """Return why this token has no access to a route; None: it has."""
    route, role = matched.route, token.role
    if role == "admin" or "anyone" in route.roles:
        return None
    if role not in route.roles:
        return f"a token of role {role} may not {route.method} {route.path}"
    node, pipeline = matched.params.get("node"), matched.params.get("pipeline")
    if role == "node" and node is not None and node != token.node:
        return f"the token {token.name} is for node {token.node}, not for {node}"
    if token.pipelines is None:
        return None
    if pipeline is not None and pipeline not in token.pipelines:
        return f"the token {token.name} is for other pipelines than {pipeline}"
    if pipeline is None and "/blobs/" not in route.path:
        return f"the token {token.name} is for some pipelines only, and {route.path} shows all"
    return None


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
