"""Patterns: sequences of rows."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.operators.operator import Operator
from fordstone.operators.setting import OperatorSetting


def make_match(step: p.Match, setting: OperatorSetting) -> Operator:
    """The operator of a pattern."""
    raise PipelineError(f"step {step.name}: not there yet.")
