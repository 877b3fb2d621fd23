"""Read requests and check them beyond their types: names, digests and numbers within their bounds.

Nothing that passes here can leave a directory, overflow a column of the log or make a page of it unreadable. Names in the
path are checked by `routes`, sizes of bodies by `middleware`, everything else here, once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from fordstone.errors import PipelineError
from fordstone.hub.messages import (
    BLOB_BYTES_MAX,
    EPOCHS_PER_COMMIT_MAX,
    RUNS_PER_COMMIT_MAX,
    WAIT_SECONDS_MAX,
    Checkpoint,
    Commit,
    EpochEntry,
    Rejection,
)
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.plan.ids import checked_name
from fordstone.state.base import RunRef

NUMBER_MAX: Final = 2**63 - 1
NAMES_MAX: Final = 1_000
"""Maximum number of streams, or of control tables, in one epoch."""
HOLDER_CHARS_MAX: Final = 200
SEGMENTS_PER_COMMIT_MAX: Final = 20_000
"""Each costs the one writing thread some rows, even if it has no run."""
_DIGITS_MAX: Final = 19
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_RANGE: Final = re.compile(r"([1-9][0-9]{0,17})-([1-9][0-9]{0,17})")
_HOLDER: Final = re.compile(r"[!-~]{1,200}")

T = TypeVar("T")


def name_in(value: str, what: str) -> str:
    """Check a name that is used in paths and log lines."""
    try:
        return checked_name(value, what)
    except PipelineError as error:
        raise Rejection("bad_name", str(error)) from error


def digest_in(value: str) -> str:
    """Check a sha256 in hex."""
    if _DIGEST.fullmatch(value) is None:
        raise Rejection("bad_name", f"a digest is 64 hex digits in lower case, not {value[:80]!r}.")
    return value


def holder_in(value: str, what: str) -> str:
    """Check a random word that identifies an owner."""
    if _HOLDER.fullmatch(value) is None:
        raise Rejection(
            "bad_request", f"{what} must be 1 to {HOLDER_CHARS_MAX} printable ASCII characters without spaces."
        )
    return value


def range_in(value: str) -> tuple[int, int]:
    """Parse `a-b`."""
    match = _RANGE.fullmatch(value)
    if match is None or int(match[1]) > int(match[2]):
        raise Rejection("bad_request", f"a range of epochs is A-B with 1 <= A <= B, not {value[:80]!r}.")
    return int(match[1]), int(match[2])


def number_in(value: int, what: str, *, least: int = 0, most: int = NUMBER_MAX) -> int:
    """Check a number against its bounds."""
    if not least <= value <= most:
        raise Rejection("bad_request", f"{what} is {value}; it must be from {least} to {most}.")
    return value


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Rejection("bad_request", f"the body is no {kind.__name__}: {error}.") from error


def check_run(run: RunRef) -> None:
    """Check a reference to a blob."""
    digest_in(run.digest)
    number_in(run.size_bytes, f"size_bytes of {run.digest}", most=BLOB_BYTES_MAX)
    number_in(run.rows, f"rows of {run.digest}")


def check_time(value: int, what: str) -> None:
    """Check a time that the log must hold."""
    number_in(value, what, least=TIME_MIN_US, most=TIME_MAX_US)


def check_commit(commit: Commit, first: int, last: int) -> None:
    """Check that a commit has the epochs of its path, and names and numbers within bounds."""
    number_in(commit.generation.hub, "generation.hub")
    number_in(commit.generation.local, "generation.local")
    if len(commit.epochs) > EPOCHS_PER_COMMIT_MAX:
        raise Rejection(
            "bad_request", f"a commit has at most {EPOCHS_PER_COMMIT_MAX} epochs, this one {len(commit.epochs)}."
        )
    if last - first >= EPOCHS_PER_COMMIT_MAX or [entry.epoch for entry in commit.epochs] != [*range(first, last + 1)]:
        raise Rejection(
            "bad_request", f"the address says epochs {first} to {last}; the body must have exactly these, in order."
        )
    segments = sum(len(entry.streams) for entry in commit.epochs)
    if segments > SEGMENTS_PER_COMMIT_MAX:
        raise Rejection(
            "bad_request",
            f"a commit has at most {SEGMENTS_PER_COMMIT_MAX} segments, this one {segments}: commit fewer epochs.",
        )
    runs = sum(check_entry(entry) for entry in commit.epochs)
    if commit.checkpoint is not None:
        runs += check_checkpoint(commit.checkpoint, last)
    if runs > RUNS_PER_COMMIT_MAX:
        raise Rejection(
            "bad_request", f"a commit has at most {RUNS_PER_COMMIT_MAX} runs, this one {runs}: commit fewer epochs."
        )


def check_entry(entry: EpochEntry) -> int:
    """Check an epoch; return its number of runs."""
    check_time(entry.created_us, "created_us")
    check_names(entry.streams, "stream")
    check_names(entry.controls, "control table")
    runs = 0
    for segment in entry.streams.values():
        check_time(segment.watermark_us, "watermark_us")
        for run in segment.runs:
            check_run(run)
        runs += len(segment.runs)
    for version in entry.controls.values():
        number_in(version, "the version of a control table")
    return runs


def check_checkpoint(checkpoint: Checkpoint, last: int) -> int:
    """Check that a checkpoint belongs to the last epoch; return its number of runs."""
    if checkpoint.epoch != last:
        raise Rejection(
            "bad_request", f"only the last epoch, {last}, may have a checkpoint; this one is of {checkpoint.epoch}."
        )
    check_run(checkpoint.manifest)
    for run in checkpoint.state:
        check_run(run)
    return 1 + len(checkpoint.state)


def check_names(names: Iterable[str], what: str) -> None:
    """Check names, and their number."""
    for index, name in enumerate(names):
        if index >= NAMES_MAX:
            raise Rejection("bad_request", f"more than {NAMES_MAX} times a {what} in one body.")
        name_in(name, what)


def integer_in_query(request: Request, what: str, default: int, *, most: int = NUMBER_MAX) -> int:
    """Read a whole number from the query, or reject it."""
    text = request.query_params.get(what)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX and int(text) <= most):
        raise Rejection("bad_request", f"{what} must be a whole number from 0 to {most}, not {text[:40]!r}.")
    return int(text)


def wait_in_query(request: Request) -> float:
    """Read the seconds that a long poll waits; more than the maximum counts as the maximum."""
    text = request.query_params.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise Rejection("bad_request", f"wait must be a number of seconds from 0 on, not {text[:40]!r}.")
    return min(seconds, WAIT_SECONDS_MAX)
