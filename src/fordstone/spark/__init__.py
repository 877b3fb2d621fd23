"""Run a plan on Spark: the only package that imports pyspark, pandas or pyarrow.

Imported by the driver and, with the functions that Spark sends about, by every Python worker: nothing here may start
Java, read settings or take long.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fordstone.errors import NotInstalledError

if TYPE_CHECKING:
    from fordstone.spark.formats.register import register  # noqa: TC004 - found by `_Package` at run time
    from fordstone.spark.run import run  # noqa: TC004 - found by `_Package` at run time
    from fordstone.spark.session.session import prepared, session  # noqa: TC004 - found by `_Package` at run time

_MISSING = [name for name in ("pyspark", "pandas", "pyarrow") if find_spec(name) is None]
if _MISSING:
    raise NotInstalledError(
        f"running on Spark needs {', '.join(_MISSING)}, which this Python does not have.\n"
        "Install what belongs to it: pip install 'fordstone[spark]'"
    )


class _Function:
    """A function of this package that is imported when it is first asked for.

    Most workers never need it, and importing all that it needs costs each of them half a second. The module of the same name does not
    take its place when it is imported.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __get__(self, package: object, owner: type) -> Any:
        held = None if package is None else vars(package).get(self._name)
        return getattr(import_module(self._module), self._name) if held is None else held

    def __set__(self, package: object, value: object) -> None:
        if not isinstance(value, ModuleType):
            vars(package)[self._name] = value

    def __delete__(self, package: object) -> None:
        vars(package).pop(self._name, None)


class _Package(ModuleType):
    """This package."""

    prepared = _Function("fordstone.spark.session.session", "prepared")
    register = _Function("fordstone.spark.formats.register", "register")
    run = _Function("fordstone.spark.run", "run")
    session = _Function("fordstone.spark.session.session", "session")


sys.modules[__name__].__class__ = _Package

__all__ = ["prepared", "register", "run", "session"]
