"""Requests as calls of the backend, one for each prompt, with their sampling parameters, and what answers must show.

The value of a sampling parameter is the request's, else the checkpoint's default, else OpenAI's.

Blocking: run in the same offloaded work as the parsing of the request (`frontend.offload`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from quire.errors import InvalidRequest, nearest
from quire.frontend.interface import Backend, Call, Delta, ModelCard
from quire.frontend.processor import bad_words, hashed_salt, max_new_tokens
from quire.multimodal.inputs import ImageInputs
from quire.parsers.parts import Splitter, TextPart
from quire.parsers.reasoning import (
    SWITCHES,
    THOUGHTS,
    AnswerSplitter,
    ThoughtStyle,
    bounded,
    thought_style,
    thoughts_ahead,
    turned_off,
)
from quire.parsers.tools.styles import tool_style
from quire.server import beams, cache_control
from quire.server.limits import Limits, check_answers, check_priority_and_timeout
from quire.server.nested import check_nested
from quire.server.prompts import Rendered, encode, in_vocabulary, model, prompts, render
from quire.server.schemas import (
    Answers,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    ResponseFormat,
    Sampling,
    Structure,
)
from quire.server.tools import NO_TOOLS, ToolSet, make_tool_set
from quire.tokenization.no_tokenizer import needs_text
from quire.tokenization.prompt_header import NO_REMOVAL, Removal
from quire.types import NUMERIC_PARAMETERS, UNLIMITED, Pin, SamplingParams, StructuredOutputsParams, call_id
from quire.weights.pooling import GENERATES, PoolerConfig

# How a token is shown, as text, and as its exact bytes (`Backend.token_text`).
TokenText = Callable[[int], tuple[str, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The calls of one HTTP request, one for each prompt, and what the answer must show.

    id: of the answer, as clients see it. top: alternatives to show for each token, None for no log-probabilities.
    scored_only: max_tokens 0 with echo, which asks for the prompt's log-probabilities only. thinking: whether answers
    begin inside a thought without a mark of its own; None if the model does not reason. thought_style: how thoughts are
    marked. reasons: whether thoughts are shown. truncated: prompt tokens left out on request, None if the request does
    not ask for it. timed: whether times are shown. cache_details: whether the usage says where the prompt differs from
    the cache. removal: of the prompt's header. params: effective sampling parameters to show. pooler: the
    model's. began: time.perf_counter() at which the request came.
    """

    id: str
    model: str
    calls: list[Call]
    token_text: TokenText
    request: Any = None
    system_fingerprint: str = ""
    began: float = 0.0
    n: int = 1
    stream: bool = False
    usage: bool = False
    every_usage: bool = False
    echo: bool = False
    top: int | None = None
    prompt_top: int | None = None
    token_ids: bool = False
    as_ids: bool = False
    scored_only: bool = False
    thinking: bool | None = None
    thought_style: ThoughtStyle = THOUGHTS["qwen3"]
    tools: ToolSet = NO_TOOLS
    reasons: bool = True
    truncated: int | None = None
    timed: bool = False
    cache_details: bool = False
    removal: Removal = NO_REMOVAL
    params: dict[str, Any] | None = None
    pooler: PoolerConfig = GENERATES
    created: int = field(default_factory=lambda: int(time.time()))

    def headers(self) -> dict[str, str]:
        """Header fields of the answer."""
        omitted = {"x-quire-omitted-tools": ", ".join(self.tools.omitted)} if self.tools.omitted else {}
        return omitted | self.removal.headers()

    def splitter(self) -> Splitter:
        """Splits the text of one choice into content, thoughts and tool calls."""
        calls = self.tools.reader()
        return (
            calls if self.thinking is None else AnswerSplitter(self.thought_style.splitter(inside=self.thinking), calls)
        )

    def shown_parts(self, splitter: Splitter, delta: Delta) -> list[TextPart]:
        """The parts of a delta that the answer shows. splitter: that of the delta's choice."""
        parts = splitter.feed(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *splitter.flush()]
        return [part for part in parts if part.kind != "reasoning" or self.reasons]


def completion(
    request: CompletionRequest, backend: Backend, limits: Limits, default_max_tokens: int | None = 16
) -> Job:
    """The job of a completion. Raises InvalidRequest or UnknownModel naming the field.

    default_max_tokens: where neither the request nor the checkpoint says; None: as many as the context holds.
    """
    card = model(request.model, backend)
    check_logprobs("logprobs", request.logprobs, limits)
    _check_has_text(request, card)
    scored_only = bool(request.echo) and request.max_tokens == 0
    echoed = request.logprobs if request.echo else None
    given = prompts(request.prompt, card, limits, request.suffix)
    check_answers(len(given), beams.width(request), limits)
    special = request.add_special_tokens is not False
    encoded = encode(given, special, backend, max_prompt_tokens(request, card), request.suffix)
    max_tokens = 1 if scored_only else request.max_tokens
    shared = shared_params(request, backend, card, limits) | _infill_params(request, card)
    id, calls = new_request_id("cmpl-"), list[Call]()
    num_truncated = 0
    for text, whole in encoded:
        ids = truncate(whole, request, card, max_tokens or default_max_tokens)
        pins = cache_control.whole(request.cache_control, len(ids))
        if len(ids) < len(whole):
            text = None
            num_truncated += len(whole) - len(ids)
        params = sampling_params(
            request,
            ids,
            card,
            limits,
            max_tokens,
            default_max_tokens,
            logprobs=request.logprobs,
            echoed=echoed,
            shared=shared,
        )
        call = make_call(call_id(id, len(calls)), text, ids, request, params, limits)
        calls.append(replace(call, pins=pins))
    if request.echo:
        calls = [replace(call, text=backend.decode(call.prompt)) if call.text is None else call for call in calls]
    calls = [beams.searching(call, request, card, limits) for call in calls]
    shown = effective_params(request, calls[0].sampling, card, "max_tokens")
    return _job(
        request, backend, limits, calls, num_truncated, top=request.logprobs, scored_only=scored_only, params=shown
    )


def _infill_params(request: CompletionRequest, card: ModelCard) -> dict[str, Any]:
    """The fields of SamplingParams that a suffix sets. Raises InvalidRequest naming a field that it excludes."""
    if not request.suffix:
        return {}
    if request.echo:
        raise InvalidRequest(
            "echo is not supported with suffix: insert the answer between prompt and suffix yourself", param="echo"
        )
    if request.truncate_prompt_tokens is not None:
        what = "truncate_prompt_tokens would cut off the suffix's markers: send shorter texts"
        raise InvalidRequest(what, param="truncate_prompt_tokens")
    ends = () if request.ignore_eos else card.infill_ends
    return {"stop_token_ids": (*(request.stop_token_ids or ()), *ends)}


def chat(
    request: ChatRequest, backend: Backend, limits: Limits, prefix: str = "chatcmpl-", context: tuple[int, ...] = ()
) -> Job:
    """The job of a chat completion. Raises InvalidRequest or UnknownModel naming the field.

    prefix: of the answer's id. context: token ids before those of the messages.
    """
    card = model(request.model, backend)
    top = (request.top_logprobs or 0) if request.logprobs else None
    check_answers(1, beams.width(request), limits)
    if request.top_logprobs and top is None:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    check_logprobs("top_logprobs", request.top_logprobs, limits)
    max_tokens, name = request.max_tokens, "max_tokens"
    # The newer of the two names goes first.
    if request.max_completion_tokens is not None:
        max_tokens, name = request.max_completion_tokens, "max_completion_tokens"
    request, budget = with_thinking(with_reasoning(request), card)
    searched = [] if request.web_search_options is None else [{"type": "web_search"}]
    tools = make_tool_set(
        [*(request.tools or ()), *searched],
        request.tool_choice,
        request.parallel_tool_calls,
        tool_style(card.tool_parser),
        limits,
    )
    tools = replace(tools, calls_before=sum(map(_num_calls, request.messages)))
    style = thought_style(card.reasoning_parser)
    removal = limits.prompt_header.remove(request.messages)
    request = msgspec.structs.replace(request, messages=removal.messages)
    (text, whole, images), pins = _prompt(request, backend, limits, tools.for_template, context)
    shared = shared_params(request, backend, card, limits)
    form = tools.structure(shared["structured_outputs"], "" if style is None else style.answer)
    bound = form is not None or budget is not None
    off = bound and turned_off(card.template_kwargs, request.chat_template_kwargs)
    ahead = thoughts_ahead(card.reasoning_parser, text, _continued(request), off=off)
    ids = truncate(whole, request, card, max_tokens)
    shared["structured_outputs"] = bounded(form, card.reasoning_parser, ahead, budget)
    special = (tools.parameters and tools.style.special) or (style is not None and style.special)
    if special and request.skip_special_tokens is None:
        shared["skip_special_tokens"] = False
    params = sampling_params(request, ids, card, limits, max_tokens, None, logprobs=top, name=name, shared=shared)
    call = make_call(new_request_id(prefix), _continued(request), ids, request, params, limits)
    call = beams.searching(call, request, card, limits)
    return _job(
        request,
        backend,
        limits,
        [replace(call, omitted_tools=tools.omitted, pins=pins, header=removal.outcome, images=images)],
        len(whole) - len(ids),
        top=top,
        thinking=None if style is None else ahead == "open",
        thought_style=style or THOUGHTS["qwen3"],
        tools=tools,
        reasons=request.include_reasoning is not False,
        removal=removal,
        params=effective_params(request, params, card, name),
    )


def _prompt(
    request: ChatRequest,
    backend: Backend,
    limits: Limits,
    tools: list[dict[str, Any]] | None,
    context: tuple[int, ...],
) -> tuple[Rendered, tuple[Pin, ...]]:
    """The prompt of a request behind `context`, with the pins that its marks ask for. Raises InvalidRequest."""
    most, cut = max_prompt_tokens(request, backend.model()), request.truncate_prompt_tokens is not None
    text, ids, images = render(request.messages, request, backend, limits.images, tools, most)
    if images and cut:
        what = "truncate_prompt_tokens would cut images: leave it out, or send fewer messages"
        raise InvalidRequest(what, param="truncate_prompt_tokens")
    rendered = partial(_rendered, request, backend, limits.images, tools)
    pins = () if cut else cache_control.chat_pins(request, ids, rendered)
    whole = _after(context, ids, backend)
    before = len(whole) - len(ids)
    placed = tuple(image._replace(start=image.start + before) for image in images)
    return Rendered(text, whole, placed), tuple(pin._replace(tokens=pin.tokens + before) for pin in pins)


def _rendered(
    request: ChatRequest,
    backend: Backend,
    images: ImageInputs,
    tools: list[dict[str, Any]] | None,
    messages: list[dict[str, Any]],
) -> tuple[int, ...]:
    """The ids of a part of a request's messages, for its pins."""
    plain = msgspec.structs.replace(request, add_generation_prompt=False, continue_final_message=False)
    return render(messages, plain, backend, images, tools).ids


def _after(context: tuple[int, ...], prompt: tuple[int, ...], backend: Backend) -> tuple[int, ...]:
    """The prompt behind `context`, which has the begin token already."""
    if not context:
        return prompt
    begin = backend.encode("")
    return context + (prompt[len(begin) :] if prompt[: len(begin)] == begin else prompt)


ONE_NAME = "max_new_tokens is another name of max_tokens: send one of them"


def generate(request: GenerateRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/generate`. Raises InvalidRequest or UnknownModel naming the field."""
    card = model(request.model, backend)
    if not card.has_text:
        what = "prompt: answers are text here, which needs a tokenizer; /v1/completions answers with token ids"
        raise InvalidRequest(what, param="prompt", code="no_tokenizer")
    given = prompts(request.prompt, card, limits)
    if len(given) != 1:
        raise InvalidRequest("prompt: this endpoint takes one prompt; /v1/completions takes several", param="prompt")
    [(text, ids)] = encode(given, request.add_special_tokens is not False, backend, card.max_model_len)
    shared = shared_params(request, backend, card, limits)
    name = "max_tokens" if request.max_new_tokens is None else "max_new_tokens"
    if request.max_tokens is not None and name == "max_new_tokens":
        raise InvalidRequest(ONE_NAME, param=name)
    params = sampling_params(request, ids, card, limits, getattr(request, name), 16, name=name, shared=shared)
    pins = cache_control.whole(request.cache_control, len(ids))
    call = replace(make_call(new_request_id("gen-"), text, ids, request, params, limits), pins=pins)
    return Job(
        id=call.id,
        model=card.id,
        calls=[call],
        token_text=backend.token_text,
        stream=request.stream is True,
        timed=bool(request.return_timings),
        cache_details=bool(request.return_cache_details),
    )


EFFORTS: Mapping[str, int] = {
    "none": 0,
    "minimal": 512,
    "low": 1024,
    "medium": 4096,
    "high": -1,
    "xhigh": -1,
    "max": -1,
}
"""Most tokens of thoughts for each `reasoning_effort`, where the model's template does not know it; -1: any number."""


# What each field of `reasoning` is, by the chat request's own names: its type in words, and type, name and value.
_REASONING: Mapping[str, tuple[str, type, str, Callable[[Any], Any]]] = {
    "effort": ("text", str, "reasoning_effort", lambda effort: effort),
    "max_tokens": ("a whole number", int, "thinking_token_budget", lambda most: most),
    "enabled": ("true or false", bool, "thinking", lambda on: {"type": "enabled" if on else "disabled"}),
    "exclude": ("true or false", bool, "include_reasoning", lambda hides: not hides),
}


def with_reasoning(request: ChatRequest) -> ChatRequest:
    """The request with the fields of its `reasoning`, as OpenRouter's clients and Responses send it, under their other
    names. Raises InvalidRequest naming the field."""
    given = request.reasoning or {}
    check_nested(given, "reasoning", "reasoning")
    changed = {}
    for field_name, (words, kind, name, as_value) in _REASONING.items():
        if (value := given.get(field_name)) is None:
            continue
        where = f"reasoning.{field_name}"
        if type(value) is not kind:
            raise InvalidRequest(f"{where} must be {words}", param=where)
        changed[name] = as_value(value)
        if getattr(request, name) not in (None, changed[name]):
            raise InvalidRequest(f"{where} and {name} say different things: send one of them", param=where)
    return msgspec.structs.replace(request, **changed)


def with_thinking(request: ChatRequest, card: ModelCard) -> tuple[ChatRequest, int | None]:
    """The request with the template's arguments for its `thinking` and `reasoning_effort`, and its bound of the tokens
    of thoughts. `thinking` decides whether, the effort how much.

    Raises InvalidRequest naming the field.
    """
    budget, effort = _budget(request), request.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        hint = nearest(effort[:64], EFFORTS)
        raise InvalidRequest(f"reasoning_effort must be one of {known}.{hint}", param="reasoning_effort")
    switches = [name for name in SWITCHES if name in card.template_arguments]
    thinks = _thinks(request.thinking, effort, can=card.reasoning_parser != "none" or bool(switches))
    if thinks is False:
        effort, budget = "none", None
    if thinks is None and effort is None:
        return request, budget
    known_kwargs: dict[str, Any] = dict.fromkeys(switches, effort != "none")
    if effort is not None and "reasoning_effort" in card.template_arguments and (effort != "none" or not switches):
        known_kwargs["reasoning_effort"] = effort
    in_template = "reasoning_effort" in known_kwargs or (effort == "none" and bool(known_kwargs))
    merged = {**known_kwargs, **(request.chat_template_kwargs or {})}
    budget = EFFORTS[effort] if effort is not None and budget is None and not in_template else budget
    return msgspec.structs.replace(request, chat_template_kwargs=merged), budget


def _thinks(thinking: Mapping[str, Any] | None, effort: str | None, *, can: bool) -> bool | None:
    """Whether the model is to think, by Anthropic's and DeepSeek's field; None: that is for the model, or its effort.

    can: whether it may. `adaptive` leaves it to the model how much it thinks, so one that does not takes it as well.
    """
    if thinking is None:
        return None
    check_nested(thinking, "thinking", "thinking")
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled", param="thinking")
    if kind == "adaptive":
        return True if can and effort is None else None
    if kind == "enabled" and not can:
        raise InvalidRequest("thinking: this model does not think: turn it off, or leave it out", param="thinking")
    if kind == "enabled" and effort == "none":
        raise InvalidRequest(
            "reasoning_effort is none, and thinking is enabled: send one of them", param="reasoning_effort"
        )
    return bool(kind == "enabled")


_BUDGET = "thinking_token_budget"


def _budget(request: ChatRequest) -> int | None:
    """The most tokens of thoughts, by either name; None: not said. Raises InvalidRequest naming the field."""
    given, budget = (request.thinking or {}).get("budget_tokens"), request.thinking_token_budget
    if budget is not None and budget < -1:
        raise InvalidRequest("thinking_token_budget must be at least 0, or -1 for any number", param=_BUDGET)
    if given is None:
        return budget
    if budget is not None:
        raise InvalidRequest(f"thinking.budget_tokens and {_BUDGET} are the same: send one", param=_BUDGET)
    if type(given) is not int or given < 1:
        raise InvalidRequest("thinking.budget_tokens must be a whole number above 0", param="thinking")
    return given


def _num_calls(message: Mapping[str, Any]) -> int:
    calls = message.get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


def _continued(request: ChatRequest) -> str:
    """The last message where the answer continues it, which `echo` puts before the answer."""
    content = request.messages[-1].get("content")
    return content if request.continue_final_message and isinstance(content, str) else ""


def new_request_id(prefix: str) -> str:
    """An id of a request that no other has."""
    return f"{prefix}{uuid.uuid4().hex}"


def make_call(
    id: str, text: str | None, ids: tuple[int, ...], request: Any, params: SamplingParams, limits: Limits
) -> Call:
    """The call for one of a request's prompts. request: has priority, cache_salt and timeout."""
    return Call(
        id=id,
        prompt=ids,
        text=text,
        sampling=params,
        priority=request.priority or 0,
        cache_salt=hashed_salt(request.cache_salt or ""),
        timeout=limits.timeout if request.timeout is None else request.timeout,
    )


def _job(
    request: Answers, backend: Backend, limits: Limits, calls: list[Call], num_truncated: int, **shown: Any
) -> Job:
    """A job with the fields that completions and chat completions share. shown: the other fields."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    forced = limits.force_usage
    usage = forced or bool((options and options.include_usage) or (request.usage and request.usage.include))
    return Job(
        id=calls[0].id,
        model=backend.model().id,
        calls=calls,
        token_text=backend.token_text,
        n=request.n or 1,
        stream=bool(request.stream),
        usage=usage,
        every_usage=forced or (usage and options is not None and bool(options.continuous_usage_stats)),
        echo=bool(request.echo),
        prompt_top=request.prompt_logprobs,
        token_ids=not backend.model().has_text if request.return_token_ids is None else request.return_token_ids,
        as_ids=bool(request.return_tokens_as_token_ids),
        truncated=None if request.truncate_prompt_tokens is None else num_truncated,
        timed=bool(request.return_timings),
        cache_details=bool(request.return_cache_details),
        **shown,
    )


# ---------------------------------------------------------------- sampling parameters

# Fields whose defaults a checkpoint may set in generation_config.json.
_RECOMMENDED = tuple(each.name for each in NUMERIC_PARAMETERS if each.in_checkpoints)

# Fields that SamplingParams has by the same name and type.
_SAME = (
    *_RECOMMENDED,
    *(each.name for each in NUMERIC_PARAMETERS if each.in_requests and not each.in_checkpoints),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "bad_words"),
    *("allowed_token_ids", "skip_special_tokens"),
)
_REPORTED_PARAMS = ("n", "max_tokens", *_SAME, "logit_bias")


def shared_params(request: Sampling, backend: Backend, card: ModelCard, limits: Limits) -> dict[str, Any]:
    """The fields of SamplingParams that all prompts of a request share, and that take time to make.

    Checks the counts and ranges of `request` too. Raises InvalidRequest naming the field.
    """
    _check_counts(request, card, limits)
    return {
        "structured_outputs": _structured_outputs(request, limits.closed_schemas),
        "logit_bias": None if request.logit_bias is None else _logit_bias(request.logit_bias, card),
        "bad_words_token_ids": bad_words(request.bad_words, backend) if request.bad_words else None,
    }


def sampling_params(
    request: Sampling,
    prompt: Sequence[int],
    card: ModelCard,
    limits: Limits,
    max_tokens: int | None,
    default_max_tokens: int | None,
    *,
    logprobs: int | None = None,
    echoed: int | None = None,
    name: str = "max_tokens",
    shared: Mapping[str, Any],
) -> SamplingParams:
    """The sampling parameters of one prompt. Raises InvalidRequest naming the field.

    echoed: log-probabilities of a prompt that the answer repeats. name: the request's name for max_tokens. shared:
    what `shared_params` returned, which overrides the fields of the request.
    """
    given = {field: getattr(request, field) for field in _SAME}
    given |= {field: card.defaults.get(field) for field in _RECOMMENDED if given[field] is None}
    if isinstance(request, Answers):
        given |= {"n": request.n, "prompt_logprobs": _prompt_logprobs(request, echoed, limits)}
    if max_tokens is None:
        name = "max_tokens"
        max_tokens = limits.default_max_new_tokens or card.defaults.get("max_tokens", default_max_tokens)
        if max_tokens is not None or limits.max_new_tokens is not None:
            max_tokens = max(min(UNLIMITED if max_tokens is None else max_tokens, card.max_model_len - len(prompt)), 1)
    if max_tokens is not None and limits.max_new_tokens is not None:
        max_tokens = min(max_tokens, limits.max_new_tokens)
    given |= shared
    chosen = {field: value for field, value in given.items() if value is not None}
    try:
        made = SamplingParams(**chosen, max_tokens=max_tokens, logprobs=logprobs)
        max_new_tokens(len(prompt), made, card.max_model_len)
    except InvalidRequest as error:
        if error.param != "max_tokens" or name == "max_tokens":
            raise
        raise InvalidRequest(str(error).replace("max_tokens", name), param=name, code=error.code) from error
    return made


def effective_params(
    request: Answers, made: SamplingParams, card: ModelCard, name: str | None
) -> dict[str, Any] | None:
    """The value and the source of each sampling field, if the request asks for them. name: of its max_tokens."""
    if not request.return_sampling_params:
        return None
    rows = {}
    for param in _REPORTED_PARAMS:
        sent = name if param == "max_tokens" else param
        if sent is not None and getattr(request, sent, None) is not None:
            source = "request"
        else:
            known = param in (*_RECOMMENDED, "max_tokens") and card.defaults.get(param) is not None
            source = "generation_config" if known else "default"
        value = getattr(made, param)
        rows[param] = {
            "value": {str(k): v for k, v in value.items()} if param == "logit_bias" else value,
            "source": source,
        }
    return rows


def max_prompt_tokens(request: Answers, card: ModelCard) -> int:
    """Prompts of this many tokens and more are refused. UNLIMITED where the prompt is to be truncated."""
    return card.max_model_len if request.truncate_prompt_tokens is None else UNLIMITED


def truncate(prompt: tuple[int, ...], request: Answers, card: ModelCard, max_tokens: int | None) -> tuple[int, ...]:
    """The prompt with at most truncate_prompt_tokens; -1: as many as leave space for the answer.

    Raises InvalidRequest naming the field.
    """
    keep, side = request.truncate_prompt_tokens, request.truncation_side
    if side not in (None, "left", "right"):
        raise InvalidRequest("truncation_side must be left or right", param="truncation_side")
    if keep is None:
        if side is not None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return prompt
    if keep == -1:
        keep = max(1, card.max_model_len - (max_tokens or 1))
    if keep < 1:
        raise InvalidRequest("truncate_prompt_tokens must be at least 1, or -1", param="truncate_prompt_tokens")
    return prompt[:keep] if side == "right" else prompt[-keep:]


def _check_counts(request: Sampling, card: ModelCard, limits: Limits) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > limits.max_stop_strings or sum(map(len, stops)) > limits.max_stop_chars:
        most = f"{limits.max_stop_strings} strings and {limits.max_stop_chars} characters"
        raise InvalidRequest(f"stop: at most {most} in all", param="stop")
    if len(request.bad_words or ()) > limits.max_bad_words:
        raise InvalidRequest(f"bad_words: at most {limits.max_bad_words}", param="bad_words")
    if sum(map(len, request.bad_words or ())) > limits.max_bad_chars:
        raise InvalidRequest(f"bad_words: at most {limits.max_bad_chars} characters in all", param="bad_words")
    if len(request.allowed_token_ids or ()) > card.vocab_size > 0:
        raise InvalidRequest(f"allowed_token_ids: the vocabulary has {card.vocab_size}", param="allowed_token_ids")
    for name in ("stop_token_ids", "allowed_token_ids"):
        in_vocabulary(getattr(request, name) or (), name, card)
    for name in ("stop_token_ids", "logit_bias"):
        if len(getattr(request, name) or ()) > limits.max_token_ids:
            raise InvalidRequest(f"{name}: at most {limits.max_token_ids} token ids", param=name)
    check_priority_and_timeout(request.priority, request.timeout, limits)


def _logit_bias(given: dict[str, float], card: ModelCard) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    in_vocabulary(list(bias), "logit_bias", card)
    return bias


def check_logprobs(name: str, count: int | None, limits: Limits) -> None:
    """Raises InvalidRequest for a number of log-probabilities out of range. name: of the field."""
    if count is not None and not 0 <= count <= limits.max_logprobs:
        raise InvalidRequest(f"{name} must be between 0 and {limits.max_logprobs}, not {count}", param=name)


def _prompt_logprobs(request: Answers, echoed: int | None, limits: Limits) -> int | None:
    check_logprobs("prompt_logprobs", request.prompt_logprobs, limits)
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("prompt_logprobs are not sent in streams: use stream: false", param="prompt_logprobs")
    return max((x for x in (request.prompt_logprobs, echoed) if x is not None), default=None)


# ---------------------------------------------------------------- structured outputs


_STRUCTURES = (
    "response_format",
    "structured_outputs",
    *map("guided_{}".format, ("json", "regex", "choice", "grammar")),
)


def _structured_outputs(request: Sampling, closed: bool) -> StructuredOutputsParams | None:
    """The structure that the answer must have, by any of its fields. Raises InvalidRequest naming the field.

    closed: objects have only properties that are listed, unless the request says otherwise.
    """
    given = [name for name in _STRUCTURES if _is_set(getattr(request, name))]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0]} and {given[1]} cannot be used together: send one", param=given[1])
    if request.guided_whitespace_pattern is not None and given != ["guided_json"]:
        raise InvalidRequest("guided_whitespace_pattern needs guided_json", param="guided_whitespace_pattern")
    if not given:
        return None
    value = getattr(request, given[0])
    if isinstance(value, ResponseFormat):
        return _from_response_format(value, closed)
    if isinstance(value, Structure):
        fields = {name: one for name, one in msgspec.structs.asdict(value).items() if one is not None}
        return StructuredOutputsParams(**{"disable_additional_properties": closed} | fields)
    one: dict[str, Any] = {given[0].removeprefix("guided_"): value, "disable_additional_properties": closed}
    return StructuredOutputsParams(**one, whitespace_pattern=request.guided_whitespace_pattern, param=given[0])


_TEXTS = ("echo", "stop", "include_stop_str_in_output", "bad_words", *_STRUCTURES)


def _check_has_text(request: Sampling, card: ModelCard) -> None:
    """Raise InvalidRequest for a field that needs text, where the model has no tokenizer."""
    if not card.has_text:
        for name in _TEXTS:
            if getattr(request, name, None) and _is_set(getattr(request, name)):
                raise needs_text(name)


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, ResponseFormat) and value.type == "text")


def _from_response_format(form: ResponseFormat, closed: bool) -> StructuredOutputsParams:
    param = "response_format"
    inner = form.json_schema.schema if form.json_schema is not None else None
    if form.type not in ("json_object", "json_schema"):
        hint = nearest(form.type[:64], ("text", "json_object", "json_schema"))
        raise InvalidRequest(f"{param}.type must be text, json_object or json_schema.{hint}", param=f"{param}.type")
    if inner is not None and form.schema is not None:
        raise InvalidRequest(f"{param}: the schema is given twice", param=param)
    schema = form.schema if inner is None else inner
    if schema is not None:
        return StructuredOutputsParams(json=schema, disable_additional_properties=closed, param=param)
    if form.type == "json_schema":
        raise InvalidRequest(f"{param}.json_schema.schema is required", param=f"{param}.json_schema.schema")
    return StructuredOutputsParams(json_object=True, param=param)
