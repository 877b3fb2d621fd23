"""Decide what time it is for a pipeline, and how far ahead of it a row may be. Pure.

The clock of a machine jumps: forward and back when somebody sets it, and back to 1970 where a machine without a battery starts. Both
engines ask here at the boundary between two epochs and record the answer, so that an epoch that is computed again has the same times.

Invariants: the clock of operators never goes back and never stands still; a jump forward that is taken back stays in no limit.
"""

from __future__ import annotations

from fordstone.lang.duration import TIME_MAX_US


def pipeline_clock_us(wall_us: int, *, before_us: int, elapsed_us: int) -> int:
    """Return the time for operators: that of the machine, or if it went back, the time of the epoch before and what has passed since.

    `before_us`: the time of the epoch before. `elapsed_us`: what has passed since then by the monotonic clock, or since this process
    started. So timers keep their spans although the machine's clock was set back.
    """
    return max(wall_us, before_us + max(elapsed_us, 0))


def ahead_limit_us(wall_us: int, *, clock_us: int, watermark_us: int, max_ahead_us: int) -> int:
    """Return above which time rows are too far ahead to be believed (rule 7).

    The machine's clock counts as it is now, so that one jump forward does not raise the limit for good. Only if the watermark of the
    source is more than `max_ahead_us` ahead of it, rows of every partition show that it is wrong: then the pipeline's clock
    (`pipeline_clock_us`) counts.
    """
    is_wrong = watermark_us > wall_us + max_ahead_us
    return min((clock_us if is_wrong else wall_us) + max_ahead_us, TIME_MAX_US)
