"""A node as the hub sees it: it commits epochs through the client."""

from __future__ import annotations

from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch

from fordstone.epochs.run_file import encode_run
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Commit, EpochEntry, LeaseRequest, StreamSegment


class Node:
    """One node of the pipeline of these tests."""

    def __init__(self, client: HubClient, name: str) -> None:
        self._client = client
        self._name = name
        self._lease = client.lease(PIPELINE, name, LeaseRequest(holder=f"holder-{name}", local=1, start="s"))
        self._epoch = self._lease.head

    def commit(self, *epochs: Epoch) -> int:
        """Commit epochs together; gives the last one's number."""
        entries = []
        for epoch in epochs:
            refs = []
            for frame in epoch.runs:
                ref, data = encode_run(frame, "lz4")
                self._client.put_blob(ref.digest, bytes(data))
                refs.append(ref)
            self._epoch += 1
            segment = StreamSegment(runs=tuple(refs), watermark_us=epoch.watermark_us)
            entries.append(EpochEntry(epoch=self._epoch, streams={STREAM: segment}, created_us=0, ended=epoch.ended))
        self._client.commit(PIPELINE, self._name, Commit(generation=self._lease.generation, epochs=tuple(entries)))
        return self._epoch
