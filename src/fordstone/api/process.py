"""Keyed functions: what users derive from and declare, for `group_by(...).process(...)`.

These classes only declare: while the function runs, its states are those of `operators.process.cells`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

from fordstone.errors import ConfigError, PipelineError
from fordstone.lang.duration import positive_us
from fordstone.operators.process.step import Context
from fordstone.operators.process.store import Timer
from fordstone.plan import plan as p

__all__ = ["Context", "KeyedFunction", "ListState", "MapState", "Timer", "ValueState", "declared_states"]

Record = dict[str, Any]
Given = Iterable[Record] | Record | None
"""What a function may give: rows, one row, or nothing."""


class _Declared:
    """A state as it is declared. `ttl`: the time after its last write when it is dropped."""

    def __init__(self, kind: Any, type_: str, key_type: str | None, ttl: str | timedelta | None) -> None:
        self.kind = kind
        self.type = type_
        self.key_type = key_type
        self.ttl = ttl

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def clear(self) -> None:
        """Forget everything."""
        self._only_inside()

    def _only_inside(self, *_: object) -> NoReturn:
        raise PipelineError(
            f"state {getattr(self, 'name', '?')} has a value only while process() or on_timer() works on a key. Declare it in the "
            "body of the class, and reach it through self."
        )


class ValueState(_Declared):
    """One value per key: `last = ValueState("double", ttl="1h")`. Types are those of columns."""

    def __init__(self, type: str, *, ttl: str | timedelta | None = None) -> None:  # noqa: A002 - the word users expect
        super().__init__("value", type, None, ttl)

    def get(self, default: Any = None) -> Any:
        """The value, or `default` if there is none."""
        self._only_inside(default)

    def set(self, value: Any) -> None:
        """Remember a value; None is none."""
        self._only_inside(value)


class _Collection(_Declared):
    def __iter__(self) -> Iterator[Any]:
        self._only_inside()

    def __len__(self) -> int:
        return self._only_inside()


class ListState(_Collection):
    """Values in the order in which they were appended: `seen = ListState("string")`. With a ttl each is forgotten by itself."""

    def __init__(self, type: str, *, ttl: str | timedelta | None = None) -> None:  # noqa: A002 - the word users expect
        super().__init__("list", type, None, ttl)

    def get(self) -> list[Any]:
        """All values."""
        self._only_inside()

    def append(self, value: Any) -> None:
        """Remember one more, which is not None."""
        self._only_inside(value)

    def set(self, values: Iterable[Any]) -> None:
        """Remember these instead."""
        self._only_inside(values)


class MapState(_Collection):
    """Values by key, in the order in which the keys came: `counts = MapState("string", "bigint")`.

    With a ttl each entry is dropped that time after its own last write.
    """

    def __init__(self, key_type: str, type: str, *, ttl: str | timedelta | None = None) -> None:  # noqa: A002 - the word users expect
        super().__init__("map", type, key_type, ttl)

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or `default`."""
        self._only_inside(key, default)

    def pop(self, key: Any, default: Any = None) -> Any:
        """Forget a key, and give the value that it had, or `default`."""
        self._only_inside(key, default)

    def items(self) -> list[tuple[Any, Any]]:
        """All keys with their values."""
        self._only_inside()

    def __getitem__(self, key: Any) -> Any:
        self._only_inside(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._only_inside(key, value)

    def __delitem__(self, key: Any) -> None:
        self._only_inside(key)

    def __contains__(self, key: Any) -> bool:
        self._only_inside(key)


class KeyedFunction:
    """A function of the rows of each key, with state and timers. Derive from it, declare states, and write `process`.

    One object serves many keys and lives as long as its task, or shorter: what it is to remember of a key goes into
    states, and nothing into other attributes. After a crash rows are processed again, with the state of the checkpoint.
    """

    def process(self, row: Record, ctx: Context) -> Given:
        """Take a row of the key `ctx.key`; give any number of rows of the declared schema. Called for every row."""
        raise NotImplementedError(f"{type(self).__name__} has no process(row, ctx).")

    def on_timer(self, timer: Timer, ctx: Context) -> Given:
        """Take a timer of this key that fires; give any number of rows."""
        raise NotImplementedError(
            f"{type(self).__name__} sets timer {timer.name!r} for {ctx.key!r}, but has no on_timer(timer, ctx)."
        )


def declared_states(function: Any, step: str) -> tuple[p.KeyedState, ...]:
    """The states that a function's class declares, bases first; refuses what is no such class."""
    if not (inspect.isclass(function) and issubclass(function, KeyedFunction)):
        given = f"an object of {type(function).__name__}" if isinstance(function, KeyedFunction) else repr(function)
        raise PipelineError(f"step {step}: process takes a class that derives from KeyedFunction; this is {given}.")
    if function.process is KeyedFunction.process:
        raise PipelineError(f"step {step}: {function.__name__} has no process(row, ctx).")
    for method in (function.process, function.on_timer):
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise PipelineError(
                f"step {step}: {method.__qualname__} is async, and process does not wait for it. Write it without async."
            )
    needed = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]
    if needed:
        raise PipelineError(
            f"step {step}: {function.__name__} is constructed in every task, as {function.__name__}(); it cannot need "
            f"{', '.join(needed)}. Give defaults, or derive a class."
        )
    found: dict[str, _Declared] = {}
    for base in reversed(function.__mro__):
        for name, value in vars(base).items():
            found.pop(name, None)
            if isinstance(value, _Declared):
                found[name] = value
            elif inspect.isclass(value) and issubclass(value, _Declared):
                raise PipelineError(
                    f'step {step}: state {name} has no type. Write {name} = {value.__name__}("double").'
                )
    return tuple(_planned(name, state, step) for name, state in found.items())


def _planned(name: str, state: _Declared, step: str) -> p.KeyedState:
    where = f"step {step}: state {name}"
    for given in (state.type, state.key_type):
        if given is not None and not isinstance(given, str):
            raise PipelineError(f"{where}: {given!r} is not a type. Write its name, such as 'double'.")
    try:
        ttl_us = None if state.ttl is None else positive_us(state.ttl, what=f"{where}: ttl")
    except ConfigError as error:
        raise PipelineError(str(error)) from None
    return p.KeyedState(name=name, kind=state.kind, type=state.type, key_type=state.key_type, ttl_us=ttl_us)
