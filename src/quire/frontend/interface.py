"""The interface between the HTTP server and what answers requests: the native engine, or upstream servers."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from quire.frontend.beam_search import BeamSearchParams
from quire.tokenization.prompt_header import HeaderOutcome
from quire.tokenization.tokenizer import PoolingText, PoolingTokens
from quire.types import NO_TRACE_CONTEXT, Pin, PromptImage, PromptReport, SamplingParams, TokenLogprobs, TraceContext
from quire.weights.pooling import GENERATES, PoolerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A prompt to answer `sampling.n` times. prompt: token ids. text: the text they were encoded from, if any.

    id: unique, chosen by the server. timeout: seconds from arrival, inf for none. spend: called with the number of
    tokens that each step generated, whether or not the client reads them; None: they are not metered. omitted_tools:
    kinds of tools that the client asked for and this server lacks. pins: prefixes of the prompt to keep in the prefix
    cache, on the account of the tenant of `trace_context`. header: what became of the prompt's header, None where there
    is none. beams: how to search for the `sampling.n` likeliest answers; None: they are sampled. images: those in the
    prompt, in order.
    """

    id: str
    prompt: tuple[int, ...]
    text: str | None = None
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    timeout: float = math.inf
    trace_context: TraceContext = NO_TRACE_CONTEXT
    spend: Callable[[int], None] | None = None
    omitted_tools: tuple[str, ...] = ()
    pins: tuple[Pin, ...] = ()
    header: HeaderOutcome | None = None
    beams: BeamSearchParams | None = None
    images: tuple[PromptImage, ...] = ()


class Timings(NamedTuple):
    """When what happened to one answer, in seconds; None: it did not, or is not known.

    queued, prefill: from submission to a place on the device, and from there to the first token, as the engine measured
    it. first, decode, total: from arrival to the first token, from there to the last one, and from arrival to the end.
    prompt, cached, tokens: tokens of the prompt, those of them found in the prefix cache, and those of the answer.
    """

    queued: float | None
    prefill: float | None
    first: float | None
    decode: float | None
    total: float
    prompt: int
    cached: int
    tokens: int

    def to_json(self) -> dict[str, float | None]:
        """llama.cpp's `timings`, in milliseconds, with the times that only a server with a queue has."""
        prompt, decoded = self.prompt - self.cached, self.tokens - 1
        return {
            "queue_ms": _ms(self.queued),
            "first_token_ms": _ms(self.first),
            "total_ms": _ms(self.total),
            "cache_n": self.cached,
            "prompt_n": prompt,
            "prompt_ms": _ms(self.prefill),
            "prompt_per_second": round(prompt / self.prefill, 3) if self.prefill else None,
            "predicted_n": self.tokens,
            "predicted_ms": _ms(self.decode),
            "predicted_per_second": round(decoded / self.decode, 3) if self.decode else None,
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


class Delta(NamedTuple):
    """The new output of one choice since its previous delta.

    text: new text, final (never half a character or part of a stop string). tokens: its token ids, counted in usage.
    finish_reason: stop | length | abort | timeout | error, with the last delta of a choice. stop_reason: the stop
    string or stop token id that ended it; None for the model's own end tokens. logprobs: one for each of `tokens`, if
    requested. prompt_logprobs: with the first delta of choice 0, None for the first token. num_cached: prompt tokens
    whose K/V came from the prefix cache, with every delta. error, status, param: the message, the HTTP status and the
    request's field at fault, if any, where finish_reason is 'error'; `ResultStream.take` raises instead. pooled: the
    prompt as one float32 vector, with the last delta, if requested. report: of the prompt, with every delta. timings:
    with the last one.
    """

    # It hides tuple.index.
    index: int  # type: ignore[assignment]
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    num_cached: int = 0
    error: str | None = None
    param: str | None = None
    status: int = 500
    pooled: bytes = b""
    report: PromptReport | None = None
    timings: Timings | None = None


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResultStream(Protocol[T_co]):
    """A stream of results. Used from one event loop, by one reader, which closes it.

    The reader is notified by a callback, so that one step of the engine serves all readers without a task for each.
    """

    def subscribe(self, news: Callable[[], None]) -> None:
        """Set the callback for new results after all were taken, and for the end. It must not raise."""

    def take(self) -> Sequence[T_co] | None:
        """The results that are ready, possibly none; None at the end. After them, raises what ended the stream."""

    def close(self) -> None:
        """Stop reading; what is not finished is aborted."""


async def iterate(answers: ResultStream[T]) -> AsyncGenerator[Sequence[T], None]:
    """The results of a stream, those that are ready together as one list."""
    news = asyncio.Event()
    answers.subscribe(news.set)
    while (ready := answers.take()) is not None:
        if ready:
            yield ready
        else:
            news.clear()
            await news.wait()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model. aliases: names of it besides `id`. defaults: sampling fields of requests that do not say.

    infill_ends: token ids that end a text between a prompt and a suffix, besides the model's end of text. pools:
    whether it computes embeddings. device: what it runs on, as torch calls it. template_arguments: names that its chat
    template reads; template_kwargs: what it gets where requests do not say. tool_parser, reasoning_parser: how its
    answers are parsed (see `parsers.tools.styles` and `parsers.reasoning`). has_text: false if prompts and answers are
    token ids only. pooler: how prompts become vectors. eos: token ids that end a text.
    """

    id: str
    created: int
    max_model_len: int
    vocab_size: int = 0
    root: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = "hermes"
    reasoning_parser: str = "none"
    pools: bool = False
    template_arguments: frozenset[str] = frozenset()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    infill_ends: tuple[int, ...] = ()
    device: str = ""
    has_text: bool = True
    pooler: PoolerConfig = GENERATES
    eos: frozenset[int] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use, `id` first."""
        return (self.id, *self.aliases)


class Service(Protocol):
    """A backend of the HTTP server. Used from one event loop only."""

    async def start(self) -> None:
        """Return when ready to serve. Raises InvalidModel, InvalidConfig or Unavailable."""

    async def close(self) -> None:
        """Abort what is running and release everything."""

    def stats(self) -> dict[str, Any]:
        """`/stats`: the fields of docs/guides/serving.md, plain JSON."""

    def load(self) -> int:
        """`/load`: prompts being answered, including those in the queue."""

    def metrics(self) -> bytes:
        """`/metrics`: Prometheus text."""

    def alive(self) -> bool:
        """Liveness is progress: nothing is outstanding, or the step counter advances."""

    def ready(self) -> bool:
        """Whether calls are accepted."""

    async def drain(self, timeout: float) -> None:
        """Refuse new calls, wait up to `timeout` seconds for running ones, and abort the rest."""


class Backend(Service, Protocol):
    """A Service that answers parsed calls; `frontend.upstream` forwards requests unparsed instead.

    `encode`, `decode`, `render` and `token_text` may be used from any thread.
    """

    def model(self) -> ModelCard:
        """The served model."""

    def encode(self, text: str, *, add_special_tokens: bool = True, suffix: str = "") -> tuple[int, ...]:
        """Text to token ids. suffix: a text to fill in before; raises InvalidRequest where the model cannot."""

    def encode_inputs(
        self, inputs: Sequence[PoolingText], *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[PoolingTokens]:
        """Texts and pairs of texts to token ids, see `Tokenizer.encode_inputs`."""

    def decode(self, tokens: tuple[int, ...], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Chat messages to text by the model's chat template.

        options: tools, add_generation_prompt, continue_final_message, chat_template_kwargs.
        Raises InvalidRequest when the template refuses the messages.
        """

    def token_text(self, token: int) -> tuple[str, bytes]:
        """One token as text and as bytes, for log-probabilities."""

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Raises Unavailable while there is no engine."""

    def admit(self, more: int, coming: int = 0) -> None:
        """Raise Overloaded where `more` answers cannot be queued besides the `coming` ones, and Unavailable where
        calls are not accepted.

        The check of `answer`, before a request is parsed.
        """

    def answer(self, call: Call) -> ResultStream[Delta]:
        """Begin to answer. Raises Overloaded, InvalidRequest and Unavailable; `take` raises DeadlineExceeded before
        the first delta, Unavailable and StepFailed at any time. Closing aborts the call.
        """


_MAX_RETRY_AFTER = 60.0
"""Seconds."""


class DrainRate:
    """The recent rate at which requests end, from which Retry-After is computed. Times are in seconds of one clock."""

    def __init__(self, remembered: int = 64) -> None:
        self._times: deque[float] = deque(maxlen=remembered)

    def record(self, now: float) -> None:
        """A request ended."""
        self._times.append(now)

    def wait(self, backlog: int, now: float) -> float:
        """Whole seconds until `backlog` requests have ended at the recent rate: 1 to 60, 1 when nothing is known.

        The rate is measured up to now, so that it falls during a stall.
        """
        if len(self._times) < 2 or now <= self._times[0]:
            return 1.0
        rate = len(self._times) / (now - self._times[0])
        return min(max(math.ceil(backlog / rate), 1.0), _MAX_RETRY_AFTER)


@dataclass(kw_only=True, eq=False)
class DrainingService(ABC):
    """The part of a Service that drains it. Subclasses refuse calls while `_draining`, and set `_empty` when the last
    one has ended."""

    _drain_rate: DrainRate = field(default_factory=DrainRate)
    _draining: bool = False
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    @abstractmethod
    def load(self) -> int:
        """See Service."""

    @abstractmethod
    def _abort_all(self) -> None:
        """Abort every call."""

    async def drain(self, timeout: float) -> None:
        """See Service."""
        self._draining = True
        if self.load():
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), timeout)
            except TimeoutError:
                self._abort_all()
