"""Files at a URL: checkpoint copies, blobs, and the files of sources and sinks, in S3, HDFS, and whatever else fsspec opens.

    base      `Remote`: whole files below one URL; on a local disk by `DiskRemote`
    files     `FsspecRemote`: the same in any other store, and files in parts, for blobs and connectors
    kinds     what is known of each kind of store: its package, its options, and how a file appears whole there
    limits    time limits of requests
    errors    what a store says when a request fails, in words that a user understands

Invariants: a file appears whole, on each kind of store by its means (`kinds.Appears`); every request ends after its own time limit, also where
the driver has none; nothing is answered from a cache of listings. Drivers try again for seconds at most; when to do so later is for
callers to decide.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from fordstone.errors import StorageError
from fordstone.storage.disk import OsDisk
from fordstone.storage.remote.base import DiskRemote, Remote, local_path
from fordstone.storage.remote.errors import StoreAwayError, reason
from fordstone.storage.remote.files import FsspecRemote, RemoteFile
from fordstone.storage.remote.kinds import open_filesystem

__all__ = [
    "DiskRemote",
    "FsspecRemote",
    "Remote",
    "RemoteFile",
    "StoreAwayError",
    "local_path",
    "open_filesystem",
    "open_remote",
    "read_url",
    "reason",
]


def open_remote(url: str) -> Remote:
    """Open what a URL or a path names. `StorageError` if that needs a connection and it fails. Creates nothing."""
    path = local_path(url)
    if path is not None:
        root = Path(path).expanduser()
        if root.exists() and not root.is_dir():
            # It must not look like an empty store: a node without state would start from the beginning.
            raise StorageError(f"remote {url!r} cannot be reached: {root} is not a directory.")
        # Copies have the rows and the state of a node. The directory itself may hold those of others, too.
        return DiskRemote(OsDisk(root, create_root=False, private=True, tighten=False))
    return FsspecRemote(*open_filesystem(url, kind="remote", commits=True))


def read_url(url: str, *, bytes_max: int) -> bytes:
    """Return at most `bytes_max` bytes of the file at a URL. `FileNotFoundError` if there is none, else `StorageError`."""
    local = local_path(url)
    filesystem, path = open_filesystem(url, kind="file") if local is None else (None, unquote(local))
    try:
        with Path(path).open("rb") if filesystem is None else filesystem.open(path, "rb") as file:
            return bytes(file.read(bytes_max))
    except FileNotFoundError:
        raise
    except Exception as error:  # each driver has exceptions of its own
        raise StoreAwayError(f"could not read {url}: {reason(error)}") from error
