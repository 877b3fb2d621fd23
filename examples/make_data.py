"""Make the input of the examples: the same rows for the same seed.

python examples/make_data.py words [--seed 1] [--rows 2000] [--into in/words]
python examples/make_data.py readings [--seed 1] [--rows 6000] [--into in/readings]
"""

import argparse
import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

BEGINNINGS = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]
ENDINGS = ["a", "e", "i", "o", "u", "ai", "ei", "ou", "an", "en", "in", "on"]
VOCABULARY = [first + last for first in BEGINNINGS for last in ENDINGS]
BOXES_PER_GATEWAY = 4
LATE_SHARE = 0.02
IMPLAUSIBLE_SHARE = 0.005
START = datetime(2026, 1, 1, tzinfo=UTC)


def lines(seed: int) -> Iterator[dict[str, Any]]:
    """Yield lines of words forever. Some words are much more frequent than others, and some lines are empty."""
    rng = random.Random(seed)  # noqa: S311 - the same rows for the same seed
    weights = [1 / rank for rank in range(1, len(VOCABULARY) + 1)]
    while True:
        yield {"line": " ".join(rng.choices(VOCABULARY, weights, k=rng.randrange(12)))}


def readings(seed: int, gateway: int) -> Iterator[dict[str, Any]]:
    """Yield readings of one gateway's boxes forever: a little out of order, some far too late, some implausible."""
    rng = random.Random(f"{seed}/{gateway}")  # noqa: S311 - the same rows for the same seed
    seq = 0
    while True:
        seq += 1
        box = gateway * BOXES_PER_GATEWAY + rng.randrange(BOXES_PER_GATEWAY)
        delay_s = 40 * rng.random() if rng.random() < LATE_SHARE else 4 * rng.random()
        at = START + timedelta(seconds=seq * 0.05 - delay_s)
        temp = 999.0 if rng.random() < IMPLAUSIBLE_SHARE else round(rng.gauss(2.0 + box / 4, 2.5), 2)
        yield {"device": f"box-{box:02d}", "seq": seq, "ts": at.isoformat(), "temp": temp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["words", "readings"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, help="total number of rows; 2,000 lines or 6,000 readings by default")
    parser.add_argument("--into", type=Path, help="output directory; in/words or in/readings by default")
    given = parser.parse_args()
    into = given.into or Path("in") / given.what
    into.mkdir(parents=True, exist_ok=True)
    for part in range(2):
        rows = lines(given.seed + part) if given.what == "words" else readings(given.seed, part)
        count = (given.rows or {"words": 2000, "readings": 6000}[given.what]) // 2
        text = "".join(json.dumps(next(rows)) + "\n" for _ in range(count))
        (into / f"part-{part}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
