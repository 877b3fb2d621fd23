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

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LEVELS: Final = (logging.WARNING, logging.INFO, logging.DEBUG)


class LineFormatter(logging.Formatter):
    """The event, then the fields in `extra` as `name=value`."""

    def __init__(self, *, tracebacks: bool) -> None:
        """`tracebacks`: whether the traceback of a logged exception follows its line; otherwise only the exception is named."""
        super().__init__(datefmt="%H:%M:%S")
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and below it the traceback if wanted."""
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not self._tracebacks:
            fields["error"] = describe_exception(error)
        words = [f"{name}={_value(value)}" for name, value in fields.items()]
        line = " ".join([self.formatTime(record, self.datefmt), record.levelname, record.getMessage(), *words])
        if error is not None and self._tracebacks and record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """A JSON object: time, level, event, then the fields in `extra`."""

    def __init__(self, *, tracebacks: bool) -> None:
        """`tracebacks`: as for `LineFormatter`."""
        super().__init__()
        self._tracebacks = tracebacks
        self.common: dict[str, object] = {}
        """Fields of every line that does not set them itself."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        fields = self.common | {name: value for name, value in vars(record).items() if name not in _STANDARD}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields["error"] = describe_exception(error)
            if self._tracebacks and record.exc_info:
                fields["traceback"] = self.formatException(record.exc_info)
        return json_line(record.levelname, record.getMessage(), fields, at_s=record.created)


def json_line(level: str, event: str, fields: Mapping[str, object], *, at_s: float) -> str:
    """A log line for machines. Fields named like one of the first three are omitted."""
    at = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head: dict[str, object] = {"at": at, "level": level, "event": event}
    return json.dumps({**head, **fields, **head}, ensure_ascii=False, default=str)


def text_line(entry: Mapping[str, object]) -> str:
    """A log line for machines, as text."""
    fields = {name: value for name, value in entry.items() if name not in {"at", "level", "event", "traceback"}}
    words = [f"{name}={_value(value)}" for name, value in fields.items()]
    return " ".join([str(entry.get("at", ""))[11:19], str(entry.get("level", "")), str(entry["event"]), *words])


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
        """Print one record."""
        try:
            write_line(self.format(record))
        except Exception:  # noqa: BLE001 - logging must not end the program
            self.handleError(record)


def configure_logging(verbosity: int, *, as_json: bool = False) -> None:
    """Log warnings; with verbosity 1 also info, with 2 everything. Called once by a command, before anything runs."""
    handler = StderrHandler()
    form = JsonFormatter if as_json else LineFormatter
    handler.setFormatter(form(tracebacks=verbosity > 0))
    root = logging.getLogger("fordstone")
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(_LEVELS[min(verbosity, len(_LEVELS) - 1)])


def is_json() -> bool:
    """Whether log lines on standard error are JSON."""
    handlers = logging.getLogger("fordstone").handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


def add_log_fields(**fields: object) -> None:
    """Add fields to every JSON log line."""
    for handler in logging.getLogger("fordstone").handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.common.update(fields)


def describe_exception(error: BaseException) -> str:
    """The exception in one line; of Spark's, which fill pages, the last message."""
    if not of_spark(error):
        return f"{type(error).__name__}: {error}"
    from fordstone.spark.run import last_words

    return last_words(str(error))


def _value(value: object) -> str:
    text = str(value)
    return (
        json.dumps(text, ensure_ascii=False)
        if not text or any(char.isspace() or char in '"=' for char in text)
        else text
    )
