"""What the rim tells about the requests it carries. Observers watch; nothing they do changes an answer."""

from __future__ import annotations

from typing import Protocol

from quire.types import FinishedRequest


class FrontendObserver(Protocol):
    """Times are in seconds, as a client would have measured them; counts are tokens of one answer."""

    def on_first(self, seconds: float) -> None:
        """An answer got its first token, so long after its call arrived."""

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None:
        """So many answers got `tokens` more each, so long after the ones before."""

    def on_end(self, ended: FinishedRequest) -> None:
        """An answer ended, in whatever way."""

    def on_refused(self, reason: str) -> None:
        """A call was turned away at the door."""

    def on_surplus(self, tokens: int) -> None:
        """The engine made tokens past a stop string or for a client that had left."""

    def text(self) -> bytes:
        """All of it as Prometheus text."""


class NoObserver:
    """Nobody watches."""

    def on_first(self, seconds: float) -> None: ...

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None: ...

    def on_end(self, ended: FinishedRequest) -> None: ...

    def on_refused(self, reason: str) -> None: ...

    def on_surplus(self, tokens: int) -> None: ...

    def text(self) -> bytes:
        return b""


class ObserverGroup:
    """Observers that all hear the same, in order."""

    def __init__(self, *observers: FrontendObserver) -> None:
        self._observers = observers

    def on_first(self, seconds: float) -> None:
        for observer in self._observers:
            observer.on_first(seconds)

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None:
        for observer in self._observers:
            observer.on_gap(seconds, tokens, answers)

    def on_end(self, ended: FinishedRequest) -> None:
        for observer in self._observers:
            observer.on_end(ended)

    def on_refused(self, reason: str) -> None:
        for observer in self._observers:
            observer.on_refused(reason)

    def on_surplus(self, tokens: int) -> None:
        for observer in self._observers:
            observer.on_surplus(tokens)

    def text(self) -> bytes:
        return b"".join([observer.text() for observer in self._observers])


class RequestObserver(Protocol):
    """Hears of each request where answers are made elsewhere. Times are moments of one clock, in seconds."""

    def on_ask(self, id: str, most: int, now: float) -> int:
        """A request came, and may get `most` tokens, 0 if it does not say. Returns what it is called from now on."""

    def on_sent(self, lane: int, where: str, now: float) -> None:
        """It goes to this server."""

    def on_made(self, lane: int, tokens: int, now: float) -> None:
        """So many more tokens came."""

    def on_end(self, lane: int, known_as: str, reason: str, prompt: int, tokens: int, now: float) -> None:
        """It is over. known_as: what its answer was called, '' if there was none; prompt: its tokens, 0 if untold."""


class NoRequestObserver:
    """Nobody watches."""

    def on_ask(self, id: str, most: int, now: float) -> int:
        return 0

    def on_sent(self, lane: int, where: str, now: float) -> None: ...

    def on_made(self, lane: int, tokens: int, now: float) -> None: ...

    def on_end(self, lane: int, known_as: str, reason: str, prompt: int, tokens: int, now: float) -> None: ...
