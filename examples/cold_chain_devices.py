"""Simulate the boxes of `cold_chain.py`: one reading per second and box. The same seed gives the same readings; some are far too warm.

python examples/cold_chain_devices.py in --devices 20 --seconds 30              all at once
python examples/cold_chain_devices.py in --devices 20 --seconds 30 --after 30   the next 30 seconds
python examples/cold_chain_devices.py in --devices 20 --seconds 30 --live       in real time, with the current time
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

START = datetime(2025, 1, 1, tzinfo=UTC)
WARM_EVERY = 17
"""Seconds between two openings of a box."""


def second(number: int, devices: int, seed: int, at: datetime, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield the readings of one second, a little out of order."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - the same readings for the same seed
    for box in range(devices):
        opened = (number + 5 * box) % WARM_EVERY == WARM_EVERY - 1
        temp = rng.gauss(2.0 + box % 5, 0.5) + (12.0 if opened else 0.0)
        moment = at - timedelta(milliseconds=rng.randrange(2000))
        yield {"device": f"{prefix}{box:03d}", "ts": moment.isoformat(), "temp": round(temp, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, help="directory of the files")
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--after", type=int, default=0, help="begin this number of seconds after the first reading")
    parser.add_argument("--live", action="store_true", help="write in real time, with the current time")
    parser.add_argument("--prefix", default="box-", help="prefix of the names of boxes")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    began = datetime.now(UTC) if given.live else START + timedelta(seconds=given.after)
    name = f"{given.prefix}{began:%H%M%S}.jsonl" if given.live else f"{given.prefix}0.jsonl"
    with (given.into / name).open("a" if given.after else "w") as file:
        for number in range(given.seconds):
            at = began + timedelta(seconds=number)
            rows = second(given.after + number, given.devices, given.seed, at, given.prefix)
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            if given.live:
                time.sleep(max(0.0, (at + timedelta(seconds=1) - datetime.now(UTC)).total_seconds()))


if __name__ == "__main__":
    main()
