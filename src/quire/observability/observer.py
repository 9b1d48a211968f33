"""Observers of requests: metrics, logs and traces. They do not influence answers."""

from __future__ import annotations

from typing import Any, Protocol

from quire.tokenization.prompt_header import HeaderOutcome
from quire.types import FinishedRequest


class FrontendObserver:
    """Observes answers. Times are in seconds, as a client measures them; counts are tokens of one answer.

    What a subclass leaves out does nothing.
    """

    def on_first(self, seconds: float) -> None:
        """The first token of an answer came `seconds` after its call."""

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None:
        """`answers` answers got `tokens` more tokens each, `seconds` after their previous ones."""

    def on_end(self, ended: FinishedRequest) -> None:
        """An answer ended, for any reason."""

    def on_refused(self, reason: str) -> None:
        """A call was refused on arrival."""

    def on_surplus(self, tokens: int) -> None:
        """The engine generated tokens after a stop string, or for a client that had disconnected."""

    def on_omitted_tool(self, kind: str) -> None:
        """A request was taken without a tool that it asked for, which this server lacks."""

    def on_stored_responses(self, responses: int, size: int) -> None:
        """So many responses, of so many bytes, are stored now. Called from any thread, as `on_evicted_response` is."""

    def on_evicted_response(self) -> None:
        """A stored response was removed for newer ones."""

    def on_prompt_header(self, outcome: HeaderOutcome) -> None:
        """The volatile header of a prompt was removed, or kept for one of the reasons."""

    def text(self) -> bytes:
        """The observations as Prometheus text."""
        return b""

    def latencies(self) -> dict[str, Any]:
        """`latency_ms` of `/stats`: percentiles of recent latencies by name, plain JSON."""
        return {}


class ObserverGroup(FrontendObserver):
    """Forwards to several observers, in order."""

    def __init__(self, *observers: FrontendObserver) -> None:
        self._observers = observers

    def on_first(self, seconds: float) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_first(seconds)

    def on_gap(self, seconds: float, tokens: int, answers: int = 1) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_gap(seconds, tokens, answers)

    def on_end(self, ended: FinishedRequest) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_end(ended)

    def on_refused(self, reason: str) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_refused(reason)

    def on_surplus(self, tokens: int) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_surplus(tokens)

    def on_omitted_tool(self, kind: str) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_omitted_tool(kind)

    def on_stored_responses(self, responses: int, size: int) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_stored_responses(responses, size)

    def on_evicted_response(self) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_evicted_response()

    def on_prompt_header(self, outcome: HeaderOutcome) -> None:
        """See FrontendObserver."""
        for observer in self._observers:
            observer.on_prompt_header(outcome)

    def latencies(self) -> dict[str, Any]:
        """See FrontendObserver."""
        return {name: found for observer in self._observers for name, found in observer.latencies().items()}

    def text(self) -> bytes:
        """See FrontendObserver."""
        return b"".join([observer.text() for observer in self._observers])


class RequestObserver(Protocol):
    """Observes requests that upstream servers answer. Times are readings of one clock, in seconds."""

    def on_ask(self, id: str, most: int, now: float) -> int:
        """A request came, for at most `most` tokens (0: unknown). Returns its number in the calls below."""

    def on_sent(self, number: int, where: str, now: float) -> None:
        """It was sent to the server `where`."""

    def on_made(self, number: int, tokens: int, now: float) -> None:
        """`tokens` more tokens came."""

    def on_end(self, number: int, known_as: str, reason: str, prompt: int, tokens: int, now: float) -> None:
        """It ended. known_as: the id of its answer, '' if there was none. prompt: its tokens, 0 if unknown."""
