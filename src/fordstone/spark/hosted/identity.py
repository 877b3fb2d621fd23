"""What a checkpoint location belongs to: `fordstone/query.json`, written when a query first uses it.

Spark itself would take up the state of a plan that has changed and fail deep inside, or worse. So what the state depends on
is written down, compared first, and a difference is told in our words (rule 22).
"""

from __future__ import annotations

import glob
from typing import Final

import fsspec
import msgspec

from fordstone.errors import CheckpointError, PlanMismatchError
from fordstone.protocol.recovery import match_plan
from fordstone.spark.hosted.sealed import write_whole

IDENTITY_VERSION: Final = 1
_FILE: Final = "fordstone/query.json"
_LOG: Final = "metadata"
"""What Spark writes first of all, into the location of each stream."""


class QueryIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a query's state depends on."""

    version: int = IDENTITY_VERSION
    pipeline: str
    plan: msgspec.Raw
    """As it was when the query was begun."""
    step_digests: dict[str, str]
    stages: tuple[tuple[str, ...], ...]
    """The keyed steps of each stage."""
    shards: int
    first_epoch: int
    """The epoch of Spark's batch 0."""
    seed: str | None = None
    """The edge's state directory that the state came from, if it did not begin empty."""
    seed_node: str | None = None
    bounded: bool = False
    owner: str = ""
    """Random, made with the location: who this query is to those it publishes to."""


class QueryFile:
    """The file below a checkpoint location, a path or any fsspec URL."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self._fs, self._path = fsspec.core.url_to_fs(f"{checkpoint.rstrip('/')}/{_FILE}")
        self._root = self._path.removesuffix(f"/{_FILE}")

    def read(self) -> QueryIdentity | None:
        """What stands there; None: the location is new."""
        if not self._fs.exists(self._path):
            return None
        try:
            found = msgspec.json.decode(self._fs.cat_file(self._path), type=QueryIdentity)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"{self._path} cannot be read: {error}. Restore the checkpoint location, or begin with a new one."
            ) from error
        if found.version != IDENTITY_VERSION:
            raise CheckpointError(
                f"{self._path} has version {found.version}; this fordstone reads version {IDENTITY_VERSION}."
            )
        return found

    def has(self, path: str) -> bool:
        """Whether Spark has a file of that path below the location."""
        return bool(self._fs.exists(f"{self._root}/{path}"))

    def write(self, identity: QueryIdentity) -> None:
        """Write it, once, before the query starts."""
        place = f"{self.checkpoint.rstrip('/')}/{_FILE}"
        write_whole(place, msgspec.json.format(msgspec.json.encode(identity), indent=1))

    def checked(self, wanted: QueryIdentity) -> QueryIdentity:
        """The identity to run with: what stands there if it fits, else the wanted one, which then stands there."""
        found = self.read()
        if found is None:
            if self._used():
                raise CheckpointError(
                    f"{self._path} is missing, although a query has run here, so nobody knows what its state belongs to. "
                    "Restore the checkpoint location as a whole, or begin with a new one."
                )
            self.write(wanted)
            return wanted
        if not self.begun():
            # Nothing was let out and nothing is kept: a first try that failed binds nobody.
            self.write(wanted)
            return wanted
        difference = mismatch(found, wanted)
        if difference is not None:
            raise PlanMismatchError(
                f"the checkpoint location {self.checkpoint} belongs to another query.\n{difference}\n"
                "Use another state directory to begin anew. To carry state over, make an edge checkpoint of this one "
                "(fordstone checkpoints import-spark) and begin from it (--from-checkpoint, --allow-new-state)."
            )
        return found

    def begun(self) -> bool:
        """Whether a batch was ever planned here, or a batch job came to its end."""
        names = ("offsets/0", "fordstone/sealed/*.json", "fordstone/cuts/*.json")
        return any(self._fs.glob(f"{glob.escape(self._root)}/{name}") for name in names)

    def _used(self) -> bool:
        """Whether a query of Spark's was ever started here."""
        return self.has(_LOG)


def mismatch(found: QueryIdentity, wanted: QueryIdentity) -> str | None:
    """Why a query cannot go on from a checkpoint location, in words; None: it can."""
    if found.pipeline != wanted.pipeline:
        return f"  it is that of pipeline {found.pipeline}, this is {wanted.pipeline}."
    match = match_plan(found.step_digests, wanted.step_digests)
    if not match.whole:
        # Spark can neither drop nor add state: the last lines, which offer that, are the edge's.
        return "\n".join(line for line in match.explain().splitlines() if not line.startswith("--"))
    if found.stages != wanted.stages:
        return "  the steps are the same, but stand at other depths now, so that their state would be looked for elsewhere."
    if found.bounded != wanted.bounded:
        was = "bounded" if found.bounded else "unbounded"
        return f"  its input was {was}."
    return None
