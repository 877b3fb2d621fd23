"""Checkpoints at the hub, as recovery sees them: for a machine without its state directory, or with a damaged one.

The hub has the newest checkpoint of a node that came with a commit. It does not have the cuts of other epochs, so it can only
be gone on from exactly where its rows end.
"""

from __future__ import annotations

from typing import Protocol

from fordstone.edge.engine.recovery import Remote
from fordstone.edge.link.owner import Owner
from fordstone.epochs.sealed import decode_manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.epochs.survey import Survey
from fordstone.errors import CheckpointError, HubError, StorageError
from fordstone.hub.messages import Checkpoint, Head, Lease, LeaseRequest
from fordstone.protocol.recovery import CheckpointFact
from fordstone.state.base import RunRef

_NOTHING = Survey(checkpoints=(), cuts=frozenset())


class CheckpointHub(Protocol):
    """What is asked of `hub.client.HubClient` here."""

    def lease(self, pipeline: str, node: str, request: LeaseRequest) -> Lease:
        """Take or renew the right to commit."""
        ...

    def head(self, pipeline: str, node: str) -> Head:
        """Where the node stands at the hub."""
        ...

    def checkpoint(self, pipeline: str, node: str) -> Checkpoint | None:
        """The newest checkpoint."""
        ...

    def read_blob(self, ref: RunRef, direct_url: str | None = None) -> bytes:
        """A blob, checked."""
        ...


def hub_checkpoints(hub: CheckpointHub, store: CheckpointStore, owner: Owner, *, take_over: bool) -> Remote:
    """What recovery needs to know of the hub.

    A whole state directory never waits for the hub: it is asked only when something here is damaged, or when nothing is
    here and `take_over` was said. Then whoever held the lease is shut out first, so that nothing is added behind our back.
    """

    def survey() -> Survey:
        here = store.survey().checkpoints
        damaged = any(fact.problem is not None for fact in here)
        if not damaged and (here or not take_over):
            return _NOTHING
        try:
            if not here:
                # Before anybody is shut out: who cannot be taken over from should go on.
                _check_head(
                    store, hub.head(store.pipeline, store.node).epoch, hub.checkpoint(store.pipeline, store.node)
                )
            head = _shut_out(hub, store, owner) if not here else 0
            found = hub.checkpoint(store.pipeline, store.node)
        except HubError as error:
            # Away, or it says no: what is here may do without it.
            raise StorageError(f"{error} Without it, what is there cannot be taken over.") from error
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
                f"{'none' if found is None else f'that of epoch {found.epoch}'}: somebody else commits there. Start again."
            )
        data = hub.read_blob(found.manifest)
        manifest = decode_manifest(data, pipeline=store.pipeline, node=store.node, epoch=epoch)
        for run in dict.fromkeys(manifest.runs()):
            if store.run_fault(run, deep=True) is not None:
                store.put_run(run, hub.read_blob(run))
        store.add_cuts([manifest.cut])
        store.commit(manifest, rebuilt=True)

    return Remote(survey=survey, fetch=fetch)


def _shut_out(hub: CheckpointHub, store: CheckpointStore, owner: Owner) -> int:
    """Take the lease over; gives the newest epoch that the hub has, which nobody else can add to any more."""
    request = LeaseRequest(holder=owner.holder, local=owner.incarnation, take_over=True)
    return hub.lease(store.pipeline, store.node, request).head


def _check_head(store: CheckpointStore, head: int, found: Checkpoint | None) -> None:
    if not head:
        return
    if found is None:
        raise CheckpointError(
            f"the hub has pipeline {store.pipeline} of node {store.node} up to epoch {head}, but no checkpoint of it: that node sends "
            "none (--no-hub-state). Bring back its state directory, or begin anew under another node's name."
        )
    # A newer one: whoever is not shut out yet has committed between the two looks.
    if found.epoch < head:
        raise CheckpointError(
            f"the hub has pipeline {store.pipeline} of node {store.node} up to epoch {head}, but its newest checkpoint is of epoch "
            f"{found.epoch}: that node was lost while it caught up, and what came between cannot be computed again exactly. Bring "
            "back its state directory, or begin anew under another node's name."
        )
