"""A bound in time that is free for what is done at once, and holds for what is not."""

from __future__ import annotations

import asyncio

import pytest

from fordstone.hub.server.within import within

LONG_S = 60.0


def test_what_is_done_at_once_sets_no_timer(monkeypatch: pytest.MonkeyPatch):
    async def work() -> int:
        return 7

    async def main() -> int:
        monkeypatch.setattr(asyncio, "timeout", None)
        return await within(LONG_S, work())

    assert asyncio.run(main()) == 7


def test_what_waits_several_times_gives_its_result():
    async def work() -> list[int]:
        loop, found = asyncio.get_running_loop(), []
        for number in range(3):
            future = loop.create_future()
            loop.call_soon(future.set_result, number)
            found.append(await future)
        return found

    assert asyncio.run(within(LONG_S, work())) == [0, 1, 2]


def test_an_error_comes_through_before_and_after_the_first_wait():
    async def work(*, waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError("mine")

    for waits in (False, True):
        with pytest.raises(KeyError, match="mine"):
            asyncio.run(within(LONG_S, work(waits=waits)))


def test_what_takes_longer_is_cancelled_and_told_as_a_time_out():
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        asyncio.run(within(0.01, work()))
    assert ended == ["cancelled"]


def test_work_that_tidies_up_when_it_is_cancelled_is_waited_for():
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ended.append("tidy")

    with pytest.raises(TimeoutError):
        asyncio.run(within(0.01, work()))
    assert ended == ["tidy"]


def test_whoever_is_cancelled_from_outside_stays_cancelled():
    async def main() -> None:
        task = asyncio.create_task(within(LONG_S, asyncio.Event().wait()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
