"""Waiting for what other threads and processes do, with a bound: the one place in the tests that polls a condition."""

import time
from collections.abc import Callable

POLL_SECONDS = 0.02


def until(
    met: Callable[[], bool],
    what: str,
    *,
    seconds_max: float = 180.0,
    poll_seconds: float = POLL_SECONDS,
    alive: Callable[[], bool] = lambda: True,
    report: Callable[[], object] = lambda: "",
) -> None:
    """Wait until `met`. Fail with a report once the time is up, or what should bring it about is no longer `alive`."""
    deadline = time.monotonic() + seconds_max
    while not met():
        assert alive(), f"it ended before {what}:\n{report()}"
        assert time.monotonic() < deadline, f"no {what} within {seconds_max:.0f} s:\n{report()}"
        time.sleep(poll_seconds)
