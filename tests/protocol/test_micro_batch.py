"""How a query on Spark continues from what is left of its logs."""

from __future__ import annotations

import pytest

from fordstone.protocol.micro_batch import LogRepair, NextPlan, decide_log_repair, decide_plan


@pytest.mark.parametrize(
    ("epoch", "recorded", "newest", "plan"),
    [
        pytest.param(1, False, 0, NextPlan.NEW, id="the first"),
        pytest.param(5, False, 4, NextPlan.NEW, id="the next"),
        pytest.param(4, True, 4, NextPlan.RECORDED, id="sealed, and Spark lost it"),
        pytest.param(2, True, 4, NextPlan.RECORDED, id="one of several"),
        pytest.param(1, False, 400, NextPlan.LOST, id="further back than records are kept"),
    ],
)
def test_an_epoch_that_was_sealed_is_planned_as_recorded_or_not_at_all(epoch, recorded, newest, plan):
    assert decide_plan(epoch, recorded=recorded, newest=newest) is plan


WHOLE, TORN = True, False


@pytest.mark.parametrize(
    ("offsets", "commits", "committed", "offsets_aside", "commits_aside"),
    [
        pytest.param({}, {}, -1, (), (), id="new"),
        pytest.param({0: WHOLE}, {}, -1, (), (), id="in the first batch"),
        pytest.param({0: WHOLE, 1: WHOLE}, {0: WHOLE, 1: WHOLE}, 1, (), (), id="stopped"),
        pytest.param({0: WHOLE, 1: WHOLE}, {0: WHOLE}, 0, (), (), id="in a batch"),
        pytest.param({0: WHOLE, 1: TORN}, {0: WHOLE}, 0, (1,), (), id="an offset is torn"),
        pytest.param({0: WHOLE, 1: WHOLE}, {0: WHOLE, 1: TORN}, 0, (), (1,), id="a commit is torn"),
        pytest.param({0: WHOLE}, {0: WHOLE, 1: WHOLE}, 0, (), (1,), id="an offset is gone"),
        pytest.param(
            {0: WHOLE, 1: TORN}, {0: WHOLE, 1: WHOLE}, 0, (1,), (1,), id="an offset is torn, its commit is whole"
        ),
        pytest.param(
            {0: WHOLE, 1: WHOLE, 2: WHOLE, 3: WHOLE},
            {0: WHOLE},
            0,
            (2, 3),
            (),
            id="commits of several batches are gone",
        ),
        pytest.param({0: WHOLE}, {0: TORN}, -1, (), (0,), id="the first commit is torn"),
        pytest.param({0: TORN}, {}, -1, (0,), (), id="the first offset is torn"),
        pytest.param({7: WHOLE, 8: WHOLE}, {}, -1, (7, 8), (), id="all commits are gone"),
        pytest.param({7: TORN, 8: WHOLE}, {7: WHOLE, 8: WHOLE}, 8, (7,), (), id="an old offset is torn"),
        pytest.param({7: WHOLE, 8: WHOLE}, {7: TORN, 8: WHOLE}, 8, (), (7,), id="an old commit is torn"),
    ],
)
def test_spark_continues_after_the_newest_batch_of_which_it_has_both_entries(
    offsets, commits, committed, offsets_aside, commits_aside
):
    wanted = LogRepair(committed=committed, offsets=offsets_aside, commits=commits_aside)
    assert decide_log_repair(offsets, commits) == wanted
