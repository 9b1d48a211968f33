"""Progress as the front sees it: is work outstanding, and is the step it waits for late?"""

from __future__ import annotations

import math

from quire.engine.wire import Update


class Progress:
    """Of one engine process, from its start at `now` on. Times are one clock's seconds."""

    def __init__(self, now: float) -> None:
        self.idle = True
        self.due = math.inf
        """Seconds that the engine gives its next step; it says so with its first word."""
        self.told = False
        """Whether it has been asked where it is stuck."""
        self._since, self._step, self._sent = now, 0, 0

    def asked(self, now: float) -> None:
        """It is about to be sent work."""
        self._sent += 1
        if self.idle:
            self.idle, self._since = False, now

    def heard(self, update: Update, now: float) -> None:
        """It has spoken. That it was idle means nothing if it had not taken all it was sent."""
        self.idle, self.due = update.idle and update.taken == self._sent, update.due
        if update.step != self._step or self.idle:
            self._step, self._since, self.told = update.step, now, False

    def overdue(self, now: float) -> float:
        """By how many seconds the next step is late; 0 and below: it is not."""
        return 0.0 if self.idle else now - self._since - self.due
