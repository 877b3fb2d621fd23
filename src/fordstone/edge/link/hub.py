"""What ties one run to the hub: who it is there, the outbox, the sender, and the checkpoints to recover from."""

from __future__ import annotations

import secrets
from typing import Protocol

import msgspec

from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Environment
from fordstone.edge.engine.recovery import Remote
from fordstone.edge.link.checkpoints import CheckpointHub, hub_checkpoints
from fordstone.edge.link.outbox import Outbox
from fordstone.edge.link.owner import next_owner
from fordstone.edge.link.sender import Hub, Sender
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import ConfigError
from fordstone.plan import plan as p
from fordstone.runtime.progress import Progress


class NodeHub(Hub, CheckpointHub, Protocol):
    """All that a node asks of the hub about its epochs: `hub.client.HubClient`, or what stands in for it."""


class HubLink:
    """Made once a start, when the state directory is locked. Asks the hub nothing yet: a node starts without it, too."""

    def __init__(
        self, hub: NodeHub, plan: p.Plan, config: RunConfig, environment: Environment, store: CheckpointStore
    ) -> None:
        drops = config.outbox_full == "drop_oldest"
        if drops and plan.guarantee != "at_most_once":
            raise ConfigError(
                f"pipeline {plan.pipeline} promises {plan.guarantee}, so its outbox may drop nothing. Leave outbox_full at 'block', or "
                "declare the pipeline with guarantee='at_most_once'."
            )
        directory = f"{store.pipeline}/{store.node}"
        owner = next_owner(environment.disk, directory)
        self.outbox = Outbox(
            environment.disk,
            directory,
            bytes_max=config.outbox_bytes_max,
            drops=drops,
            fresh=owner.incarnation == 1,
            failpoints=environment.failpoints,
        )
        self.sender = Sender(
            hub=hub,
            outbox=self.outbox,
            store=store,
            owner=owner,
            clock=environment.clock,
            choose=environment.choose or secrets.randbelow,
            take_over=config.take_over,
            hub_state=config.hub_state,
            failpoints=environment.failpoints,
        )
        self.remote: Remote | None = None
        if config.hub_state or config.take_over:
            self.remote = hub_checkpoints(hub, store, owner, take_over=config.take_over)

    def acknowledged(self) -> int | None:
        """The newest epoch that the hub has, for retention."""
        return self.outbox.sent or None

    def progress(self, told: Progress) -> Progress:
        """How the run stands, and how it stands with the hub."""
        return msgspec.structs.replace(
            told,
            outbox_epochs=self.outbox.epochs,
            outbox_bytes=self.outbox.size_bytes,
            sent_epoch=self.outbox.sent,
            sent_bytes=self.sender.sent_bytes,
            hub_problem=self.sender.problem,
        )
