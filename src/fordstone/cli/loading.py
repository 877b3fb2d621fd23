"""Load the pipeline of `FILE[:NAME]`, and keep the process small.

The file becomes a module named by its stem, with its directory first on the import path, so that another process can import the
functions in it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

import click

from fordstone.cli.errors import UsageError, in_file

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline

THREADS_VARIABLE: Final = "POLARS_MAX_THREADS"
_EXAMPLE: Final = """
    from fordstone import Pipeline
    from fordstone.connectors import files, stdout

    p = Pipeline("hello")
    p.source("readings", files("in/*.jsonl"), schema={"device": "string", "temp": "double"}).sink("out", stdout())
"""


def load_pipeline(target: str) -> Pipeline:
    """Return the pipeline of `FILE` or `FILE:NAME`. Raises what the command line shows."""
    path, name = split_target(target)
    module = _load(path)
    from fordstone.api.pipeline import Pipeline

    found = {label: value for label, value in vars(module).items() if isinstance(value, Pipeline)}
    if name is not None:
        if name in found:
            return found[name]
        what = (
            f"{name} is a {type(getattr(module, name)).__name__}, not a pipeline"
            if hasattr(module, name)
            else f"there is no {name}"
        )
        raise UsageError(f"{path}: {what}. {_offer(path, found)}")
    if len({id(pipeline) for pipeline in found.values()}) == 1:
        return next(iter(found.values()))
    if found:
        raise UsageError(f"{path} has several pipelines. {_offer(path, found)}")
    raise UsageError(f"{path} has no pipeline. Define one; this command runs it:\n{_EXAMPLE}")


def file_of(target: str) -> Path:
    """The file of `FILE` or `FILE:name`."""
    return split_target(target)[0].resolve()


def _offer(path: Path, found: dict[str, Pipeline]) -> str:
    if not found:
        return "The file has no pipeline."
    lines = [f"    {path}:{label}    (pipeline {pipeline.name})" for label, pipeline in found.items()]
    return "\n".join(["Choose one:", *lines])


def split_target(target: str) -> tuple[Path, str | None]:
    """Return the file and the variable of `FILE` or `FILE:NAME` without loading it. Raises `UsageError` if there is no such file."""
    name: str | None = None
    path = Path(target)
    if not path.exists() and ":" in target:
        file, _, name = target.rpartition(":")
        path = Path(file)
        if not name.isidentifier():
            raise UsageError(f"{target!r}: {name!r} after the ':' is not the name of a variable.")
    if path.is_dir():
        raise UsageError(f"{path} is a directory. Give the Python file that declares the pipeline.")
    if not path.exists():
        raise UsageError(f"{path} does not exist (working directory {Path.cwd()}).")
    if path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file. Pipelines are declared in .py files.")
    return path, name


def _load(path: Path) -> ModuleType:
    whole = path.resolve()
    stem = whole.stem
    _check_stem(path, whole)
    spec = importlib.util.spec_from_file_location(stem, whole)
    if spec is None or spec.loader is None:
        raise AssertionError(f"no loader for {whole}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(whole.parent))
    sys.modules[stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[stem]
        if isinstance(error, click.ClickException):
            raise
        raise in_file(error, whole) from error
    return module


def _check_stem(path: Path, whole: Path) -> None:
    """Reject a file named like another module: this process or a library would import the wrong one."""
    try:
        known = importlib.util.find_spec(whole.stem)
    except (ImportError, ValueError):
        known = None
    if known is not None and known.origin is not None and Path(known.origin).resolve() != whole:
        raise UsageError(f"{path}: Python has another module named {whole.stem!r} ({known.origin}). Rename the file.")


def limit_polars(parallelism: int) -> None:
    """One Polars thread per subtask, unless the user chose otherwise. Has an effect only before Polars is imported."""
    os.environ.setdefault(THREADS_VARIABLE, str(max(1, parallelism)))


def trim_memory() -> None:
    """Return freed memory to the system, once, after everything is loaded: saves about 14 MB of an idle process."""
    gc.collect()
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
