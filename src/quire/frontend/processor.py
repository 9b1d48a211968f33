"""Input and output processing: a call to the engine's requests, and the engine's token ids to text. No I/O."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidRequest, QuireError, escape_control_lines
from quire.frontend.interface import Call, Delta, Timings
from quire.frontend.prompt_logprobs import PromptLogprobs
from quire.tokenization.detokenizer import Detokenizer, NoText, StopFinder, StopStrings
from quire.tokenization.no_tokenizer import without_text
from quire.tokenization.tokenizer import Tokenizer
from quire.types import (
    BACKGROUND,
    Pooling,
    PromptReport,
    Request,
    RequestStepOutput,
    SamplingParams,
    TokenLogprobs,
    answer_id,
)
from quire.weights.pooling import GENERATES, PoolerConfig

log = logging.getLogger("uvicorn.error")

_CONTEXT = 16
"""Tokens of the prompt that the first space of an answer may depend on."""

_SEEDS = (1 << 64) - 1
"""Seeds are taken modulo 2^64, as in PyTorch: -1 is 2^64 - 1."""


def requests(
    call: Call,
    *,
    tokenizer: Tokenizer,
    limit: int,
    seed: int,
    deadline: float = math.inf,
    pooler: PoolerConfig = GENERATES,
) -> list[Request]:
    """A Request for each of the `n` answers.

    limit: the longest sequence in tokens, prompt included. seed: for calls without one. deadline: on the engine's
    clock. Raises InvalidRequest with the counts when prompt and answer do not fit, and for an answer in text of a
    model that only pools.
    """
    sampling = call.sampling if tokenizer.has_text else without_text(call.sampling)
    if sampling.bad_words and not sampling.bad_words_token_ids:
        sampling = replace(sampling, bad_words_token_ids=bad_words(sampling.bad_words, tokenizer))
    if pooler.generates:
        max_new = max_new_tokens(len(call.prompt), sampling, limit)
    else:
        max_new = 1
        check_pooled(len(call.prompt), sampling.pooling, limit, pooler)
    seed = (seed if sampling.seed is None else sampling.seed) & _SEEDS
    eos = frozenset() if sampling.ignore_eos else tokenizer.eos
    salt = hashed_salt(call.cache_salt, call.trace_context.tenant)
    ids = [answer_id(call.id, choice) for choice in range(sampling.n)]
    # Log-probabilities of the prompt are computed for the first answer only.
    others = sampling if sampling.prompt_logprobs is None else replace(sampling, prompt_logprobs=None)
    stop = eos.union(sampling.stop_token_ids)
    return [
        Request(
            id=id,
            prompt=call.prompt,
            max_new_tokens=max_new,
            sampling=others if choice else sampling,
            stop=stop,
            seed=seed,
            choice=choice,
            priority=call.priority,
            deadline=deadline,
            cache_salt=salt,
            pins=call.pins,
            owner=call.trace_context.tenant,
            images=call.images,
        )
        for choice, id in enumerate(ids)
    ]


def output_processor(
    request: Request, tokenizer: Tokenizer, stops: StopStrings, *, whole: bool = False
) -> OutputProcessor:
    """The OutputProcessor of `request`. stops: its stop strings, shared by its `n` answers. whole: no caller reads the
    answer before its end."""
    sampling = request.sampling
    skip = sampling.skip_special_tokens
    text = tokenizer.detokenizer(skip_special_tokens=skip, context=request.prompt[-_CONTEXT:])
    return OutputProcessor(
        request.id,
        request.choice,
        sampling,
        detokenizer=text if sampling.detokenize else NoText(),
        finder=StopFinder(stops, include=sampling.include_stop_str_in_output) if sampling.stop else None,
        eos=frozenset() if sampling.ignore_eos else tokenizer.eos,
        prompt_logprobs=None if sampling.prompt_logprobs is None else [],
        whole=whole,
    )


def max_new_tokens(prompt: int, sampling: SamplingParams, limit: int) -> int:
    """The number of tokens that may follow a prompt of `prompt` tokens. Raises InvalidRequest with the counts."""
    if not prompt:
        raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
    if prompt + 1 > limit:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens, and this model's context holds {limit}, at least one of them "
            "for the answer: shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if sampling.max_tokens is None:
        return limit - prompt
    if prompt + sampling.max_tokens > limit:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens and max_tokens is {sampling.max_tokens}: together "
            f"{prompt + sampling.max_tokens}, and this model's context holds {limit}. "
            f"Ask for at most {limit - prompt}, or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return sampling.max_tokens


def check_priority(priority: int | None, used: bool) -> None:
    """Raise InvalidRequest for a priority where the scheduling policy has none, and from BACKGROUND on.

    used: whether it has. Priorities from BACKGROUND on are the server's own.
    """
    if priority and not used:
        raise InvalidRequest(
            "priority has no effect with this server's scheduling policy: set the option scheduling_policy "
            "(--scheduling-policy) to priority",
            param="priority",
        )
    if priority and not -BACKGROUND < priority < BACKGROUND:
        raise InvalidRequest(
            f"priority must be between {1 - BACKGROUND} and {BACKGROUND - 1}, lower being sooner, "
            f"not {str(priority)[:24]}",
            param="priority",
        )


class Encoder(Protocol):
    """A tokenizer, or a backend that has one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Text to token ids."""


def bad_words(words: Sequence[str], tokenizer: Encoder) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, at the beginning of a text and after a space. Raises InvalidRequest."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for form in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(form, add_special_tokens=False)
            if not word.strip() or not ids:
                raise InvalidRequest(f"{word!r} cannot be turned into tokens", param="bad_words")
            sequences[ids] = None
    return tuple(sequences)


def hashed_salt(salt: str, tenant: str = "") -> str:
    """The cache salt of a request as 32 characters, whatever its length.

    The tenant is the key of the hash, so that no salt that a client chooses equals another tenant's.
    """
    if not salt and not tenant:
        return ""
    data = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16, key=tenant.encode()).hexdigest()


_Read = tuple[str, int, str | None]
"""Text, its number of tokens, and the stop string that ended it, if any."""


@dataclass(slots=True, eq=False)
class OutputProcessor:
    """Turns the tokens of one answer into text: detokenizes, finds stop strings and decides finish_reason.

    id: of the engine's request. finder: None where there are no stop strings. eos: the end-of-text ids, which are no
    stop_reason. prompt_logprobs: of each step, those that have not been sent; None if they are not requested. whole:
    whether there is one delta, at the end, and tokens become text then. count: tokens in usage. num_surplus: tokens
    that the engine generated after a stop string. detokenize_seconds: time spent here.
    """

    id: str
    index: int
    sampling: SamplingParams
    detokenizer: Detokenizer
    finder: StopFinder | None
    eos: frozenset[int]
    prompt_logprobs: list[Sequence[TokenLogprobs]] | None
    whole: bool = False
    count: int = 0
    num_surplus: int = 0
    cached: int = 0
    first: float | None = None
    last: float | None = None
    report: PromptReport | None = None
    detokenize_seconds: float = 0.0
    _tokens: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of tokens that no delta has had: mostly those of one step, which are passed on as they come."""
    _text: str = ""
    """The text of an only delta, as far as it has been searched for stop strings."""

    def process(self, event: RequestStepOutput) -> Delta | None:
        """The delta after one step of the engine; None while all text is held back."""
        _, tokens, finish, _, logprobs, prompt, cached = event[:7]
        if prompt and self.prompt_logprobs is not None:
            self.prompt_logprobs.append(prompt)
        if cached:
            self.cached = cached
        if event.report is not None:
            self.report = event.report
        if finish is not None:
            return self._last(event, finish)
        if self.finder is None:
            self.count += len(tokens)
            self._tokens += tokens
            self._logprobs += logprobs
            if self.whole:
                return None
            text = self.detokenizer.feed(tokens)
        else:
            text, used, stop = self._read(tokens)
            self._count(tokens, logprobs, used)
            if stop is not None:
                return self._delta(self._unread() + text, finish="stop", reason=stop)
            if self.whole:
                self._text += text
                return None
        # Log-probabilities of the prompt are sent with the first tokens, even where those have no text yet.
        whole = self.prompt_logprobs is not None or not self.sampling.detokenize
        return self._delta(text) if text or (tokens and whole) else None

    def _last(self, event: RequestStepOutput, finish: str) -> Delta:
        """The delta where the engine ended the answer, unless a stop string is found before."""
        kept = self._unread()
        if finish == "error":
            return self._delta(kept, finish="error", error=event.error)._replace(param=event.param, status=event.status)
        tokens = event.tokens
        stopped = finish == "stop"
        hidden = stopped and event.stop_token is not None and not self.sampling.include_stop_str_in_output
        text, used, stop = self._read(tokens[:-1] if hidden else tokens)
        self._count(tokens, event.logprobs, len(tokens) if stop is None else used)
        if stop is not None:
            return self._delta(kept + text, finish="stop", reason=stop)
        named = stopped and event.stop_token not in self.eos
        last = self.end(finish, kept + text, reason=event.stop_token if named else None)
        return last._replace(pooled=event.pooled) if event.pooled else last

    def end(self, finish: str, text: str = "", *, reason: int | str | None = None) -> Delta:
        """The last delta, with all text that was held back, up to a stop string."""
        text += self._unread()
        rest = self.detokenizer.flush()
        if self.finder is not None:
            found = self.finder.feed(rest)
            if found.stop is not None:
                return self._delta(text + found.text, finish="stop", reason=found.stop)
            rest = found.text + self.finder.flush()
        return self._delta(text + rest, finish=finish, reason=reason)

    def _unread(self) -> str:
        """The text so far of an only delta, which is made now."""
        kept, self.whole = self.whole, False
        if not kept:
            return ""
        return self.detokenizer.feed(self._tokens) if self.finder is None else self._text

    def _read(self, tokens: tuple[int, ...]) -> _Read:
        feed = self.detokenizer.feed
        finder = self.finder
        if finder is None:
            return feed(tokens), len(tokens), None
        text = ""
        for used, token in enumerate(tokens, 1):
            piece = feed((token,))
            if self.count + used > self.sampling.min_tokens:
                piece, stop = finder.feed(piece)
                if stop is not None:
                    return text + piece, used, stop
            text += piece
        return text, len(tokens), None

    def _count(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], used: int) -> None:
        self.count += used
        self.num_surplus += len(tokens) - used
        self._tokens += tokens[:used]
        self._logprobs += logprobs[:used]

    def _delta(
        self, text: str, *, finish: str | None = None, reason: int | str | None = None, error: str | None = None
    ) -> Delta:
        """A delta with the tokens since the previous one; log-probabilities of the prompt go with the first."""
        delta = Delta(
            self.index,
            text,
            tuple(self._tokens),
            tuple(self._logprobs),
            finish,
            reason,
            None if self.prompt_logprobs is None else PromptLogprobs(self.prompt_logprobs),
            self.cached,
            error,
            report=self.report,
        )
        self._tokens, self._logprobs = [], []
        self.prompt_logprobs = None
        return delta


def timings(answer: OutputProcessor, prompt: int, arrived: float, now: float) -> Timings:
    """The times of an answer to `prompt` tokens that ends `now`. arrived: when its call came, on the same clock."""
    report, first, last = answer.report, answer.first, answer.last
    return Timings(
        queued=None if report is None else report.queued,
        prefill=None if report is None else report.prefill,
        first=None if first is None else first - arrived,
        decode=None if first is None or last is None else last - first,
        total=now - arrived,
        prompt=prompt,
        cached=answer.cached,
        tokens=answer.count,
    )


def delta_of_error(answer: OutputProcessor, event: RequestStepOutput) -> Delta | None:
    """`OutputProcessor.process`, whose unexpected errors end this answer only."""
    try:
        return answer.process(event)
    except Exception as error:
        log.error("an answer could not be detokenized:\n%s", escape_control_lines(traceback.format_exc()))
        why = f"this answer could not be put into words ({type(error).__name__})"
        return Delta(answer.index, "", finish_reason="error", error=why)


def _no_reader() -> None:
    """The callback while there is no reader."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A ResultStream of the deltas of a call.

    on_close: called when the reader closes the stream. processors: of the answers that have not ended, by id. deltas:
    not yet taken. error: ends the stream after `deltas`. num_tokens: of answers that ended.
    """

    call: Call
    arrived: float
    max_new: int
    on_close: Callable[[ActiveRequest], None]
    processors: dict[str, OutputProcessor] = field(default_factory=dict)
    deltas: list[Delta] = field(default_factory=list)
    error: QuireError | None = None
    num_tokens: int = 0
    timer: asyncio.TimerHandle | None = None
    on_ready: Callable[[], None] = _no_reader

    def subscribe(self, news: Callable[[], None]) -> None:
        """See ResultStream."""
        self.on_ready = news

    def take(self) -> list[Delta] | None:
        """See ResultStream."""
        if self.deltas:
            ready = self.deltas
            self.deltas = []
            return ready
        if self.error is not None:
            raise self.error
        return [] if self.processors else None

    def close(self) -> None:
        """See ResultStream."""
        # Breaks a reference cycle with the reader, which would wait for the garbage collector.
        self.on_ready = _no_reader
        self.on_close(self)


def check_pooled(prompt: int, pooling: Pooling | None, limit: int, pooler: PoolerConfig) -> None:
    """Check a request to a model that only pools. Raises InvalidRequest."""
    if pooling is None:
        raise no_text(pooler)
    if prompt > limit:
        raise InvalidRequest(
            f"the input has {prompt} tokens, and this model takes {limit}: shorten it, or send truncate_prompt_tokens "
            "-1 (to Ollama's API truncate true) to have its end left out",
            param="input",
            code="context_length_exceeded",
        )
    if not prompt:
        raise InvalidRequest("the input is empty: give at least one token", param="input")


def no_text(pooler: PoolerConfig) -> InvalidRequest:
    """The refusal of a request to generate."""
    paths = "/classify, /score and /rerank" if pooler.classes else "/v1/embeddings, /score and /rerank"
    return InvalidRequest(
        f"this is a pooling model, which generates no text: use {paths} (in Python LLM.{pooler.tasks[0]} and "
        "LLM.score)",
        param="model",
        code="unsupported",
    )


def embedding_vector(
    pooled: bytes, dimensions: int | None = None, *, normalize: bool = True
) -> npt.NDArray[np.float32]:
    """The embedding of pooled hidden states, float32 [dimensions], all of them if None; of length 1 if `normalize`.

    Raises InvalidRequest where there are fewer dimensions.
    """
    numbers: npt.NDArray[np.float32] = np.frombuffer(pooled, dtype="<f4")
    if dimensions is not None and dimensions > len(numbers):
        raise InvalidRequest(f"dimensions must be at most {len(numbers)} for this model", param="dimensions")
    numbers = numbers[:dimensions]
    if normalize:
        numbers = numbers / max(float(np.linalg.norm(numbers)), 1e-12)
    return numbers.astype("<f4")
