"""A hub for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub.running import running_hub

from fordstone.hub.client.address import HubAddress


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubAddress]:
    with running_hub(tmp_path / "hub") as address:
        yield address
