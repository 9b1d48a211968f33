"""Coroutines that seldom have to wait, begun where they are called."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def start_eagerly(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` up to where it has to wait; the rest of it as a task, None if there is no rest.

    Most of what a server writes goes out at once: a task for that would cost more than the writing. (Python 3.12 has
    tasks that start eagerly, one object for each all the same.) Raises what `work` raises until it waits.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return asyncio.ensure_future(_continue(work, awaited))


async def _continue(work: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _drive(work, awaited)


@types.coroutine
def _drive(work: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """What it waits for is handed on to the loop, and what comes of that handed back, as `yield from` does."""
    try:
        while True:
            try:
                came = yield awaited
            except BaseException as error:
                awaited = work.throw(error)
            else:
                awaited = work.send(came)
    except StopIteration:
        return
