"""Requests into calls of the backend, one a prompt, and what the answer must show of them.

Blocking: it is offloaded with the request it belongs to (backends.offload).
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import InvalidRequest
from quire.frontend.interface import Backend, Call, ModelCard
from quire.frontend.request_builder import hashed_salt
from quire.parsers.parts import Splitter
from quire.parsers.reasoning import AnswerSplitter, Thinking, thoughts_ahead
from quire.parsers.tools.styles import STYLES
from quire.server.limits import Limits, check_answers
from quire.server.params import alike, check_logprobs, effective_params, longest, sampling, truncated
from quire.server.prompts import encoded, model, prompts, rendered
from quire.server.schemas import Answers, ChatRequest, CompletionRequest, GenerateRequest, Sampling
from quire.server.tools import NO_TOOLS, ToolSet, make_tool_set
from quire.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request's calls, one a prompt, and what the answer must show of them.

    id: of the answer, as clients see it. top: alternatives per token to show, None for no log-probabilities.
    scored_only: max_tokens 0 with echo, which asks for the prompt's log-probabilities alone. thinking: whether answers
    begin with thoughts though no mark says so; None if they have none. tools: what may be called. reasons: thoughts are
    told. truncated: prompt tokens left out on request, None if it did not. params: sampling parameters to tell.
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
        """For one choice: what tells its parts apart."""
        calls = self.tools.reader()
        return calls if self.thinking is None else AnswerSplitter(Thinking(inside=self.thinking), calls)


def completion(asked: CompletionRequest, backend: Backend, limits: Limits) -> Job:
    """Raises InvalidRequest or UnknownModel naming the field."""
    card = model(asked.model, backend)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise InvalidRequest("best_of must equal n: answers are not ranked", param="best_of")
    check_logprobs("logprobs", asked.logprobs, limits)
    scored_only = bool(asked.echo) and asked.max_tokens == 0
    echoed = asked.logprobs if asked.echo else None
    given = prompts(asked.prompt, card, limits)
    check_answers(len(given), asked.n, limits)
    several = encoded(given, asked.add_special_tokens is not False, backend, longest(asked, card))
    most = 1 if scored_only else asked.max_tokens
    same, salt = alike(asked, backend, card, limits), hashed_salt(asked.cache_salt or "")
    calls, left_out = [], 0
    for text, whole in several:
        ids, less = truncated(whole, asked, card, most or 16)
        text, left_out = None if less else text, left_out + less
        params = sampling(asked, ids, card, limits, most, 16, logprobs=asked.logprobs, echoed=echoed, changed=same)
        calls.append(_call("cmpl-", text, ids, asked, params, limits, salt))
    if asked.echo:
        calls = [replace(call, text=backend.decode(call.prompt)) if call.text is None else call for call in calls]
    shown = effective_params(asked, calls[0].sampling, card, "max_tokens")
    return _job(asked, card, calls, left_out, top=asked.logprobs, scored_only=scored_only, params=shown)


def chat(asked: ChatRequest, backend: Backend, limits: Limits, kind: str = "chatcmpl-") -> Job:
    """kind: what the answer's id begins with. Raises InvalidRequest or UnknownModel naming the field."""
    card = model(asked.model, backend)
    top = (asked.top_logprobs or 0) if asked.logprobs else None
    check_answers(1, asked.n, limits)
    if asked.top_logprobs and top is None:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    check_logprobs("top_logprobs", asked.top_logprobs, limits)
    most, name = asked.max_tokens, "max_tokens"
    if asked.max_completion_tokens is not None:  # the newer of the two names
        most, name = asked.max_completion_tokens, "max_completion_tokens"
    tools = make_tool_set(asked.tools, asked.tool_choice, asked.parallel_tool_calls, STYLES[card.tool_parser])
    text, ids = rendered(asked.messages, asked, backend, tools.for_template, longest(asked, card))
    changed = alike(asked, backend, card, limits)
    form = tools.structure(changed["structured_outputs"])
    off = form is not None and (asked.chat_template_kwargs or {}).get("enable_thinking") is False
    ahead = thoughts_ahead(card.reasoning_parser, text, _begun(asked), off=off)
    thinking = None if card.reasoning_parser == "none" else ahead == "open"
    ids, less = truncated(ids, asked, card, most)
    changed["structured_outputs"] = form and replace(form, thoughts=ahead)
    if tools.parameters and tools.style.special and asked.skip_special_tokens is None:
        changed["skip_special_tokens"] = False
    params = sampling(asked, ids, card, limits, most, None, logprobs=top, name=name, changed=changed)
    return _job(
        asked,
        card,
        [_call(kind, _begun(asked), ids, asked, params, limits, hashed_salt(asked.cache_salt or ""))],
        less,
        top=top,
        thinking=thinking,
        tools=tools,
        reasons=asked.include_reasoning is not False,
        params=effective_params(asked, params, card, name),
    )


def generate(asked: GenerateRequest, backend: Backend, limits: Limits) -> Job:
    """Raises InvalidRequest or UnknownModel naming the field."""
    card = model(asked.model, backend)
    several = prompts(asked.prompt, card, limits)
    if len(several) != 1:
        raise InvalidRequest("prompt: one prompt at a time here; /v1/completions takes several", param="prompt")
    [(text, ids)] = encoded(several, asked.add_special_tokens is not False, backend, card.max_model_len)
    same = alike(asked, backend, card, limits)
    params = sampling(asked, ids, card, limits, asked.max_new_tokens, 16, name="max_new_tokens", changed=same)
    call = _call("gen-", text, ids, asked, params, limits, hashed_salt(asked.cache_salt or ""))
    return Job(id=call.id, model=card.id, calls=[call])


def _begun(asked: ChatRequest) -> str:
    """What `echo` puts before a chat answer: the last message, when the answer goes on with it."""
    content = asked.messages[-1].get("content")
    return content if asked.continue_final_message and isinstance(content, str) else ""


def _call(
    kind: str,
    text: str | None,
    ids: tuple[int, ...],
    asked: Sampling,
    params: SamplingParams,
    limits: Limits,
    salt: str,
) -> Call:
    return Call(
        id=f"{kind}{uuid.uuid4().hex}",
        prompt=ids,
        text=text,
        sampling=params,
        priority=asked.priority or 0,
        cache_salt=salt,
        timeout=limits.timeout if asked.timeout is None else asked.timeout,
    )


def _job(asked: Answers, card: ModelCard, calls: list[Call], left_out: int, **shown: Any) -> Job:
    """shown: fields of Job that only one path has."""
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    usage = options is not None and bool(options.include_usage)
    return Job(
        id=calls[0].id,
        model=card.id,
        calls=calls,
        n=asked.n or 1,
        stream=bool(asked.stream),
        usage=usage,
        every_usage=usage and options is not None and bool(options.continuous_usage_stats),
        echo=bool(asked.echo),
        prompt_top=asked.prompt_logprobs,
        token_ids=bool(asked.return_token_ids),
        as_ids=bool(asked.return_tokens_as_token_ids),
        truncated=None if asked.truncate_prompt_tokens is None else left_out,
        **shown,
    )
