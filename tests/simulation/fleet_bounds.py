"""Bounds that a short run never reaches, made small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from fordstone.connectors import control as control_connector
from fordstone.edge.link import sender as sending
from fordstone.hub.client import publisher
from fordstone.hub.store import retention


@contextmanager
def small_bounds() -> Iterator[None]:
    """Make bounds small that are not reached otherwise."""
    with (
        patch.object(sending, "EPOCHS_PER_COMMIT_MAX", 3),
        patch.object(sending, "ASK_ABOVE_BLOBS", 0),
        patch.object(control_connector, "COMPACT_FILES_MIN", 3),
        patch.object(publisher, "SNAPSHOT_EVERY", 3),
        patch.object(retention, "ENTRIES_KEPT", 3),
        patch.object(retention, "PIECE", 2),
    ):
        yield
