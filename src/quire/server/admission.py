"""Who is let in: requests too many are refused before anything is made of them, the others read one after another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class AdmissionSlot:
    """One request's way in; `is_counted` from when its body is complete."""

    __slots__ = ("is_counted",)

    def __init__(self) -> None:
        self.is_counted = False


class AdmissionGate:
    """Of one event loop. admit: raises Overloaded unless one more can be queued besides so many that are being
    read, and Unavailable while there is no engine.

    Parsing a request and making token ids takes about a millisecond, refusing it a tenth of that, so a thousand
    requests that come at once must not all be read before the first refusal is written. One is read in each iteration
    of the loop, which also serves every socket that is ready, and the answers under way.
    """

    def __init__(self, admit: Callable[[int], None]) -> None:
        self._admit = admit
        self._num_counted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wake_handle: asyncio.Handle | None = None

    @contextmanager
    def slot(self) -> Iterator[AdmissionSlot]:
        """For a request whose head has come, until it is queued. Raises what `admit` does."""
        self._admit(self._num_counted)
        place = AdmissionSlot()
        try:
            yield place
        finally:
            self._num_counted -= place.is_counted

    async def wait_turn(self, place: AdmissionSlot | None = None) -> None:
        """Returns when a request whose body has come may be read; from now on it counts as queued, if it has a place:
        a body that comes slowly keeps nobody out. Raises what `admit` does."""
        if place is not None:
            self._admit(self._num_counted)
            self._num_counted += 1
            place.is_counted = True
        loop = asyncio.get_running_loop()
        if self._wake_handle is None:
            self._wake_handle = loop.call_soon(self._wake_next)
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _wake_next(self) -> None:
        self._wake_handle = None
        while self._waiting and self._wake_handle is None:
            first = self._waiting.popleft()
            if not first.done():  # its client may have gone
                first.set_result(None)
                self._wake_handle = asyncio.get_running_loop().call_soon(self._wake_next)
