"""A node whose clock, and whose rows, are a year ahead: it closes nobody else's windows, and the hub and the center say how it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tests.faults.oracle import EPOCH
from tests.faults.two_tier import Fleet, Part

YEAR_S, HOUR_US = 365 * 86_400, 3_600_000_000
SLACK_US = 120_000_000
"""A test takes its time."""
SILENT_EPOCHS = 5


def test_a_clock_a_year_ahead_closes_nobody_elses_windows(tmp_path: Path, faults: Callable[..., None]) -> None:
    now_s = int((datetime.now(UTC) - EPOCH).total_seconds())
    begins = {"north": now_s - 600, "future": now_s - 600 + YEAR_S}
    with Fleet(tmp_path, "north", "future", seed=51, ahead_s=begins) as fleet:
        fleet.hub()
        north, future = fleet.feeds["north"], fleet.feeds["future"]
        for feed in fleet.feeds.values():
            feed.write(90)
        nodes = {"north": fleet.node("north"), "future": fleet.node("future", ahead_s=YEAR_S)}
        for node, part in nodes.items():
            part.until(lambda node=node: fleet.head(node) > 0, "epoch at the hub")  # type: ignore[misc]
        center = fleet.center()
        fleet.feed_until(center, lambda: bool(fleet.limits()), "window of north that closes")
        # Now only the one that is a year ahead goes on.
        nodes["north"].stop()
        stood = watermark_us(center)
        for _ in range(SILENT_EPOCHS):
            before = fleet.head("future")
            future.write(30)
            nodes["future"].until(lambda before=before: fleet.head("future") > before, "another epoch")  # type: ignore[misc]
        read = rows_in(center)
        future.write(30)
        center.until(lambda: rows_in(center) > read, "more rows at the center")
        assert watermark_us(center) < now_us() - 60_000_000, "the clock of one node has closed windows of the other"
        assert watermark_us(center) >= stood
        # The rows that the other one had yet to send for windows that were open count in them.
        missed = fleet.head("north")
        north.write(60)
        nodes["north"] = fleet.node("north")
        nodes["north"].until(lambda: fleet.head("north") > missed, "what was missing")
        for part in nodes.values():
            assert part.stop().report["outcome"] == "stopped"
        faults(clocks_ahead=1)
        # When the other one has come to its end, time is what the hub says, and no year ahead.
        ended = fleet.node("north", live=False).ended()
        assert ended.report["progress"]["outbox_epochs"] == 0
        center.until(lambda: watermark_us(center) > now_us() - HOUR_US // 2, "time that goes on")
        assert watermark_us(center) <= now_us() + HOUR_US + SLACK_US
        assert center.stop().report["outcome"] == "stopped"
        fleet.finish(ahead_s=YEAR_S)


def watermark_us(center: Part) -> int:
    return max((line.get("watermark_us") or 0 for line in center.lines()), default=0)


def rows_in(center: Part) -> int:
    return max((line.get("rows_in") or 0 for line in center.lines()), default=0)


def now_us() -> int:
    return time.time_ns() // 1_000
