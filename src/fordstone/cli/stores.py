"""Find the checkpoint store that a command means, below a state directory. Looks only; nothing is made or changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from fordstone.cli.errors import Misuse

if TYPE_CHECKING:
    from fordstone.epochs.store import CheckpointStore

SPARK_DIRECTORY: Final = "_spark"
"""Beside a pipeline's nodes: where its Spark query keeps what is Spark's own."""


def read_store(state: str, pipeline: str | None, node: str | None) -> CheckpointStore:
    """The store for reading: of the given pipeline and node, or the only one there is. May be in use by a running pipeline."""
    pipeline, node = _only(Path(state), pipeline, node)
    from fordstone.epochs.store import CheckpointStore
    from fordstone.storage.disk import OsDisk

    return CheckpointStore(OsDisk(state), pipeline=pipeline, node=node, read_only=True)


def spark_queries(root: Path) -> list[Path]:
    """The checkpoint locations of Spark queries at, in or below a directory: it may be one, a pipeline's or a state directory."""
    found = [root, root / SPARK_DIRECTORY, *sorted(root.glob(f"*/{SPARK_DIRECTORY}"))]
    return [path for path in found if (path / "fordstone" / "query.json").is_file()]


def _only(root: Path, pipeline: str | None, node: str | None) -> tuple[str, str]:
    if not root.is_dir():
        raise Misuse(f"there is no state directory {root} (working directory {Path.cwd()}). Name it with --state.")
    there = sorted(
        (path.parent.parent.name, path.parent.name)
        for path in root.glob("*/*/manifests")
        if path.parent.name != SPARK_DIRECTORY
    )
    if not there:
        queries = spark_queries(root)
        if queries:
            listed = "\n".join(f"    fordstone checkpoints import-spark {path} --state {root}" for path in queries)
            raise Misuse(
                f"{root} holds no checkpoints of an edge, but those of Spark. To make a checkpoint of Spark's state:\n{listed}"
            )
        raise Misuse(f"{root} holds no checkpoints: nothing has run with --state {root} yet.")
    found = [(one, other) for one, other in there if pipeline in {None, one} and node in {None, other}]
    if len(found) == 1:
        return found[0]
    listed = "\n".join(f"    --pipeline {one} --node {other}" for one, other in found or there)
    if not found:
        raise Misuse(f"{root} does not hold that pipeline and node. It holds:\n{listed}")
    raise Misuse(f"{root} holds the checkpoints of several. Say which:\n{listed}")
