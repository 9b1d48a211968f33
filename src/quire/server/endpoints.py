"""The endpoints that generate: for each path its requests, how they become calls, and the formats of its answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from quire.errors import Interrupted, InvalidRequest
from quire.frontend.interface import Backend, Call, Delta, ResultStream, iterate
from quire.frontend.offload import offload
from quire.server import calls, messages, ollama, outputs, pooling, responses, schemas, scores
from quire.server.calls import Job
from quire.server.embeddings import ClassifyRequest, EmbeddingsRequest, PoolingFields, embed, embeddings
from quire.server.limits import Limits
from quire.server.media import offload_reading
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.stream import Chunks, answer_all
from quire.types import BACKGROUND, TraceContext


class Endpoint(NamedTuple):
    """One path. make_job: a request as calls. chunks: encodes its stream, None if it has none. response: its answer.

    All three are offloaded with the request. any_type: as of `read_body`.
    """

    request_type: type[schemas.Sampling] | type[PoolingFields]
    make_job: Callable[[Any, Backend, Limits], Job]
    chunks: Callable[[Job], Chunks[Delta]] | None
    response: Callable[[Job, Sequence[ChoiceBuilder], Usage], dict[str, Any]]
    any_type: bool = False

    def job(self, request: Any, backend: Backend, limits: Limits, fingerprint: str, began: float, **fields: Any) -> Job:
        """The job of a request. fingerprint: the system's. fields: of each of its calls."""
        job = self.make_job(request, backend, limits)
        made = [replace(call, **fields) for call in job.calls]
        return replace(job, request=request, system_fingerprint=fingerprint, began=began, calls=made)


async def gather(job: Job, begin: Callable[[], ResultStream[Delta]]) -> tuple[list[ChoiceBuilder], Usage]:
    """The complete choices of the stream that `begin` returns, and their usage. Raises what `Backend.answer` raises."""
    usage = Usage(job)
    choices = [ChoiceBuilder(job) for _ in range(len(job.calls) * job.n)]
    with closing(begin()) as results:
        async for ready in iterate(results):
            for delta in ready:
                usage.add(delta)
                choices[delta.index].add(delta)
    return choices, usage


# From a chat request's names of fields to those of another API.
_REASONING_NAMES: Mapping[str, str] = {
    "reasoning_effort": "reasoning.effort",
    "thinking": "reasoning.enabled",
    "thinking_token_budget": "reasoning.max_tokens",
}
_CHAT_NAMES: Mapping[str, str] = {"prompt": "messages", **_REASONING_NAMES}
_RESPONSES_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    **_REASONING_NAMES,
    "response_format": "text.format",
}
_MESSAGES_NAMES: Mapping[str, str] = {
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}


MakeJob = Callable[[Any, Backend, Limits], Job]


def _chat_job(as_chat: Callable[[Any], schemas.ChatRequest], names: Mapping[str, str], prefix: str) -> MakeJob:
    """The `make_job` of requests that become chat requests. prefix: of the answer's id. names: see `_renamed`."""

    def make_job(request: Any, backend: Backend, limits: Limits) -> Job:
        return calls.chat(as_chat(request), backend, limits, prefix)

    return _naming(names, make_job)


def _naming(names: Mapping[str, str], make_job: MakeJob) -> MakeJob:
    """The same, with this API's names of fields in its errors. names: see `_renamed`."""

    def renaming(request: Any, backend: Backend, limits: Limits) -> Job:
        try:
            job = make_job(request, backend, limits)
        except InvalidRequest as error:
            if (renamed := _renamed(error, request, names)) is None:
                raise
            raise renamed from error
        return replace(job, calls=[_with_named_structure(call, request, names) for call in job.calls])

    return renaming


def _with_named_structure(call: Call, request: Any, names: Mapping[str, str]) -> Call:
    """The call with this API's name of the field that gave its structure, which the compiler's errors mention."""
    structure = call.sampling.structured_outputs
    if structure is None or structure.param not in names or getattr(request, structure.param, None) is not None:
        return call
    named = replace(structure, param=names[structure.param])
    return replace(call, sampling=replace(call.sampling, structured_outputs=named))


def _renamed(error: InvalidRequest, request: Any, names: Mapping[str, str]) -> InvalidRequest | None:
    """The error with the name of the field in this API. names: from a chat request's name to this API's.

    None where it names no such field, and where the request itself has the field by the first name.
    """
    old, dot, rest = (error.param or "").partition(".")
    if type(error) is not InvalidRequest or old not in names or getattr(request, old, None) is not None:
        return None
    # Not `messages[3]`, whose numbers differ from those of items, nor "the prompt", which either API has.
    message = re.sub(rf"(?<!the )\b{old}\b(?!\[)", names[old], str(error))
    return InvalidRequest(message, param=names[old] + dot + rest, code=error.code)


_message_job = _chat_job(messages.as_chat, _MESSAGES_NAMES, "msg_")
_response_job = _chat_job(responses.as_chat, _RESPONSES_NAMES, "resp_")


def continuing(endpoint: Endpoint, earlier: Sequence[Mapping[str, Any]] | None) -> Endpoint:
    """An endpoint of Responses, after items of a conversation. earlier: as of `responses.as_chat`."""
    as_chat = partial(responses.as_chat, earlier=earlier)
    return endpoint._replace(make_job=_chat_job(as_chat, _RESPONSES_NAMES, "resp_"))


def _input_tokens(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    return {"input_tokens": usage.prompt}


def _response_input_tokens(job: Job, choices: Sequence[ChoiceBuilder], usage: Usage) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": usage.prompt}


RESPONSE_INPUT_TOKENS = Endpoint(responses.ResponsesRequest, _response_job, None, _response_input_tokens)

RESPONSES = Endpoint(responses.ResponsesRequest, _response_job, responses.ResponseChunks, responses.response)

# Paths that count the tokens of a prompt, and generate nothing.
TOKEN_COUNT_ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/messages/count_tokens": Endpoint(messages.CountRequest, _message_job, None, _input_tokens),
    "/v1/responses/input_tokens": RESPONSE_INPUT_TOKENS,
}

GENERATE = Endpoint(schemas.GenerateRequest, calls.generate, outputs.GenerateChunks, outputs.generated)
GENERATE_PATHS = ("/generate", "/v1/generate")

ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/completions": Endpoint(
        schemas.CompletionRequest, calls.completion, outputs.CompletionChunks, outputs.completion
    ),
    "/v1/chat/completions": Endpoint(
        schemas.ChatRequest,
        _chat_job(lambda chat: chat, _CHAT_NAMES, "chatcmpl-"),
        outputs.ChatChunks,
        outputs.chat,
    ),
    "/v1/responses": RESPONSES,
    "/v1/messages": Endpoint(messages.MessagesRequest, _message_job, messages.MessageChunks, messages.message),
    "/v1/embeddings": Endpoint(EmbeddingsRequest, embed, None, embeddings),
    **dict.fromkeys(("/v1/score", "/score"), Endpoint(scores.ScoreRequest, scores.score, None, scores.scores)),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"), Endpoint(scores.RerankRequest, scores.rerank, None, scores.ranked)
    ),
    **dict.fromkeys(("/v1/classify", "/classify"), Endpoint(ClassifyRequest, pooling.classify, None, pooling.classes)),
    "/pooling": Endpoint(pooling.PoolingRequest, pooling.pool, None, pooling.pooled),
}


OLLAMA_ENDPOINTS: Mapping[str, Endpoint] = {
    "/api/chat": Endpoint(
        ollama.OllamaChatRequest,
        _naming({**ollama.FIELD_NAMES, "prompt": "messages"}, ollama.chat),
        ollama.OllamaLines,
        ollama.answer,
        any_type=True,
    ),
    "/api/generate": Endpoint(
        ollama.OllamaGenerateRequest,
        _naming({**ollama.FIELD_NAMES, "messages": "prompt"}, ollama.generate),
        ollama.OllamaLines,
        ollama.answer,
        any_type=True,
    ),
    "/api/embed": Endpoint(ollama.OllamaEmbedRequest, ollama.embed, None, ollama.embedded, any_type=True),
    "/api/embeddings": Endpoint(
        ollama.OllamaEmbeddingsRequest,
        _naming({"input": "prompt"}, ollama.embed),
        None,
        ollama.embedded_one,
        any_type=True,
    ),
}


def answerer(
    backend: Backend, limits: Limits, by: str, tenant: str = ""
) -> Callable[[str, bytes], Awaitable[dict[str, Any]]]:
    """A function from (path, body) to the whole answer, generated at background priority.

    by: the system fingerprint. It raises what the path would refuse the request with, and Interrupted for an answer
    that was aborted.
    """

    async def answer(path: str, body: bytes) -> dict[str, Any]:
        endpoint = ENDPOINTS[path]

        def parse(limits: Limits) -> Job:
            request = schemas.parse(body, endpoint.request_type, limits)
            fields = {"priority": BACKGROUND, "trace_context": TraceContext(tenant=tenant)}
            return endpoint.job(request, backend, limits, by, 0.0, **fields)

        job = await offload_reading(len(body), limits, parse)
        if job.stream:
            raise InvalidRequest("stream: batches do not stream: leave it out", param="stream")
        made, usage = await gather(job, partial(answer_all, backend, job.calls, job.n))
        if any(one.finish_reason == "abort" for one in made):
            raise Interrupted("the answer was aborted")
        return await offload(len(body) + outputs.cost(job, made), partial(endpoint.response, job, made, usage))

    return answer
