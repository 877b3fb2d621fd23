"""What the fault tests count: kills and damage that really happened are part of the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call it with what was done: `faults(kills=1)`. The sum is printed at the end of the run."""
    counts: dict[str, int] = {}
    request.node.user_properties.append(("faults", counts))

    def happened(**done: int) -> None:
        for name, count in done.items():
            counts[name] = counts.get(name, 0) + count

    return happened
