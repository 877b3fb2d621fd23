"""The cuts of a query: where all sources stood behind each micro-batch, one small file an epoch.

Written by the driver when a batch's output is out, before Spark commits the batch; read by the planner for the next. So
whatever Spark begins again with, the cut before it is there. Kept as long as Spark keeps its own log, and some more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import fsspec
import msgspec

from fordstone.epochs.manifest import Cut
from fordstone.errors import CheckpointError, DamagedError
from fordstone.spark.hosted.sealed import write_whole

KEPT: Final = 200
_DIGITS: Final = 12
_SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True)
class CutFiles:
    """The directory of cuts below a query's checkpoint location, a path or any fsspec URL."""

    root: str

    def read(self, epoch: int) -> Cut:
        """The cut behind an epoch."""
        fs, path = fsspec.core.url_to_fs(self._place(epoch))
        try:
            data = fs.cat_file(path)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the cut of epoch {epoch} is missing ({self._place(epoch)}), so nobody knows where its sources stood. "
                "Restore the checkpoint location as a whole, or begin with a new one."
            ) from error
        try:
            return msgspec.json.decode(data, type=Cut)
        except msgspec.DecodeError as error:
            raise DamagedError(f"{self._place(epoch)} is damaged: {error}. Restore the checkpoint location.") from error

    def write(self, cut: Cut) -> None:
        """Keep a cut, durably; one that is there already is replaced by the same."""
        place = self._place(cut.epoch)
        write_whole(place, msgspec.json.encode(cut))
        fs, _ = fsspec.core.url_to_fs(place)
        if cut.epoch > KEPT and fs.exists(self._path(fs, cut.epoch - KEPT)):
            fs.rm_file(self._path(fs, cut.epoch - KEPT))

    def epochs(self) -> tuple[int, ...]:
        """The epochs whose cuts are there, in order."""
        fs, path = fsspec.core.url_to_fs(self._directory())
        if not fs.exists(path):
            return ()
        names = [str(name).rpartition("/")[2] for name in fs.ls(path, detail=False)]
        return tuple(
            sorted(int(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX) and name[0].isdigit())
        )

    def _directory(self) -> str:
        return f"{self.root.rstrip('/')}/fordstone/cuts"

    def _place(self, epoch: int) -> str:
        return f"{self._directory()}/{epoch:0{_DIGITS}d}{_SUFFIX}"

    def _path(self, fs: Any, epoch: int) -> str:
        return str(fs._strip_protocol(self._place(epoch)))  # noqa: SLF001 - fsspec's own way to a path
