"""The options of a run on Spark, from the command line or from the arguments of `run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from fordstone.errors import ConfigError
from fordstone.lang.duration import positive_us
from fordstone.plan.ids import KEY_GROUPS, checked_name
from fordstone.storage.remote import local_path


class SparkOptions(TypedDict, total=False):
    """The fields of `SparkConfig`, as keyword arguments."""

    state: str | Path
    bounded: bool
    available_now: bool
    fresh: bool
    interval: str
    shards: int | None
    rows_max: int
    batch_rows: int
    from_checkpoint: str | None
    node: str
    allow_new_state: bool
    discard_later_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkConfig:
    """Checked when it is made. Spans are text with a unit: "1s"."""

    state: str | Path = "state"
    """Where the query's checkpoint is kept, a directory or a URL that every executor reaches. A run with the same one resumes."""
    bounded: bool = False
    """Run as a batch job over what is there now, and end."""
    available_now: bool = False
    """Read what is there now as a stream, keep the state, and stop: the next run resumes."""
    fresh: bool = False
    """Start over: set aside (rename) the checkpoint and the outputs of this pipeline, and begin with the first row."""
    interval: str = "1s"
    """Minimum time between two micro-batches."""
    shards: int | None = None
    """Into how many parts keys are divided; as many as tasks run at once if left out. Fixed for the life of the state."""
    rows_max: int = 4_000_000
    """About how many rows a micro-batch reads from each source at most."""
    batch_rows: int = 65_536
    from_checkpoint: str | None = None
    """An edge's state directory: the query begins where its newest checkpoint stands."""
    node: str = "node"
    """The node that the checkpoint belongs to."""
    allow_new_state: bool = False
    """With `from_checkpoint`: begin although stateful steps changed; the state of those is not taken over."""
    discard_later_output: bool = False
    """Set aside the epochs that sinks have beyond those of the checkpoint location, as after it was restored from an older copy."""

    def __post_init__(self) -> None:
        checked_name(self.node, "node")
        positive_us(self.interval, what="interval")
        if self.shards is not None and not 1 <= self.shards <= KEY_GROUPS:
            raise ConfigError(f"shards={self.shards} must be between 1 and {KEY_GROUPS}, the number of key groups.")
        if self.rows_max < 1 or self.batch_rows < 1:
            raise ConfigError(f"rows_max={self.rows_max} and batch_rows={self.batch_rows} must both be at least 1.")
        if self.bounded and self.available_now:
            raise ConfigError(
                "bounded and available_now cannot both be set. bounded runs once and closes all windows at the end of the input; "
                "available_now stops there, and the next run resumes."
            )

    def checkpoint_of(self, pipeline: str) -> str:
        """The checkpoint location of a pipeline's query: an absolute path, or a URL of a store elsewhere."""
        path = local_path(str(self.state))
        root = str(self.state).rstrip("/") if path is None else str(Path(path).expanduser().absolute())
        return f"{root}/{pipeline}/_spark"
