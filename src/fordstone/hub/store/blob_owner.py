"""Whose a blob store is: a hub lets go of blobs that its log does not know, so two of them must never share one.

    <data>/hub.id        this hub's random name, made once
    <store>/hub.id       the name of the hub that the store belongs to

Only a store beyond the data directory is claimed: what is inside is kept apart by the directory's lock. A data directory that
is brought back from a copy brings its name along.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path
from typing import Final

from fordstone.errors import ConfigError, StorageError
from fordstone.storage.atomic import write_file
from fordstone.storage.remote import Remote, open_remote

ID_NAME: Final = "hub.id"
_ID: Final = re.compile(r"[0-9a-f]{32}")


def claim(url: str, data: Path) -> None:
    """Make the store at `url` this hub's. `ConfigError` if it is another's; `StorageError` if nobody can tell."""
    try:
        ours = _own_id(data / ID_NAME)
    except OSError as error:
        raise StorageError(f"{data / ID_NAME} cannot be read or written: {error.strerror}.") from error
    try:
        store = open_remote(url)
        theirs = _read(store)
        if theirs is None:
            store.put(ID_NAME, ours.encode())
            theirs = _read(store)
    except StorageError as error:
        raise StorageError(f"blob store {url!r} cannot be reached: {error}") from error
    if theirs != ours:
        raise ConfigError(
            f"the blob store {url!r} belongs to another hub ({theirs}; this one is {ours}), and one would remove what the other needs.\n"
            f"Give this hub a place of its own with --blobs, or start the other one's --data. If that is gone for good, with all that it "
            f"knew of these blobs, remove {ID_NAME} from the store."
        )


def _own_id(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        found = path.read_text("ascii").strip()
        if _ID.fullmatch(found) is None:
            raise StorageError(
                f"{path} is damaged: bring it back from a copy, or from the blob store, which has the same."
            )
        return found
    made = secrets.token_hex(16)
    write_file(path, made.encode())
    return made


def _read(store: Remote) -> str | None:
    try:
        return store.get(ID_NAME).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
