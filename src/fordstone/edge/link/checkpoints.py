"""Recover from checkpoints at the hub, on a machine whose state directory is missing or damaged.

The hub has the newest checkpoint that a node sent with a commit. It does not have the cuts of other epochs, so a node can
only resume exactly where its rows end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fordstone.edge.engine.recovery import Remote
from fordstone.edge.link.owner import Owner
from fordstone.epochs.manifest import decode_manifest
from fordstone.epochs.store import CheckpointStore, Survey
from fordstone.errors import CheckpointError, HubError, StorageError
from fordstone.hub.messages import Checkpoint, LeaseRequest
from fordstone.protocol.recovery import CheckpointFact

if TYPE_CHECKING:  # a node without a hub loads no HTTP client
    from fordstone.hub.client.client import HubClient

_NOTHING = Survey(checkpoints=(), cuts=frozenset())


def hub_checkpoints(hub: HubClient, store: CheckpointStore, owner: Owner, *, take_over: bool) -> Remote:
    """Return the hub's checkpoints for recovery.

    A whole state directory never waits for the hub. The hub is asked only if a checkpoint here is damaged, or if there is
    none and `take_over` is set. In that case the former holder is fenced first, so that it adds no epochs.
    """

    def survey() -> Survey:
        here = store.survey().checkpoints
        damaged = any(fact.problem is not None for fact in here)
        if not damaged and (here or not take_over):
            return _NOTHING
        try:
            if not here:
                # Checked before the former holder is fenced: if it cannot be taken over from, it should go on.
                _check_head(
                    store, hub.head(store.pipeline, store.node).epoch, hub.checkpoint(store.pipeline, store.node)
                )
            head = _fence_others(hub, store, owner) if not here else 0
            found = hub.checkpoint(store.pipeline, store.node)
        except HubError as error:
            # It does not respond, or rejects the request: local checkpoints may be enough.
            raise StorageError(f"{error} Without the hub, its checkpoint cannot be taken over.") from error
        if not here:
            _check_head(store, head, found)
        if found is None:
            return _NOTHING
        return Survey(checkpoints=(CheckpointFact(epoch=found.epoch, where="remote"),), cuts=frozenset({found.epoch}))

    def fetch(epoch: int) -> None:
        found = hub.checkpoint(store.pipeline, store.node)
        if found is None or found.epoch != epoch:
            raise CheckpointError(
                f"the hub had a checkpoint of epoch {epoch} of pipeline {store.pipeline} on node {store.node}, and now it has "
                f"{'none' if found is None else f'that of epoch {found.epoch}'}: another process commits there. Start again."
            )
        data = hub.read_blob(found.manifest)
        manifest = decode_manifest(data, pipeline=store.pipeline, node=store.node, epoch=epoch)
        for run in dict.fromkeys(manifest.runs()):
            if store.run_fault(run, deep=True) is not None:
                store.put_run(run, hub.read_blob(run))
        store.commit(manifest, rebuilt=True)

    return Remote(survey=survey, fetch=fetch, fetch_cuts=lambda: None)


def _fence_others(hub: HubClient, store: CheckpointStore, owner: Owner) -> int:
    """Take the lease over. Return the newest epoch that the hub has, to which no other process can add any more."""
    request = LeaseRequest(holder=owner.holder, local=owner.incarnation, take_over=True)
    return hub.lease(store.pipeline, store.node, request).head


def _check_head(store: CheckpointStore, head: int, found: Checkpoint | None) -> None:
    if not head:
        return
    if found is None:
        raise CheckpointError(
            f"the hub has pipeline {store.pipeline} of node {store.node} up to epoch {head}, but no checkpoint of it: that node sends "
            "none (--no-hub-state). Restore its state directory, or start from the beginning under another node's name."
        )
    # It may be newer: the former holder, not fenced yet, may have committed between the two calls.
    if found.epoch < head:
        raise CheckpointError(
            f"the hub has pipeline {store.pipeline} of node {store.node} up to epoch {head}, but its newest checkpoint is of epoch "
            f"{found.epoch}: that node was lost while it caught up, and the epochs between cannot be recomputed exactly. Restore "
            "its state directory, or start from the beginning under another node's name."
        )
