"""What generates: for each path, its requests, how they become calls, and the shapes of its answers."""

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
from quire.server import calls, outputs, schemas
from quire.server import messages as anthropic
from quire.server import responses as stateless
from quire.server.calls import Job
from quire.server.chunks import ChatChunks, Chunks, CompletionChunks
from quire.server.embeddings import EmbeddingsRequest, embedding, embeddings
from quire.server.limits import Limits
from quire.server.logprobs import TokenText
from quire.server.messages_stream import MessageChunks
from quire.server.outputs import ChoiceBuilder, Usage
from quire.server.responses_stream import ResponseBuilder, ResponseChunks, whole
from quire.server.stream import answer_all
from quire.types import BACKGROUND, TraceContext


class Endpoint(NamedTuple):
    """One path. request_type: of its requests. make_job, chunks, response: what becomes of them, streamed or not; all
    three are offloaded with the request.

    chunks is None where nothing is streamed. `by` is the system fingerprint.
    """

    request_type: type[schemas.Sampling] | type[EmbeddingsRequest]
    make_job: Callable[[Any, Backend, Limits], Job]
    chunks: Callable[[Any, Job, TokenText], Chunks] | None
    response: Callable[[Any, Job, Sequence[ChoiceBuilder], Usage, TokenText, str], dict[str, Any]]


class TokenCountEndpoint(NamedTuple):
    """A path that counts a prompt's tokens. request_type, make_job: as of an Endpoint; response: for so many."""

    request_type: type[schemas.Sampling]
    make_job: Callable[[Any, Backend, Limits], Job]
    response: Callable[[int], dict[str, Any]]


async def gather(
    job: Job, begin: Callable[[], ResultStream[Delta]], text: TokenText
) -> tuple[list[ChoiceBuilder], Usage]:
    """The whole answer of what is told. Raises what `Backend.answer` raises."""
    usage = Usage(job, text)
    choices = [ChoiceBuilder(job.splitter()) for _ in range(len(job.calls) * job.n)]
    with closing(begin()) as said:
        async for ready in iterate(said):
            for delta in ready:
                usage.add(delta)
                choices[delta.index].add(delta)
    return choices, usage


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
def rename_params(asked: Any, names: Mapping[str, str]) -> Iterator[None]:
    """Errors within name fields as this API does, unless the request has one of the other name itself."""
    try:
        yield
    except InvalidRequest as error:
        old, dot, rest = (error.param or "").partition(".")
        if type(error) is not InvalidRequest or old not in names or getattr(asked, old, None) is not None:
            raise
        # Messages are numbered otherwise than items, and "the prompt" is what comes of either.
        said = re.sub(rf"(?<!the )\b{old}\b(?!\[)", names[old], str(error))
        raise InvalidRequest(said, param=names[old] + dot + rest, code=error.code) from error


def _counted(asked: anthropic.CountRequest, backend: Backend, limits: Limits) -> Job:
    """Messages as a job. Raises InvalidRequest or UnknownModel naming the field."""
    thinks = backend.model().reasoning_parser != "none"
    with rename_params(asked, _MESSAGES_NAMES):
        return calls.chat(anthropic.as_chat(asked, thinks=thinks), backend, limits, "msg_")


def _chat(asked: schemas.ChatRequest, backend: Backend, limits: Limits) -> Job:
    with rename_params(asked, _CHAT_NAMES):
        return calls.chat(asked, backend, limits)


def _responses(asked: stateless.ResponsesRequest, backend: Backend, limits: Limits) -> Job:
    with rename_params(asked, _RESPONSES_NAMES):
        return calls.chat(stateless.as_chat(asked), backend, limits, "resp_")


def with_priority(job: Job, priority: int) -> Job:
    """The same job at another priority."""
    return replace(job, calls=[replace(call, priority=priority) for call in job.calls])


def with_trace_context(job: Job, origin: TraceContext, spend: Callable[[int], None] | None) -> Job:
    """The same job, where it came from, and what charges for its tokens (see `Call`)."""
    return replace(job, calls=[replace(call, trace_context=origin, spend=spend) for call in job.calls])


TOKEN_COUNT_ENDPOINTS: Mapping[str, TokenCountEndpoint] = MappingProxyType(
    {
        "/v1/messages/count_tokens": TokenCountEndpoint(
            anthropic.CountRequest, _counted, lambda n: {"input_tokens": n}
        ),
        "/v1/responses/input_tokens": TokenCountEndpoint(
            stateless.ResponsesRequest, _responses, lambda n: {"object": "response.input_tokens", "input_tokens": n}
        ),
    }
)

ENDPOINTS: Mapping[str, Endpoint] = MappingProxyType(
    {
        "/v1/completions": Endpoint(
            schemas.CompletionRequest,
            calls.completion,
            lambda asked, job, text: CompletionChunks(job, text),
            lambda asked, job, made, usage, text, by: outputs.completion(job, made, usage, text, by),
        ),
        "/v1/chat/completions": Endpoint(
            schemas.ChatRequest,
            _chat,
            lambda asked, job, text: ChatChunks(job, text),
            lambda asked, job, made, usage, text, by: outputs.chat(job, made, usage, text, by),
        ),
        "/v1/responses": Endpoint(
            stateless.ResponsesRequest,
            _responses,
            ResponseChunks,
            lambda asked, job, made, usage, text, by: whole(ResponseBuilder(asked, job, text), job, made[0], usage),
        ),
        "/v1/messages": Endpoint(
            anthropic.MessagesRequest,
            _counted,
            lambda asked, job, text: MessageChunks(job, text),
            lambda asked, job, made, usage, text, by: anthropic.message(job, made[0], usage),
        ),
        "/v1/embeddings": Endpoint(
            EmbeddingsRequest,
            embedding,
            None,
            lambda asked, job, made, usage, text, by: embeddings(asked, job, made, usage),
        ),
    }
)


def answerer(
    backend: Backend, limits: Limits, by: str, tenant: str = ""
) -> Callable[[str, bytes], Awaitable[dict[str, Any]]]:
    """(path, body) -> the whole answer, made in the gaps: while nobody else asks for anything. tenant: whose it is.

    It raises what the path would refuse with, and Interrupted for an answer that was broken off.
    """

    async def answer(path: str, body: bytes) -> dict[str, Any]:
        door = ENDPOINTS[path]

        def prepared() -> tuple[Any, Job]:
            asked = schemas.parse(body, door.request_type, limits)
            return asked, with_trace_context(
                with_priority(door.make_job(asked, backend, limits), BACKGROUND), TraceContext(tenant=tenant), None
            )

        asked, job = await offload(len(body), prepared)
        if job.stream:
            raise InvalidRequest("stream: nobody listens to a stream here: leave it out", param="stream")
        made, usage = await gather(job, partial(answer_all, backend, job.calls, job.n), backend.token_text)
        if any(one.finish_reason == "abort" for one in made):
            raise Interrupted("the answer was broken off")
        whole = partial(door.response, asked, job, made, usage, backend.token_text, by)
        return await offload(len(body) + outputs.cost(job, made), whole)

    return answer
