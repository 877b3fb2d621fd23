"""The identity of a state directory at the hub: a random name, and a number that grows with every start (rule 18).

    <pipeline>/<node>/owner.json

Invariant: a number is durable before it is used, so no two starts ever share one.
"""

from __future__ import annotations

import logging
import secrets
from typing import Final

import msgspec

from fordstone.errors import DamagedError
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


_OWNER: Final = msgspec.json.Decoder(Owner)


def next_owner(disk: Disk, directory: str) -> Owner:
    """Begin another incarnation. Called once a start, by the process that has the lock on the state directory."""
    before = _read(disk, f"{directory}/{OWNER_NAME}")
    owner = (
        Owner(holder=secrets.token_hex(16), incarnation=1)
        if before is None
        else msgspec.structs.replace(before, incarnation=before.incarnation + 1)
    )
    disk.make_dirs(directory)
    AtomicWriter(disk).write(f"{directory}/{OWNER_NAME}", seal(_KIND, owner))
    return owner


def holder_of(disk: Disk, directory: str) -> str:
    """The random name alone, made if there is none. Called by the process that has the lock."""
    known = _read(disk, f"{directory}/{OWNER_NAME}")
    return (next_owner(disk, directory) if known is None else known).holder


def _read(disk: Disk, path: str) -> Owner | None:
    try:
        return unseal_as(_KIND, disk.read(path), _OWNER)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        # To the hub this is another holder from now on: it gives the lease to it only with take_over.
        log.warning("owner file damaged", extra={"path": path, "problem": str(error)})
        return None
