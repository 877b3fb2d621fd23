"""The fields of log records. A record has a constant text, the event, and its fields in `extra`.

`FieldsHandler` is installed when the package is imported: programs that configure logging in the usual way see the fields, too, and programs that do
not are not written to. The command line replaces it (`cli.logs`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Final

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FieldsHandler(logging.NullHandler):
    """Writes nothing. Adds the fields to the text of a record, before it goes on to the handlers of the program."""

    def handle(self, record: logging.LogRecord) -> bool:
        fields = fields_of(record)
        if fields:
            record.msg = " ".join([record.getMessage(), *format_fields(fields)])
            record.args = None
        return True


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What was given as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def format_fields(fields: Mapping[str, object]) -> list[str]:
    """Each field as `name=value`."""
    found = []
    for name, value in fields.items():
        text = str(value)
        quoted = not text or any(char.isspace() or char in '"=' for char in text)
        found.append(f"{name}={json.dumps(text, ensure_ascii=False) if quoted else text}")
    return found
