"""Room on the hub's disks, a part of which is kept back so that a full hub can still let go.

To note what consumers have passed and to remove what nobody needs, the log must be written. If blobs and epochs could take the
last byte, nothing would ever become free again. So blobs are refused first, then epochs; all else may go on to the end.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from fordstone.hub.refused import Refused

KEPT_BYTES_MAX: Final = 256 << 20
"""So much is kept back from blobs,"""
KEPT_SHARE: Final = 8
"""but no more than one part in so many of a small disk."""
EPOCHS_SHARE: Final = 4
"""Epochs may take all but one part in so many of that."""
LOOK_EVERY_S: Final = 0.25


class Usage(Protocol):
    """What `shutil.disk_usage` tells."""

    @property
    def total(self) -> int:
        """Bytes."""
        ...

    @property
    def free(self) -> int:
        """Bytes."""
        ...


class Room:
    """Asked on the event loop for each blob and commit; looks at the disks a few times a second at most."""

    def __init__(
        self,
        places: Sequence[Path],
        *,
        usage: Callable[[Path], Usage] = shutil.disk_usage,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`places`: a directory on each disk."""
        self._places = tuple(places)
        self._usage = usage
        self._clock_s = clock_s
        self._looked_s = float("-inf")
        self._share = 1.0

    def for_blob(self) -> None:
        """Refuse if what is left is kept back from blobs."""
        self._check(1.0)

    def for_epochs(self) -> None:
        """Refuse if what is left is kept back from epochs, too."""
        self._check(1.0 / EPOCHS_SHARE)

    def _check(self, share: float) -> None:
        now_s = self._clock_s()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s, self._share = now_s, min(map(self._left, self._places), default=float("inf"))
        if self._share < share:
            raise Refused(
                "storage",
                "the hub's disk is nearly full: what is left is kept for letting go of what has been read. Make room, or let consumers "
                "read on. Nothing was kept; try again later.",
            )

    def _left(self, place: Path) -> float:
        """How much is free, in parts of what is kept back from blobs."""
        try:
            usage = self._usage(place)
        except OSError:
            # Nobody knows; whoever writes there will.
            return float("inf")
        return usage.free / max(1, min(KEPT_BYTES_MAX, usage.total // KEPT_SHARE))
