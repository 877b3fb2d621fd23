"""Play the boxes of `cold_chain.py`: one reading a second of each, the same for the same seed; now and then one is far too warm.

python examples/cold_chain_devices.py in --devices 20 --seconds 30              all at once
python examples/cold_chain_devices.py in --devices 20 --seconds 30 --after 30   what comes then
python examples/cold_chain_devices.py in --devices 20 --seconds 30 --live       as time goes by, with the time of day
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
"""Every so many seconds a box is opened."""


def second(number: int, devices: int, seed: int, at: datetime, prefix: str) -> Iterator[dict[str, Any]]:
    """The readings of one second, a little out of order."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - the same readings for the same seed
    for box in range(devices):
        opened = (number + 5 * box) % WARM_EVERY == WARM_EVERY - 1
        temp = rng.gauss(2.0 + box % 5, 0.5) + (12.0 if opened else 0.0)
        moment = at - timedelta(milliseconds=rng.randrange(2000))
        yield {"device": f"{prefix}{box:03d}", "ts": moment.isoformat(), "temp": round(temp, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, help="the folder of the files")
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--after", type=int, default=0, help="begin so many seconds after the first reading of all")
    parser.add_argument("--live", action="store_true", help="write a second's readings a second, as of now")
    parser.add_argument("--prefix", default="box-", help="what names of boxes begin with")
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
