from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from fordstone.cli.logs import LogFormatter, add_log_fields, configure_logging, text_line


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("fordstone.edge.test")


def record(message: str, *, error: Exception | None = None, **fields: object) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("fordstone.edge", logging.WARNING, __file__, 1, message, (), exc_info)
    vars(made).update(fields)
    return made


def test_a_record_is_one_line_with_its_event_first_and_then_its_fields():
    line = LogFormatter(as_json=False, tracebacks=False).format(
        record("checkpoint damaged", epoch=41, problem="run 9f is missing", note="")
    )
    assert line.partition(" ")[2] == 'WARNING checkpoint damaged epoch=41 problem="run 9f is missing" note=""'


def test_a_field_of_several_lines_stays_on_the_line():
    line = LogFormatter(as_json=False, tracebacks=False).format(record("failed", problem="one\ntwo = 2"))
    assert line.endswith(r'problem="one\ntwo = 2"')


def test_an_exception_is_named_on_the_line_and_traced_only_when_asked_for():
    error = KeyError("temp")
    plain = LogFormatter(as_json=False, tracebacks=False).format(record("pipeline failed", error=error))
    verbose = LogFormatter(as_json=False, tracebacks=True).format(record("pipeline failed", error=error))
    assert plain.endswith("""pipeline failed error="KeyError: 'temp'\"""")
    assert verbose.splitlines()[1:] == ["KeyError: 'temp'"], "an exception that was never raised has no frames"


@pytest.mark.parametrize(
    ("verbosity", "shown"), [(0, ["warning"]), (1, ["warning", "info"]), (2, ["warning", "info", "debug"])]
)
def test_warnings_are_always_seen_and_more_when_asked_for(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], verbosity: int, shown: list[str]
):
    configure_logging(verbosity)
    configure_logging(verbosity)
    for level in ("warning", "info", "debug"):
        getattr(logger, level)(level)
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == shown


def test_a_record_for_machines_is_one_object_whatever_its_fields_are_called():
    made = record("checkpoint damaged", epoch=41, problem="run\n9f", event="x", at_s=1, error=ValueError("no"))
    made.created = 0.25
    found = json.loads(LogFormatter(as_json=True, tracebacks=False).format(made))
    assert list(found) == ["at", "level", "event", "epoch", "problem", "at_s", "error"]
    assert (found["at"], found["event"], found["error"]) == (
        "1970-01-01T00:00:00.250Z",
        "checkpoint damaged",
        "ValueError: no",
    )
    assert text_line(found).startswith("00:00:00 WARNING checkpoint damaged epoch=41 ")


def test_what_every_line_says_stands_in_it_unless_it_says_otherwise(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
):
    configure_logging(0, as_json=True)
    add_log_fields(pipeline="cold-chain")
    logger.warning("one")
    logger.warning("two", extra={"pipeline": "other"})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["pipeline"]) for line in lines] == [("one", "cold-chain"), ("two", "other")]


def test_a_line_is_written_in_one_call_so_that_lines_of_threads_do_not_mix(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    configure_logging(0, as_json=True)
    monkeypatch.setattr(sys, "stderr", Stream())
    logger.warning("epochs not sent yet")
    (line,) = written
    assert line.endswith("}\n")
