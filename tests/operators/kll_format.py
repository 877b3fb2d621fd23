"""Our quantile sketches as Apache DataSketches writes them: to compare both, and to let Spark read ours."""

from __future__ import annotations

import struct

import numpy as np

from fordstone.operators.aggregate.sketches import LEVEL_ROOM_MIN, Doubles, Levels, level_room


def kll_bytes(items: Doubles, levels: Levels, k: int, *, least: float, greatest: float) -> bytes:
    """A sketch of at least one value as Apache DataSketches writes one of doubles."""
    count = int((np.int64(1) << levels.astype(np.int64)).sum())
    if count == 1:
        return struct.pack("<BBBBHBB", 2, 2, 15, 4, k, LEVEL_ROOM_MIN, 0) + items.astype("<f8").tobytes()
    highest = int(levels.max())
    by_level = [np.sort(items[levels == level]) for level in range(highest + 1)]
    room = sum(level_room(highest + 1, level, k) for level in range(highest + 1))
    starts = room - np.cumsum([len(held) for held in reversed(by_level)])[::-1]
    head = struct.pack("<BBBBHBBQHBB", 5, 1, 15, 0, k, LEVEL_ROOM_MIN, 0, count, k, highest + 1, 0)
    extremes = struct.pack("<dd", least, greatest)
    return head + starts.astype("<u4").tobytes() + extremes + np.concatenate(by_level).astype("<f8").tobytes()
