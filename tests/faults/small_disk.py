"""A real file system that is really full: a small tmpfs, mounted by root or else in a namespace of our own."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SIZE = "1m"
_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallDisk:
    """Where it is, and how processes get to see it."""

    place: Path
    folder: Path
    """The folder of the job, as this process sees it with the small disk in it."""
    inside: tuple[str, ...] = ()
    """The command that lets another one run where the disk is mounted."""

    def fill(self) -> None:
        """Take what room there is."""
        with (self.place / "filler").open("ab", buffering=0) as filler:
            for size in (4096, 512, 1):
                with contextlib.suppress(_FullError):
                    while True:
                        _write(filler.fileno(), b"x" * size)

    def make_room(self) -> None:
        """Give it back."""
        (self.place / "filler").unlink()


class _FullError(Exception):
    pass


def _write(fd: int, data: bytes) -> None:
    try:
        if os.write(fd, data) < len(data):
            raise _FullError
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _FullError from error
        raise


@contextmanager
def small_disk(folder: Path, name: str, *, size: str = SIZE) -> Iterator[SmallDisk]:
    """Mount one below a job's folder."""
    place = folder / name
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
    if os.geteuid() == 0 and _works(mount):
        try:
            yield SmallDisk(place=place, folder=folder)
        finally:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        return
    if shutil.which("nsenter") is None or not _works([*_NAMESPACE, *mount]):
        pytest.skip("a small file system can be mounted neither as root nor in a user namespace")
    script = 'mount -t tmpfs -o "size=$1" none "$2" && echo mounted && exec sleep infinity'
    holder = subprocess.Popen([*_NAMESPACE, "sh", "-c", script, "sh", size, str(place)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mounted\n"
        view = Path(f"/proc/{holder.pid}/root")
        enter = ("nsenter", "--target", str(holder.pid), "--user", "--mount", "--preserve-credentials")
        inside = (*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(folder))
        yield SmallDisk(place=view / str(place)[1:], folder=view / str(folder)[1:], inside=inside)
    finally:
        holder.kill()
        holder.communicate()


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False
