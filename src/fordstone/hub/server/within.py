"""Wait for something with a bound in time that costs nothing where there is nothing to wait for.

Most requests come whole and most answers leave at once: a timer for each piece of them took eight times as long as this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What the work gives; `TimeoutError` if that takes longer. Its first steps are done before any timer is set."""
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    async with asyncio.timeout(seconds):
        return await _Rest(steps, waits_for)


class _Rest(Generic[T]):
    """Work that has begun, and waits for something."""

    def __init__(self, steps: Generator[Any, Any, T], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        try:
            yield self._waits_for
        except BaseException as error:  # noqa: BLE001 - whatever comes, a cancellation as a rule, is the work's to take
            try:
                again = self._steps.throw(error)
            except StopIteration as done:
                result: T = done.value
                return result
            yield again
        return (yield from self._steps)
