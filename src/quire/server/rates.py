"""What each key may ask for in a minute: requests, and tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from quire.errors import Overloaded

_MINUTE = 60.0


class Bucket:
    """Fills with time up to a minute's worth. It may be overdrawn, and is then closed until that is made up for."""

    __slots__ = ("_level", "_rate", "_seen")

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate, self._level, self._seen = per_minute / _MINUTE, per_minute, now

    def wait(self, least: float, now: float) -> float:
        """Seconds until `least` can be taken; 0: now."""
        if self._rate == math.inf:
            return 0.0
        self._level = min(self._level + (now - self._seen) * self._rate, self._rate * _MINUTE)
        self._seen = now
        return max(0.0, (least - self._level) / self._rate)

    def take(self, amount: float) -> None:
        self._level -= amount


class Rates:
    """The buckets of every key. requests, tokens: a minute, inf for no bound. clock: seconds."""

    def __init__(
        self, requests: float = math.inf, tokens: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests, self._tokens, self._clock = requests, tokens, clock
        self._of: dict[int, tuple[Bucket, Bucket]] = {}

    def admit(self, key: int) -> None:
        """One request more. Raises Overloaded, with the seconds until what was used too fast is made up for."""
        requests, tokens = self._buckets(key)
        now = self._clock()
        most, what, least = self._requests, "requests", 1.0
        wait = requests.wait(least, now)
        if not wait and (wait := tokens.wait(least, now)):
            most, what = self._tokens, "tokens"
        if wait:
            raise Overloaded(f"this key may use {most:g} {what} a minute", retry_after=wait, code="rate_limit_exceeded")
        requests.take(1.0)

    def spend(self, key: int, tokens: int) -> None:
        """Tokens of a prompt that was admitted, or of an answer that was generated."""
        self._buckets(key)[1].take(tokens)

    def meter(self, key: int) -> Callable[[int], None] | None:
        """What charges this key for tokens; None while there is no bound, so that nothing is counted then."""
        return None if self._tokens == math.inf else partial(self.spend, key)

    def _buckets(self, key: int) -> tuple[Bucket, Bucket]:
        if key not in self._of:
            now = self._clock()
            self._of[key] = Bucket(self._requests, now), Bucket(self._tokens, now)
        return self._of[key]
