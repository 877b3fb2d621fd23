"""The client of a schema registry, by the REST interface that Confluent's has, and others as well.

Schemas are asked for by their id and kept: an id always means the same schema. A registry that is away raises `RegistryAwayError`, and the
caller waits; what waiting cannot mend is an error made by `fails`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec

from fordstone.connectors.base import OpenContext
from fordstone.connectors.registry_options import RegistryOptions
from fordstone.errors import FordstoneError
from fordstone.protocol.retry import Backoff

SchemaKind = Literal["AVRO", "PROTOBUF"]
ANSWER_S: Final = 5.0
"""Maximum wait for one answer."""
SOON_S: Final = 0.25
"""Maximum wait of a reader for a schema that is not known yet."""
ANSWER_BYTES_MAX: Final = 4 << 20
AGAIN: Final = Backoff(first_us=100_000, max_us=5_000_000)
"""After a failure the registry is not asked for this long: readers try again far more often."""
UNKNOWN_S: Final = 30.0
"""How long an id that the registry did not have is taken for unknown."""
UNKNOWN_MAX: Final = 10_000
REFERENCES_MAX: Final = 100
_MISSING: Final = frozenset({40401, 40402, 40403})
"""No such subject, version or schema."""
_LATER: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})
_DENIED: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_REFUSED: Final = frozenset({HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY})
_TYPE: Final = "application/vnd.schemaregistry.v1+json"


class RegistryAwayError(ConnectionError):
    """The registry does not answer now."""


class UnknownSchemaError(Exception):
    """The registry has no such schema."""


class RefusedSchemaError(Exception):
    """The registry does not take a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSchema:
    """A schema, with those that it uses."""

    id: int
    kind: str
    text: str
    references: Mapping[str, str]
    """The text of each schema that this one uses, also through others, by the name it has there; what is used comes first."""


class SchemaRegistry:
    """Asks a registry. Used by several threads."""

    def __init__(
        self, options: RegistryOptions, context: OpenContext, *, where: str, fails: Callable[[str], FordstoneError]
    ) -> None:
        """`where` begins errors, and `fails` makes them."""
        import urllib3  # noqa: PLC0415 - pipelines without a registry do not need it

        self.options = options
        self._where = where
        self._fails = fails
        self._lock = threading.Lock()
        self._asks = ThreadPoolExecutor(1, thread_name_prefix="fordstone-schemas")
        self._asked: dict[int, Future[RegisteredSchema]] = {}
        self._known: dict[int, RegisteredSchema] = {}
        self._unknown: dict[int, float] = {}
        self._away: tuple[float, str] | None = None
        """Until when it is not asked again, and why."""
        self._failures = 0
        headers = {"accept": f"{_TYPE}, application/json", "content-type": _TYPE}
        if options.user is not None and options.password is not None:
            password = options.password.of(context, option="password of schema_registry", where=where)
            headers |= urllib3.make_headers(basic_auth=f"{options.user}:{password}")
        self._pool = urllib3.PoolManager(
            timeout=ANSWER_S, retries=False, headers=headers, ca_certs=options.ca_file, maxsize=1
        )

    def schema(self, schema_id: int) -> RegisteredSchema:
        """Return the schema that has an id. Raises `UnknownSchemaError`.

        Readers do not wait: what is not answered soon is asked for in the background, and `RegistryAwayError` is raised meanwhile.
        """
        known = self._known.get(schema_id)
        if known is not None:
            return known
        if time.monotonic() - self._unknown.get(schema_id, float("-inf")) < UNKNOWN_S:
            raise UnknownSchemaError
        asked = self._asked.get(schema_id)
        if asked is None:
            asked = self._asked[schema_id] = self._asks.submit(self._fetch, schema_id)
        try:
            found = asked.result(SOON_S)
        except TimeoutError as error:
            if not asked.done():
                raise RegistryAwayError(f"the schema registry at {self.options.url} has not answered yet") from error
            raise
        finally:
            if asked.done():
                self._asked.pop(schema_id, None)
        return found

    def _fetch(self, schema_id: int) -> RegisteredSchema:
        with self._lock:
            try:
                found = self._described(schema_id, self._ask("GET", f"/schemas/ids/{schema_id}", "schema"))
            except UnknownSchemaError:
                if len(self._unknown) >= UNKNOWN_MAX:
                    self._unknown.clear()
                self._unknown[schema_id] = time.monotonic()
                raise
            self._known[schema_id] = found
            return found

    def latest(self, subject: str) -> RegisteredSchema:
        """Return the newest schema of a subject. Raises `UnknownSchemaError` if there is none."""
        with self._lock:
            answer = self._ask("GET", f"/subjects/{quote(subject, safe='')}/versions/latest", "id", "schema")
            return self._described(answer["id"], answer)

    def register(self, subject: str, kind: SchemaKind, text: str) -> int:
        """Return the id of a schema, which is new or was there. Raises `RefusedSchemaError`."""
        body = {"schema": text} if kind == "AVRO" else {"schema": text, "schemaType": kind}
        with self._lock:
            answer = self._ask("POST", f"/subjects/{quote(subject, safe='')}/versions", "id", body=body)
            return int(answer["id"])

    def close(self) -> None:
        self._asks.shutdown(wait=False, cancel_futures=True)
        self._pool.clear()

    def _described(self, schema_id: int, answer: Mapping[str, Any]) -> RegisteredSchema:
        references: dict[str, str] = {}
        self._collect(answer.get("references") or [], references)
        return RegisteredSchema(
            id=schema_id,
            kind=answer.get("schemaType") or "AVRO",
            text=str(answer["schema"]),
            references=references,
        )

    def _collect(self, given: list[Any], found: dict[str, str]) -> None:
        for one in given:
            name = str(one["name"])
            if name in found:
                continue
            if len(found) >= REFERENCES_MAX:
                raise self._fails(f"{self._where}: a schema uses more than {REFERENCES_MAX} others.")
            found[name] = ""  # one that uses itself ends here
            path = f"/subjects/{quote(str(one['subject']), safe='')}/versions/{int(one['version'])}"
            answer = self._ask("GET", path, "schema")
            self._collect(answer.get("references") or [], found)
            del found[name]
            found[name] = str(answer["schema"])

    def _ask(self, method: str, path: str, *parts: str, body: object = None) -> dict[str, Any]:
        """Return an answer that has these parts."""
        import urllib3  # noqa: PLC0415 - as above

        if self._away is not None and time.monotonic() < self._away[0]:
            raise RegistryAwayError(self._away[1])
        data = None if body is None else msgspec.json.encode(body)
        try:
            answer = self._pool.request(
                method, self.options.url.rstrip("/") + path, body=data, redirect=False, preload_content=False
            )
            said = answer.read(ANSWER_BYTES_MAX + 1)
            answer.close()
        except urllib3.exceptions.HTTPError as error:
            raise self._is_away(f"does not answer: {error}") from error
        if answer.status in _LATER or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise self._is_away(f"answers {answer.status}: {_said(said)}")
        self._away, self._failures = None, 0
        return self._judged(method, path, parts, answer.status, said)

    def _judged(self, method: str, path: str, parts: tuple[str, ...], status: int, said: bytes) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(said)
        except msgspec.DecodeError:
            found = None
        code = found.get("error_code") if isinstance(found, dict) else None
        if status == HTTPStatus.OK and isinstance(found, dict) and all(part in found for part in parts):
            return found
        if status == HTTPStatus.NOT_FOUND and code in _MISSING:
            raise UnknownSchemaError
        if status in _REFUSED:
            raise RefusedSchemaError(_said(said))
        if status in _DENIED:
            raise self._fails(
                f"{self._where}: the schema registry at {self.options.url} does not let this process in ({status}): {_said(said)}\n"
                "Check user and password in schema_registry=, and what the user may do there."
            )
        raise self._fails(
            f"{self._where}: {method} {path} is answered by {self.options.url} with {status}: {_said(said)}\n"
            "Is that the address of a schema registry, with the path that its interface has?"
        )

    def _is_away(self, problem: str) -> RegistryAwayError:
        text = f"the schema registry at {self.options.url} {problem}"
        self._failures += 1
        self._away = (time.monotonic() + AGAIN.wait_s(self._failures, chance=random.random()), text)  # noqa: S311 - jitter
        return RegistryAwayError(text)


def _said(data: bytes) -> str:
    """What an answer says, for an error."""
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        return str(found["message"])[:2_000]
    return data[:500].decode(errors="replace").strip() or "nothing"
