"""Deduplication by key within a time."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.operators.operator import Operator
from fordstone.operators.setting import OperatorSetting


def make_deduplicate(step: p.Deduplicate, setting: OperatorSetting) -> Operator:
    """The operator of a deduplication."""
    raise PipelineError(f"step {step.name}: not there yet.")
