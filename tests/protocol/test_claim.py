"""Which writer may release to a sink, as a table of claims."""

import pytest

from fordstone.protocol.claim import Keep, OwnedByNewer, SinkWriter, Take, decide_claim


def writer(
    hub: int, local: int = 1, *, holder: str = "me", node: str = "n", pipeline: str = "p", start: str = ""
) -> SinkWriter:
    return SinkWriter(
        pipeline=pipeline, node=node, holder=holder, start=start or f"{holder}{hub}.{local}", hub=hub, local=local
    )


MINE = writer(2, 5)
CASES = [
    ("a sink that nobody has", [], Take()),
    ("this start again", [MINE], Keep()),
    ("an earlier start of this directory", [writer(2, 4)], Take()),
    ("an earlier generation of this directory", [writer(1, 9)], Take()),
    ("this directory before it had a hub", [writer(0, 9)], Take()),
    ("a copy of this directory that was started as often", [writer(2, 5, start="copy")], Take()),
    ("a later start of this directory: this one is an old copy", [writer(2, 6)], OwnedByNewer(by=writer(2, 6))),
    ("another directory that was fenced", [writer(1, 99, holder="other")], Take()),
    ("another directory that took over", [writer(3, 1, holder="other")], OwnedByNewer(by=writer(3, 1, holder="other"))),
    ("another directory without a hub", [writer(0, 99, holder="other")], Take()),
    ("the same number from a hub that was restored", [writer(2, 9, holder="other")], Take()),
    ("another node, whose generations are not comparable", [writer(9, 9, holder="other", node="m")], Take()),
    ("another pipeline", [writer(9, 9, holder="other", pipeline="q")], Take()),
    ("mine, beside one that is left of a crash", [MINE, writer(1, 1, holder="other")], Take()),
    ("mine, beside a newer one", [MINE, writer(3, 1, holder="other")], OwnedByNewer(by=writer(3, 1, holder="other"))),
    (
        "two newer ones: the newest is named",
        [writer(3, 1, holder="a"), writer(4, 1, holder="b")],
        OwnedByNewer(by=writer(4, 1, holder="b")),
    ),
]


@pytest.mark.parametrize(("found", "decision"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_claims_are_judged(found: list[SinkWriter], decision: object) -> None:
    assert decide_claim(found, MINE) == decision


def test_without_a_hub_another_directory_may_take_the_sink() -> None:
    assert decide_claim([writer(0, 99, holder="lost")], writer(0, 1)) == Take()
    assert decide_claim([writer(1, 1, holder="granted")], writer(0, 9)) == OwnedByNewer(
        by=writer(1, 1, holder="granted")
    )


def test_on_purpose_a_state_without_a_hub_takes_the_sink_and_one_that_was_fenced_does_not() -> None:
    granted = writer(2, 1, holder="granted")
    assert decide_claim([granted], writer(0, 9), restored=True) == Take()
    assert decide_claim([granted], writer(1, 9), restored=True) == OwnedByNewer(by=granted)
    assert decide_claim([writer(2, 9)], MINE, restored=True) == Take()
