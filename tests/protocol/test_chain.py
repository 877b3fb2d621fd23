from __future__ import annotations

import hashlib
from functools import reduce

import pytest

from fordstone.protocol.chain import CHAIN_START, ChainFacts, PositionJudgement, chained, judge_position

FITS, BEYOND, DIFFERS, UNKNOWN = PositionJudgement


def test_a_chain_is_the_hash_of_the_chain_before_and_of_the_entry() -> None:
    first = hashlib.sha256(b"d1").hexdigest()
    assert chained(CHAIN_START, "d1") == first
    assert chained(first, "d2") == hashlib.sha256(f"{first}d2".encode()).hexdigest()


def test_a_chain_differs_for_another_order_content_or_length() -> None:
    histories = [("a", "b"), ("b", "a"), ("a", "c"), ("c", "b"), ("a",), ("a", "b", "b"), ()]
    assert len({reduce(chained, history, CHAIN_START) for history in histories}) == len(histories)


A, B, C = (digest * 64 for digest in "abc")
ONE, TWO, THREE = chained(CHAIN_START, A), chained(chained(CHAIN_START, A), B), chained(chained(CHAIN_START, B), B)


@pytest.mark.parametrize(
    ("epoch", "chain", "facts", "judgement"),
    [
        pytest.param(0, CHAIN_START, ChainFacts(), FITS, id="nothing was read"),
        pytest.param(0, CHAIN_START, ChainFacts(head=9, head_chain=C), FITS, id="nothing was read, of a long log"),
        pytest.param(1, ONE, ChainFacts(), BEYOND, id="the log does not know the node"),
        pytest.param(2, TWO, ChainFacts(head=1, head_chain=ONE, chain=TWO), BEYOND, id="the log ends before it"),
        pytest.param(2, TWO, ChainFacts(head=2, head_chain=TWO), FITS, id="at the head"),
        pytest.param(2, THREE, ChainFacts(head=2, head_chain=TWO), DIFFERS, id="at the head of another log"),
        pytest.param(1, ONE, ChainFacts(head=9, head_chain=C, chain=ONE), FITS, id="at a kept entry"),
        pytest.param(1, TWO, ChainFacts(head=9, head_chain=C, chain=ONE), DIFFERS, id="at a kept entry of another log"),
        pytest.param(1, ONE, ChainFacts(head=9, head_chain=C, following=(B, TWO)), FITS, id="before a kept entry"),
        pytest.param(1, TWO, ChainFacts(head=9, head_chain=C, following=(B, TWO)), DIFFERS, id="before one of another log"),
        pytest.param(1, ONE, ChainFacts(head=9, head_chain=C), UNKNOWN, id="nothing is kept around it"),
    ],
)  # fmt: skip
def test_a_position_is_compared_with_what_the_log_keeps_around_it(
    epoch: int, chain: str, facts: ChainFacts, judgement: PositionJudgement
):
    assert judge_position(epoch, chain, facts) is judgement
