"""Saying no: the one exception that becomes an answer, and which status goes with which word."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from fordstone.hub.messages import Generation, Refusal

Word: TypeAlias = Literal[
    "gap", "other_content", "stale_generation", "missing_blobs", "held", "wrong_digest", "too_large", "too_many_requests",
    "bad_request", "bad_name", "unauthorised", "forbidden", "not_found", "storage", "gone", "failed",
]  # fmt: skip

STATUS: Final[dict[Word, int]] = {
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


class Refused(Exception):  # noqa: N818 - it is an answer rather than an error
    """The request is refused; nothing of it stays."""

    def __init__(
        self,
        word: Word,
        message: str,
        *,
        status: int | None = None,
        next_epoch: int | None = None,
        generation: Generation | None = None,
        missing: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = STATUS[word] if status is None else status
        self.refusal = Refusal(
            error=word, message=message, next_epoch=next_epoch, generation=generation, missing=missing
        )
