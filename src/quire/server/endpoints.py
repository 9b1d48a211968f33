"""The endpoints that generate: for each path its requests, how they become calls, and the formats of its answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.errors import Interrupted, InvalidRequest
from quire.frontend.interface import Backend, Delta, ResultStream, iterate
from quire.frontend.offload import offload
from quire.server import calls, messages, outputs, responses, schemas
from quire.server.calls import Job
from quire.server.chunks import ChatChunks, CompletionChunks
from quire.server.embeddings import EmbeddingsRequest, embedding, embeddings
from quire.server.limits import Limits
from quire.server.outputs import ChoiceBuilder, TokenText, Usage
from quire.server.stream import Chunks, answer_all
from quire.types import BACKGROUND, TraceContext


class Endpoint(NamedTuple):
    """One path. make_job: a request as calls. chunks: encodes its stream, None if it has none. response: its answer.

    All three are offloaded with the request. The last argument of `response` is the system fingerprint.
    """

    request_type: type[schemas.Sampling] | type[EmbeddingsRequest]
    make_job: Callable[[Any, Backend, Limits], Job]
    chunks: Callable[[Any, Job, TokenText], Chunks[Delta]] | None
    response: Callable[[Any, Job, Sequence[ChoiceBuilder], Usage, TokenText, str], dict[str, Any]]


class TokenCountEndpoint(NamedTuple):
    """A path that counts the tokens of a prompt. response: the answer for a number of tokens."""

    request_type: type[schemas.Sampling]
    make_job: Callable[[Any, Backend, Limits], Job]
    response: Callable[[int], dict[str, Any]]


async def gather(
    job: Job, begin: Callable[[], ResultStream[Delta]], text: TokenText
) -> tuple[list[ChoiceBuilder], Usage]:
    """The complete choices of the stream that `begin` returns, and their usage. Raises what `Backend.answer` raises."""
    usage = Usage(job, text)
    choices = [ChoiceBuilder(job.splitter()) for _ in range(len(job.calls) * job.n)]
    with closing(begin()) as results:
        async for ready in iterate(results):
            for delta in ready:
                usage.add(delta)
                choices[delta.index].add(delta)
    return choices, usage


def with_fields(job: Job, **fields: Any) -> Job:
    """The same job, with these fields of its calls replaced."""
    return replace(job, calls=[replace(call, **fields) for call in job.calls])


_CHAT_NAMES = MappingProxyType({"prompt": "messages"})
_RESPONSES_NAMES = MappingProxyType(
    {
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "prompt": "input",
        "response_format": "text.format",
    }
)
_MESSAGES_NAMES = MappingProxyType({"stop": "stop_sequences", "prompt": "messages"})


@contextmanager
def rename_params(request: Any, names: Mapping[str, str]) -> Iterator[None]:
    """Within, errors name fields as this API does. names: from a chat request's name to this API's.

    Not where the request itself has the field by the first name.
    """
    try:
        yield
    except InvalidRequest as error:
        old, dot, rest = (error.param or "").partition(".")
        if type(error) is not InvalidRequest or old not in names or getattr(request, old, None) is not None:
            raise
        # Not `messages[3]`, whose numbers differ from those of items, nor "the prompt", which either API has.
        message = re.sub(rf"(?<!the )\b{old}\b(?!\[)", names[old], str(error))
        raise InvalidRequest(message, param=names[old] + dot + rest, code=error.code) from error


def _chat_job(request: schemas.ChatRequest, backend: Backend, limits: Limits) -> Job:
    with rename_params(request, _CHAT_NAMES):
        return calls.chat(request, backend, limits)


def _responses_job(request: responses.ResponsesRequest, backend: Backend, limits: Limits) -> Job:
    with rename_params(request, _RESPONSES_NAMES):
        return calls.chat(responses.as_chat(request), backend, limits, "resp_")


def _messages_job(request: messages.CountRequest, backend: Backend, limits: Limits) -> Job:
    thinks = backend.model().reasoning_parser != "none"
    with rename_params(request, _MESSAGES_NAMES):
        return calls.chat(messages.as_chat(request, thinks=thinks), backend, limits, "msg_")


TOKEN_COUNT_ENDPOINTS: Mapping[str, TokenCountEndpoint] = MappingProxyType(
    {
        "/v1/messages/count_tokens": TokenCountEndpoint(
            messages.CountRequest, _messages_job, lambda n: {"input_tokens": n}
        ),
        "/v1/responses/input_tokens": TokenCountEndpoint(
            responses.ResponsesRequest,
            _responses_job,
            lambda n: {"object": "response.input_tokens", "input_tokens": n},
        ),
    }
)

ENDPOINTS: Mapping[str, Endpoint] = MappingProxyType(
    {
        "/v1/completions": Endpoint(
            schemas.CompletionRequest,
            calls.completion,
            lambda request, job, text: CompletionChunks(job, text),
            lambda request, job, made, usage, text, by: outputs.completion(job, made, usage, text, by),
        ),
        "/v1/chat/completions": Endpoint(
            schemas.ChatRequest,
            _chat_job,
            lambda request, job, text: ChatChunks(job, text),
            lambda request, job, made, usage, text, by: outputs.chat(job, made, usage, text, by),
        ),
        "/v1/responses": Endpoint(
            responses.ResponsesRequest,
            _responses_job,
            responses.ResponseChunks,
            lambda request, job, made, usage, text, by: responses.response(request, job, made[0], usage, text),
        ),
        "/v1/messages": Endpoint(
            messages.MessagesRequest,
            _messages_job,
            lambda request, job, text: messages.MessageChunks(job, text),
            lambda request, job, made, usage, text, by: messages.message(job, made[0], usage),
        ),
        "/v1/embeddings": Endpoint(
            EmbeddingsRequest,
            embedding,
            None,
            lambda request, job, made, usage, text, by: embeddings(request, job, made, usage),
        ),
    }
)


def answerer(
    backend: Backend, limits: Limits, by: str, tenant: str = ""
) -> Callable[[str, bytes], Awaitable[dict[str, Any]]]:
    """A function from (path, body) to the whole answer, generated at background priority.

    by: the system fingerprint. It raises what the path would refuse the request with, and Interrupted for an answer
    that was aborted.
    """

    async def answer(path: str, body: bytes) -> dict[str, Any]:
        endpoint = ENDPOINTS[path]

        def parse() -> tuple[Any, Job]:
            request = schemas.parse(body, endpoint.request_type, limits)
            job = endpoint.make_job(request, backend, limits)
            return request, with_fields(job, priority=BACKGROUND, trace_context=TraceContext(tenant=tenant))

        request, job = await offload(len(body), parse)
        if job.stream:
            raise InvalidRequest("stream: batches take no streams: leave it out", param="stream")
        made, usage = await gather(job, partial(answer_all, backend, job.calls, job.n), backend.token_text)
        if any(one.finish_reason == "abort" for one in made):
            raise Interrupted("the answer was aborted")
        encode = partial(endpoint.response, request, job, made, usage, backend.token_text, by)
        return await offload(len(body) + outputs.cost(job, made), encode)

    return answer
