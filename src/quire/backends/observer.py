"""What the rim tells about the requests it carries. Observers watch; nothing they do changes an answer."""

from __future__ import annotations

from typing import Protocol


class RimObserver(Protocol):
    """Times are in seconds, as a client would have measured them; counts are tokens of one answer."""

    def on_first(self, seconds: float) -> None:
        """An answer got its first token, so long after its call arrived."""

    def on_gap(self, seconds: float, tokens: int) -> None:
        """An answer got `tokens` more, so long after the ones before."""

    def on_end(
        self,
        reason: str,
        *,
        choice: int,
        n: int,
        prompt: int,
        cached: int,
        tokens: int,
        max_tokens: int,
        first: float | None,
        seconds: float,
    ) -> None:
        """An answer ended. `first` is None if it never got a token; else both count from arrival."""

    def on_refused(self, reason: str) -> None:
        """A call was turned away at the door."""

    def on_surplus(self, tokens: int) -> None:
        """The engine made tokens past a stop string or for a client that had left."""

    def text(self) -> bytes:
        """All of it as Prometheus text."""


class Unobserved:
    """Nobody watches."""

    def on_first(self, seconds: float) -> None: ...

    def on_gap(self, seconds: float, tokens: int) -> None: ...

    def on_end(
        self,
        reason: str,
        *,
        choice: int,
        n: int,
        prompt: int,
        cached: int,
        tokens: int,
        max_tokens: int,
        first: float | None,
        seconds: float,
    ) -> None: ...

    def on_refused(self, reason: str) -> None: ...

    def on_surplus(self, tokens: int) -> None: ...

    def text(self) -> bytes:
        return b""
