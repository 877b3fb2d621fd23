"""Making the commits of a Delta table on a local disk durable.

The package that writes them does not sync. So `release` syncs what a commit is made of before it returns: data files, the
commit itself and its checkpoint, and the directories. What is left is the moment between the two: power that goes just
then may leave a commit whose data file is short, which is told when the epoch comes again.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

import msgspec

from fordstone.checkpoint.disk import Disk
from fordstone.errors import SinkError

LOG: Final = "_delta_log"
_WITH_FILES: Final = ("add", "cdc")


def sync_commit(disk: Disk, version: int, *, where: str) -> None:
    """Make one version of the table durable. Files that are gone were replaced since, and are left out."""
    name = f"{LOG}/{version:020d}"
    directories = {"", LOG}
    for path, size_bytes in _files(disk, f"{name}.json"):
        try:
            found_bytes = disk.size(path)
            disk.fsync(path)
        except FileNotFoundError:
            continue
        if found_bytes != size_bytes:
            raise SinkError(
                f"{where} is damaged: {path} has {found_bytes} bytes, and version {version} says {size_bytes}.\n"
                f"Power may have gone while it was written. Restore the table to version {version - 1}, then start again."
            )
        parent = path.rpartition("/")[0]
        while parent:
            directories.add(parent)
            parent = parent.rpartition("/")[0]
    for part in (f"{name}.json", f"{name}.checkpoint.parquet", f"{LOG}/_last_checkpoint"):
        if disk.exists(part):
            disk.fsync(part)
    for directory in sorted(directories, reverse=True):
        disk.fsync_dir(directory)


def _files(disk: Disk, commit: str) -> list[tuple[str, int]]:
    """The data files that a commit adds, below the table's directory."""
    try:
        actions: list[dict[str, Any]] = msgspec.json.Decoder().decode_lines(disk.read(commit))
    except FileNotFoundError:
        return []  # an old one, cleaned away
    added = [action[kind] for action in actions for kind in _WITH_FILES if kind in action]
    return [(unquote(file["path"]), file["size"]) for file in added if "://" not in file["path"]]
