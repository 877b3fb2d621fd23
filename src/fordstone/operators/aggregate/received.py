"""Whether partial aggregates that another machine has sent can be merged (rule 25).

Columns of partial rows are known by their names, which no user's column has. Most are numbers, and any number can be merged. Sketches
of different values are bytes that Apache DataSketches reads without looking: forged ones crash the process. Quantiles and collected
values are lists in pairs, which must fit each other.
"""

from __future__ import annotations

import re
import struct
from typing import Final

import numpy as np
import polars as pl

LEVEL_MAX: Final = 60
"""Of a quantile's value; one at level h stands for 2 to the power of h values, and these are counted in 64 bits."""

_DISTINCT: Final = re.compile(r"__hll(\d+)_\d+")
_QUANTILES: Final = re.compile(r"__kll(\d+)_values(\d+)")
_COLLECTED: Final = re.compile(r"__all_at(\d+)")

# A sketch of DataSketches: how many groups of four bytes stand before the content, version, family, size, size of its table, flags, number of
# values (of a list), mode; then the content.
_LIST, _SET, _FULL = (2, 8), (3, 9), (10, 10)
"""Length of the preamble and mode, for registers of eight bits."""
_VERSION_AND_FAMILY: Final = (1, 7)
_COMPACT, _OUT_OF_ORDER = 8, 16
_HEAD_BYTES: Final = 8
_SET_HEAD_BYTES: Final = 12
_FULL_HEAD_BYTES: Final = 40
_LIST_MAX: Final = 8
_SET_BITS_MIN: Final = 5
_REGISTER_MAX: Final = 63
_VALUE_SHIFT: Final = 26
_TOLERANCE: Final = 1e-6
_SLICE_ROWS: Final = 4096
_FEW_BYTES: Final = 128


def partial_problem(frame: pl.DataFrame) -> str | None:
    """What is wrong with the partial aggregates in these rows, as what comes after "it"; None: nothing, or there are none."""
    for name in frame.columns:
        if not name.startswith("__"):
            continue
        if (found := _DISTINCT.fullmatch(name)) is not None:
            problem = _distinct_problem(frame.get_column(name), int(found[1]))
        elif (found := _QUANTILES.fullmatch(name)) is not None:
            problem = _quantiles_problem(frame, name, f"__kll{found[1]}_levels{found[2]}")
        elif (found := _COLLECTED.fullmatch(name)) is not None:
            problem = _pair_problem(frame, name, f"__all{found[1]}")
        else:
            continue
        if problem is not None:
            return f"has partial aggregates in {name!r} that cannot be merged: {problem}"
    return None


def _distinct_problem(column: pl.Series, lg_k: int) -> str | None:
    if column.dtype != pl.Binary:
        return "sketches are bytes"
    # Each different one once: millions of rows of one sketch are a few bytes when they are compressed. In slices: objects of Python
    # take several times as much as the column.
    slices = column.drop_nulls().unique().to_frame().iter_slices(_SLICE_ROWS)
    problems = (sketch_problem(data, lg_k) for each in slices for data in each.to_series().to_list())
    return next((problem for problem in problems if problem is not None), None)


def sketch_problem(data: bytes, lg_k: int) -> str | None:
    """What is wrong with a sketch of different values; None: DataSketches can read it."""
    if len(data) < _HEAD_BYTES:
        return f"a sketch has {len(data)} bytes"
    kind, table_bits, flags = (data[0], data[7]), data[4], data[5]
    if tuple(data[1:3]) != _VERSION_AND_FAMILY or data[3] != lg_k or flags not in {_COMPACT, _COMPACT | _OUT_OF_ORDER}:
        return f"a sketch is not of size {lg_k}"
    if kind == _LIST:
        fits = 1 <= data[6] <= _LIST_MAX and table_bits == 3 and len(data) == _HEAD_BYTES + 4 * data[6]  # noqa: PLR2004
        return None if fits and _are_coupons(data[_HEAD_BYTES:]) else "a list of values is damaged"
    if kind == _SET and len(data) >= _SET_HEAD_BYTES:
        count = int.from_bytes(data[_HEAD_BYTES:_SET_HEAD_BYTES], "little")
        fits = _SET_BITS_MIN <= table_bits <= lg_k and 4 * count <= 3 << table_bits
        fits = fits and len(data) == _SET_HEAD_BYTES + 4 * count and count > 0
        return None if fits and _are_coupons(data[_SET_HEAD_BYTES:]) else "a set of values is damaged"
    if kind == _FULL and len(data) == _FULL_HEAD_BYTES + (1 << lg_k):
        return None if _are_registers(data) else "the registers of a sketch are damaged"
    return "a sketch is of no known form"


def _are_coupons(data: bytes) -> bool:
    if len(data) <= _FEW_BYTES:  # there may be a million of them, and each array costs more than its numbers
        few = struct.unpack(f"<{len(data) // 4}I", data)
        return min(few) >> _VALUE_SHIFT > 0 and len(set(few)) == len(few)
    coupons = np.frombuffer(data, dtype="<u4")
    return bool((coupons >> _VALUE_SHIFT > 0).all()) and np.unique(coupons).size == coupons.size


def _are_registers(data: bytes) -> bool:
    """Whether the sums in the head are those of the registers: estimates are computed from them."""
    estimate, low, high = np.frombuffer(data, dtype="<f8", count=3, offset=8).tolist()
    zeros, exceptions = np.frombuffer(data, dtype="<u4", count=2, offset=32).tolist()
    registers = np.frombuffer(data, dtype=np.uint8, offset=_FULL_HEAD_BYTES)
    counts = np.bincount(registers, minlength=_REGISTER_MAX + 1)
    if data[4] or data[6] or exceptions or counts.size > _REGISTER_MAX + 1 or zeros != counts[0]:
        return False
    weights = counts * 2.0 ** -np.arange(_REGISTER_MAX + 1)
    sums = (weights[:32].sum(), weights[32:].sum())
    return bool(
        np.isfinite(estimate)
        and estimate >= 0
        and np.allclose((low, high), sums, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=False)
    )


def _quantiles_problem(frame: pl.DataFrame, values: str, levels: str) -> str | None:
    problem = _pair_problem(frame, values, levels)
    if problem is not None:
        return problem
    above = frame.get_column(levels).list.max() > LEVEL_MAX
    return f"a level is above {LEVEL_MAX}" if above.any() else None


def _pair_problem(frame: pl.DataFrame, first: str, second: str) -> str | None:
    """Lists in pairs have the same lengths, and nulls at the same places."""
    if second not in frame.columns or not all(isinstance(frame.schema[name], pl.List) for name in (first, second)):
        return "one of a pair of lists is missing, or is not a list"
    one, other = frame.get_column(first), frame.get_column(second)
    if not one.list.len().eq_missing(other.list.len()).all():
        return "lists of a pair differ in length"
    nulls = (each.explode().is_null() for each in (one, other))
    return None if next(nulls).equals(next(nulls)) else "lists of a pair differ in their nulls"
