from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from fordstone.cli.logs import LineFormatter, configure_logging


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    ours = logging.getLogger("fordstone")
    handlers, propagate, level = list(ours.handlers), ours.propagate, ours.level
    yield logging.getLogger("fordstone.edge.test")
    ours.handlers[:], ours.propagate = handlers, propagate
    ours.setLevel(level)


def record(message: str, *, error: Exception | None = None, **fields: object) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("fordstone.edge", logging.WARNING, __file__, 1, message, (), exc_info)
    vars(made).update(fields)
    return made


def test_a_record_is_one_line_with_its_event_first_and_then_its_fields():
    line = LineFormatter(tracebacks=False).format(
        record("checkpoint damaged", epoch=41, problem="run 9f is missing", note="")
    )
    assert line.partition(" ")[2] == 'WARNING checkpoint damaged epoch=41 problem="run 9f is missing" note=""'


def test_a_field_of_several_lines_stays_on_the_line():
    line = LineFormatter(tracebacks=False).format(record("failed", problem="one\ntwo = 2"))
    assert line.endswith(r'problem="one\ntwo = 2"')


def test_an_exception_is_named_on_the_line_and_traced_only_when_asked_for():
    error = KeyError("temp")
    plain = LineFormatter(tracebacks=False).format(record("pipeline failed", error=error))
    verbose = LineFormatter(tracebacks=True).format(record("pipeline failed", error=error))
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
