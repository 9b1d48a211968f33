"""Work that is begun where it is called does at once what it can, and the rest as any task would."""

from __future__ import annotations

import asyncio

import pytest

from quire.server.stream import start_eagerly

pytestmark = pytest.mark.anyio


async def test_what_need_not_wait_is_done_and_leaves_nothing_behind() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("all")

    assert start_eagerly(work()) is None
    assert done == ["all"]


async def test_what_waits_goes_on_when_what_it_waits_for_comes() -> None:
    first, second = asyncio.Event(), asyncio.get_running_loop().create_future()
    done: list[object] = []

    async def work() -> None:
        await first.wait()
        done.append("first")
        await asyncio.sleep(0)
        done.append(await second)

    task = start_eagerly(work())
    assert task is not None and not done
    first.set()
    second.set_result("second")
    await task
    assert done == ["first", "second"]


async def test_what_it_waits_for_may_fail_and_be_caught() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done: list[str] = []

    async def work() -> None:
        try:
            await future
        except ValueError as error:
            done.append(str(error))
            await asyncio.sleep(0)
            done.append("went on")

    task = start_eagerly(work())
    future.set_exception(ValueError("bad"))
    assert task is not None
    await task
    assert done == ["bad", "went on"]


async def test_errors_come_out_where_they_happen() -> None:
    async def at_once() -> None:
        raise ValueError("now")

    async def later() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    with pytest.raises(ValueError, match="now"):
        start_eagerly(at_once())
    task = start_eagerly(later())
    assert task is not None
    with pytest.raises(ValueError, match="later"):
        await task


async def test_it_can_be_cancelled_while_it_waits() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("up")

    task = start_eagerly(work())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["up"]
