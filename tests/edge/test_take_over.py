"""A take-over from a node that still commits: it may do so between any two looks at the hub."""

from __future__ import annotations

from fordstone.edge.link.links import hub_checkpoints
from fordstone.edge.link.owner import Ownership
from fordstone.epochs.store import CheckpointStore
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Checkpoint, Generation, Head, Lease, LeaseRequest
from fordstone.state.base import RunRef
from fordstone.testing.memory_disk import MemoryDisk


class Busy(HubClient):
    """A hub to which somebody commits an epoch after every answer, until shut out."""

    def __init__(self) -> None:
        self.epoch = 19
        self.shut_out = False

    def head(self, pipeline: str, node: str) -> Head:
        return Head(epoch=self._then_one_more(), chain="c", log_id="log")

    def checkpoint(self, pipeline: str, node: str) -> Checkpoint | None:
        run = RunRef(digest="0" * 64, size_bytes=1, rows=0)
        return Checkpoint(epoch=self._then_one_more(), manifest=run, state=())

    def lease(self, pipeline: str, node: str, request: LeaseRequest) -> Lease:
        self.shut_out = request.take_over
        return Lease(generation=Generation(hub=2, local=1), head=self.epoch, chain="c", log_id="log")

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        raise AssertionError("nothing is fetched before it is asked for")

    def _then_one_more(self) -> int:
        self.epoch += not self.shut_out
        return self.epoch - (not self.shut_out)


def test_a_commit_between_two_looks_at_the_hub_does_not_stop_a_take_over() -> None:
    hub = Busy()
    disk = MemoryDisk()
    store = CheckpointStore(disk, pipeline="fleet", node="north")
    ownership = Ownership(disk, "fleet/north")
    remote = hub_checkpoints(hub, store, ownership, take_over=True)
    assert [fact.epoch for fact in remote.survey().checkpoints] == [hub.epoch]
    assert hub.shut_out
    assert ownership.owner.fence == (2, 1)
