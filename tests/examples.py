"""How many examples Hypothesis tries."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

QUICK = "FORDSTONE_TEST_QUICK"
"""Set by `--quick`."""
QUICK_SHARE = 8
QUICK_LEAST = 3


def examples(count: int, *allowed: HealthCheck) -> settings:
    """Decorate a property that is tried with this number of examples, or with an eighth of it under `--quick`.

    There is no deadline, and slow examples are no failure: the machine may be busy.
    """
    count = max(count // QUICK_SHARE, QUICK_LEAST) if QUICK in os.environ else count
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow, *allowed])
