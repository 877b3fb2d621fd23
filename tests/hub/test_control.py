from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.hub.sending import Node, run

from fordstone.errors import HubRefusedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ControlPublish


@pytest.fixture
def client(hub: HubAddress) -> HubClient:
    client = HubClient(hub)
    Node(client).put(*(f"v{number}" for number in range(1, 6)))
    return client


def publish(client: HubClient, batch: int, text: str, *, owner: str = "o", snapshot: bool = False) -> Any:
    return client.publish("p", "c", ControlPublish(owner=owner, batch=batch, blob=run(text), snapshot=snapshot))


def versions(client: HubClient, after: int = 0) -> list[int]:
    return [version.version for version in client.control_page("p", "c", after=after).versions]


def test_versions_are_numbered_without_gaps_whatever_the_batches(client: HubClient) -> None:
    assert [publish(client, batch, f"v{n}").version for n, batch in enumerate((3, 4, 9), start=1)] == [1, 2, 3]
    assert versions(client) == [1, 2, 3]
    assert versions(client, after=2) == [3]
    assert client.control_page("p", "c", after=3).newest == 3


def test_a_batch_published_again_is_the_same_version_and_the_first_content_counts(client: HubClient) -> None:
    first = publish(client, 1, "v1")
    publish(client, 2, "v2")
    assert publish(client, 1, "v3") == first
    assert client.control_page("p", "c").newest == 2


def test_an_owner_that_another_has_followed_is_shut_out(client: HubClient) -> None:
    publish(client, 5, "v1", owner="old")
    assert publish(client, 1, "v2", owner="new").version == 2, "a checkpoint made again does not go silent"
    for batch in (5, 6):
        with pytest.raises(HubRefusedError) as raised:
            publish(client, batch, "v3", owner="old")
        assert (raised.value.status, raised.value.code) == (412, "stale_generation")
    assert publish(client, 2, "v3", owner="new").version == 3


def test_the_blob_must_be_there_first(client: HubClient) -> None:
    with pytest.raises(HubRefusedError) as raised:
        publish(client, 1, "never put")
    assert (raised.value.status, raised.value.code) == (424, "missing_blobs")
    assert client.control_page("p", "c").newest == 0


def test_a_new_reader_begins_at_the_newest_snapshot_and_an_old_one_gets_every_change(client: HubClient) -> None:
    for number in range(1, 6):
        publish(client, number, f"v{number}", snapshot=number in {2, 4})
    assert versions(client) == [4, 5]
    assert versions(client, after=1) == [2, 3, 4, 5]


def test_a_table_that_nobody_has_published_has_no_versions(client: HubClient) -> None:
    page = client.control_page("p", "other")
    assert (page.versions, page.newest) == ((), 0)


def test_tables_of_the_same_name_in_two_pipelines_are_two(client: HubClient, tmp_path: Path) -> None:
    publish(client, 1, "v1")
    assert client.control_page("q", "c").newest == 0


def test_a_reader_beyond_the_newest_version_is_refused_because_the_hub_was_set_back(client: HubClient) -> None:
    publish(client, 1, "v1")
    with pytest.raises(HubRefusedError) as raised:
        client.control_page("p", "c", after=2, wait_s=5)
    assert (raised.value.status, raised.value.code) == (410, "gone")
