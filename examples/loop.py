"""A loop: every number is fed back until it is 1, and its steps are counted.

The rule is that of Collatz: halve an even number, and replace an odd number n by 3 n + 1.

Run it:  fordstone run examples/loop.py --bounded
"""

from fordstone import Pipeline, Stream
from fordstone.connectors import files, generator

p = Pipeline("collatz")
numbers = p.source("numbers", generator(rows=500, seed=3), schema={"start": "smallint"})
begun = numbers.filter("start > 0").select("start", "CAST(start AS BIGINT) AS n", "0 AS steps")


def around(inside: Stream) -> tuple[Stream, Stream]:
    """Return the rows that are fed back, and the rows that leave the loop."""
    unfinished = inside.filter("n <> 1")
    back = unfinished.select(
        "start", "CASE WHEN n % 2 = 0 THEN CAST(n / 2 AS BIGINT) ELSE 3 * n + 1 END AS n", "steps + 1 AS steps"
    )
    return back, inside.filter("n = 1")


begun.iterate(around).select("start", "steps").sink("steps", files("out/steps", format="csv"))
