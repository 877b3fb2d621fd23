"""What makes sense for windows that are cut by the clock, tumbling and sliding, and for early results of windows."""

from __future__ import annotations

from typing import Final

from fordstone.errors import PipelineError
from fordstone.model.duration import human_us
from fordstone.model.windows import Sliding, Tumbling, Window

SPAN_MAX_US: Final = 2**62
"""A window behind any time still ends at a time."""
WINDOWS_A_ROW_MAX: Final = 100_000
"""A row counts for at most so many windows: each gives a result of its own for every key."""


def check_aligned(step: str, window: Tumbling | Sliding) -> None:
    """Refuse windows without length, windows that do not move on, and windows that hardly do."""
    spans = {"size": window.size_us}
    if isinstance(window, Sliding):
        spans["slide"] = window.slide_us
    for what, span_us in spans.items():
        if not 0 < span_us < SPAN_MAX_US:
            raise PipelineError(
                f"step {step}: the {what} of a window must be longer than zero (and shorter than {human_us(SPAN_MAX_US)}), "
                f"and this is {human_us(span_us)}. "
                'Write tumbling("1m"), or sliding("1m", every="10s").'
            )
    if isinstance(window, Sliding) and window.size_us > WINDOWS_A_ROW_MAX * window.slide_us:
        raise PipelineError(
            f"step {step}: a row would count for {-(-window.size_us // window.slide_us):,} windows of {human_us(window.size_us)} "
            f"every {human_us(window.slide_us)}; {WINDOWS_A_ROW_MAX:,} are the most. Let windows begin less often (every=)."
        )


def check_early(step: str, window: Window | None, early_us: int) -> None:
    """Refuse early results where there is nothing to be early for, or no window that has a beginning and an end in advance."""
    if window is None:
        raise PipelineError(
            f"step {step}: early= belongs to windows. A running aggregate gives every key's newest result at each epoch anyway."
        )
    if not isinstance(window, Tumbling | Sliding):
        raise PipelineError(
            f"step {step}: early results are for tumbling and sliding windows, whose bounds are known before they close. "
            "Leave early= out for sessions and windows by count."
        )
    if early_us <= 0:
        raise PipelineError(
            f"step {step}: early={human_us(early_us)} must be longer than zero. It says how often, at most, provisional results come."
        )
