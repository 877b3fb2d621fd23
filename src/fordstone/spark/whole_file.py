"""Write a small file below a checkpoint location, whole or not at all.

A location is a path or any fsspec URL. On a disk the file is durable when the call returns; stores behind URLs show an object
when all of it is there.
"""

from __future__ import annotations

import os
from pathlib import Path

import fsspec


def write_whole(place: str, data: bytes) -> None:
    """Put the file there; one that is there already is replaced."""
    fs, path = fsspec.core.url_to_fs(place)
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    if "file" in protocols:
        _write_local(Path(path), data)
    else:
        fs.pipe_file(path, data)


def _write_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
