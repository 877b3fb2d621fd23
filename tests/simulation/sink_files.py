"""The real file sink on the disk of a simulated node: a power cut hits the state and the output together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fordstone.connectors import files
from fordstone.connectors.base import Sink, options_of
from fordstone.connectors.files.rows import rows_of
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.files.sink import FileSink
from fordstone.connectors.memory import MemorySink
from fordstone.edge.engine.assembly import ConnectorOpener, Job
from fordstone.plan import plan as p
from fordstone.storage.disk import Data, Disk

OUTPUT: Final = "output"
IN_FILES: Final = ("rows", "windows", "late", "means", "firsts")
"""The sinks that write files. They append rows, and release them by epoch."""


class Folder(Disk):
    """A folder of a disk, as a disk of its own."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        disk.make_dirs(path)

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}".rstrip("/")

    def create(self, path: str, data: Data) -> None:
        self._disk.create(self._at(path), data)

    def append(self, path: str, data: Data) -> None:
        self._disk.append(self._at(path), data)

    def truncate(self, path: str, size_bytes: int) -> None:
        self._disk.truncate(self._at(path), size_bytes)

    def fsync(self, path: str) -> None:
        self._disk.fsync(self._at(path))

    def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        self._disk.rename(self._at(old), self._at(new), replace=replace)

    def fsync_dir(self, path: str) -> None:
        self._disk.fsync_dir(self._at(path))

    def read(self, path: str) -> bytes:
        return self._disk.read(self._at(path))

    def read_part(self, path: str, start: int, size_bytes: int) -> bytes:
        return self._disk.read_part(self._at(path), start, size_bytes)

    def read_pieces(self, path: str) -> Iterator[bytes]:
        return self._disk.read_pieces(self._at(path))

    def list(self, path: str) -> Sequence[str]:
        return self._disk.list(self._at(path))

    def remove(self, path: str) -> None:
        self._disk.remove(self._at(path))

    def remove_dir(self, path: str) -> None:
        self._disk.remove_dir(self._at(path))

    def exists(self, path: str) -> bool:
        return self._disk.exists(self._at(path))

    def make_dirs(self, path: str) -> None:
        self._disk.make_dirs(self._at(path))

    def size(self, path: str) -> int:
        return self._disk.size(self._at(path))


class FilesOpener(ConnectorOpener):
    """Opens file sinks for `IN_FILES`, and what the plan says for the others."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._disk = job.environment.disk

    def sink(self, step: p.Sink, *, resumes_after: int | None = None) -> Sink:
        if step.name not in IN_FILES:
            return super().sink(step, resumes_after=resumes_after)
        settings = options_of(files(step.name, format="arrow", compression="none"), FileSettings)
        stream = self.stream(step, resumes_after=resumes_after)
        return FileSink(settings, stream, Folder(self._disk, f"{OUTPUT}/{step.name}"))


def collect(disk: Disk, sinks: dict[str, MemorySink]) -> None:
    """Move what the files have to the sinks in memory, by which a run is judged."""
    for name in IN_FILES:
        folder = Folder(disk, f"{OUTPUT}/{name}")
        if folder.list(""):
            sinks[name].written = [rows_of(folder.list(""), folder.read, where=name)]
