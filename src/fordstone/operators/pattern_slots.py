"""What is kept of the rows that stages have taken: one state a slot, carried on from row to row.

A state is plain data and never changes: taking a row makes a new one. Read, it gives the slot's value in plain form.
Means and sums go row by row from the first, so they are the same however often a match was stored in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, Final

from fordstone.model.pattern_terms import Slot
from fordstone.operators.scalar import less, wrapped

Take = Callable[[Any, Any], Any]
"""The state behind a row: of the state before it, and the value of the slot's argument in it."""
Read = Callable[[Any], Any]
_EXACT: Final = Context(prec=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How a slot is kept. `value` is which of a row's values it takes; None: none, it counts rows."""

    stage: int | None
    value: int | None
    start: Any
    take: Take
    read: Read


def kept(slot: Slot, value: int | None) -> Kept:
    """How a slot is kept."""
    start, take, read = _KINDS[slot.function](slot)
    return Kept(stage=slot.stage, value=value, start=start, take=take, read=read)


def _itself(state: Any) -> Any:
    return state


def _last(slot: Slot) -> tuple[Any, Take, Read]:
    if not slot.offset:
        return None, lambda _, value: value, _itself
    most = slot.offset + 1
    return (), lambda state, value: (*state, value)[-most:], lambda state: state[0] if len(state) == most else None


def _first(slot: Slot) -> tuple[Any, Take, Read]:
    most = slot.offset + 1
    return (
        (),
        lambda state, value: state if len(state) == most else (*state, value),
        lambda state: state[-1] if len(state) == most else None,
    )


def _count(slot: Slot) -> tuple[Any, Take, Read]:
    if slot.argument is None:
        return 0, lambda state, _: state + 1, _itself
    return 0, lambda state, value: state + (value is not None), _itself


def _sum(slot: Slot) -> tuple[Any, Take, Read]:
    if slot.type.name == "decimal":
        return None, _add_decimal, lambda state: _fitting(state, slot.type.precision)
    add: Take = (lambda state, value: wrapped(state + value)) if slot.type.is_integer else lambda a, b: a + b
    return None, lambda state, value: _skipping_nulls(add, state, value), _itself


def _add_decimal(state: Decimal | None, value: str | None) -> Decimal | None:
    if value is None:
        return state
    return Decimal(value) if state is None else _EXACT.add(state, Decimal(value))


def _fitting(state: Decimal | None, precision: int) -> str | None:
    """The sum as text; null if it has more digits than its type."""
    if state is None or len(state.as_tuple().digits) > precision:
        return None
    return f"{state:f}"


def _mean(_: Slot) -> tuple[Any, Take, Read]:
    def take(state: tuple[float, int], value: float | None) -> tuple[float, int]:
        return state if value is None else (state[0] + value, state[1] + 1)

    return (0.0, 0), take, lambda state: state[0] / state[1] if state[1] else None


def _extreme(slot: Slot, *, greatest: bool) -> tuple[Any, Take, Read]:
    of: Read = Decimal if slot.type.name == "decimal" else _itself  # decimals are kept as text

    def best(state: Any, value: Any) -> Any:
        wins = less(of(state), of(value)) if greatest else less(of(value), of(state))
        return value if wins else state

    return None, lambda state, value: _skipping_nulls(best, state, value), _itself


def _skipping_nulls(take: Take, state: Any, value: Any) -> Any:
    return state if value is None else value if state is None else take(state, value)


_KINDS: Final[dict[str, Callable[[Slot], tuple[Any, Take, Read]]]] = {
    "last": _last,
    "first": _first,
    "count": _count,
    "sum": _sum,
    "mean": _mean,
    "min": lambda slot: _extreme(slot, greatest=False),
    "max": lambda slot: _extreme(slot, greatest=True),
}


def starts(slots: Sequence[Kept]) -> tuple[Any, ...]:
    """The states before any row."""
    return tuple(slot.start for slot in slots)
