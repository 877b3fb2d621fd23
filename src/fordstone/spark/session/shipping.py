"""Bring the pipeline's file to Spark's workers, with the Python files beside it.

Workers get functions by their import path, so they must be able to import the file under its stem, as this process did, and
whatever its functions import from beside it. What is installed in an environment is for the executors' environment to have.
A directory with very much in it, somebody's home perhaps, is not sent whole: then it is what this process has imported.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from fordstone.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHIPPED_BYTES_MAX: Final = 64 * 1024 * 1024
LOOKED_AT_MAX: Final = 10_000
"""Files and directories below that of the pipeline's file."""
OURSELVES: Final = "fordstone"
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)


def ship(spark: SparkSession, file: Path, folder: Path) -> None:
    """Put the file and what belongs to it on the import path of every worker of the application.

    `folder` holds what is sent and has to stay as long as the application runs: executors that come later ask for it.

    Raises:
        ConfigError: It is more than anybody can mean.
    """
    data = packed(file.parent, belonging(file, sys.modules))
    # The same content has the same name: to Spark, a second file of one name with other content is an error.
    archive = folder / f"{file.stem}-{hashlib.sha256(data).hexdigest()[:16]}.zip"
    archive.write_bytes(data)
    spark.sparkContext.addPyFile(str(archive))


def belonging(file: Path, modules: Mapping[str, ModuleType]) -> list[Path]:
    """The file, what was imported from the directory that it is in, and what could be."""
    return sorted({file} | _imported(file.parent, modules) | _importable(file.parent))


def _imported(directory: Path, modules: Mapping[str, ModuleType]) -> set[Path]:
    """The Python files of what was imported from there: a module's own, a package's all."""
    found: set[Path] = set()
    for name, module in list(modules.items()):
        if "." in name or name == OURSELVES:
            continue
        places = [Path(place) for place in getattr(module, "__path__", ())]
        own = getattr(module, "__file__", None)
        for package in places:
            if package.parent == directory:
                found.update(path for path in package.rglob("*.py") if path.is_file())
        if not places and own is not None and Path(own).parent == directory and Path(own).suffix == ".py":
            found.add(Path(own))
    return found


def _importable(directory: Path) -> set[Path]:
    """All Python files there and in what could be packages; none, if looking for them takes too long."""
    found: set[Path] = set()
    looked_at = 0
    for folder, folders, names in os.walk(directory):
        place = Path(folder)
        looked_at += len(folders) + len(names)
        if looked_at > LOOKED_AT_MAX:
            return set()
        folders[:] = [name for name in folders if name.isidentifier() and _may_be_package(place / name)]
        found.update(place / name for name in names if name.endswith(".py") and name.removesuffix(".py").isidentifier())
    return found


def _may_be_package(folder: Path) -> bool:
    """Not so an environment, what Python caches, and ourselves, whom executors have."""
    return folder.name not in {"__pycache__", OURSELVES} and not (folder / "pyvenv.cfg").exists()


def packed(directory: Path, files: list[Path]) -> bytes:
    """The files as a zip archive from which Python can import. The same files give the same bytes."""
    size = sum(path.stat().st_size for path in files)
    if size > SHIPPED_BYTES_MAX:
        raise ConfigError(
            f"the modules beside the pipeline's file have {size} bytes, too many to send to Spark's workers "
            f"(at most {SHIPPED_BYTES_MAX}). Install them where the executors' Python finds them, and not in {directory}."
        )
    contents = {path.relative_to(directory): path.read_bytes() for path in files}
    # Python finds a directory without __init__.py only if it has an entry of its own.
    folders = {folder for path in contents for folder in path.parents} - {Path()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [(f"{folder.as_posix()}/", b"") for folder in sorted(folders)] + [
            (path.as_posix(), data) for path, data in sorted(contents.items())
        ]:
            archive.writestr(zipfile.ZipInfo(name, date_time=_LONG_AGO), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()
