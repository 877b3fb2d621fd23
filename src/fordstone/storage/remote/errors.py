"""Errors of stores: what a driver raises, as a line of text with what to do about it."""

from __future__ import annotations

import re
from typing import Final

from fordstone.errors import StorageError

REASON_CHARS_MAX: Final = 300
"""Maximum length of what a driver says, in an error."""
_CAUSED_BY: Final = "↳"
_COLOURS: Final = re.compile(r"\x1b\[\d*m")
_MESSAGE: Final = re.compile(r"<Message>(.*?)</Message>")
_WRAPPING: Final = re.compile(r'^(?:\w+\("(?:[\w.$]+", ")?)?(?:[a-z]\w*\.)+[\w$]+: |^\w+\("(?:[\w.$]+", ")?')
"""What a driver puts before the words of a server: names of classes."""
_ADVICE: Final = (
    (
        "safe mode",
        "The NameNode takes no changes now. `hdfs dfsadmin -safemode get` shows whether it still is in safe mode.",
    ),
    ("bucket does not exist", "Create the bucket, or correct the URL."),
    ("NoSuchBucket", "Create the bucket, or correct the URL."),
    ("locate credentials", "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."),
    ("signature", "Check the credentials: the secret key does not belong to the key id."),
    ("access key", "Check the credentials: the store does not have this key id."),
    ("UserNotFound", "Check the credentials: the store does not have this key id."),
    ("scheme is not allowed", "Set AWS_ALLOW_HTTP=true if the endpoint has no TLS."),
    ("Permission denied", "Check the owner and the mode of the directory, and HADOOP_USER_NAME."),
    ("Forbidden", "Check the credentials, and what they may do."),
    ("Access Denied", "Check the credentials, and what they may do."),
)
"""What to do, by a part of what the store has answered."""


class StoreAwayError(StorageError):
    """A store at a URL could not do what it was asked. It may be able to later."""


def reason(error: BaseException) -> str:
    """Return what a driver says, without its stack, and what to do about it."""
    text = str(error) or type(error).__name__
    lines = [line.strip() for line in _COLOURS.sub("", text).replace("\\n", "\n").splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if _CAUSED_BY in text:
        # From the outermost error to what caused it, which may be the document that a store has answered.
        message = _MESSAGE.search(text)
        first = message[1] if message else lines[-1].removeprefix(_CAUSED_BY).strip()
    unwrapped = _WRAPPING.sub("", first).replace('\\"', '"')
    first = unwrapped.rstrip('").' if unwrapped != first else ".")
    if len(first) > REASON_CHARS_MAX:
        first = f"{first[:REASON_CHARS_MAX]} …"
    advice = next((advice for part, advice in _ADVICE if part in text), None)
    return f"{first}." if advice is None else f"{first}.\n{advice}"


def is_missing_bucket(error: BaseException) -> bool:
    """Whether an error means that the whole bucket is missing: a misspelt one must not look like an empty store."""
    return type(error.__cause__).__name__ == "NoSuchBucket"
