"""Requests as calls of the backend, one for each prompt, and what their answers must show.

Blocking: run in the same offloaded work as the parsing of the request (`frontend.offload`).
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import InvalidRequest
from quire.frontend.interface import Backend, Call, Delta, ModelCard
from quire.frontend.processor import hashed_salt
from quire.parsers.parts import Splitter, TextPart
from quire.parsers.reasoning import AnswerSplitter, Thinking, thoughts_ahead
from quire.parsers.tools.styles import STYLES
from quire.server.limits import Limits, check_answers
from quire.server.params import (
    check_logprobs,
    effective_params,
    max_prompt_tokens,
    sampling_params,
    shared_params,
    truncate,
)
from quire.server.prompts import encode, model, prompts, render
from quire.server.schemas import Answers, ChatRequest, CompletionRequest, GenerateRequest
from quire.server.tools import NO_TOOLS, ToolSet, make_tool_set
from quire.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The calls of one HTTP request, one for each prompt, and what the answer must show.

    id: of the answer, as clients see it. top: alternatives to show for each token, None for no log-probabilities.
    scored_only: max_tokens 0 with echo, which asks for the prompt's log-probabilities only. thinking: whether answers
    begin inside a thought without a mark of its own; None if the model does not reason. reasons: whether thoughts are
    shown. truncated: prompt tokens left out on request, None if the request does not ask for it. params: effective
    sampling parameters to show.
    """

    id: str
    model: str
    calls: list[Call]
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
    tools: ToolSet = NO_TOOLS
    reasons: bool = True
    truncated: int | None = None
    params: dict[str, Any] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def splitter(self) -> Splitter:
        """Splits the text of one choice into content, thoughts and tool calls."""
        calls = self.tools.reader()
        return calls if self.thinking is None else AnswerSplitter(Thinking(inside=self.thinking), calls)

    def shown_parts(self, splitter: Splitter, delta: Delta) -> list[TextPart]:
        """The parts of a delta that the answer shows. splitter: that of the delta's choice."""
        parts = splitter.feed(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *splitter.flush()]
        return [part for part in parts if part.kind != "reasoning" or self.reasons]


def completion(request: CompletionRequest, backend: Backend, limits: Limits) -> Job:
    """The job of a completion. Raises InvalidRequest or UnknownModel naming the field."""
    card = model(request.model, backend)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of must equal n: answers are not ranked", param="best_of")
    check_logprobs("logprobs", request.logprobs, limits)
    scored_only = bool(request.echo) and request.max_tokens == 0
    echoed = request.logprobs if request.echo else None
    given = prompts(request.prompt, card, limits)
    check_answers(len(given), request.n, limits)
    encoded = encode(given, request.add_special_tokens is not False, backend, max_prompt_tokens(request, card))
    max_tokens = 1 if scored_only else request.max_tokens
    shared = shared_params(request, backend, card, limits)
    calls = []
    num_truncated = 0
    for text, whole in encoded:
        ids = truncate(whole, request, card, max_tokens or 16)
        if len(ids) < len(whole):
            text = None
            num_truncated += len(whole) - len(ids)
        params = sampling_params(
            request, ids, card, limits, max_tokens, 16, logprobs=request.logprobs, echoed=echoed, shared=shared
        )
        calls.append(make_call("cmpl-", text, ids, request, params, limits))
    if request.echo:
        calls = [replace(call, text=backend.decode(call.prompt)) if call.text is None else call for call in calls]
    shown = effective_params(request, calls[0].sampling, card, "max_tokens")
    return _job(request, card, calls, num_truncated, top=request.logprobs, scored_only=scored_only, params=shown)


def chat(request: ChatRequest, backend: Backend, limits: Limits, prefix: str = "chatcmpl-") -> Job:
    """The job of a chat completion. prefix: of the answer's id. Raises InvalidRequest or UnknownModel naming the
    field."""
    card = model(request.model, backend)
    top = (request.top_logprobs or 0) if request.logprobs else None
    check_answers(1, request.n, limits)
    if request.top_logprobs and top is None:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    check_logprobs("top_logprobs", request.top_logprobs, limits)
    max_tokens, name = request.max_tokens, "max_tokens"
    # The newer of the two names goes first.
    if request.max_completion_tokens is not None:
        max_tokens, name = request.max_completion_tokens, "max_completion_tokens"
    tools = make_tool_set(request.tools, request.tool_choice, request.parallel_tool_calls, STYLES[card.tool_parser])
    text, whole = render(request.messages, request, backend, tools.for_template, max_prompt_tokens(request, card))
    shared = shared_params(request, backend, card, limits)
    form = tools.structure(shared["structured_outputs"])
    off = form is not None and (request.chat_template_kwargs or {}).get("enable_thinking") is False
    ahead = thoughts_ahead(card.reasoning_parser, text, _continued(request), off=off)
    ids = truncate(whole, request, card, max_tokens)
    shared["structured_outputs"] = form and replace(form, thoughts=ahead)
    if tools.parameters and tools.style.special and request.skip_special_tokens is None:
        shared["skip_special_tokens"] = False
    params = sampling_params(request, ids, card, limits, max_tokens, None, logprobs=top, name=name, shared=shared)
    return _job(
        request,
        card,
        [make_call(prefix, _continued(request), ids, request, params, limits)],
        len(whole) - len(ids),
        top=top,
        thinking=None if card.reasoning_parser == "none" else ahead == "open",
        tools=tools,
        reasons=request.include_reasoning is not False,
        params=effective_params(request, params, card, name),
    )


def generate(request: GenerateRequest, backend: Backend, limits: Limits) -> Job:
    """The job of `/v1/generate`. Raises InvalidRequest or UnknownModel naming the field."""
    card = model(request.model, backend)
    given = prompts(request.prompt, card, limits)
    if len(given) != 1:
        raise InvalidRequest("prompt: one prompt at a time here; /v1/completions takes several", param="prompt")
    [(text, ids)] = encode(given, request.add_special_tokens is not False, backend, card.max_model_len)
    shared = shared_params(request, backend, card, limits)
    params = sampling_params(
        request, ids, card, limits, request.max_new_tokens, 16, name="max_new_tokens", shared=shared
    )
    call = make_call("gen-", text, ids, request, params, limits)
    return Job(id=call.id, model=card.id, calls=[call])


def _continued(request: ChatRequest) -> str:
    """The last message where the answer continues it, which `echo` puts before the answer."""
    content = request.messages[-1].get("content")
    return content if request.continue_final_message and isinstance(content, str) else ""


def make_call(
    prefix: str,
    text: str | None,
    ids: tuple[int, ...],
    request: Any,
    params: SamplingParams,
    limits: Limits,
) -> Call:
    """A call with an id that begins with `prefix`. request: has priority, cache_salt and timeout."""
    return Call(
        id=f"{prefix}{uuid.uuid4().hex}",
        prompt=ids,
        text=text,
        sampling=params,
        priority=request.priority or 0,
        cache_salt=hashed_salt(request.cache_salt or ""),
        timeout=limits.timeout if request.timeout is None else request.timeout,
    )


def _job(request: Answers, card: ModelCard, calls: list[Call], num_truncated: int, **shown: Any) -> Job:
    """A job with the fields that completions and chat completions share. shown: the other fields."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    usage = options is not None and bool(options.include_usage)
    return Job(
        id=calls[0].id,
        model=card.id,
        calls=calls,
        n=request.n or 1,
        stream=bool(request.stream),
        usage=usage,
        every_usage=usage and options is not None and bool(options.continuous_usage_stats),
        echo=bool(request.echo),
        prompt_top=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        as_ids=bool(request.return_tokens_as_token_ids),
        truncated=None if request.truncate_prompt_tokens is None else num_truncated,
        **shown,
    )
