"""The exception tree.

An error says what happened, where, and what to do. `FordstoneError` and what derives from it are for the person who
runs the pipeline: the command line prints their text without a traceback. Anything else is a bug of ours.
"""

from __future__ import annotations

import errno
from typing import Final


class FordstoneError(Exception):
    """Something the user can mend; the text says how."""


class PipelineError(FordstoneError):
    """The pipeline as declared cannot run; raised while it is built."""


class SchemaError(PipelineError):
    """A schema is malformed, or rows do not have the declared columns and types."""


class ExpressionError(PipelineError):
    """An expression does not parse, names what is not there, or mixes types.

    Carries the text and the place, and shows a caret under it.
    """

    def __init__(self, message: str, *, text: str, offset: int | None = None, step: str | None = None) -> None:
        self.message = message
        self.text = text
        self.offset = offset
        self.step = step
        super().__init__(self.render())

    def render(self) -> str:
        """Give the message with the expression below it and a caret under the place."""
        head = f"step {self.step}: {self.message}" if self.step else self.message
        if self.offset is None or not 0 <= self.offset <= len(self.text):
            return f"{head}\n  {self.text}"
        line_start = self.text.rfind("\n", 0, self.offset) + 1
        line_end = self.text.find("\n", self.offset)
        line = self.text[line_start : line_end if line_end >= 0 else len(self.text)]
        return f"{head}\n  {line}\n  {' ' * (self.offset - line_start)}^"

    def at_step(self, step: str) -> ExpressionError:
        """The same error, naming the step whose expression this is."""
        return ExpressionError(self.message, text=self.text, offset=self.offset, step=step)


class ConfigError(FordstoneError):
    """An option has a value that makes no sense."""


class PlanError(FordstoneError):
    """A stored plan cannot be read, or names code that cannot be imported."""


class CheckpointError(FordstoneError):
    """A checkpoint cannot be used."""


class DamagedError(CheckpointError):
    """A stored file is missing, short, or does not have the bytes that its digest promises."""


class RejectedRunError(DamagedError):
    """A run that a holder of a token has sent is not Arrow, is forged, becomes too large, or has other columns (rule 25)."""


class EndedError(CheckpointError):
    """The run has ended, with all its windows closed, and cannot take more input in."""


class PlanMismatchError(CheckpointError):
    """The checkpoint belongs to a pipeline with other stateful steps."""


class ReplayError(CheckpointError):
    """A sealed epoch was computed again and came out different, or its input is gone."""


class StoreLockedError(FordstoneError):
    """Another process owns the state directory."""


class StorageError(FordstoneError):
    """The disk refused: full, read-only, or failing. Nothing was acknowledged."""


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def describe_refusal(error: OSError, what: str, where: object) -> str:
    """Say what a disk refused and what to do about it. `what`: as in "could not `what` `where`"."""
    if error.errno in _FULL:
        return f"the disk is full: could not {what} {where} ({error.strerror}). Nothing was acknowledged.\nMake room; it will be tried again."
    if error.errno in _READ_ONLY:
        return f"could not {what} {where}: {error.strerror}. Nothing was acknowledged.\nMake the directory writable for this user, or choose another."
    return f"could not {what} {where}: {error.strerror}. Nothing was acknowledged.\nCheck the disk."


class SourceError(FordstoneError):
    """A source cannot be read."""


class GoneError(SourceError):
    """A partition of a source is not there any more."""


class ReplacedError(GoneError):
    """Something else has the name of a partition of a source, and the partition is nowhere."""


class RejectedEpochError(SourceError):
    """The rows of one epoch of a node cannot be taken (rule 25): the node belongs into quarantine. Other nodes can be read."""

    def __init__(self, message: str, *, node: str, epoch: int, reason: str) -> None:
        """`reason`: in a few words, for lists of nodes."""
        super().__init__(message)
        self.node = node
        self.epoch = epoch
        self.reason = reason


class NodeQuarantinedError(SourceError):
    """A read that was planned contains an epoch that cannot be taken. Its node is in quarantine now: a new start goes on without the node."""


class NodeStoppedError(SourceError):
    """One node of a stream at a hub cannot be read on: its log was set back, or epochs of it are gone. Others can be read."""

    def __init__(self, message: str, *, node: str, epoch: int, reason: str) -> None:
        """`epoch`: the next one to be read. `reason`: in a few words."""
        super().__init__(message)
        self.node = node
        self.epoch = epoch
        self.reason = reason


class SinkError(FordstoneError):
    """A sink cannot be written."""


class TaskError(FordstoneError):
    """A step or a run failed: a step raises it for a wrong result of a user's function, an engine when it stops restarting."""


class FunctionError(TaskError):
    """A user's function raises an exception for the same row each time: a restart would not help. The text shows the row."""

    def __init__(self, message: str, *, placed: bool = False) -> None:
        """`placed`: the text says where in the input the row is."""
        self.placed = placed
        super().__init__(message)


class NotInstalledError(FordstoneError):
    """Something that is needed is not on this machine; the text says how to get it."""


class HubError(FordstoneError):
    """The hub could not be asked, or said no."""


class HubAwayError(HubError):
    """The hub does not answer, or not sensibly: the network, a restart, an overload. Trying again later is right."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: when to try again, if the hub has said so."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HubRefusedError(HubError):
    """The hub said no. `code` is its word for why (`hub.messages.Refusal.error`), `status` the HTTP status."""

    def __init__(self, message: str, *, status: int, code: str, refusal: object = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.refusal = refusal


class FencedError(HubError):
    """A newer generation owns this pipeline on this node. This process stops; what it has stays where it is."""
