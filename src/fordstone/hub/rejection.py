"""The one exception that becomes an HTTP response, and which status belongs to which error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from fordstone.hub.messages import Generation, Refusal

ErrorCode: TypeAlias = Literal[
    "gap", "other_content", "stale_generation", "missing_blobs", "held", "wrong_digest", "too_large", "too_many_requests",
    "bad_request", "bad_name", "unauthorised", "forbidden", "not_found", "storage", "gone", "failed",
]  # fmt: skip

STATUS: Final[dict[ErrorCode, int]] = {
    "gap": 409,
    "other_content": 409,
    "held": 409,
    "stale_generation": 412,
    "missing_blobs": 424,
    "wrong_digest": 400,
    "too_large": 413,
    "too_many_requests": 429,
    "bad_request": 400,
    "bad_name": 400,
    "unauthorised": 401,
    "forbidden": 403,
    "not_found": 404,
    "storage": 507,
    "gone": 410,
    "failed": 500,
}


class Rejection(Exception):  # noqa: N818 - it is a response rather than an error
    """The request is rejected, and nothing of it is kept. `middleware` turns it into a response."""

    def __init__(
        self,
        error: ErrorCode,
        message: str,
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        next_epoch: int | None = None,
        generation: Generation | None = None,
        missing: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = STATUS[error] if status is None else status
        self.headers = dict(headers or {})
        self.refusal = Refusal(
            error=error, message=message, next_epoch=next_epoch, generation=generation, missing=missing
        )

    def body(self) -> bytes:
        """Encode the body of the response."""
        return msgspec.json.encode(self.refusal)
