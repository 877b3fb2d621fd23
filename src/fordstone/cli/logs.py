"""Logging for the command line: one line per record on standard error, as text with the event first, or as JSON.

12:00:01 WARNING checkpoint damaged epoch=41 problem="run 9f2c… is missing" using=40
{"at":"2026-01-31T12:00:01.250Z","level":"WARNING","event":"checkpoint damaged","epoch":41,"using":40}
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, TextIO

from fordstone.cli.errors import of_spark
from fordstone.log_fields import fields_of, format_fields

_LEVELS: Final = (logging.WARNING, logging.INFO, logging.DEBUG)


class LogFormatter(logging.Formatter):
    """One line with time, level, event and the fields in `extra`; as text, the fields are `name=value`.

    `tracebacks`: whether the traceback of a logged exception is shown; otherwise only the exception is named.
    """

    def __init__(self, *, as_json: bool, tracebacks: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self.as_json = as_json
        self._tracebacks = tracebacks
        self.common: dict[str, object] = {}
        """Fields of every JSON line that does not set them itself."""

    def format(self, record: logging.LogRecord) -> str:
        fields = fields_of(record)
        error = record.exc_info[1] if record.exc_info else None
        trace = self.formatException(record.exc_info) if error and record.exc_info and self._tracebacks else None
        if error is not None and (self.as_json or trace is None):
            fields["error"] = describe_exception(error)
        if self.as_json:
            fields = self.common | fields | ({} if trace is None else {"traceback": trace})
            return json_line(record.levelname, record.getMessage(), fields, at_s=record.created)
        line = " ".join(
            [self.formatTime(record, self.datefmt), record.levelname, record.getMessage(), *format_fields(fields)]
        )
        return line if trace is None else f"{line}\n{trace}"


def json_line(level: str, event: str, fields: Mapping[str, object], *, at_s: float) -> str:
    """A log line for machines. Fields named like one of the first three are omitted."""
    at = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head: dict[str, object] = {"at": at, "level": level, "event": event}
    return json.dumps({**head, **fields, **head}, ensure_ascii=False, default=str)


def text_line(entry: Mapping[str, object]) -> str:
    """A log line for machines, as text."""
    fields = {name: value for name, value in entry.items() if name not in {"at", "level", "event", "traceback"}}
    return " ".join(
        [str(entry.get("at", ""))[11:19], str(entry.get("level", "")), str(entry["event"]), *format_fields(fields)]
    )


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Write a line to the current standard error, or to another stream, in one call: lines of several threads do not mix.

    `print` would write the text and the newline in two calls.
    """
    stream = sys.stderr if stream is None else stream
    stream.write(text + "\n")
    stream.flush()


class StderrHandler(logging.Handler):
    """Writes to the current standard error, which a live view replaces so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:  # noqa: BLE001 - logging must not end the program
            self.handleError(record)


def configure_logging(verbosity: int, *, as_json: bool = False) -> None:
    """Log warnings; with verbosity 1 also info, with 2 everything. Called once by a command, before anything runs."""
    handler = StderrHandler()
    handler.setFormatter(LogFormatter(as_json=as_json, tracebacks=verbosity > 0))
    root = logging.getLogger("fordstone")
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(_LEVELS[min(verbosity, len(_LEVELS) - 1)])
    # Of Spark's connection to Java: a call that fails raises the same error, and that is shown.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)


def is_json() -> bool:
    """Whether log lines on standard error are JSON."""
    return any(form.as_json for form in _formatters())


def add_log_fields(**fields: object) -> None:
    """Add fields to every JSON log line."""
    for form in _formatters():
        form.common.update(fields)


def _formatters() -> list[LogFormatter]:
    found = [handler.formatter for handler in logging.getLogger("fordstone").handlers]
    return [one for one in found if isinstance(one, LogFormatter)]


def describe_exception(error: BaseException) -> str:
    """The exception in one line; of Spark's, which fill pages, the last message."""
    if not of_spark(error):
        return f"{type(error).__name__}: {error}"
    from fordstone.spark.session.session import describe_failure

    return describe_failure(str(error))
