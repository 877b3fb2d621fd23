"""The identity of a state directory at the hub and at its sinks: a random name, and a generation (rule 18).

    <pipeline>/<node>/owner.json

A generation is what the hub granted last, and a number that grows with every start. Without a hub the first one is 0. A node that cannot
reach its hub goes on with what it was granted before.

Invariant: both numbers are durable before they are used, so no two starts ever share them.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final

import msgspec

from fordstone.errors import DamagedError
from fordstone.protocol.lease import Fence
from fordstone.storage.atomic import AtomicWriter
from fordstone.storage.disk import Disk
from fordstone.storage.journal import seal, unseal_as

log = logging.getLogger(__name__)

OWNER_NAME: Final = "owner.json"
_KIND: Final = "owner"


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A start of a state directory."""

    holder: str
    incarnation: int
    start: str = ""
    """Random: two copies of a directory come to the same incarnations, but not to the same starts."""
    granted: int = 0
    """The generation that the hub granted last; 0: none yet."""

    @property
    def fence(self) -> Fence:
        """The generation of this start, as far as it is known to be granted."""
        return Fence(self.granted, self.incarnation)


_OWNER: Final = msgspec.json.Decoder(Owner)


def next_owner(disk: Disk, directory: str) -> Owner:
    """Begin another incarnation. Called once a start, by the process that has the lock on the state directory."""
    before = _read(disk, f"{directory}/{OWNER_NAME}") or Owner(holder=secrets.token_hex(16), incarnation=0)
    owner = msgspec.structs.replace(before, incarnation=before.incarnation + 1, start=secrets.token_hex(8))
    disk.make_dirs(directory)
    _write(disk, directory, owner)
    return owner


def granted_to(disk: Disk, directory: str) -> int:
    """The generation that the hub granted to a state directory last; 0: none."""
    owner = _read(disk, f"{directory}/{OWNER_NAME}")
    return 0 if owner is None else owner.granted


class Ownership:
    """The owner of one start. Recovery and the sender record here what the hub granted; any thread may read."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self.owner = next_owner(disk, directory)

    def grant(self, hub: int) -> None:
        """Keep the generation that the hub granted, durably."""
        if hub != self.owner.granted:
            owner = msgspec.structs.replace(self.owner, granted=hub)
            _write(self._disk, self._directory, owner)
            self.owner = owner


def _write(disk: Disk, directory: str, owner: Owner) -> None:
    AtomicWriter(disk).write(f"{directory}/{OWNER_NAME}", seal(_KIND, owner))


def _read(disk: Disk, path: str) -> Owner | None:
    try:
        return unseal_as(_KIND, disk.read(path), _OWNER)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        # To the hub this is another holder from now on: it gives the lease to it only with take_over.
        log.warning("owner file damaged", extra={"path": path, "problem": str(error)})
        return None
