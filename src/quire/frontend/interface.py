"""THE UPPER DOOR: what can answer requests. The native engine, an upstream server, a router: all are this."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from quire.parsers.reasoning import ReasoningParser
from quire.parsers.tools.styles import ToolParser
from quire.types import NO_TRACE_CONTEXT, SamplingParams, TokenLogprobs, TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One prompt to answer `sampling.n` times. `prompt` are token ids; `text` is what they were made of, if text.

    timeout: seconds from arrival, inf for none. `id` is unique and chosen by the server. spend: called with the number
    of tokens that each step generated, whether or not the client reads them; None: they are not metered.
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


class Delta(NamedTuple):
    """What one choice got since the last delta.

    text: new text, final (never half a character, never part of a stop string). tokens: the token ids behind it,
    counted in usage. finish_reason: stop | length | abort | timeout | error, with the last delta of a choice.
    stop_reason: the stop string or stop token id that ended it; None for the model's own end tokens.
    logprobs: per token in `tokens` when asked for. prompt_logprobs: with the first delta of choice 0, None for the
    first token. num_cached: prompt tokens whose K/V came from the prefix cache, with every delta. error: says what went
    wrong when finish_reason is 'error', status whose mistake it is and param which field of the request is to blame,
    if one is; `ResultStream.take` raises instead. pooled: the prompt as one vector of float32, with the last delta, if
    asked for.
    """

    index: int  # type: ignore[assignment] # nobody searches a delta, as tuple.index would
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached: int = 0
    error: str | None = None
    param: str | None = None
    status: int = 500
    pooled: bytes = b""


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResultStream(Protocol[T_co]):
    """What comes, as it comes. Used from one event loop, by one reader, who closes it.

    The reader is called, so that what a step brings to many readers is told in one pass, without a task for each.
    """

    def subscribe(self, news: Callable[[], None]) -> None:
        """From now on `news` is called when something comes while all is taken, and at the end. It raises nothing."""

    def take(self) -> Sequence[T_co] | None:
        """What is ready, possibly nothing; None once all has been told. Raises, after what is ready, what ends it."""

    def close(self) -> None:
        """Nobody reads on."""


async def iterate(answers: ResultStream[T]) -> AsyncGenerator[Sequence[T], None]:
    """For readers who have time to wait: what is ready together in one list."""
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
    """What /v1/models says of the model served. `defaults` are generation_config.json's sampling fields.

    pools: whether it gives embeddings. tool_parser, reasoning_parser: how its answers are told apart (see
    parsers.tools.styles and parsers.reasoning).
    """

    id: str
    created: int
    max_model_len: int
    vocab_size: int = 0
    root: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: ToolParser = "hermes"
    reasoning_parser: ReasoningParser = "none"
    pools: bool = False


class Service(Protocol):
    """What lives behind the HTTP side. Used from one event loop only."""

    async def start(self) -> None:
        """Return when ready to serve. Raises InvalidModel, InvalidConfig or Unavailable."""

    async def close(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        """`/stats`: the fields of docs/guides/serving.md, plain JSON."""

    def load(self) -> int:
        """`/load`: prompts being answered, those that wait included."""

    def metrics(self) -> bytes:
        """`/metrics`: Prometheus text."""

    def alive(self) -> bool:
        """Liveness means progress: nothing outstanding, or the step counter advances."""

    def ready(self) -> bool:
        """Whether calls are accepted now."""

    async def drain(self, timeout: float) -> None:
        """Refuse new calls, wait up to `timeout` seconds for those running, abort the rest."""


class Backend(Service, Protocol):
    """Answers calls that it understands; `frontend.upstream` passes on what it does not.

    `encode`, `decode`, `render` and `token_text` may be used from any thread.
    """

    def model(self) -> ModelCard: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]: ...

    def decode(self, tokens: tuple[int, ...], *, skip_special_tokens: bool = False) -> str: ...

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Chat messages to text by the model's chat template.

        options: tools, add_generation_prompt, continue_final_message, chat_template_kwargs.
        Raises InvalidRequest when the template refuses the messages.
        """

    def token_text(self, token: int) -> tuple[str, bytes]:
        """How one token is shown in log-probabilities: as text, and as its exact bytes."""

    def reset_prefix_cache(self) -> None:
        """Calls from now on find nothing computed before. Raises Unavailable where there is no engine just now."""

    def admit(self, more: int, coming: int = 0) -> None:
        """Raises Overloaded where so many more answers cannot be queued, besides `coming` that will be asked for, and
        Unavailable where nothing is answered now.

        As `answer` would, but before anything is made of a request. Cheap.
        """

    def answer(self, call: Call) -> ResultStream[Delta]:
        """Begin. Raises Overloaded, InvalidRequest and Unavailable; `take` raises DeadlineExceeded before the first
        delta, Unavailable and StepFailed at any time. Closing aborts the call.
        """
