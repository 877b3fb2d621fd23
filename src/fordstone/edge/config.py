"""The settings of a run on the edge, from options of the command line or arguments of `Pipeline.run`."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypedDict, get_args

from fordstone.edge.engine.channel import BYTES_MAX, ROWS_MAX
from fordstone.errors import ConfigError
from fordstone.hub.client.address import HubAddress
from fordstone.lang.choices import check_options, check_word
from fordstone.lang.duration import positive_us
from fordstone.plan.ids import KEY_GROUPS, checked_name
from fordstone.protocol.retry import RestartPolicy
from fordstone.runtime.chain import WAITING_BYTES_MAX

AUTO: Final = "auto"
OUTBOX_BYTES_MAX: Final = 10 << 30
CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
Compression = Literal["zstd", "lz4", "none"]
OutboxFull = Literal["block", "drop_oldest"]


class RunOptions(TypedDict, total=False):
    """The fields of `RunConfig`, as keyword arguments."""

    state: str | Path | None
    node: str
    bounded: bool
    available_now: bool
    fresh: bool
    parallelism: int
    interval: str
    failure_every: str
    recovery_goal: str | None
    checkpoint_timeout: str
    keep: int
    compression: Compression
    remote: str | None
    allow_new_state: bool
    discard_later_output: bool
    batch_rows: int
    channel_rows_max: int
    channel_bytes_max: int
    waiting_bytes_max: int
    state_bytes_max: int | None
    restart: RestartPolicy
    hub: HubAddress | None
    outbox_bytes_max: int
    outbox_full: OutboxFull
    hub_state: bool
    take_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Checked when it is created. Durations are text with a unit, such as "1s"."""

    state: str | Path | None = None
    """The directory of checkpoints. A run with the same directory resumes where the last one stopped. None: the run keeps
    nothing, reads nothing old, and cannot be resumed."""
    node: str = "node"
    bounded: bool = False
    """Stop when all input that exists now has been read, instead of waiting for more. Time ends: all windows close."""
    available_now: bool = False
    """Read all input that exists now, keep windows open, and stop: the next run resumes."""
    fresh: bool = False
    """Start over: set aside (rename) the state and the outputs of this pipeline, and begin with the first row."""
    parallelism: int = 1
    interval: str = "1s"
    """The interval between two checkpoints; "auto" chooses it from their cost and the failure rate."""
    failure_every: str = "1d"
    """For interval="auto": the mean time between failures."""
    recovery_goal: str | None = None
    """For interval="auto": the time after a failure within which the pipeline should have caught up."""
    checkpoint_timeout: str = "10m"
    keep: int = 3
    compression: Compression = "lz4"
    remote: str | None = None
    """An fsspec URL to which checkpoints are copied in the background."""
    allow_new_state: bool = False
    """Resume although stateful steps of the plan changed; the state of steps that no longer match is dropped."""
    discard_later_output: bool = False
    """Set aside the epochs that sinks have beyond those of the state, as after the loss of a disk. Without it they are an error."""
    batch_rows: int = 65_536
    channel_rows_max: int = ROWS_MAX
    channel_bytes_max: int = BYTES_MAX
    waiting_bytes_max: int = WAITING_BYTES_MAX
    """Maximum bytes of output that wait for a seal. Beyond it the epoch ends early, and nothing is read until it is sealed."""
    state_bytes_max: int | None = None
    """Maximum bytes of state in memory. Beyond it only the partitions that hold time back are read. None: half of the memory that
    this process may use."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    hub: HubAddress | None = None
    """The hub that sealed epochs are sent to, with their rows for the center."""
    outbox_bytes_max: int = OUTBOX_BYTES_MAX
    """Maximum bytes of rows that wait for the hub."""
    outbox_full: OutboxFull = "block"
    """What a full outbox does: "block" seals nothing more, "drop_oldest" drops rows (only with at_most_once)."""
    hub_state: bool = True
    """Send checkpoints to the hub, too, so that another machine can take over."""
    take_over: bool = False
    """Fence any other process that runs this pipeline under this node's name. Without local state, resume from the hub's
    checkpoint."""

    def __post_init__(self) -> None:
        checked_name(self.node, "node")
        if self.bounded and self.available_now:
            raise ConfigError(
                "bounded and available_now cannot both be set. bounded runs once and closes all windows at the end of the input; "
                "available_now stops there, and the next run resumes."
            )
        self._check_types()
        if not 1 <= self.parallelism <= KEY_GROUPS:
            raise ConfigError(
                f"parallelism={self.parallelism} must be between 1 and {KEY_GROUPS}, the number of key groups."
            )
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep} must be at least 1.")
        if self.batch_rows < 1:
            raise ConfigError(f"batch_rows={self.batch_rows} must be at least 1.")
        if self.interval != AUTO:
            positive_us(self.interval, what="interval")
        positive_us(self.checkpoint_timeout, what="checkpoint_timeout")
        positive_us(self.failure_every, what="failure_every")
        if self.recovery_goal is not None:
            positive_us(self.recovery_goal, what="recovery_goal")
        check_word("compression", self.compression, get_args(Compression))
        if self.outbox_bytes_max < 1:
            raise ConfigError(f"outbox_bytes_max={self.outbox_bytes_max} must be at least 1.")
        if self.state_bytes_max is not None and self.state_bytes_max < 1:
            raise ConfigError(f"state_bytes_max={self.state_bytes_max} must be at least 1.")
        check_word("outbox_full", self.outbox_full, get_args(OutboxFull))
        if self.fresh and self.hub is not None:
            raise ConfigError(
                "fresh does not go with a hub, which keeps the epochs and checkpoints of this node. Start over with all parts together: "
                "fordstone run FILE --fresh; or use another state directory and another node name."
            )
        if self.fresh and self.remote is not None:
            raise ConfigError(
                f"fresh does not go with remote={self.remote!r}: the run would resume from the copies there. Move them away yourself, or "
                "copy to another place."
            )
        if self.take_over and self.hub is None:
            raise ConfigError("take_over needs a hub, which fences the other process. Give its address (--hub).")

    def _check_types(self) -> None:
        if self.state is not None and not isinstance(self.state, str | Path):
            raise ConfigError(f"state={self.state!r} is not a directory. Give its path as text.")
        for name in ("parallelism", "keep", "batch_rows", "outbox_bytes_max", "state_bytes_max"):
            if not isinstance(getattr(self, name), int) and (name, getattr(self, name)) != ("state_bytes_max", None):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not a whole number.")

    def home_of(self, pipeline: str) -> Path:
        """The directory of a pipeline's checkpoints and dead letters on this node."""
        return self.directory / pipeline / self.node

    @property
    def directory(self) -> Path:
        """The state directory. A run without one is given a temporary one before it asks for this."""
        if self.state is None:
            raise ValueError("the run has no state directory")
        return Path(self.state)

    @property
    def interval_us(self) -> int | None:
        """The interval in microseconds; None if it is chosen from measurements."""
        return None if self.interval == AUTO else positive_us(self.interval, what="interval")


def run_config(config: RunConfig | None, options: RunOptions) -> RunConfig:
    """The configuration that is given, or one of the options."""
    if config is not None and options:
        raise ConfigError("give either a RunConfig or options, not both.")
    check_options(options, RunConfig.__dataclass_fields__, where="run: ")
    return config or RunConfig(**options)


def default_state_bytes() -> int:
    """Half of the memory of this machine, or of the control group that this process is in."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):  # "max": the group has no limit
        found.append(int(CGROUP_LIMIT.read_text()))
    return min(found) // 2
