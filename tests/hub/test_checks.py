"""The bounds of a body that its types do not give."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import pytest
import urllib3
from tests.hub.sending import Node, commit_of

from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import (
    EPOCHS_PER_COMMIT_MAX,
    NAMES_MAX,
    RUNS_PER_COMMIT_MAX,
    RUNS_PER_SEGMENT_MAX,
    Checkpoint,
    Commit,
    EpochEntry,
    Refusal,
    Rejection,
    StreamSegment,
)
from fordstone.hub.server.handlers import (
    MEMBERS_PER_COMMIT_MAX,
    OBJECTS_PER_COMMIT_MAX,
    SEGMENTS_PER_COMMIT_MAX,
    check_commit,
    check_parts,
)
from fordstone.protocol.delivery import COMMIT_RUNS_MAX
from fordstone.state.base import RunRef


def commit_with(segments: int) -> Commit:
    """A commit that names no run at all."""
    empty = StreamSegment(runs=())
    names = [f"s{number}" for number in range(NAMES_MAX)]
    entries: list[EpochEntry] = []
    while segments:
        taken = min(segments, NAMES_MAX)
        streams = dict.fromkeys(names[:taken], empty)
        entries.append(EpochEntry(epoch=len(entries) + 1, streams=streams, created_us=0))
        segments -= taken
    return commit_of(*entries)


def test_segments_without_rows_are_bounded_too_since_each_keeps_the_only_writer_busy():
    most = commit_with(SEGMENTS_PER_COMMIT_MAX)
    check_commit(most, 1, len(most.epochs))
    beyond = commit_with(SEGMENTS_PER_COMMIT_MAX + 1)
    with pytest.raises(Rejection, match="segments") as raised:
        check_commit(beyond, 1, len(beyond.epochs))
    assert raised.value.refusal.error == "bad_request"


def test_one_run_cannot_be_named_any_number_of_times_in_an_epoch():
    run = RunRef("0" * 64, 1, 1)
    for runs, taken in ((RUNS_PER_SEGMENT_MAX, True), (RUNS_PER_SEGMENT_MAX + 1, False)):
        body = msgspec.json.encode(StreamSegment(runs=(run,) * runs))
        with nullcontext() if taken else pytest.raises(msgspec.ValidationError, match=f"<= {RUNS_PER_SEGMENT_MAX}"):
            msgspec.json.decode(body, type=StreamSegment)


def test_what_a_node_folds_into_one_commit_is_within_what_the_hub_takes():
    # A range ends with the epoch before the one that would be too much, but has at least one.
    assert max(COMMIT_RUNS_MAX, NAMES_MAX) <= SEGMENTS_PER_COMMIT_MAX


def test_a_commit_with_too_many_parts_is_rejected_before_they_are_decoded(hub):
    node = Node(HubClient(hub))
    node.lease()
    part = b'{"runs":[]},'
    body = b'{"epochs":[' + part * OBJECTS_PER_COMMIT_MAX + b"no JSON"
    url = f"{hub.url}/v1/pipelines/p/nodes/n/epochs/1-1"
    refusal = msgspec.json.decode(urllib3.request("POST", url, body=body, retries=False).data, type=Refusal)
    assert (refusal.error, str(OBJECTS_PER_COMMIT_MAX) in refusal.message) == ("bad_request", True)


def test_a_commit_with_too_many_names_is_rejected_before_they_are_decoded(hub):
    """The names of one body of 16 MiB take the hub's processor for 1.5 s, in which nobody else gets a response."""
    node = Node(HubClient(hub))
    node.lease()
    body = b'{"epochs":[{"controls":{' + b'"c":1,' * MEMBERS_PER_COMMIT_MAX + b"no JSON"
    url = f"{hub.url}/v1/pipelines/p/nodes/n/epochs/1-1"
    refusal = msgspec.json.decode(urllib3.request("POST", url, body=body, retries=False).data, type=Refusal)
    assert (refusal.error, str(MEMBERS_PER_COMMIT_MAX) in refusal.message) == ("too_large", True), (
        "nodes send fewer epochs"
    )


def test_an_epoch_that_uses_all_names_is_decoded():
    segment = StreamSegment(runs=(RunRef("0" * 64, 1, 1),) * (RUNS_PER_COMMIT_MAX // NAMES_MAX))
    names = [f"n{number}" for number in range(NAMES_MAX)]
    one = EpochEntry(epoch=1, streams=dict.fromkeys(names, segment), created_us=0, controls=dict.fromkeys(names, 1))
    check_parts(msgspec.json.encode(commit_of(one)))


def test_the_largest_commit_has_no_more_parts_than_are_decoded():
    segment, run = StreamSegment(runs=()), RunRef("0" * 64, 1, 1)
    streams = {f"s{number}": segment for number in range(SEGMENTS_PER_COMMIT_MAX // EPOCHS_PER_COMMIT_MAX)}
    entries = [
        EpochEntry(epoch=epoch, streams=streams, created_us=0, controls={"c": 1})
        for epoch in range(1, EPOCHS_PER_COMMIT_MAX + 1)
    ]
    state = Checkpoint(epoch=EPOCHS_PER_COMMIT_MAX, manifest=run, state=(run,) * (RUNS_PER_COMMIT_MAX - 1))
    most = commit_of(*entries, checkpoint=state)
    check_commit(most, 1, EPOCHS_PER_COMMIT_MAX)
    check_parts(msgspec.json.encode(most))
