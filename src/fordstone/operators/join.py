"""Interval join of two streams."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.operators.operator import Operator
from fordstone.operators.setting import OperatorSetting


def make_join(step: p.Join, setting: OperatorSetting) -> Operator:
    """The operator of an interval join."""
    raise PipelineError(f"step {step.name}: not there yet.")


def make_join_side(step: p.Join, index: int, setting: OperatorSetting) -> Operator:
    """What brings the rows of one side into the form that the join takes."""
    raise PipelineError(f"step {step.name}: not there yet.")
