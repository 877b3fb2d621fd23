"""How errors are shown on the command line.

An error that the user can fix is shown as its text and the line in their file, without a traceback. An exception in the user's code is
shown with the frames of their code. Anything else is a bug of ours and shows the whole traceback.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import click

import fordstone
from fordstone.errors import FencedError, FordstoneError, TaskError

log = logging.getLogger(__name__)

FAILED: Final = 1
WRONG_USAGE: Final = 2
FENCED: Final = 3
FAILURE: Final = "command failed"
"""The event of the log line with the error of a command."""
_OURS: Final = str(Path(fordstone.__file__).parent)
_BUG = "This is a bug in fordstone. Please report it with the lines above."


class UserError(click.ClickException):
    """An error that the user can fix: shown as text, without a traceback."""

    exit_code = FAILED

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it to standard error; if log lines there are JSON, as one of them."""
        from fordstone.cli.logs import is_json

        if is_json():
            log.error(FAILURE, extra={"problem": self.message, "code": self.exit_code})
            return
        click.echo(f"{click.style('error:', fg='red', bold=True)} {self.message}", file=file, err=True)


class TakenOverError(UserError):
    """Another process owns the pipeline on this node now. A supervisor must not restart this one."""

    exit_code = FENCED


class UsageError(UserError):
    """The command line is wrong."""

    exit_code = WRONG_USAGE


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Show an error of ours inside the block as one of the command line."""
    try:
        yield
    except FordstoneError as error:
        raise UsageError(str(error)) from error


def as_exit(error: Exception) -> click.ClickException | None:
    """What to show instead of the exception; None if it is a bug of ours."""
    if isinstance(error, click.ClickException):
        return error
    if isinstance(error, FencedError):
        return TakenOverError(str(error))
    if isinstance(error, FordstoneError) and not isinstance(error, TaskError):
        return UserError(str(error))
    cause = error.__cause__ if isinstance(error, TaskError) else error
    if cause is None:
        return UserError(str(error))
    if error is not cause and of_spark(cause):
        return UserError(f"{error}{_in_worker(cause)}")
    theirs = frames_of_user_code(cause.__traceback__)
    if not theirs:
        # A system that stayed away for all restarts is no bug.
        return UserError(str(error)) if error is not cause and isinstance(cause, ConnectionError) else None
    message = str(error) if error is not cause else "a function of the pipeline raised an exception."
    return UserError(f"{message}\n\n{_shown(cause, theirs)}")


def of_spark(error: BaseException) -> bool:
    """Whether Spark raised it: it happened in another process, so the frames of this one do not help."""
    return type(error).__module__.partition(".")[0] in {"pyspark", "py4j"}


def _in_worker(error: BaseException) -> str:
    from fordstone.spark.session.session import worker_trace

    trace = worker_trace(str(error))
    return f"\n\n{trace}" if trace is not None and trace.frames else ""


def show_bug(error: BaseException) -> None:
    """Print the whole traceback and ask for a report."""
    traceback.print_exception(error, file=sys.stderr)
    click.echo(f"\n{click.style('error:', fg='red', bold=True)} {_BUG}", err=True)


def frames_of_user_code(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """The frames below our last one that are neither ours nor a library's.

    An exception belongs to the user if it was raised below a function of theirs that we called.
    """
    frames = list(traceback.extract_tb(trace))
    ours = [place for place, frame in enumerate(frames) if _is_ours(frame.filename)]
    below = frames[ours[-1] + 1 :] if ours else frames
    return [frame for frame in below if _is_users(frame.filename)]


def in_file(error: BaseException, path: Path) -> UserError:
    """The error for an exception raised while the user's file was loaded, with the frames from their file on."""
    frames = list(traceback.extract_tb(error.__traceback__))
    places = [place for place, frame in enumerate(frames) if Path(frame.filename) == path]
    if isinstance(error, FordstoneError):
        where = frames[places[-1]] if places else None
        at = "" if where is None else f"\n\nin {path}, line {where.lineno}:\n    {where.line}"
        return UserError(f"{error}{at}")
    if isinstance(error, SyntaxError) and not places:
        return UserError(f"{path} is not valid Python.\n\n{''.join(traceback.format_exception_only(error)).rstrip()}")
    below = frames[places[0] :] if places else []
    if below and _is_ours(below[-1].filename):
        return UserError(f"{path} raised an exception while it was loaded.\n\n{_shown(error, below)}\n\n{_BUG}")
    theirs = [frame for frame in below if _is_users(frame.filename)]
    return UserError(f"{path} raised an exception while it was loaded.\n\n{_shown(error, theirs)}")


def _shown(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    lines = traceback.StackSummary.from_list(list(frames)).format()
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def _is_users(filename: str) -> bool:
    places = sysconfig.get_paths()
    libraries = (_OURS, places["stdlib"], places["platstdlib"], places["purelib"], places["platlib"], "<frozen")
    return not filename.startswith(libraries)
