"""Who is let in: requests too many are refused before anything is made of them, the others read one after another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Place:
    """One request's way in; `held` from when its body is complete."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = False


class Gate:
    """Of one event loop. admit: raises Overloaded unless one more can be queued besides so many that are being
    read, and Unavailable while there is no engine.

    Parsing a request and making token ids takes about a millisecond, refusing it a tenth of that, so a thousand
    requests that come at once must not all be read before the first refusal is written. One is read in each iteration
    of the loop, which also serves every socket that is ready, and the answers under way.
    """

    def __init__(self, admit: Callable[[int], None]) -> None:
        self._admit = admit
        self._held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._next: asyncio.Handle | None = None

    @contextmanager
    def place(self) -> Iterator[Place]:
        """For a request whose head has come, until it is queued. Raises what `admit` does."""
        self._admit(self._held)
        place = Place()
        try:
            yield place
        finally:
            self._held -= place.held

    async def turn(self, place: Place | None = None) -> None:
        """Returns when a request whose body has come may be read; from now on it counts as queued, if it has a place:
        a body that comes slowly keeps nobody out. Raises what `admit` does."""
        if place is not None:
            self._admit(self._held)
            self._held += 1
            place.held = True
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.call_soon(self._go_on)
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _go_on(self) -> None:
        self._next = None
        while self._waiting and self._next is None:
            first = self._waiting.popleft()
            if not first.done():  # its client may have gone
                first.set_result(None)
                self._next = asyncio.get_running_loop().call_soon(self._go_on)
