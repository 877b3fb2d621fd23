"""What becomes of a batch that is published to a control table."""

from __future__ import annotations

from typing import Any

import pytest

from fordstone.protocol.publication import (
    Add,
    AlreadyPublished,
    LaterBatches,
    OtherRows,
    PublishDecision,
    PublishFacts,
    Superseded,
    decide_publish,
)

FACTS: dict[str, Any] = {
    "leader": 3,
    "generation": 3,
    "newest": 7,
    "starts": ("s1", "s2"),
    "start": "s2",
    "batch": 8,
    "same": None,
    "resumes_after": None,
    "discard": False,
}
SEALED: dict[str, Any] = {"resumes_after": 5}
TABLE: dict[str, tuple[dict[str, Any], PublishDecision]] = {
    "the first owner": ({"leader": 0, "generation": None, "newest": 0, "starts": ()}, Add(generation=1)),
    "another owner": ({"generation": None, "newest": 0, "starts": (), "batch": 1}, Add(generation=4)),
    "an owner that was followed": ({"generation": 2}, Superseded(by_copy=False)),
    "a new batch": ({}, Add(generation=3)),
    "a new batch of a new start": ({"start": "s3"}, Add(generation=3)),
    "a former start": ({"start": "s1"}, Superseded(by_copy=True)),
    "a former start repeats": ({"start": "s1", "batch": 7, "same": True}, Superseded(by_copy=True)),
    "no start is known": ({"start": ""}, Add(generation=3)),
    # A publisher that seals nothing.
    "the newest batch again": ({"batch": 7, "same": True}, AlreadyPublished(newest=7)),
    "the newest batch planned again with other rows": ({"batch": 7, "same": False}, Add(generation=3)),
    "an older batch again": ({"batch": 4, "same": True}, AlreadyPublished(newest=7)),
    "an older batch with other rows": ({"batch": 4, "same": False}, OtherRows(newest=7)),
    "an older batch that is no longer kept": ({"batch": 4}, OtherRows(newest=7)),
    # A publisher that seals its batches.
    "sealed: released again": ({**SEALED, "batch": 4}, AlreadyPublished(newest=7)),
    "sealed: this start has published since": ({**SEALED, "batch": 7}, AlreadyPublished(newest=7)),
    "sealed: from older state": ({**SEALED, "start": "s3", "batch": 6}, LaterBatches(newest=7)),
    "sealed: from older state, and releases first": ({**SEALED, "start": "s3", "batch": 5}, LaterBatches(newest=7)),
    "sealed: from state with all of it": ({"resumes_after": 7, "start": "s3"}, Add(generation=3)),
    "sealed: from state with more": ({"resumes_after": 9, "start": "s3"}, Add(generation=3)),
    "sealed: from older state on purpose": ({**SEALED, "start": "s3", "batch": 6, "discard": True}, Add(generation=3)),
    "sealed: from older state on purpose, and releases first": (
        {**SEALED, "start": "s3", "batch": 5, "discard": True},
        AlreadyPublished(newest=5),
    ),
}


@pytest.mark.parametrize(("changed", "decision"), TABLE.values(), ids=TABLE.keys())
def test_the_facts_decide(changed: dict[str, Any], decision: PublishDecision) -> None:
    assert decide_publish(PublishFacts(**(FACTS | changed))) == decision
