"""Whose a blob store is: a hub lets go of blobs that its log does not know, so two of them must never share one.

    <data>/hub.id        this hub's random name, made once
    <store>/hub.id       the name of the hub that the store belongs to

Only a store beyond the data directory is claimed: what is inside is kept apart by the directory's lock. A data directory that
is brought back from a copy brings its name along.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import Any, Final

from fordstone.errors import ConfigError, StorageError

ID_NAME: Final = "hub.id"
_ID: Final = re.compile(r"[0-9a-f]{32}")


def claim(url: str, data: Path) -> None:
    """Make the store at `url` this hub's. `ConfigError` if it is another's; `StorageError` if nobody can tell."""
    try:
        ours = _own_id(data / ID_NAME)
    except OSError as error:
        raise StorageError(f"{data / ID_NAME} cannot be read or written: {error.strerror}.") from error
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - a hub on a disk does not pay for it

        filesystem, root = url_to_fs(url)
        path = f"{root.rstrip('/')}/{ID_NAME}"
        theirs = _read(filesystem, path)
        if theirs is None:
            filesystem.makedirs(root, exist_ok=True)
            filesystem.pipe_file(path, ours.encode())
            theirs = _read(filesystem, path)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"blob store {url!r} cannot be opened: {error}.\nInstall what this kind of URL needs (for s3: fordstone[s3])."
        ) from error
    except Exception as error:
        raise StorageError(f"blob store {url!r} cannot be reached: {error}.") from error
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
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("w", encoding="ascii") as file:
        file.write(made)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return made


def _read(filesystem: Any, path: str) -> str | None:
    try:
        return bytes(filesystem.cat_file(path)).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
