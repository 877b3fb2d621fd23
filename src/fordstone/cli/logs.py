"""Logging for the command line: one line a record on standard error, the event first, then its fields.

12:00:01 WARNING checkpoint damaged epoch=41 problem="run 9f2c… is missing" using=40
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Final

from fordstone.cli.mistakes import of_spark

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LEVELS: Final = (logging.WARNING, logging.INFO, logging.DEBUG)


class LineFormatter(logging.Formatter):
    """The event, then whatever came in `extra`, as `name=value`."""

    def __init__(self, *, tracebacks: bool) -> None:
        """`tracebacks`: whether those of logged exceptions follow their line; else only what was raised is named."""
        super().__init__(datefmt="%H:%M:%S")
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """One line, and below it a traceback if wanted."""
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not self._tracebacks:
            fields["error"] = _told(error)
        words = [f"{name}={_value(value)}" for name, value in fields.items()]
        line = " ".join([self.formatTime(record, self.datefmt), record.levelname, record.getMessage(), *words])
        if error is not None and self._tracebacks and record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class StderrHandler(logging.Handler):
    """Writes to whatever standard error is now: while a live view is shown, that puts the line above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001 - logging must not end what it reports on
            self.handleError(record)


def configure_logging(verbosity: int) -> None:
    """Warnings; with 1 also what happens, with 2 everything. Called once by a command, before anything runs."""
    handler = StderrHandler()
    handler.setFormatter(LineFormatter(tracebacks=verbosity > 0))
    root = logging.getLogger("fordstone")
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(_LEVELS[min(verbosity, len(_LEVELS) - 1)])


def _told(error: BaseException) -> str:
    """What was raised; of what Spark says, which goes over pages, the part that counts."""
    if not of_spark(error):
        return f"{type(error).__name__}: {error}"
    from fordstone.spark.worker_trace import last_words

    return last_words(str(error))


def _value(value: object) -> str:
    text = str(value)
    return (
        json.dumps(text, ensure_ascii=False)
        if not text or any(char.isspace() or char in '"=' for char in text)
        else text
    )
