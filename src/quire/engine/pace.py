"""Progress as the front sees it: is work outstanding, and is the step it waits for late?"""

from __future__ import annotations

import math

from quire.engine.wire import Update


class StallDetector:
    """Of one engine process, from its start at `now` on. Times are one clock's seconds."""

    def __init__(self, now: float) -> None:
        self.idle = True
        self.step_timeout = math.inf
        """Seconds that the engine gives its next step; it says so with its first word."""
        self._num_taken = False
        """Whether it has been asked where it is stuck."""
        self._since, self._step, self._num_submitted = now, 0, 0

    def on_submit(self, now: float) -> None:
        """It is about to be sent work."""
        self._num_submitted += 1
        if self.idle:
            self.idle, self._since = False, now

    def on_update(self, update: Update, now: float) -> None:
        """It has spoken. That it was idle means nothing if it had not taken all it was sent."""
        self.idle, self.step_timeout = update.idle and update.num_submits == self._num_submitted, update.step_timeout
        if update.num_steps != self._step or self.idle:
            self._step, self._since, self._num_taken = update.num_steps, now, False

    def is_stalled(self, now: float) -> float:
        """By how many seconds the next step is late; 0 and below: it is not."""
        return 0.0 if self.idle else now - self._since - self.step_timeout
