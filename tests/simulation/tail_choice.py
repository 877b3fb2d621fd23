"""Which tail a seed gives a random pipeline."""

from __future__ import annotations

from random import Random
from typing import Final

from tests.simulation.failing_tails import FailingProcessTail, FunctionTail
from tests.simulation.join_tails import JoinTail, LatestTail
from tests.simulation.keyed_tails import MatchTail, ProcessTail
from tests.simulation.query_tails import DistinctTail, OverTail, RunningTail, TopTail
from tests.simulation.tails import Tail
from tests.simulation.window_tails import CountTail, ForgettingTail, SessionTail, SlidingTail

from fordstone.plan.plan import Mode

KINDS: Final[tuple[str, ...]] = (
    "sliding", "early", "session", "count", "join", "match", "process",
    "top", "over", "distinct", "running", "forgetting", "failing", "failing_process",
    "latest",
)  # fmt: skip


def draw_tail(rng: Random, mode: Mode) -> Tail | None:
    """A tail, or none. A lookup in a control stream is refused where barriers overtake rows."""
    if rng.random() < 0.2:
        return None
    match rng.choice(KINDS if mode != "unaligned" else KINDS[:-1]):
        case "sliding" | "early" as kind:
            size, every, offset = rng.choice(((6, 2, 0), (10, 5, 1), (5, 3, 0), (2, 7, 3), (4, 4, 0), (12, 4, 0)))
            early_us = rng.choice((1_000, 8_000)) if kind == "early" else None
            allowed = rng.choice((0, 0, 3, 20))
            return SlidingTail(early_us=early_us, allowed=allowed, size=size, every=every, offset=offset)
        case "session":
            return SessionTail(early_us=None, allowed=0, gap=rng.choice((1, 3, 8)))
        case "count":
            size, slide = rng.choice(((1, 1), (3, 3), (4, 1), (3, 2), (2, 5)))
            return CountTail(early_us=None, allowed=0, size=size, every=slide)
        case "join":
            least, most = rng.choice(((-2, 2), (0, 3), (-4, -1), (1, 1), (0, 0)))
            return JoinTail(how=rng.choice(("inner", "left", "right", "full")), least=least, most=most)
        case "match":
            return MatchTail(kind=rng.choice(("strict", "relaxed", "absent")), skip=rng.choice(("past_last", "next")))
        case "process":
            return ProcessTail(by_clock=rng.random() < 0.3)
        case "top":
            return _top(rng)
        case "over":
            rows, span = rng.choice(((1, None), (3, None), (None, 2), (None, 9), (None, None)))
            return OverTail(rows=rows, span=span)
        case "distinct":
            return DistinctTail(timed=rng.random() < 0.6)
        case "running":
            return RunningTail()
        case "forgetting":
            return ForgettingTail(ttl=rng.choice((1, 3, 8)))
        case "failing":
            return FunctionTail(rng.choice(("map", "flat_map", "map_batches")))
        case "failing_process":
            return FailingProcessTail()
        case _:
            return LatestTail(waits=rng.random() < 0.7)


def _top(rng: Random) -> TopTail:
    n = rng.choice((1, 2, 3))
    if rng.random() < 0.5:
        return TopTail(rng.choice(("rows", "counts")), n)
    return TopTail("windows", rng.choice((n, None)), rng.choice(("row_number", "rank", "dense_rank")))
