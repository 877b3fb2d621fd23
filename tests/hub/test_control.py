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


def publish(client: HubClient, batch: int, text: str, *, owner: str = "o", **more: Any) -> Any:
    return client.publish("p", "c", ControlPublish(owner=owner, batch=batch, blob=run(text), **more))


def refusal(client: HubClient, *given: Any, **more: Any) -> tuple[str | None, str]:
    with pytest.raises(HubRefusedError) as raised:
        publish(client, *given, **more)
    return raised.value.code, str(raised.value)


def versions(client: HubClient, after: int = 0) -> list[int]:
    return [version.version for version in client.control_page("p", "c", after=after).versions]


def test_versions_are_numbered_without_gaps_whatever_the_batches(client: HubClient) -> None:
    assert [publish(client, batch, f"v{n}").version for n, batch in enumerate((3, 4, 9), start=1)] == [1, 2, 3]
    assert versions(client) == [1, 2, 3]
    assert versions(client, after=2) == [3]
    assert client.control_page("p", "c", after=3).newest == 3


def test_a_batch_published_again_is_the_same_version(client: HubClient) -> None:
    first = publish(client, 1, "v1")
    publish(client, 2, "v2")
    assert publish(client, 1, "v1") == first
    assert client.control_page("p", "c").newest == 2


def test_a_batch_that_was_changes_and_is_sent_again_as_a_snapshot_is_the_same_version(client: HubClient) -> None:
    first = publish(client, 1, "v1")
    assert publish(client, 1, "v2", snapshot=True, changes=run("v1").digest) == first
    assert client.control_page("p", "c").newest == 1


def test_the_newest_batch_with_other_rows_is_another_version_and_an_older_one_is_refused(client: HubClient) -> None:
    publish(client, 1, "v1")
    assert publish(client, 2, "v2").version == 2
    assert publish(client, 2, "v3").version == 3, "Spark has lost its plan of batch 2, and has planned it again"
    assert publish(client, 2, "v3").version == 3
    code, why = refusal(client, 1, "v4")
    assert code == "other_content"
    assert "batches up to 2 followed" in why
    assert client.control_page("p", "c").newest == 3


def test_a_publisher_from_an_older_copy_of_its_state_is_refused_before_anything_is_lost(client: HubClient) -> None:
    publish(client, 1, "v1", start="s1", resumes_after=0)
    publish(client, 2, "v2", start="s1", resumes_after=0)
    code, why = refusal(client, 2, "v3", start="s2", resumes_after=1)
    assert code == "other_content"
    assert "published up to epoch 2, and was started from state that ends with epoch 1" in why
    assert publish(client, 2, "v3", start="s3", resumes_after=1, discard_later=True).version == 3
    assert publish(client, 3, "v4", start="s3", resumes_after=1, discard_later=True).version == 4
    assert publish(client, 3, "v4", start="s4", resumes_after=3).version == 4


def test_a_publisher_that_releases_again_before_it_publishes_other_rows_may_discard_too(client: HubClient) -> None:
    for batch in (1, 2, 3):
        publish(client, batch, f"v{batch}", start="s1", resumes_after=0)
    assert publish(client, 1, "v1", start="s2", resumes_after=1, discard_later=True).version == 1
    assert publish(client, 2, "v4", start="s2", resumes_after=1).version == 4
    assert publish(client, 3, "v5", start="s2", resumes_after=1).version == 5


def test_of_two_starts_of_one_publisher_the_former_is_fenced(client: HubClient) -> None:
    publish(client, 1, "v1", start="s1")
    publish(client, 2, "v2", start="copy")
    for batch in (2, 3):
        code, why = refusal(client, batch, "v3", start="s1")
        assert code == "stale_generation"
        assert "a copy of it" in why
    assert publish(client, 3, "v3", start="copy").version == 3


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
    with pytest.raises(HubRefusedError, match="fordstone hub restore") as raised:
        client.control_page("p", "c", after=2, wait_s=5)
    assert (raised.value.status, raised.value.code) == (410, "gone")


def test_a_reader_with_other_versions_is_given_the_whole_table_with_the_reason(client: HubClient) -> None:
    made = [publish(client, number, f"v{number}") for number in (1, 2, 3)]
    assert client.control_page("p", "c", after=2, chain=made[1].chain).versions == (made[2],)
    page = client.control_page("p", "c", after=2, chain="0" * 64, wait_s=5)
    assert page.versions == tuple(made)
    assert "other versions up to 2" in page.restart
    with pytest.raises(HubRefusedError, match="not one of its versions"):
        client.control_page("p", "c", after=3, chain="0" * 64)
