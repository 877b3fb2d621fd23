"""How many examples of something a run tries: it depends on `--quick` and `--full`."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

SHARE = "FORDSTONE_TEST_EXAMPLES"
"""Set by the options of a run: one in this number of examples is tried."""
SHARES = {"quick": 8, "usual": 3, "full": 1}
LEAST = 3


def share_of(count: int, least: int = 1) -> int:
    """Return how many of this number a run tries: all under `--full`, a third as a rule, an eighth under `--quick`."""
    return max(count // int(os.environ.get(SHARE, SHARES["usual"])), least)


def rest(*values: object) -> list[object]:
    """Return cases of a matrix that only `--full` runs, for `pytest.mark.parametrize`."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def examples(count: int, *allowed: HealthCheck) -> settings:
    """Decorate a property that Hypothesis tries with `share_of` this number of examples.

    There is no deadline, and slow examples are no failure: the machine may be busy.
    """
    return settings(
        max_examples=share_of(count, LEAST), deadline=None, suppress_health_check=[HealthCheck.too_slow, *allowed]
    )
