"""How a pipeline is run on the edge: what the command line's options and `Pipeline.run`'s arguments become."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from fordstone.edge.engine.channel import BYTES_MAX, ROWS_MAX
from fordstone.errors import ConfigError
from fordstone.hub.client.address import HubAddress
from fordstone.lang.duration import positive_us
from fordstone.plan.ids import KEY_GROUPS, checked_name
from fordstone.protocol.restart import RestartPolicy
from fordstone.runtime.outlet import WAITING_BYTES_MAX

AUTO: Final = "auto"
OUTBOX_BYTES_MAX: Final = 10 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Checked when it is made. Spans are text with a unit: "1s"."""

    state: str | Path = "state"
    """Where checkpoints are kept. Running again with the same directory goes on where the last run was."""
    node: str = "node"
    bounded: bool = False
    """Stop when everything that is there now has been read, instead of waiting for more."""
    parallelism: int = 1
    interval: str = "1s"
    """Between two checkpoints; "auto" chooses it from their cost and the failure rate."""
    failure_every: str = "1d"
    """For interval="auto": the mean time between failures."""
    recovery_goal: str | None = None
    """For interval="auto": within what time after a failure the pipeline should be where it was."""
    checkpoint_timeout: str = "10m"
    keep: int = 3
    compression: Literal["zstd", "lz4", "none"] = "lz4"
    remote: str | None = None
    """An fsspec URL to which checkpoints are copied in the background."""
    allow_new_state: bool = False
    """Go on although the plan's stateful steps changed; the state of those that no longer match is dropped."""
    batch_rows: int = 65_536
    channel_rows_max: int = ROWS_MAX
    channel_bytes_max: int = BYTES_MAX
    waiting_bytes_max: int = WAITING_BYTES_MAX
    """When so much output waits for a seal, an epoch ends early and nothing more is read until it is sealed."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    hub: HubAddress | None = None
    """Where sealed epochs are sent, with what they hold for the center."""
    outbox_bytes_max: int = OUTBOX_BYTES_MAX
    """How many bytes of rows may wait for the hub."""
    outbox_full: Literal["block", "drop_oldest"] = "block"
    """What happens then: nothing more is sealed, or the oldest rows are dropped (only with at_most_once)."""
    hub_state: bool = True
    """The hub gets the checkpoints too, so that another machine can take over."""
    take_over: bool = False
    """Shut out whoever else runs this pipeline under this node's name. Without any state here, go on from the hub's checkpoint."""

    def __post_init__(self) -> None:
        checked_name(self.node, "node")
        if not 1 <= self.parallelism <= KEY_GROUPS:
            raise ConfigError(f"parallelism={self.parallelism}: it is 1 to {KEY_GROUPS}, the number of key groups.")
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep}: at least one checkpoint is kept.")
        if self.batch_rows < 1:
            raise ConfigError(f"batch_rows={self.batch_rows}: a batch has at least one row.")
        if self.interval != AUTO:
            positive_us(self.interval, what="interval")
        positive_us(self.checkpoint_timeout, what="checkpoint_timeout")
        positive_us(self.failure_every, what="failure_every")
        if self.recovery_goal is not None:
            positive_us(self.recovery_goal, what="recovery_goal")
        if self.compression not in {"zstd", "lz4", "none"}:
            raise ConfigError(f"compression={self.compression!r}: it is 'zstd', 'lz4' or 'none'.")
        if self.outbox_bytes_max < 1:
            raise ConfigError(f"outbox_bytes_max={self.outbox_bytes_max}: the outbox needs room for at least one byte.")
        if self.outbox_full not in {"block", "drop_oldest"}:
            raise ConfigError(f"outbox_full={self.outbox_full!r}: it is 'block' or 'drop_oldest'.")
        if self.take_over and self.hub is None:
            raise ConfigError(
                "take_over needs a hub: it is the hub that shuts the other one out. Give its address (--hub)."
            )

    @property
    def interval_us(self) -> int | None:
        """None: to be chosen from measurements."""
        return None if self.interval == AUTO else positive_us(self.interval, what="interval")
