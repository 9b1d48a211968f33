"""What a request asks for and what comes back: frozen values shared by every part. No torch, no I/O.

Names are vLLM's where users know them (`SamplingParams`, `RequestOutput`, `CompletionOutput`).
"""

from __future__ import annotations

import json as jsons
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, Self, TypedDict, TypeVar, get_args, overload

from quire import checks
from quire.checks import ANY, Unneeded
from quire.errors import InvalidRequest, QuireError

_Params = TypeVar("_Params")
T_co = TypeVar("T_co", covariant=True)

UNLIMITED = 1 << 30
"""No limit, as a number."""

BACKGROUND = 1 << 30
"""The priority from which on a request runs only while no other request runs or could."""

Pooling = Literal["mean", "last", "cls", "all", "classify"]
"""How hidden states of a prompt become one vector: their mean, or that of the last or the first token; all: one vector
for each token. classify: the model's classifier of what it reads of them."""

WHOLE_PROMPT = ("mean", "cls", "all")
"""What needs hidden states of more than the last token, which cached prefixes do not have."""

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class TokenTotal(int):
    """How many tokens a streamed answer has. finish_reason: why it ended."""

    finish_reason: str

    def __new__(cls, tokens: int, finish_reason: str) -> Self:
        """Of an answer of so many tokens."""
        made = super().__new__(cls, tokens)
        made.finish_reason = finish_reason
        return made


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, natural log, of the model's raw distribution (as vLLM's default).

    `top` holds (token id, logprob), best first: as many as were asked for, without the chosen token added.
    `rank` is 1 for the most likely token.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Logprob(NamedTuple):
    """The log-probability of one token (vLLM's fields). rank: 1 for the likeliest. decoded_token: its text."""

    logprob: float
    rank: int
    decoded_token: str


class PositionLogprobs(Mapping[int, Logprob]):
    """Log-probabilities at one position by token id, as in vLLM: the chosen token's first, then the likeliest.

    `token`, `logprob`, `rank` and `top` are those of `TokenLogprobs`. decode: the text of a token, called when an item
    is read.
    """

    __slots__ = ("_decode", "_scores")

    def __init__(self, scores: TokenLogprobs, decode: Callable[[int], str]) -> None:
        self._scores, self._decode = scores, decode

    @property
    def token(self) -> int:
        """The chosen token."""
        return self._scores.token

    @property
    def logprob(self) -> float:
        """The chosen token's."""
        return self._scores.logprob

    @property
    def rank(self) -> int:
        """The chosen token's."""
        return self._scores.rank

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(token id, logprob) of the likeliest, best first."""
        return self._scores.top

    def __getitem__(self, token: int) -> Logprob:
        if token == self.token:
            return Logprob(self.logprob, self.rank, self._decode(token))
        for rank, (other, logprob) in enumerate(self.top, 1):
            if other == token:
                return Logprob(logprob, rank, self._decode(token))
        raise KeyError(token)

    def __iter__(self) -> Iterator[int]:
        yield self.token
        yield from (token for token, _ in self.top if token != self.token)

    def __len__(self) -> int:
        return 1 + sum(token != self.token for token, _ in self.top)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        texts = {token: self._decode(token) for token in self}
        return PositionLogprobs, (self._scores, texts.__getitem__)


class LazySequence(Sequence[T_co]):
    """A sequence whose items are made when they are read. It equals any sequence of equal items."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class LogprobsByPosition(LazySequence[PositionLogprobs | None]):
    """The `PositionLogprobs` of `scores`; None where there are none."""

    __slots__ = ("_decode", "_scores")

    def __init__(self, scores: Sequence[TokenLogprobs | None], decode: Callable[[int], str]) -> None:
        self._scores, self._decode = scores, decode

    def __len__(self) -> int:
        return len(self._scores)

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        return map(self._position, self._scores)

    @overload
    def __getitem__(self, at: int) -> PositionLogprobs | None: ...

    @overload
    def __getitem__(self, at: slice) -> LogprobsByPosition: ...

    def __getitem__(self, at: int | slice) -> PositionLogprobs | LogprobsByPosition | None:
        if isinstance(at, slice):
            return LogprobsByPosition(self._scores[at], self._decode)
        return self._position(self._scores[at])

    def _position(self, scores: TokenLogprobs | None) -> PositionLogprobs | None:
        return None if scores is None else PositionLogprobs(scores, self._decode)


Ahead = Literal["none", "possible", "open"]
"""Thoughts before an answer: none; possible, if the answer opens them with their mark; or open from its first token."""


STRUCTURE_OTHERS = MappingProxyType(
    {
        "structural_tag": Unneeded((None,), "give json, regex or grammar"),
        "backend": Unneeded(ANY, "there is one"),
        "backend_options": Unneeded(ANY, "there is one"),
        "disable_fallback": Unneeded(ANY, "there is one"),
    }
)
"""Fields of vLLM's StructuredOutputsParams and GuidedDecodingParams that are none here."""


@checks.with_unneeded(STRUCTURE_OTHERS)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like (vLLM's StructuredOutputsParams): exactly one of the first five.

    json: a JSON schema, as an object or as JSON text; kept as text. json_object: any JSON object. regex: a regular
    expression of the whole answer, without look-around. choice: one of these texts. grammar: a context-free grammar
    in Lark's or llama.cpp's (GBNF) notation.

    whitespace_pattern: what may stand where JSON allows white space, at most once in each place; by default one space.
    disable_any_whitespace: nothing may. disable_additional_properties: objects of a JSON schema that lists `properties`
    and says nothing of `additionalProperties` have no others. thoughts: what may come before, free of the structure:
    see `Ahead`. reasoning_parser: how thoughts are marked (`parsers.reasoning`). thought_budget: most tokens of
    thoughts; with it, none of the first five is needed. begin: text between the thoughts and the structure. param: the
    request's field this came from, for messages.

    Raises InvalidRequest naming `param`, before anything is compiled.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    thoughts: Ahead = "none"
    reasoning_parser: str = "deepseek_r1"
    thought_budget: int | None = None
    begin: str = ""
    param: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        given = [name for name in _STRUCTURE_KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1 and (given or self.thought_budget is None):
            said = " and ".join(given) + " cannot be used together" if given else "nothing is asked for"
            raise self._refusal(f"{said}: give exactly one of {', '.join(_STRUCTURE_KINDS)}")
        if self.json is not None:
            object.__setattr__(self, "json", self._schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice or not all(type(text) is str and text for text in self.choice):
                raise self._refusal("choice must be a list of texts, none of them empty")
        if self.thoughts not in get_args(Ahead):
            raise self._refusal(f"thoughts must be one of {', '.join(get_args(Ahead))}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise self._refusal(f"{name} must be text")
        length = sum(map(len, (self.kind[1], self.whitespace_pattern or "")))
        if length > MAX_STRUCTURE_CHARS:
            raise self._refusal(f"it has {length} characters, and at most {MAX_STRUCTURE_CHARS} are allowed")

    @property
    def kind(self) -> tuple[str, str]:
        """Which of the five, and its text; choices as a JSON list. 'free' for a bound of thoughts alone."""
        if self.choice is not None:
            return "choice", jsons.dumps(self.choice, ensure_ascii=False)
        for name in ("json", "regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                return name, text
        if not self.json_object:
            return "free", ""
        return "json", '{"type":"object"}'

    def _schema(self, schema: str | dict[str, Any]) -> str:
        try:
            if isinstance(schema, str):
                schema = jsons.loads(schema)
            text = jsons.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except RecursionError:
            raise self._refusal("the JSON schema is nested too deeply") from None
        except (ValueError, TypeError) as error:
            raise self._refusal(f"the JSON schema is not JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise self._refusal("a JSON schema is an object")
        return text

    def _refusal(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self.param}: {why}", param=self.param)


_STRUCTURE_KINDS = ("json", "json_object", "regex", "choice", "grammar")

MAX_STRUCTURE_CHARS = 1 << 18
"""The largest schema or grammar that is taken."""


class NumericParameter(NamedTuple):
    """A field of SamplingParams that is one number, and what is derived from it.

    annotation: its type as written, as 'int | None'. low, high: its range, both ends included; whole bounds are those
    of whole numbers. in_requests: whether every HTTP endpoint that generates takes it, under this name. in_checkpoints:
    whether a checkpoint's generation_config.json may set its default. help: of the command line's option; without it
    there is none.
    """

    name: str
    annotation: str
    low: float
    high: float
    in_requests: bool
    in_checkpoints: bool
    help: str


def _number(
    default: float | None,
    low: float,
    high: float,
    *,
    in_requests: bool = False,
    in_checkpoints: bool = False,
    help: str = "",
) -> Any:
    """A dataclass field that becomes a NumericParameter."""
    metadata = {"low": low, "high": high, "in_requests": in_requests, "in_checkpoints": in_checkpoints, "help": help}
    return field(default=default, metadata=metadata)


class RequestOutputKind(StrEnum):
    """What each output of `AsyncLLM.generate` has, with vLLM's names.

    `CUMULATIVE`: all tokens so far. `DELTA`: those since the last output. `FINAL_ONLY`: all, in one output at the end.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


def _assignable(cls: type[_Params]) -> type[_Params]:
    """Let scripts set attributes of a frozen dataclass: checked as its constructor checks them."""

    def assign(self: Any, name: str, value: object) -> None:
        made = replace(self, **{name: value})
        for each in fields(made):
            object.__setattr__(self, each.name, getattr(made, each.name))

    cls.__setattr__ = assign  # type: ignore[method-assign]
    return cls


SAMPLING_OTHERS = MappingProxyType(
    {
        "best_of": Unneeded((None, 1), "it equals n here: leave it out, or call LLM.beam_search"),
        "use_beam_search": Unneeded((False, None), "call LLM.beam_search with BeamSearchParams"),
        "length_penalty": Unneeded((1.0, None), "it is a field of BeamSearchParams, for LLM.beam_search"),
        "early_stopping": Unneeded((False, None), "it is a field of BeamSearchParams, for LLM.beam_search"),
        "guided_decoding": Unneeded((None,), "it is called structured_outputs, a StructuredOutputsParams"),
        "logits_processors": Unneeded((None, [], ()), "see logit_bias, bad_words and allowed_token_ids"),
        "truncate_prompt_tokens": Unneeded((None,), "give the last token ids of the prompt: prompts=[ids[-n:]]"),
        "spaces_between_special_tokens": Unneeded((True, None), "text is what the tokenizer makes of the tokens"),
        "flat_logprobs": Unneeded((False, None), "outputs[i].logprobs has a mapping by token id for each position"),
        "logprob_token_ids": Unneeded((None, []), "ask for logprobs=-1, and read those of these tokens"),
        "prompt_logprob_token_ids": Unneeded((None, []), "ask for prompt_logprobs=-1, and read those of these tokens"),
        "prompt_logprob_start": Unneeded((None, 0), "prompt_logprobs are of the whole prompt"),
        "extra_args": Unneeded((None, {}), "nothing reads it"),
        "skip_reading_prefix_cache": Unneeded((False, None), "see enable_prefix_caching and LLM.reset_prefix_cache"),
        "repetition_detection": Unneeded((None,), "see repetition_penalty and frequency_penalty"),
        "routed_experts_prompt_start": Unneeded((0, None), "outputs do not say which experts ran"),
        "trace_decode_token_ids": Unneeded((None, []), "give the tokens as a prompt, and ask for prompt_logprobs"),
        "stream_interval": Unneeded((None, 1), "every step's tokens come as they are; see output_kind"),
        "skip_clone": Unneeded(ANY, ""),
        "output_text_buffer_length": Unneeded(ANY, ""),
    }
)
"""Fields of vLLM's SamplingParams, of any version, that are none here."""


class TokenIds(tuple[int, ...]):
    """Token ids of which there may be thousands: they are packed once, for all that reads them as an array."""

    @cached_property
    def packed(self) -> bytes:
        """The ids as 64-bit numbers. Raises struct.error for larger ones."""
        return struct.pack(f"{len(self)}q", *self)


@_assignable
@checks.with_unneeded(SAMPLING_OTHERS)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every field that vLLM has means what it means there.

    Fields of vLLM's that are none here are taken with values that change nothing. A field may be assigned, and is
    checked then; a call reads it when it is made.

    `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off; `temperature` 0 is greedy. `seed` None lets the engine draw one.
    Penalties count the last `repeat_last_n` tokens (llama.cpp's name), -1: all.
    `stop` strings are found in text by the frontend; everything else reaches the executor. `max_tokens` None means as
    many as the context allows. `bad_words` are text too: the frontend tokenizes them as `bad_words_token_ids`,
    sequences of tokens of which none may be completed in the output. `thinking_token_budget` is the most tokens of
    thoughts between their marks, None or -1 for any number. `pooling` also asks for the prompt's hidden states
    as one vector. `output_kind` is read by `AsyncLLM`, and may be the member's value.

    Raises InvalidRequest naming the field, also for NaN and infinities.
    """

    n: int = _number(1, 1, 1024)
    temperature: float = _number(
        default=1.0,
        low=0.0,
        high=100.0,
        in_requests=True,
        in_checkpoints=True,
        help="0 takes the likeliest token each time.",
    )
    top_p: float = _number(
        default=1.0,
        low=0.0,
        high=1.0,
        in_requests=True,
        in_checkpoints=True,
        help="Sample from the likeliest tokens that make up this share.",
    )
    top_k: int = _number(
        default=0,
        low=-1,
        high=UNLIMITED,
        in_requests=True,
        in_checkpoints=True,
        help="Sample from so many of the likeliest tokens; 0: all.",
    )
    min_p: float = _number(
        default=0.0,
        low=0.0,
        high=1.0,
        in_requests=True,
        in_checkpoints=True,
        help="Leave out tokens below this share of the likeliest one's.",
    )
    presence_penalty: float = _number(0.0, -2.0, 2.0, in_requests=True)
    frequency_penalty: float = _number(0.0, -2.0, 2.0, in_requests=True)
    repetition_penalty: float = _number(1.0, 0.01, 100.0, in_requests=True, in_checkpoints=True)
    repeat_last_n: int = _number(-1, -1, UNLIMITED, in_requests=True)
    seed: int | None = _number(None, -(1 << 63), (1 << 64) - 1, in_requests=True)
    max_tokens: int | None = _number(16, 1, UNLIMITED)
    min_tokens: int = _number(0, 0, UNLIMITED)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = _number(None, -1, UNLIMITED)
    prompt_logprobs: int | None = _number(None, -1, UNLIMITED)
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = _number(None, -1, UNLIMITED)
    pooling: Pooling | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, checks.texts(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids or ())))
        if self.allowed_token_ids is not None:
            allowed = TokenIds(checks.token_ids("allowed_token_ids", self.allowed_token_ids))
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "logit_bias", checks.biases("logit_bias", self.logit_bias, 100.0))
        for each in NUMERIC_PARAMETERS:
            if (value := getattr(self, each.name)) is not None or not each.annotation.endswith("| None"):
                checks.number(each.name, value, each.low, each.high, whole=isinstance(each.low, int))
        for name in _FLAGS:
            checks.flag(name, getattr(self, name))
        if self.top_p <= 0:
            raise InvalidRequest("top_p must be above 0", param="top_p")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest("structured_outputs must be StructuredOutputsParams(...)", param="structured_outputs")
        if self.structured_outputs is not None and self.structured_outputs.kind[0] != "free" and self.min_tokens:
            raise InvalidRequest(
                f"min_tokens and {self.structured_outputs.param} cannot be used together: the "
                "structure says when an answer "
                "is complete",
                param="min_tokens",
            )
        if self.pooling not in (None, *get_args(Pooling)):
            raise InvalidRequest(f"pooling must be one of {', '.join(get_args(Pooling))}", param="pooling")
        if self.output_kind not in tuple(RequestOutputKind):
            kinds = ", ".join(RequestOutputKind)
            raise InvalidRequest(
                f"output_kind must be one of {kinds}, not {self.output_kind!r:.80}", param="output_kind"
            )
        object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))
        if any(not s for s in self.stop):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        if any(not word for word in self.bad_words_token_ids):
            raise InvalidRequest("bad words must not be empty", param="bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Of what is given, where None is not given but for `max_tokens` (vLLM's name)."""
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self) -> Self:
        """A copy (vLLM's name)."""
        return copy(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature < 1e-5


DRAWING_PARAMETERS = frozenset({"seed", "min_p", "top_k", "top_p"})
"""Fields that change which token is drawn, never how likely it is."""

NUMERIC_PARAMETERS = tuple(
    NumericParameter(each.name, str(each.type), **each.metadata) for each in fields(SamplingParams) if each.metadata
)
"""In the order of the fields."""

_FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")


GREEDY = SamplingParams(temperature=0.0)


class Pin(NamedTuple):
    """The first `tokens` of a prompt, to be evicted last for `seconds` after the prompt is computed."""

    tokens: int
    seconds: float


class PromptImage(NamedTuple):
    """An image in a prompt, where the token ids [start : start + length] hold its place.

    pixels: height * width * 3 bytes, RGB, row by row, resized as the model reads them. digest: of size and pixels, by
    which images are the same.
    """

    start: int
    length: int
    height: int
    width: int
    pixels: bytes
    digest: bytes

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.start + self.length


class TextPrompt(TypedDict):
    """A prompt that is text, for `LLM.generate` (vLLM's name)."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt that is token ids, for `LLM.generate` (vLLM's name)."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the engine: token ids in, token ids out. The frontend converts text.

    prompt: token ids, at least one. max_new_tokens: most tokens that may follow. stop: token ids that end the sequence
    (end-of-text ids included unless ignored). choice: which of `n` answers this is; noise is keyed by (seed, choice,
    position). priority: lower is sooner; from BACKGROUND on, only while no other request could run. deadline: in
    seconds of the engine's clock. cache_salt: prefixes are shared only under the same one. pins: prefixes of the prompt
    to keep in the prefix cache; owner: on whose account. images: those in the prompt, in order.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    stop: frozenset[int] = frozenset()
    seed: int = 0
    choice: int = 0
    priority: int = 0
    deadline: float = math.inf
    cache_salt: str = ""
    pins: tuple[Pin, ...] = ()
    owner: str = ""
    images: tuple[PromptImage, ...] = ()

    def prefix_tokens(self) -> tuple[int, ...]:
        """The prompt as the prefix cache compares it: in place of an image's placeholders, its digest as a number."""
        if not self.images:
            return self.prompt
        tokens = list(self.prompt)
        for image in self.images:
            tokens[image.start : image.end] = [int.from_bytes(image.digest, "big")] * image.length
        return tuple(tokens)


class PromptReport(NamedTuple):
    """What became of a prompt.

    diverged_at: its first token that differs from the nearest cached prefix, None where nothing cached goes on
    otherwise. pinned: for each of the request's pins, the tokens that are pinned now. queued, prefill: seconds from
    submission to a place on the device, and from there to the first token. cache_written: tokens of the prompt that
    this request put into the prefix cache since it last got its place: whole blocks that were not there. cached_host,
    cached_disk, cached_remote: of the tokens whose K/V was cached, those that came for it from host memory, from disk
    and from a prefill engine.
    """

    diverged_at: int | None = None
    pinned: tuple[int, ...] = ()
    queued: float = 0.0
    prefill: float = 0.0
    cache_written: int = 0
    cached_host: int = 0
    cached_disk: int = 0
    cached_remote: int = 0


class RequestStepOutput(NamedTuple):
    """What one request got from one step. `finish` is None while it goes on.

    `prompt_logprobs` come with the chunk that computed them (position 0 has none). `num_cached` counts the prompt
    tokens whose K/V came from the prefix cache. `error` says what went wrong when finish is 'error', `status` whose
    mistake it is, as an HTTP status (`quire.errors.of`), and `param` which field of the request is to blame, if one is.
    `pooled`: float32 numbers, with the first token, if asked for. `report`: of the prompt, with the first token.
    """

    id: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    stop_token: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    num_cached: int = 0
    error: str | None = None
    param: str | None = None
    status: int = 500
    pooled: bytes = b""
    report: PromptReport | None = None


def error_output(id: str, error: QuireError) -> RequestStepOutput:
    """The output of a request that failed."""
    return RequestStepOutput(id, (), "error", error=str(error), param=error.param, status=error.status)


class Absent:
    """The attribute of vLLM's that says nothing here: None."""

    def __get__(self, one: object, owner: type | None = None) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt (vLLM's fields)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: ClassVar[Absent] = Absent()
    routed_experts: ClassVar[Absent] = Absent()
    kv_transfer_params: ClassVar[Absent] = Absent()

    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None


class RequestMetrics(NamedTuple):
    """What the engine measured of a request's first answer, in seconds (the first two are vLLM's names).

    queued, prefill: from its arrival in the engine to a place on the device, and from there to the first token.
    """

    first_token_latency: float
    num_generation_tokens: int
    queued: float
    prefill: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers (vLLM's fields). metrics: None until there is a token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, compare=False)
    lora_request: ClassVar[Absent] = Absent()
    encoder_prompt: ClassVar[Absent] = Absent()
    encoder_prompt_token_ids: ClassVar[Absent] = Absent()
    kv_transfer_params: ClassVar[Absent] = Absent()
    multi_modal_placeholders: ClassVar[Absent] = Absent()


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector (vLLM's fields)."""

    embedding: tuple[float, ...]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector (vLLM's fields)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """What each class got (vLLM's fields)."""

    probs: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """A prompt and its classes (vLLM's fields). label: the name of the likeliest."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: ClassificationOutput
    label: str
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A score (vLLM's fields)."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score (vLLM's fields). prompt_token_ids: of both texts."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: ScoringOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What was made of a prompt (vLLM's fields): numbers, or as many lists of them as the prompt has tokens."""

    data: tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """A prompt and what was made of it (vLLM's fields)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int = 0


class TraceContext(NamedTuple):
    """Where a call came from.

    request_id: of the HTTP request. traceparent, tracestate: W3C trace context as received, unchecked; empty if none
    was. tenant: cached prefixes are shared within one; empty where there is only one.
    """

    request_id: str = ""
    traceparent: str = ""
    tracestate: str = ""
    tenant: str = ""


NO_TRACE_CONTEXT = TraceContext()


def call_id(request: str, prompt: int) -> str:
    """The id of the call for one of a request's prompts: for the first, 0, that of the answer that clients see."""
    return f"{request}.{prompt}" if prompt else request


def answer_id(call: str, choice: int) -> str:
    """The id that the engine knows one of a call's answers by."""
    return f"{call}-{choice}"


# The parts of an id behind a call's: a search has an answer for each step and each beam.
_BEHIND_CALL = re.compile(r"(?:\.\d+)?(?:-\d+)+")


def is_answer_of(answer: str, request: str) -> bool:
    """Whether the engine's id of an answer is of a request, or of a call, with the id `request`."""
    return answer.startswith(request) and _BEHIND_CALL.fullmatch(answer, len(request)) is not None


def prompt_of(answer: str) -> int:
    """Which of its request's prompts an answer is of, by the engine's id of it, or by its call's."""
    found = re.search(r"\.(\d+)(?:-\d+)*$", answer)
    return int(found[1]) if found else 0


class FinishedRequest(NamedTuple):
    """How one answer ended, for observers of the frontend. Counts are tokens; seconds are what a client measures.

    id: the call's; choice: which of its answers. cached: prompt tokens found in the prefix cache. tokens: sent to the
    client. max_tokens: the most it might have got. first: from arrival to the first token, None if there was none.
    seconds: from arrival to the end. detokenize_seconds: of that, spent on detokenization.
    """

    id: str
    choice: int
    reason: str
    sampling: SamplingParams
    origin: TraceContext
    prompt: int
    cached: int
    tokens: int
    max_tokens: int
    first: float | None
    seconds: float
    detokenize_seconds: float = 0.0
