from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from fordstone.spark.hosted.stop_mark import StopMark


@pytest.fixture(params=["disk", "url"])
def mark(request: pytest.FixtureRequest, tmp_path: Path) -> StopMark:
    return StopMark(str(tmp_path / "_spark") if request.param == "disk" else f"memory://{uuid4().hex}/_spark")


def test_a_mark_stands_from_when_it_is_put_until_it_is_taken_away(mark: StopMark):
    other = StopMark(mark.checkpoint)
    assert not other.stands()
    mark.put()
    mark.put()
    assert other.stands()
    mark.take_away()
    mark.take_away()
    assert not other.stands()
