"""One answer in the making: the engine's token ids in, final text out. No I/O and no event loop.

A call while it is answered: between the engine's steps and who reads.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from dataclasses import replace

from quire.errors import QuireError
from quire.frontend.interface import Call, Delta
from quire.tokenization.detokenizer import Detokenizer, StopFinder
from quire.tokenization.escape import escape_control_lines
from quire.types import RequestStepOutput, SamplingParams, TokenLogprobs

log = logging.getLogger("uvicorn.error")


_Read = tuple[str, int, str | None]
"""Text, the tokens behind it, and the stop string that ended it, if one did."""


class OutputProcessor:
    """Detokenises, finds stop strings, and so owns finish_reason and what usage counts.

    `id` is the engine's name for it. `count` are the tokens whose text was told or held back for a stop string;
    `num_surplus` those the engine made after one. `detokenize_seconds` is what all of this took. `eos` are the ids that
    end a text by themselves, unnamed.
    """

    __slots__ = (
        "_detokenizer",
        "_eos",
        "_finder",
        "_include",
        "_logprobs",
        "_min",
        "_prompt",
        "_searching",
        "_tokens",
        "cached",
        "count",
        "detokenize_seconds",
        "first",
        "id",
        "index",
        "last",
        "num_surplus",
    )

    def __init__(
        self,
        id: str,
        index: int,
        sampling: SamplingParams,
        *,
        detokenizer: Detokenizer,
        finder: StopFinder,
        eos: frozenset[int],
    ) -> None:
        self.id, self.index = id, index
        self.count = self.num_surplus = self.cached = 0
        self.first: float | None = None
        self.last: float | None = None
        self.detokenize_seconds = 0.0
        self._detokenizer, self._finder = detokenizer, finder
        self._include, self._min = sampling.include_stop_str_in_output, sampling.min_tokens
        self._searching = bool(sampling.stop)
        self._eos = frozenset() if sampling.ignore_eos else eos
        self._tokens: tuple[int, ...] = ()
        self._logprobs: tuple[TokenLogprobs, ...] = ()
        self._prompt: tuple[TokenLogprobs | None, ...] | None = None if sampling.prompt_logprobs is None else (None,)

    def process(self, event: RequestStepOutput) -> Delta | None:
        """What can be told after one engine step; None while everything is held back."""
        _, tokens, finish, _, logprobs, prompt, cached = event[:7]
        if prompt and self._prompt is not None:
            self._prompt += prompt
        if cached:
            self.cached = cached
        if finish is not None:
            return self._last(event, finish)
        text, used, stop = self._read(tokens)
        self._count(tokens, logprobs, used)
        if stop is not None:
            return self._delta(text, finish="stop", reason=stop)
        told = text or (tokens and self._prompt is not None)  # echoes wait for the prompt's scores
        return self._delta(text) if told else None

    def _last(self, event: RequestStepOutput, finish: str) -> Delta:
        """What is told at the engine's end of it; a stop string before that comes first."""
        if finish == "error":
            return self._delta("", finish="error", error=event.error)._replace(param=event.param, status=event.status)
        tokens, stopped = event.tokens, finish == "stop"
        hidden = stopped and event.stop_token is not None and not self._include
        text, used, stop = self._read(tokens[:-1] if hidden else tokens)
        self._count(tokens, event.logprobs, len(tokens) if stop is None else used)
        if stop is not None:
            return self._delta(text, finish="stop", reason=stop)
        named = stopped and event.stop_token not in self._eos
        last = self.end(finish, text, reason=event.stop_token if named else None)
        return last._replace(pooled=event.pooled) if event.pooled else last

    def end(self, finish: str, text: str = "", *, reason: int | str | None = None) -> Delta:
        """The last delta: nothing is held back any more, unless the last text completes a stop string."""
        rest = self._detokenizer.flush()
        if self._searching and rest:
            found = self._finder.feed(rest)
            if found.stop is not None:
                return self._delta(text + found.text, finish="stop", reason=found.stop)
            rest = found.text
        return self._delta(text + rest + self._finder.flush(), finish=finish, reason=reason)

    def _read(self, tokens: tuple[int, ...]) -> _Read:
        feed = self._detokenizer.feed
        if not self._searching:
            return feed(tokens), len(tokens), None
        texts = []
        for used, token in enumerate(tokens, 1):
            text = feed((token,))
            if self.count + used > self._min:
                text, stop = self._finder.feed(text)
                if stop is not None:
                    texts.append(text)
                    return "".join(texts), used, stop
            texts.append(text)
        return "".join(texts), len(tokens), None

    def _count(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], used: int) -> None:
        self.count += used
        self.num_surplus += len(tokens) - used
        self._tokens += tokens[:used]
        if logprobs:
            self._logprobs += logprobs[:used]

    def _delta(
        self, text: str, *, finish: str | None = None, reason: int | str | None = None, error: str | None = None
    ) -> Delta:
        """Hand over the tokens held back; log-probabilities of the prompt go with the first."""
        delta = Delta(self.index, text, self._tokens, self._logprobs, finish, reason, self._prompt, self.cached, error)
        self._tokens, self._logprobs, self._prompt = (), (), None
        return delta


def delta_of_error(answer: OutputProcessor, event: RequestStepOutput) -> Delta | None:
    """As `OutputProcessor.process`; an answer that cannot be put into words ends by itself, and no other with it."""
    try:
        return answer.process(event)
    except Exception as error:
        log.error("an answer could not be put into words:\n%s", escape_control_lines(traceback.format_exc()))
        why = f"this answer could not be put into words ({type(error).__name__})"
        return Delta(answer.index, "", finish_reason="error", error=why)


def sampling_for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The sampling of answer `choice`: log-probabilities of the prompt are computed once, for the first."""
    if choice == 0 or sampling.prompt_logprobs is None:
        return sampling
    return replace(sampling, prompt_logprobs=None)


class ActiveRequest:
    """A call being answered (see `ResultStream`). `processors` are of answers that go on; `deltas` are ready to be
    told; `num_tokens` are those of answers that ended.

    `error` ends the call for all its answers, after what is ready. on_close: hears when nobody reads on.
    """

    __slots__ = (
        "_on_close",
        "arrived",
        "call",
        "deltas",
        "error",
        "max_new",
        "num_tokens",
        "on_ready",
        "processors",
        "timer",
    )

    def __init__(self, call: Call, arrived: float, max_new: int, on_close: Callable[[ActiveRequest], None]) -> None:
        self.call, self.arrived, self.max_new, self._on_close = call, arrived, max_new, on_close
        self.processors: dict[str, OutputProcessor] = {}
        self.deltas: list[Delta] = []
        self.error: QuireError | None = None
        self.num_tokens = 0
        self.timer: asyncio.TimerHandle | None = None
        self.on_ready: Callable[[], None] = _no_reader

    def subscribe(self, news: Callable[[], None]) -> None:
        self.on_ready = news

    def take(self) -> list[Delta] | None:
        if self.deltas:
            ready, self.deltas = self.deltas, []
            return ready
        if self.error is not None:
            raise self.error
        return [] if self.processors else None

    def close(self) -> None:
        self.on_ready = _no_reader  # the reader knows us too: or only a search for garbage would find the two
        self._on_close(self)


def _no_reader() -> None:
    """Nobody listens yet."""
