"""A webhook: POSTs the rows of each epoch as JSON lines, at least once.

Requests of an epoch have keys that are made of the stream's name, its owner and the epoch, so a receiver that keeps `Idempotency-Key`s takes each
once. A server that is away or busy delays the epoch; one that rejects a request stops the pipeline.
"""

from __future__ import annotations

import hashlib
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import polars as pl
import urllib3

from fordstone.connectors.base import Sink, SinkDelayedError, SinkStream, secret_of
from fordstone.connectors.http.kind import HttpOutOptions
from fordstone.connectors.messages import message_format
from fordstone.errors import SinkError
from fordstone.lang.duration import positive_us

if TYPE_CHECKING:
    from fordstone.connectors.base import OpenContext

_PASSES: Final = frozenset(
    {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
)
"""Answers of a server that may take the request later, beside those from 500 on."""
ANSWER_BYTES_MAX: Final = 1_000
"""What is read of an answer."""


class HttpSink(Sink):
    """One address."""

    def __init__(self, options: HttpOutOptions, stream: SinkStream, context: OpenContext) -> None:
        self._options = options
        self._where = f"sink {stream.step}: http_out({options.url!r})"
        self._format = message_format("json", stream.schema, where=self._where)
        self._name = f"{stream.pipeline}/{stream.node}/{stream.step}/{stream.owner}"
        self._start = secrets.token_hex(8)
        self._written = 0
        token = (
            None
            if options.token is None
            else secret_of(context.secrets, options.token, option="token", where=self._where)
        )
        self._headers = {"content-type": "application/x-ndjson"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._pool = urllib3.PoolManager(
            timeout=positive_us(options.timeout, what="timeout") / 1e6, retries=False, ca_certs=options.ca_file
        )

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        """Post the rows. An epoch that is released again has the same keys."""
        self._post(frame, f"{self._name}/{epoch}", {"fordstone-epoch": str(epoch)})

    def write(self, frame: pl.DataFrame) -> None:
        """Post the rows under keys of this start: what is replayed after a crash is posted again."""
        self._written += 1
        self._post(frame, f"{self._name}/{self._start}/{self._written}", {})

    def close(self) -> None:
        self._pool.clear()

    def _post(self, frame: pl.DataFrame, name: str, headers: dict[str, str]) -> None:
        for number, part in enumerate(frame.iter_slices(self._options.rows_per_request)):
            if part.is_empty():
                continue
            body = b"\n".join(self._format.encode(part)) + b"\n"
            # The rows are part of the key: a replay may cut them in another way.
            key = hashlib.sha256(f"{name}/{number}/".encode() + body).hexdigest()[:40]
            self._request(body, self._headers | headers | {"idempotency-key": key})

    def _request(self, body: bytes, headers: dict[str, str]) -> None:
        try:
            answer = self._pool.request(
                "POST", self._options.url, body=body, headers=headers, redirect=False, preload_content=False
            )
            data = answer.read(ANSWER_BYTES_MAX)
            if answer.length_remaining == 0:
                answer.release_conn()
            else:
                answer.close()
        except urllib3.exceptions.HTTPError as error:
            raise SinkDelayedError(f"{self._where}: the server is away: {error}. It will be tried again.") from error
        if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return
        said = f"the server answers {answer.status}: {data.decode(errors='replace')}"
        if answer.status in _PASSES or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise SinkDelayedError(f"{self._where}: {said}. It will be tried again.")
        raise SinkError(
            f"{self._where}: {said}\nThe rows of this request were not taken. Correct the address, the token or the rows."
        )
