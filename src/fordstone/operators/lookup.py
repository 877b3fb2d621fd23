"""Lookups: rows with the columns of a table beside them."""

from __future__ import annotations

from fordstone.errors import PipelineError
from fordstone.model import plan as p
from fordstone.operators.operator import Operator
from fordstone.operators.setting import OperatorSetting


def make_lookup(step: p.Lookup, setting: OperatorSetting) -> Operator:
    """The operator of a lookup in a static table."""
    raise PipelineError(f"step {step.name}: not there yet.")


def make_lookup_latest(step: p.LookupLatest, setting: OperatorSetting) -> Operator:
    """The operator of a lookup in a control stream."""
    raise PipelineError(f"step {step.name}: not there yet.")


def make_lookup_side(step: p.LookupLatest, index: int, setting: OperatorSetting) -> Operator:
    """What brings the rows of one side into the form that the lookup takes."""
    raise PipelineError(f"step {step.name}: not there yet.")
