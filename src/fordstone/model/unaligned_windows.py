"""What makes sense for windows that are not cut by the clock: sessions, and windows by count."""

from __future__ import annotations

from typing import Final

from fordstone.errors import PipelineError
from fordstone.model.duration import human_us
from fordstone.model.windows import Count, Session

GAP_MAX_US: Final = 2**62
"""A gap behind any time is still a time."""
ROWS_MAX: Final = 2**31
"""The panes of a window lie in one array."""


def check_session(step: str, window: Session) -> None:
    """Refuse gaps that no session could end by."""
    if window.gap_us <= 0:
        raise PipelineError(
            f"step {step}: the gap of a session must be longer than zero, and this is {human_us(window.gap_us)}. "
            'Give the silence after which a session is over: session("30s").'
        )
    if window.gap_us >= GAP_MAX_US:
        raise PipelineError(
            f"step {step}: no session could end by a gap of {human_us(window.gap_us)}. Give a shorter one."
        )


def check_count(step: str, window: Count) -> None:
    """Refuse windows without rows, and windows that do not move on."""
    for what, rows in (("size", window.size), ("every", window.slide)):
        if not 1 <= rows <= ROWS_MAX:
            raise PipelineError(
                f"step {step}: windows by count need 1 to {ROWS_MAX:,} rows, and {what} is {rows:,}. "
                "Write by_count(100), or by_count(100, every=10) for a window of 100 rows at every tenth."
            )
