"""A hub for the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub.running import running_hub
from tests.hub.sending import Node

from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubAddress]:
    with running_hub(tmp_path / "hub") as address:
        yield address


@pytest.fixture
def client(hub: HubAddress) -> Iterator[HubClient]:
    with contextlib.closing(HubClient(hub)) as client:
        yield client


@pytest.fixture
def node(client: HubClient) -> Node:
    """Has the lease, and no epochs yet."""
    node = Node(client)
    node.lease()
    return node
