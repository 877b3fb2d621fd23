"""Run a plan on Spark: the only package that imports pyspark, pandas or pyarrow.

Imported by the driver and, with the functions that Spark sends about, by every Python worker: nothing here may start
Java, read settings or take long.
"""

from __future__ import annotations

from importlib.util import find_spec

from fordstone.errors import NotInstalledError

_MISSING = [name for name in ("pyspark", "pandas", "pyarrow") if find_spec(name) is None]
if _MISSING:
    raise NotInstalledError(
        f"running on Spark needs {', '.join(_MISSING)}, which this Python does not have.\n"
        "Install what belongs to it: pip install 'fordstone[spark]'"
    )

# Not lazily: the modules of the same names would take the functions' places as soon as anybody imports them.
from fordstone.spark.run import run  # noqa: E402 - only once what it needs is known to be there
from fordstone.spark.session import prepared, session  # noqa: E402 - as above

__all__ = ["prepared", "run", "session"]
