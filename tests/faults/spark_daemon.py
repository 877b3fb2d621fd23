"""What forks Spark's Python workers, with everything imported that each of them would import for itself.

Drivers that are started and killed all the time are ready in half the time. Nothing but imports may happen before the fork.
"""

from __future__ import annotations

import pandas as pd
import polars as pl
import pyarrow as pa
from pyspark.daemon import manager

from fordstone.spark.hosted import commit, source
from fordstone.spark.hosted import operator_host as processor
from fordstone.spark.hosted import source as feed

PRELOADED = (pd, pl, pa, commit, feed, processor, source)

if __name__ == "__main__":
    manager()
