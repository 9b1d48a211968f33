"""What generates: for each path, its requests, how they become calls, and the shapes of its answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.backends.base import Answers, Backend, Delta, each
from quire.backends.offload import offload
from quire.errors import Interrupted, InvalidRequest
from quire.server import answers, calls, schemas
from quire.server import messages as anthropic
from quire.server import responses as stateless
from quire.server.answers import Gathered, Usage
from quire.server.calls import Job
from quire.server.chunks import ChatChunks, Chunks, CompletionChunks
from quire.server.embeddings import EmbeddingsRequest, embedding, embeddings
from quire.server.limits import Limits
from quire.server.logprobs import TokenText
from quire.server.messages_stream import MessageChunks
from quire.server.responses_stream import ResponseBuilder, ResponseChunks, whole
from quire.server.stream import together
from quire.values import IDLE, Origin


class Door(NamedTuple):
    """One path. asks: the type of its requests. job, chunks, whole: what becomes of them, streamed or not; all three
    are offloaded with the request.

    chunks is None where nothing is streamed. `by` is the system fingerprint.
    """

    asks: type[schemas.Sampling] | type[EmbeddingsRequest]
    job: Callable[[Any, Backend, Limits], Job]
    chunks: Callable[[Any, Job, TokenText], Chunks] | None
    whole: Callable[[Any, Job, Sequence[Gathered], Usage, TokenText, str], dict[str, Any]]


class Count(NamedTuple):
    """A path that counts a prompt's tokens. asks, job: as of a Door; told: the answer, for so many."""

    asks: type[schemas.Sampling]
    job: Callable[[Any, Backend, Limits], Job]
    told: Callable[[int], dict[str, Any]]


async def gather(job: Job, begin: Callable[[], Answers[Delta]], text: TokenText) -> tuple[list[Gathered], Usage]:
    """The whole answer of what is told. Raises what `Backend.answer` raises."""
    usage = Usage(job, text)
    choices = [Gathered(job.splitter()) for _ in range(len(job.calls) * job.n)]
    with closing(begin()) as said:
        async for ready in each(said):
            for delta in ready:
                usage.add(delta)
                choices[delta.index].add(delta)
    return choices, usage


_SPELLED_CHAT = MappingProxyType({"prompt": "messages"})
_SPELLED_RESPONSES = MappingProxyType(
    {
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "prompt": "input",
        "response_format": "text.format",
    }
)
_SPELLED_MESSAGES = MappingProxyType({"stop": "stop_sequences", "prompt": "messages"})


@contextmanager
def spelled(asked: Any, names: Mapping[str, str]) -> Iterator[None]:
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
    with spelled(asked, _SPELLED_MESSAGES):
        return calls.chat(anthropic.as_chat(asked, thinks=thinks), backend, limits, "msg_")


def _chat(asked: schemas.ChatRequest, backend: Backend, limits: Limits) -> Job:
    with spelled(asked, _SPELLED_CHAT):
        return calls.chat(asked, backend, limits)


def _responses(asked: stateless.ResponsesRequest, backend: Backend, limits: Limits) -> Job:
    with spelled(asked, _SPELLED_RESPONSES):
        return calls.chat(stateless.as_chat(asked), backend, limits, "resp_")


def behind(job: Job, priority: int) -> Job:
    """The same job at another priority."""
    return replace(job, calls=[replace(call, priority=priority) for call in job.calls])


def came(job: Job, origin: Origin, spend: Callable[[int], None] | None) -> Job:
    """The same job, where it came from, and what charges for its tokens (see `Call`)."""
    return replace(job, calls=[replace(call, origin=origin, spend=spend) for call in job.calls])


COUNTS: Mapping[str, Count] = MappingProxyType(
    {
        "/v1/messages/count_tokens": Count(anthropic.CountRequest, _counted, lambda n: {"input_tokens": n}),
        "/v1/responses/input_tokens": Count(
            stateless.ResponsesRequest, _responses, lambda n: {"object": "response.input_tokens", "input_tokens": n}
        ),
    }
)

DOORS: Mapping[str, Door] = MappingProxyType(
    {
        "/v1/completions": Door(
            schemas.CompletionRequest,
            calls.completion,
            lambda asked, job, text: CompletionChunks(job, text),
            lambda asked, job, made, usage, text, by: answers.completion(job, made, usage, text, by),
        ),
        "/v1/chat/completions": Door(
            schemas.ChatRequest,
            _chat,
            lambda asked, job, text: ChatChunks(job, text),
            lambda asked, job, made, usage, text, by: answers.chat(job, made, usage, text, by),
        ),
        "/v1/responses": Door(
            stateless.ResponsesRequest,
            _responses,
            ResponseChunks,
            lambda asked, job, made, usage, text, by: whole(ResponseBuilder(asked, job, text), job, made[0], usage),
        ),
        "/v1/messages": Door(
            anthropic.MessagesRequest,
            _counted,
            lambda asked, job, text: MessageChunks(job, text),
            lambda asked, job, made, usage, text, by: anthropic.message(job, made[0], usage),
        ),
        "/v1/embeddings": Door(
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
        door = DOORS[path]

        def prepared() -> tuple[Any, Job]:
            asked = schemas.parse(body, door.asks, limits)
            return asked, came(behind(door.job(asked, backend, limits), IDLE), Origin(tenant=tenant), None)

        asked, job = await offload(len(body), prepared)
        if job.stream:
            raise InvalidRequest("stream: nobody listens to a stream here: leave it out", param="stream")
        made, usage = await gather(job, partial(together, backend, job.calls, job.n), backend.token_text)
        if any(one.finish_reason == "abort" for one in made):
            raise Interrupted("the answer was broken off")
        whole = partial(door.whole, asked, job, made, usage, backend.token_text, by)
        return await offload(len(body) + answers.cost(job, made), whole)

    return answer
