"""Keyed functions with state and timers."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.operators.operator import Operator
from fordstone.operators.setting import OperatorSetting


def make_process(step: p.Process, setting: OperatorSetting) -> Operator:
    """The operator of a keyed function."""
    raise PipelineError(f"step {step.name}: not there yet.")
