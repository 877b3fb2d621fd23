"""The hub takes exactly the names and digests that the rest of the project makes."""

from __future__ import annotations

import msgspec
import pytest

from fordstone.epochs.run_file import is_digest
from fordstone.errors import PipelineError
from fordstone.hub.messages import Digest, Name, Rejection
from fordstone.hub.server.routes import check_path
from fordstone.plan.ids import checked_name

NAMES = [
    *("a", "_", "0", "a.b", "a.b.c", "a-", "a.", "a" * 100),
    *("", ".", "..", ".a", "-a", "a..b", "a..", "a" * 101, "a b", "a\n", "a\n..", "a%", "é", "a\u0661", "a\0"),
]
DIGESTS = ["0" * 64, "af" * 32, "", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", "\u0661" * 64]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_in_a_plan_in_a_body_and_in_a_path(name: str) -> None:
    try:
        expected = checked_name(name, "stream") == name
    except PipelineError:
        expected = False
    assert converts(name, Name) == expected
    try:
        check_path(b"/v1/" + name.encode())
    except Rejection:
        assert not expected
    else:
        assert expected


@pytest.mark.parametrize("digest", DIGESTS)
def test_a_digest_is_one_in_a_body_and_in_a_file_name(digest: str) -> None:
    assert converts(digest, Digest) == is_digest(digest)


def converts(text: str, kind: object) -> bool:
    try:
        msgspec.convert(text, kind)
    except msgspec.ValidationError:
        return False
    return True
